"""Turns a generator of batches into one that takes requests one by one."""

from concurrent.futures import Future

from gvpo_trl.rollout.types import Generate, Turn, TurnRequest


class BatchStream:
    """Makes a `StreamingGenerate` of a `Generate`: `advance` samples all requested turns in one batch."""

    def __init__(self, generate: Generate):
        self._generate = generate
        self._requested: list[tuple[TurnRequest, Future[Turn]]] = []

    def submit(self, request: TurnRequest) -> Future[Turn]:
        """Note the request for the next batch."""
        self._requested.append((request, Future()))
        return self._requested[-1][1]

    def advance(self) -> bool:
        """Sample the noted requests; nothing goes on in the background, so the caller may wait."""
        if self._requested:
            turns = self._generate([request for request, _ in self._requested])
            for (_, future), turn in zip(self._requested, turns, strict=True):
                future.set_result(turn)
            self._requested = []
        return False
