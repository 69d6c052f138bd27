"""How a step went, seen from inside AppWorld's `execute` and never read off its text: standard library and appworld.

`execute` decides on one of several ways: refuse the code, fail to parse it, run it. The recorder watches which one it
takes, and keeps the objects that decide: the shell's result and the exceptions that stand for an app's error status.
"""

import contextlib
import sys
import traceback


class Recorder:
    """Watches one world. `start` before a step, `verdict` after it."""

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
        """Forget the last step."""
        self.code, self.refused, self.ran, self.result = code, False, False, None
        self.api_errors.clear()
        self.api_calls = []

    def verdict(self, escaped: BaseException | None = None) -> str | None:
        """The failure kind of the step just run, `None` when it executed.

        Args:
            escaped: the exception that left `execute`, when one did.
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


def text_of(error: BaseException) -> str:
    """What the agent sees of an exception that `execute` itself does not put into words."""
    return "Execution failed. Traceback:\n" + "".join(traceback.format_exception_only(error)).rstrip()


def printable(text: str) -> str:
    """The text with lone surrogates spelled out, which neither a log nor a tokenizer takes."""
    return text.encode("utf-8", "backslashreplace").decode()


@contextlib.contextmanager
def called_from_the_top():
    """Give agent code the recursion depth that it has when `execute` is called from the top of a script.

    Tracebacks of endless recursion say how often a line repeated, and that depends on how deep the caller stands.
    """
    limit, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    # Two frames of this context manager are gone when the code runs, one of the recorder is there instead.
    sys.setrecursionlimit(limit + depth - 1)
    try:
        yield
    finally:
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(limit)
