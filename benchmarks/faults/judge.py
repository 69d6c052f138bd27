"""Plays batches of scripts and compares each row with the right result."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.faults.injection import FaultyEnvironments, RowTask
from benchmarks.faults.scripts import Script
from benchmarks.faults.trainer import PENALTY, ScriptedTrainer
from gvpo_trl.failures import FailureKind
from gvpo_trl.rollout.types import StopReason, Trajectory

BATCH = 64
"""Most trajectories of a batch; there are fewer where groups do not divide it."""
BOUNDARIES = ("host", "episode", "protocol", "evaluator")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a script when nothing breaks."""

    failures: tuple[FailureKind | None, ...]
    stop: StopReason
    reward: float


@dataclass(slots=True)
class Findings:
    """Everything that is wrong, one line each."""

    lost: list[str] = field(default_factory=list)
    wrongly_shaped: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


class Run:
    """Plays batches of one trainer and knows the right results of their scripts.

    Args:
        trainer: a trainer whose rollout uses `faults`.
        faults: the environments that break.
        findings: where to write what is wrong.
    """

    def __init__(self, trainer: ScriptedTrainer, faults: FaultyEnvironments, findings: Findings) -> None:
        self.trainer, self.faults, self.findings = trainer, faults, findings
        self.outcomes: dict[Script, Outcome] = {}
        self.misbehaved: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.last: tuple[list[tuple[int, Script, Trajectory]], torch.Tensor, Sequence[str]]
        """The arguments with which `judge` was called last."""
        self._prompts = {row["task_id"]: row["prompt"] for row in trainer.train_dataset}
        self._row = 0

    def learn(self, scripts: Sequence[Script]) -> None:
        """Play each script once undisturbed."""
        rate, self.faults.rate = self.faults.rate, 0.0
        size = self.trainer.num_generations
        left = [script for script in dict.fromkeys(scripts) if script not in self.outcomes]
        left += left[:1] * (-len(left) % size)
        for start in range(0, len(left), BATCH - BATCH % size):
            part = left[start : start + BATCH - BATCH % size]
            for script, trajectory in zip(part, self._play(part)[0], strict=True):
                failures = tuple(step.failure for step in trajectory.steps)
                self.outcomes[script] = Outcome(failures, trajectory.stop, trajectory.reward)
                ended = trajectory.stop is StopReason.AGENT_EXITED
                if trajectory.score is None or trajectory.retries:
                    self.findings.lost.append(f"{script}, undisturbed: {trajectory.fault}")
                elif not self.trainer.book.is_possible(script, list(failures), ended):
                    self.findings.wrongly_shaped.append(f"{script}, undisturbed: {failures}, {trajectory.stop}")
        self.faults.rate = rate

    def disturb(self, scripts: Sequence[Script]) -> None:
        """Play whole groups of scripts while the machinery breaks, and judge every row."""
        first, logged = self._row, []
        with log_of_the_loop(logged):
            try:
                trajectories, batch = self._play(scripts)
            except Exception as error:
                self.findings.lost += [f"{script}: {type(error).__name__}: {error}" for script in scripts]
                return
        self.judge(list(zip(range(first, self._row), scripts, trajectories, strict=True)), batch["advantages"], logged)

    def judge(
        self, rows: list[tuple[int, Script, Trajectory]], advantages: torch.Tensor, logged: Sequence[str]
    ) -> None:
        """Write down what is wrong with a batch.

        Args:
            rows: the number of each row in the whole run, its script and its trajectory.
            advantages: (B, T) what the loss would get.
            logged: what the rollout loop logged.
        """
        self.last = rows, advantages, logged
        for row, script, trajectory in rows:
            self._judge_trajectory(row, script, trajectory)
        self._judge_shaping(rows, advantages)
        self._judge_telling([trajectory for _, _, trajectory in rows], logged)

    def _play(self, scripts: Sequence[Script]) -> tuple[list[Trajectory], dict[str, Any]]:
        """Play a batch; its trajectories, and the batch that the loss would get."""
        self.trainer.scripts = scripts
        inputs = []
        for script in scripts:
            inputs.append({"prompt": self._prompts[script.task_id], "task_id": RowTask(script.task_id, self._row)})
            self._row += 1
        self.trainer.model.train()
        batch = self.trainer._generate_and_score_completions(inputs)
        return [row["trajectory"] for row in inputs], batch

    def _judge_trajectory(self, row: int, script: Script, trajectory: Trajectory) -> None:
        """Compare one row with its script's outcome and with the faults that hit it."""
        name, attempts = f"row {row}, {script}", self.faults.attempts[row]
        outcome, failures = self.outcomes[script], tuple(step.failure for step in trajectory.steps)
        lost, wrong = self.findings.lost, self.findings.wrongly_shaped
        self.totals["retried"] += trajectory.retries
        self.totals["unscorable"] += trajectory.score is None
        if script.kind is not None and len(failures) > script.position:
            self.misbehaved[script.kind] += 1
        if trajectory.task_id != script.task_id or len(attempts) != trajectory.retries + 1:
            lost.append(f"{name}: {len(attempts)} attempts at {trajectory.task_id}, {trajectory.retries} retries")
        broken = attempts if trajectory.score is None else attempts[:-1]
        hits = [attempt.hits for attempt in broken]
        # A disk may be full for longer than an attempt takes; no other fault costs a row both of its attempts.
        twice = len({hit for each in hits for hit in each}) > 1 or any(
            "disk full" in hit for each in hits for hit in each
        )
        if not all(hits) or (len(hits) > 1 and not twice):
            lost.append(f"{name}: {trajectory.fault}; the attempts that broke were hit by {hits}")
        if bool(trajectory.fault) != bool(broken):
            lost.append(f"{name}: {len(broken)} attempts broke, the last fault is {trajectory.fault!r}")
        if trajectory.score is None:
            if failures != outcome.failures[: len(failures)] or trajectory.stop is not StopReason.ENVIRONMENT_LOST:
                wrong.append(f"{name}: {failures}, {trajectory.stop}; undisturbed {outcome}")
        elif Outcome(failures, trajectory.stop, trajectory.reward) != outcome:
            wrong.append(f"{name}: {failures}, {trajectory.stop}, {trajectory.reward}; undisturbed {outcome}")

    def _judge_shaping(self, rows: list[tuple[int, Script, Trajectory]], advantages: torch.Tensor) -> None:
        """Compare every token's advantage with the method's cases, worked out step by step."""
        size = self.trainer.num_generations
        if len(rows) % size or len(advantages) != len(rows):
            self.findings.lost.append(f"{len(advantages)} rows for {len(rows)} scripts in groups of {size}")
            return
        for number, (row, script, trajectory) in enumerate(rows):
            group = [t.reward for _, _, t in rows[number - number % size :][:size] if t.reward is not None]
            expected = []
            for step in trajectory.steps:
                value = _advantage(trajectory.reward, group, step.failure is not None)
                expected += [value] * len(step.action_ids) + [0.0] * len(step.bridge_ids)
            expected += [0.0] * (advantages.shape[1] - len(expected))
            if not torch.allclose(advantages[number], torch.tensor(expected), atol=1e-6, rtol=0):
                self.findings.wrongly_shaped.append(f"row {row}, {script}: advantages of reward {trajectory.reward}")

    def _judge_telling(self, trajectories: Sequence[Trajectory], logged: Sequence[str]) -> None:
        """Check that the log and the metrics report each fault."""
        faults = sum(trajectory.retries + (trajectory.score is None) for trajectory in trajectories)
        told = [line for line in logged if any(f": {boundary}: " in line for boundary in BOUNDARIES)]
        if len(told) != faults:
            self.findings.lost.append(f"{faults} faults, of which the log tells {len(told)}: {logged}")
        unscorable, retries = (sum(t.score is None for t in trajectories), sum(t.retries for t in trajectories))
        for name, count in (("rollout/unscorable", unscorable), ("rollout/retries", retries)):
            metric = self.trainer._metrics["train"][name][-1]
            if not math.isclose(metric, count / len(trajectories), abs_tol=1e-4):
                self.findings.lost.append(f"{name} is {metric}, with {count} of {len(trajectories)} rows")


def _advantage(reward: float | None, group: list[float], failed: bool) -> float:
    """The advantage of a step by the method's definition; 0 in a row without a reward."""
    if reward is None:
        return 0.0
    outcome = reward - sum(group) / len(group)
    if abs(outcome) < 1e-9:
        return -PENALTY if failed else 0.0
    if failed:
        return (1 + PENALTY) * outcome if outcome < 0 else 0.0
    return outcome


@contextlib.contextmanager
def log_of_the_loop(lines: list[str]) -> Iterator[None]:
    """Collect what the rollout loop logs during the block, and silence TRL's dumps of rows without a reward."""
    loop, trl = logging.getLogger("gvpo_trl.rollout.loop"), logging.getLogger("trl.trainer.grpo_trainer")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    propagate, level = loop.propagate, trl.level
    loop.addHandler(handler)
    loop.propagate = False
    trl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loop.removeHandler(handler)
        loop.propagate = propagate
        trl.setLevel(level)
