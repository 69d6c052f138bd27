"""The mathematics of GVPO, on tensors alone.

Shapes:
    B  rows: trajectories, consecutive rows of one task form a group
    T  completion tokens after padding: sampled turns, template tokens and observations
    G  group size

Source: "Group Verification-based Policy Optimization for Interactive Coding Agents" (ICLR 2026). With R_i the outcome
reward of trajectory i and b the failure penalty:

    Â_i     = R_i − mean(R over the group)
    A_{i,t} = Â_i               t in a step that executed
            = Â_i − b           t in a failed step and Â_i = 0
            = (1 + b)·Â_i       t in a failed step and Â_i < 0
            = 0                 otherwise: other tokens, and a failed step with Â_i > 0
"""

from typing import Literal

import torch

ShapingMode = Literal["multiplicative", "additive", "none"]
Aggregation = Literal["smtm", "smts", "token-mean"]
SHAPING_MODES: tuple[str, ...] = ("multiplicative", "additive", "none")
AGGREGATIONS: tuple[str, ...] = ("smtm", "smts", "token-mean")


def outcome_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Outcome advantage Â_i = R_i − mean(R), without division by the standard deviation.

    Args:
        rewards: (B,) outcome rewards; consecutive runs of `group_size` rows form a group. NaN marks an unscorable
            trajectory: it is left out of its group's mean and comes out as NaN.
        group_size: G, which must divide B.

    Returns:
        (B,) in the dtype of `rewards`. A row that equals its group's mean is exactly 0.0: the case Â = 0 of the
        shaping is a comparison with zero, and rounding must not decide it.

    Raises:
        ValueError: on a wrong shape, a group size that does not divide B, or an infinite reward.
    """
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be (B,), one reward per trajectory.")
    if group_size < 1 or rewards.numel() % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide the {rewards.numel()} rewards; pass whole groups of "
            "consecutive rows."
        )
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    if torch.isinf(rewards).any():
        raise ValueError("rewards holds an infinite value; use NaN for a trajectory that cannot be scored.")
    if rewards.numel() == 0:
        return rewards.clone()
    grouped = rewards.double().view(-1, group_size)
    advantages = grouped - grouped.nanmean(dim=1, keepdim=True)
    # A mean of G rewards is off by a few units in the last place of the largest: below that there is no difference.
    scale = grouped.abs().nan_to_num(nan=0.0).amax(dim=1, keepdim=True)
    noise = 8 * torch.finfo(rewards.dtype).eps * scale
    advantages = advantages.masked_fill(advantages.abs() <= noise, 0.0)
    return advantages.view(-1).to(rewards.dtype)


def shape_advantages(
    advantages: torch.Tensor,
    action_mask: torch.Tensor,
    failed_mask: torch.Tensor,
    penalty: float | torch.Tensor = 0.2,
    mode: ShapingMode = "multiplicative",
) -> torch.Tensor:
    """Per-token advantages A_{i,t} from the outcome advantages and the steps that failed.

    Args:
        advantages: (B,) outcome advantages Â. A NaN row is unscorable: every token of it gets 0.
        action_mask: (B, T) nonzero on sampled tokens.
        failed_mask: (B, T) nonzero on the sampled tokens of failed steps.
        penalty: b >= 0, a float or a (B, T) tensor of penalties per token.
        mode: "multiplicative" is the paper's; "additive" gives Â − b where the step failed and Â < 0; "none" gives
            Â to every action token, failed or not (GRPO without std).

    Returns:
        (B, T) in the dtype of `advantages`, 0 on every token that is not an action.

    Raises:
        ValueError: on mismatched shapes, an unknown mode, a negative penalty, or a failed token that is no action.
    """
    if advantages.dim() != 1 or action_mask.dim() != 2 or action_mask.shape[0] != advantages.shape[0]:
        raise ValueError(
            f"advantages {tuple(advantages.shape)} and action_mask {tuple(action_mask.shape)} must be (B,) and (B, T)."
        )
    if failed_mask.shape != action_mask.shape:
        raise ValueError(
            f"failed_mask {tuple(failed_mask.shape)} must have the shape of action_mask {tuple(action_mask.shape)}."
        )
    if mode not in SHAPING_MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(SHAPING_MODES)}.")
    penalty = _checked_penalty(penalty, advantages, action_mask)
    actions, failed = action_mask.bool(), failed_mask.bool()
    if (failed & ~actions).any():
        raise ValueError("failed_mask marks a token outside action_mask; only sampled tokens are part of a step.")

    outcome = advantages.unsqueeze(1).expand(action_mask.shape)  # (B, T)
    shaped = outcome
    if mode != "none":
        worse = outcome - penalty if mode == "additive" else (1 + penalty) * outcome
        on_failed = torch.where(outcome == 0, outcome - penalty, torch.where(outcome < 0, worse, 0.0))
        shaped = torch.where(failed, on_failed, outcome)
    return torch.where(actions & ~outcome.isnan(), shaped, 0.0).to(advantages.dtype)


def aggregate_loss(
    per_token_loss: torch.Tensor,
    action_mask: torch.Tensor,
    how: Aggregation,
    max_length: int | None = None,
) -> torch.Tensor:
    """Reduce a per-token loss to one number.

    "smtm" (sequence-mean-token-mean, the paper's): mean over trajectories of the mean over their action tokens; TRL
    calls it `loss_type="grpo"`. "smts" (sequence-mean-token-sum, Dr. GRPO): mean over trajectories of the sum over
    their action tokens, divided by `max_length` when it is given; TRL's `"dr_grpo"`. "token-mean": mean over all
    action tokens of the batch; TRL's `"dapo"`.

    Args:
        per_token_loss: (B, T); what stands outside the action mask never counts, not even NaN.
        action_mask: (B, T) nonzero on sampled tokens. A row without any counts as a trajectory with loss 0.
        how: one of the three.
        max_length: constant divisor of "smts" (TRL: `max_completion_length`); the other two have their own divisor.

    Returns:
        A scalar tensor.

    Raises:
        ValueError: on mismatched shapes, an unknown `how`, or a `max_length` below 1.
    """
    if per_token_loss.dim() != 2 or per_token_loss.shape != action_mask.shape:
        raise ValueError(
            f"per_token_loss {tuple(per_token_loss.shape)} and action_mask {tuple(action_mask.shape)} must be (B, T)."
        )
    if how not in AGGREGATIONS:
        raise ValueError(f"how={how!r} must be one of {', '.join(AGGREGATIONS)}.")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1, or None for no divisor.")
    mask = action_mask.bool()
    loss = torch.where(mask, per_token_loss, 0.0)
    lengths = mask.sum(dim=1)  # (B,)
    if how == "token-mean":
        return loss.sum() / lengths.sum().clamp(min=1)
    if how == "smts":
        return loss.sum(dim=1).mean() / (max_length or 1)
    return (loss.sum(dim=1) / lengths.clamp(min=1)).mean()


def _checked_penalty(
    penalty: float | torch.Tensor, advantages: torch.Tensor, action_mask: torch.Tensor
) -> torch.Tensor | float:
    if isinstance(penalty, torch.Tensor) and penalty.dim() > 0:
        if penalty.shape != action_mask.shape:
            raise ValueError(
                f"penalty has shape {tuple(penalty.shape)}; it must be a float or {tuple(action_mask.shape)}."
            )
        if not bool((penalty >= 0).all()):
            raise ValueError("penalty holds a negative value or NaN; every penalty must be >= 0.")
        return penalty.to(advantages.dtype)
    value = float(penalty)
    if not 0 <= value < float("inf"):
        raise ValueError(f"penalty={value} must be >= 0 and finite; mode='none' turns shaping off.")
    return value
