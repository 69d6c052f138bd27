"""When the model generated and when environments worked, and for how long both did at the same time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Collects spans of time; many threads may run one at once."""

    def __init__(self):
        self._spans: dict[str, list[tuple[float, float]]] = {"generate": [], "environment": [], "reset": []}

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """A span of `"generate"`, `"environment"` or `"reset"`, from here to the end of the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, started)

    def add(self, what: str, started: float) -> None:
        """A span that began at that `perf_counter` and ends now."""
        self._spans[what].append((started, time.perf_counter()))

    @property
    def generate_s(self) -> float:
        """Seconds in which the model generated."""
        return _covered(self._spans["generate"])

    @property
    def reset_wait_s(self) -> float:
        """Seconds in which at least one turn's code waited for its world to open."""
        return _covered(self._spans["reset"])

    @property
    def overlap_s(self) -> float:
        """Seconds in which the model generated and at least one environment worked."""
        generate, environment = self._spans["generate"], self._spans["environment"]
        return max(0.0, _covered(generate) + _covered(environment) - _covered([*generate, *environment]))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds inside at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
