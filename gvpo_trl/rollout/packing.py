"""Packs a trajectory into the row that TRL trains on.

    completion_ids  turn 1 | bridge 1 | turn 2 | bridge 2 | … | turn n
    env_mask           1   |    0     |    1   |    0     |   |    1
    failed_mask     1 on the sampled tokens of failed steps

A bridge is everything between two turns that the model did not sample: an end-of-turn token that the model left out,
the template's tokens and the observation. A row never holds the bridge of the last step, because TRL regards a
completion as truncated if its last token is not an end-of-sequence token.
"""

from dataclasses import dataclass

from gvpo_trl.failures import FailureKind
from gvpo_trl.rollout.types import Step, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """One row of the batch. All lists but `prompt_ids` have the same length T >= 1."""

    prompt_ids: list[int]
    """(P,)"""
    completion_ids: list[int]
    """(T,)"""
    env_mask: list[int]
    """(T,) 1 where the model sampled the token."""
    failed_mask: list[int]
    """(T,) 1 on the tokens of failed steps that the shaping applies to, a subset of `env_mask`."""
    logprobs: list[float] | None
    """(T,) log-probabilities of sampled tokens, 0.0 elsewhere; `None` when a turn has none."""


def pack(
    trajectory: Trajectory,
    *,
    filler_id: int,
    failure_span: str = "turn",
    masked: bool = False,
    no_code: str = "penalise",
) -> PackedRow:
    """Pack a trajectory into one row.

    Args:
        trajectory: the trajectory, as the loop returned it.
        filler_id: the only token, with mask 0, of a trajectory without turns (TRL fails on an empty completion).
        failure_span: "turn" marks every sampled token of a failed step, "code" only the tokens that hold its code, and
            "statement" only those from the statement that raised to the end of the code.
        masked: whether the whole row is left out of the loss (`mask_truncated_completions`).
        no_code: what becomes of a turn without code that counts as failed. "penalise" marks it as failed, "mask"
            leaves its tokens out of the loss, and "drop" leaves out the whole row.
    """
    # An interpreter may report any verdict, so the turn itself says whether it holds code.
    void = [step.failure is FailureKind.NO_CODE and not (step.code or "").strip() for step in trajectory.steps]
    masked = masked or (no_code == "drop" and any(void))
    ids: list[int] = []
    env_mask: list[int] = []
    failed_mask: list[int] = []
    logprobs: list[float] = []
    has_logprobs = all(step.action_logprobs is not None for step in trajectory.steps)
    for number, step in enumerate(trajectory.steps):
        bridge = step.bridge_ids if number + 1 < len(trajectory.steps) else []
        ids += step.action_ids + bridge
        hidden = masked or (no_code == "mask" and void[number])
        env_mask += [int(not hidden)] * len(step.action_ids) + [0] * len(bridge)
        failed_mask += ([0] * len(step.action_ids) if hidden else _failed(step, failure_span)) + [0] * len(bridge)
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


def spans_of(step: Step, failure_span: str) -> tuple[tuple[int, int], ...]:
    """Return the half-open ranges of a step's sampled tokens that `failure_span` chooses, failed or not.

    "statement" chooses the code where no statement is known: the step executed, or it failed without an exception.
    """
    if failure_span == "turn":
        return ((0, len(step.action_ids)),)
    return (failure_span == "statement" and step.statement_spans) or step.code_spans


def _failed(step: Step, failure_span: str) -> list[int]:
    """Return the `failed_mask` (t,) of a step's sampled tokens."""
    marks = [0] * len(step.action_ids)
    for start, end in spans_of(step, failure_span) if step.failure is not None else ():
        marks[start:end] = [1] * (end - start)
    return marks
