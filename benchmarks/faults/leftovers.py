"""Finds the processes, descriptors, threads and files that a run has left behind."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gvpo_trl.environments.appworld import AppWorldEnvironments

SETTLING_S = 20.0
"""Seconds that the kernel may take to end killed processes."""
DISK_BYTES = 64 << 20
"""Size of the disk that is filled."""


class Leftovers:
    """The state of this process and some folders before a run, with which a later state is compared.

    Args:
        folders: what they hold now may stay, and nothing else.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._processes = set(host_processes(os.getpid()))
        self._descriptors, self._threads, self._files = descriptors(), set(threading.enumerate()), self._paths()

    def between(self, environments: AppWorldEnvironments, kept: set[int]) -> list[str]:
        """Everything that closed episodes have left behind while their environments are open; one line each.

        Args:
            environments: the environments of the episodes.
            kept: ids of the processes that are meant to wait for the next episode.
        """
        hosts = [keeper.host for keeper in environments.machinery.keepers if keeper.host is not None]
        pids = kept | self._processes | {host.process.pid for host in hosts}
        found = _when_settled(lambda: [f"process {pid}" for pid in host_processes(os.getpid()) if pid not in pids])
        # A host needs one socket, to talk to its trainer. It must have closed the sockets of its children.
        for host in hosts:
            sockets = sum(target.startswith("socket:") for target in descriptors(host.process.pid).values())
            found += [f"{sockets} sockets in the {host.launch.name}"] if sockets > 1 else []
        workspace = environments.machinery.workspace
        for folder in (workspace.outputs, workspace.scratch / "tmp"):
            found += [f"file {path}" for path in folder.rglob("*")]
        return found

    def after(self) -> list[str]:
        """Everything that is there now and was not there at the beginning; one line each."""
        before = self._processes
        found = _when_settled(lambda: [f"process {pid}" for pid in host_processes(os.getpid()) if pid not in before])
        found += [f"thread {thread.name}" for thread in threading.enumerate() if thread not in self._threads]
        for descriptor, target in descriptors().items():
            if descriptor not in self._descriptors:
                found.append(f"descriptor {descriptor} ({target})")
        return found + [f"file {path}" for path in sorted(self._paths() - self._files)]

    def _paths(self) -> set[Path]:
        return {path for folder in self._folders for path in folder.rglob("*")}


def host_processes(trainer: int) -> list[int]:
    """Hosts of that trainer, their children and the processes that those started, without zombies.

    All of them keep the command line of their host, which names the trainer, even when they have another parent now.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
                zombie = b") Z " in (entry / "stat").read_bytes()
            except OSError:
                continue
            if command[-1:] == [b"%d" % trainer] and b"environments/appworld" in b" ".join(command) and not zombie:
                found.append(int(entry.name))
    return found


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a small file system on a new folder; `None` where this process may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)  # something may be left in it
        folder.rmdir()


def descriptors(pid: int | None = None) -> dict[int, str]:
    """The descriptors of a process, by default of this one, and the path that each leads to."""
    found = {}
    folder = Path(f"/proc/{pid or os.getpid()}/fd")
    for entry in folder.iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target != str(folder):
            found[int(entry.name)] = target
    return found


def _when_settled(look) -> list[str]:
    """What `look` finds when `SETTLING_S` are over, or nothing as soon as it finds nothing."""
    deadline = time.monotonic() + SETTLING_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
