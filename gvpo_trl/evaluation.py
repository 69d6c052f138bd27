"""Evaluates a model: attempts a split's tasks and sums up the trajectories in a report.

`trainer.evaluate()` gives the same figures together with TRL's loss. The functions here are faster because they
compute no loss, and they return the trajectories.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from gvpo_trl.rollout.types import Trajectory
from gvpo_trl.training.outcomes import Ended, summarize
from gvpo_trl.training.room import warn_of_little_room

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from gvpo_trl.trainer import GVPOTrainer


def evaluate(trainer: "GVPOTrainer", dataset: "Dataset | IterableDataset", samples: int = 1) -> dict[str, float]:
    """Attempt every task `samples` times and return the figures of a report.

    Args:
        trainer: provides the model, sampling settings, environments and budgets; its model is not trained.
        dataset: rows with `prompt` and `task_id`, as `load_tasks` makes them, or a stream of such rows.
        samples: number of attempts at each task, sampled as in training.

    Returns:
        `tgc` and `sgc` in per cent; `reward`, `failed_step_share` and `docs_step_share` in [0, 1]; `turns_per_task`,
        `tasks`, `attempts` and `unscorable`.

    Raises:
        ValueError: the data set is empty, `samples` is less than 1, or the trainer has a `rollout_func` of another
            kind than `MultiTurnRollout`.
    """
    return summarize(attempt_tasks(trainer, dataset, samples))


def attempt_tasks(
    trainer: "GVPOTrainer",
    dataset: "Dataset | IterableDataset",
    samples: int = 1,
    *,
    done: Collection[int] = (),
    ended: Ended | None = None,
) -> list[Trajectory]:
    """Attempt every task `samples` times and return the trajectories.

    The attempts are shared out over the processes, and each process returns the trajectories of all.

    Args:
        trainer: provides the model, sampling settings, environments and budgets; its model is not trained.
        dataset: rows with `prompt` and `task_id`, or a stream of such rows.
        samples: number of attempts at each task.
        done: numbers of attempts that are left out, because an earlier call has made them. The others are the same
            attempts as without these.
        ended: is called on the process that makes an attempt as soon as it has ended, with its number and trajectory.

    Raises:
        ValueError: the data set is empty, `samples` is less than 1, or the trainer has a `rollout_func` of another
            kind than `MultiTurnRollout`.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1.")
    if not hasattr(trainer.rollout_func, "attempt"):
        raise ValueError(
            "This trainer's rollout_func cannot attempt tasks outside of a batch; use a MultiTurnRollout, or "
            "trainer.evaluate(dataset)."
        )
    rows = list(enumerate(row for row in dataset for _ in range(samples)))
    if not rows:
        raise ValueError("The data set is empty; choose another split or wider difficulties.")
    warn_of_little_room(trainer, [row for _, row in rows])
    rows = [(number, row) for number, row in rows if number not in done]
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        with trainer.accelerator.split_between_processes(rows) as mine:
            trajectories = trainer.rollout_func.attempt(
                [row["task_id"] for _, row in mine],
                [row["prompt"] for _, row in mine],
                trainer.rollout_context(),
                dates=[row.get("datetime") for _, row in mine],
                in_metrics=False,
                rows=[number for number, _ in mine],
                ended=ended and (lambda position, trajectory: ended(mine[position][0], trajectory)),
            )
    finally:
        trainer.model.train(was_training)
    return gather_object(trajectories)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON. The file is replaced as a whole, so nobody reads a half-written report.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
