"""Attempts at a split's tasks with the model as it is: the figures of a report, without a loss.

`trainer.evaluate()` gives the same figures in TRL's way, together with the loss; this is the faster path for a report,
and the one that keeps the trajectories.
"""

from typing import TYPE_CHECKING

from gvpo_trl.metrics import summarize
from gvpo_trl.rollout.types import Trajectory

if TYPE_CHECKING:
    from datasets import Dataset

    from gvpo_trl.trainer import GVPOTrainer


def evaluate(trainer: "GVPOTrainer", dataset: "Dataset", samples: int = 1) -> dict[str, float]:
    """Attempt every task `samples` times and sum up.

    Args:
        trainer: its model, sampling settings, environments and budgets are used; nothing is trained.
        dataset: rows with `prompt` and `task_id`, as `load_tasks` makes them.
        samples: attempts at each task, sampled as in training.

    Returns:
        `tgc` and `sgc` in per cent; `reward`, `failed_step_share` and `docs_step_share` in [0, 1]; `turns_per_task`,
        `tasks`, `attempts` and `unscorable`.

    Raises:
        ValueError: for an empty data set or fewer than one sample.
    """
    return summarize(attempt_tasks(trainer, dataset, samples))


def attempt_tasks(trainer: "GVPOTrainer", dataset: "Dataset", samples: int = 1) -> list[Trajectory]:
    """Attempt every task `samples` times; the attempts at one task stand together.

    Raises:
        ValueError: as `evaluate`.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1.")
    if len(dataset) == 0:
        raise ValueError("The data set is empty; choose another split or wider difficulties.")
    rows = [row for row in dataset for _ in range(samples)]
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        task_ids, prompts = [row["task_id"] for row in rows], [row["prompt"] for row in rows]
        return trainer.rollout_func.attempt(task_ids, prompts, trainer)
    finally:
        trainer.model.train(was_training)
