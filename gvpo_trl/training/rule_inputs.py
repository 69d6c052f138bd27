"""Makes the argument of a step-advantage rule from the rows of a batch, and chooses the rule."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from gvpo_trl.rollout.packing import spans_of
from gvpo_trl.rollout.types import Trajectory
from gvpo_trl.step_advantages import (
    RULES,
    StepAdvantageInputs,
    StepAdvantageRule,
    StepView,
    penalty_of,
    penalty_tensor,
)

Penalty = float | dict[str, float]


def choose_rule(rule: StepAdvantageRule | None, args: Any) -> StepAdvantageRule:
    """Return the given rule, or the one that `args.shaping` names.

    Args:
        rule: the argument `step_advantages` of the trainer.
        args: a `GVPOConfig`.

    Raises:
        ValueError: the rule is not callable, or `args.shaping` names another one.
    """
    if rule is None:
        return RULES[args.shaping](args.seed)
    if not callable(rule):
        raise ValueError(
            f"step_advantages={rule!r} must be a function of StepAdvantageInputs; shaping={rule!r} takes a name."
        )
    if args.shaping != "multiplicative":
        raise ValueError(f"step_advantages and shaping={args.shaping!r} are two rules; leave one of them out.")
    return rule


def rule_inputs(
    rows: Sequence[Mapping[str, Any]],
    outcome: torch.Tensor,
    action_mask: torch.Tensor,
    failed_mask: torch.Tensor,
    group_size: int,
    args: Any,
) -> StepAdvantageInputs:
    """Return the argument of a rule.

    Args:
        rows: B rows of the batch, which hold what the rollout returned. A row without a `trajectory`, from a rollout
            of the user's own, has a step for each run of sampled tokens.
        outcome: (B,) outcome advantages, NaN where unscorable.
        action_mask: (B, T)
        failed_mask: (B, T)
        group_size: number of rows in a group.
        args: a `GVPOConfig`.
    """
    steps = tuple(
        _views(row["trajectory"], args.failure_span, args.failure_penalty)
        if "trajectory" in row
        else _views_of_masks(action_mask[number], failed_mask[number], args.failure_penalty)
        for number, row in enumerate(rows)
    )
    return StepAdvantageInputs(
        outcome=outcome,
        action_mask=action_mask,
        failed_mask=failed_mask,
        group_size=group_size,
        steps=steps,
        penalty=penalty_tensor(args.failure_penalty, steps, action_mask),
    )


def _views(trajectory: Trajectory, failure_span: str, penalty: Penalty) -> tuple[StepView, ...]:
    views, start = [], 0
    for position, step in enumerate(trajectory.steps):
        views.append(
            StepView(
                position=position,
                tokens=(start, start + len(step.action_ids)),
                failed=step.failure is not None,
                kind=step.failure,
                spans=tuple((start + begin, start + end) for begin, end in spans_of(step, failure_span)),
                api_calls=step.api_calls,
                api_errors=step.api_errors,
                penalty=0.0 if step.failure is None else penalty_of(penalty, step.failure),
            )
        )
        start += len(step.action_ids) + len(step.bridge_ids)
    return tuple(views)


def _views_of_masks(actions: torch.Tensor, failed: torch.Tensor, penalty: Penalty) -> tuple[StepView, ...]:
    """Return a step for each run of sampled tokens in a row's masks (T,)."""
    edges = torch.nn.functional.pad(actions.bool().int(), (1, 1)).diff().nonzero().flatten().tolist()
    views = []
    for position, (start, end) in enumerate([*pairwise(edges)][::2]):
        is_failed = bool(failed[start:end].any())
        views.append(
            StepView(
                position=position,
                tokens=(start, end),
                failed=is_failed,
                spans=((start, end),),
                penalty=penalty_of(penalty, None) if is_failed else 0.0,
            )
        )
    return tuple(views)
