"""Metrics of agents that avoid failures by doing less or by hiding them, with values worked out by hand."""

import pytest

from gvpo_trl.environments.base import Score
from gvpo_trl.failures import FailureKind
from gvpo_trl.reporting.traces import to_json
from gvpo_trl.reporting.viewer import render
from gvpo_trl.rollout.types import Step, StopReason, Trajectory
from gvpo_trl.training.metrics import caution_sums, rollout_sums

SOLVED, MISSED = Score(passed=("a",), failed=()), Score(passed=("a",), failed=("b",))


def step(failure=None, calls=(), errors=(), spans=()):
    return Step(
        action_ids=[1] * 9,
        action_logprobs=None,
        bridge_ids=[],
        text="try it",
        code="x",
        code_spans=spans,
        observation="",
        failure=failure,
        api_calls=calls,
        api_errors=errors,
    )


def trajectory(*steps, stop=StopReason.COMPLETED, score=SOLVED):
    return Trajectory(task_id="t", messages=[], prompt_ids=[1], steps=list(steps), stop=stop, score=score)


def test_caution_by_hand():
    calls = ("api_docs.show_api_doc", "spotify.login", "spotify.login")
    sums = caution_sums(
        [
            trajectory(step(calls=calls, errors=("spotify.login",) * 2, spans=((1, 4), (5, 7))), step()),
            trajectory(step(FailureKind.API, calls=("venmo.pay",), errors=("venmo.pay",)), score=MISSED),
            trajectory(step(FailureKind.CAUGHT_API, errors=("venmo.pay",)), score=MISSED, stop=StopReason.MAX_TURNS),
            trajectory(score=None),
        ]
    )
    assert sums == {
        "steps/caught_api_errors": (3, 4),
        "steps/code_tokens": (5, 4),
        "steps/docs_calls": (1, 4),
        "rollout/early_completion": (1, 3),
    }


def test_a_batch_without_steps_has_the_same_keys():
    assert caution_sums([]).keys() <= rollout_sums([]).keys()


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ((), "executed -"),
        (("a.b",), "executed, 1 API error: a.b"),
        (("a.b", "a.c"), "executed, 2 API errors: a.b, a.c"),
    ],
)
def test_traces_and_the_viewer_name_the_calls(errors, words):
    trace = {"mode": "train", "step": 1, **to_json(trajectory(step(calls=errors, errors=errors)))}
    assert trace["steps"][0]["api_errors"] == list(errors)
    assert words in "\n".join(render(trace))
    del trace["steps"][0]["api_errors"]
    assert "executed -" in "\n".join(render(trace)), "traces of earlier versions are shown"
