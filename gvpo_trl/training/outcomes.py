"""The outcome of an attempt in numbers, which an evaluation keeps, and the figures of many attempts."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from gvpo_trl.rollout.types import Trajectory
from gvpo_trl.training.metrics import goal_completion, scenario_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the figures of an evaluation need of one attempt."""

    task_id: str
    success: bool | None
    """Whether every test passed; `None` for an attempt that could not be scored."""
    reward: float | None
    turns: int
    failed_steps: int
    docs_steps: int
    """Steps that called the `api_docs` app."""
    stop: str
    """Why the attempt ended."""


def outcome_of(trajectory: Trajectory) -> Outcome:
    """Return the outcome of a trajectory."""
    return Outcome(
        task_id=trajectory.task_id,
        success=trajectory.score.success if trajectory.score else None,
        reward=trajectory.reward,
        turns=len(trajectory.steps),
        failed_steps=sum(step.failure is not None for step in trajectory.steps),
        docs_steps=sum(step.looked_at_docs for step in trajectory.steps),
        stop=str(trajectory.stop),
    )


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the figures of a report: `tgc` and `sgc` (per cent), `reward`, `failed_step_share` and so on."""
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    steps = sum(outcome.turns for outcome in outcomes)
    return {
        **goal_completion((outcome.task_id, outcome.success) for outcome in outcomes),
        "reward": _mean(rewards),
        "failed_step_share": _share(sum(outcome.failed_steps for outcome in outcomes), steps),
        "docs_step_share": _share(sum(outcome.docs_steps for outcome in outcomes), steps),
        "turns_per_task": _share(steps, len(outcomes)),
        "tasks": len({outcome.task_id for outcome in outcomes}),
        "attempts": len(outcomes),
        "unscorable": len(outcomes) - len(rewards),
    }


def standard_errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the standard errors of `tgc`, `sgc` (both in per cent) and `reward`, clustered by scenario.

    Attempts at one task, and the tasks of one scenario, resemble each other, so the deviations from the mean are added
    within a scenario before they are squared: SE² = C / (C − 1) · Σ_c (Σ_i (x_i − x̄))² / n², with C scenarios and n
    values. The errors are NaN for fewer than two scenarios.
    """
    scored = [outcome for outcome in outcomes if outcome.success is not None]
    by_scenario: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for outcome in scored:
        by_scenario[scenario_of(outcome.task_id)][outcome.task_id].append(outcome.success)
    scenarios = [
        (scenario, 100.0 * all(attempt))
        for scenario, tasks in by_scenario.items()
        for attempt in zip(*tasks.values(), strict=False)
    ]
    return {
        "tgc": _clustered([(scenario_of(outcome.task_id), 100.0 * outcome.success) for outcome in scored]),
        "sgc": _clustered(scenarios),
        "reward": _clustered([(scenario_of(o.task_id), o.reward) for o in outcomes if o.reward is not None]),
    }


def _clustered(values: Sequence[tuple[Hashable, float]]) -> float:
    """Return the standard error of the mean of (cluster, value) pairs."""
    if not values:
        return math.nan
    mean = _mean([value for _, value in values])
    sums: dict[Hashable, float] = defaultdict(float)
    for cluster, value in values:
        sums[cluster] += value - mean
    clusters = len(sums)
    if clusters < 2:
        return math.nan
    return math.sqrt(clusters / (clusters - 1) * sum(total**2 for total in sums.values())) / len(values)


def _mean(values: Sequence[float]) -> float:
    return _share(sum(values), len(values))


def _share(total: float, count: int) -> float:
    return total / count if count else math.nan


def summarize(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the figures of trajectories; see `figures`."""
    return figures([outcome_of(trajectory) for trajectory in trajectories])


Ended = Callable[[int, Trajectory], None]
"""Is called when an attempt has ended, with the number of its row among all rows of an evaluation."""
