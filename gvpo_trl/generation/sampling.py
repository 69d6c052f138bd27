"""Sampling with transformers: the distribution, the recorded log-probabilities, and the end of a turn."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.utils import logging

from gvpo_trl.rollout.code import extract_code

logger = logging.get_logger(__name__)


def split_warpers(config: GenerationConfig) -> tuple[GenerationConfig, list[LogitsProcessor]]:
    """Take temperature, `top_k`, `top_p` and `min_p` out of a configuration, and return them as logits processors.

    The processors are in transformers' order. `generate` would apply its own warpers after all processors that it is
    given, so none of these could record the distribution that tokens are sampled from.
    """
    config = copy.deepcopy(config)
    if not config.do_sample:
        return config, []
    warpers: list[LogitsProcessor] = []
    if config.temperature not in (None, 1.0):
        warpers.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k and config.top_k > 0:  # vLLM's word for no limit is -1
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(config.min_p))
    config.temperature, config.top_k, config.top_p, config.min_p = 1.0, 0, 1.0, None
    return config, warpers


@contextmanager
def own_settings_only(model: torch.nn.Module) -> Iterator[None]:
    """Switch the model's own generation configuration off while turns are sampled.

    `generate` takes from the model's configuration every setting that the given one leaves open, such as `min_p`,
    `typical_p` or `repetition_penalty`. Tokens would then be sampled from another distribution than the one that the
    trainer scores.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    # An adapter's wrapper may hold a configuration of its own, which PEFT gives to the model in `generate`.
    holders = [inner, *([model] if model is not inner and "generation_config" in vars(model) else [])]
    own = [holder.generation_config for holder in holders]
    settings = [setting for config in own for setting in config.to_diff_dict().items()]
    asked = {name: value for name, value in settings if name not in _HARMLESS and value != _OFF.get(name, False)}
    if asked:
        listed = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        logger.warning_once(
            f"The model's own generation_config is not used ({listed}): turns are sampled with the trainer's settings."
        )
    for holder in holders:
        holder.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for holder, config in zip(holders, own, strict=True):
            holder.generation_config = config


_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values with which a setting changes nothing."""
_HARMLESS = (
    "_from_model_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "do_sample",
    "use_cache",
)
"""Settings that the trainer's configuration always replaces, or that do not change the distribution."""


def greedy(config: GenerationConfig) -> GenerationConfig:
    """Return a copy of a configuration that always takes the most likely token, as `temperature=0` means."""
    config, defaults = copy.deepcopy(config), GenerationConfig()
    config.do_sample = False
    for name in ("temperature", "top_k", "top_p", "min_p"):  # transformers warns of others that have no effect
        setattr(config, name, getattr(defaults, name))
    return config


@contextmanager
def inference_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off while turns are sampled, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class OwnStreams(LogitsProcessor):
    """Samples each row's token with the row's own random numbers; `generate` then takes the only token that is left.

    Token number t of a row is the first one whose cumulated probability exceeds the row's uniform number t. The other
    rows of the batch play no part, except for rounding: another batch size may change the last bits of the logits, and
    with them a token whose number lies within these bits of the border between two tokens.

    Args:
        seeds: (B,) the seed of each row.
        length: the most tokens of a turn.
        device: the device of the scores.
    """

    def __init__(self, seeds: Sequence[int], length: int, device: torch.device):
        numbers = [
            torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds
        ]
        self._numbers = torch.stack(numbers, dim=1).float().to(device)  # (T, B)
        self._position = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (B, vocabulary) that leave one token to each row."""
        cumulated = scores.float().softmax(dim=-1).cumsum(dim=-1)
        borders = self._numbers[self._position].unsqueeze(1) * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, borders, right=True)
        # A number that was rounded up to 1 lies behind every token; the most likely one then stands for it.
        tokens = torch.where(tokens < scores.shape[1], tokens, scores.argmax(dim=-1, keepdim=True))
        self._position += 1
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens, 0.0)


FREE_LOOKS = 16
"""Fences of a turn at which `ClosedBlock` decodes it. Later it waits until the turn has grown by 1 / FREE_LOOKS."""


class LogprobRecorder(LogitsProcessor):
    """Records the log-probability of each sampled token, and keeps the scores of only one step in memory."""

    def __init__(self):
        self._last: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Record the scores (B, vocabulary) of the next token, and return them unchanged."""
        self._take(input_ids[:, -1])
        self._last = scores.float().log_softmax(dim=-1)
        return scores

    def finish(self, sampled: torch.Tensor) -> torch.Tensor:
        """Return (B, T) log-probabilities of the sampled tokens (B, T); values after a turn's end have no meaning."""
        self._take(sampled[:, -1])
        return torch.stack(self._columns[: sampled.shape[1]], dim=1)

    def _take(self, tokens: torch.Tensor) -> None:
        if self._last is not None:
            self._columns.append(self._last.gather(1, tokens.unsqueeze(1)).squeeze(1))
            self._last = None


class ClosedBlock(StoppingCriteria):
    """Ends a row at the end of its first code block.

    A turn is decoded only where a fence may just have ended. A turn of many fences is decoded less and less often, so
    that the work stays linear in its length. Such a turn may continue after its block and is cut there afterwards.

    Args:
        tokenizer: decodes turns.
        prompt_length: number of tokens of each row before the turn, padding included.
    """

    def __init__(self, tokenizer: Any, prompt_length: int):
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._looks: dict[int, tuple[int, int]] = {}
        """By row: how often its turn was decoded, and the length from which it is decoded again."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return (B,), true on the rows of `input_ids` whose first code block is closed by the last token."""
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for row, text in enumerate(self._tokenizer.batch_decode(input_ids[:, -1:])):
            length = input_ids.shape[1] - self._prompt_length
            looks, due = self._looks.get(row, (0, 0))
            if ("`" in text or "~" in text) and length >= due:
                turn = self._tokenizer.decode(input_ids[row, self._prompt_length :], skip_special_tokens=True)
                done[row] = _closes_block(turn)
                self._looks[row] = looks + 1, 0 if looks < FREE_LOOKS else length + length // FREE_LOOKS
        return done


def _closes_block(text: str) -> bool:
    code = extract_code(text)
    return code is not None and code.closed


def length_to_closed_block(tokenizer: Any, ids: list[int]) -> int:
    """Return the least number of leading ids that hold a whole code block, or the number of all ids if none do."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if _closes_block(tokenizer.decode(ids[:middle], skip_special_tokens=True)):
            high = middle
        else:
            low = middle + 1
    return high
