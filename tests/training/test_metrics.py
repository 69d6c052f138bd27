"""Goal completion and the sums of a batch, compared with values worked out by hand."""

import math

import pytest
import torch

from gvpo_trl.environments.base import Score
from gvpo_trl.failures import FailureKind
from gvpo_trl.rollout.types import Step, StopReason, Trajectory
from gvpo_trl.training.metrics import (
    expected_attempts,
    goal_completion,
    rollout_sums,
    scenario_of,
    shaping_sums,
)
from gvpo_trl.training.outcomes import summarize

SOLVED, MISSED = Score(passed=("a", "b"), failed=()), Score(passed=("a",), failed=("b",))


def step(failure=None, api_calls=()):
    return Step(
        action_ids=[1],
        action_logprobs=None,
        bridge_ids=[],
        text="",
        code=None,
        observation="",
        failure=failure,
        api_calls=api_calls,
    )


def trajectory(task_id="s_1", steps=(), score=SOLVED, stop=StopReason.COMPLETED, **fields):
    return Trajectory(
        task_id=task_id, messages=[], prompt_ids=[1], steps=list(steps), stop=stop, score=score, **fields
    )


@pytest.mark.parametrize(
    ("outcomes", "tgc", "sgc"),
    [
        # One of two scenarios is solved in every variant.
        ({"a_1": [True], "a_2": [True], "a_3": [True], "b_1": [True], "b_2": [False], "b_3": [True]}, 83.3, 50.0),
        # Percentages are rounded to one decimal.
        ({"a_1": [True], "b_1": [False], "c_1": [False]}, 33.3, 33.3),
        # There are two samples. The first attempts at the tasks solve the scenario, the second ones do not.
        ({"a_1": [True, True], "a_2": [True, False]}, 75.0, 50.0),
        # Each sample solves only one of the tasks, so no attempt solves the scenario.
        ({"a_1": [True, False], "a_2": [False, True]}, 50.0, 0.0),
        # An attempt that could not be scored is left out together with that attempt at the scenario.
        ({"a_1": [None, True], "a_2": [False, True]}, 66.7, 100.0),
        ({"a_1": [None], "a_2": [True], "b_1": [False]}, 50.0, 0.0),
        # Only some of the scenario's tasks are in the data set.
        ({"a_2": [True]}, 100.0, 100.0),
    ],
)
def test_goal_completion(outcomes, tgc, sgc):
    attempts = [(task, success) for task, successes in outcomes.items() for success in successes]
    assert goal_completion(attempts) == {"tgc": tgc, "sgc": sgc}
    by_round = [(task, successes[n]) for n in (0, 1) for task, successes in outcomes.items() if n < len(successes)]
    assert goal_completion(iter(by_round)) == {"tgc": tgc, "sgc": sgc}


@pytest.mark.parametrize("outcomes", [[], [("a_1", None)]])
def test_goal_completion_of_nothing_is_nan(outcomes):
    assert all(math.isnan(value) for value in goal_completion(outcomes).values())


def test_scenarios():
    assert [scenario_of(task) for task in ("50e1ac9_1", "50e1ac9_3", "a_b_2")] == ["50e1ac9", "50e1ac9", "a_b"]


def test_what_fills_the_last_batch_up_is_left_out():
    dataset = [{"task_id": "a"}, {"task_id": "b"}, {"task_id": "b"}]
    outcomes = [("a", True), ("b", False), ("b", None), ("a", False), ("b", True), ("c", True)]
    assert expected_attempts(outcomes, dataset, 1) == [("a", True), ("b", False), ("b", None)]
    assert expected_attempts(outcomes, dataset, 2) == [
        ("a", True),
        ("b", False),
        ("b", None),
        ("a", False),
        ("b", True),
    ]


BATCH = [
    trajectory(steps=[step(), step(FailureKind.API, ("venmo.login",)), step(api_calls=("api_docs.show_api_doc",))]),
    trajectory("s_2", steps=[step(FailureKind.NO_CODE)], score=MISSED, stop=StopReason.MAX_TURNS),
    trajectory("t_1", score=None, stop=StopReason.ENVIRONMENT_LOST, retries=1, fault="host: gone"),
]


def test_sums_of_a_batch():
    sums = rollout_sums(BATCH)
    assert sums["steps/failed"] == (2, 4)
    assert sums["steps/failed/api"] == (1, 4)
    assert sums["steps/failed/no_code"] == (1, 4)
    assert sums["steps/failed/syntax"] == (0, 4)
    assert sums["steps/docs_lookup"] == (1, 4)
    assert sums["rollout/turns"] == (4, 3)
    assert sums["rollout/unscorable"] == (1, 3)
    assert sums["rollout/retries"] == (1, 3)
    assert sums["rollout/task_goal_completion"] == (1, 2)
    assert sums["stop/completed"] == sums["stop/max_turns"] == sums["stop/environment_lost"] == (1, 3)


def test_every_batch_has_the_same_keys_in_the_same_order():
    """Ranks add the sums up as one tensor, so they must agree on the order."""
    assert list(rollout_sums([])) == list(rollout_sums(BATCH))
    assert sum(name.startswith("steps/failed/") for name in rollout_sums([])) == len(FailureKind)


def test_a_report():
    assert summarize(BATCH) == {
        "tgc": 50.0,
        "sgc": 0.0,
        "reward": 0.75,
        "failed_step_share": 0.5,
        "docs_step_share": 0.25,
        "turns_per_task": pytest.approx(4 / 3),
        "tasks": 3,
        "attempts": 3,
        "unscorable": 1,
    }


def test_a_report_of_lost_episodes_has_no_figures():
    report = summarize(BATCH[2:])
    assert all(math.isnan(report[name]) for name in ("tgc", "sgc", "reward", "failed_step_share"))
    assert (report["attempts"], report["unscorable"]) == (1, 1)


def test_shares_of_the_shaped_tokens():
    outcome = torch.tensor([0.5, 0.0, -0.5, float("nan")])
    actions = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    failed = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 0]]).bool()
    shaped = torch.tensor([[0.0, 0.5, 0.0], [-0.2, 0.0, 0.0], [-0.5, -0.6, -0.6], [0.0, 0.0, 0.0]])
    assert shaping_sums(outcome, actions, failed, shaped) == {
        "tokens/failed_tie": (1, 8),
        "tokens/failed_negative": (2, 8),
        "tokens/failed_positive": (1, 8),
        "advantages/shaped_mean": (pytest.approx(-1.4), 8),
    }
