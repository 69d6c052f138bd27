"""Reads configuration files and their overrides with TRL's `TrlParser`, and refuses keys that it does not know."""

import argparse
import difflib
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from trl import TrlParser

if TYPE_CHECKING:
    from trl import ModelConfig

    from gvpo_trl.cli.arguments import ScriptArguments
    from gvpo_trl.config import GVPOConfig


class ConfigParser(TrlParser):
    """A `TrlParser` that names the nearest known key to an unknown one, and raises where argparse would exit."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.add_argument("--config", metavar="FILE", help="YAML file with any of the fields below.")

    def format_help(self) -> str:
        """Return the help in groups: what this package adds first, TRL's and transformers' fields behind it."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        left: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            left.setdefault(action.dest, []).append(action)  # a switch has a second action, `--no_…`
        for title, names in _help_groups():
            actions = [action for name in names for action in left.pop(name, [])]
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.start_section("everything else")
        formatter.add_arguments([action for actions in left.values() for action in actions])
        formatter.end_section()
        return formatter.format_help() + "\n" + self.epilog

    def error(self, message: str) -> None:
        """Raise instead of printing the usage of several hundred options and exiting."""
        raise ValueError(message)

    def parse_command(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """Parse a command's arguments, which override the values of the file that `--config` names.

        Raises:
            ValueError: a key is unknown, a value is wrong, or the file is not a YAML mapping.
            OSError: the file cannot be read.
        """
        argv = _split_config_option(argv)
        self._refuse_unknown_options(argv)
        if "--config" in argv:
            position = argv.index("--config")
            if position + 1 == len(argv) or argv[position + 1].startswith("--"):
                raise ValueError("--config needs the path of a YAML file")
            self._check_file(Path(argv[position + 1]))
        outputs = self.parse_args_and_config(argv, return_remaining_strings=True)
        if outputs[-1]:
            raise ValueError(f"unexpected argument {outputs[-1][0]!r}; fields are given as --field value")
        return outputs[: len(self.dataclass_types)]

    def _refuse_unknown_options(self, argv: Sequence[str]) -> None:
        known = self._option_string_actions
        for argument in argv:
            option = argument.partition("=")[0]
            if option.startswith("--") and option not in known:
                names = {action.dest for action in self._actions}
                raise ValueError(f"unknown option {option}" + nearest(option, names, "--"))

    def _check_file(self, path: Path) -> None:
        """Check the keys and values of a file, and set the environment variables of its `env` key.

        The variables are set here because some libraries read them when they are imported.
        """
        config = read_yaml(path)
        environment = config.pop("env", None) or {}
        if not isinstance(environment, dict):
            raise ValueError(f"{path}: `env` must map names of environment variables to values")
        actions = {action.dest: action for action in self._actions if action.dest not in ("help", "config")}
        for key, value in config.items():
            if key not in actions:
                raise ValueError(f"{path}: unknown key `{key}`" + nearest(str(key), [*actions, "env"]))
            _check_value(path, actions[key], value)
        os.environ.update({str(name): str(value) for name, value in environment.items()})


def _help_groups() -> list[tuple[str, list[str]]]:
    """Return the titles of the help's groups and the fields in each."""
    from transformers import TrainingArguments
    from trl import GRPOConfig, ModelConfig

    from gvpo_trl.cli.arguments import ScriptArguments
    from gvpo_trl.config import GVPOConfig

    ours = [name for name in GVPOConfig.__annotations__ if name not in GRPOConfig.__dataclass_fields__]
    changed = [name for name in GVPOConfig.__annotations__ if name in GRPOConfig.__dataclass_fields__]
    common = ["model_name_or_path", "output_dir", "learning_rate", "max_steps", "seed", "resume_from_checkpoint"]
    return [
        ("first of all", ["help", "config", *common]),
        ("tasks and environment (gvpo-trl)", [*ScriptArguments.__dataclass_fields__]),
        ("method and rollout (gvpo-trl)", ours),
        ("fields of TRL with a default of the paper", changed),
        ("model and adapter (TRL)", [*ModelConfig.__dataclass_fields__]),
        ("GRPO (TRL)", [*GRPOConfig.__annotations__]),
        ("training (transformers)", [*TrainingArguments.__dataclass_fields__]),
    ]


EXAMPLES = {
    "train": """\
examples:
  gvpo-trl train --config recipes/quickstart/config.yaml
  gvpo-trl train --config recipes/quickstart/config.yaml --learning_rate 1e-4 --shaping none --output_dir runs/grpo
  gvpo-trl train --config recipes/quickstart/config.yaml --resume_from_checkpoint true
""",
    "evaluate": """\
examples:
  gvpo-trl evaluate --config recipes/quickstart/config.yaml --eval_split test_normal --eval_samples 4
  gvpo-trl evaluate --config recipes/quickstart/config.yaml --adapter_name_or_path runs/lora --temperature 0
An interrupted evaluation goes on with the same command.
""",
}
"""The last lines of each command's help."""


def build_parser(command: str) -> ConfigParser:
    """Make the parser of `gvpo-trl train` or `gvpo-trl evaluate`."""
    from trl import ModelConfig

    from gvpo_trl.cli.arguments import ScriptArguments
    from gvpo_trl.config import GVPOConfig

    return ConfigParser(
        (ScriptArguments, GVPOConfig, ModelConfig),
        prog=f"gvpo-trl {command}",
        usage=f"gvpo-trl {command} --config FILE [--field value ...]",
        epilog=EXAMPLES[command],
    )


def parse_config(command: str, argv: Sequence[str]) -> "tuple[ScriptArguments, GVPOConfig, ModelConfig]":
    """Parse and check the arguments of a command, before a model is loaded or an environment is started.

    Raises:
        ValueError: a key is unknown, a value is wrong, or no model is named.
        OSError: the file cannot be read.
    """
    _silence_known_warnings()
    script_args, training_args, model_args = build_parser(command).parse_command(argv)
    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is missing; name a model of the Hub or a local folder")
    return script_args, training_args, model_args


def _silence_known_warnings() -> None:
    """Hide two warnings that a user cannot act on.

    TRL sets a field that transformers has deprecated, and it calls `rollout_func`, which this package needs,
    experimental.
    """
    warnings.filterwarnings(
        "ignore", message=r"`(is_)?gradient_checkpointing\w*` is deprecated", category=FutureWarning
    )
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error about an unknown name: `; did you mean …?`, or nothing if no known name is close."""
    name = name.lstrip("-").replace("-", "_")
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key that is given twice: YAML would drop its first value silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: `{key_node.value}` is given twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file.

    Raises:
        ValueError: the file is not a YAML mapping, or it gives a key twice.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {path}")
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a mapping of fields to values")
    return config


def _check_value(path: Path, action: argparse.Action, value: Any) -> None:
    """Check a value of a file as argparse checks one of the command line.

    `TrlParser` hands the file's values to argparse as defaults, and argparse does not check defaults. Strings are the
    exception: argparse converts them, so they are left to it (YAML reads `5e-5` as a string).
    """
    if isinstance(value, list) and action.nargs in ("+", "*"):
        for item in value:
            _check_value(path, action, item)
        return
    if action.choices is not None and value is not None and value not in action.choices:
        allowed = ", ".join(str(choice) for choice in action.choices)
        hint = "; YAML reads a bare no as false: quote it" if value is False and "no" in action.choices else ""
        raise ValueError(f"{path}: {action.dest}={value!r} is none of {allowed}{hint}")
    integer = isinstance(value, int) and not isinstance(value, bool)
    kind = getattr(action.type, "__name__", "")
    if kind == "int" and not (integer or isinstance(value, str | None)):
        raise ValueError(f"{path}: {action.dest}={value!r} must be a whole number")
    if kind == "float" and not (integer or isinstance(value, float | str | None)):
        raise ValueError(f"{path}: {action.dest}={value!r} must be a number")
    if kind == "string_to_bool" and not isinstance(value, bool | str | None):
        raise ValueError(f"{path}: {action.dest}={value!r} must be true or false")


def _split_config_option(argv: Sequence[str]) -> list[str]:
    """Turn `--config=FILE` into two arguments, the only form that `TrlParser` looks for."""
    split: list[str] = []
    for argument in argv:
        if argument.startswith("--config="):
            split += ["--config", argument.removeprefix("--config=")]
        else:
            split.append(argument)
    return split
