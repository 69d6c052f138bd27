"""The processes that run tasks' unit tests; each can evaluate one task after the other."""

from gvpo_trl.environments.appworld.children import Child
from gvpo_trl.environments.appworld.hosts import HostKeeper
from gvpo_trl.environments.appworld.wire import frames

MAX_IDLE = 8
"""How many evaluators may wait for their next task."""


class Evaluators:
    """Lends one evaluator to each evaluation. A new one takes three times as long as one that has evaluated before.

    Args:
        worlds: keeps the host that forks evaluators.
    """

    def __init__(self, worlds: HostKeeper) -> None:
        self._worlds = worlds
        self._idle: list[Child] = []  # only appended to and popped from, which threads may do at the same time

    @property
    def idle(self) -> tuple[Child, ...]:
        """The evaluators that wait for their next task."""
        return tuple(self._idle)

    def evaluate(self, task_id: str, experiment: str, *, untouched: bool, timeout_s: float) -> dict:
        """Run a task's unit tests on the saved state of an episode, and return the evaluator's answer.

        Args:
            task_id: the task.
            experiment: the name under which the episode saved its state.
            untouched: whether to evaluate the task's initial state instead, which no agent has changed.
            timeout_s: deadline of the answer.

        Raises:
            ChannelError: no answer came.
            EnvironmentFault: the host is gone, or the evaluator says that it failed.
        """
        evaluator = self.take()
        request = {"untouched": untouched, "task_id": task_id, "experiment": experiment}
        try:
            reply = evaluator.call(request, timeout_s)
        except frames.ChannelClosed:
            if evaluator.has_waited:  # it may have ended while it waited
                return self.evaluate(task_id, experiment, untouched=untouched, timeout_s=timeout_s)
            raise
        except BaseException:
            evaluator.end(quiet=True)
            raise
        if reply["again"] is True and len(self._idle) < MAX_IDLE:
            evaluator.has_waited = True
            self._idle.append(evaluator)
        else:
            evaluator.end(quiet=True)
        return reply

    def take(self) -> Child:
        """Return an evaluator for one evaluation: one that waits, or else a new one."""
        while True:
            try:
                evaluator = self._idle.pop()
            except IndexError:
                return Child(self._worlds, {"kind": "evaluation"})
            if not evaluator.host.dead:
                return evaluator
            evaluator.end(quiet=True)

    def close(self) -> None:
        """End the evaluators that wait; idempotent."""
        while self._idle:
            self._idle.pop().end(quiet=True)
