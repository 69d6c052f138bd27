"""Advantages of summed rewards: ties that rounding must not break, and rows that nobody may score."""

import pytest
import torch

from gvpo_trl.environments.base import Score
from gvpo_trl.rollout.types import StopReason, Trajectory
from gvpo_trl.training.advantages import summed_advantages, unscorable_rows

NAN = float("nan")


def trajectory(score):
    return Trajectory(task_id="t", messages=[], prompt_ids=[1], steps=[], stop=StopReason.COMPLETED, score=score)


def test_rows_whose_trajectory_has_no_score_are_unscorable():
    rows = [{"trajectory": trajectory(Score(passed=(), failed=("a",)))}, {"trajectory": trajectory(None)}, {}]
    assert unscorable_rows(rows).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("rewards", "group_size", "expected"),
    [
        ([[0.5, 0.25], [0.25, 0.0]], 2, [0.25, -0.25]),
        ([[0.5, NAN], [0.0, NAN], [NAN, NAN]], 3, [0.25, -0.25, NAN]),
        ([[1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]], 2, [0.0, 0.0, 1.0, -1.0]),
    ],
)
def test_the_sum_of_a_row_is_compared_with_the_groups_mean(rewards, group_size, expected):
    advantages = summed_advantages(torch.tensor(rewards), group_size)
    assert advantages.tolist() == pytest.approx(expected, nan_ok=True)


def test_rewards_that_cancel_tie_in_spite_of_rounding():
    """In float32, 0.6 · 1/3 − 0.2 is about 1e-8."""
    rewards = torch.tensor([[1 / 3, -1.0], [0.0, 0.0]]) * torch.tensor([0.6, 0.2])
    assert rewards.sum(dim=1)[0] != 0
    assert summed_advantages(rewards, 2).tolist() == [0.0, 0.0]


def test_a_small_difference_of_large_rewards_is_no_tie():
    assert (summed_advantages(torch.tensor([[100.0, -99.999], [0.0, 0.0]]), 2) != 0).all()


def test_every_function_must_tie_where_asked():
    rewards = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    assert (summed_advantages(rewards, 2) == 0).all()
    assert (summed_advantages(rewards, 2, every_function_ties=True) != 0).all()
