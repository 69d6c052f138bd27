"""The verdict on a step, read from AppWorld's text, which is all that a server returns.

Local processes see the objects that decide (`engine/verdicts.py`). A text is weaker evidence: code that prints exactly
what AppWorld writes after a failure, the frame of a traceback included, counts as failed. An agent gains nothing by
that, because a failure is never rewarded. An `ExceptionGroup` counts as a success: AppWorld shows no traceback of it.
"""

import re

from gvpo_trl.failures import FailureKind

FAILED = "Execution failed. Traceback:\n"
_FRAME = re.compile(r' *File "<python-input>", line \d+, in ')
_API = re.compile(r"^Exception: Response status code is \d+:\n(.+)\Z", re.MULTILINE | re.DOTALL)
_TIMEOUT = re.compile(r"^(?:Exception: )?Execution timed out after (\d{1,9}) seconds\.\Z", re.MULTILINE)
_CHAINED = (
    "\nDuring handling of the above exception, another exception occurred:\n",
    "\nThe above exception was the direct cause of the following exception:\n",
)


def verdict_of(code: str, text: str, *, seconds: float) -> FailureKind | None:
    """Return the failure kind of a step, `None` when it executed.

    Args:
        code: the code of the step.
        text: AppWorld's answer, not cut.
        seconds: how long the step took. It tells a time-out from code that only prints the text of one.
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
        # No frame of the agent's code is shown: `ast` can parse the code, but the compiler refuses it.
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
    """Whether the last exception of the chain, which is the one that left the code, reports an app's error status."""
    last = trace[max((trace.rfind(text) for text in _CHAINED), default=-1) + 1 :]
    return bool(_API.search(last))
