"""Packing of trajectories into rows, with literal integers and no model."""

import pytest

from gvpo_trl.environments.base import Score
from gvpo_trl.failures import FailureKind
from gvpo_trl.rollout.packing import pack
from gvpo_trl.rollout.types import Step, StopReason, Trajectory

FILLER = 99


def step(ids, bridge=(), *, logprobs=None, failure=None, spans=()):
    return Step(
        action_ids=list(ids),
        action_logprobs=logprobs,
        bridge_ids=list(bridge),
        text="",
        code="x",
        code_spans=spans,
        observation="",
        failure=failure,
    )


def trajectory(*steps, stop=StopReason.COMPLETED):
    return Trajectory(
        task_id="t",
        messages=[],
        prompt_ids=[1, 2, 3],
        steps=list(steps),
        stop=stop,
        score=Score(passed=(), failed=("a",)),
    )


def lengths(row):
    lists = [row.completion_ids, row.env_mask, row.failed_mask]
    return {len(values) for values in (lists if row.logprobs is None else [*lists, row.logprobs])}


def test_turns_and_bridges_alternate_and_only_turns_have_mask_1():
    row = pack(trajectory(step([10, 11], [20, 21, 22]), step([12], [23]), step([13, 14])), filler_id=FILLER)
    assert row.prompt_ids == [1, 2, 3]
    assert row.completion_ids == [10, 11, 20, 21, 22, 12, 23, 13, 14]
    assert row.env_mask == [1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert row.failed_mask == [0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_one_turn():
    row = pack(trajectory(step([10, 11])), filler_id=FILLER)
    assert (row.completion_ids, row.env_mask, row.failed_mask) == ([10, 11], [1, 1], [0, 0])


def test_a_failed_step_marks_its_whole_turn_and_none_of_its_bridge():
    failed = step([12, 13], [23], failure=FailureKind.API)
    row = pack(trajectory(step([10], [20, 21]), failed, step([14])), filler_id=FILLER)
    assert row.completion_ids == [10, 20, 21, 12, 13, 23, 14]
    assert row.failed_mask == [0, 0, 0, 1, 1, 0, 0]


def test_code_spans_mark_the_code_of_a_failed_step_alone():
    failed = step([10, 11, 12, 13, 14], [20], failure=FailureKind.RUNTIME, spans=((1, 3), (4, 5)))
    succeeded = step([15, 16], spans=((0, 1),))
    row = pack(trajectory(failed, succeeded), filler_id=FILLER, failure_span="code")
    assert row.completion_ids == [10, 11, 12, 13, 14, 20, 15, 16]
    assert row.failed_mask == [0, 1, 1, 0, 1, 0, 0, 0]


def test_a_failed_step_without_code_has_no_code_to_mark():
    row = pack(trajectory(step([10, 11], failure=FailureKind.NO_CODE)), filler_id=FILLER, failure_span="code")
    assert row.failed_mask == [0, 0]


def test_logprobs_stand_at_the_sampled_tokens():
    steps = step([10, 11], [20, 21], logprobs=[-0.5, -1.0]), step([12], logprobs=[-2.0])
    row = pack(trajectory(*steps), filler_id=FILLER)
    assert row.logprobs == [-0.5, -1.0, 0.0, 0.0, -2.0]


def test_one_turn_without_logprobs_leaves_the_row_without():
    row = pack(trajectory(step([10], [20], logprobs=[-0.5]), step([11])), filler_id=FILLER)
    assert row.logprobs is None
    assert row.completion_ids == [10, 20, 11]


def test_a_trajectory_without_turns_is_one_masked_filler():
    row = pack(trajectory(stop=StopReason.ENVIRONMENT_LOST), filler_id=FILLER)
    assert (row.completion_ids, row.env_mask, row.failed_mask, row.logprobs) == ([99], [0], [0], [0.0])


def test_a_bridge_after_the_last_turn_is_dropped():
    row = pack(trajectory(step([10], [20]), step([11], [21, 22])), filler_id=FILLER)
    assert (row.completion_ids, row.env_mask) == ([10, 20, 11], [1, 0, 1])


@pytest.mark.parametrize("span", ["turn", "code"])
def test_a_masked_row_keeps_its_tokens_and_has_no_mask(span):
    failed = step([10, 11], [20], failure=FailureKind.SYNTAX, spans=((0, 2),), logprobs=[-1.0, -2.0])
    row = pack(trajectory(failed, step([12], logprobs=[-3.0])), filler_id=FILLER, failure_span=span, masked=True)
    assert row.completion_ids == [10, 11, 20, 12]
    assert (row.env_mask, row.failed_mask) == ([0, 0, 0, 0], [0, 0, 0, 0])
    assert row.logprobs == [-1.0, -2.0, 0.0, -3.0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_list_has_one_length_and_failed_tokens_are_sampled_ones(count, masked):
    steps = [step([10] * (n + 1), [20] * n, logprobs=[-1.0] * (n + 1), failure="api") for n in range(count)]
    row = pack(trajectory(*steps), filler_id=FILLER, masked=masked)
    assert lengths(row) == {max(1, sum(range(1, count + 1)) + sum(range(count - 1)))}
    assert all(failed <= sampled for failed, sampled in zip(row.failed_mask, row.env_mask, strict=True))


def test_packing_changes_nothing_of_the_trajectory():
    steps = step([10], [20]), step([11], [21])
    pack(trajectory(*steps), filler_id=FILLER)
    assert [(s.action_ids, s.bridge_ids) for s in steps] == [([10], [20]), ([11], [21])]


@pytest.mark.parametrize("no_code", ["mask", "drop"])
def test_an_interpreter_that_reports_no_code_cannot_take_its_turn_out_of_the_loss(no_code):
    """The agent controls its interpreter, and `step` above holds code."""
    row = pack(trajectory(step([10, 11], failure=FailureKind.NO_CODE)), filler_id=FILLER, no_code=no_code)
    assert (row.env_mask, row.failed_mask) == ([1, 1], [1, 1])
