"""Counts the operations of a function instead of its seconds, so that a test of its growth does not depend on load."""

import sys
from collections.abc import Callable
from typing import Any


def count(function: Callable[..., Any], *arguments: Any) -> int:
    """Return how many lines of Python run and how many functions, also of C, are called."""
    operations = 0

    def profile(frame, event, argument):
        nonlocal operations
        operations += event in ("call", "c_call")

    def trace(frame, event, argument):
        nonlocal operations
        operations += event == "line"
        return trace

    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before[0])
        sys.settrace(before[1])
    return operations
