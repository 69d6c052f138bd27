"""The mathematics of GVPO as functions of tensors.

Shapes:
    B  number of rows, one per trajectory; consecutive rows of one task form a group
    T  number of completion tokens after padding: sampled turns, template tokens and observations
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
    """Return the outcome advantages Â_i = R_i − mean(R), which are not divided by the standard deviation.

    Args:
        rewards: (B,) outcome rewards; every `group_size` consecutive rows form a group. NaN marks an unscorable
            trajectory, which the mean of its group leaves out and whose advantage is NaN.
        group_size: G, which must divide B.

    Returns:
        (B,) in the dtype of `rewards`. The advantage of a row whose reward equals its group's mean is exactly 0.0,
        because the shaping compares advantages with zero and rounding must not decide that comparison.

    Raises:
        ValueError: the shape is wrong, the group size does not divide B, or a reward is infinite.
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
    # The rounding error of the mean is a few units in the last place of the group's largest reward. A difference
    # below that counts as 0.
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
    """Return the advantages per token A_{i,t} for the outcome advantages and the steps that failed.

    Args:
        advantages: (B,) outcome advantages Â. A row with NaN is unscorable: every token of the row gets 0.
        action_mask: (B, T) nonzero on sampled tokens.
        failed_mask: (B, T) nonzero on the sampled tokens of failed steps.
        penalty: b >= 0, a float or a (B, T) tensor with one penalty per token.
        mode: "multiplicative" is the paper's shaping; "additive" gives Â − b where the step failed and Â < 0; "none"
            gives Â to every action token, whether its step failed or not (GRPO without the standard deviation).

    Returns:
        (B, T) in the dtype of `advantages`, 0 on every token that is not an action.

    Raises:
        ValueError: the shapes differ, the mode is unknown, a penalty is negative, or a failed token is no action.
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
    """Reduce a loss per token to one number.

    - "smtm" (sequence-mean-token-mean) is the paper's: the mean over trajectories of the mean over their action
      tokens. TRL calls it `loss_type="grpo"`.
    - "smts" (sequence-mean-token-sum) is Dr. GRPO's: the mean over trajectories of the sum over their action tokens,
      divided by `max_length` if that is given. TRL calls it `"dr_grpo"`.
    - "token-mean" is the mean over all action tokens of the batch. TRL calls it `"dapo"`.

    Args:
        per_token_loss: (B, T); values outside the action mask have no effect, not even NaN.
        action_mask: (B, T) nonzero on sampled tokens. A row without sampled tokens is a trajectory with loss 0.
        how: the name of the reduction.
        max_length: constant divisor of "smts" (TRL: `max_completion_length`); the other two do not use it.

    Returns:
        A scalar tensor.

    Raises:
        ValueError: the shapes differ, `how` is unknown, or `max_length` is below 1.
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
    """Return the penalty as a float or a (B, T) tensor, or raise a `ValueError`."""
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
