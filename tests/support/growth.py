"""Measures how the work of a function grows with its input, in lines of Python or in ratios of processor time."""

import sys
import time
from collections.abc import Callable
from typing import Any


def lines_run(function: Callable[[], Any]) -> int:
    """Return how many lines of Python the call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def cpu_growth(function: Callable[[Any], Any], small: Any, large: Any) -> float:
    """Return how many times as much processor time the call takes with the large input.

    Processor time includes the work inside regular expressions and string methods, which a count of lines leaves out.
    The best of several tries counts. A time below 0.1 ms counts as 0.1 ms.
    """

    def best(argument: Any) -> float:
        times = []
        for _ in range(3):
            started = time.thread_time_ns()
            function(argument)
            times.append(time.thread_time_ns() - started)
        return max(min(times), 100_000)

    return best(large) / best(small)
