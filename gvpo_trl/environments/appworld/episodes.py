"""Episodes as the trainer sees them, in both isolation modes: blocking calls with deadlines that this side keeps."""

import abc
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import time
from typing import TYPE_CHECKING

from gvpo_trl.environments.appworld.hosts import Child
from gvpo_trl.environments.appworld.limits import KILL_AFTER_S, TIMEOUT_TEXT
from gvpo_trl.environments.appworld.wire import frames, texts
from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EnvironmentFault, EpisodeFault, EvaluatorFault, ProtocolFault

if TYPE_CHECKING:
    from gvpo_trl.environments.appworld.client import AppWorldEnvironments

_log = logging.getLogger(__name__)

WORLD_AFTER_S = 0.5
"""How long a world may take for the call that it is at when its interpreter is killed, before the step is over."""
MACHINERY_EXIT = 70
"""Exit status of a child whose own code, not the agent's, raised."""


class AppWorldEpisode(abc.ABC):
    """One world with one agent in it. Made by `AppWorldEnvironments.open`; one thread at a time."""

    def __init__(self, environments: "AppWorldEnvironments", task_id: str, experiment: str) -> None:
        started = time.monotonic()
        self.task_id = task_id
        self._environments = environments
        self._names = {"task_id": task_id, "experiment": experiment}
        self._output = environments._workspace.outputs / experiment
        self._usable = True
        self._closed = False
        try:
            self._open()
        except BaseException as error:
            self._end()
            shutil.rmtree(self._output, ignore_errors=True)
            if isinstance(error, frames.ChannelError):
                raise EpisodeFault(f"the world of task {task_id} did not open: {error}") from error
            raise
        self.reset = ResetResult(task_id=task_id, seconds=time.monotonic() - started)

    _forfeited: str | None = None
    """How the agent itself brought its world to an end that leaves no state: then it has passed no test."""

    @abc.abstractmethod
    def _open(self) -> None:
        """Start the processes and wait until they are ready."""

    @abc.abstractmethod
    def _step(self, code: str) -> StepResult:
        """Run a step; a channel that breaks on our side raises."""

    @abc.abstractmethod
    def _save(self) -> None:
        """Have the world save its state, and end its processes."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Kill what runs; idempotent and quiet."""

    @property
    @abc.abstractmethod
    def lost(self) -> bool:
        """Whether a host of its processes is known to be gone."""

    def step(self, code: str) -> StepResult:
        """Run the code in the episode's interpreter; state carries over to the next step.

        Raises:
            HostFault, EpisodeFault, ProtocolFault: our machinery broke, or the episode has ended before.
        """
        if not self._usable:
            raise EpisodeFault(f"the episode of task {self.task_id} takes no more steps")
        started = time.monotonic()
        try:
            result = self._step(code)
        except frames.ChannelGarbage as error:
            self._usable = False
            raise ProtocolFault(f"the episode of task {self.task_id} sent no proper answer: {error}") from error
        except frames.ChannelError as error:
            self._usable = False
            raise EpisodeFault(f"the world of task {self.task_id} was lost in a step: {error}") from error
        except EnvironmentFault:
            self._usable = False
            self._end()
            raise
        self._usable = not result.ended
        return dataclasses.replace(result, seconds=time.monotonic() - started)

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
        try:
            self._save()
        except frames.ChannelError as error:
            raise EpisodeFault(f"the state of task {self.task_id} could not be saved: {error}") from error
        score = self._evaluate()
        self._environments._report_success()
        return Score(passed=score["passed"], failed=score["failed"], seconds=time.monotonic() - started)

    def _evaluate(self) -> dict[str, tuple[str, ...]]:
        try:
            reply = {"unreplayable": self._forfeited} if self._forfeited else self._run_evaluation(untouched=False)
            if "unreplayable" not in reply:
                return {name: tuple(str(text) for text in reply[name]) for name in ("passed", "failed")}
            # If the task's own state can be evaluated, the tests are right and this state breaks them all.
            other = self._run_evaluation(untouched=True)
            tests = tuple(str(text) for text in [*other["passed"], *other["failed"]])
            _log.warning("no test can run on the final state of task %s: %s", self.task_id, reply["unreplayable"])
            return {"passed": (), "failed": tests}
        except (frames.ChannelError, EpisodeFault, KeyError, TypeError) as error:
            raise EvaluatorFault(f"the evaluation of task {self.task_id} failed: {error}") from error

    def _run_evaluation(self, *, untouched: bool) -> dict:
        environments = self._environments
        child = environments._take_evaluator()
        try:
            reply = child.call({"untouched": untouched, **self._names}, environments.evaluate_timeout_s)
        except frames.ChannelClosed:
            if not child.kept:
                raise
            return self._run_evaluation(untouched=untouched)  # it ended while it waited
        except BaseException:
            child.end(quiet=True)
            raise
        environments._return_evaluator(child, again=reply["again"] is True)
        return reply

    def close(self) -> None:
        """End the episode's processes and delete what it saved; idempotent, safe after a fault."""
        if self._closed:
            return
        self._closed = True
        self._usable = False
        self._end()
        shutil.rmtree(self._output, ignore_errors=True)
        self._environments._release()

    def __enter__(self) -> "AppWorldEpisode":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ended(self, kind: FailureKind, text: str) -> StepResult:
        return StepResult(text=text, failure=kind, ended=True)

    def _timed_out(self) -> StepResult:
        return self._ended(FailureKind.TIMEOUT, TIMEOUT_TEXT.format(int(self._environments.step_timeout_s)))

    def _after_death(self, child: Child, error: frames.ChannelClosed, ours: tuple[int, ...] = ()) -> StepResult:
        """Whose doing was it that the process is gone? Exits and crashes are the agent's, a kill is not.

        `ours` are the exit statuses by which the process says that our code failed and not the agent's.
        """
        status = child.status
        if child.killed:
            return self._ended(FailureKind.EXITED, "Execution failed. The interpreter closed its connection.")
        if status is not None and os.WIFEXITED(status):
            code = os.WEXITSTATUS(status)
            if code not in ours:
                return self._ended(FailureKind.EXITED, f"Execution failed. The interpreter exited with status {code}.")
        if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            name = signal.Signals(os.WTERMSIG(status)).name
            return self._ended(FailureKind.EXITED, f"Execution failed. The interpreter crashed with {name}.")
        raise EpisodeFault(f"the process of task {self.task_id} died in a step (wait status {status})") from error


class ProcessEpisode(AppWorldEpisode):
    """Agent code runs in the process that holds the world (`isolation="process"`)."""

    _child: Child | None = None

    def _open(self) -> None:
        self._child = Child(self._environments._hosts, {"kind": "episode", **self._names})
        self._child.call(None, self._environments.open_timeout_s)

    def _step(self, code: str) -> StepResult:
        try:
            timeout_s = self._environments.step_timeout_s + KILL_AFTER_S
            reply = self._child.call({"op": "step", "code": code}, timeout_s)
        except frames.ChannelTimeout:
            return self._timed_out()
        except frames.ChannelClosed as error:
            return self._after_death(self._child, error, ours=(MACHINERY_EXIT,))
        calls, errors = reply.get("api_calls"), reply.get("api_errors")
        if not isinstance(calls, list) or not isinstance(errors, list):
            raise frames.ChannelGarbage("an answer without calls")
        result = step_result(reply, self._environments.max_output_chars)
        return dataclasses.replace(
            result,
            completed=reply.get("completed") is True,
            api_calls=tuple(map(str, calls)),
            api_errors=tuple(map(str, errors)),
        )

    def _save(self) -> None:
        if not self._child.alive and not any(self._output.glob("tasks/*/dbs/*.jsonl")):
            # The state is the one that a fresh episode starts from and what the journal says that changed since.
            self._open()
        if self._child.alive:
            self._child.call({"op": "finish"}, self._environments.open_timeout_s)
            self._child.end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end(quiet=True)

    @property
    def lost(self) -> bool:  # noqa: D102 - see the base class
        return self._child.host.dead


class SplitEpisode(AppWorldEpisode):
    """Agent code runs in a restricted interpreter, the world is in another process (`isolation="split"`).

    What the interpreter sends is never trusted with more than its own step's text and verdict: calls, completion and
    state come from the world. An interpreter that sends something else has broken its step, and the episode with it.
    """

    _world: Child | None = None
    _agent: Child | None = None
    _owes_answer = False
    """Whether the world has not answered the end of the last step yet."""

    def _open(self) -> None:
        environments = self._environments
        agents_end, worlds_end = socket.socketpair()
        with agents_end, worlds_end:
            self._world = Child(environments._hosts, {"kind": "world", **self._names}, worlds_end)
            self._agent = Child(environments._agents, {"kind": "agent"}, agents_end)
        self._world.call(None, environments.open_timeout_s)
        ready = self._agent.call(None, environments.open_timeout_s)
        environments._check_restriction(ready)

    def _step(self, code: str) -> StepResult:
        environments = self._environments
        deadline = time.monotonic() + environments.step_timeout_s + KILL_AFTER_S + WORLD_AFTER_S
        seconds = environments.step_timeout_s + KILL_AFTER_S
        self._world.send({"op": "begin", "seconds": seconds}, environments.open_timeout_s)
        result, logged, counted = self._run(code)
        logged = logged or {"input": code, "output": result.text}
        self._world.send({"op": "end", "logged": logged, "counted": counted}, environments.open_timeout_s)
        if not self._world.speaks_within(max(WORLD_AFTER_S, deadline - time.monotonic())):
            # It is still at a call of this step; a world that hangs is found out when the state is to be saved.
            self._agent.end(quiet=True)
            self._owes_answer = True
            return self._timed_out()
        ending = self._world.call(None, environments.open_timeout_s)
        if ending["misuse"]:
            self._agent.end(quiet=True)
            text = f"Execution failed. The interpreter sent {ending['misuse']}."
            result = self._ended(FailureKind(ending["kind"]), text)
        return dataclasses.replace(
            result,
            completed=ending["completed"] is True,
            api_calls=tuple(map(str, ending["api_calls"])),
            api_errors=tuple(map(str, ending["api_errors"])),
        )

    def _run(self, code: str) -> tuple[StepResult, dict | None, bool]:
        """The interpreter's part of a step: its result, what the log is to say, and whether it counts."""
        environments, nonce = self._environments, secrets.token_hex(16)
        limit = 16 * environments.max_output_chars + 16 * len(code) + 1_000_000
        try:
            timeout_s = environments.step_timeout_s + KILL_AFTER_S
            message = {"op": "step", "code": code, "nonce": nonce}
            reply = self._agent.call(message, timeout_s, limit, watched=self._world)
            if reply.get("nonce") != nonce or "fault" in reply:
                raise frames.ChannelGarbage("a message that answers no step")
            result = step_result(reply, environments.max_output_chars)
            most = environments.max_output_chars + 1000  # as interpreters cut it
            logged = {name: str(reply["logged"][name])[:most] for name in ("input", "output")}
            return result, logged, reply.get("counted") is True
        except frames.ChannelTimeout:
            return self._timed_out(), None, True
        except frames.ChannelClosed as error:
            return self._after_death(self._agent, error), None, True
        except (frames.ChannelGarbage, KeyError, TypeError) as error:
            self._agent.end(quiet=True)
            text = f"Execution failed. The interpreter sent something that is no result: {error}"
            return self._ended(FailureKind.FORBIDDEN, text), None, True

    def _save(self) -> None:
        self._agent.end(quiet=True)
        if self._world.alive:
            if self._owes_answer:
                try:
                    self._world.call(None, self._environments.open_timeout_s)
                except frames.ChannelClosed:
                    status = self._world.status
                    if status is None or not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGXCPU:
                        raise
                    self._forfeited = "a call of the agent's kept the world busy until the kernel ended it"
                    return
                self._owes_answer = False
            self._world.call({"op": "finish"}, self._environments.open_timeout_s)
            self._world.end()

    def _end(self) -> None:
        for child in (self._agent, self._world):
            if child is not None:
                child.end(quiet=True)

    @property
    def lost(self) -> bool:  # noqa: D102 - see the base class
        return self._world.host.dead or self._agent.host.dead


def step_result(reply: dict, max_output_chars: int) -> StepResult:
    """What an interpreter's answer says of its step.

    Raises:
        ChannelGarbage: the answer is none.
    """
    verdict, text = reply.get("verdict"), reply.get("text")
    if not isinstance(text, str):
        raise frames.ChannelGarbage("an answer without text")
    if verdict is not None and verdict not in list(FailureKind):
        raise frames.ChannelGarbage(f"an unknown verdict {verdict!r}")
    return StepResult(
        text=texts.printable(text[: max_output_chars + 100]),
        failure=None if verdict is None else FailureKind(verdict),
        ended=reply.get("ended") is True,
    )
