"""Silences messages of other libraries that are about their own code, or that are not true of a rollout.

Each entry is one message. Whoever wants to see a warning again puts a filter of their own before these, for example
`warnings.simplefilter("always")` or `python -W always`.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gvpo_trl.text import printable_line

logger = logging.getLogger(__name__)

NAMED = 3
"""Rows without a reward that a message names."""

WARNINGS = (
    (r"You are using 'rollout_func', which is an experimental feature", UserWarning),
    (r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated", FutureWarning),
)
"""Python warnings: the first is about the interface that this package is made for and whose TRL release it pins; the
second is caused by calls in TRL's code."""

REMINDERS = (("transformers.generation.stopping_criteria", "This is a friendly reminder"),)
"""Logged messages, by logger. transformers counts the padding of the longest row, while the rollout holds every row to
the length of the model's context."""


def quieten() -> None:
    """Silence the messages, but none for which the user has set a filter of their own. More calls change nothing."""
    for message, category in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, append=True)
    for name, _ in REMINDERS:
        logging.getLogger(name).addFilter(_is_no_reminder)


def _is_no_reminder(record: logging.LogRecord) -> bool:
    return not any(record.name == name and str(record.msg).startswith(words) for name, words in REMINDERS)


@contextmanager
def without_dump_of_rows() -> Iterator[None]:
    """Leave out TRL's message about a row without a reward, which quotes all that is known of the row."""
    logger = logging.getLogger("trl.trainer.grpo_trainer")
    logger.addFilter(_is_no_dump)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_dump)


def report_rows_without_reward(rows: Sequence[Mapping[str, Any]], rewards: torch.Tensor, traces: Path | None) -> None:
    """Log one line about the rows of this process's batch that no reward function scored.

    Args:
        rows: B rows of the batch.
        rewards: (B, functions) rewards of the rows, NaN where a function gave none.
        traces: the file with the full report of each row, where trajectories are written.
    """
    numbers = rewards.isnan().all(dim=1).nonzero().flatten().tolist()
    if not numbers:
        return
    named = ", ".join(f"{n} (task {printable_line(str(rows[n].get('task_id')))})" for n in numbers[:NAMED])
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    place = "set log_trajectories=True for a full report" if traces is None else f"full report in {traces}"
    logger.warning(
        "%d of %d rows have no reward and are left out: row %s%s; %s.", len(numbers), len(rows), named, more, place
    )


def _is_no_dump(record: logging.LogRecord) -> bool:
    return "All reward functions returned None for the following kwargs" not in str(record.msg)
