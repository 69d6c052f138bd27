"""Metrics of trajectories and advantages, as sums that can be added over ranks and batches."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gvpo_trl.failures import FailureKind
from gvpo_trl.rollout.types import StopReason, Trajectory


def rollout_sums(trajectories: Sequence[Trajectory], *, has_scores: bool = True) -> dict[str, tuple[float, float]]:
    """Return (sum, count) for each metric name; the metric is their ratio.

    Every batch has the same keys in the same order, so the sums of all ranks can be added in one reduction.

    Args:
        trajectories: the trajectories of this rank.
        has_scores: whether unit tests score trajectories, as an environment's do and TRL's tool loop does not.
    """
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    rows = len(trajectories)
    sums: dict[str, tuple[float, float]] = {
        "steps/failed": (sum(step.failure is not None for step in steps), len(steps)),
        "steps/docs_lookup": (sum(step.looked_at_docs for step in steps), len(steps)),
        "rollout/turns": (len(steps), rows),
        "rollout/unscorable": (sum(trajectory.reward is None for trajectory in trajectories), rows),
        "rollout/retries": (sum(trajectory.retries for trajectory in trajectories), rows),
        "rollout/task_goal_completion": (
            sum(trajectory.score is not None and trajectory.score.success for trajectory in trajectories),
            sum(trajectory.score is not None for trajectory in trajectories),
        ),
    }
    for kind in FailureKind:
        sums[f"steps/failed/{kind}"] = (sum(step.failure is kind for step in steps), len(steps))
    for reason in StopReason:
        sums[f"stop/{reason}"] = (sum(trajectory.stop is reason for trajectory in trajectories), rows)
    sums |= caution_sums(trajectories)
    if not has_scores:
        del sums["rollout/task_goal_completion"], sums["rollout/early_completion"]
    return sums


def caution_sums(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, float]]:
    """Return (sum, count) of metrics that show an agent which avoids failures by doing less or by hiding them.

    `steps/caught_api_errors` is the number of API calls per step that were answered with an error in steps whose code
    executed all the same. `steps/code_tokens` is the number of sampled tokens of code per turn. `steps/docs_calls` is
    the share of API calls that go to `api_docs`. `rollout/early_completion` is the share of scored trajectories in
    which the agent declared the task complete although a test fails.
    """
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    calls = [call for step in steps for call in step.api_calls]
    scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
    early = [t for t in scored if t.stop is StopReason.COMPLETED and not t.score.success]
    return {
        "steps/caught_api_errors": (sum(len(step.caught_api_errors) for step in steps), len(steps)),
        "steps/code_tokens": (sum(end - start for step in steps for start, end in step.code_spans), len(steps)),
        "steps/docs_calls": (sum(call.startswith("api_docs.") for call in calls), len(calls)),
        "rollout/early_completion": (len(early), len(scored)),
    }


def means(values: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Return the mean of each metric's values of all batches, leaving out NaN; `None` for a metric of NaN alone."""
    numbers = {name: [value for value in batches if not math.isnan(value)] for name, batches in values.items()}
    return {name: sum(batches) / len(batches) if batches else None for name, batches in numbers.items()}


def scenario_of(task_id: str) -> str:
    """Return AppWorld's scenario of a task: the task id without the variant's `_1`, `_2` or `_3`."""
    return task_id.rsplit("_", 1)[0]


def goal_completion(outcomes: Iterable[tuple[str, bool | None]]) -> dict[str, float]:
    """Return task goal completion (TGC) and scenario goal completion (SGC) in per cent.

    TGC is the share of attempts in which every test passes. SGC is the share of scenarios in which every test of every
    task passes. With several attempts at each task, the first attempts at a scenario's tasks count as one attempt at
    the scenario, the second attempts as another, and so on.

    Args:
        outcomes: (task id, whether every test passed) for each attempt; `None` marks an attempt that could not be
            scored and is left out.

    Returns:
        `tgc` and `sgc`, which are NaN if no attempt was scored.
    """
    by_task: dict[str, list[bool | None]] = defaultdict(list)
    for task_id, success in outcomes:
        by_task[task_id].append(success)
    scored = [success for attempts in by_task.values() for success in attempts if success is not None]
    by_scenario: dict[str, list[list[bool | None]]] = defaultdict(list)
    for task_id, attempts in by_task.items():
        by_scenario[scenario_of(task_id)].append(attempts)
    scenarios = [
        all(attempt) for tasks in by_scenario.values() for attempt in zip(*tasks, strict=False) if None not in attempt
    ]
    return {"tgc": _percent(scored), "sgc": _percent(scenarios)}


def source_dataset(dataloader: Any) -> Any:
    """Return the data set behind a data loader, without the wrapper in which accelerate shards a stream."""
    dataset = dataloader.dataset
    while not hasattr(dataset, "column_names") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def expected_attempts(
    outcomes: Iterable[tuple[str, bool | None]], dataset: Iterable[dict[str, Any]], samples: int
) -> list[tuple[str, bool | None]]:
    """Return the outcomes without the extra attempts with which samplers fill up the last batch.

    Args:
        outcomes: (task id, whether every test passed) for each attempt.
        dataset: rows with the `task_id` of each expected attempt.
        samples: number of expected attempts for each row.
    """
    left: dict[str, int] = {}
    for example in dataset:
        left[example["task_id"]] = left.get(example["task_id"], 0) + samples
    kept = []
    for task_id, success in outcomes:
        if left.get(task_id, 0) > 0:
            left[task_id] -= 1
            kept.append((task_id, success))
    return kept


def shaping_sums(
    outcome: torch.Tensor, action_mask: torch.Tensor, failed_mask: torch.Tensor, shaped: torch.Tensor
) -> dict[str, tuple[float, float]]:
    """Return the sums for the share of action tokens in each case of the shaping, and for the mean shaped advantage.

    Args:
        outcome: (B,) outcome advantages, NaN where unscorable.
        action_mask: (B, T) true on sampled tokens.
        failed_mask: (B, T) true on the tokens of failed steps, which are a part of `action_mask`.
        shaped: (B, T) shaped advantages.
    """
    tokens = action_mask.bool().sum().item()
    anchor = outcome.unsqueeze(1)
    cases = {"tie": anchor == 0, "negative": anchor < 0, "positive": anchor > 0}
    sums = {f"tokens/failed_{case}": ((failed_mask & rows).sum().item(), tokens) for case, rows in cases.items()}
    return sums | {"advantages/shaped_mean": (shaped.sum().item(), tokens)}


def group_shares(outcome: torch.Tensor, moves: torch.Tensor, group_size: int) -> dict[str, float]:
    """Return the share of groups whose rewards tie, and the share that tie and still have a gradient.

    Args:
        outcome: (B,) outcome advantages of consecutive groups, NaN where unscorable.
        moves: (B,) true where a failed step gives the row a gradient.
        group_size: number of rows in a group.
    """
    tied = (outcome.nan_to_num(nan=0.0).view(-1, group_size) == 0).all(dim=1)
    moved = tied & (moves.view(-1, group_size) != 0).any(dim=1)
    return {
        "groups/zero_variance": tied.float().mean().item(),
        "groups/zero_variance_with_gradient": moved.float().mean().item(),
    }


def _percent(values: Sequence[bool]) -> float:
    return round(100 * sum(values) / len(values), 1) if values else float("nan")
