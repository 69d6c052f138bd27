"""Forks one process per world and per evaluation, in AppWorld's own virtual environment, which has no gvpo_trl.

Run by path with `python -I host.py <control fd> <trainer's pid>`; the configuration is the environment variable
`GVPO_HOST`, JSON. A world's process answers the API calls of an interpreter elsewhere (`world.py`, the default) or
runs the agent's code itself (`isolation="process"`), and ends. Worlds are opened without ground truth, and another
process evaluates what this one saved.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import sqlite3
import sys
from urllib.parse import quote

from gvpo_trl.environments.appworld.engine import forkserver, verdicts
from gvpo_trl.environments.appworld.engine.worlds import direct_calls, evaluator, journal, patches
from gvpo_trl.environments.appworld.engine.worlds import world as world_module
from gvpo_trl.environments.appworld.wire import frames

CONFIG: dict = {}
"""What the trainer's side asked for; `main` fills it."""
PREPARED = None
"""What `host_patches` keeps ready for children; `None` without patches."""
APIS: dict[str, list[str]] = {}
"""The APIs that agents may call, by app."""
WORLD_MEMORY_BYTES = 8 * 1024**3
"""Address space of a world's process, which calls may fill."""
EVALUATIONS = 200
"""Of one process; what AppWorld leaks in an evaluation ends with it."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def warm_up() -> dict:
    """Import AppWorld, open and close one world, call each app once: all that children would repeat."""
    global PREPARED
    with patches.quick_imports():
        import appworld
        from appworld.apps import model_lib
        from appworld.common import path_store as store

        model_lib.get_direct_sqlite3_connection = open_read_only
        outputs = CONFIG["outputs"]
        type(store.path_store).experiment_outputs = property(lambda self: outputs)
        preamble = use_world_once()
    APIS.update(world_module.public_apis())
    evaluator.warm_up()
    # SQLite forbids carrying an open file over a fork.
    model_lib.get_direct_cached_sqlite3_connection.cache_clear()
    if CONFIG["fast"]:
        PREPARED = patches.Prepared(preamble, open_world, CONFIG["warm_up_task"], CONFIG["rehearse"])
        direct_calls.call_without_threads(undisturbed=CONFIG["isolation"] == "process")
    shutil.rmtree(os.path.join(outputs, "warm-up"), ignore_errors=True)
    sys.dont_write_bytecode = True  # an evaluation imports from the data root, which is not ours to write to
    return {"appworld": appworld.__version__}


def use_world_once() -> str:
    """Open and close a world so that its caches are full; the code with which every world begins."""
    from appworld import environment, requester

    cells = []
    shell_class = environment.InteractiveShellEmbed

    class RecordingShell(shell_class):
        def run_cell(self, raw_cell, *args, **kwargs):
            cells.append(raw_cell)
            return super().run_cell(raw_cell, *args, **kwargs)

    environment.InteractiveShellEmbed = RecordingShell
    try:
        world = open_world(CONFIG["warm_up_task"], "warm-up")
    finally:
        environment.InteractiveShellEmbed = shell_class
    for app in [*world.task.allowed_apps, "admin"]:
        world.requester.client.get(f"{app}/")
        requester._get_api_name_to_doc(app, include_private_apis=True)
    world.execute("print(apis.api_docs.show_app_descriptions())")
    world.task_completed()
    world.close()
    return cells[0]


def open_read_only(path: str) -> sqlite3.Connection:
    """Open a base database; AppWorld opens it for writing, and agent code could write to the descriptor."""
    return sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)


def open_world(task_id: str, experiment: str):
    """A world without ground truth whose output lies in `outputs/<experiment>`."""
    from appworld import AppWorld

    return AppWorld(
        task_id=task_id,
        experiment_name=experiment,
        load_ground_truth=False,
        raise_on_failure=True,
        max_interactions=CONFIG["max_interactions"],
        timeout_seconds=CONFIG["soft_timeout_s"],
    )


def serve_episode(sock: socket.socket, request: dict) -> None:
    """The life of one child: open the world, run steps until told to finish."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # agent code may write to the descriptor itself
    if CONFIG["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (CONFIG["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if PREPARED:
        PREPARED.for_episode()
    try:
        episode = Episode(request["task_id"], request["experiment"])
    except Exception as error:
        frames.send(sock, {"fault": f"{type(error).__name__}: {error}"})
        return
    frames.send(sock, {"opened": True})
    while True:
        try:
            message = frames.receive(sock)
        except frames.ChannelClosed:
            return
        if message["op"] == "step":
            frames.send(sock, episode.step(message["code"]))
        else:
            frames.send(sock, episode.finish())
            return


def serve_world(trainer: socket.socket, agent: socket.socket, request: dict) -> None:
    """The life of one child whose agent code runs elsewhere: open the world, answer calls until told to finish."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (WORLD_MEMORY_BYTES,) * 2)
    if PREPARED:
        PREPARED.for_episode()
    try:
        world = world_module.World(open_world(request["task_id"], request["experiment"]), APIS, bool(PREPARED))
        frames.send(agent, world.hello())
    except Exception as error:
        frames.send(trainer, {"fault": f"{type(error).__name__}: {error}"})
        return
    frames.send(trainer, {"opened": True})
    try:
        world.serve(trainer, agent)
    except frames.ChannelClosed:
        return


def serve_evaluation(sock: socket.socket, request: dict) -> None:
    """The life of one child that evaluates: one task after the other, until the trainer is gone."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    if PREPARED:
        PREPARED.for_evaluations()
    for left in reversed(range(EVALUATIONS)):
        try:
            message = frames.receive(sock)
        except frames.ChannelClosed:
            return
        evaluate = evaluator.evaluate_untouched if message["untouched"] else evaluator.evaluate
        try:
            reply = evaluate(message["task_id"], message["experiment"])
        except Exception as error:
            frames.send(sock, {"fault": f"{type(error).__name__}: {error}"})
            return
        again = left > 0 and PREPARED is not None and "unreplayable" not in reply
        frames.send(sock, reply | {"again": again})
        if not again:
            return
        PREPARED.databases.restore()


class Episode:
    """One world and the recorder that knows how each step went."""

    def __init__(self, task_id: str, experiment: str) -> None:
        self.world = open_world(task_id, experiment)
        self.recorder = verdicts.Recorder(self.world)
        patches.save_any_log(self.world)
        self.was_completed, self.seen_changes = False, patches.count_changes("/supervisor")
        if PREPARED:
            path = os.path.join(CONFIG["outputs"], experiment, "changes.jsonl")
            self.world.journal = journal.Journal(path, self.world.models_to_db_home_path)

    def step(self, code: str) -> dict:
        """Run agent code; what the trainer's side makes a `StepResult` of."""
        self.recorder.start(code)
        ended = False
        try:
            with verdicts.called_from_the_top():
                text = self.world.execute(code)
            verdict = self.recorder.verdict()
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                return {"fault": f"cannot save the world: {error}"}
            # AppWorld lets these through: whatever is no `Exception`, and what its own bookkeeping trips over.
            text, verdict = verdicts.text_of(error), self.recorder.verdict(error)
            ended = verdict == "exited"
            self.recover()
        text, limit = verdicts.printable(text), CONFIG["max_output_chars"]
        if len(text) > limit:
            text, verdict = text[:limit] + f"\n[{len(text) - limit} characters more were cut]", verdict or "output"
        return {
            "text": text,
            "verdict": verdict,
            "completed": self.completed(),
            "ended": ended,
            "api_calls": self.recorder.api_calls,
        }

    def recover(self) -> None:
        """Finish what `execute` leaves undone when an exception escapes from it."""
        self.world.safety_guard.disable()
        self.world.num_interactions += 1
        with contextlib.suppress(Exception):
            self.save()
        self.world.requester.reset_request_count()

    def restore_folders(self) -> None:
        """Make the output's folders again that agent code may have deleted."""
        for name in ("dbs", "logs", "misc", "checkpoints", "version"):
            os.makedirs(os.path.join(self.world.output_directory, name), exist_ok=True)

    def save(self) -> None:
        """Write the state and the logs, as `execute` does at its end."""
        self.restore_folders()
        self.world._save_state(self.world.output_db_home_path_on_disk)
        self.world.save_logs()

    def completed(self) -> bool:
        """Whether the task was declared complete, also as failed."""
        with contextlib.suppress(BaseException):  # the agent may have broken its own world
            changes = patches.count_changes("/supervisor")
            if changes != self.seen_changes or not PREPARED:
                # What asks costs an API call, so it is asked only when the answer may have changed.
                self.seen_changes = changes
                self.was_completed = bool(self.world.task_completed())
        return self.was_completed

    def finish(self) -> dict:
        """The last word: everything that evaluation needs is on disk."""
        if PREPARED:
            try:
                self.restore_folders()
                self.world.save_all()
            except Exception as error:
                return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}
        return {"finished": True, "interactions": self.world.num_interactions}


def main() -> None:
    """Warm up and fork children until the trainer is gone."""
    CONFIG.update(json.loads(os.environ.pop("GVPO_HOST")))
    os.chdir(CONFIG["scratch"])
    forkserver.run(warm_up, {"episode": serve_episode, "world": serve_world, "evaluation": serve_evaluation})
