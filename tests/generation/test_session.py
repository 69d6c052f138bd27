"""Sampling inside a trainer uses the current weights, and log-probabilities equal those that the trainer scores."""

import pytest
import torch
from peft import LoraConfig

from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.rollout.types import TurnRequest
from tests.support.training import make_trainer

PROMPTS = [[5 + (7 * n) % 200 for n in range(length)] for length in (30, 12, 21)]


def two_turns(generate):
    """Return requests and turns of two rounds of three trajectories."""
    requests = [TurnRequest(trajectory=row, ids=ids, max_new_tokens=8) for row, ids in enumerate(PROMPTS)]
    first = generate(requests)
    later = [
        TurnRequest(trajectory=request.trajectory, ids=[*request.ids, *turn.ids, 9, 8], max_new_tokens=6)
        for request, turn in zip(requests, first, strict=True)
    ]
    return [*zip(requests, first, strict=True), *zip(later, generate(later), strict=True)]


def scored_by(trainer, request, turn):
    ids = torch.tensor([[*request.ids, *turn.ids]])
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(turn.ids)
        )
    return logps[0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("options", [{}, {"peft_config": LoraConfig(r=4, target_modules="all-linear")}])
def test_log_probabilities_are_those_that_the_trainer_scores(tmp_path, temperature, options):
    trainer = make_trainer(tmp_path, temperature=temperature, **options)
    trainer.model.train()
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    with trainer.generation_session() as generate:
        taken = two_turns(generate)
    for request, turn in taken:
        assert turn.logprobs == pytest.approx(scored_by(trainer, request, turn), abs=1e-5)
    assert trainer.model.is_gradient_checkpointing


def test_no_cache_outlives_a_change_of_the_weights(tmp_path):
    trainer = make_trainer(tmp_path, generation_kwargs={"do_sample": False})
    with trainer.generation_session() as generate:
        before = two_turns(generate)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    with trainer.generation_session() as generate:
        after = two_turns(generate)
    anew = two_turns(
        TransformersGenerate(
            trainer.model,
            trainer.generation_config,
            trainer.eos_token_ids,
            trainer.processing_class.pad_token_id,
            kv_cache_tokens=0,
        )
    )
    assert [turn.ids for _, turn in after] == [turn.ids for _, turn in anew]
    assert [turn.ids for _, turn in after] != [turn.ids for _, turn in before]
