"""With a kept cache, tokens and log-probabilities are the same as when the history is read again in each turn."""

import logging
import random

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from gvpo_trl.generation.kv_cache import can_keep_cache, growing_cache
from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.rollout.types import TurnRequest
from tests.support.rolling import failing, roll
from tests.support.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _model(name):
    torch.manual_seed(0)
    if name == "qwen2":
        return tiny_model(TOKENIZER).eval()
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    if name == "mistral-sliding":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    if name == "gemma3-sliding":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8, head_dim=8)).eval()
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])).eval()


def _generator(model, tokens, **settings):
    config = GenerationConfig(eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id, **settings)
    return TransformersGenerate(
        model, config, [TOKENIZER.eos_token_id], TOKENIZER.pad_token_id, kv_cache_tokens=tokens
    )


def _conversation(model, plain, kept, turns=6, trajectories=6):
    """Sample the same turns with both generators; the trajectories that take part change from turn to turn."""
    draw = random.Random(0)
    history = {row: [draw.randrange(3, 250) for _ in range(draw.randrange(5, 40))] for row in range(trajectories)}
    for turn in range(turns):
        rows = [row for row in history if draw.random() < 0.7] or [0]
        requests = [
            TurnRequest(trajectory=row, ids=list(history[row]), max_new_tokens=draw.randrange(3, 14)) for row in rows
        ]
        torch.manual_seed(turn)
        expected = plain(requests)
        torch.manual_seed(turn)
        for request, want, got in zip(requests, expected, kept(requests), strict=True):
            assert got.ids == want.ids
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
            yield request, got
            observation = [draw.randrange(3, 250) for _ in range(draw.randrange(1, 20))]
            history[request.trajectory] = request.ids + got.ids + observation


@pytest.mark.parametrize("name", ["qwen2", "llama", "mistral-sliding", "gemma3-sliding", "lfm2-hybrid"])
def test_greedy_tokens_are_those_of_reading_the_history_again(name):
    model = _model(name)
    plain, kept = (_generator(model, tokens, do_sample=False) for tokens in (0, 10_000))
    assert len(list(_conversation(model, plain, kept))) > 10
    assert (kept.fed_tokens < plain.fed_tokens / 2) == (name != "lfm2-hybrid")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_the_trainers(temperature):
    model = _model("qwen2")
    settings = {"do_sample": True, "temperature": temperature, "top_k": 0}
    plain, kept = (_generator(model, tokens, **settings) for tokens in (0, 10_000))
    for request, turn in _conversation(model, plain, kept):
        with torch.no_grad():
            logits = model(torch.tensor([request.ids + turn.ids])).logits[0] / temperature
        logprobs = logits.log_softmax(-1)[len(request.ids) - 1 : -1].gather(1, torch.tensor(turn.ids).unsqueeze(1))
        assert turn.logprobs == pytest.approx(logprobs.squeeze(1).tolist(), abs=1e-5)


@pytest.mark.parametrize("capacity", [1, 60, 150])
def test_a_bounded_cache_forgets_and_stays_right(capacity):
    model = _model("qwen2")
    plain, kept = (_generator(model, tokens, do_sample=False) for tokens in (0, capacity))
    for _ in _conversation(model, plain, kept):
        assert kept.kept.tokens <= capacity


@pytest.mark.parametrize("name", ["qwen2", "gemma3-sliding"])
def test_a_prompt_of_a_whole_group_is_read_once(name):
    model = _model(name)
    plain, kept = (_generator(model, tokens, do_sample=False) for tokens in (0, 10_000))
    prompts = [list(range(5, 35))] * 4 + [list(range(40, 60))] * 4
    requests = [TurnRequest(trajectory=row, ids=ids, max_new_tokens=6) for row, ids in enumerate(prompts)]
    expected, turns = plain(requests), kept(requests)
    assert [turn.ids for turn in turns] == [turn.ids for turn in expected]
    assert kept.fed_tokens == 2 * 29 + 8  # two distinct prompts but for their last tokens, and all rows' last tokens
    histories = [
        request.ids + turn.ids + [row + 5] for row, (request, turn) in enumerate(zip(requests, turns, strict=True))
    ]
    requests = [TurnRequest(trajectory=row, ids=ids, max_new_tokens=6) for row, ids in enumerate(histories)]
    assert [turn.ids for turn in kept(requests)] == [turn.ids for turn in plain(requests)]


@pytest.mark.parametrize("room", [0, 1, 5, 100])
def test_a_growing_cache_holds_what_transformers_cache_holds(room):
    draw = torch.Generator().manual_seed(0)
    theirs, ours = DynamicCache(), growing_cache(room)
    for new in (7, 1, 1, 3, 1):
        for layer in range(2):
            states = [torch.randn(3, 2, new, 4, generator=draw) for _ in range(2)]
            for want, got in zip(theirs.update(*states, layer), ours.update(*states, layer), strict=True):
                assert torch.equal(want, got)
    assert ours.get_seq_length() == 13


def test_a_trajectory_that_began_again_is_read_anew():
    model = _model("qwen2")
    plain, kept = (_generator(model, tokens, do_sample=False) for tokens in (0, 10_000))
    for ids in ([5, 6, 7, 8, 9, 10], [5, 6, 70, 80, 90, 100, 110]):
        request = TurnRequest(trajectory=0, ids=ids, max_new_tokens=5)
        assert kept([request])[0].ids == plain([request])[0].ids


@pytest.mark.parametrize("capacity", [10_000, 150])
@pytest.mark.parametrize("overlap", [False, True])
def test_rollouts_with_waiting_tasks_and_a_lost_episode_are_those_without_a_cache(capacity, overlap):
    """Two of six episodes run at a time. A freed place goes to the next task, and one trajectory is started again."""
    model = _model("qwen2")
    outcomes, fed = [], []
    for tokens in (0, capacity):
        environment = failing("score", task="task_1")
        environment.max_episodes = 2
        generate = _generator(model, tokens, do_sample=False)
        trajectories = roll(
            [None] * 6, environment, generate, max_turns=4, max_turn_length=12, overlap=overlap, straggler_s=5
        )
        assert [trajectory.retries for trajectory in trajectories] == [0, 1, 0, 0, 0, 0]
        outcomes.append([[step.action_ids for step in trajectory.steps] for trajectory in trajectories])
        fed.append(generate.fed_tokens)
    assert outcomes[0] == outcomes[1]
    assert [len(steps) for steps in outcomes[0]] == [4] * 6
    assert generate.kept.tokens <= capacity
    if capacity == 10_000:  # what a small cache saves depends on which rows share a batch, so on timing
        assert fed[1] < fed[0] / 2


def test_a_model_with_recurrent_layers_says_once_that_nothing_is_kept(caplog):
    logging.Logger.warning_once.cache_clear()
    model, config = _model("lfm2-hybrid"), GenerationConfig()
    assert not can_keep_cache(model, config)
    assert not can_keep_cache(model, config)
    (said,) = caplog.messages
    assert "every turn reads the history again: Lfm2ForCausalLM has cache layers of another kind" in said


def test_a_turn_ends_with_its_closed_block():
    tokenizer = tiny_tokenizer()
    script = "so\n```python\nprint(1)\n```\nand more text that never comes"
    ids = tokenizer(script, add_special_tokens=False)["input_ids"]
    generate = TransformersGenerate(
        _Playback(tokenizer, ids), GenerationConfig(do_sample=False), [2], 0, stop_after_code=tokenizer
    )
    (turn,) = generate([TurnRequest(trajectory=0, ids=[5], max_new_tokens=len(ids))])
    assert tokenizer.decode(turn.ids) == "so\n```python\nprint(1)\n```"


def _Playback(tokenizer, ids):
    """Return a real model whose logits are changed so that it samples `ids`."""
    model = tiny_model(tokenizer).eval()
    forward = model.forward
    step = iter(ids)

    def forced(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = torch.full_like(output.logits, -1e9)
        output.logits[..., next(step)] = 0.0
        return output

    model.forward = forced
    return model
