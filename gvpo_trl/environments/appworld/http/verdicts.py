"""How a step went, read off AppWorld's text: all that its servers tell.

The local hosts see the objects that decide (`verdicts.py`). A text is weaker evidence: code that writes what AppWorld
writes, down to the frame of a traceback, is taken for failed. Nothing is won by that, since a failure is never
rewarded; an `ExceptionGroup`, of whose traceback AppWorld shows nothing, is taken for a success.
"""

import re

from gvpo_trl.failures import FailureKind

FAILED = "Execution failed. Traceback:\n"
_FRAME = re.compile(r' *File "<python-input>", line \d+, in ')
_API = re.compile(r"^Exception: Response status code is \d+:\n(.+)\Z", re.MULTILINE | re.DOTALL)
_TIMEOUT = re.compile(r"^(?:Exception: )?Execution timed out after (\d+) seconds\.\Z", re.MULTILINE)
_CHAINED = (
    "\nDuring handling of the above exception, another exception occurred:\n",
    "\nThe above exception was the direct cause of the following exception:\n",
)


def verdict_of(code: str, text: str, *, seconds: float) -> FailureKind | None:
    """The failure kind of a step, `None` when it executed.

    Args:
        code: what was run.
        text: what AppWorld said, not cut.
        seconds: how long the step took; code that only says it ran out of time did not.
    """
    if not code.strip():
        return FailureKind.NO_CODE
    trace = text.removeprefix(FAILED)
    if trace == text:
        return None
    if trace.startswith("Syntax error in line:\n"):
        return FailureKind.SYNTAX
    if trace.startswith("Usage of the following "):
        return FailureKind.FORBIDDEN
    last_line = trace.rstrip("\n").rpartition("\n")[2]
    if trace.startswith("Traceback (most recent call last):\n") and last_line.split(":")[0].endswith("Error"):
        # No frame of the agent's code ran: what `ast` parses and the compiler refuses.
        return FailureKind.SYNTAX
    timeout = _TIMEOUT.search(trace)
    if timeout and seconds >= int(timeout[1]):
        return FailureKind.TIMEOUT
    if not _FRAME.match(trace):
        return None
    if last_line.split(":")[0] == "MemoryError":
        return FailureKind.MEMORY
    return FailureKind.API if _is_api_error(trace) else FailureKind.RUNTIME


def _is_api_error(trace: str) -> bool:
    """Whether the exception that left the code, the last one of a chain, stands for an app's error status."""
    last = trace[max((trace.rfind(text) for text in _CHAINED), default=-1) + 1 :]
    return bool(_API.search(last))
