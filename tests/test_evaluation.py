"""Evaluations: each task counts once, TGC and SGC are right, and so are the logged metrics and completions."""

import json
from contextlib import nullcontext

import pandas
import pytest

from gvpo_trl import MultiTurnRollout
from gvpo_trl.evaluation import attempt_tasks, evaluate, write_report
from gvpo_trl.reporting.traces import read_traces
from gvpo_trl.rollout.types import Turn
from tests.support.tiny import tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import FAIL, LOST, code, finish, make_trainer, tasks

SOLVED = finish(2, 0)
MISSED = finish(1, 1)


def solve(*task_ids):
    """Return a script that solves these tasks."""
    return lambda number, row: [SOLVED if row["task_id"] in task_ids else MISSED]


def test_each_of_57_tasks_counts_once_with_batches_of_8(tmp_path):
    """This is the case of TRL PR#6137."""
    solved = {f"t{n}_{variant}" for n in range(10) for variant in (1, 2, 3)} | {"t10_1", "t18_3"}
    trainer = make_trainer(
        tmp_path,
        solve(*solved),
        eval_dataset=tasks(57),
        num_generations_eval=1,
        per_device_eval_batch_size=8,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_tgc"] == 56.1  # 32 of 57
    assert metrics["eval_sgc"] == 52.6  # 10 of 19
    assert metrics["eval_rollout/turns"] == 1.0
    assert len(list(read_traces(tmp_path))) == 57
    assert trainer.state.log_history[-1]["eval_tgc"] == 56.1
    trainer.script = solve()
    assert trainer.evaluate()["eval_tgc"] == 0.0, "a second evaluation does not add to the first"


def test_several_samples_a_task(tmp_path):
    """The first of the two samples of each task is solved, so TGC is 50, and so is SGC."""
    trainer = make_trainer(
        tmp_path,
        lambda number, row: [SOLVED if number % 2 == 0 else MISSED],
        eval_dataset=tasks(3),
        num_generations_eval=2,
        per_device_eval_batch_size=4,
    )
    metrics = trainer.evaluate()
    assert (metrics["eval_tgc"], metrics["eval_sgc"]) == (50.0, 50.0)


def test_each_task_of_a_stream_counts_once(tmp_path):
    trainer = make_trainer(tmp_path, num_generations_eval=2)
    trainer.script = lambda number, row: [SOLVED if row["task_id"] == "t0_1" else MISSED]
    assert trainer.evaluate(tasks(5).to_iterable_dataset())["eval_tgc"] == 20.0
    stream, trainer.script = tasks(3).to_iterable_dataset(), None
    assert (evaluate(trainer, stream, samples=2)["tasks"], evaluate(trainer, stream)["attempts"]) == (3, 3)


def test_unscorable_attempts_are_left_out(tmp_path):
    trainer = make_trainer(
        tmp_path,
        lambda number, row: [LOST] if row["task_id"] == "t0_1" else [SOLVED],
        eval_dataset=tasks(6),
        num_generations_eval=1,
    )
    metrics = trainer.evaluate()
    assert (metrics["eval_tgc"], metrics["eval_sgc"]) == (100.0, 100.0)
    assert metrics["eval_rollout/unscorable"] == pytest.approx(1 / 8)  # mean of the batches: 1 of 4, 0 of 2


def test_predict(tmp_path):
    trainer = make_trainer(tmp_path, solve("t0_1"), num_generations_eval=1)
    assert trainer.predict(tasks(2)).metrics["test_tgc"] == 50.0


@pytest.mark.parametrize("dispatch", [None, False])
def test_predictions_of_a_stream(tmp_path, dispatch):
    trainer = make_trainer(tmp_path, solve("t0_1"), num_generations_eval=2)
    trainer.accelerator.dataloader_config.dispatch_batches = dispatch
    output = trainer.predict(tasks(5).to_iterable_dataset())
    assert output.metrics["test_tgc"] == 20.0
    assert [trace["task_id"] for trace in read_traces(tmp_path)][:4].count("t0_1") in (0, 2), "a group has one task"


def test_several_evaluation_sets(tmp_path):
    trainer = make_trainer(
        tmp_path,
        solve("t0_1"),
        eval_dataset={"dev": tasks(1), "test": tasks(2)},
        num_generations_eval=1,
    )
    metrics = trainer.evaluate()
    assert (metrics["eval_dev_tgc"], metrics["eval_test_tgc"]) == (100.0, 50.0)


def test_the_best_checkpoint_by_tgc(tmp_path):
    trainer = make_trainer(
        tmp_path,
        eval_dataset=tasks(2),
        num_generations_eval=1,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_tgc",
    )
    # Both tasks are solved after the first step, and none after the second.
    trainer.script = lambda number, row: [SOLVED if trainer.state.global_step == 1 else MISSED]
    trainer.train()
    assert trainer.state.best_metric == 100.0
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")


def test_evaluation_batches_hold_whole_groups(tmp_path):
    words = r"per_device_eval_batch_size=3 on 1 process.*whole groups of 4.*num_generations_eval"
    with pytest.raises(ValueError, match=r"must be divisible by the number of generations used for evaluation"):
        make_trainer(tmp_path, eval_dataset=tasks(4), eval_strategy="epoch", per_device_eval_batch_size=3)
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=3)
    with pytest.raises(ValueError, match=words):
        trainer.evaluate(tasks(4))


def test_an_evaluation_set_given_late_needs_task_ids(tmp_path):
    trainer = make_trainer(tmp_path, num_generations_eval=1, rollout_func=MultiTurnRollout(ToyEnvironment()))
    with pytest.raises(ValueError, match="no column 'task_id'"):
        trainer.evaluate(tasks(2).remove_columns("task_id"))


def test_a_report_without_a_loss(tmp_path):
    """The model itself samples here, and its random turns hold no code."""
    trainer = make_trainer(tmp_path, max_turns=2, max_turn_length=5)
    trainer.model.train()
    report = evaluate(trainer, tasks(3), samples=2)
    assert trainer.model.training
    assert report == {
        "tgc": 0.0,
        "sgc": 0.0,
        "reward": 0.0,
        "failed_step_share": 1.0,
        "docs_step_share": 0.0,
        "turns_per_task": 2.0,
        "tasks": 3,
        "attempts": 6,
        "unscorable": 0,
    }
    write_report(report, tmp_path / "new" / "report.json")
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == report


def test_a_report_leaves_the_next_evaluation_alone(tmp_path):
    trainer = make_trainer(tmp_path, max_turns=2, num_generations_eval=1, eval_dataset=tasks(4))
    trainer.evaluate()
    attempt_tasks(trainer, tasks(3))
    trainer.script = solve("t0_1", "t0_2", "t0_3", "t1_1")
    metrics = trainer.evaluate()
    assert metrics["eval_tgc"] == 100.0
    assert metrics["eval_steps/failed"] == 0.0
    assert metrics["eval_rollout/turns"] == 1.0


@pytest.mark.parametrize(
    ("dataset", "samples", "words"), [(tasks(2), 0, "samples=0"), (tasks(2).select([]), 1, "empty")]
)
def test_a_report_of_nothing_is_an_error(tmp_path, dataset, samples, words):
    with pytest.raises(ValueError, match=words):
        evaluate(make_trainer(tmp_path), dataset, samples)


MIXED = [[FAIL, finish(1, 0)], ["I give up.", FAIL, finish(0, 1)], [FAIL, finish(1, 1)], [LOST]]
"""A row with a positive Â, one with a negative Â, one that ties, and one that cannot be scored."""


def test_metrics_of_a_batch_by_hand(tmp_path):
    trainer = make_trainer(tmp_path, MIXED)
    trainer.train()
    logged = trainer.state.log_history[0]
    # There are 2 + 3 + 2 + 3 = 10 steps, of which 1 + 2 + 1 + 3 failed, one of them for want of code.
    expected = {
        "steps/failed": 7 / 10,
        "steps/failed/runtime": 6 / 10,
        "steps/failed/no_code": 1 / 10,
        "steps/failed/syntax": 0.0,
        "steps/docs_lookup": 0.0,
        "rollout/turns": 10 / 4,
        "rollout/unscorable": 1 / 4,
        "rollout/retries": 1 / 4,
        "rollout/task_goal_completion": 1 / 3,
        "stop/completed": 3 / 4,
        "stop/environment_lost": 1 / 4,
        "stop/max_turns": 0.0,
        "groups/zero_variance": 0.0,
        "groups/zero_variance_with_gradient": 0.0,
        "reward": 0.5,
    }
    assert {name: logged[name] for name in expected} == pytest.approx(expected)

    def tokens(*turns):
        return sum(len(turn) + 1 for turn in turns)  # one token per byte, and the end-of-turn token

    all_tokens = sum(tokens(*turns) for turns in MIXED[:3]) + 3 * tokens(LOST)
    assert logged["tokens/failed_positive"] == pytest.approx(tokens(FAIL) / all_tokens)
    assert logged["tokens/failed_negative"] == pytest.approx(tokens("I give up.", FAIL) / all_tokens)
    assert logged["tokens/failed_tie"] == pytest.approx(tokens(FAIL) / all_tokens)
    total = (
        0.5 * tokens(finish(1, 0))
        - 0.5 * (1.2 * tokens("I give up.", FAIL) + tokens(finish(0, 1)))
        - 0.2 * tokens(FAIL)
    )
    assert logged["advantages/shaped_mean"] == pytest.approx(total / all_tokens, rel=1e-4)
    assert logged["rollout/environment_seconds"] >= 0
    assert logged["rollout/generate_seconds"] >= 0


@pytest.mark.parametrize(("shaping", "moved"), [("multiplicative", 0.5), ("additive", 0.5), ("none", 0.0)])
def test_ties_with_and_without_a_failed_step(tmp_path, shaping, moved):
    """Both groups tie, and a failed step gives the first one a gradient."""
    script = [[FAIL, MISSED], *[[MISSED]] * 7]
    trainer = make_trainer(tmp_path, script, per_device_train_batch_size=8, shaping=shaping)
    trainer.train()
    assert trainer.state.log_history[0]["groups/zero_variance"] == 1.0
    assert trainer.state.log_history[0]["groups/zero_variance_with_gradient"] == moved


@pytest.mark.parametrize("attribute", [None, "response_template", "response_schema"])
def test_conversations_are_logged_as_they_were(tmp_path, capsys, monkeypatch, attribute):
    """This holds even with a tokenizer that would parse all turns as one response."""
    monkeypatch.setenv("COLUMNS", "160")
    tokenizer = tiny_tokenizer()
    if attribute:
        setattr(tokenizer, attribute, {"type": "object", "properties": {}})
    script = [[code("print('hello')"), finish(1, 0)], [FAIL, finish(0, 1)], [MISSED], [MISSED]]
    trainer = make_trainer(tmp_path, script, tokenizer=tokenizer, log_completions=True)
    trainer.train()
    printed = capsys.readouterr().out
    for words in ("USER", "ASSISTANT", "print('hello')", "ZeroDivisionError"):
        assert words in printed
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    conversation = [(message["role"], message["content"]) for message in table["completion"][0]]
    assert conversation == [
        ("assistant", code("print('hello')")),
        ("user", "Output:\n```\nhello\n\n```"),
        ("assistant", finish(1, 0)),
    ]
    lengths = [len(turn) + 1 for turn in (FAIL, finish(0, 1))]  # one token per byte, and the end-of-turn token
    failing = (1.2 * -0.5 * lengths[0] - 0.5 * lengths[1]) / sum(lengths)
    assert table["advantage"].tolist() == pytest.approx([0.5, failing, 0.0, 0.0], abs=1e-5)
    if attribute:
        assert getattr(tokenizer, attribute) is not None, "the tokenizer is restored"


def test_logged_completions_show_control_characters_and_rewards_get_them_as_they_are(tmp_path, capsys):
    seen = []

    def reward(completions, **columns):
        seen.extend(completions)
        return [0.0] * len(completions)

    text = "\x1b[2J\u202e\udc80\n" + code("print(1)")
    trainer = make_trainer(tmp_path, [[text]], reward_funcs=reward, log_completions=True, max_turns=1)
    trainer.generation_session = lambda end_ids=None: nullcontext(
        lambda requests: [Turn(ids=[5], text=text) for _ in requests]
    )
    trainer.train()
    assert seen[0][0]["content"] == text
    printed = capsys.readouterr().out
    assert "\\x1b[2J" in printed
    assert "\x1b[2J" not in printed and "\u202e" not in printed
    (file,) = (tmp_path / "completions").iterdir()
    assert "\\u202e" in pandas.read_parquet(file)["completion"][0][0]["content"]


def test_a_trajectory_without_a_turn_is_logged_as_an_empty_message(tmp_path):
    from gvpo_trl.faults import HostFault

    def faults(episode, place):
        if place == "open":
            raise HostFault("no host")

    trainer = make_trainer(
        tmp_path, [[MISSED]], rollout_func=MultiTurnRollout(ToyEnvironment(faults=faults)), log_completions=True
    )
    trainer.train()
    assert trainer.state.log_history[0]["stop/environment_lost"] == 1.0
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert [message["content"] for message in table["completion"][0]] == [""]
