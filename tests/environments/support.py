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
