"""Collects the attempts of one evaluation: the outcomes for TGC and SGC, and the results that `predict` returns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import EvalLoopOutput

from gvpo_trl.training import metrics
from gvpo_trl.training.completions import failed_steps


class Evaluation:
    """The attempts of one evaluation or prediction.

    Args:
        dataset: rows with `prompt` and `task_id`, before TRL repeats those of a stream.
        samples: number of attempts at each row.
        predicts: whether the results of the attempts are kept for `predict`.
        has_scores: whether unit tests score the attempts, as TRL's tool loop has none.
    """

    def __init__(self, dataset: Iterable[Mapping[str, Any]], samples: int, predicts: bool, *, has_scores: bool = True):
        self.has_scores = has_scores
        self.dataset = dataset
        self.samples = samples
        self.outcomes: list[tuple[str, bool | None]] = []
        """(task id, whether every test passed) for each attempt so far, on all processes."""
        self.predictions = Predictions(dataset, samples) if predicts else None

    def complete(self, output: EvalLoopOutput, prefix: str, values: Mapping[str, Sequence[float]]) -> EvalLoopOutput:
        """Return TRL's output with the metrics of the trainer, TGC and SGC, all with the evaluation's prefix.

        Args:
            output: what TRL's `evaluation_loop` returned.
            prefix: name of the evaluation, such as "eval" or "eval_dev".
            values: each metric's values of all batches.
        """
        figures = metrics.means(values)
        if self.has_scores:
            attempts = metrics.expected_attempts(self.outcomes, self.dataset, self.samples)
            figures |= metrics.goal_completion(attempts)
        output.metrics.update({f"{prefix}_{name}": value for name, value in figures.items()})
        if self.predictions is None:
            return output
        results, task_ids = self.predictions.in_order()
        return output._replace(predictions=results, label_ids=task_ids)


class Predictions:
    """The results of the attempts at the rows of a data set.

    An evaluation takes the rows in an order of its own, on several processes, and repeats some of them to fill its
    last batch. A row is found again by its content, so rows that are equal in every column may exchange their results.

    Args:
        dataset: rows with `prompt` and `task_id`.
        samples: number of attempts at each row.
    """

    def __init__(self, dataset: Iterable[Mapping[str, Any]], samples: int):
        self.dataset = dataset
        self.samples = samples
        self._columns = getattr(dataset, "column_names", None) or ("prompt", "task_id")
        self._attempts: list[tuple[str, dict[str, Any]]] = []

    def add(
        self,
        rows: Sequence[Mapping[str, Any]],
        completions: Sequence[Any],
        rewards: torch.Tensor,
        weights: torch.Tensor,
        names: Sequence[str],
    ) -> None:
        """Add the attempts of a batch on all processes; every process calls this and keeps all of them.

        Args:
            rows: B rows of this process's batch, which hold what the rollout returned.
            completions: B conversations.
            rewards: (B, functions) unweighted rewards, NaN where a function gave none.
            weights: (functions,)
            names: names of the reward functions.
        """
        totals = (rewards * weights.to(rewards)).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)
        mine = [
            (
                self._key(row),
                {
                    "task_id": row.get("task_id"),
                    "completion": completion,
                    "reward": _given(total),
                    "rewards": {name: _given(value) for name, value in zip(names, values, strict=True)},
                    **_figures(row),
                },
            )
            for row, completion, total, values in zip(
                rows, completions, totals.tolist(), rewards.tolist(), strict=True
            )
        ]
        self._attempts.extend(gather_object(mine))

    def in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (N, samples) results as dictionaries, and the (N,) task ids of the data set's N rows."""
        attempts: dict[str, list[dict[str, Any]]] = {}
        for key, attempt in self._attempts:
            attempts.setdefault(key, []).append(attempt)
        task_ids, results = [], []
        for row in self.dataset:
            left = attempts.get(self._key(row), [])
            task_ids.append(row.get("task_id"))
            results.append([left.pop(0) if left else None for _ in range(self.samples)])
        table = np.empty((len(results), self.samples), dtype=object)
        for number, row in enumerate(results):
            table[number] = row
        return table, np.array(task_ids)

    def _key(self, row: Mapping[str, Any]) -> str:
        return repr([row.get(name) for name in self._columns])


def _given(value: float) -> float | None:
    return None if math.isnan(value) else value


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a row's trajectory, which only rollouts that return one have."""
    trajectory = row.get("trajectory")
    if trajectory is None:
        return {}
    return {
        "success": None if trajectory.score is None else trajectory.score.success,
        "failed_steps": failed_steps(trajectory),
        "turns": len(trajectory.steps),
        "tokens": sum(len(step.action_ids) for step in trajectory.steps),
        "stop": str(trajectory.stop),
        "fault": trajectory.fault,
    }
