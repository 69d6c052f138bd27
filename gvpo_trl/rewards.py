"""Reward functions with TRL's signature.

TRL calls a reward function with `prompts`, `completions` (the conversation, with one message per turn),
`completion_ids`, every column of the dataset, and these lists with one value per row:

    task_id, trajectory                  the task and the whole `Trajectory`
    passed_tests, failed_tests           requirement texts, `None` for a trajectory that could not be scored
    failed_steps, turns                  counts

A reward function returns `None` for a row that it cannot score. If every function does, the mean of the group leaves
that row out, and the row has no effect on the weights. The same holds for a trajectory that could not be scored,
whatever the functions return for it.
"""

from collections.abc import Iterable
from typing import Any

from gvpo_trl.environments.base import Score


def passed_tests_share(
    passed_tests: list[list[str] | None], failed_tests: list[list[str] | None], **kwargs: Any
) -> list[float | None]:
    """Return the share of the task's unit tests that pass at the end, in [0, 1]: the paper's outcome reward R.

    Args:
        passed_tests: per row the requirements that hold, `None` when the environment was lost.
        failed_tests: per row the requirements that do not hold.
        **kwargs: the other columns, which this function does not use.
    """
    return [score and score.reward for score in _scores(passed_tests, failed_tests)]


def task_goal_completion(
    passed_tests: list[list[str] | None], failed_tests: list[list[str] | None], **kwargs: Any
) -> list[float | None]:
    """Return 1.0 where every unit test passes, else 0.0. This is the sparse reward; its mean is the TGC metric."""
    return [score and float(score.success) for score in _scores(passed_tests, failed_tests)]


def _scores(passed_tests: Iterable[list[str] | None], failed_tests: Iterable[list[str] | None]) -> list[Score | None]:
    return [
        None if passed is None or failed is None else Score(passed=tuple(passed), failed=tuple(failed))
        for passed, failed in zip(passed_tests, failed_tests, strict=True)
    ]
