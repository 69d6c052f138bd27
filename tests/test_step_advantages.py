"""The shipped rules of step advantages with values worked out by hand, and the errors of a rule of the user's own.

Rows of the batch below, in two groups of two: a winner (Â = 0.25), a loser (Â = −0.25), and two ties. Each row has an
executed step on tokens 0 and 1, an observation on token 2, and a failed step on tokens 3 and 4; token 5 is padding.
"""

import re
from pathlib import Path

import pytest
import torch

from gvpo_trl.failures import FailureKind
from gvpo_trl.objective import shape_advantages
from gvpo_trl.step_advantages import (
    RULES,
    Overwrite,
    Placebo,
    StepAdvantageInputs,
    StepView,
    apply_rule,
    failing_share,
    gvpo,
)

NAN = float("nan")
OUTCOME = torch.tensor([0.25, -0.25, 0.0, 0.0])
ACTIONS = torch.tensor([[1, 1, 0, 1, 1, 0]] * 4)
FAILED = torch.tensor([[0, 0, 0, 1, 1, 0]] * 4)


def steps(*verdicts, penalty=0.2):
    return tuple(
        StepView(
            position=number,
            tokens=(3 * number, 3 * number + 2),
            failed=failed,
            kind=FailureKind.API if failed else None,
            spans=((3 * number, 3 * number + 2),),
            penalty=penalty if failed else 0.0,
        )
        for number, failed in enumerate(verdicts)
    )


def inputs(**changes):
    values = {
        "outcome": OUTCOME,
        "action_mask": ACTIONS,
        "failed_mask": FAILED,
        "group_size": 2,
        "steps": (steps(False, True),) * 4,
    }
    return StepAdvantageInputs(**(values | changes))


def row(executed, failed):
    return [executed, executed, 0.0, failed, failed, 0.0]


@pytest.mark.parametrize(
    ("name", "on_failed"),
    [
        ("multiplicative", (0.0, -0.3, -0.2, -0.2)),
        ("additive", (0.0, -0.45, -0.2, -0.2)),
        ("none", (0.25, -0.25, 0.0, 0.0)),
        ("ties", (0.25, -0.25, -0.2, -0.2)),
        ("losers", (0.25, -0.3, 0.0, 0.0)),
        ("winners", (0.0, -0.25, 0.0, 0.0)),
        ("overwrite", (-0.2, -0.2, -0.2, -0.2)),
        ("mask_failed", (0.0, 0.0, 0.0, 0.0)),
        ("failing_share", (0.25, -0.25, 0.0, 0.0)),  # every row has the same share, so nothing changes
        ("mask_without_success", (0.25, -0.25, 0.0, 0.0)),
    ],
)
def test_rules_by_hand(name, on_failed):
    shaped = apply_rule(RULES[name](0), inputs())
    expected = [row(outcome, failed) for outcome, failed in zip(OUTCOME.tolist(), on_failed, strict=True)]
    torch.testing.assert_close(shaped, torch.tensor(expected))


@pytest.mark.parametrize("mode", ["multiplicative", "additive", "none"])
def test_the_old_modes_are_the_same_to_the_last_bit(mode):
    torch.manual_seed(0)
    outcome, failed = torch.randn(64), (torch.rand(64, 6) < 0.5) & ACTIONS[:1].bool()
    actions = ACTIONS[:1].expand(64, 6)
    given = inputs(outcome=outcome, action_mask=actions, failed_mask=failed, steps=((),) * 64, penalty=0.3)
    assert apply_rule(RULES[mode](0), given).equal(shape_advantages(outcome, actions, failed, 0.3, mode))


def test_every_rule_leaves_an_unscorable_row_alone():
    for name, make in RULES.items():
        shaped = apply_rule(make(0), inputs(outcome=torch.tensor([NAN, 0.0, NAN, NAN])))
        assert not shaped[[0, 2, 3]].any(), name


def test_the_failing_share_is_subtracted_from_the_reward():
    # Shares 1/2 and 0 cost 0.1 and 0, their mean is 0.05; the second group ties.
    given = inputs(steps=(steps(False, True), steps(False, False), steps(True, True), steps(True, True)))
    shaped = apply_rule(failing_share, given)
    torch.testing.assert_close(shaped[:, 0], torch.tensor([0.25 - 0.05, -0.25 + 0.05, 0.0, 0.0]))
    assert shaped[:, 0].equal(shaped[:, 4])
    with pytest.raises(ValueError, match="row 3 begins a group that is split"):
        apply_rule(failing_share, inputs(group_size=3))


def test_the_failing_share_leaves_unscorable_rows_out_of_the_mean():
    given = inputs(outcome=torch.tensor([0.0, NAN, 0.0, 0.0]), steps=(steps(False, True), steps(False, False)) * 2)
    assert apply_rule(failing_share, given)[0].tolist() == [0.0] * 6


def test_an_overwritten_advantage_is_the_given_one():
    assert apply_rule(Overwrite(value=-1.0), inputs())[:, 3].tolist() == [-1.0] * 4


def test_rows_in_which_no_step_executed_are_masked():
    given = inputs(steps=(steps(True, True), steps(False, True), steps(False), ()))
    assert apply_rule(RULES["mask_without_success"](0), given)[:, 0].tolist() == [0.0, -0.25, 0.0, 0.0]


def test_the_placebo_marks_as_many_executed_steps_as_failed():
    views = (steps(False, True), steps(False, False), steps(False, False), steps(False, True, penalty=0.4))
    outcome = torch.zeros(4)
    failed = FAILED * torch.tensor([1, 0, 0, 1]).unsqueeze(1)
    given = inputs(steps=views, outcome=outcome, failed_mask=failed)
    chosen = {apply_rule(Placebo(seed=seed), given) for seed in range(8)}
    for shaped in chosen:
        assert sorted(shaped.unique().tolist()) == pytest.approx([-0.4, -0.2, 0.0])
        assert (shaped != 0).sum() == 4  # two steps of two tokens
        assert not (shaped.bool() & failed.bool()).any()
    assert len({str(shaped.tolist()) for shaped in chosen}) > 1
    assert apply_rule(Placebo(seed=3), given).equal(apply_rule(Placebo(seed=3), given))


def test_the_placebo_marks_all_executed_steps_if_more_failed():
    given = inputs(steps=(steps(True, True), steps(False, True), steps(True, True), steps(True, True)))
    given = inputs(steps=given.steps, outcome=torch.zeros(4))
    assert apply_rule(Placebo(), given).nonzero().tolist() == [[1, 0], [1, 1]]


def test_a_penalty_per_token_reaches_the_rules():
    penalty = torch.zeros(4, 6)
    penalty[:, 3:5] = torch.tensor([0.1, 0.2, 0.3, 0.4]).unsqueeze(1)
    shaped = apply_rule(gvpo, inputs(penalty=penalty))
    torch.testing.assert_close(shaped[:, 3], torch.tensor([0.0, -0.3, -0.3, -0.4]))
    torch.testing.assert_close(apply_rule(Overwrite(), inputs(penalty=penalty))[:, 3], -penalty[:, 3])


def broken(row, token, value):
    def rule(given):
        advantages = gvpo(given).clone()
        advantages[row, token] = value
        return advantages

    return rule


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (broken(2, 3, NAN), "NaN or an infinite value in row 2, token 3"),
        (broken(1, 0, float("inf")), "NaN or an infinite value in row 1, token 0"),
        (broken(3, 2, 0.5), r"a value on a token that was not sampled .* in row 3, token 2: 0.5"),
        (lambda given: gvpo(given)[:3], r"returned shape \(3, 6\), wrong from row 3 on; return \(B, T\) = \(4, 6\)"),
        (lambda given: given.outcome, r"returned shape \(4,\), wrong from row 0 on"),
        (lambda given: None, "returned a NoneType"),
    ],
)
def test_the_errors_of_a_rule_name_the_row(rule, message):
    with pytest.raises(ValueError, match=message):
        apply_rule(rule, inputs())


PAGE = Path(__file__).resolve().parents[1] / "docs" / "step_advantages.md"


def test_the_page_says_where_every_rule_comes_from():
    table = PAGE.read_text(encoding="utf-8").partition("Related options")[0]
    assert re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", table, re.MULTILINE) == ["shaping", *RULES]


def test_the_rule_on_the_page_runs():
    (source,) = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    space = {}
    exec(source, space)
    given = inputs(
        steps=(steps(True, True),) * 4,
        failed_mask=ACTIONS,
        outcome=torch.tensor([0.25, -0.25, 0.0, NAN]),
        group_size=2,
    )
    shaped = apply_rule(space["first_failure_only"], given)
    torch.testing.assert_close(shaped[:, 0], torch.tensor([0.0, -0.3, -0.2, 0.0]))
    torch.testing.assert_close(shaped[:, 3], torch.tensor([0.25, -0.25, 0.0, 0.0]))
