"""Measures how long the model generated, how long environments worked, and how long both did so at the same time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Collects spans of time. Several threads may measure at the same time.

    Args:
        now: returns the current time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._spans: dict[str, list[tuple[float, float]]] = {"generate": [], "environment": [], "reset": []}

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Measure the block as a span of `"generate"`, `"environment"` or `"reset"`."""
        started = self._now()
        try:
            yield
        finally:
            self.add(what, started)

    def add(self, what: str, started: float) -> None:
        """Add a span that began at `started` and ends now."""
        self._spans[what].append((started, self._now()))

    @property
    def generate_s(self) -> float:
        """Seconds in which the model generated."""
        return _covered(self._spans["generate"])

    @property
    def reset_wait_s(self) -> float:
        """Seconds in which the code of at least one turn waited for its world to open."""
        return _covered(self._spans["reset"])

    @property
    def overlap_s(self) -> float:
        """Seconds in which the model generated while at least one environment worked."""
        generate, environment = self._spans["generate"], self._spans["environment"]
        return max(0.0, _covered(generate) + _covered(environment) - _covered([*generate, *environment]))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the seconds that lie inside at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
