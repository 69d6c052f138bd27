"""Runs a step of agent code with AppWorld's `execute`, and records from inside how the step went.

`execute` ends in one of several ways: it refuses the code, fails to parse it, or runs it. The recorder watches which
one happens, and keeps the objects that decide the verdict: the shell's result and the exceptions that stand for an
app's error status. The text of the step plays no part, because agent code can print any text.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from gvpo_trl.environments.appworld.wire import texts


class Recorder:
    """Watches one world. Call `start` before a step and `verdict` after it."""

    def __init__(self, world) -> None:
        self.code = ""
        self.refused = False
        self.ran = False
        self.result = None
        self.api_errors: list[BaseException] = []
        self.api_calls: list[str] = []
        guard, requester = world.safety_guard, world.requester
        is_syntax_safe, run_cell = guard.is_syntax_safe, world._shell_run_cell
        raise_if_failure, request = requester.raise_if_failure, requester._request

        def watched_is_syntax_safe(code):
            safe, message = is_syntax_safe(code)
            self.refused = not safe
            return safe, message

        def watched_run_cell(code):
            self.ran = True
            self.result = run_cell(code)
            return self.result

        def watched_raise_if_failure(*args, **kwargs):
            try:
                raise_if_failure(*args, **kwargs)
            except Exception as error:
                self.api_errors.append(error)
                raise

        def watched_request(*args, **kwargs):
            if kwargs.get("track", True):
                app = kwargs.get("_app_name", args[0] if args else None)
                api = kwargs.get("_api_name", args[1] if len(args) > 1 else None)
                self.api_calls.append(f"{app}.{api}")
            return request(*args, **kwargs)

        guard.is_syntax_safe = watched_is_syntax_safe
        world._shell_run_cell = watched_run_cell
        requester.raise_if_failure = watched_raise_if_failure
        requester._request = watched_request

    def start(self, code: str) -> None:
        """Forget the last step and expect this code."""
        self.code, self.refused, self.ran, self.result = code, False, False, None
        self.api_errors.clear()
        self.api_calls = []

    def verdict(self, escaped: BaseException | None = None) -> str | None:
        """The failure kind of the step that ran last; `None` when its code executed.

        Args:
            escaped: the exception that left `execute`, if one did.
        """
        if escaped is not None:
            return self._kind(escaped)
        if self.refused:
            return "forbidden"
        if not self.ran:
            return "syntax" if self.code.strip() else "no_code"
        if self.result is None:
            return "timeout"
        if self.result.error_before_exec is not None:
            return "syntax"
        return None if self.result.error_in_exec is None else self._kind(self.result.error_in_exec)

    def _kind(self, error: BaseException) -> str:
        from appworld.common.utils import TimeoutError as StepTimeout

        if isinstance(error, StepTimeout) or isinstance(error.__cause__, StepTimeout):
            return "timeout"
        if not isinstance(error, Exception):
            return "exited"
        if isinstance(error, MemoryError):
            return "memory"
        if any(error is known for known in self.api_errors):
            return "api"
        if isinstance(error, SyntaxError) and error.filename and "ipython-input" in error.filename:
            return "syntax"
        return "runtime"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a step gave."""

    text: str
    """What the agent sees, cut to the limit."""
    verdict: str | None
    """The failure kind, `None` when the code executed."""
    ended: bool
    """Whether the code ended its interpreter."""
    escaped: BaseException | None
    """The exception that left `execute`, if one did: AppWorld's bookkeeping of the step is not done then."""


def run_step(world, recorder: Recorder, code: str, max_output_chars: int) -> Outcome:
    """Run agent code in a world, or in an object that stands in for one."""
    recorder.start(code)
    escaped, ended = None, False
    try:
        with full_recursion_depth():
            text = world.execute(code)
        verdict = recorder.verdict()
    except BaseException as error:
        # AppWorld does not catch what is no `Exception`, nor what its own bookkeeping raises.
        text, verdict, escaped = _describe(error), recorder.verdict(error), error
        ended = verdict == "exited"
        world.safety_guard.disable()
        world.num_interactions += 1
    text = texts.printable(text)
    if len(text) > max_output_chars:
        text, verdict = texts.cut_output(text, max_output_chars), verdict or "output"
    return Outcome(text=text, verdict=verdict, ended=ended, escaped=escaped)


def _describe(error: BaseException) -> str:
    """What the agent sees of an exception that `execute` itself does not put into words."""
    return "Execution failed. Traceback:\n" + "".join(traceback.format_exception_only(error)).rstrip()


@contextlib.contextmanager
def full_recursion_depth() -> Iterator[None]:
    """Give agent code the recursion depth that it has when a script calls `execute` at its top level.

    Tracebacks of endless recursion say how often a line repeated, and that depends on how deep the caller stands.
    """
    limit, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    # Two frames of this context manager are gone when the code runs, and the recorder has added one.
    sys.setrecursionlimit(limit + depth - 1)
    try:
        yield
    finally:
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(limit)
