"""A private folder for what one environment's processes write, and the removal of folders whose owner was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from gvpo_trl.faults import SetupError

PREFIX = "gvpo-appworld-"


class Workspace:
    """The folders `outputs/` (one per episode) and `scratch/` (HOME and TMPDIR of the hosts), and the hosts' logs.

    Args:
        parent: where to make the workspace; the system's temporary folder by default.

    Raises:
        SetupError: the folder cannot be made, or AppWorld cannot work below it.
    """

    def __init__(self, parent: Path | str | None = None) -> None:
        parent = Path(parent or tempfile.gettempdir()).resolve()
        if "memory" in str(parent):
            raise SetupError(
                f"output_dir={str(parent)!r} contains 'memory', which AppWorld takes for a database in memory; "
                "choose another folder"
            )
        try:
            parent.mkdir(parents=True, exist_ok=True)
            clean_stale(parent)
            while "memory" in (path := tempfile.mkdtemp(prefix=PREFIX, dir=parent)):
                os.rmdir(path)
        except OSError as error:
            raise SetupError(f"output_dir={str(parent)!r} cannot be written: {error.strerror}") from error
        self.path = Path(path)
        # The lock is held as long as the owner lives. A process id would not be enough, because the process that
        # cleans up may see other process ids, for example inside a container.
        self._lock = open(self.path / "owner", "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.outputs = self._folder("outputs")
        self.scratch = self._folder("scratch")
        for name in ("home", "ipython", "tmp"):
            self._folder(f"scratch/{name}")
        self.canary = self._folder("canary") / "evaluation.py"
        """A file that no interpreter may be able to read; each tries before it runs agent code."""
        self.canary.write_text("An interpreter that can read this file is not restricted.\n")

    def _folder(self, name: str) -> Path:
        path = self.path / name
        path.mkdir()
        return path

    def remove(self) -> None:
        """Delete everything; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def clean_stale(parent: Path) -> None:
    """Delete the workspaces below `parent` whose owner is gone."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            with open(path / "owner") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
