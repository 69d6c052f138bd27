"""The two reward functions that come with the package."""

import pytest

from gvpo_trl.rewards import passed_tests_share, task_goal_completion

PASSED = [["a", "b"], ["a"], [], None, []]
FAILED = [[], ["b", "c"], ["a"], None, []]


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        (passed_tests_share, [1.0, 1 / 3, 0.0, None, 0.0]),
        (task_goal_completion, [1.0, 0.0, 0.0, None, 0.0]),
    ],
)
def test_rewards(function, rewards):
    assert function(passed_tests=PASSED, failed_tests=FAILED, prompts=[], trainer_state=None) == rewards


@pytest.mark.parametrize("function", [passed_tests_share, task_goal_completion])
def test_columns_of_different_lengths_are_a_bug(function):
    with pytest.raises(ValueError, match="shorter"):
        function(passed_tests=[["a"], ["b"]], failed_tests=[[]])
