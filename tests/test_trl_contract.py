"""Everything inside TRL that the trainer relies on. A TRL release that changes any of it fails here."""

import ast
import inspect
import re
import sys
import textwrap

import pandas
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from gvpo_trl import GVPOTrainer
from gvpo_trl.multi_turn import MultiTurnTrainer
from gvpo_trl.trainer import LOSS_METHODS
from gvpo_trl.training.row_skipping import KNOWN_LOSSES, fingerprint
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training import tasks

PROMPT, TURN, OBSERVATION = [3, 4, 5], [6, 7, 2], [8, 9, 10]


class Plain(GRPOTrainer):
    """TRL's own trainer, which keeps the results of two of its methods."""

    def _generate(self, prompts):
        self.generated = super()._generate(prompts)
        return self.generated

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self.rewards_per_func


def rollout(prompts, trainer):
    """Return two turns with an observation between them; row n has n additional tokens in its second turn."""
    completions = [TURN + OBSERVATION + [6] * row + TURN for row in range(len(prompts))]
    return {
        "prompt_ids": [PROMPT] * len(prompts),
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": [[1] * 3 + [0] * 3 + [1] * (row + 3) for row in range(len(prompts))],
        "number": list(range(len(prompts))),
        "whole": (1, 2),
    }


@pytest.fixture
def make(tmp_path):
    def make(rollout_func=rollout, reward=lambda number, **columns: [float(n) for n in number], **options):
        tokenizer = options.pop("tokenizer", None) or tiny_tokenizer()
        defaults = {
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "scale_rewards": "none",
            "loss_type": "grpo",
            "max_completion_length": 4,
        }
        trainer = Plain(
            tiny_model(tokenizer),
            reward,
            GRPOConfig(str(tmp_path), **(defaults | options)),
            tasks(4),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        trainer.given = [dict(trainer.train_dataset[0]) for _ in range(4)]
        return trainer

    return make


def gradient(trainer, batch):
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_the_overridden_methods_have_these_signatures():
    def parameters(function):
        return " ".join(inspect.signature(function).parameters)

    assert parameters(GRPOTrainer._generate_and_score_completions) == "self inputs"
    assert parameters(GRPOTrainer._generate) == "self prompts"
    assert {"resume_from_checkpoint", "trial"} <= {*parameters(GRPOTrainer.train).split()}
    assert parameters(GRPOTrainer._compute_loss) == "self model inputs"
    state = "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    assert parameters(GRPOTrainer._init_training_state) == state
    others = [parameters(getattr(GRPOTrainer, name)) for name in ("_save_checkpoint", "save_model", "log")]
    assert others == ["self model trial", "self output_dir _internal_call", "self logs start_time"]
    assert parameters(GRPOTrainer._tool_call_loop).startswith("self prompts prompt_ids completion_ids completions ")
    assert parameters(GRPOTrainer._calculate_rewards) == "self inputs prompts completions completion_ids_list"
    init = parameters(GRPOTrainer.__init__)
    assert init.startswith("self model reward_funcs args train_dataset eval_dataset ")
    assert {"processing_class", "peft_config", "tools", "rollout_func", "environment_factory"} <= {*init.split()}
    assert {"dataloader", "description", "metric_key_prefix"} <= {*parameters(GRPOTrainer.evaluation_loop).split()}
    assert parameters(GRPOTrainer.create_model_card) == "self model_name dataset_name tags"
    assert parameters(GRPOTrainer._push_from_checkpoint) == "self checkpoint_folder"
    assert parameters(unwrap_model_for_generation) == (
        "model accelerator gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs"
    )


def test_nothing_of_trls_is_hidden_by_accident():
    """The trainer shares no name with TRL's but these, public or private."""
    names = {**vars(MultiTurnTrainer), **vars(GVPOTrainer)}
    ours = {name for name in names if not name.startswith("__") or name == "__init__"}
    shared = {name for name in ours if hasattr(GRPOTrainer, name)}
    methods = (
        "__init__ train _generate_and_score_completions _generate _tool_call_loop _calculate_rewards _compute_loss "
        "get_batch_samples _init_training_state _save_checkpoint save_model evaluation_loop log create_model_card "
        "push_to_hub _push_from_checkpoint"
    )
    assert shared == {"_tag_names", "_name", "_paper", *methods.split()}
    table = inspect.getdoc(sys.modules[GVPOTrainer.__module__])
    hooks = shared - {"_tag_names", "_name", "_paper"}
    assert set(re.findall(r"^ {4}(\w+) +(?:public|private) ", table, flags=re.MULTILINE)) == hooks
    assert set(re.findall(r"^ {40,}(test_\w+)$", table, flags=re.MULTILINE)) <= globals().keys()


def test_every_term_of_the_loss_is_known():
    """Besides advantages, three terms give a row a gradient. `_rows_may_be_skipped` knows the condition of each."""
    assert fingerprint(LOSS_METHODS) in KNOWN_LOSSES, "TRL has changed its loss: check its terms, then add its print"
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    conditions = set()
    for branch in ast.walk(tree):
        for statement in getattr(branch, "body", ()) if isinstance(branch, ast.If | ast.FunctionDef) else ():
            if isinstance(statement, ast.AugAssign | ast.Assign) and adds_to_a_loss(statement):
                conditions.add(ast.unparse(branch.test) if isinstance(branch, ast.If) else "always")
    assert conditions == {"self.beta != 0.0", "self._entropy_bonus_enabled", "self.aux_loss_enabled"}


def adds_to_a_loss(statement: ast.AugAssign | ast.Assign) -> bool:
    """Whether the statement adds something to `loss` or `per_token_loss`."""
    target = statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]
    if not isinstance(target, ast.Name) or target.id not in ("loss", "per_token_loss"):
        return False
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add | ast.Sub)
    sums = [node for node in ast.walk(statement.value) if isinstance(node, ast.BinOp)]
    return any(
        isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.left, ast.Name) and node.left.id == target.id
        for node in sums
    )


def test_batches_are_taken_through_one_method(make):
    """`get_batch_samples` returns the batches of each optimizer step, in the trainer's process."""
    trainer = make(max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, disable_tqdm=True)
    assert list(inspect.signature(trainer.get_batch_samples).parameters) == ["epoch_iterator", "num_batches", "device"]
    taken, inner = [], trainer.get_batch_samples

    def keep(epoch_iterator, num_batches, device):
        batches, num_items = inner(epoch_iterator, num_batches, device)
        taken.append((epoch_iterator, [[row["task_id"] for row in batch] for batch in batches]))
        return batches, num_items

    trainer.get_batch_samples = keep
    trainer.train()
    (first, one), (second, two) = taken
    assert first is second, "an epoch has one iterator"
    assert one[0] == one[1], "each micro-batch of a generation has all rows of the generation"
    assert len(one[0]) == 4
    assert one[0] != two[0]


def test_attributes_that_the_trainer_reads(make):
    trainer = make()
    assert trainer._tokenizer is trainer.processing_class
    assert trainer.eos_token_ids == [trainer._tokenizer.eos_token_id]
    assert (trainer.num_generations, trainer.num_generations_eval) == (4, 4)
    assert trainer.multi_objective_aggregation == "sum_then_normalize"
    assert trainer.scale_rewards == "none"
    assert trainer.reward_weights.tolist() == [1.0]
    assert trainer.chat_template is None
    assert trainer.chat_template_kwargs == {}
    assert trainer.generation_kwargs["eos_token_id"] == trainer.eos_token_ids
    assert trainer.generation_config.temperature == 1.0
    assert set(trainer._metrics) == {"train", "eval"}
    assert trainer._metrics["train"]["anything new"] == []
    assert {"prompt", "completion", "advantages", "rewards"} <= set(trainer._logs)
    assert trainer.loss_is_scaled_for_ga is not False


def test_the_model_for_generation(make):
    trainer = make()
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=True,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        assert model.generate(torch.tensor([PROMPT]), max_new_tokens=2).shape == (1, 5)


def test_a_rollout_gets_the_prompts_alone_and_the_trainer(make):
    calls = []

    def keep(prompts, trainer):
        calls.append((prompts, trainer))
        return rollout(prompts, trainer)

    trainer = make(keep)
    trainer._generate_and_score_completions(trainer.given)
    assert calls == [([[{"role": "user", "content": "Do task 0."}]] * 4, trainer)]


def test_the_order_of_what_generate_returns(make):
    trainer = make()
    trainer._generate_and_score_completions(trainer.given)
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, images, tool_images = trainer.generated
    expected = rollout(range(4), None)
    assert (prompt_ids, completion_ids) == (expected["prompt_ids"], expected["completion_ids"])
    assert tool_mask == expected["env_mask"]
    assert [[message["role"] for message in each] for each in completions] == [["assistant"]] * 4
    assert set(extra) == {"number", "whole"}
    assert (logprobs, images, tool_images) == (None, None, [])


def test_extra_fields_are_merged_into_the_rows_in_place(make):
    trainer = make()
    trainer._generate_and_score_completions(trainer.given)
    assert [row["number"] for row in trainer.given] == [0, 1, 2, 3]
    assert [row["whole"] for row in trainer.given] == [(1, 2)] * 4, "a value that is not a list is copied to every row"


def test_an_extra_field_that_is_too_short_leaves_rows_without_it(make):
    trainer = make(lambda prompts, trainer: rollout(prompts, trainer) | {"short": [7]})
    with pytest.raises(KeyError, match="short"):
        trainer._generate_and_score_completions(trainer.given)
    assert [row.get("short") for row in trainer.given] == [7, None, None, None]


def test_an_empty_completion_crashes(make):
    def empty(prompts, trainer):
        rows = rollout(prompts, trainer)
        rows["completion_ids"][0], rows["env_mask"][0] = [], []
        return rows

    trainer = make(empty)
    with pytest.raises(IndexError):
        trainer._generate_and_score_completions(trainer.given)


def test_masks_lengths_and_padding(make):
    """Without tools, TRL applies the environment mask. It does not cut completions to `max_completion_length` (4)."""
    trainer = make()
    batch = trainer._generate_and_score_completions(trainer.given)
    assert batch["completion_ids"].shape == (4, 12)
    assert batch["completion_mask"][0].tolist() == [1] * 9 + [0] * 3
    assert (batch["completion_mask"] * batch["tool_mask"])[1].tolist() == [1] * 3 + [0] * 3 + [1] * 4 + [0] * 2
    assert batch["prompt_ids"].tolist() == [PROMPT] * 4
    assert batch["num_items_in_batch"].item() == 6 + 7 + 8 + 9
    assert trainer._metrics["train"]["completions/mean_length"] == [7.5]


def test_advantages_are_the_difference_to_the_mean(make):
    trainer = make()
    batch = trainer._generate_and_score_completions(trainer.given)
    assert batch["advantages"].tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert trainer.rewards_per_func.tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_a_row_without_a_reward_is_left_out_of_the_mean(make):
    trainer = make(reward=lambda number, **columns: [None, 0.0, 1.0, 2.0])
    batch = trainer._generate_and_score_completions(trainer.given)
    assert batch["advantages"].tolist() == [0.0, -1.0, 0.0, 1.0]
    assert trainer.rewards_per_func[0].isnan().all()


def test_the_loss_takes_one_advantage_per_token(make):
    trainer = make()
    batch = trainer._generate_and_score_completions(trainer.given)
    spread = batch["advantages"].unsqueeze(1).expand(batch["completion_ids"].shape)
    torch.testing.assert_close(gradient(trainer, batch | {"advantages": spread}), gradient(trainer, batch))
    one_token = spread.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(9.0))
    assert not torch.allclose(gradient(trainer, batch | {"advantages": one_token}), gradient(trainer, batch))


def test_the_loss_leaves_observations_out(make):
    trainer = make()
    batch = trainer._generate_and_score_completions(trainer.given)
    spread = batch["advantages"].unsqueeze(1).repeat(1, batch["completion_ids"].shape[1])
    plain = gradient(trainer, batch | {"advantages": spread})
    spread[:, 3:6] = 100.0
    assert torch.equal(gradient(trainer, batch | {"advantages": spread}), plain)


def test_a_row_without_actions_has_a_loss_of_zero(make):
    trainer = make()
    batch = trainer._generate_and_score_completions(trainer.given)
    batch["tool_mask"] = torch.zeros_like(batch["tool_mask"])
    assert trainer._compute_loss(trainer.model, batch).item() == 0.0


@pytest.mark.parametrize(
    ("options", "exist"),
    [
        ({}, False),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, False),
        ({"per_device_train_batch_size": 2, "steps_per_generation": 2}, True),
        ({"num_iterations": 2}, True),
    ],
)
def test_when_old_logprobs_exist(make, options, exist):
    trainer = make(**options)
    batch = trainer._generate_and_score_completions(trainer.given)
    assert ("old_per_token_logps" in batch) == exist


def test_what_the_buffer_does_to_our_values(make):
    """Each value is a scalar or has B as its first dimension, and the shuffle keeps the parts of a row together."""
    trainer = make()
    batch = trainer._generate_and_score_completions(trainer.given)
    assert all(value.dim() == 0 or len(value) == 4 for value in batch.values())
    batch["advantages"] = batch["advantages"].unsqueeze(1).repeat(1, 12)
    halves = split_tensor_dict(shuffle_sequence_dict(batch), 2)
    assert [half["advantages"].shape for half in halves] == [(2, 12)] * 2
    for half in halves:
        assert torch.equal(half["completion_mask"].sum(dim=1), (half["advantages"][:, 0] + 1.5 + 9).long())
        assert half["num_items_in_batch"].item() == 30


def test_truncation_is_judged_by_the_last_token(make):
    def cut(prompts, trainer):
        rows = rollout(prompts, trainer)
        rows["completion_ids"][0][-1] = 6
        return rows

    trainer = make(cut, mask_truncated_completions=True)
    batch = trainer._generate_and_score_completions(trainer.given)
    assert batch["completion_mask"].sum(dim=1).tolist() == [0, 10, 11, 12]


def test_the_divisor_of_dr_grpo_is_max_completion_length(make):
    losses = []
    for length in (4, 8):
        trainer = make(loss_type="dr_grpo", max_completion_length=length)
        losses.append(trainer._compute_loss(trainer.model, trainer._generate_and_score_completions(trainer.given)))
    torch.testing.assert_close(losses[0], 2 * losses[1])


def test_a_whole_completion_is_one_message_and_tables_take_conversations(make, tmp_path):
    """The trainer returns conversations instead, so the table of completions must accept them."""
    trainer = make(log_completions=True, logging_steps=1, max_steps=1, disable_tqdm=True)
    conversation = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    inner = trainer._generate

    def with_conversations(prompts):
        *head, _, logprobs, extra, images, tool_images = inner(prompts)
        return (*head, [conversation] * len(prompts), logprobs, extra, images, tool_images)

    trainer._generate = with_conversations
    trainer.train()
    (file,) = (tmp_path / "completions").iterdir()
    table = pandas.read_parquet(file)
    assert [list(each) for each in table["completion"]] == [conversation] * 4


def test_a_tokenizer_with_a_response_schema_has_its_completions_parsed(make):
    tokenizer = tiny_tokenizer()
    tokenizer.response_schema = {"type": "object", "properties": {}}
    trainer = make(tokenizer=tokenizer)
    with pytest.raises(AttributeError, match="parsing chat responses"):
        trainer._generate_and_score_completions(trainer.given)


def test_nan_is_left_out_of_a_logged_metric(make):
    trainer = make()
    trainer._metrics["train"]["mine"] += [1.0, float("nan"), 3.0]
    trainer._metrics["train"]["none"] += [float("nan")]
    trainer.log({})
    assert trainer.state.log_history[-1]["mine"] == 2.0
    assert trainer.state.log_history[-1]["none"] is None


def test_rows_of_a_group_are_consecutive_and_objects_of_their_own(make):
    trainer = make(num_generations=2, shuffle_dataset=False)
    rows = next(iter(trainer.get_train_dataloader()))
    assert [row["task_id"] for row in rows] == ["t0_1", "t0_1", "t0_2", "t0_2"]
    assert len({id(row) for row in rows}) == 4


def test_the_model_card_of_a_local_model_says_none(make, tmp_path):
    trainer = make()
    trainer.create_model_card(model_name="x")
    assert "[None](https://huggingface.co/None)" in (tmp_path / "README.md").read_text()
