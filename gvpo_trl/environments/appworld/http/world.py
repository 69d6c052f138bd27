"""A leased server with an open world in it, from `/initialize` to `/close`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gvpo_trl.environments.appworld.http.pool import Place, Pool
from gvpo_trl.environments.appworld.http.server import (
    Server,
    ServerError,
    ServerGarbage,
    ServerLost,
    ServerRefused,
    ServerSilent,
)
from gvpo_trl.environments.appworld.http.verdicts import FAILED
from gvpo_trl.environments.appworld.limits import KILL_AFTER_S
from gvpo_trl.faults import EnvironmentFault, EpisodeFault, HostFault, ProtocolFault

ANSWER_TIMEOUT_S = 5.0
"""For questions that run no code of the agent's."""
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
"""A server remembers the tokens that were logged out, and the next world deals out the same ones again."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldOptions:
    """What every world of a run is opened with."""

    experiment: str
    """Name of the folders below the servers' `experiments/outputs`; nobody else's."""
    step_timeout_s: float
    open_timeout_s: float
    max_interactions: int
    max_output_chars: int


class RemoteWorld:
    """An open world; every way in which it can be lost frees its server or sets it aside.

    Raises:
        HostFault: the server is gone, before anything happened.
        EpisodeFault, ProtocolFault: it did not open the world.
    """

    def __init__(self, pool: Pool, place: Place, task_id: str, options: WorldOptions) -> None:
        self.pool, self.place, self.task_id, self.options = pool, place, task_id, options
        self.alive = True
        self._clean = True
        try:
            if not place.clean:
                self._initialize()
                self._undo_logouts(options.open_timeout_s)
            self._initialize()
        except ServerSilent as error:
            raise EpisodeFault(f"the world of task {task_id} did not open: {error}") from error
        except ServerRefused as error:
            raise self._refused_to_open(error) from error
        except BaseException:
            self.drop(clean=False)
            raise

    def ask(self, path: str, *, timeout_s: float, **body: Any) -> Any:
        """What the server answers to a question about this world.

        Raises:
            HostFault, ProtocolFault: the server died or broke the protocol; it is set aside.
            ServerSilent: the time is up; the server is set aside.
            ServerRefused: status 500.
        """
        return self._guarded(lambda server: server.ask(path, {"task_id": self.task_id} | body, timeout_s=timeout_s))

    def execute(self, code: str, timeout_s: float | None = None) -> tuple[str, bool]:
        """Run code, by default with the deadline of a step; see `Server.execute`. Raises as `ask` does."""
        seconds = self.options.step_timeout_s + KILL_AFTER_S if timeout_s is None else timeout_s
        limit = self.options.max_output_chars
        return self._guarded(lambda server: server.execute(self.task_id, code, timeout_s=seconds, max_chars=limit))

    def _guarded(self, question: Callable[[Server], _T]) -> _T:
        server = self.place.server
        if not self.alive:
            raise EpisodeFault(f"the world of task {self.task_id} is lost")
        try:
            return question(server)
        except ServerLost as error:
            self._set_aside(error)
            raise HostFault(f"the AppWorld server {server.url} is gone: {error}") from error
        except ServerGarbage as error:
            self._set_aside(error)
            raise ProtocolFault(f"{server.url} does not answer as an AppWorld environment server: {error}") from error
        except ServerSilent as error:
            self.alive = False
            self.pool.hangs(self.place, error)
            raise
        except ServerRefused:
            self._clean = False
            raise

    def _set_aside(self, cause: Exception) -> None:
        self.alive = False
        self.pool.failed(self.place, cause)

    def _initialize(self) -> None:
        output = self.ask(
            "/initialize",
            timeout_s=self.options.open_timeout_s,
            # A world wipes the folder of its name. A server has one world at a time, so a name per server keeps them
            # apart, and its disk does not fill up with episodes that nobody reads.
            experiment_name=f"{self.options.experiment}-{self.place.number}",
            max_interactions=self.options.max_interactions,
            timeout_seconds=int(self.options.step_timeout_s),
        )
        if not isinstance(output, dict) or output.get("task_id") != self.task_id:
            error = ServerGarbage(f"/initialize does not name task {self.task_id}")
            self._set_aside(error)
            raise ProtocolFault(f"{self.place.server.url}: {error}") from error

    def _undo_logouts(self, timeout_s: float) -> None:
        if self.execute(UNDO_LOGOUTS, timeout_s)[0].startswith(FAILED):
            raise ServerRefused("code that needs nothing of a world does not run")

    def _refused_to_open(self, error: ServerRefused) -> EpisodeFault:
        server = self.place.server
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
            f"{what}, though it knows the task: its disk may be full, its root not writable, or its process spoilt "
            "by earlier code; restart it if this comes again"
        )
        self._set_aside(fault)
        return fault

    def end(self) -> None:
        """Undo what the next episode must not see, close the world and free the server; idempotent."""
        farewells = (
            lambda: self._undo_logouts(ANSWER_TIMEOUT_S),
            lambda: self.ask("/close", timeout_s=ANSWER_TIMEOUT_S),
        )
        for farewell in farewells if self.alive else ():
            try:
                farewell()
            except ServerRefused:
                self._clean = False
            except (ServerSilent, EnvironmentFault):
                return  # it has been set aside
        self.drop(clean=self._clean)

    def drop(self, clean: bool) -> None:
        """Free the server as it is; idempotent."""
        if self.alive:
            self.alive = False
            self.pool.give_back(self.place, clean)
