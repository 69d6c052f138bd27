"""The agent's failures, which are data and shape the advantage. Faults of our machinery are in `faults.py`."""

from enum import StrEnum


class FailureKind(StrEnum):
    """Why a step failed, as reported by the process that ran its code. A step that executed has no kind."""

    SYNTAX = "syntax"
    """The code did not parse."""
    RUNTIME = "runtime"
    """The code raised an exception and did not catch it."""
    API = "api"
    """An app answered with an error status (401, 409, 422, …) and the code did not catch it."""
    CAUGHT_API = "caught_api"
    """An app answered with an error status and the code caught it; a failure with `caught_api_errors_fail` alone."""
    TIMEOUT = "timeout"
    """The step ran past its deadline."""
    FORBIDDEN = "forbidden"
    """The code called something that is not allowed."""
    MEMORY = "memory"
    """The code needed more memory than it may have."""
    OUTPUT = "output"
    """The code printed more than one answer may hold."""
    EXITED = "exited"
    """The code ended its own interpreter (`os._exit`, `KeyboardInterrupt`), which ends the episode as well."""
    NO_CODE = "no_code"
    """The turn held no code to run."""
    UNKNOWN_TOOL = "unknown_tool"
    """The turn called a tool that does not exist."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """The turn called a tool with arguments that do not parse or do not fit."""


def classify_step(
    *, code: str | None, verdict: str | None, no_code_is_failure: bool = True, caught_api_errors: int = 0
) -> FailureKind | None:
    """Return why a step failed, or `None` for a step that executed.

    The verdict comes from the process that ran the code. The text that the agent sees is never searched, so
    `print("Execution failed.")` is a success.

    Args:
        code: the code of the turn; `None` or blank when the turn held no code.
        verdict: the kind that the environment reported; `None` when the code executed.
        no_code_is_failure: whether a turn without code counts as a failed step.
        caught_api_errors: API calls that failed in a step whose code executed, where these count as failures.

    Raises:
        ValueError: the verdict is not the name of a failure kind.
    """
    if code is None or not code.strip():
        return FailureKind.NO_CODE if no_code_is_failure else None
    if verdict is not None:
        return FailureKind(verdict)
    return FailureKind.CAUGHT_API if caught_api_errors else None
