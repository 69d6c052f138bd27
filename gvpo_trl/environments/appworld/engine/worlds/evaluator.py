"""Runs a task's unit tests on what an episode saved, in a process of its own: standard library and appworld.

The host forks one process per evaluation, after the episode's process is gone. It alone reads ground truth, and it
ends with its one evaluation, so nothing that an episode left behind can reach the next.
"""

import json
import os
import shutil
import sqlite3

VALUE_ERRORS = (ValueError, TypeError, OverflowError, KeyError, AttributeError, sqlite3.DataError)
"""What values raise that the database does not take; a broken disk raises others."""


def warm_up() -> None:
    """Import what evaluations need and the world of an episode does not."""
    import appworld.evaluator  # noqa: F401
    import pytest  # noqa: F401  (behind AppWorld's assertions)


def evaluate(task_id: str, experiment: str) -> dict:
    """The requirement texts of the tests that passed and of those that did not.

    An API takes some values that its database does not when the state is replayed, such as an amount of infinity. Then
    the answer is `unreplayable`, which is the agent's doing if the task's own state can be evaluated.
    """
    from appworld.evaluator import evaluate_task
    from sqlalchemy.exc import DataError, IntegrityError

    try:
        tracker = evaluate_task(task_id=task_id, experiment_name=experiment, suppress_errors=True, save_report=False)
    except json.JSONDecodeError:
        raise  # a file that is broken is our fault
    except (DataError, IntegrityError, sqlite3.IntegrityError, sqlite3.InterfaceError, *VALUE_ERRORS) as error:
        return {"unreplayable": f"{type(error).__name__}: {error}"[:2000]}
    passed = [entry["requirement"] for entry in tracker.passes]
    failed = [entry["requirement"] for entry in tracker.failures]
    # A test that never ran was not passed: AppWorld counts the announced ones.
    announced = [entry["requirement"] for entry in tracker.test_data or []]
    failed += [requirement for requirement in announced if requirement not in passed + failed]
    return {"passed": passed, "failed": failed}


def evaluate_untouched(task_id: str, experiment: str) -> dict:
    """What `evaluate` says of the task's state before an agent did anything, saved beside the experiment's."""
    from appworld.common.path_store import path_store

    untouched = f"{experiment}-untouched"
    folder = os.path.join(path_store.experiment_outputs, untouched)
    try:
        target = os.path.join(folder, "tasks", task_id, "dbs")
        shutil.copytree(os.path.join(path_store.data, "tasks", task_id, "dbs"), target)
        return evaluate(task_id, untouched)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
