"""Completes the table of completions that TRL writes with `log_completions`.

TRL prints the table and writes it to parquet files and to trackers, all from its `_logs`, which hold GRPO's advantage.
These functions replace it by the shaped one and add what GVPO knows of an attempt.
"""

from collections import deque
from collections.abc import Mapping, Sequence
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

