"""Training scripts as users write them, with every total and advantage worked out by hand."""

import json

import pytest

from gvpo_trl import GVPOConfig, MultiTurnRollout
from gvpo_trl.evaluation import evaluate
from tests.support.templates import with_special
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import FAIL, LOST, ScriptedTrainer, code, finish, make_trainer, score_of, tasks

TURNS = {
    "t0_1": [[FAIL, finish(1, 1)], [finish(2, 0)]],
    "t0_2": [[FAIL, finish(1, 0)], [code("x = 1"), finish(0, 1)]],
    "t0_3": [[FAIL, finish(3, 4)], [finish(0, 7)]],
    "t1_1": [[LOST], [FAIL, finish(1, 1)]],
}
"""The turns of both trajectories of each task."""

TOTALS = {
    "t0_1": [0.7 * 0.5 + 0.2 * 0 - 0.1 * 2, 0.7 * 1 + 0.2 * 1 - 0.1 * 1],  # 0.15 and 0.8, mean 0.475
    "t0_2": [0.7 * 1 + 0.2 * 0 - 0.1 * 2, 0.7 * 0 + 0.2 * 1 - 0.1 * 2],  # 0.5 and 0.0, mean 0.25
    "t0_3": [0.7 * 3 / 7 + 0.2 * 0 - 0.1 * 2, 0.7 * 0 + 0.2 * 1 - 0.1 * 1],  # 0.1 and 0.1, a tie
    "t1_1": [None, 0.7 * 0.5 + 0.2 * 0 - 0.1 * 2],  # unscorable and 0.15, which is its group's mean
}

ADVANTAGES = {
    "t0_1": [[-0.39, -0.325], [0.325]],  # the failed step gets 1.2 times -0.325
    "t0_2": [[0.0, 0.25], [-0.25, -0.25]],
    "t0_3": [[-0.2, 0.0], [0.0]],
    "t1_1": [[0.0, 0.0, 0.0], [-0.2, 0.0]],
}
"""The advantage of each turn, which all of its tokens share; the failure penalty is 0.2."""


def passed_share(passed_tests, failed_tests, **columns):
    return [
        None if passed is None else len(passed) / (len(passed) + len(failed))
        for passed, failed in zip(passed_tests, failed_tests, strict=True)
    ]


def no_failed_step(failed_steps, **columns):
    return [float(count == 0) for count in failed_steps]


def turn_cost(turns, **columns):
    return [-float(count) for count in turns]


@pytest.fixture
def trained(tmp_path):
    """The trainer of the script, after both of its optimizer steps."""
    tokenizer = tiny_tokenizer()
    config = GVPOConfig(
        output_dir=str(tmp_path),
        reward_weights=[0.7, 0.2, 0.1],
        shuffle_dataset=False,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        max_turns=3,
        max_turn_length=100,
        max_completion_length=1000,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = ScriptedTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=[passed_share, no_failed_step, turn_cost],
        args=config,
        train_dataset=tasks(4),
        processing_class=tokenizer,
        rollout_func=MultiTurnRollout(ToyEnvironment(score=score_of)),
    )
    trainer.script = lambda number, row: TURNS[row["task_id"]][number % 2]
    trainer.train()
    return trainer


PAIRS = [("t0_1", "t0_2"), ("t0_3", "t1_1")]
"""The two tasks of each optimizer step."""


def test_order_and_mean_of_three_weighted_rewards(trained, tmp_path):
    (file,) = (tmp_path / "_trajectories").glob("*.jsonl")
    order = [json.loads(line)["task_id"] for line in file.read_text().splitlines()]
    assert order == ["t0_1", "t0_1", "t0_2", "t0_2", "t0_3", "t0_3", "t1_1", "t1_1"]

    scored = [[total for task in pair for total in TOTALS[task] if total is not None] for pair in PAIRS]
    logged = [entry["reward"] for entry in trained.state.log_history if "reward" in entry]
    assert logged == pytest.approx([sum(totals) / len(totals) for totals in scored], abs=1e-6)
    assert trained.state.log_history[1]["rollout/unscorable"] == 0.25


def test_advantages_of_three_weighted_rewards(trained):
    found = [[], []]
    for number, inputs in enumerate(trained.loss_inputs):
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        for advantages, actions in zip(inputs["advantages"].tolist(), mask.tolist(), strict=True):
            found[number // 2].append(turn_values(advantages, actions))
            assert all(value == 0 for value, action in zip(advantages, actions, strict=True) if not action)
    for step, pair in enumerate(PAIRS):
        wanted = sorted(row for task in pair for row in ADVANTAGES[task])
        for row, expected in zip(sorted(found[step]), wanted, strict=True):
            assert row == pytest.approx(expected, abs=1e-6)
            assert [value == 0 for value in row] == [value == 0 for value in expected], "a tie is exactly 0"


def turn_values(advantages, actions):
    """The value of each run of action tokens, all of which must share it."""
    turns, before = [], 0
    for value, action in zip(advantages, actions, strict=True):
        if action and not before:
            turns.append(value)
        assert not action or value == turns[-1]
        before = action
    return turns


def test_turns_that_end_with_the_templates_token_are_not_truncated(tmp_path):
    """The tokenizer's end-of-sequence token is another one, which the model never samples."""
    tokenizer = with_special(tiny_tokenizer(), "<|endoftext|>")
    tokenizer.eos_token = "<|endoftext|>"
    script = [[finish(1, 0)], [finish(0, 1)], [FAIL, FAIL, FAIL], [finish(0, 1)]]
    trainer = make_trainer(tmp_path, script, tokenizer=tokenizer, mask_truncated_completions=True)
    batch = trainer.one_batch()
    rows = (batch["completion_mask"] * batch["tool_mask"]).any(dim=1).tolist()
    assert rows == [True, True, False, True], "only the trajectory that ran out of turns is left out"
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [0.0]
    assert trainer.eos_token_ids[0] == tokenizer.eos_token_id
    assert trainer.model.generation_config.eos_token_id == tokenizer.eos_token_id, "the model's own one is left alone"


def hand_made_rollout(prompts, trainer):
    rows = len(prompts)
    return {
        "prompt_ids": [[5, 6]] * rows,
        "completion_ids": [[5, 6, 2]] * rows,
        "logprobs": None,
        "env_mask": [[1, 1, 1]] * rows,
        "failed_mask": [[0, 1, 0]] * rows,
    }


class HandMade:
    prefetch = True

    def __call__(self, prompts, trainer):
        return hand_made_rollout(prompts, trainer)


@pytest.mark.parametrize("rollout", [hand_made_rollout, HandMade()], ids=["function", "object"])
def test_a_rollout_function_of_the_users_own(tmp_path, rollout):
    def rewards(prompts, **columns):
        return [float(row % 2) for row in range(len(prompts))]

    trainer = make_trainer(tmp_path, rollout_func=rollout, reward_funcs=rewards, max_steps=2)
    assert trainer.train().training_loss > 0
    assert trainer.evaluate(tasks(4))["eval_reward"] == 0.5
    with pytest.raises(ValueError, match=r"rollout_func cannot attempt tasks.*MultiTurnRollout.*trainer\.evaluate"):
        evaluate(trainer, tasks(4))
