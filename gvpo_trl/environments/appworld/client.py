"""AppWorld episodes as the trainer sees them: blocking calls with deadlines that this side keeps.

    trainer ── control ──▶ host ── fork ──▶ one process per episode      (holds the world, runs the agent's code)
                                ── fork ──▶ one process per evaluation   (reads ground truth, after the agent is gone)

AppWorld itself is never imported here: an open world freezes the clock of its process.
"""

import dataclasses
import itertools
import math
import os
import shutil
import signal
import threading
import time
import weakref
from pathlib import Path

from gvpo_trl.environments.appworld import channel
from gvpo_trl.environments.appworld.process import HostKeeper, HostProcess, Launch
from gvpo_trl.environments.appworld.setup import appworld_python
from gvpo_trl.environments.appworld.tasks import check_root, check_task
from gvpo_trl.environments.appworld.workspace import Workspace
from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.environments.errors import (
    EnvironmentFault,
    EpisodeFault,
    EvaluatorFault,
    HostFault,
    ProtocolFault,
    SetupError,
)
from gvpo_trl.failures import FailureKind

KILL_AFTER_S = 1.0
"""How long a step may outlive its deadline before its process is killed."""
MACHINERY_EXIT = 70
"""Exit status of a child whose own code, not the agent's, raised."""
_TIMEOUT_TEXT = "Execution failed. Traceback:\nException: Execution timed out after {} seconds."
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU)


class AppWorldEnvironments:
    """Many AppWorld episodes at a time, each in a process of its own.

    Nothing starts before the first `open`, which takes some seconds; call `start` to have that behind you. `open` may
    be called from many threads; it waits while `max_episodes` are open.

    Args:
        root: AppWorld's data root, the folder that holds `data/`; the variable `APPWORLD_ROOT` or the current
            folder by default.
        max_episodes: how many episodes may be open at once.
        step_timeout_s: deadline of a step. At the deadline the code is interrupted as AppWorld does it, and the
            episode goes on; code that does not let itself be interrupted is killed a second later, which ends the
            episode. It is then scored on the state after its last finished step.
        open_timeout_s: deadline for opening a world.
        evaluate_timeout_s: deadline of a task's unit tests.
        max_interactions: executions that AppWorld allows in an episode.
        max_output_chars: a step that prints more has failed (`FailureKind.OUTPUT`) and its text is cut.
        memory_mb: address space of an episode's process; `None` for no limit.
        venv: AppWorld's virtual environment; see `gvpo-trl appworld setup`.
        output_dir: where episodes save their state until they are closed; the temporary folder by default.
        max_restarts: how often in a row a host may die before `open` gives up with `EnvironmentsExhausted`.
        fast: make ready in the host what every world does alike. Off, worlds open as AppWorld opens them, which takes
            three times as long and gives the same texts, test results and saved files.
        rehearse: make calls of every kind once before the first episode. That takes some three seconds and saves
            thirty milliseconds an episode; switch it off for a handful of episodes.

    Raises:
        SetupError: a value, the data root or AppWorld's environment has to be mended.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        max_episodes: int = 16,
        step_timeout_s: float = 30.0,
        open_timeout_s: float = 60.0,
        evaluate_timeout_s: float = 60.0,
        max_interactions: int = 1000,
        max_output_chars: int = 1_000_000,
        memory_mb: int | None = 4096,
        venv: Path | str | None = None,
        output_dir: Path | str | None = None,
        max_restarts: int = 3,
        fast: bool = True,
        rehearse: bool = True,
    ) -> None:
        _check_at_least(1, max_episodes=max_episodes, step_timeout_s=step_timeout_s, max_interactions=max_interactions)
        _check_at_least(1, max_output_chars=max_output_chars, open_timeout_s=open_timeout_s)
        _check_at_least(1, evaluate_timeout_s=evaluate_timeout_s)
        _check_at_least(0, max_restarts=max_restarts)
        self.root = check_root(root)
        self.max_episodes = max_episodes
        self.step_timeout_s = step_timeout_s
        self.open_timeout_s = open_timeout_s
        self.evaluate_timeout_s = evaluate_timeout_s
        python = appworld_python(venv)
        self._workspace = Workspace(output_dir)
        config = {
            "warm_up_task": min(path.name for path in (self.root / "data" / "tasks").iterdir() if path.is_dir()),
            "max_interactions": max_interactions,
            "soft_timeout_s": int(step_timeout_s),
            "max_output_chars": max_output_chars,
            "fast": fast,
            "rehearse": rehearse,
            "memory_bytes": memory_mb * 1024 * 1024 if memory_mb else 0,
        }

        launch = Launch(
            name="host",
            python=python,
            script=Path(__file__).with_name("host.py"),
            root=self.root,
            workspace=self._workspace,
            config=config,
            fault=HostFault,
        )
        self._hosts = HostKeeper(launch, max_restarts)
        self._numbers = itertools.count(1)
        self._slots = threading.Condition()
        self._live = 0
        self._closed = False
        self._finalizer = weakref.finalize(self, _shut_down, os.getpid(), self._hosts, self._workspace)

    def start(self) -> "AppWorldEnvironments":
        """Start the host and wait until it is warm; `open` does it otherwise."""
        self._hosts.get()
        return self

    def open(self, task_id: str) -> "AppWorldEpisode":
        """Open a fresh episode of the task; thread-safe, waits for a free place.

        Raises:
            SetupError: the task is unknown.
            HostFault: the host is gone; the next call starts another one.
            EpisodeFault: the world could not be opened.
            EnvironmentsExhausted: hosts died too often in a row.
        """
        check_task(self.root, task_id)
        started = time.monotonic()
        with self._slots:
            self._slots.wait_for(lambda: self._closed or self._live < self.max_episodes)
            if self._closed:
                raise HostFault("the environment is closed")
            self._live += 1
        try:
            return AppWorldEpisode(self, task_id, f"episode-{next(self._numbers):06d}", started)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        with self._slots:
            self._live -= 1
            self._slots.notify()

    def close(self) -> None:
        """End every episode and process and delete what they saved; idempotent."""
        with self._slots:
            self._closed = True
            self._slots.notify_all()
        self._finalizer()

    def __enter__(self) -> "AppWorldEnvironments":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _shut_down(owner: int, hosts: HostKeeper, workspace: Workspace) -> None:
    # A fork of the trainer (a data loader's worker) runs this at its exit too, and must not end what is not its own.
    if os.getpid() == owner:
        hosts.close()
        workspace.remove()


def _check_at_least(minimum: int, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < math.inf:
            raise SetupError(f"{name}={value!r} must be a number of at least {minimum}")


class _Child:
    """One forked process and the socket to it, with the deaths of either told apart."""

    def __init__(self, keeper: HostKeeper, request: dict) -> None:
        self.keeper = keeper
        self.host: HostProcess = keeper.get()
        self.alive = True
        self.status: int | None = None
        try:
            self.id, self.sock = self.host.spawn(request)
        except EnvironmentFault as error:
            self._report(error)
            raise

    def call(self, message: dict | None, timeout_s: float) -> dict:
        """Send a message, if any, and wait for an answer.

        Raises:
            ChannelError: no answer; the child has been ended and `status` says how, if the host still knows.
            EnvironmentFault: the host is gone, or the child says that our machinery failed.
        """
        try:
            if message is not None:
                self.sock.settimeout(timeout_s)
                channel.send(self.sock, message)
            reply = channel.receive(self.sock, timeout_s)
        except channel.ChannelError:
            self.end()
            raise
        except BaseException:
            self.end(quiet=True)
            raise
        if "fault" in reply:
            self.end()
            raise EpisodeFault(str(reply["fault"]))
        return reply

    def end(self, quiet: bool = False) -> None:
        """Kill the process and what it started; idempotent."""
        if not self.alive:
            return
        self.alive = False
        self.sock.close()
        try:
            self.status = self.host.reap(self.id)
        except EnvironmentFault as error:
            self._report(error)
            if not quiet:
                raise

    def _report(self, error: EnvironmentFault) -> None:
        if self.host.dead:
            self.keeper.report_death(self.host, error)


class AppWorldEpisode:
    """One world with one agent in it. Made by `AppWorldEnvironments.open`; one thread at a time."""

    def __init__(self, environments: AppWorldEnvironments, task_id: str, experiment: str, started: float) -> None:
        self.task_id = task_id
        self._environments = environments
        self._names = {"task_id": task_id, "experiment": experiment}
        self._output = environments._workspace.outputs / experiment
        self._usable = True
        self._closed = False
        self._child = self._open_child()
        self.reset = ResetResult(task_id=task_id, seconds=time.monotonic() - started)

    def _open_child(self) -> _Child:
        child = _Child(self._environments._hosts, {"kind": "episode", **self._names})
        try:
            child.call(None, self._environments.open_timeout_s)
        except BaseException as error:
            child.end(quiet=True)
            shutil.rmtree(self._output, ignore_errors=True)
            if isinstance(error, channel.ChannelError):
                raise EpisodeFault(f"the world of task {self.task_id} did not open: {error}") from error
            raise
        return child

    def step(self, code: str) -> StepResult:
        """Run the code in the episode's interpreter; state carries over to the next step.

        Raises:
            HostFault, EpisodeFault, ProtocolFault: our machinery broke, or the episode has ended before.
        """
        if not self._usable:
            raise EpisodeFault(f"the episode of task {self.task_id} takes no more steps")
        started = time.monotonic()
        timeout_s = self._environments.step_timeout_s + KILL_AFTER_S
        try:
            result = _step_result(self._child.call({"op": "step", "code": code}, timeout_s))
        except channel.ChannelTimeout:
            result = self._ended(FailureKind.TIMEOUT, _TIMEOUT_TEXT.format(int(self._environments.step_timeout_s)))
        except channel.ChannelClosed as error:
            result = self._after_death(error)
        except channel.ChannelGarbage as error:
            self._usable = False
            raise ProtocolFault(f"the episode of task {self.task_id} sent no proper answer: {error}") from error
        except EnvironmentFault:
            self._usable = False
            raise
        self._usable = not result.ended
        return dataclasses.replace(result, seconds=time.monotonic() - started)

    def _after_death(self, error: channel.ChannelClosed) -> StepResult:
        """Whose doing was it that the process is gone? Exits and crashes are the agent's, a kill is not."""
        self._usable = False
        status = self._child.status
        if status is not None and os.WIFEXITED(status):
            code = os.WEXITSTATUS(status)
            if code != MACHINERY_EXIT:
                return self._ended(FailureKind.EXITED, f"Execution failed. The interpreter exited with status {code}.")
        if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CRASHES:
            name = signal.Signals(os.WTERMSIG(status)).name
            return self._ended(FailureKind.EXITED, f"Execution failed. The interpreter crashed with {name}.")
        raise EpisodeFault(f"the process of task {self.task_id} died in a step (wait status {status})") from error

    @staticmethod
    def _ended(kind: FailureKind, text: str) -> StepResult:
        return StepResult(text=text, failure=kind, ended=True)

    def score(self) -> Score:
        """Run the task's unit tests on the saved state; no step is possible afterwards.

        Raises:
            EvaluatorFault: the evaluation crashed or ran past its deadline.
            HostFault, EpisodeFault, ProtocolFault: the state could not be saved, or the episode was closed.
        """
        if self._closed:
            raise EpisodeFault(f"the episode of task {self.task_id} is closed")
        started = time.monotonic()
        self._usable = False
        if not self._child.alive and not any(self._output.glob("tasks/*/dbs/*.jsonl")):
            # Gone before anything changed: the state is the one that a fresh episode starts from.
            self._child = self._open_child()
        if self._child.alive:
            try:
                self._child.call({"op": "finish"}, self._environments.open_timeout_s)
            except channel.ChannelError as error:
                raise EpisodeFault(f"the state of task {self.task_id} could not be saved: {error}") from error
            self._child.end()
        score = self._evaluate()
        self._environments._hosts.report_success()
        return Score(passed=score["passed"], failed=score["failed"], seconds=time.monotonic() - started)

    def _evaluate(self) -> dict[str, tuple[str, ...]]:
        try:
            child = _Child(self._environments._hosts, {"kind": "evaluation", **self._names})
            try:
                reply = child.call(None, self._environments.evaluate_timeout_s)
            finally:
                child.end(quiet=True)
            return {name: tuple(str(text) for text in reply[name]) for name in ("passed", "failed")}
        except (channel.ChannelError, EpisodeFault, KeyError, TypeError) as error:
            raise EvaluatorFault(f"the evaluation of task {self.task_id} failed: {error}") from error

    def close(self) -> None:
        """End the episode's processes and delete what it saved; idempotent, safe after a fault."""
        if self._closed:
            return
        self._closed = True
        self._usable = False
        self._child.end(quiet=True)
        shutil.rmtree(self._output, ignore_errors=True)
        self._environments._release()

    def __enter__(self) -> "AppWorldEpisode":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _step_result(reply: dict) -> StepResult:
    verdict, calls = reply.get("verdict"), reply.get("api_calls")
    if not isinstance(reply.get("text"), str) or not isinstance(calls, list):
        raise channel.ChannelGarbage("an answer without text")
    if verdict is not None and verdict not in list(FailureKind):
        raise channel.ChannelGarbage(f"an unknown verdict {verdict!r}")
    return StepResult(
        text=reply["text"],
        failure=None if verdict is None else FailureKind(verdict),
        completed=reply.get("completed") is True,
        ended=reply.get("ended") is True,
        api_calls=tuple(str(call) for call in calls),
    )
