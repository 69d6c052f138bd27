"""Sampling runs in the trainer's precision on every path, so it records what the trainer scores."""

import pytest
import torch
from peft import LoraConfig

from gvpo_trl.rollout.types import TurnRequest
from tests.generation.test_session import PROMPTS, scored_by, two_turns
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training import code, finish, make_trainer

TOKENIZER = tiny_tokenizer()
BF16 = 0.05
"""Largest difference of two log-probabilities in bfloat16; one bit of a logit of 4 is 0.016."""


def trainer_of(folder, dtype, autocast, adapter, kept, **options):
    model = tiny_model(TOKENIZER).to(dtype)
    peft = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapter else {}
    return make_trainer(
        folder,
        model=model,
        tokenizer=TOKENIZER,
        bf16=autocast,
        kv_cache_tokens=10_000 if kept else 0,
        **peft,
        **options,
    )


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sampled_is_what_the_trainer_scores(tmp_path, dtype, autocast, adapter, kept):
    trainer = trainer_of(tmp_path, dtype, autocast, adapter, kept)
    with trainer.generation_session() as generate:
        taken = two_turns(generate)
        group = [TurnRequest(trajectory=row, ids=PROMPTS[row % 2], max_new_tokens=4) for row in range(10, 14)]
        taken += zip(group, generate(group), strict=True)  # a group's prompt is read once
        newcomer = TurnRequest(trajectory=20, ids=PROMPTS[2], max_new_tokens=4)  # read apart from the others
        later = [
            TurnRequest(trajectory=r.trajectory, ids=r.ids + t.ids + [9], max_new_tokens=4) for r, t in taken[-4:]
        ]
        taken += zip([*later, newcomer], generate([*later, newcomer]), strict=True)
    exact = dtype is torch.float32 and not autocast
    with trainer.accelerator.autocast():
        for request, turn in taken:
            scored = scored_by(trainer, request, turn)
            assert turn.logprobs == pytest.approx(scored, abs=1e-5 if exact else BF16)


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_runs_with_several_turns_under_autocast(tmp_path, dtype, adapter):
    trainer = trainer_of(tmp_path, dtype, True, adapter, True, max_steps=2, max_turn_length=30)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["rollout/turns"] == 3


def test_scripts_still_finish(tmp_path):
    trainer = make_trainer(tmp_path, [[code("1/0"), finish(1, 0)]], bf16=True, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 1.0
