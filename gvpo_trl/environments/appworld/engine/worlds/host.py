"""The program of the host of worlds. It forks one process per episode, and processes that evaluate saved states.

`boot.py` runs `main` with the control descriptor and the trainer's process id; the environment variable `GVPO_HOST`
holds the configuration as JSON. A world's process answers the API calls of an interpreter in another process
(`world.py`, the default) or runs the agent's code itself (`episode.py`). Worlds are opened without ground truth, and
another process evaluates what they saved.
"""

import contextlib
import os
import resource
import shutil
import socket
import sqlite3
import sys
from dataclasses import dataclass
from urllib.parse import quote

from gvpo_trl.environments.appworld.engine import forkserver
from gvpo_trl.environments.appworld.engine.worlds import direct_calls, evaluator, patches
from gvpo_trl.environments.appworld.engine.worlds.episode import Episode
from gvpo_trl.environments.appworld.engine.worlds.world import World, public_apis
from gvpo_trl.environments.appworld.wire import frames

WORLD_MEMORY_BYTES = 4 * 1024**3
"""Address space of a world's process, which API calls can fill."""
EVALUATIONS = 200
"""Evaluations that one process may run. AppWorld leaks memory in each; the end of the process frees it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration that the trainer's side has passed."""

    outputs: str
    """Folder in which each episode saves its state, in a folder of its own."""
    scratch: str
    """Folder to work in."""
    warm_up_task: str
    max_interactions: int
    soft_timeout_s: int
    """Seconds after which AppWorld interrupts a step."""
    max_output_chars: int
    memory_bytes: int
    """Address space of a process that runs agent code; 0 for no limit."""
    isolation: str
    fast: bool
    """Whether to use the patches of `patches.py`."""
    rehearse: bool


class WorldHost:
    """Holds what the children of this host inherit, and runs each kind of child."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prepared: patches.Prepared | None = None
        self.apis: dict[str, list[str]] = {}

    def warm_up(self) -> dict:
        """Import AppWorld, open and close one world and call each app once, so that no child has to."""
        with patches.quick_imports():
            from appworld.apps import model_lib
            from appworld.common import path_store as store

            model_lib.get_direct_sqlite3_connection = open_read_only
            outputs = self.config.outputs
            type(store.path_store).experiment_outputs = property(lambda self: outputs)
            preamble = self._use_world_once()
        self.apis = public_apis()
        evaluator.warm_up()
        # SQLite forbids carrying an open file over a fork.
        model_lib.get_direct_cached_sqlite3_connection.cache_clear()
        if self.config.fast:
            self.prepared = patches.Prepared(
                preamble, self._open_world, self.config.warm_up_task, self.config.rehearse
            )
            direct_calls.call_without_threads(uninterrupted=self.config.isolation == "process")
        shutil.rmtree(os.path.join(outputs, "warm-up"), ignore_errors=True)
        sys.dont_write_bytecode = True  # an evaluation imports from the data root, which is not ours to write to
        return {}

    def _use_world_once(self) -> str:
        """Open and close a world so that its caches are full; return the code that every world runs first."""
        from appworld import environment, requester

        cells = []
        shell_class = environment.InteractiveShellEmbed

        class RecordingShell(shell_class):
            def run_cell(self, raw_cell, *args, **kwargs):
                cells.append(raw_cell)
                return super().run_cell(raw_cell, *args, **kwargs)

        environment.InteractiveShellEmbed = RecordingShell
        try:
            world = self._open_world(self.config.warm_up_task, "warm-up")
        finally:
            environment.InteractiveShellEmbed = shell_class
        for app in [*world.task.allowed_apps, "admin"]:
            world.requester.client.get(f"{app}/")
            requester._get_api_name_to_doc(app, include_private_apis=True)
        world.execute("print(apis.api_docs.show_app_descriptions())")
        world.task_completed()
        world.close()
        return cells[0]

    def _open_world(self, task_id: str, experiment: str):
        """Open a world without ground truth, whose output lies in `outputs/<experiment>`."""
        from appworld import AppWorld

        return AppWorld(
            task_id=task_id,
            experiment_name=experiment,
            load_ground_truth=False,
            raise_on_failure=True,
            max_interactions=self.config.max_interactions,
            timeout_seconds=self.config.soft_timeout_s,
        )

    def serve_episode(self, sock: socket.socket, request: dict) -> None:
        """Open a world in this child, and run agent code beside it until `finish`."""
        _start_episode(self.config.memory_bytes)
        if self.prepared:
            self.prepared.for_episode()
        path = os.path.join(self.config.outputs, request["experiment"], "changes.jsonl")
        try:
            world = self._open_world(request["task_id"], request["experiment"])
            episode = Episode(world, self.config.max_output_chars, path if self.prepared else None)
        except Exception as error:
            frames.send(sock, {"fault": f"{type(error).__name__}: {error}"})
            return
        frames.send(sock, {})
        with contextlib.suppress(frames.ChannelClosed):
            while (message := frames.receive(sock))["op"] == "step":
                frames.send(sock, episode.step(message["code"]))
            frames.send(sock, episode.finish())

    def serve_world(self, trainer: socket.socket, agent: socket.socket, request: dict) -> None:
        """Open a world in this child, and answer the calls of agent code that runs elsewhere until `finish`."""
        _start_episode(WORLD_MEMORY_BYTES)
        if self.prepared:
            self.prepared.for_episode()
        try:
            opened = self._open_world(request["task_id"], request["experiment"])
            world = World(opened, self.apis, saves_at_the_end=self.prepared is not None)
            frames.send(agent, world.facts())
        except Exception as error:
            frames.send(trainer, {"fault": f"{type(error).__name__}: {error}"})
            return
        frames.send(trainer, {})
        with contextlib.suppress(frames.ChannelClosed):
            world.serve(trainer, agent)

    def serve_evaluations(self, sock: socket.socket, request: dict) -> None:
        """Evaluate one state after the other in this child, until the trainer is gone or the child may not go on."""
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        if self.prepared:
            self.prepared.for_evaluations()
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
            again = left > 0 and self.prepared is not None and "unreplayable" not in reply
            frames.send(sock, reply | {"again": again})
            if not again:
                return
            self.prepared.databases.restore()


def open_read_only(path: str) -> sqlite3.Connection:
    """Open a base database; AppWorld opens it for writing, and agent code could write to the descriptor."""
    return sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)


def _start_episode(memory_bytes: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # agent code may write to the descriptor itself
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def main() -> None:
    """Warm up and fork children until the trainer is gone."""
    host = WorldHost(forkserver.read_config(Config))
    os.chdir(host.config.scratch)
    children = {"episode": host.serve_episode, "world": host.serve_world, "evaluation": host.serve_evaluations}
    forkserver.run(host.warm_up, children)
