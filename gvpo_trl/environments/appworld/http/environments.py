"""Episodes over AppWorld's own environment servers, which may run on other machines.

    trainer ── HTTP ──▶ `appworld serve environment`     (holds one world at a time, so it is leased to one episode)

Start one server for each episode that is to be open at once, with AppWorld's own virtual environment:

    APPWORLD_ROOT=ROOT .../bin/appworld serve environment --port 8001 --root ROOT --no-show-usage

**That command listens on every network interface, and whoever reaches the port can run code on the machine.** Keep it
behind a firewall or in a container, or let it listen on the local machine alone:

    .../bin/python -c 'import uvicorn; from appworld.serve.environment import app; uvicorn.run(app, port=8001)'
"""

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gvpo_trl.environments.appworld.http.bounds import read_report
from gvpo_trl.environments.appworld.http.pool import Pool
from gvpo_trl.environments.appworld.http.server import Server, ServerRefused, ServerSilent
from gvpo_trl.environments.appworld.http.verdicts import verdict_of
from gvpo_trl.environments.appworld.http.world import ANSWER_TIMEOUT_S, RemoteWorld
from gvpo_trl.environments.appworld.limits import CommonEnvironment, Limits, check_at_least
from gvpo_trl.environments.appworld.tasks import check_root, check_task, task_source
from gvpo_trl.environments.appworld.wire import texts
from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import (
    EnvironmentFault,
    EpisodeFault,
    EvaluatorFault,
    HostFault,
    ProtocolFault,
    SetupError,
)

_log = logging.getLogger(__name__)

REPEAT_WAIT_S = 600.0
"""How long the scoring of an episode whose server hangs waits for another server."""
_DID_NOT_RUN = (FailureKind.SYNTAX, FailureKind.FORBIDDEN, FailureKind.NO_CODE)


class RemoteEnvironments(CommonEnvironment):
    """Many AppWorld episodes at a time, each on a server of its own.

    Many threads may call `open`, which waits until a server is free. A server belongs to one `RemoteEnvironments` at a
    time: two of them, or two processes of a distributed run, would change each other's worlds without noticing. In a
    distributed run, give each process its own servers with `share_urls`, as `gvpo-trl train` does.

    The servers show less and allow less than the local processes, which makes these differences:

    - The failure of a step is read from AppWorld's text. Code that prints exactly what AppWorld writes after a failed
      step, the frame of a traceback included, counts as failed. The local environment is not deceived by that.
    - `StepResult.api_calls` is empty: no endpoint reports calls.
    - Agent code runs in the process that holds the task's answers and that evaluates. It can read the answers, and it
      can change modules, and with them how later episodes on the same server run and are scored. Logouts, the one
      such change that agents make in good faith, are undone. Restart the servers after a policy that you don't trust.
    - Code that ends the server's process, prints lone surrogates or raises something that is no `Exception` gives a
      fault, and not a failed step.
    - Code that ignores its interruption blocks its server until the server is restarted. The episode is scored
      nevertheless: its finished steps are repeated on another server.
    - Each server keeps what its last episode of each task saved in `experiments/outputs/gvpo-…` below its root, some
      60 kB a task. Delete it when no run uses the server.

    Args:
        urls: the addresses of running servers, e.g. `["http://127.0.0.1:8001", "http://127.0.0.1:8002"]`. As many
            episodes can be open at once.
        root: a data root with the servers' tasks, if this machine has one. Unknown tasks are then found before a
            server is asked.
        step_timeout_s: deadline of a step. At the deadline AppWorld interrupts the code and the episode goes on; code
            that still runs a second later ends the episode.
        open_timeout_s: deadline for opening a world, and how long a server may be silent before it counts as dead.
        evaluate_timeout_s: deadline of a task's unit tests.
        max_interactions: executions that AppWorld allows in an episode.
        max_output_chars: a step that prints more has failed (`FailureKind.OUTPUT`) and its text is cut.
        max_restarts: how often in a row every server may be found dead before `open` gives up with
            `EnvironmentsExhausted`.

    Raises:
        SetupError: a value, an address or the data root is wrong.
    """

    protection = (
        "agent code runs on the servers, beside the world: it can read the answers, and it can change how the later "
        "episodes of its server run and are scored"
    )
    """What keeps agent code from the answers, in words for a log."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        root: Path | str | None = None,
        step_timeout_s: float = 30.0,
        open_timeout_s: float = 60.0,
        evaluate_timeout_s: float = 60.0,
        max_interactions: int = 1000,
        max_output_chars: int = 1_000_000,
        max_restarts: int = 3,
    ) -> None:
        super().__init__(
            Limits(
                step_timeout_s=step_timeout_s,
                open_timeout_s=open_timeout_s,
                evaluate_timeout_s=evaluate_timeout_s,
                max_interactions=max_interactions,
                max_output_chars=max_output_chars,
            )
        )
        check_at_least(0, max_restarts=max_restarts)
        servers = _servers(urls)
        self.root = None if root is None else check_root(root)
        self.source = None if self.root is None else task_source(self.root)
        self.max_episodes = len(servers)
        self.experiment = f"gvpo-{uuid.uuid4().hex[:12]}"
        """Prefix of the names of this environment's folders below the servers' `experiments/outputs`."""
        self.pool = Pool(servers, max_restarts, open_timeout_s)
        """Leases the servers to episodes."""
        self._warned = False
        self._episodes: set[RemoteEpisode] = set()

    def start(self) -> "RemoteEnvironments":
        """Wait until every server answers, at most `open_timeout_s`. Without this call, `open` asks the servers.

        Raises:
            SetupError: one of them is no AppWorld environment server.
            HostFault: no server answers.
        """
        self._warn()
        self.pool.wait_for_any(self.open_timeout_s)
        return self

    def _warn(self) -> None:
        """Log once how little the servers protect."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s. Use servers for policies that don't look for such ways, or the processes of this machine; "
                "see docs/sandbox.md",
                self.protection,
            )

    def open(self, task_id: str) -> "RemoteEpisode":
        """Open a fresh episode of the task; thread-safe, waits for a free server.

        Raises:
            SetupError: the task is unknown in `root`, or this is a fork of the process that made the environment.
            HostFault: no server is alive; the next call asks them again.
            EpisodeFault, ProtocolFault: a server did not open the world.
            EnvironmentsExhausted: every server was found dead too often in a row.
        """
        self.check_process()
        if self.root is not None:
            check_task(self.root, task_id)
        elif not isinstance(task_id, str) or not task_id:
            raise SetupError(f"task_id={task_id!r} must be the name of a task, e.g. '50e1ac9_1'")
        self._warn()
        episode = RemoteEpisode(self, task_id)
        if self.pool.closed:
            episode.close()
            raise HostFault("the environment is closed")
        return episode

    def open_world(self, task_id: str, wait_s: float | None = None) -> RemoteWorld:
        """Open the task's world on a free server.

        Args:
            task_id: the task.
            wait_s: how long to wait for a server; `None` for no limit.

        Raises:
            HostFault: no server became free in time. Otherwise raises as `open` does.
        """
        while True:
            entry = self.pool.lease(wait_s)
            try:
                return RemoteWorld(self.pool, entry, task_id, self.limits, self.experiment)
            except HostFault:
                # The server was found dead before the episode began, so any other server will do.
                self.pool.check_alive()

    def close(self) -> None:
        """End every episode and tell the servers; they go on running. Idempotent."""
        self.pool.close()
        if episodes := list(self._episodes):
            with ThreadPoolExecutor(len(episodes)) as threads:
                list(threads.map(RemoteEpisode.close, episodes))

    def __enter__(self) -> "RemoteEnvironments":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def share_urls(urls: Sequence[str], process_index: int, num_processes: int) -> list[str]:
    """Return the servers of one process of a distributed run; every server belongs to exactly one process.

    Args:
        urls: the addresses of all servers, in the same order in every process.
        process_index: which process this is, e.g. `accelerate.PartialState().process_index`.
        num_processes: how many processes there are, e.g. `accelerate.PartialState().num_processes`.

    Raises:
        SetupError: there are fewer servers than processes.
    """
    urls = _check_list(urls)
    if len(urls) < num_processes:
        raise SetupError(
            f"urls holds {len(urls)} servers for {num_processes} processes, and each process needs one of its own; "
            f"start at least {num_processes} servers or fewer processes"
        )
    return urls[process_index::num_processes]


def _check_list(urls: Sequence[str]) -> list[str]:
    if isinstance(urls, str) or not isinstance(urls, Sequence) or not urls:
        raise SetupError(f"urls={urls!r} must be a list of at least one address, e.g. ['http://127.0.0.1:8001']")
    return list(urls)


def _servers(urls: Sequence[str]) -> list[Server]:
    servers = [Server(url) for url in _check_list(urls)]
    known: dict[tuple, str] = {}
    for server in servers:
        if server.identity in known:
            raise SetupError(
                f"urls: {known[server.identity]!r} and {server.url!r} are one server, which holds one world at a "
                "time; start one server a port"
            )
        known[server.identity] = server.url
    return servers


class RemoteEpisode:
    """One world with one agent in it. `RemoteEnvironments.open` makes it; one thread at a time may use it."""

    def __init__(self, environments: RemoteEnvironments, task_id: str) -> None:
        started = time.monotonic()
        self.task_id = task_id
        self._environments = environments
        self.world = environments.open_world(task_id)
        """The open world, which is another one after the steps were repeated on another server."""
        self._usable = True
        self._hangs = False
        self._completed = False
        self._closed = False
        self._closing = threading.Lock()
        self._steps: list[tuple[str, FailureKind | None]] = []
        environments._episodes.add(self)
        self.reset = ResetResult(task_id=task_id, seconds=time.monotonic() - started)

    def step(self, code: str) -> StepResult:
        """Run the code in the episode's interpreter; state carries over to the next step.

        Raises:
            HostFault: the server died.
            EpisodeFault: the server could not say how the step went, or the episode has ended before.
            ProtocolFault: the answer was not that of an AppWorld server.
        """
        if not self._usable:
            raise EpisodeFault(f"the episode of task {self.task_id} takes no more steps")
        self._usable = False
        try:
            result = self._execute(code)
        except ServerSilent:
            self._hangs = True
            text = self._environments.limits.timeout_text
            result = StepResult(text=text, failure=FailureKind.TIMEOUT, ended=True)
        except ServerRefused as error:
            raise EpisodeFault(f"the server could not say how a step of task {self.task_id} went: {error}") from error
        self._usable = not result.ended
        return result

    def _execute(self, code: str) -> StepResult:
        started = time.monotonic()
        text, whole = self.world.execute(code)
        kind = verdict_of(code, text, seconds=time.monotonic() - started)
        limit = self._environments.max_output_chars
        if not whole or len(text) > limit:
            kind = kind or FailureKind.OUTPUT
            text = texts.cut_output(text, limit, whole)
        self._steps.append((code, kind))
        if kind not in _DID_NOT_RUN:
            self._ask_completed()
        return StepResult(text=text, failure=kind, completed=self._completed)

    def _ask_completed(self) -> None:
        try:
            self._completed = self.world.ask("/task_completed", timeout_s=ANSWER_TIMEOUT_S) is True
        except ServerSilent as error:
            raise EpisodeFault(f"the server fell silent after a step of task {self.task_id}: {error}") from error
        except ServerRefused:
            pass  # the agent broke its own world

    def score(self) -> Score:
        """Run the task's unit tests on the final state; no step is possible afterwards.

        An episode that ended because its code ignored the deadline is scored on the state after its last finished
        step. That state is made again on another server, by repeating the steps.

        Raises:
            EvaluatorFault: the evaluation failed, ran past its deadline, or the steps could not be repeated.
            HostFault, EpisodeFault, ProtocolFault: the server is lost, or the episode was closed.
        """
        if self._closed:
            raise EpisodeFault(f"the episode of task {self.task_id} is closed")
        self._usable = False
        if self._hangs:
            self._repeat_steps()
        try:
            timeout_s = self._environments.evaluate_timeout_s
            # Without `suppress_errors` a failed test would be answered with status 500.
            report = self.world.ask("/evaluate", timeout_s=timeout_s, suppress_errors=True)
        except (ServerSilent, ServerRefused) as error:
            raise EvaluatorFault(f"the evaluation of task {self.task_id} failed: {error}") from error
        try:
            passed, failed = read_report(report)
        except ValueError as error:
            self.world.set_aside(error)
            raise ProtocolFault(f"the evaluation of task {self.task_id} gave no test results: {error}") from error
        self._environments.pool.succeeded(self.world.entry)
        return Score(passed=tuple(passed), failed=tuple(failed))

    def _repeat_steps(self) -> None:
        try:
            self.world = self._environments.open_world(self.task_id, REPEAT_WAIT_S)
            for number, (code, kind) in enumerate(self._steps, 1):
                started = time.monotonic()
                text, _ = self.world.execute(code)
                again = verdict_of(code, text, seconds=time.monotonic() - started)
                if again != kind and kind is not FailureKind.OUTPUT:
                    raise EvaluatorFault(f"step {number} of {len(self._steps)} went differently when it was repeated")
        except (EnvironmentFault, ServerSilent, ServerRefused) as error:
            raise EvaluatorFault(
                f"the server of task {self.task_id} hangs, and its steps could not be repeated on another: {error}"
            ) from error
        self._hangs = False

    def close(self) -> None:
        """Close the world and free its server; idempotent, safe after a fault."""
        with self._closing:
            if self._closed:
                return
            self._closed, self._usable = True, False
        self._environments._episodes.discard(self)
        self.world.end()

    def __enter__(self) -> "RemoteEpisode":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
