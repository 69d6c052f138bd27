"""Episodes as the trainer sees them, in both isolation modes: blocking calls whose deadlines this side keeps."""

import abc
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from gvpo_trl.environments.appworld.children import Child
from gvpo_trl.environments.appworld.engine.forkserver import MACHINERY_EXIT
from gvpo_trl.environments.appworld.machinery import Machinery
from gvpo_trl.environments.appworld.wire import frames, texts
from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EnvironmentFault, EpisodeFault, EvaluatorFault, ProtocolFault
from gvpo_trl.text import printable_line

_log = logging.getLogger(__name__)

WORLD_AFTER_S = 0.5
"""Seconds that a world may go on with its current call after its interpreter was killed, before the step is over."""
JSON_BYTES = 12
"""The most bytes that a character takes in JSON, as two escapes."""
CUT_NOTE_CHARS = 100
"""Room for the line in which an interpreter says that it has cut its output."""


class AppWorldEpisode(abc.ABC):
    """One world with one agent in it. `AppWorldEnvironments.open` makes it; one thread at a time may use it.

    Args:
        machinery: the environment's machinery.
        task_id: the task to open.
        experiment: a name that no other episode of the environment has.
        on_close: called once, when the episode is closed.

    Raises:
        HostFault, EpisodeFault, EnvironmentsExhausted: the world did not open. `on_close` is not called then.
    """

    reset: ResetResult
    """Set by `AppWorldEnvironments.open`."""

    def __init__(self, machinery: Machinery, task_id: str, experiment: str, on_close: Callable[[], None]) -> None:
        self.task_id = task_id
        self.output: Path = machinery.workspace.outputs / experiment
        """Where the episode saves its state until it is closed."""
        self._machinery, self._limits = machinery, machinery.limits
        self._names = {"task_id": task_id, "experiment": experiment}
        self._on_close = on_close
        self._usable = True
        self._closed = False
        self._forfeited: str | None = None
        """Why the agent's world ended without a saved state, so that no test passes; `None` for other worlds."""
        try:
            self._open()
        except BaseException as error:
            self._end()
            shutil.rmtree(self.output, ignore_errors=True)
            if isinstance(error, frames.ChannelError):
                raise EpisodeFault(f"the world of task {task_id} did not open: {error}") from error
            raise

    @property
    @abc.abstractmethod
    def world(self) -> Child:
        """The process that holds the world."""

    @property
    @abc.abstractmethod
    def lost(self) -> bool:
        """Whether a host of the episode's processes is known to be gone."""

    @abc.abstractmethod
    def _open(self) -> None:
        """Start the processes and wait until they are ready."""

    @abc.abstractmethod
    def _step(self, code: str) -> StepResult:
        """Run a step; raises a `ChannelError` when one of our own processes fails."""

    @abc.abstractmethod
    def _save(self) -> None:
        """Have the world save its state, and end the episode's processes."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Kill the processes that still run; idempotent, and never raises a fault."""

    def step(self, code: str) -> StepResult:
        """Run the code in the episode's interpreter; state carries over to the next step.

        Raises:
            HostFault, EpisodeFault, ProtocolFault: our machinery broke, or the episode has ended before.
        """
        if not self._usable:
            raise EpisodeFault(f"the episode of task {self.task_id} takes no more steps")
        self._usable = False
        try:
            result = self._step(code)
        except frames.ChannelGarbage as error:
            raise ProtocolFault(f"the episode of task {self.task_id} sent no proper answer: {error}") from error
        except frames.ChannelError as error:
            raise EpisodeFault(f"the world of task {self.task_id} was lost in a step: {error}") from error
        except EnvironmentFault:
            self._end()
            raise
        self._usable = not result.ended
        return result

    def score(self) -> Score:
        """Run the task's unit tests on the saved state; no step is possible afterwards.

        Raises:
            EvaluatorFault: the evaluation crashed or ran past its deadline.
            HostFault, EpisodeFault, ProtocolFault: the state could not be saved, or the episode was closed.
        """
        if self._closed:
            raise EpisodeFault(f"the episode of task {self.task_id} is closed")
        self._usable = False
        try:
            self._save()
        except frames.ChannelError as error:
            raise EpisodeFault(f"the state of task {self.task_id} could not be saved: {error}") from error
        score = self._evaluate()
        self._machinery.report_success()
        return score

    def _evaluate(self) -> Score:
        try:
            reply = {"unreplayable": self._forfeited} if self._forfeited else self._run_tests(untouched=False)
            if "unreplayable" not in reply:
                return Score(passed=_texts(reply["passed"]), failed=_texts(reply["failed"]))
            # If the tests can run on the task's untouched state, the final state is what breaks them all.
            other = self._run_tests(untouched=True)
            cause = printable_line(str(reply["unreplayable"]))
            _log.warning("no test can run on the final state of task %s: %s", self.task_id, cause)
            return Score(passed=(), failed=_texts([*other["passed"], *other["failed"]]))
        except (frames.ChannelError, EpisodeFault, KeyError, TypeError) as error:
            raise EvaluatorFault(f"the evaluation of task {self.task_id} failed: {error}") from error

    def _run_tests(self, *, untouched: bool) -> dict:
        timeout_s = self._limits.evaluate_timeout_s
        return self._machinery.evaluators.evaluate(**self._names, untouched=untouched, timeout_s=timeout_s)

    def close(self) -> None:
        """End the episode's processes and delete what it saved; idempotent, safe after a fault."""
        if self._closed:
            return
        self._closed = True
        self._usable = False
        self._end()
        shutil.rmtree(self.output, ignore_errors=True)
        self._on_close()

    def __enter__(self) -> "AppWorldEpisode":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _timed_out(self) -> StepResult:
        return _last_step(FailureKind.TIMEOUT, self._limits.timeout_text)

    def _after_death(self, child: Child, error: frames.ChannelClosed, ours: tuple[int, ...] = ()) -> StepResult:
        """Return the result of a step in which a process ended. The agent causes an exit or a crash, but not a kill.

        Args:
            child: the process; it runs agent code.
            error: what its socket raised.
            ours: the exit statuses with which the process reports that our code failed, and not the agent's.

        Raises:
            EpisodeFault: the agent did not end the process.
        """
        status = child.status
        if child.killed:
            return _last_step(FailureKind.EXITED, "Execution failed. The interpreter closed its connection.")
        if status is not None and os.WIFEXITED(status):
            code = os.WEXITSTATUS(status)
            if code not in ours:
                return _last_step(FailureKind.EXITED, f"Execution failed. The interpreter exited with status {code}.")
        if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            name = signal.Signals(os.WTERMSIG(status)).name
            return _last_step(FailureKind.EXITED, f"Execution failed. The interpreter crashed with {name}.")
        raise EpisodeFault(f"the process of task {self.task_id} died in a step (wait status {status})") from error


class ProcessEpisode(AppWorldEpisode):
    """An episode whose agent code runs in the process that holds the world (`isolation="process"`)."""

    _world: Child | None = None

    @property
    def world(self) -> Child:  # noqa: D102 - see the base class
        return self._world

    @property
    def lost(self) -> bool:  # noqa: D102 - see the base class
        return self._world.host.dead

    def _open(self) -> None:
        self._world = Child(self._machinery.worlds, {"kind": "episode", **self._names})
        self._world.call(None, self._limits.open_timeout_s)

    def _step(self, code: str) -> StepResult:
        try:
            reply = self._world.call({"op": "step", "code": code}, self._limits.step_ends_after_s)
        except frames.ChannelTimeout:
            return self._timed_out()
        except frames.ChannelClosed as error:
            return self._after_death(self._world, error, ours=(MACHINERY_EXIT,))
        calls, errors = reply.get("api_calls"), reply.get("api_errors")
        if not isinstance(calls, list) or not isinstance(errors, list):
            raise frames.ChannelGarbage("an answer without calls")
        result = step_result(reply, self._limits.max_output_chars)
        return dataclasses.replace(
            result,
            completed=reply.get("completed") is True,
            api_calls=_texts(calls),
            api_errors=_texts(errors),
        )

    def _save(self) -> None:
        if not self._world.alive and not any(self.output.glob("tasks/*/dbs/*.jsonl")):
            # A fresh world of the same name makes the state again: it replays the changes that the journal holds.
            self._open()
        if self._world.alive:
            self._world.call({"op": "finish"}, self._limits.open_timeout_s)
            self._world.end()

    def _end(self) -> None:
        if self._world is not None:
            self._world.end(quiet=True)


class SplitEpisode(AppWorldEpisode):
    """An episode whose agent code runs in a restricted interpreter, away from the world (`isolation="split"`).

    The interpreter is trusted with the text and the verdict of its own step and with nothing else: the world reports
    calls and completion, and saves the state. An interpreter that sends anything else fails its step, and the episode
    ends.
    """

    _world: Child | None = None
    _agent: Child | None = None
    _owes_answer = False
    """Whether the world has yet to answer the end of the last step."""

    @property
    def world(self) -> Child:  # noqa: D102 - see the base class
        return self._world

    @property
    def lost(self) -> bool:  # noqa: D102 - see the base class
        return self._world.host.dead or self._agent.host.dead

    def _open(self) -> None:
        agents_end, worlds_end = socket.socketpair()
        with agents_end, worlds_end:
            self._world = Child(self._machinery.worlds, {"kind": "world", **self._names}, worlds_end)
            self._agent = Child(self._machinery.agents, {"kind": "agent"}, agents_end)
        self._world.call(None, self._limits.open_timeout_s)
        ready = self._agent.call(None, self._limits.open_timeout_s)
        self._machinery.protection.check_self_test(ready["leaks"])

    def _step(self, code: str) -> StepResult:
        limits = self._limits
        deadline = time.monotonic() + limits.step_ends_after_s + WORLD_AFTER_S
        self._world.send({"op": "begin", "seconds": limits.step_ends_after_s}, limits.open_timeout_s)
        result, logged, counted = self._run(code)
        logged = logged or {"input": code, "output": result.text}
        self._world.send({"op": "end", "logged": logged, "counted": counted}, limits.open_timeout_s)
        if not self._world.wait_readable(max(WORLD_AFTER_S, deadline - time.monotonic())):
            # The world still works on a call of this step. `_save` finds out whether it hangs for good.
            self._agent.end(quiet=True)
            self._owes_answer = True
            return self._timed_out()
        ending = self._world.call(None, limits.open_timeout_s)
        if ending["misuse"]:
            self._agent.end(quiet=True)
            text = f"Execution failed. The interpreter sent {ending['misuse']}."
            result = _last_step(FailureKind(ending["kind"]), text)
        return dataclasses.replace(
            result,
            completed=ending["completed"] is True,
            api_calls=_texts(ending["api_calls"]),
            api_errors=_texts(ending["api_errors"]),
        )

    def _run(self, code: str) -> tuple[StepResult, dict | None, bool]:
        """Run the interpreter's part of a step; return its result, log entry and whether it is an interaction."""
        limits, nonce = self._limits, secrets.token_hex(16)
        most = limits.max_output_chars + 1000  # as interpreters cut what is logged
        limit = JSON_BYTES * (2 * most + min(len(code), most)) + 1_000_000
        try:
            message = {"op": "step", "code": code, "nonce": nonce}
            reply = self._agent.call(message, limits.step_ends_after_s, limit, watched=self._world)
            if reply.get("nonce") != nonce or "fault" in reply:
                raise frames.ChannelGarbage("a message that answers no step")
            result = step_result(reply, limits.max_output_chars)
            logged = {name: str(reply["logged"][name])[:most] for name in ("input", "output")}
            return result, logged, reply.get("counted") is True
        except frames.ChannelTimeout:
            return self._timed_out(), None, True
        except frames.ChannelClosed as error:
            return self._after_death(self._agent, error), None, True
        except (frames.ChannelGarbage, KeyError, TypeError) as error:
            self._agent.end(quiet=True)
            text = f"Execution failed. The interpreter sent something that is no result: {error}"
            return _last_step(FailureKind.FORBIDDEN, text), None, True

    def _save(self) -> None:
        self._agent.end(quiet=True)
        if not self._world.alive:
            return
        if self._owes_answer:
            try:
                self._world.call(None, self._limits.open_timeout_s)
            except frames.ChannelClosed:
                status = self._world.status
                if status is None or not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGXCPU:
                    raise
                self._forfeited = "an API call of the agent used up the CPU time that a world may have"
                return
            self._owes_answer = False
        self._world.call({"op": "finish"}, self._limits.open_timeout_s)
        self._world.end()

    def _end(self) -> None:
        for child in (self._agent, self._world):
            if child is not None:
                child.end(quiet=True)


def step_result(reply: dict, max_output_chars: int) -> StepResult:
    """Return the result that a process which runs agent code reports for its step.

    Raises:
        ChannelGarbage: the reply is no report of a step.
    """
    verdict, text, line = reply.get("verdict"), reply.get("text"), reply.get("failed_line")
    if not isinstance(text, str):
        raise frames.ChannelGarbage("an answer without text")
    if verdict is not None and verdict not in list(FailureKind):
        raise frames.ChannelGarbage(f"an unknown verdict {verdict!r}")
    if len(text) > max_output_chars + CUT_NOTE_CHARS:  # our own code in that process would have cut it
        text = texts.cut_output(text, max_output_chars)
    return StepResult(
        text=texts.spelled_out(text),
        failure=None if verdict is None else FailureKind(verdict),
        ended=reply.get("ended") is True,
        failed_line=line if type(line) is int and verdict is not None else None,
    )


def _last_step(kind: FailureKind, text: str) -> StepResult:
    """Return the result of a step that ended its episode."""
    return StepResult(text=text, failure=kind, ended=True)


def _texts(values: list) -> tuple[str, ...]:
    return tuple(str(value) for value in values)
