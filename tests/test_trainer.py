"""How failed steps reach the gradients: the wiring of the method into TRL's trainer."""

import copy

import pytest
import torch
from transformers import TrainerCallback

from gvpo_trl import MultiTurnRollout
from gvpo_trl.objective import aggregate_loss
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import FAIL, LOST, code, finish, make_trainer, tasks

LENGTHS = [
    [finish(1, 1)],
    [FAIL, finish(0, 2)],
    [code("x = 1"), FAIL, finish(2, 0)],
    [code("print('a longer turn than the others')"), finish(0, 1)],
    [FAIL, finish(1, 2)],
    [code("y = 2\nprint(y)"), FAIL, finish(1, 2)],
    [finish(1, 2)],
    [FAIL, FAIL, finish(1, 2)],
]
"""Eight trajectories of unequal lengths. The rewards of the first group differ, those of the second tie."""


class Gradients(TrainerCallback):
    """Keeps the parameters before each optimizer step and the gradients of its accumulation window."""

    def __init__(self):
        self.windows: list[tuple[dict, dict]] = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        self.windows.append((parameters, gradients))


def action_mask(batch):
    return (batch["completion_mask"] * batch["tool_mask"]).bool()


def token_logprobs(model, batch, temperature=1.0):
    """Return (B, T) log-probabilities from a plain forward pass."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return logprobs[:, -batch["completion_ids"].shape[1] :]


def reference_gradients(parameters, batch, how, max_length):
    """Return gradients of the paper's clipped surrogate, written by hand and reduced by `aggregate_loss`."""
    model = tiny_model(tiny_tokenizer())
    model.load_state_dict(parameters, strict=False)
    logprobs = token_logprobs(model, batch)
    old = batch.get("old_per_token_logps", logprobs.detach())
    ratio = (logprobs - old).exp()
    advantages = batch["advantages"]
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages)
    aggregate_loss(-surrogate, action_mask(batch), how, max_length).backward()
    clipped = (ratio * advantages > surrogate) & action_mask(batch)
    return {name: p.grad for name, p in model.named_parameters()}, clipped.sum().item()


def window(inputs):
    """Return the rows of an accumulation window as one batch."""
    return {key: torch.cat([each[key] for each in inputs]) for key in inputs[0] if inputs[0][key].dim() > 0}


def assert_same_gradients(ours, reference):
    for name, gradient in reference.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=name)
    assert any(gradient.abs().max() > 1e-6 for gradient in reference.values())


@pytest.mark.parametrize("how", ["smtm", "smts", "token-mean"])
@pytest.mark.parametrize("accumulation", [1, 4, 8])
def test_gradient_equals_aggregate_loss(tmp_path, accumulation, how):
    seen = Gradients()
    trainer = make_trainer(
        tmp_path,
        LENGTHS,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        loss_aggregation=how,
        max_grad_norm=0.0,
        callbacks=[seen],
    )
    trainer.train()
    ((parameters, gradients),) = seen.windows
    batch = window(trainer.loss_inputs)
    lengths = action_mask(batch).sum(dim=1)
    assert len(trainer.loss_inputs) == accumulation
    assert len(lengths) == 8
    assert lengths.max() > 2 * lengths.min()
    assert_same_gradients(gradients, reference_gradients(parameters, batch, how, 1000)[0])


@pytest.mark.parametrize("how", ["smtm", "smts"])
def test_gradient_equals_the_clipped_surrogate_off_policy(tmp_path, how):
    seen = Gradients()
    trainer = make_trainer(
        tmp_path,
        LENGTHS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=2,
        loss_aggregation=how,
        max_grad_norm=0.0,
        optim="sgd",
        learning_rate=5.0 if how == "smtm" else 50.0,
        lr_scheduler_type="constant",
        callbacks=[seen],
    )
    trainer.train()
    assert len(seen.windows) == 2
    for number, (parameters, gradients) in enumerate(seen.windows):
        batch = window(trainer.loss_inputs[2 * number : 2 * number + 2])
        reference, clipped = reference_gradients(parameters, batch, how, 1000)
        assert_same_gradients(gradients, reference)
    assert clipped > 0, "the second step of a generation batch clips"


def loss_gradient(trainer, batch):
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_observations_never_reach_the_loss_and_actions_do(tmp_path):
    """A mask that never reaches the loss would pass every test of shapes (unsloth#3573)."""
    trainer = make_trainer(tmp_path, LENGTHS[:4])
    batch = trainer.one_batch()
    actions = action_mask(batch)
    observed = batch["completion_mask"].bool() & ~actions
    assert observed.sum() > 50
    assert (batch["advantages"][~actions] == 0).all()
    plain = loss_gradient(trainer, dict(batch))

    junk = batch["advantages"].masked_fill(observed, 1e3)
    assert torch.equal(loss_gradient(trainer, batch | {"advantages": junk}), plain)

    row, token = (actions & (batch["advantages"] != 0)).nonzero()[0]
    moved = batch["advantages"].clone()
    moved[row, token] += 1.0
    assert not torch.allclose(loss_gradient(trainer, batch | {"advantages": moved}), plain)

    row, token = observed.nonzero()[0]
    unmasked, valued = batch["tool_mask"].clone(), batch["advantages"].clone()
    unmasked[row, token], valued[row, token] = 1, 1.0
    changed = loss_gradient(trainer, batch | {"tool_mask": unmasked, "advantages": valued})
    assert not torch.allclose(changed, plain), "only the mask keeps observations out"


def test_a_failed_token_outside_the_actions_is_an_error(tmp_path):
    class Careless(MultiTurnRollout):
        def __call__(self, prompts, trainer):
            rows = super().__call__(prompts, trainer)
            rows["failed_mask"] = [[1] * len(ids) for ids in rows["completion_ids"]]
            return rows

    trainer = make_trainer(tmp_path, LENGTHS[:4], rollout_func=Careless(ToyEnvironment()))
    with pytest.raises(ValueError, match="outside action_mask"):
        trainer.one_batch()


@pytest.mark.parametrize("key", ["failed_mask", "env_mask"])
def test_a_rollout_without_masks_is_an_error(tmp_path, key):
    class Forgetful(MultiTurnRollout):
        def __call__(self, prompts, trainer):
            rows = super().__call__(prompts, trainer)
            del rows[key]
            return rows

    trainer = make_trainer(tmp_path, LENGTHS[:4], rollout_func=Forgetful(ToyEnvironment()))
    with pytest.raises(ValueError, match=f"no '{key}'"):
        trainer.one_batch()


@pytest.mark.parametrize("change", [lambda marks: marks[:-1], lambda marks: [*marks, 0]])
def test_a_failed_mask_of_another_length_is_an_error(tmp_path, change):
    class Uneven(MultiTurnRollout):
        def __call__(self, prompts, trainer):
            rows = super().__call__(prompts, trainer)
            rows["failed_mask"] = [change(marks) for marks in rows["failed_mask"]]
            return rows

    trainer = make_trainer(tmp_path, LENGTHS[:4], rollout_func=Uneven(ToyEnvironment()))
    with pytest.raises(ValueError, match=r"failed_mask of row 0 has \d+ values.*\d+ tokens"):
        trainer.one_batch()


def turn_values(trainer, batch, rows):
    """Return for each row the advantage of each turn, which all tokens of the turn share."""
    table = []
    for row, example in enumerate(rows):
        values, start = [], 0
        for step in example["trajectory"].steps:
            end = start + len(step.action_ids)
            (value,) = set(batch["advantages"][row, start:end].tolist())
            values.append(value)
            start = end + len(step.bridge_ids)
        table.append(values)
    return table


@pytest.mark.parametrize(
    ("shaping", "worse"), [("multiplicative", 1.2 * -0.5), ("additive", -0.5 - 0.2), ("none", -0.5)]
)
def test_the_four_cases(tmp_path, shaping, worse):
    script = [[FAIL, finish(1, 0)], [FAIL, finish(0, 1)], [FAIL, finish(1, 1)], [code("x = 1"), finish(1, 1)]]
    trainer = make_trainer(tmp_path, script, shaping=shaping)
    rows = trainer.rows()
    better, tie = (0.0, -0.2) if shaping != "none" else (0.5, 0.0)
    values = turn_values(trainer, trainer.one_batch(rows), rows)
    assert values == [
        pytest.approx([better, 0.5]),
        pytest.approx([worse, -0.5]),
        pytest.approx([tie, 0.0]),
        [0.0, 0.0],
    ]


def test_equal_rewards_and_one_failed_step(tmp_path):
    """Advantages are exactly −b on the failed step and exactly 0 elsewhere, though 1/3 is inexact (trl#5588)."""
    script = [[code("x = 1"), FAIL, finish(1, 2)], [finish(1, 2)], [finish(1, 2)], [finish(1, 2)]]
    trainer = make_trainer(tmp_path, script)
    rows = trainer.rows()
    minus_b = torch.tensor(-0.2).item()
    assert turn_values(trainer, trainer.one_batch(rows), rows) == [[0.0, minus_b, 0.0], [0.0], [0.0], [0.0]]


def test_unscorable_rows_move_nothing(tmp_path):
    """A crashed evaluator is not the agent's failure: the row's failed steps get 0, and the group keeps its size."""
    script = [[LOST], [finish(1, 0)], [FAIL, finish(0, 1)], [finish(1, 1)]]
    trainer = make_trainer(tmp_path, script)
    rows = trainer.rows()
    batch = trainer.one_batch(rows)
    assert batch["advantages"].shape[0] == 4
    assert (rows[0]["passed_tests"], rows[0]["failed_steps"]) == (None, 3)
    assert rows[0]["trajectory"].fault.startswith("evaluator")
    assert (batch["advantages"][0] == 0).all()
    values = turn_values(trainer, batch, rows)
    assert values[1:] == [pytest.approx([0.5]), pytest.approx([-0.6, -0.5]), [0.0]]
    plain = loss_gradient(trainer, dict(batch))
    alone = {key: value[1:] if value.dim() else value for key, value in batch.items()}
    torch.testing.assert_close(plain, loss_gradient(trainer, alone) * 3 / 4, rtol=1e-3, atol=1e-6)


def test_a_batch_of_lost_episodes_trains_on_without_moving(tmp_path):
    trainer = make_trainer(tmp_path, [[LOST]], max_steps=2)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert trainer.state.global_step == 2
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_small_advantages_are_dropped_but_never_a_row_with_a_failed_step(tmp_path):
    # Rewards 0.5, 0.5, 0.5, 0.52: Â = -0.005 three times and 0.015.
    script = [[FAIL, finish(50, 50)], [finish(50, 50)], [finish(50, 50)], [finish(52, 48)]]
    trainer = make_trainer(tmp_path, script, drop_small_advantages=0.01)
    rows = trainer.rows()
    values = turn_values(trainer, trainer.one_batch(rows), rows)
    assert values == [pytest.approx([-0.006, -0.005]), [0.0], [0.0], pytest.approx([0.015])]


def test_group_scaling_keeps_trls_advantages_and_the_zeros(tmp_path):
    script = [[FAIL, finish(1, 0)], [FAIL, finish(0, 1)], [FAIL, finish(1, 1)], [finish(1, 1)]]
    trainer = make_trainer(tmp_path, script, scale_rewards="group")
    rows = trainer.rows()
    std = (0.5 / 3) ** 0.5  # (0.25 + 0.25) / (4 - 1)
    scaled = 0.5 / (std + 1e-4)
    values = turn_values(trainer, trainer.one_batch(rows), rows)
    assert values == [
        pytest.approx([0.0, scaled]),
        pytest.approx([-1.2 * scaled, -scaled]),
        pytest.approx([-0.2, 0.0]),
        [0.0],
    ]


def test_normalized_sums_of_rewards_keep_their_ties(tmp_path):
    """In float32 the mean of seven times 0.3 is not 0.3, and TRL divides that difference by a value near 0."""

    def constant(task_id, **columns):
        return [0.3 if task == "t0_1" else 0.5 for task in task_id]

    sevens = {f"per_device_{split}_batch_size": 14 for split in ("train", "eval")} | {"num_generations": 7}
    trainer = make_trainer(
        tmp_path,
        [[FAIL, finish(1, 2)], *[[finish(1, 2)]] * 13],
        reward_funcs=[constant, constant],
        multi_objective_aggregation="normalize_then_sum",
        **sevens,
    )
    rows = trainer.rows()
    assert turn_values(trainer, trainer.one_batch(rows), rows) == [[torch.tensor(-0.2).item(), 0.0], *[[0.0]] * 13]


def test_a_normalized_sum_ties_only_where_every_reward_does(tmp_path):
    """The plain sum of the first row's rewards is the group's mean, but their normalized sum, 1.5 − 1.22, is not."""
    trainer = make_trainer(
        tmp_path,
        [[finish(1, 1)]],
        reward_funcs=[lambda **columns: [0.4, 0.0, 0.0, 0.0], lambda **columns: [0.0, 0.3, 0.3, 0.6]],
        multi_objective_aggregation="normalize_then_sum",
    )
    assert trainer.one_batch()["advantages"][0, 0] > 0.1


def test_reward_functions_get_the_columns_and_their_weights(tmp_path):
    calls = []

    def keep(prompts, completions, **columns):
        calls.append((completions, columns))
        return [float(turns) for turns in columns["turns"]]

    def constant(task_id, **columns):
        return [None if number == 3 else 10.0 * number for number in range(len(task_id))]

    script = [[FAIL, finish(1, 0)], [finish(0, 1)], [finish(1, 1)], [finish(1, 1)]]
    trainer = make_trainer(tmp_path, script, reward_funcs=[keep, constant], reward_weights=[1.0, 0.1])
    rows = trainer.rows()
    batch = trainer.one_batch(rows)
    ((completions, columns),) = calls
    assert columns["task_id"] == ["t0_1"] * 4
    assert columns["passed_tests"] == [["passed 0"], [], ["passed 0"], ["passed 0"]]
    assert columns["failed_tests"] == [[], ["failed 0"], ["failed 0"], ["failed 0"]]
    assert columns["failed_steps"] == [1, 0, 0, 0]
    assert columns["turns"] == [2, 1, 1, 1]
    assert [message["role"] for message in completions[0]] == ["assistant", "user", "assistant"]
    assert completions[0][0]["content"] == FAIL
    assert "ZeroDivisionError" in completions[0][1]["content"]
    # 2 + 0, 1 + 1, 1 + 2, 1 (the second function abstains): mean 2
    assert turn_values(trainer, batch, rows) == [pytest.approx([-0.2, 0.0]), [0.0], [1.0], [-1.0]]


def test_other_columns_of_the_data_set_reach_reward_functions(tmp_path):
    seen = []

    def keep(difficulty, **columns):
        seen.extend(difficulty)
        return [0.0] * len(difficulty)

    make_trainer(tmp_path, LENGTHS, train_dataset=tasks(2, difficulty=[3, 1]), reward_funcs=keep).one_batch()
    assert seen == [3] * 4


def test_truncated_trajectories_can_be_left_out(tmp_path):
    script = [[FAIL, FAIL, FAIL], [finish(1, 0)], [FAIL, finish(0, 1)], [finish(0, 1)]]
    plain, masked = (
        make_trainer(tmp_path, script, mask_truncated_completions=masks).one_batch() for masks in (False, True)
    )
    assert action_mask(plain)[0].any()
    assert not action_mask(masked)[0].any()
    assert (masked["advantages"][0] == 0).all()
    assert torch.equal(plain["advantages"][1:], masked["advantages"][1:])


def test_a_turn_that_is_cut_off_counts_as_truncated_in_trls_way(tmp_path):
    # 100 tokens a turn: the last one completes the task, but does not end with an end-of-turn token.
    script = [[FAIL, code("done()\n" + "#" * 200)], [finish(1, 0)], [finish(0, 1)], [finish(0, 1)]]
    trainer = make_trainer(tmp_path, script, mask_truncated_completions=True)
    rows = trainer.rows()
    batch = trainer.one_batch(rows)
    assert rows[0]["trajectory"].stop == "completed"
    assert not action_mask(batch)[0].any()
    assert (batch["advantages"][0] == 0).all()


def test_only_the_code_of_a_failed_turn_can_be_shaped(tmp_path):
    script = [["Let me see.\n" + FAIL, finish(1, 2)], *[[finish(1, 2)]] * 3]
    trainer = make_trainer(tmp_path, script, failure_span="code")
    rows = trainer.rows()
    batch = trainer.one_batch(rows)
    shaped = batch["completion_ids"][0][batch["advantages"][0] != 0]
    assert trainer.tokenizer.decode(shaped).strip() == "1/0"


def test_pad_token_equals_eos(tmp_path):
    """Observations are attended to and have no loss, though the end-of-turn token is the padding (trl#4974)."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    trainer = make_trainer(tmp_path, LENGTHS[:4], tokenizer=tokenizer)
    rows = trainer.rows()
    batch = trainer.one_batch(rows)
    for row, example in enumerate(rows):
        steps = example["trajectory"].steps
        ids = [token for step in steps for token in (*step.action_ids, *step.bridge_ids)]
        mask = [mark for step in steps for mark in (*[1] * len(step.action_ids), *[0] * len(step.bridge_ids))]
        assert batch["completion_ids"][row, : len(ids)].tolist() == ids
        assert batch["completion_mask"][row, : len(ids)].all()
        assert not batch["completion_mask"][row, len(ids) :].any()
        assert action_mask(batch)[row, : len(ids)].tolist() == [bool(mark) for mark in mask]
    observed = batch["completion_mask"].bool() & ~action_mask(batch)
    assert (batch["completion_ids"][observed] == tokenizer.eos_token_id).any()
