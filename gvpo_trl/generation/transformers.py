"""Turns from transformers' `generate`: the plain path, which reads the whole history again each turn."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from gvpo_trl.rollout.types import Generate, Turn, TurnRequest


@contextmanager
def transformers_session(trainer: Any) -> Iterator[Generate]:
    """Yield a `Generate` over the trainer's model, unwrapped once for the whole rollout.

    Args:
        trainer: a `GVPOTrainer`; its `generation_config` holds temperature, `top_p`, … and its end-of-turn ids.
    """
    with trainer.model_for_generation() as model:
        yield _TransformersGenerate(model, trainer.generation_config, trainer.eos_token_ids, trainer.pad_token_id)


class _TransformersGenerate:
    def __init__(self, model: torch.nn.Module, config: GenerationConfig, end_ids: Sequence[int], pad_id: int):
        self.model = model
        self.config = config
        self.end_ids = frozenset(end_ids)
        self.pad_id = pad_id

    def __call__(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        """Sample one turn per request; the batch runs to the longest budget and each turn is cut to its own."""
        longest = max(len(request.ids) for request in requests)
        device = next(self.model.parameters()).device
        ids = torch.full((len(requests), longest), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, longest - len(request.ids) :] = 1
        config = copy.copy(self.config)
        config.max_new_tokens = max(request.max_new_tokens for request in requests)
        output = self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
        )
        sampled = output[:, longest:].tolist()
        return [Turn(ids=self._turn(row, request)) for row, request in zip(sampled, requests, strict=True)]

    def _turn(self, sampled: list[int], request: TurnRequest) -> list[int]:
        """Up to and with the first end-of-turn id; what follows it is padding."""
        for position, token in enumerate(sampled[: request.max_new_tokens]):
            if token in self.end_ids:
                return sampled[: position + 1]
        return sampled[: request.max_new_tokens]
