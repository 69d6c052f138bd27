"""A leased server with an open world in it, from `/initialize` to `/close`."""

from collections.abc import Callable
from typing import Any, TypeVar

from gvpo_trl.environments.appworld.http.pool import Pool, PoolEntry
from gvpo_trl.environments.appworld.http.server import (
    Server,
    ServerError,
    ServerGarbage,
    ServerLost,
    ServerRefused,
    ServerSilent,
)
from gvpo_trl.environments.appworld.http.verdicts import FAILED
from gvpo_trl.environments.appworld.limits import Limits
from gvpo_trl.faults import EnvironmentFault, EpisodeFault, HostFault, ProtocolFault

ANSWER_TIMEOUT_S = 5.0
"""Deadline of a question that runs no agent code."""
UNDO_LOGOUTS = """
def _undo():
    for name, module in list(__import__("sys").modules.items()):
        if name.startswith("appworld.apps."):
            for value in list(vars(module).values()):
                tokens = getattr(value, "blacklisted_tokens", None)
                if isinstance(tokens, set):
                    tokens.clear()
_undo()
"""
"""Code that undoes logouts: a server remembers the tokens that were logged out, and its next world uses them again."""
_T = TypeVar("_T")


class RemoteWorld:
    """An open world. However it ends, its server is given back to the pool or set aside.

    Args:
        pool: the pool of the server.
        entry: the leased server.
        task_id: the task to open.
        limits: the episode's limits.
        experiment: prefix of the folders in which the servers save; no other environment uses it.

    Raises:
        HostFault: the server was gone before the episode began.
        EpisodeFault, ProtocolFault: the server did not open the world.
    """

    def __init__(self, pool: Pool, entry: PoolEntry, task_id: str, limits: Limits, experiment: str) -> None:
        self.pool, self.entry, self.task_id, self.limits = pool, entry, task_id, limits
        self._experiment = experiment
        self.alive = True
        self._clean = True
        try:
            if not entry.clean:
                self._initialize()
                self._undo_logouts(limits.open_timeout_s)
            self._initialize()
        except ServerSilent as error:
            raise EpisodeFault(f"the world of task {task_id} did not open: {error}") from error
        except ServerRefused as error:
            raise self._refused_to_open(error) from error
        except BaseException:
            self.drop(clean=False)
            raise

    def ask(self, path: str, *, timeout_s: float, **body: Any) -> Any:
        """Ask the server a question about this world, and return its answer.

        Raises:
            HostFault, ProtocolFault: the server died or broke the protocol; it is set aside.
            ServerSilent: the time is up; the server is set aside.
            ServerRefused: the server answered with status 500.
        """
        return self._guarded(lambda server: server.ask(path, {"task_id": self.task_id} | body, timeout_s=timeout_s))

    def execute(self, code: str, timeout_s: float | None = None) -> tuple[str, bool]:
        """Run code, by default with the deadline of a step; see `Server.execute`. Raises as `ask` does."""
        seconds = self.limits.step_ends_after_s if timeout_s is None else timeout_s
        limit = self.limits.max_output_chars
        return self._guarded(lambda server: server.execute(self.task_id, code, timeout_s=seconds, max_chars=limit))

    def _guarded(self, question: Callable[[Server], _T]) -> _T:
        server = self.entry.server
        if not self.alive:
            raise EpisodeFault(f"the world of task {self.task_id} is lost")
        try:
            return question(server)
        except ServerLost as error:
            self.set_aside(error)
            raise HostFault(f"the AppWorld server {server.url} is gone: {error}") from error
        except ServerGarbage as error:
            self.set_aside(error)
            raise ProtocolFault(f"{server.url} does not answer as an AppWorld environment server: {error}") from error
        except ServerSilent as error:
            self.alive = False
            self.pool.hangs(self.entry, error)
            raise
        except ServerRefused:
            self._clean = False
            raise

    def set_aside(self, cause: Exception) -> None:
        """Give the world up and leave its server alone for a while, because of a fault of the server."""
        self.alive = False
        self.pool.failed(self.entry, cause)

    def _initialize(self) -> None:
        output = self.ask(
            "/initialize",
            timeout_s=self.limits.open_timeout_s,
            # A new world empties the folder of its name. A server has one world at a time, so one name per server
            # keeps worlds apart, and the disk does not fill up with episodes that nobody reads.
            experiment_name=f"{self._experiment}-{self.entry.number}",
            max_interactions=self.limits.max_interactions,
            timeout_seconds=int(self.limits.step_timeout_s),
        )
        if not isinstance(output, dict) or output.get("task_id") != self.task_id:
            error = ServerGarbage(f"/initialize does not name task {self.task_id}")
            self.set_aside(error)
            raise ProtocolFault(f"{self.entry.server.url}: {error}") from error

    def _undo_logouts(self, timeout_s: float) -> None:
        if self.execute(UNDO_LOGOUTS, timeout_s)[0].startswith(FAILED):
            raise ServerRefused("code that needs nothing of a world does not run")

    def _refused_to_open(self, error: ServerRefused) -> EpisodeFault:
        server = self.entry.server
        what = f"{server.url} did not open the world of task {self.task_id} ({error}, which tells no more)"
        try:
            known = server.knows(self.task_id, timeout_s=ANSWER_TIMEOUT_S)
        except ServerError:
            known = True
        if not known:
            self.drop(clean=False)
            return EpisodeFault(
                f"{what}; its data root has no such task: was it started with --root, and on the data that the "
                "trainer's tasks come from?"
            )
        fault = EpisodeFault(
            f"{what}, though it knows the task: its disk may be full, its root not writable, or its process changed "
            "by earlier code; restart it if this comes again"
        )
        self.set_aside(fault)
        return fault

    def end(self) -> None:
        """Undo what the next episode must not notice, close the world and free the server; idempotent."""
        last_questions = (
            lambda: self._undo_logouts(ANSWER_TIMEOUT_S),
            lambda: self.ask("/close", timeout_s=ANSWER_TIMEOUT_S),
        )
        for ask in last_questions if self.alive else ():
            try:
                ask()
            except ServerRefused:
                self._clean = False
            except (ServerSilent, EnvironmentFault):
                return  # the server has been set aside
        self.drop(clean=self._clean)

    def drop(self, clean: bool) -> None:
        """Free the server without asking it anything; idempotent."""
        if self.alive:
            self.alive = False
            self.pool.give_back(self.entry, clean)
