"""Each trajectory is sampled from a random stream of its own, so a run does not depend on who is slow."""

import logging
import random
import threading
import time

import pytest
import torch
from transformers import GenerationConfig

from gvpo_trl import MultiTurnRollout
from gvpo_trl.generation.sampling import OwnStreams
from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.streams import Streams
from gvpo_trl.rollout.types import Turn, TurnRequest
from tests.support.rolling import budgets
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import make_trainer, score_of, tasks

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def generator(**options):
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **options)
    return TransformersGenerate(tiny_model(TOKENIZER), config, [END], TOKENIZER.pad_token_id, kv_cache_tokens=5000)


def requests(rows=6, seed=3):
    streams = Streams((seed,))
    return [
        TurnRequest(trajectory=row, ids=list(range(5, 20 + 3 * row)), max_new_tokens=25, seed=streams.seed(row, 0))
        for row in range(rows)
    ]


class Uneven(ToyEnvironment):
    """An environment whose openings and steps take a random time."""

    def __init__(self, seed):
        dice, lock = random.Random(seed), threading.Lock()

        def dawdle(number, place):
            with lock:
                seconds = dice.choice((0.0, 0.0, 0.01, 0.03))
            time.sleep(seconds)

        super().__init__(max_episodes=5, faults=dawdle, score=score_of)


@pytest.mark.parametrize("kv_cache_tokens", [0, 20_000])
def test_delays_change_neither_tokens_nor_weights(tmp_path, kv_cache_tokens):
    runs = []
    for seed, straggler_s in ((0, 100.0), (1, 0.004), (2, 0.0)):
        trainer = make_trainer(
            tmp_path / str(seed),
            model=tiny_model(TOKENIZER),
            tokenizer=TOKENIZER,
            train_dataset=tasks(4),
            per_device_train_batch_size=8,
            max_steps=2,
            learning_rate=1e-2,
            max_turn_length=20,
            kv_cache_tokens=kv_cache_tokens,
            reward_funcs=lambda completion_ids, **kwargs: [sum(ids) % 11 / 10 for ids in completion_ids],
            rollout_func=MultiTurnRollout(Uneven(seed), straggler_s=straggler_s),
        )
        trainer.train()
        tokens = [batch["completion_ids"].tolist() for batch in trainer.loss_inputs]
        runs.append((tokens, {name: value.clone() for name, value in trainer.model.state_dict().items()}))
    (tokens, weights), *others = runs
    for other_tokens, other_weights in others:
        assert other_tokens == tokens
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_turn_is_the_same_in_every_batch():
    together = generator()(requests())
    alone = [generator()([request])[0] for request in requests()]
    assert [turn.ids for turn in together] == [turn.ids for turn in alone]
    assert len({tuple(turn.ids) for turn in together}) == len(together)
    other = generator()(requests(seed=4))
    assert all(a.ids != b.ids for a, b in zip(together, other, strict=True))


def test_the_global_generator_is_left_alone():
    generate = generator()
    before = torch.get_rng_state()
    generate(requests())
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_seed_the_global_generator_decides():
    unseeded = [TurnRequest(trajectory=0, ids=[5, 6, 7], max_new_tokens=20)]
    generate = generator()
    turns = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        turns.append(generate(unseeded)[0].ids)
    assert turns[0] == turns[1] != turns[2]


def test_tokens_are_drawn_from_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    scores = probabilities.log().expand(20_000, -1)
    drawn = OwnStreams(range(20_000), 1, scores.device)(torch.zeros(20_000, 1), scores).argmax(dim=1)
    shares = torch.bincount(drawn, minlength=5) / 20_000
    assert shares[1] == 0
    # Five standard deviations of a share of 0.5 over 20,000 draws.
    assert torch.allclose(shares, probabilities, atol=5 * (0.25 / 20_000) ** 0.5)


def test_a_stream_belongs_to_run_step_row_and_turn():
    key = (0, "train", 3, 0)
    seeds = [Streams(key).seed(row, turn) for row in range(4) for turn in range(4)]
    seeds += [Streams((1, "train", 3, 0)).seed(0, 0), Streams((0, "eval", 3, 0)).seed(0, 0)]
    seeds += [Streams((0, "train", 4, 0)).seed(0, 0), Streams((0, "train", 3, 1)).seed(0, 0)]
    assert len(set(seeds)) == len(seeds)
    assert Streams(key, first_row=2).seed(1, 2) == Streams(key).seed(3, 2), "a row has one number over all processes"


def test_rollouts_of_a_run_have_streams_of_their_own(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.train()
    keys = [trainer.rollout_context().streams().key for _ in range(2)]
    trainer.model.eval()
    keys.append(trainer.rollout_context().streams().key)
    trainer.model.train()
    trainer.state.global_step = 1
    keys.append(trainer.rollout_context().streams().key)
    assert len(set(keys)) == 4


def test_opening_a_world_is_not_straggling():
    """All trajectories take their second turn in one round, although their worlds open late."""
    batches = []

    def generate(batch):
        batches.append(len(batch))
        return [Turn(ids=[*TOKENIZER("```python\nx = 1\n```")["input_ids"], END]) for _ in batch]

    environment = ToyEnvironment(faults=lambda number, place: time.sleep(0.1 * number if place == "open" else 0))
    loop = RolloutLoop(environment, Chat(TOKENIZER, [END]), budgets(straggler_s=0.02, max_turns=3))
    loop.run([f"t_{n}" for n in range(4)], [[{"role": "user", "content": "x"}]] * 4, generate)
    assert batches == [4, 4, 4]


def test_sampling_causes_no_warning_of_transformers(caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        generator()(requests(2))
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
