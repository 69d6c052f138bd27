"""A user's mistakes end in an error of one sentence, if possible before a model is loaded."""

import pytest
from datasets import Dataset, IterableDataset
from transformers import TrainingArguments

from gvpo_trl import GVPOConfig, GVPOTrainer, MultiTurnRollout
from tests.support.tiny import tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import FAIL, finish, make_trainer, tasks

NOWHERE = "/no/such/model"
"""A model that cannot be loaded. Arguments that are refused earlier cause another error than the model's."""


def refuse(tmp_path, words, *, config=GVPOConfig, **arguments):
    with pytest.raises(ValueError, match=words):
        GVPOTrainer(
            **{
                "model": NOWHERE,
                "args": config(str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
                "train_dataset": tasks(2),
                "rollout_func": MultiTurnRollout(ToyEnvironment()),
            }
            | arguments
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rollout_func": None}, r"rollout_func is missing; pass MultiTurnRollout"),
        ({"tools": [print]}, "pass these or rollout_func, not both"),
        ({"environment_factory": ToyEnvironment}, "pass these or rollout_func, not both"),
        ({"config": TrainingArguments}, "args is a TrainingArguments; GVPOTrainer needs a GVPOConfig"),
        ({"train_dataset": None}, "train_dataset is missing"),
        (
            {"train_dataset": tasks(2).remove_columns("task_id")},
            r"train_dataset has no column 'task_id' \(it has prompt\)",
        ),
        ({"train_dataset": tasks(2).remove_columns("prompt")}, "train_dataset has no column 'prompt'"),
        ({"train_dataset": tasks(2).select([])}, "train_dataset is empty"),
        (
            {"train_dataset": tasks(2).to_iterable_dataset().take(0), "processing_class": tiny_tokenizer()},
            "train_dataset is empty",
        ),
        (
            {"train_dataset": Dataset.from_dict({"prompt": ["Do it."], "task_id": ["t_1"]})},
            "lists of messages.*'Do it.'",
        ),
        ({"train_dataset": Dataset.from_dict({"prompt": [["Do it."]], "task_id": ["t_1"]})}, "lists of messages"),
        ({"train_dataset": Dataset.from_dict({"prompt": [[]], "task_id": ["t_1"]})}, "lists of messages"),
        ({"eval_dataset": tasks(2).remove_columns("task_id")}, "eval_dataset has no column 'task_id'"),
        ({"eval_dataset": {"dev": tasks(2), "test": tasks(2).select([])}}, "eval_dataset is empty"),
    ],
)
def test_refused_before_the_model_is_loaded(tmp_path, arguments, words):
    refuse(tmp_path, words, **arguments)


def test_a_later_prompt_that_fills_the_context_is_named_by_its_task(tmp_path):
    """Before the model is loaded, only the first prompt is measured."""
    rows = tasks(2)
    long = [{"role": "user", "content": "x" * 100}]
    rows = rows.map(lambda row, index: row if index == 0 else {"prompt": long}, with_indices=True)
    length = 60
    trainer = make_trainer(
        tmp_path, [[FAIL]], train_dataset=rows, max_context_length=length, shuffle_dataset=False, max_steps=2
    )
    with pytest.raises(ValueError, match=rf"has 1\d\d tokens, which leaves no room in max_context_length={length}"):
        trainer.train()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_turns": 0}, "max_turns=0 must be at least 1"),
        ({"max_turn_length": -1}, "max_turn_length=-1 must be at least 1"),
        ({"max_observation_length": 0}, "max_observation_length=0 must be at least 1"),
        ({"observation_template": "Output:"}, "must hold {observation}"),
        ({"straggler_s": -1.0}, "straggler_s=-1.0 must be >= 0"),
    ],
)
def test_a_rollout_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        MultiTurnRollout(ToyEnvironment(), **arguments)


def test_a_reward_function_that_returns_too_few(tmp_path):
    trainer = make_trainer(tmp_path, [[FAIL]], reward_funcs=lambda task_id, **columns: [0.0])
    with pytest.raises(ValueError, match="returned 1 rewards, but 4 were expected"):
        trainer.one_batch()


def test_a_stream_of_tasks_trains(tmp_path):
    """A stream has no length. TRL repeats its rows, and each row keeps its own trajectory."""

    def stream():
        yield from tasks(4)

    trainer = make_trainer(
        tmp_path,
        [[FAIL, finish(1, 0)], [finish(1, 1)], [finish(0, 1)], [finish(1, 1)]],
        train_dataset=IterableDataset.from_generator(stream),
        shuffle_dataset=False,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert (logged["reward"], logged["rollout/turns"]) == (0.5, 1.25)


def test_a_stream_with_known_columns_and_no_length(tmp_path):
    stream = tasks(4).to_iterable_dataset()
    trainer = make_trainer(tmp_path, [[finish(1, 1)]], train_dataset=stream, shuffle_dataset=False)
    trainer.train()
    assert trainer.state.global_step == 1
    with pytest.raises(ValueError, match="no column 'task_id'"):
        make_trainer(tmp_path, [[FAIL]], train_dataset=stream.remove_columns("task_id"))


def test_the_default_reward_is_the_share_of_passed_tests(tmp_path):
    trainer = make_trainer(tmp_path, [[finish(1, 3)], [finish(1, 0)]])
    assert trainer.reward_func_names == ["passed_tests_share"]
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 0.625  # (1/4 + 1) / 2


def test_a_prompt_that_fills_the_context_is_named_before_the_model_loads(tmp_path):
    refuse(
        tmp_path,
        "max_context_length=10 leaves no room",
        config=lambda *given, **settings: GVPOConfig(*given, **settings, max_context_length=10),
        processing_class=tiny_tokenizer(),
    )


def test_a_tokenizer_without_a_chat_template_is_named_before_the_model_loads(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    refuse(tmp_path, "no chat template", processing_class=tokenizer)
