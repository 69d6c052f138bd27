"""Runs a task's unit tests on what an episode saved, in a process of its own: standard library and appworld.

The host forks one process per evaluation, after the episode's process is gone. It alone reads ground truth, and it
ends with its one evaluation, so nothing that an episode left behind can reach the next.
"""


def warm_up() -> None:
    """Import what evaluations need and the world of an episode does not."""
    import appworld.evaluator  # noqa: F401
    import pytest  # noqa: F401  (behind AppWorld's assertions)


def evaluate(task_id: str, experiment: str) -> dict:
    """The requirement texts of the tests that passed and of those that did not."""
    from appworld.evaluator import evaluate_task

    tracker = evaluate_task(task_id=task_id, experiment_name=experiment, suppress_errors=True, save_report=False)
    passed = [entry["requirement"] for entry in tracker.passes]
    failed = [entry["requirement"] for entry in tracker.failures]
    # A test that never ran was not passed: AppWorld counts the announced ones.
    announced = [entry["requirement"] for entry in tracker.test_data or []]
    failed += [requirement for requirement in announced if requirement not in passed + failed]
    return {"passed": passed, "failed": failed}
