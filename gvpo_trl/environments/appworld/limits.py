"""What local and remote episodes share: the checks of their numbers and the text of a step past its deadline."""

import math

from gvpo_trl.faults import SetupError

KILL_AFTER_S = 1.0
"""How long a step may outlive its deadline, the time in which AppWorld's own interruption can still end it."""
TIMEOUT_TEXT = "Execution failed. Traceback:\nException: Execution timed out after {} seconds."
"""AppWorld's own words, for a step that did not let itself be interrupted."""


def check_at_least(minimum: int, **values: float) -> None:
    """Raise a `SetupError` for the first value that is no finite number of at least `minimum`."""
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < math.inf:
            raise SetupError(f"{name}={value!r} must be a number of at least {minimum}")
