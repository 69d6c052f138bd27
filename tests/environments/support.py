"""Helpers of the environment's tests."""

import os
import textwrap
import time
from pathlib import Path


def solution(root: Path, task_id: str) -> str:
    """The body of a pocket task's reference solution, as agent code."""
    source = (root / "data" / "tasks" / task_id / "ground_truth" / "solution.py").read_text()
    return textwrap.dedent(source.partition("\n")[2])


def split_ids(root: Path, split: str = "train") -> list[str]:
    return (root / "data" / "datasets" / f"{split}.txt").read_text().split()


def processes_below(marker: str) -> list[int]:
    """Processes whose command line or environment names `marker`; zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if b") Z " in (entry / "stat").read_bytes():
                continue
            texts = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in texts:
            found.append(int(entry.name))
    return found


def wait_until(condition, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def kill_host(keeper) -> None:
    """Kill a host as the kernel would; nobody on this side has noticed yet."""
    process = keeper.host.process
    process.kill()
    process.wait()


def children_of(environments) -> list[int]:
    """Ids of the processes that the environments' hosts forked, those of the worlds' host first.

    Evaluators that wait for work are ended before.
    """
    environments.machinery.evaluators.close()
    hosts = [keeper.host.process.pid for keeper in environments.machinery.keepers]
    return [pid for host in hosts for pid in every_pid() if stat_of(pid)[1] == host]


def every_pid() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def stat_of(pid: int) -> tuple[str, int, int]:
    """State, parent and session of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ("", 0, 0)
    return fields[0], int(fields[1]), int(fields[3])
