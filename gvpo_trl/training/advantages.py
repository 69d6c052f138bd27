"""Outcome advantages of rows that several reward functions score."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gvpo_trl.objective import outcome_advantages


def unscorable_rows(rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Return (B,), true on the rows whose trajectory could not be scored.

    A reward function that looks at turns or steps alone still returns a number for such a row, which must not count.

    Args:
        rows: B rows of the batch, which hold what the rollout returned.
    """
    return torch.tensor(["trajectory" in row and row["trajectory"].score is None for row in rows])


def summed_advantages(rewards: torch.Tensor, group_size: int, *, every_function_ties: bool = False) -> torch.Tensor:
    """Return the (B,) outcome advantages of summed rewards: exactly 0 for a tie, NaN for an unscorable row.

    Args:
        rewards: (B, functions) weighted rewards of consecutive groups, NaN where a function gave none.
        group_size: number of rows in a group.
        every_function_ties: whether a row ties only if it equals its group's mean in every function, and not already
            if its sum does. A value other than 0 then only says that the row does not tie.
    """
    total = rewards.nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)
    advantages = outcome_advantages(total, group_size)
    if every_function_ties:
        each = torch.stack([outcome_advantages(column, group_size) for column in rewards.T])
        return torch.where(advantages.isnan(), advantages, each.nan_to_num(nan=0.0).abs().sum(dim=0))
    # Rewards of opposite signs cancel, so the rounding error of a sum is that of its largest terms.
    terms = rewards.abs().nansum(dim=1).view(-1, group_size).amax(dim=1).repeat_interleave(group_size)  # (B,)
    return advantages.masked_fill(advantages.abs() <= 8 * torch.finfo(rewards.dtype).eps * terms, 0.0)


def outcome_of_rows(trainer: Any, trl_advantages: torch.Tensor, rewards_per_func: torch.Tensor) -> torch.Tensor:
    """Return the (B,) outcome advantages of this rank's rows: exactly 0 for a tie, NaN for an unscorable row.

    TRL's own advantages are kept where its options ask for more than R − mean(R): for a scaling, or for several
    rewards that are normalized one by one.

    Args:
        trainer: a `GVPOTrainer`.
        trl_advantages: (B,) advantages of this rank's rows, as TRL computed them.
        rewards_per_func: (B over all ranks, reward functions) unweighted rewards.
    """
    rewards = rewards_per_func * trainer.reward_weights.to(rewards_per_func)
    normalized = trainer.multi_objective_aggregation == "normalize_then_sum"
    everyone = summed_advantages(rewards, trainer._group_size, every_function_ties=normalized)
    rows = trl_advantages.numel()
    outcome = everyone[trainer.accelerator.process_index * rows :][:rows]
    if trainer.scale_rewards == "none" and not normalized:
        return outcome
    return torch.where((outcome == 0) | outcome.isnan(), outcome, trl_advantages)
