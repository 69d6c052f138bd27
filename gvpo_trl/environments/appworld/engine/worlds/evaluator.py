"""Runs a task's unit tests on the state that an episode saved, in a process that runs no agent code.

Such a process starts its work on an episode when the episode's own processes are gone. No other kind of process reads
ground truth. With the patches of `patches.py` one process evaluates up to 200 episodes, one after the other: the host
restores its databases after each, and ends the process after a state that cannot be replayed.
"""

import json
import os
import shutil
import sqlite3

VALUE_ERRORS = (ValueError, TypeError, OverflowError, KeyError, AttributeError, sqlite3.DataError)
"""Errors that a value raises if the database does not accept it; a broken disk raises other errors."""


def warm_up() -> None:
    """Import what only evaluations need."""
    import appworld.evaluator  # noqa: F401
    import pytest  # noqa: F401  (behind AppWorld's assertions)


def evaluate(task_id: str, experiment: str) -> dict:
    """Return the requirement texts of the tests that passed and of those that did not.

    An API accepts some values that its database refuses when the state is replayed, such as an infinite amount. Then
    the answer is `unreplayable`. That is the agent's doing if the task's own state can be evaluated.
    """
    from appworld.evaluator import evaluate_task
    from sqlalchemy.exc import DataError, IntegrityError

    try:
        tracker = evaluate_task(task_id=task_id, experiment_name=experiment, suppress_errors=True, save_report=False)
    except json.JSONDecodeError:
        raise  # a broken file is our fault, not the agent's
    except (DataError, IntegrityError, sqlite3.IntegrityError, sqlite3.InterfaceError, *VALUE_ERRORS) as error:
        return {"unreplayable": f"{type(error).__name__}: {error}"[:2000]}
    passed = [entry["requirement"] for entry in tracker.passes]
    failed = [entry["requirement"] for entry in tracker.failures]
    # AppWorld counts the announced tests, so a test that never ran has failed.
    announced = [entry["requirement"] for entry in tracker.test_data or []]
    failed += [requirement for requirement in announced if requirement not in passed + failed]
    return {"passed": passed, "failed": failed}


def evaluate_untouched(task_id: str, experiment: str) -> dict:
    """Return what `evaluate` answers for the task's initial state, which is first copied beside the experiment's."""
    from appworld.common.path_store import path_store

    untouched = f"{experiment}-untouched"
    folder = os.path.join(path_store.experiment_outputs, untouched)
    try:
        target = os.path.join(folder, "tasks", task_id, "dbs")
        shutil.copytree(os.path.join(path_store.data, "tasks", task_id, "dbs"), target)
        return evaluate(task_id, untouched)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
