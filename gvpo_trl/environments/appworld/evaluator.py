"""Runs a task's unit tests on what an episode saved, in AppWorld's own virtual environment, one child per evaluation.

The only process that reads ground truth. Run by path like `host.py`, with the same loop; a child evaluates one saved
output and ends, so nothing that an episode left behind can reach the next evaluation.
"""

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path


def _load_sibling(name: str):
    # The folder must not be on sys.path: our `setup` or `tasks` would shadow other people's modules.
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


channel = _load_sibling("channel")
forkserver = _load_sibling("forkserver")

CONFIG = json.loads(os.environ.pop("GVPO_HOST"))


def warm_up() -> dict:
    """Import AppWorld and load one task as an evaluation does, without running its tests."""
    import appworld
    from appworld.apps.model_lib import CachedDBHandler, get_direct_cached_sqlite3_connection
    from appworld.collections.models import ModelCollection
    from appworld.common import path_store as store
    from appworld.task import Task

    outputs = CONFIG["outputs"]
    type(store.path_store).experiment_outputs = property(lambda self: outputs)
    task = Task.load(task_id=CONFIG["warm_up_task"])
    ModelCollection.load(
        to_db_home_path=f":memory:task_output-{task.id}",
        from_db_home_path=task.model_collection.from_db_home_path,
        load_apps=task.allowed_apps,
    )
    CachedDBHandler.reset()
    # SQLite forbids carrying an open file over a fork.
    get_direct_cached_sqlite3_connection.cache_clear()
    return {"appworld": appworld.__version__}


def serve_evaluation(sock: socket.socket, request: dict) -> None:
    """The life of one child: evaluate, answer, end."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        reply = evaluate(request["task_id"], request["experiment"])
    except Exception as error:
        reply = {"fault": f"{type(error).__name__}: {error}"}
    channel.send(sock, reply)


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


if __name__ == "__main__":
    os.chdir(CONFIG["scratch"])
    forkserver.run(warm_up, serve_evaluation)
