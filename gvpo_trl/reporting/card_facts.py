"""Collects what the model card says about a run: its base model, settings, evaluations and failing steps.

Nothing here returns the text of a task, unless the tasks may be published, and nothing returns a path of this machine.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard

from gvpo_trl.environments.appworld.tasks import matching_prompt
from gvpo_trl.environments.base import TaskSource

PACKAGES = ("gvpo-trl", "trl", "transformers", "torch", "peft", "datasets", "tokenizers", "accelerate", "vllm")
ADAPTERS = {"LORA": "LoRA", "IA3": "IA³", "ADALORA": "AdaLoRA"}
"""How papers spell the kinds of adapters of PEFT."""
AGGREGATIONS = {"grpo": "smtm", "dr_grpo": "smts", "dapo": "token-mean", "bnpo": "token-mean"}
"""Maps TRL's `loss_type` to the paper's name of the aggregation."""
_CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
_TGC = re.compile(r"(\w+)_tgc")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """The model that training started from."""

    id: str | None
    """Its id on the Hub; `None` if it has none that is known."""
    label: str
    """Its name in Markdown."""


def base_model(name_or_path: str | None) -> BaseModel:
    """Return the name of a base model, which may be an id of the Hub, a folder, or nothing at all.

    A folder in the Hub's cache has the id that it was downloaded by. Another folder keeps a relative path as its name.
    Of an absolute path the last part is the name (the last two for a checkpoint), because the rest says where a
    machine keeps its files.
    """
    if not name_or_path:
        return BaseModel(id=None, label="a model without a name")
    if cached := _CACHED.search(Path(name_or_path).as_posix() + "/"):
        name_or_path = f"{cached[1]}/{cached[2]}"
    elif Path(name_or_path).is_absolute() or Path(name_or_path).is_dir():
        label = f"the local model `{_folder_name(Path(name_or_path))}`"
        if origin := _base_of_folder(Path(name_or_path)):
            label += f" (itself made from [{origin}](https://huggingface.co/{origin}))"
        return BaseModel(id=None, label=label)
    return BaseModel(id=name_or_path, label=f"[{name_or_path}](https://huggingface.co/{name_or_path})")


def _folder_name(folder: Path) -> str:
    if not folder.is_absolute() and ".." not in folder.parts and folder.name:
        return folder.as_posix()
    parts = folder.resolve().parts
    return "/".join(parts[-2:] if parts[-1].startswith("checkpoint-") else parts[-1:])


def _base_of_folder(folder: Path) -> str | None:
    """Return the base model that a folder's own model card names."""
    if not (folder / "README.md").is_file():
        return None
    try:
        named = ModelCard.load(folder / "README.md").data.base_model
    except ValueError:  # its header is not a model card's
        return None
    return named if isinstance(named, str) and named.count("/") == 1 and not Path(named).is_absolute() else None


def adapter_of(model: Any) -> tuple[str | None, str | None]:
    """Return the kind of a model's adapter and its settings in words; `None` for a model without an adapter."""
    if not is_peft_model(model):
        return None, None
    config = model.peft_config[model.active_adapter if isinstance(model.active_adapter, str) else "default"]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights")
    values = {name: getattr(config, name, None) for name in names}
    words = [f"{name}={value}" for name, value in values.items() if value not in (None, False, True, 0.0)]
    words += [name for name, value in values.items() if value is True and name.startswith("use_")]
    return ADAPTERS.get(kind, kind), ", ".join(words)


def first_row(dataset: Any) -> Mapping[str, Any]:
    """Return the first row of a data set or a stream, `{}` if there is none."""
    return next(iter(dataset), {}) if dataset is not None else {}


def system_text(row: Mapping[str, Any], source: TaskSource | None) -> tuple[str | None, str | None, bool]:
    """Return the name and the text of a run's system text, and whether the run had one.

    A named prompt is given as its template, without what the task filled in. Any other text is given only where the
    tasks may be published.
    """
    texts = [message["content"] for message in row.get("prompt", ()) if message.get("role") == "system"]
    if not texts or not isinstance(texts[0], str):
        return None, None, bool(texts)
    if found := matching_prompt(texts[0]):
        return *found, True
    return None, texts[0] if source is not None and source.is_publishable else None, True


def evaluations(trainer: Any) -> list[dict[str, Any]]:
    """Return the figures of each evaluated data set: at the best checkpoint where it was loaded, else the last ones.

    Each has `name`, `split`, `tasks`, `step`, `tgc`, and `sgc` and `reward`, which are `None` where unknown.
    """
    state, best = trainer.state, None
    if trainer.args.load_best_model_at_end:
        best = getattr(state, "best_global_step", None)
    found: dict[str, dict[str, Any]] = {}
    for entry in state.log_history:
        for prefix in {match[1] for match in map(_TGC.fullmatch, entry) if match}:
            if prefix in found and best is not None and entry["step"] != best:
                continue
            dataset, name = _evaluated(trainer.eval_dataset, prefix)
            split = first_row(dataset).get("split")
            found[prefix] = {
                "name": split if name in ("eval", "") and split else name,
                "split": split,
                "tasks": len(dataset) if hasattr(dataset, "__len__") else None,
                "step": entry["step"],
                "tgc": entry[f"{prefix}_tgc"],
                "sgc": entry.get(f"{prefix}_sgc"),
                "reward": entry.get(f"{prefix}_reward"),
            }
    return [figures for figures in found.values() if figures["tgc"] == figures["tgc"]]


def _evaluated(eval_dataset: Any, prefix: str) -> tuple[Any, str]:
    """Return the data set that a prefix of metrics stands for (`None` if unknown) and the name of the evaluation."""
    name = prefix.removeprefix("eval_")
    if isinstance(eval_dataset, Mapping):
        return eval_dataset.get(name), name
    return (eval_dataset if prefix == "eval" else None), name


def failing_steps(history: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[tuple[str, list[float]]], str]:
    """Return how the share of failed steps developed: titles of columns, (kind, shares) for each row, and a note."""
    logged = [entry for entry in history if "steps/failed" in entry]
    if not logged:
        return [], [], ""
    window = max(1, len(logged) // 5)
    parts = [logged] if len(logged) == 1 else [logged[:window], logged[-window:]]
    titles = ["in the only log" if len(parts) == 1 else "at the start"] + ["at the end"] * (len(parts) - 1)
    names = sorted({name for entry in logged for name in entry if name.startswith("steps/failed/")})
    rows = [("failed", [_mean(part, "steps/failed") for part in parts])]
    for name in names:
        shares = [_mean(part, name) for part in parts]
        if any(shares):
            rows.append((f"failed: {name.removeprefix('steps/failed/').replace('_', ' ')}", shares))
    if any("steps/docs_lookup" in entry for entry in logged):
        rows.append(("looked up the API docs", [_mean(part, "steps/docs_lookup") for part in parts]))
    note = f"Means of the first {window} and of the last {window} of {len(logged)} logged generations of training."
    return titles, rows, note if len(parts) > 1 else "One logged generation of training."


def _mean(entries: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [entry[name] for entry in entries if name in entry]
    return sum(values) / len(values) if values else 0.0


def settings(trainer: Any, budgets: Any, adapter: str | None) -> list[tuple[str, Any]]:
    """Return (name, value) for each setting of GVPO, of the optimization and of the budgets, as they were resolved."""
    args = trainer.args
    aggregation = AGGREGATIONS.get(args.loss_type)
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    rows = {
        "failure penalty b (`failure_penalty`)": args.failure_penalty,
        "shaping (`shaping`)": args.shaping,
        "failure span (`failure_span`)": args.failure_span,
        "a turn without code is a failure (`no_code_is_failure`)": args.no_code_is_failure,
        "loss aggregation (`loss_type`)": f"{args.loss_type} ({aggregation})" if aggregation else args.loss_type,
        "scaling of advantages (`scale_rewards`)": args.scale_rewards,
        "clip range (`epsilon`, `epsilon_high`)": f"{args.epsilon}, {args.epsilon_high}",
        "KL coefficient (`beta`)": args.beta,
        "trajectories of a task (`num_generations`)": trainer.num_generations,
        "temperature (`temperature`)": args.temperature,
        "optimizer steps": f"{trainer.state.global_step} of {trainer.state.max_steps or args.max_steps}",
        "trajectories in an optimizer step": batch,
        "learning rate": f"{args.learning_rate:g} ({schedule})",
        "adapter": adapter,
        "turns of a trajectory (`max_turns`)": budgets.max_turns,
        "tokens of a turn (`max_turn_length`)": budgets.max_turn_length,
        "tokens of an observation (`max_observation_length`)": budgets.max_observation_length,
        "tokens after the prompt (`max_completion_length`)": budgets.max_completion_length,
        "tokens with the prompt (`max_context_length`)": budgets.max_context_length or "the model's own limit",
        "seed": args.seed,
    }
    return [(name, value) for name, value in rows.items() if value is not None]


def versions() -> list[tuple[str, str]]:
    """Return (package, version) of what is installed of `PACKAGES`."""
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found
