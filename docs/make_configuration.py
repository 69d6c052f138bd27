"""Writes docs/configuration.md from the dataclasses that hold the fields: `python docs/make_configuration.py`.

Names, types and defaults come from the dataclasses, descriptions from their docstrings. A test compares the committed
page with what this script writes.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("configuration.md")
SOURCES = {
    "failure_penalty": "the paper's",
    "shaping": "the paper's",
    "loss_type": "the paper's",
    "scale_rewards": "the paper's",
    "num_generations": "the paper's",
    "epsilon": "DAPO's",
    "epsilon_high": "DAPO's",
    "beta": "LOOP's and DAPO's",
    "max_turns": "LOOP's",
    "max_turn_length": "LOOP's",
    "max_observation_length": "LOOP's",
    "mask_truncated_completions": "TRL's",
}
"""Whose value a default of `GVPOConfig` is, where it is not our own."""
DOCUMENTATION = "https://huggingface.co/docs"
HEADER = """\
# Every configuration field

<!-- Made by `python docs/make_configuration.py` from the dataclasses; a test keeps it current. Don't edit it here. -->

A field is an argument of `GVPOConfig` in Python, a key of the YAML file of `gvpo-trl train --config FILE`, and
`--field value` on the command line, which overrides the file. An unknown key is an error that names the nearest known
one. [recipes](../recipes/README.md) holds whole files.
"""
OF_TRL = """\
## Fields of TRL and transformers

These keep TRL's names, meanings and defaults; TRL's documentation describes them. `GVPOConfig` refuses values that
contradict one advantage per token or the rollout, such as `importance_sampling_level="sequence"`, `loss_type="sapo"`,
`off_policy_mask_threshold` or `use_transformers_continuous_batching=True`, and names what to use instead.

"""


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


def page() -> str:
    """Return the text of docs/configuration.md.

    Raises:
        ValueError: a field is not described in the docstring of its class, or the docstring describes no field.
    """
    from trl import GRPOConfig, ModelConfig

    from gvpo_trl import GVPOConfig
    from gvpo_trl.cli.arguments import ScriptArguments

    own = {name for name in GVPOConfig.__annotations__ if name not in GRPOConfig.__dataclass_fields__}
    parts = [HEADER]
    for title, entries in described(GVPOConfig, own).items():
        parts.append(f"## {title or 'Objective'}\n\n" + table(GVPOConfig, entries, SOURCES))
    names = {field.name for field in dataclasses.fields(ScriptArguments)}
    introduction = (
        "The command line and its YAML files have these in addition. In Python they are arguments of "
        "`AppWorldEnvironments`, `load_tasks`, `MultiTurnRollout` and the evaluation.\n\n"
    )
    (entries,) = described(ScriptArguments, names).values()
    parts.append("## Data and environment\n\n" + introduction + table(ScriptArguments, entries))
    ours = {name for entries in described(GVPOConfig, own).values() for name in entries}
    theirs = [name for name in GRPOConfig.__annotations__ if name not in ours]
    model = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in names]
    parts.append(
        OF_TRL
        + f"**[GRPOConfig]({DOCUMENTATION}/trl/grpo_trainer#trl.GRPOConfig):** {listed(theirs)}.\n\n"
        + f"**[ModelConfig]({DOCUMENTATION}/trl/clis)**, for the command line alone: "
        + f"{listed(model)}.\n\n"
        + f"**[TrainingArguments]({DOCUMENTATION}/transformers/main_classes/trainer#transformers.TrainingArguments"
        + "):** all fields of the transformers Trainer, such as `max_steps`, `save_steps`, `logging_steps` and "
        + "`report_to`.\n"
    )
    return "\n".join(parts)


FIELD = re.compile(r"(\w+) \(`[^`]+`(?: or `[^`]+`)*(?:, \*optional\*)?(?:, defaults to `([^`]*)`)?\)")
"""The heading of a field in a docstring, with its name and its default."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a docstring says about a field."""

    default: str | None
    """The default as the docstring writes it, or `None` where it gives none."""
    text: str


def described(owner: type, required: set[str]) -> dict[str, dict[str, Description]]:
    """Return the groups of a class's docstring, each of which maps fields to their descriptions, in its order.

    Raises:
        ValueError: a required field has no description, a description belongs to no field, or it gives another default
            than the class.
    """
    groups: dict[str, dict[str, Description]] = {}
    group = ""
    for line, text in _paragraphs(owner.__doc__ or ""):
        if line.startswith("> "):
            group = line.removeprefix("> Parameters that control the ").capitalize()
            continue
        for name, default in FIELD.findall(line):
            groups.setdefault(group, {})[name] = Description(default or None, text)
    found = {name: entry for entries in groups.values() for name, entry in entries.items()}
    fields = {field.name: field.default for field in dataclasses.fields(owner)}
    if wrong := sorted((required - found.keys()) | (found.keys() - fields.keys())):
        raise ValueError(f"{owner.__name__}: describe each field, and nothing else, in the docstring; see {wrong}")
    for name, entry in found.items():
        if fields[name] is not None and entry.default != _written(fields[name]):
            raise ValueError(f"{owner.__name__}: {name} has default {fields[name]!r}, its docstring {entry.default}")
    return groups


def _paragraphs(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield each heading of a docstring's parameters with the text below it."""
    body = re.split(r"^(?:Parameters|Args):\n", inspect.cleandoc(docstring), maxsplit=1, flags=re.MULTILINE)[1]
    for entry in re.findall(r"^ {4}(\S.*\n(?:^ {8}.*\n|^\n(?= {8}))*)", body + "\n", flags=re.MULTILINE):
        heading, *lines = entry.splitlines()
        yield heading, " ".join(line.strip() for line in lines)


def table(owner: type, entries: dict[str, Description], sources: dict[str, str] | None = None) -> str:
    """Return a table with one row per field. A default of `None` that stands for a value is given as that value."""
    fields = {field.name: field for field in dataclasses.fields(owner)}
    head = ["field", "type", "default", *(["whose value"] if sources else []), "what it does"]
    rows = [head, ["---"] * len(head)]
    for name, entry in entries.items():
        default = entry.default or _written(fields[name].default)
        whose = [sources.get(name, "ours")] if sources else []
        rows.append([f"`{name}`", _type(owner, name), f"`{default}`", *whose, entry.text])
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def _written(value: object) -> str:
    """Return a value as the docstrings write it, with double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _type(owner: type, name: str) -> str:
    # The annotation, and not the field's type, which transformers' parser of the command line replaces.
    kind = next(vars(base)["__annotations__"][name] for base in owner.__mro__ if name in base.__annotations__)
    text = kind.__name__ if type(kind) is type else str(kind)
    return f"`{text.removesuffix(' | None')}`"


def listed(names: list[str]) -> str:
    """Return the names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
