"""Checks that agent code is kept from the answers on this machine, and reports how well."""

import logging
from collections.abc import Sequence

from gvpo_trl.faults import EpisodeFault, SetupError

_log = logging.getLogger(__name__)


class Protection:
    """How well the interpreters of an environment are restricted, and whether that is enough to run agent code.

    Args:
        sandboxed: whether agent code runs in interpreters, and not in its world's process.
        required: whether to refuse agent code where the restriction is not complete.
    """

    def __init__(self, *, sandboxed: bool, required: bool) -> None:
        self.sandboxed, self.required = sandboxed, required
        self.level: str | None = None
        """`"full"`, `"partial"` or `"none"`; `None` until a host of interpreters has said what its kernel offers."""
        self._announced = False

    def __str__(self) -> str:
        if not self.sandboxed:
            return 'isolation="process": agent code runs beside the world and can read the answers'
        return f"agent code runs in a sandbox (level: {self.level})"

    @property
    def enforced(self) -> bool:
        """Whether an interpreter that can read what it must not is refused, and not only warned about."""
        return self.required or self.level == "full"

    def warn(self) -> None:
        """Log once that agent code is not sandboxed."""
        if not self._announced:
            self._announced = True
            _log.warning(str(self))

    def learn(self, level: str, missing: Sequence[str]) -> None:
        """Store what a host of interpreters says of its kernel; the first time, also check and log it.

        Args:
            level: the level of restriction that the kernel allows.
            missing: what the restriction lacks, each with its remedy.

        Raises:
            SetupError: the restriction is required and not complete.
        """
        self.level = level
        if self._announced:
            return
        reasons = "; ".join(missing)
        if level == "full":
            _log.info(str(self))
        elif self.required:
            raise SetupError(f"require_sandbox=True, but the sandbox's level here is {level!r}: {reasons}")
        else:
            _log.warning(
                "AGENT CODE IS NOT FULLY SANDBOXED (level: %s): a policy may learn to read the answers. %s. "
                "require_sandbox=True refuses to run so; see docs/sandbox.md",
                level,
                reasons,
            )
        self._announced = True

    def check_self_test(self, leaks: Sequence[str]) -> None:
        """Decide whether an interpreter may run agent code after its test of itself.

        Args:
            leaks: what the restricted interpreter could do although it must not.

        Raises:
            EpisodeFault: the interpreter may not run agent code.
        """
        if leaks and self.enforced:
            raise EpisodeFault(f"the interpreter is not restricted as it should be: {'; '.join(leaks)}")
