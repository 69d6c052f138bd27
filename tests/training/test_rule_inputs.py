"""The rule of a trainer, its argument, and the options that decide what a failed step costs."""

import dataclasses

import pytest
import torch

from gvpo_trl import MultiTurnRollout
from gvpo_trl.failures import FailureKind
from gvpo_trl.step_advantages import RULES, StepAdvantageInputs, gvpo, outcome_only
from tests.support.toy import ToyEnvironment
from tests.support.training import FAIL, code, finish, make_trainer, score_of

SCRIPT = [[FAIL, finish(1, 0)], [FAIL, finish(0, 1)], [FAIL, finish(1, 1)], [code("x = 1"), finish(1, 1)]]


def test_a_rule_of_the_users_own_sees_the_steps_and_sets_the_advantages(tmp_path):
    seen = []

    def rule(inputs: StepAdvantageInputs) -> torch.Tensor:
        seen.append(inputs)
        return outcome_only(inputs) + 2.0 * inputs.failed_mask

    trainer = make_trainer(tmp_path, SCRIPT, step_advantages=rule)
    rows = trainer.rows()
    batch = trainer.one_batch(rows)
    (inputs,) = seen
    assert inputs.outcome.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert (inputs.group_size, inputs.penalty) == (4, 0.2)
    assert batch["advantages"].equal(outcome_only(inputs) + 2.0 * inputs.failed_mask)
    for number, row in enumerate(rows):
        start = 0
        for position, (view, step) in enumerate(zip(inputs.steps[number], row["trajectory"].steps, strict=True)):
            assert (view.position, view.kind, view.failed) == (position, step.failure, step.failure is not None)
            assert view.tokens == (start, start + len(step.action_ids))
            assert view.spans == (view.tokens,)
            assert inputs.action_mask[number, slice(*view.tokens)].all()
            assert inputs.failed_mask[number, slice(*view.tokens)].all() == view.failed
            assert view.penalty == (0.2 if view.failed else 0.0)
            start += len(step.action_ids) + len(step.bridge_ids)


@pytest.mark.parametrize("name", RULES)
def test_every_name_trains(tmp_path, name):
    trainer = make_trainer(tmp_path, SCRIPT, shaping=name, train_dataset=None)
    trainer.train()
    assert torch.isfinite(trainer.loss_inputs[0]["advantages"]).all()


def test_a_broken_rule_stops_the_training_and_names_the_row(tmp_path):
    trainer = make_trainer(tmp_path, SCRIPT, step_advantages=lambda inputs: torch.ones_like(inputs.action_mask) * 1.0)
    with pytest.raises(ValueError, match=r"on a token that was not sampled .* in row 0"):
        trainer.one_batch()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_advantages": "gvpo"}, "step_advantages='gvpo' must be a function of StepAdvantageInputs"),
        ({"step_advantages": gvpo, "shaping": "none"}, "step_advantages and shaping='none' are two rules"),
        ({"shaping": "gvpoo"}, "shaping='gvpoo' must be one of multiplicative, additive, none, ties"),
        ({"no_code": "skip"}, "no_code='skip' must be one of penalise, mask, drop"),
        ({"no_code": "mask", "no_code_is_failure": False}, "no_code='mask' applies to failed turns"),
        ({"failure_penalty": {"sintax": 0.1}}, "unknown kind 'sintax'; the kinds are syntax, runtime"),
        ({"failure_penalty": {"syntax": -1}}, r"failure_penalty\['syntax'\]=-1 must be >= 0"),
        ({"failure_penalty": "much"}, "failure_penalty='much' must be >= 0"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, SCRIPT, **options)


def test_a_rollout_without_trajectories_has_a_step_for_each_run_of_sampled_tokens(tmp_path):
    seen = []

    def rollout(prompts, trainer):
        count = len(prompts)
        return {
            "prompt_ids": [[1]] * count,
            "completion_ids": [[5, 6, 7, 8, 9]] * count,
            "logprobs": None,
            "env_mask": [[1, 1, 0, 1, 1]] * count,
            "failed_mask": [[0, 0, 0, 1, 1]] * count,
        }

    trainer = make_trainer(
        tmp_path,
        rollout_func=rollout,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        step_advantages=lambda inputs: seen.append(inputs) or gvpo(inputs),
        failure_penalty={"default": 0.5, "syntax": 0.1},
    )
    batch = trainer.one_batch()
    views = [(view.tokens, view.failed, view.kind, view.penalty) for view in seen[0].steps[0]]
    assert views == [((0, 2), False, None, 0.0), ((3, 5), True, None, 0.5)]
    assert batch["advantages"][0].tolist() == [0.0, 0.0, 0.0, -0.5, -0.5]


def turns(trainer):
    """Return the advantage and the share of sampled tokens in the loss for each turn of each row."""
    rows = trainer.rows()
    batch = trainer.one_batch(rows)
    actions = batch["completion_mask"] * batch["tool_mask"]
    table = []
    for number, row in enumerate(rows):
        start = 0
        for step in row["trajectory"].steps:
            end = start + len(step.action_ids)
            mean = actions[number, start:end].float().mean().item()
            table.append((number, round(batch["advantages"][number, start].item(), 4), mean))
            start = end + len(step.bridge_ids)
    return table


def test_a_penalty_for_each_kind(tmp_path):
    script = [[FAIL, code("x ="), "No code.", finish(1, 1)]] + [[finish(1, 1)]] * 3
    trainer = make_trainer(
        tmp_path, script, max_turns=4, failure_penalty='{"syntax": 0.5, "no_code": 0, "default": 0.1}'
    )
    assert [advantage for row, advantage, _ in turns(trainer) if row == 0] == [-0.1, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("no_code", "expected"),
    [
        ("penalise", [(0.0, 1.0), (-0.2, 1.0), (0.0, 1.0)]),
        ("mask", [(0.0, 1.0), (0.0, 0.0), (0.0, 1.0)]),
        ("drop", [(0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]),
    ],
)
def test_what_becomes_of_a_turn_without_code(tmp_path, no_code, expected):
    script = [[code("x = 1"), "No code.", finish(1, 1)]] + [[finish(1, 1)]] * 3
    trainer = make_trainer(tmp_path, script, no_code=no_code)
    assert [values for row, *values in turns(trainer) if row == 0] == [list(pair) for pair in expected]


def test_a_masked_turn_leaves_the_other_turns_their_outcome(tmp_path):
    script = [[code("x = 1"), "No code.", finish(1, 0)]] + [[finish(0, 1)]] * 3
    trainer = make_trainer(tmp_path, script, no_code="mask")
    assert [values for row, *values in turns(trainer) if row == 0] == [[0.75, 1.0], [0.0, 0.0], [0.75, 1.0]]


class Reporting(ToyEnvironment):
    """Adds the given fields to the result of each step."""

    def __init__(self, **fields):
        super().__init__(score=score_of)
        self.fields = fields

    def open(self, task_id):
        episode = super().open(task_id)
        step = episode.step
        episode.step = lambda code: dataclasses.replace(step(code), **self.fields)
        return episode


@pytest.mark.parametrize(("option", "kind"), [(False, None), (True, FailureKind.CAUGHT_API)])
def test_a_caught_error_is_a_failure_where_that_is_asked_for(tmp_path, option, kind):
    script = [[code("x = 1"), FAIL, finish(1, 1)]] * 4
    rollout = MultiTurnRollout(Reporting(api_calls=("a.b", "a.c"), api_errors=("a.c",)))
    trainer = make_trainer(tmp_path, script, rollout_func=rollout, caught_api_errors_fail=option)
    rows = trainer.rows()
    trainer.one_batch(rows)
    first, second, _ = rows[0]["trajectory"].steps
    assert (first.failure, first.caught_api_errors) == (kind, ("a.c",))
    assert (second.failure, second.caught_api_errors) == (FailureKind.RUNTIME, ())
    assert trainer._metrics["train"]["steps/caught_api_errors"][-1] == pytest.approx(2 / 3)


def test_only_the_statement_that_raised_is_shaped(tmp_path):
    script = [[code("x = 1\ny = 2\n1 / 0"), finish(1, 1)]] + [[finish(1, 1)]] * 3
    rollout = MultiTurnRollout(Reporting(failed_line=3))
    trainer = make_trainer(tmp_path, script, rollout_func=rollout, failure_span="statement")
    rows = trainer.rows()
    shaped = trainer.one_batch(rows)["advantages"][0]
    ids = torch.tensor(rows[0]["trajectory"].steps[0].action_ids)
    assert trainer.tokenizer.decode(ids[shaped[: len(ids)] != 0]) == "1 / 0"
