"""Trajectories to the rows that TRL trains on. Lists of integers in, lists of integers out.

    completion_ids  turn 1 | bridge 1 | turn 2 | bridge 2 | … | turn n
    env_mask           1   |    0     |    1   |    0     |   |    1
    failed_mask     1 on the sampled tokens of failed steps

A bridge is everything between two turns that the model did not sample: a closing end-of-turn token that it left out,
the template's tokens, the observation. The last step's bridge is never part of a row, because TRL takes a last token
that is no end-of-turn token for a truncated completion.
"""

from dataclasses import dataclass

from gvpo_trl.rollout.types import Step, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """One row of the batch; all lists but `prompt_ids` have one length T >= 1."""

    prompt_ids: list[int]
    """(P,)"""
    completion_ids: list[int]
    """(T,)"""
    env_mask: list[int]
    """(T,) 1 where the model sampled the token."""
    failed_mask: list[int]
    """(T,) 1 on the shaped tokens of failed steps, a subset of `env_mask`."""
    logprobs: list[float] | None
    """(T,) log-probabilities when sampled, 0.0 elsewhere; `None` when a turn has none."""


def pack(trajectory: Trajectory, *, filler_id: int, failure_span: str = "turn", masked: bool = False) -> PackedRow:
    """Lay a trajectory out as one row.

    Args:
        trajectory: what the loop returned.
        filler_id: the single, fully masked token of a trajectory without a turn (TRL cannot take an empty completion).
        failure_span: "turn" marks every sampled token of a failed step, "code" only those that hold its code.
        masked: leave the whole row out of the loss (`mask_truncated_completions`).
    """
    ids: list[int] = []
    env_mask: list[int] = []
    failed_mask: list[int] = []
    logprobs: list[float] = []
    has_logprobs = all(step.action_logprobs is not None for step in trajectory.steps)
    for number, step in enumerate(trajectory.steps):
        bridge = step.bridge_ids if number + 1 < len(trajectory.steps) else []
        ids += step.action_ids + bridge
        env_mask += [int(not masked)] * len(step.action_ids) + [0] * len(bridge)
        failed_mask += ([0] * len(step.action_ids) if masked else _failed(step, failure_span)) + [0] * len(bridge)
        logprobs += (step.action_logprobs or [0.0] * len(step.action_ids)) + [0.0] * len(bridge)
    if not ids:
        ids, env_mask, failed_mask, logprobs = [filler_id], [0], [0], [0.0]
    assert len(ids) == len(env_mask) == len(failed_mask) == len(logprobs)
    return PackedRow(
        prompt_ids=trajectory.prompt_ids,
        completion_ids=ids,
        env_mask=env_mask,
        failed_mask=failed_mask,
        logprobs=logprobs if has_logprobs else None,
    )


def _failed(step: Step, failure_span: str) -> list[int]:
    if step.failure is None:
        return [0] * len(step.action_ids)
    if failure_span == "turn":
        return [1] * len(step.action_ids)
    marks = [0] * len(step.action_ids)
    for start, end in step.code_spans:
        marks[start:end] = [1] * (end - start)
    return marks
