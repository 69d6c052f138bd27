"""What local and remote episodes share: the limits of an episode, and the texts of a step that broke one of them."""

import math
import os
from dataclasses import dataclass

from gvpo_trl.faults import SetupError

KILL_AFTER_S = 1.0
"""Seconds that a step may go on after its deadline, in which AppWorld's own interruption can still end it."""
TIMEOUT_TEXT = "Execution failed. Traceback:\nException: Execution timed out after {} seconds."
"""What the agent reads when its step had to be killed; AppWorld words its own interruption like this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of every episode of an environment.

    Raises:
        SetupError: a value is no number of at least 1.
    """

    step_timeout_s: float
    """Seconds after which the code of a step is interrupted; the step is over `KILL_AFTER_S` later."""
    open_timeout_s: float
    """Deadline for opening a world."""
    evaluate_timeout_s: float
    """Deadline of a task's unit tests."""
    max_interactions: int
    """Executions that AppWorld allows in an episode."""
    max_output_chars: int
    """Longest text of a step that is not cut."""

    def __post_init__(self) -> None:
        check_at_least(1, **{name: getattr(self, name) for name in self.__slots__})

    @property
    def step_ends_after_s(self) -> float:
        """Seconds after which a step is over, whatever its code does."""
        return self.step_timeout_s + KILL_AFTER_S

    @property
    def timeout_text(self) -> str:
        """What the agent reads when its step had to be killed."""
        return TIMEOUT_TEXT.format(int(self.step_timeout_s))


class CommonEnvironment:
    """What local and remote environments share: limits that can be read one by one, and the process they belong to.

    Args:
        limits: the limits of every episode.
    """

    is_checked = True
    """Tells the trainer that it need not try an episode, which would start processes before the model is loaded."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._owner = os.getpid()

    def check_process(self) -> None:
        """Raise a `SetupError` in a fork of the process that made the environment.

        A fork has copies of the sockets and of the record of free places, so both would act on the same worlds.
        """
        if os.getpid() != self._owner:
            raise SetupError(
                f"this environment belongs to process {self._owner} and is used in its fork {os.getpid()}; make "
                "another one there, and use none in the workers of a data loader"
            )

    @property
    def step_timeout_s(self) -> float:
        """Deadline of a step."""
        return self.limits.step_timeout_s

    @property
    def open_timeout_s(self) -> float:
        """Deadline for opening a world."""
        return self.limits.open_timeout_s

    @property
    def evaluate_timeout_s(self) -> float:
        """Deadline of a task's unit tests."""
        return self.limits.evaluate_timeout_s

    @property
    def max_output_chars(self) -> int:
        """Longest text of a step that is not cut."""
        return self.limits.max_output_chars


def check_at_least(minimum: int, **values: float) -> None:
    """Raise a `SetupError` for the first value that is not a finite number of at least `minimum`."""
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < math.inf:
            raise SetupError(f"{name}={value!r} must be a number of at least {minimum}")
