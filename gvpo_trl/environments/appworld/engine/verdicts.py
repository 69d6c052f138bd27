"""Runs a step of agent code with AppWorld's `execute`, and records from inside how the step went.

`execute` ends in one of several ways: it refuses the code, fails to parse it, or runs it. The recorder watches which
one happens, and keeps the objects that decide the verdict: the shell's result and the exceptions that stand for an
app's error status. The text of the step plays no part, because agent code can print any text.
"""

import ast
import contextlib
import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gvpo_trl.environments.appworld.wire import texts

# Agent code may replace these in their modules.
_parse, _walk, _traceback_of = ast.parse, ast.walk, BaseException.__traceback__.__get__
# An exception class of the agent's may hide these attributes behind others of its own.
_cause_of, _context_of = BaseException.__cause__.__get__, BaseException.__context__.__get__
_file_of = SyntaxError.filename.__get__


class Recorder:
    """Watches one world. Call `start` before a step and `verdict` after it.

    Some failures do not reach `execute`. The recorder sees these as well: an error status that the code asked not to
    be raised, an exception that a nested cell of IPython printed, a coroutine that nobody awaited, and a call of a
    function that AppWorld's guard has replaced by one that does nothing.
    """

    def __init__(self, world) -> None:
        self.api_errors: list[BaseException] = []
        self.api_calls: list[str] = []
        self.failed_calls: list[str] = []
        self.start("")
        self._watch_execution(world)
        self._watch_requests(world.requester)
        self._watch_shell(world.shell)
        _watch_forbidden_functions(world.safety_guard, self._note("forbidden"))
        # CPython calls this function of the module when a coroutine is collected that nobody awaited.
        warnings._warn_unawaited_coroutine = _before(warnings._warn_unawaited_coroutine, self._note("runtime"))

    def start(self, code: str) -> None:
        """Forget the last step and expect this code."""
        self.code, self.refused, self.ran, self.result = code, False, False, None
        self.unraised: list[str] = []  # failure kinds of what did not reach `execute`
        self.api_errors.clear()
        self.api_calls, self.failed_calls = [], []

    def _note(self, kind: str) -> Callable[[], None]:
        return lambda: self.unraised.append(kind)

    def _watch_execution(self, world) -> None:
        guard = world.safety_guard
        is_syntax_safe, run_cell = guard.is_syntax_safe, world._shell_run_cell

        def watched_is_syntax_safe(code):
            safe, message = is_syntax_safe(code)
            self.refused = not safe
            return safe, message

        def watched_run_cell(code):
            self.ran = True
            self.result = run_cell(code)
            return self.result

        guard.is_syntax_safe, world._shell_run_cell = watched_is_syntax_safe, watched_run_cell

    def _watch_requests(self, requester) -> None:
        raise_if_failure, request = requester.raise_if_failure, requester._request

        def watched_raise_if_failure(response, *args, **kwargs):
            if response.status_code != 200 and self.api_calls:
                self.failed_calls.append(self.api_calls[-1])
            try:
                raise_if_failure(response, *args, **kwargs)
            except Exception as error:
                self.api_errors.append(error)
                raise
            if response.status_code != 200:
                self.unraised.append("api")

        def watched_request(*args, **kwargs):
            if kwargs.get("track", True):
                app = kwargs.get("_app_name", args[0] if args else None)
                api = kwargs.get("_api_name", args[1] if len(args) > 1 else None)
                self.api_calls.append(f"{app}.{api}")
            return request(*args, **kwargs)

        requester.raise_if_failure, requester._request = watched_raise_if_failure, watched_request

    def _watch_shell(self, shell) -> None:
        def note_shown_error() -> None:
            self.unraised.append(self._kind(sys.exc_info()[1]))

        shell.showtraceback = _before(shell.showtraceback, note_shown_error)
        shell.showsyntaxerror = _before(shell.showsyntaxerror, self._note("syntax"))
        shell.ask_exit = _before(shell.ask_exit, self._note("forbidden"))

    def verdict(self, escaped: BaseException | None = None) -> str | None:
        """Return the failure kind of the step that ran last; `None` when its code executed.

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
            return self._kind_before_execution(self.result.error_before_exec)
        if self.result.error_in_exec is not None:
            return self._kind(self.result.error_in_exec)
        return self.unraised[0] if self.unraised else None

    def failed_line(self, escaped: BaseException | None = None) -> int | None:
        """Return the line, from 1, on which the statement begins that raised; `None` where nothing tells it.

        The statement is the smallest one of the step's own code that holds the line where the outermost frame of this
        code stood: the statement in a loop's body and not the loop, the call of a function and not the line in the
        function that raised. Of code that does not parse it is the line that the parser names.

        Args:
            escaped: the exception that left `execute`, if one did.
        """
        error = escaped
        if error is None and self.result is not None:
            error = self.result.error_before_exec or self.result.error_in_exec
        with contextlib.suppress(Exception):
            try:
                tree = _parse(self.code)
            except SyntaxError as refused:
                return refused.lineno
            if error is None:
                return None
            line = _line_of(error)
            if line is None and isinstance(error, SyntaxError):  # the compiler refuses what the parser takes
                line = error.lineno
            return None if line is None else _statement_line(tree, line)
        return None

    def _kind_before_execution(self, error: BaseException) -> str:
        # IPython also reports here an exception that its own display of the code's exception raised.
        if isinstance(error, SyntaxError) or _context_of(error) is None:
            return "syntax"
        return self._kind(_context_of(error))

    def _kind(self, error: BaseException | None) -> str:
        from appworld.common.utils import TimeoutError as StepTimeout

        if isinstance(error, StepTimeout) or (error is not None and isinstance(_cause_of(error), StepTimeout)):
            return "timeout"
        if error is not None and not isinstance(error, Exception):
            return "exited"
        if isinstance(error, MemoryError):
            return "memory"
        if any(error is known for known in self.api_errors):
            return "api"
        if isinstance(error, SyntaxError) and "ipython-input" in str(_file_of(error)):
            return "syntax"
        return "runtime"


def _line_of(error: BaseException) -> int | None:
    """Return the line at which the outermost frame of agent code stood when the exception passed it."""
    trace = _traceback_of(error)
    while trace is not None:
        if "ipython-input" in trace.tb_frame.f_code.co_filename:
            return trace.tb_lineno
        trace = trace.tb_next
    return None


def _statement_line(tree: ast.Module, line: int) -> int:
    """Return the line on which the smallest statement begins that holds a line; the line itself if none does."""
    starts = [
        (min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]), node.end_lineno)
        for node in _walk(tree)
        if isinstance(node, ast.stmt)
    ]
    return max((start for start, end in starts if start <= line <= end), default=line)


def _before(function: Callable, note: Callable[[], None]) -> Callable:
    """Return a function that calls `note` and then the given function."""

    @functools.wraps(function)
    def noted(*args, **kwargs):
        note()
        return function(*args, **kwargs)

    return noted


def _watch_forbidden_functions(guard, note: Callable[[], None]) -> None:
    """Have `note` called when agent code itself calls a function that the guard has replaced during a step."""
    from appworld.common.safety_guard import DISALLOWED_MODULE_TO_FUNCTION_NAMES

    enable = guard.enable
    replaced = [
        (module, name)
        for module, names in DISALLOWED_MODULE_TO_FUNCTION_NAMES.items()
        for name in names
        if name != "open"  # these still open files for reading
    ]

    def watched(function: Callable) -> Callable:
        @functools.wraps(function)
        def noted(*args, **kwargs):
            if "ipython-input" in sys._getframe(1).f_code.co_filename:
                note()
            return function(*args, **kwargs)

        return noted

    def enable_and_watch() -> None:
        enable()
        for module_name, name in replaced:
            module = guard.module_by_path(module_name)
            setattr(module, name, watched(getattr(module, name)))

    guard.enable = enable_and_watch


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a step."""

    text: str
    """The text that the agent sees, cut to the limit."""
    verdict: str | None
    """The failure kind, `None` when the code executed."""
    ended: bool
    """Whether the code ended its interpreter."""
    failed_line: int | None
    """The line on which the statement begins that raised or does not parse; see `Recorder.failed_line`."""
    escaped: BaseException | None
    """The exception that left `execute`, if one did. AppWorld has then not done its bookkeeping of the step."""


def run_step(world, recorder: Recorder, code: str, max_output_chars: int) -> Outcome:
    """Run agent code in a world, or in an object that stands in for one."""
    recorder.start(code)
    escaped, ended = None, False
    try:
        with full_recursion_depth():
            text = world.execute(code)
        verdict = recorder.verdict()
    except BaseException as error:
        # AppWorld catches only an `Exception`, and none that its own bookkeeping raises.
        text, verdict, escaped = _describe(error), recorder.verdict(error), error
        ended = verdict == "exited"
        world.safety_guard.disable()
        world.num_interactions += 1
    # The code may have left no memory for copies of a long text, so the rest is cut off before all else.
    shown = texts.spelled_out(text[: max_output_chars + 1])
    if len(shown) > max_output_chars:
        shown, verdict = texts.cut_output(shown, max_output_chars, length=len(text)), verdict or "output"
    line = recorder.failed_line(escaped) if verdict is not None else None
    return Outcome(text=shown, verdict=verdict, ended=ended, failed_line=line, escaped=escaped)


def _describe(error: BaseException) -> str:
    """Return what the agent sees of an exception for which `execute` itself writes no text."""
    try:
        text = "".join(traceback.format_exception_only(error)).rstrip()
    except Exception:  # the exception, or one in its context, breaks whatever looks at it
        text = type(error).__name__
    return f"Execution failed. Traceback:\n{text}"


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
