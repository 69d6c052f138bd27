"""One generator for several processes, whose trajectories end at different turns.

All processes meet again and again in one collective call, a beat. In it each tells the others which requests it has
taken since the last beat, and the process that holds the generator which turns have ended. A process whose rollout is
over keeps the beat until all are: the number of its live trajectories may be anything, also none.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gvpo_trl.faults import GenerationFault
from gvpo_trl.rollout.types import StreamingGenerate, Turn, TurnRequest

PAUSE_S = 0.01
"""How long a beat waits for a turn where the generator works by itself."""


class _State(Enum):
    RUNNING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What a process says in a beat."""

    state: _State
    requests: list[TurnRequest]
    """Taken since the last beat; `trajectory` is unique over all processes."""
    ended: list[tuple[int, Turn | GenerationFault]]
    """Turns, or why there is none, by trajectory; from the process that holds the generator."""


class SharedTurns:
    """A `StreamingGenerate` on each of several processes, over one generator.

    Args:
        exchange: collective call that returns every process's object, in the order of their ranks.
        rank: of this process.
        size: number of processes.
        source: the generator; `None` where another process holds it, which is rank 0 then.
        everywhere: whether each process holds a generator and they must all do the same, as the ranks of a
            tensor-parallel engine. Every one then samples all turns and keeps its own.
    """

    def __init__(
        self,
        exchange: Callable[[Any], list[Any]],
        rank: int,
        size: int,
        source: StreamingGenerate | None,
        everywhere: bool = False,
    ):
        self._exchange, self._rank, self._size = exchange, rank, size
        self._source, self._everywhere = source, everywhere
        self._taken: list[TurnRequest] = []
        self._own: dict[int, Future[Turn]] = {}
        self._sampling: dict[Future[Turn], int] = {}
        self._ended: list[tuple[int, Turn | GenerationFault]] = []
        self._over = False

    def submit(self, request: TurnRequest) -> Future[Turn]:
        """Take the request to the next beat."""
        key = request.trajectory * self._size + self._rank
        self._taken.append(replace(request, trajectory=key))
        self._own[key] = Future()
        return self._own[key]

    def advance(self) -> bool:
        """One beat. Always `True`: the others wait for this process also while it waits for its interpreters."""
        self._beat(_State.RUNNING)
        return True

    def __enter__(self) -> "SharedTurns":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Keep the beat until every process is done; after an error tell them, once, that it is of no use."""
        try:
            while kind is None and not self._over:
                self._beat(_State.DONE)
        finally:
            if not self._over:
                self._beat(_State.FAILED)

    def _beat(self, state: _State) -> None:
        message = _Message(state=state, requests=self._taken, ended=self._ended)
        self._taken, self._ended = [], []
        self._over = True  # an exchange that breaks is not called again
        messages = self._exchange(message)
        failed = [rank for rank, heard in enumerate(messages) if heard.state is _State.FAILED]
        if failed:
            if state is _State.FAILED:
                return
            raise RuntimeError(f"The rollout of process {failed[0]} ended with an error, which its own log tells.")
        self._over = False
        if self._source is not None:
            self._sample([request for heard in messages for request in heard.requests])
        self._deliver(self._ended if self._everywhere else messages[0].ended)
        if self._everywhere:
            self._ended = []
        self._over = all(heard.state is _State.DONE for heard in messages)

    def _sample(self, requests: list[TurnRequest]) -> None:
        """Hand new requests to the generator, let it work, and keep the turns that ended for the next beat."""
        for request in requests:
            self._sampling[self._source.submit(request)] = request.trajectory
        if not self._source.advance():
            if self._sampling:
                wait(self._sampling, timeout=PAUSE_S, return_when=FIRST_COMPLETED)
            else:
                time.sleep(PAUSE_S)
        for future in [future for future in self._sampling if future.done()]:
            key = self._sampling.pop(future)
            try:
                self._ended.append((key, future.result()))
            except GenerationFault as fault:
                self._ended.append((key, fault))

    def _deliver(self, ended: list[tuple[int, Turn | GenerationFault]]) -> None:
        for key, turn in ended:
            future = self._own.pop(key, None)
            if future is None:  # another process's
                continue
            if isinstance(turn, GenerationFault):
                future.set_exception(turn)
            else:
                future.set_result(turn)
