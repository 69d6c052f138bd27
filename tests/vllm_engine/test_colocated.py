"""Colocated training and sampling with the real engine."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from gvpo_trl.faults import GenerationFault
from gvpo_trl.rollout.types import TurnRequest
from tests.support.tiny import tiny_tokenizer
from tests.support.training import make_trainer
from tests.vllm_engine.conftest import CONTEXT

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_engine")]

TOKENIZER = tiny_tokenizer()
PROMPT = [5 + (7 * n) % 200 for n in range(300)]


def vllm_trainer(folder, model_folder, **options):
    return make_trainer(
        folder,
        model=str(model_folder),
        tokenizer=TOKENIZER,
        **{
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": CONTEXT,
            "max_turn_length": 24,
            "max_turns": 3,
            "max_steps": 3,
            "learning_rate": 1e-2,
            **options,
        },
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, model_folder):
    """A trainer that has trained for three steps."""
    trainer = vllm_trainer(tmp_path_factory.mktemp("out"), model_folder)
    trainer.train()
    return trainer


@pytest.fixture
def settings(trainer):
    """TRL's generation settings, which a test may change and which are restored after it."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda **changes: [patch.setattr(trainer.vllm_generation, *change) for change in changes.items()]


def sample(trainer, *requests):
    """Return the turns, or what was raised, in the order of the requests, and the session's generator."""
    with trainer.generation_session() as turns:
        futures = [turns.submit(request) for request in requests]
        while turns.advance():
            pass
    return [future.exception() or future.result() for future in futures], turns


def request(trajectory=0, ids=PROMPT, max_new_tokens=24):
    return TurnRequest(trajectory=trajectory, ids=list(ids), max_new_tokens=max_new_tokens)


def difference(trainer, turn, prompt=PROMPT):
    """Return the mean absolute difference between log-probabilities of the engine and of the trainer's model."""
    ids = torch.tensor([[*prompt, *turn.ids]])
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids).logits[0, len(prompt) - 1 : -1] / trainer.temperature
    ours = logits.log_softmax(dim=-1).gather(1, torch.tensor(turn.ids).unsqueeze(1)).squeeze(1)
    return (ours - torch.tensor(turn.logprobs)).abs().mean().item()


# Training


def test_three_steps_train_on_advantages_per_token(trainer):
    assert len(trainer.loss_inputs) == 3
    for batch in trainer.loss_inputs:
        assert batch["advantages"].shape == batch["completion_mask"].shape
        assert batch["advantages"].ne(0).any(), "turns without code fail"
        assert batch["sampling_per_token_logps"].shape == batch["completion_mask"].shape


def test_log_probabilities_are_the_trainers_after_every_sync(trainer):
    logs = [log for log in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in log]
    assert len(logs) == 3
    assert max(log["sampling/sampling_logp_difference/mean"] for log in logs) < 0.01


def test_the_weights_have_moved(trainer, model_folder):
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    moved = [(after.detach() - before[name]).abs().max() for name, after in trainer.model.state_dict().items()]
    assert max(moved) > 0.01


def test_a_sync_brings_a_large_update_into_the_engine(trainer):
    sample(trainer, request())  # the first session after a step brings that step's weights
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    (stale,), _ = sample(trainer, request())
    trainer.vllm_generation.sync_weights()
    (turn,), _ = sample(trainer, request())
    assert difference(trainer, stale) > 0.05
    assert difference(trainer, turn) < 0.01


def test_an_evaluation_before_the_first_step_samples_from_the_adapter(tmp_path, model_folder):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = vllm_trainer(tmp_path, model_folder, peft_config=adapter)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    (turn,), _ = sample(trainer, request())
    assert difference(trainer, turn) < 0.01


def test_an_adapter_is_synced_and_sampled_from(tmp_path, model_folder):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = vllm_trainer(tmp_path, model_folder, peft_config=adapter, max_steps=2)
    trainer.train()
    logs = [log["sampling/sampling_logp_difference/mean"] for log in trainer.state.log_history if "loss" in log]
    assert max(logs) < 0.01
    sample(trainer, request())
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    (stale,), _ = sample(trainer, request())
    trainer.vllm_generation.sync_weights()
    (turn,), _ = sample(trainer, request())
    assert difference(trainer, stale) > 0.05
    assert difference(trainer, turn) < 0.01


# Sampling


def test_the_second_turn_finds_the_first_in_the_prefix_cache_until_a_sync(trainer):
    trainer.vllm_generation.sync_weights()
    (first,), turns = sample(trainer, request())
    assert turns.cached_tokens == 0
    second = request(ids=[*PROMPT, *first.ids, *range(10, 40)])
    _, turns = sample(trainer, second)
    assert turns.cached_tokens >= 256
    trainer.vllm_generation.sync_weights()
    _, turns = sample(trainer, second)
    assert turns.cached_tokens == 0


def test_turns_of_uneven_length_end_on_their_own(trainer, settings):
    settings(generation_kwargs={"ignore_eos": True})
    trainer_ends, trainer.eos_token_ids = trainer.eos_token_ids, []
    ended = []
    try:
        with trainer.generation_session() as turns:
            for row, length in enumerate((20, 3, 9)):
                turns.submit(request(row, max_new_tokens=length)).add_done_callback(
                    lambda future, row=row: ended.append((row, len(future.result().ids)))
                )
            while turns.advance():
                if ended == [(1, 3)]:  # the next turn of a short row is requested while the long ones run
                    ended.append("next")
                    turns.submit(request(1, PROMPT[:50], 2)).add_done_callback(lambda _: ended.append("ended"))
    finally:
        trainer.eos_token_ids = trainer_ends
    assert ended == [(1, 3), "next", "ended", (2, 9), (0, 20)]


def test_a_stop_string_ends_a_turn_with_its_tokens(trainer, settings):
    letters = {"allowed_token_ids": TOKENIZER("abcdefghijklmnopqrstuvwxyz")["input_ids"]}
    settings(temperature=0.0, generation_kwargs=letters)
    (whole,), _ = sample(trainer, request(max_new_tokens=24))
    text = TOKENIZER.decode(whole.ids[5:7])
    settings(generation_kwargs=letters | {"stop": [text], "include_stop_str_in_output": True})
    (stopped,), _ = sample(trainer, request(max_new_tokens=24))
    assert stopped.ids == whole.ids[: len(stopped.ids)]
    assert TOKENIZER.decode(stopped.ids).endswith(text)
    assert len(stopped.ids) <= 7


def test_a_request_that_fails_fails_alone(trainer):
    (refused, taken), _ = sample(trainer, request(0, PROMPT * 4), request(1))
    assert isinstance(refused, GenerationFault)
    assert taken.ids


def test_a_seed_repeats_a_turn_and_differs_between_trajectories(trainer, settings):
    settings(generation_kwargs={"seed": 3})
    (first, other), _ = sample(trainer, request(0), request(1))
    (again,), _ = sample(trainer, request(0))
    assert first.ids == again.ids != other.ids


def test_what_broke_off_does_not_come_up_in_the_next_rollout(trainer):
    with pytest.raises(KeyboardInterrupt), trainer.generation_session() as turns:
        turns.submit(request(5))
        turns.advance()
        raise KeyboardInterrupt
    assert not trainer.vllm_generation.llm.llm_engine.has_unfinished_requests()
    (turn,), _ = sample(trainer, request(5, max_new_tokens=2))
    assert len(turn.ids) <= 2
