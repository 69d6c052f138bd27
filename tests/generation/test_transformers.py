"""Turns of a real, tiny model: a batch gives the same turns as its rows alone, and each turn ends where it should."""

from contextlib import nullcontext

import pytest
import torch
from transformers import GenerationConfig

from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.rollout.types import TurnRequest
from tests.support.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
PAD = TOKENIZER.pad_token_id


def talkative():
    """Return a tiny model with varied greedy turns. With tied random weights it would repeat the last token."""
    model = tiny_model(TOKENIZER).eval()
    generator = torch.Generator().manual_seed(1)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape, generator=generator))
    model.model.layers.apply(lambda part: scale(part, 8.0))
    return model


def scale(part, factor):
    if isinstance(part, torch.nn.Linear):
        part.weight.data *= factor


MODEL = talkative()
TEXTS = ["a", "print(2 + 3)", "The longest prompt of the batch, by far."]


def request(text, budget=12, row=0):
    return TurnRequest(trajectory=row, ids=TOKENIZER(text)["input_ids"], max_new_tokens=budget)


def session(*, end_ids=(END,), pad_id=PAD, kv_cache_tokens=0, **config):
    """Return a generator that uses the model, greedy by default."""
    settings = {"do_sample": False, "eos_token_id": list(end_ids), "pad_token_id": pad_id} | config
    generation_config = GenerationConfig(**settings)
    return nullcontext(
        TransformersGenerate(MODEL, generation_config, end_ids, pad_id, kv_cache_tokens=kv_cache_tokens)
    )


def greedy(ids, count):
    """Return the next greedy ids, each from a forward pass over all ids before it."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(MODEL(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[-count:]


FREE = [greedy(request(text).ids, 12) for text in TEXTS]
"""The ids that the model samples after each text if nothing ends its turn."""


def test_the_model_says_enough_to_tell_turns_apart():
    assert len({tuple(row) for row in FREE}) == 3
    assert all(END not in row and len(set(row)) > 1 for row in FREE)


@pytest.mark.parametrize("kv_cache_tokens", [0, 10_000])
def test_a_batch_of_unequal_prompts_equals_a_forward_pass_per_token(kv_cache_tokens):
    with session(kv_cache_tokens=kv_cache_tokens) as generate:
        turns = generate([request(text) for text in TEXTS])
    assert [turn.ids for turn in turns] == FREE


def test_the_order_of_the_batch_is_that_of_the_requests():
    with session() as generate:
        turns = generate([request(text) for text in reversed(TEXTS)])
    assert [turn.ids for turn in turns] == FREE[::-1]


def test_every_turn_is_cut_to_its_own_budget():
    with session() as generate:
        turns = generate([request(text, budget) for text, budget in zip(TEXTS, (1, 12, 5), strict=True)])
    assert [turn.ids for turn in turns] == [FREE[0][:1], FREE[1], FREE[2][:5]]


def until(ids, ends):
    return next((ids[: n + 1] for n, token in enumerate(ids) if token in ends), ids)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_turn_ends_with_its_first_end_token_and_the_others_go_on(place):
    end = FREE[1][place]
    with session(end_ids=(END, end)) as generate:
        turns = generate([request(text) for text in TEXTS])
    assert [turn.ids for turn in turns] == [until(row, {end}) for row in FREE]
    assert turns[1].ids[-1] == end
    assert len(turns[1].ids) <= place + 1


def test_a_pad_token_that_is_the_end_token_neither_shortens_nor_lengthens_a_turn():
    end = FREE[2][4]
    with session(end_ids=(end,), pad_id=end) as generate:
        turns = generate([request(text) for text in TEXTS])
    assert [turn.ids for turn in turns] == [until(row, {end}) for row in FREE]


def test_end_tokens_in_the_history_end_nothing():
    ids = [*TOKENIZER("hi")["input_ids"], END, *TOKENIZER("\nyes")["input_ids"]]
    with session(pad_id=END) as generate:
        short, _ = generate([TurnRequest(trajectory=0, ids=ids, max_new_tokens=6), request(TEXTS[2])])
    assert short.ids == until(greedy(ids, 6), {END})


def test_sampled_turns_stay_in_their_budgets():
    torch.manual_seed(0)
    with session(do_sample=True, temperature=1.0, top_k=0) as generate:
        turns = generate([request(text, budget) for text, budget in zip(TEXTS, (3, 30, 9), strict=True)])
    assert all(1 <= len(turn.ids) <= budget for turn, budget in zip(turns, (3, 30, 9), strict=True))
    assert all(END not in turn.ids[:-1] for turn in turns)
    assert all(turn.logprobs is None or len(turn.logprobs) == len(turn.ids) for turn in turns)
