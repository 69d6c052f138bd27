"""A run: plays undisturbed episodes, then disturbed ones, and looks for leftovers."""

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.injection import FaultyEnvironments
from benchmarks.faults.judge import BATCH, Findings, Run
from benchmarks.faults.leftovers import Leftovers, small_disk
from benchmarks.faults.scripts import Scripts
from benchmarks.faults.trainer import make_trainer
from gvpo_trl import MultiTurnRollout
from gvpo_trl.environments.appworld import AppWorldEnvironments, load_tasks

GROUP_SIZES = range(8, 3, -1)
LIMITS = {
    "step_timeout_s": 4,
    "open_timeout_s": 10,
    "evaluate_timeout_s": 8,
    "memory_mb": 1024,
    "max_restarts": 100,
    "rehearse": False,
}
"""Limits of the environments: deadlines are short and memory is small, so misbehaviour costs little time."""
STRAGGLER_S = 0.2


def inject(
    root: Path,
    folder: Path,
    *,
    episodes: int,
    rate: float,
    seed: int,
    max_episodes: int = 6,
    isolation: str = "split",
    venv: Path | None = None,
    **limits: Any,
) -> tuple[Run, Findings]:
    """Play that many disturbed episodes; the run and its findings.

    Args:
        root: data root of the pocket tasks.
        folder: an empty folder, for all files that are written.
        episodes: a multiple of a group size from 4 to 8.
        rate: probability that an attempt's machinery breaks.
        seed: of all draws.
        max_episodes: how many episodes are open at a time.
        isolation: the environments' mode.
        venv: AppWorld's virtual environment.
        limits: further arguments of the environments.
    """
    size = next((size for size in GROUP_SIZES if episodes % size == 0), None)
    if episodes < 1 or size is None:
        raise ValueError(f"episodes={episodes} must be a multiple of a group size from 4 to 8, for example 200.")
    if not 0 <= rate <= 1:
        raise ValueError(f"fault_rate={rate} must be a probability, from 0 to 1.")
    book, findings = Scripts(root, pick_tasks(root), isolation), Findings()
    limits = LIMITS | {"max_episodes": max_episodes, "isolation": isolation, "venv": venv} | limits
    rollout = MultiTurnRollout(None, straggler_s=STRAGGLER_S)
    trainer = make_trainer(root, folder / "trainer", book, rollout, size)
    with temporary_folder(folder / "tmp"), small_disk(folder / "disk") as disk:
        outputs = disk or folder / "outputs"
        outputs.mkdir(exist_ok=True)
        before = Leftovers(folder, root)
        with AppWorldEnvironments(root, output_dir=outputs, **limits) as environments:
            rollout.environments = faults = FaultyEnvironments(environments, rate=rate, seed=seed, disk=disk)
            try:
                run = Run(trainer, faults, findings)
                dice = random.Random(seed)
                groups = [book.draw_group(dice, size) for _ in range(episodes // size)]
                run.learn([script for group in groups for script in group])
                for start in range(0, len(groups), BATCH // size):
                    run.disturb([script for group in groups[start : start + BATCH // size] for script in group])
            finally:
                faults.close()
            findings.leftovers += before.between(environments, faults.idle_evaluators())
        findings.late += faults.late
        findings.leftovers += before.after()
    return run, findings


def pick_tasks(root: Path) -> list[str]:
    """The first training task of each difficulty."""
    rows = load_tasks("train", root=root, prompt="compact")
    first = {row["difficulty"]: row["task_id"] for row in reversed(list(rows))}
    return [first[difficulty] for difficulty in sorted(first)]


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[None]:
    """Make a new folder and use it as the system's temporary folder during the block."""
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
