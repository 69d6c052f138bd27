"""Reward functions with TRL's signature.

A reward function of your own is called with `prompts`, `completions` (the conversation as it was: one message a turn),
`completion_ids`, every column of the dataset, and one value per row of

    task_id, trajectory                  the task and the whole `Trajectory`
    passed_tests, failed_tests           requirement texts (`None` when the trajectory could not be scored)
    failed_steps, turns                  counts

Return `None` for a row that cannot be scored: it is left out of its group's mean and moves nothing.
"""

from typing import Any


def passed_tests_share(
    passed_tests: list[list[str] | None], failed_tests: list[list[str] | None], **kwargs: Any
) -> list[float | None]:
    """The share of the task's unit tests that pass at the end, in [0, 1]: the paper's outcome reward R.

    Args:
        passed_tests: per row the requirements that hold, `None` when the environment was lost.
        failed_tests: per row the requirements that do not.
        **kwargs: the other columns, not needed here.
    """
    return [
        None if passed is None or failed is None else len(passed) / max(1, len(passed) + len(failed))
        for passed, failed in zip(passed_tests, failed_tests, strict=True)
    ]


def task_goal_completion(
    passed_tests: list[list[str] | None], failed_tests: list[list[str] | None], **kwargs: Any
) -> list[float | None]:
    """1.0 where every unit test passes, else 0.0: the sparse reward, and what TGC averages."""
    return [
        None if passed is None or failed is None else float(bool(passed) and not failed)
        for passed, failed in zip(passed_tests, failed_tests, strict=True)
    ]
