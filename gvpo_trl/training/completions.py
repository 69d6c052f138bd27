"""Completes the table of completions that TRL writes with `log_completions`.

TRL prints the table and writes it to parquet files and to trackers, all from its `_logs`, which hold GRPO's advantage.
These functions replace it by the shaped one and add what GVPO knows of an attempt.
"""

import copy
import importlib.util
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from gvpo_trl.rollout.types import Trajectory
from gvpo_trl.text import printable_values


def complete_table(
    logs: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    shaped: torch.Tensor,
    action_mask: torch.Tensor,
    failed_mask: torch.Tensor,
) -> None:
    """Put the shaped advantages and GVPO's columns into the newest rows of TRL's table, and make its texts printable.

    The `advantage` of a row becomes the mean of its shaped advantages over its action tokens. `failed_advantage` is
    their mean over the tokens of its failed steps, and empty without such tokens. A rollout that returns trajectories
    also gets the columns `failed_steps`, `turns` and `stop`.

    Args:
        logs: TRL's `_logs`, with deques of one value per row; `extra` holds columns that TRL does not know.
        rows: B rows of this process's batch, which hold what the rollout returned.
        shaped: (B, T) shaped advantages.
        action_mask: (B, T) true on sampled tokens.
        failed_mask: (B, T) true on the tokens of failed steps, which are a part of `action_mask`.
    """
    extra: dict[str, list[Any]] = {"failed_advantage": _means(shaped, failed_mask)}
    if all("trajectory" in row for row in rows):
        extra |= {
            "failed_steps": [failed_steps(row["trajectory"]) for row in rows],
            "turns": [len(row["trajectory"].steps) for row in rows],
            "stop": [str(row["trajectory"].stop) for row in rows],
        }
    length = len(logs["prompt"])
    _set_newest(logs["advantages"], [mean or 0.0 for mean in gather_object(_means(shaped, action_mask))], length)
    for name, values in extra.items():
        _set_newest(logs["extra"][name], gather_object(values), length)
    for logged in (logs["prompt"], logs["completion"], *logs["extra"].values()):
        texts = [printable_values(entry) for entry in logged]
        logged.clear()
        logged.extend(texts)


def _means(values: torch.Tensor, mask: torch.Tensor) -> list[float | None]:
    """Return the mean of each row over the tokens of the mask, `None` for a row without any."""
    counts = mask.bool().sum(dim=1)
    sums = (values * mask.bool()).sum(dim=1)
    return [round(total / n, 6) if n else None for total, n in zip(sums.tolist(), counts.tolist(), strict=True)]


def failed_steps(trajectory: Trajectory) -> int:
    """Return how many steps of a trajectory failed."""
    return sum(step.failure is not None for step in trajectory.steps)


def _set_newest(column: deque, values: Sequence[Any], length: int) -> None:
    """Make the values the last ones of a column that has `length` values afterwards, in a table that has as many."""
    older = max(length - len(values), 0)
    while len(column) > older:
        column.pop()
    while len(column) < older:
        column.appendleft(None)
    column.extend(values)


def emptied(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of TRL's `_logs` without rows."""
    empty = {name: copy.copy(column) for name, column in logs.items()}
    for column in empty.values():
        column.clear()
    return empty


@contextmanager
def own_table(trainer: Any, figures: Mapping[str, Any], show: Callable[..., None]) -> Iterator[None]:
    """Make a call of TRL's `log` print a table that fits a terminal, and write an evaluation's table to its own file.

    TRL would show each column beside the conversations, which leaves too little room for them, so this function prints
    the table with one column for all that GVPO knows. TRL names the file after the step alone, so an evaluation would
    replace the table of the training; the file of an evaluation also has its prefix in its name.

    Args:
        trainer: a `GVPOTrainer` in whose `log` this runs.
        figures: the metrics that are logged.
        show: TRL's `print_prompt_completions_sample`.
    """
    if not (trainer.log_completions and trainer.accelerator.is_main_process):
        yield
        return
    prefix, step = evaluation_prefix(figures), trainer.state.global_step
    kept = trainer._logs, trainer.num_completions_to_print
    file = Path(trainer.args.output_dir) / "completions" / f"completions_{step:05d}.parquet"
    training = file.with_suffix(".training")
    if prefix and trainer._evaluation_logs is not None:
        trainer._logs = trainer._evaluation_logs
        if file.exists():
            file.rename(training)
    table = trainer._logs
    trainer.num_completions_to_print = 0  # TRL prints nothing
    try:
        yield
    finally:
        trainer._logs, trainer.num_completions_to_print = kept
        if prefix and file.exists():
            file.rename(file.with_stem(f"{file.stem}_{prefix}"))
        if training.exists():
            training.rename(file)
    is_summary = "train_runtime" in figures  # its rows have been printed with the last step
    if importlib.util.find_spec("rich") is not None and table["prompt"] and not is_summary:
        columns = [table[name] for name in ("prompt", "completion", "rewards", "advantages")]
        show(*columns, step, trainer.num_completions_to_print, extra=_narrow(table["extra"]))


def evaluation_prefix(figures: Mapping[str, Any]) -> str | None:
    """Return the prefix of an evaluation's metrics, such as "eval_dev", or `None` if training logs them."""
    prefixes = [name.removesuffix("_runtime") for name in figures if name.endswith("_runtime")]
    return next((prefix for prefix in prefixes if prefix != "train"), None)


def _narrow(extra: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the columns with those of GVPO in a single one, whose lines are short."""
    given = {name: extra[name] for name in ("turns", "failed_steps", "failed_advantage", "stop") if name in extra}
    rows = zip(*given.values(), strict=True)
    return {name: values for name, values in extra.items() if name not in given} | {
        "Attempt": ["\n".join(_lines(dict(zip(given, row, strict=True)))) for row in rows]
    }


def _lines(attempt: Mapping[str, Any]) -> Iterator[str]:
    if attempt.get("turns") is not None:
        yield f"{attempt['turns']} turns"
        yield f"{attempt['failed_steps']} failed"
    if attempt["failed_advantage"] is not None:
        yield f"({attempt['failed_advantage']:.2f})"
    if attempt.get("stop") is not None:
        yield attempt["stop"].replace("_", " ")
