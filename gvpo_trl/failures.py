"""The agent's failures: data that shapes the advantage. The machinery's own are in `environments/errors.py`."""

from enum import StrEnum


class FailureKind(StrEnum):
    """Why a step failed, as the place that ran its code said. A step without a kind executed."""

    SYNTAX = "syntax"
    """The code did not parse."""
    RUNTIME = "runtime"
    """An exception left the code."""
    API = "api"
    """An app answered with an error status (401, 409, 422, …) and the code did not catch it."""
    TIMEOUT = "timeout"
    """The step ran past its deadline."""
    FORBIDDEN = "forbidden"
    """The code asked for something that the sandbox refuses."""
    MEMORY = "memory"
    """The code ran out of the memory it is allowed."""
    OUTPUT = "output"
    """The code printed more than the channel takes."""
    EXITED = "exited"
    """The code ended the interpreter that ran it (`os._exit`, `KeyboardInterrupt`): the episode ends as well."""
    NO_CODE = "no_code"
    """The turn held no code to run."""


def classify_step(*, code: str | None, verdict: str | None, no_code_is_failure: bool = True) -> FailureKind | None:
    """Turn what is known of a step into its failure kind, `None` for a step that executed.

    The verdict comes from the execution result in the process that ran the code. The text that the agent sees is never
    searched: `print("Execution failed.")` is a success.

    Args:
        code: what was extracted from the turn, `None` or blank when the turn held no code.
        verdict: the kind that the environment reported, `None` when the code executed.
        no_code_is_failure: whether a turn without code counts as a failed step.

    Raises:
        ValueError: when the verdict is not the name of a failure kind.
    """
    if code is None or not code.strip():
        return FailureKind.NO_CODE if no_code_is_failure else None
    return None if verdict is None else FailureKind(verdict)
