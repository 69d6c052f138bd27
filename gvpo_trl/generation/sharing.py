"""Shares one generator between several processes, whose trajectories end at different turns.

All processes repeat one collective call, the exchange. In each exchange, a process sends the requests that it received
since the last one, and the process that holds the generator sends the turns that have ended. A process whose rollout
is over goes on exchanging until all rollouts are over, so a process may have any number of live trajectories.
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
"""How long a process waits for a turn between two exchanges, in seconds, if the generator works by itself."""


class _State(Enum):
    RUNNING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What a process sends in an exchange."""

    state: _State
    requests: list[TurnRequest]
    """Requests since the last exchange; their `trajectory` is unique over all processes."""
    ended: list[tuple[int, Turn | GenerationFault]]
    """(trajectory, its turn or the reason why it has none), from the process that holds the generator."""


class SharedTurns:
    """A `StreamingGenerate` on each of several processes that share one generator.

    Args:
        exchange: collective call that returns the objects of all processes in the order of their ranks.
        rank: rank of this process.
        size: number of processes.
        source: the generator, or `None` if rank 0 holds it and this is another process.
        everywhere: whether each process holds a generator and all of them must do the same, as the ranks of a
            tensor-parallel engine must. Each process then samples all turns and keeps its own.
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
        self._new_requests: list[TurnRequest] = []
        self._own: dict[int, Future[Turn]] = {}
        self._sampling: dict[Future[Turn], int] = {}
        self._ended: list[tuple[int, Turn | GenerationFault]] = []
        self._over = False

    def submit(self, request: TurnRequest) -> Future[Turn]:
        """Send the request in the next exchange."""
        key = request.trajectory * self._size + self._rank
        self._new_requests.append(replace(request, trajectory=key))
        self._own[key] = Future()
        return self._own[key]

    def advance(self) -> bool:
        """Exchange once and return `True`, because the other processes wait for every exchange of this one."""
        self._exchange_once(_State.RUNNING)
        return True

    def __enter__(self) -> "SharedTurns":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Go on exchanging until every process is done. After an error, tell the other processes once and stop."""
        try:
            while kind is None and not self._over:
                self._exchange_once(_State.DONE)
        finally:
            if not self._over:
                self._exchange_once(_State.FAILED)

    def _exchange_once(self, state: _State) -> None:
        message = _Message(state=state, requests=self._new_requests, ended=self._ended)
        self._new_requests, self._ended = [], []
        self._over = True  # if the exchange raises, it must not be called again
        messages = self._exchange(message)
        failed = [rank for rank, received in enumerate(messages) if received.state is _State.FAILED]
        if failed:
            if state is _State.FAILED:
                return
            raise RuntimeError(f"The rollout of process {failed[0]} ended with an error; see the log of that process.")
        self._over = False
        if self._source is not None:
            self._sample([request for received in messages for request in received.requests])
        self._deliver(self._ended if self._everywhere else messages[0].ended)
        if self._everywhere:
            self._ended = []
        self._over = all(received.state is _State.DONE for received in messages)

    def _sample(self, requests: list[TurnRequest]) -> None:
        """Pass new requests to the generator, let it work, and keep the turns that ended for the next exchange."""
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
            if future is None:  # the turn belongs to another process
                continue
            if isinstance(turn, GenerationFault):
                future.set_exception(turn)
            else:
                future.set_result(turn)
