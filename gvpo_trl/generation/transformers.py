"""Samples turns with transformers' `generate` and keeps each trajectory's keys and values from one turn to the next.

A batch has the same layout as without a kept cache: rows are padded on the left and have no holes. Greedy tokens
therefore stay the same. The model reads the last `fresh` tokens of every row; the tokens before them come from the
cache.

    ids     (B, L)   . . p p p p a a b b     p prompt, a sampled, b bridge, . padding
    cached           |---------------|
    read                             |---|   fresh = the most tokens that any row has to read
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from gvpo_trl.generation.kv_cache import KeptStates, can_keep_cache
from gvpo_trl.generation.ranks import Ranks
from gvpo_trl.generation.sampling import (
    ClosedBlock,
    LogprobRecorder,
    OwnStreams,
    greedy,
    inference_mode,
    length_to_closed_block,
    own_settings_only,
    split_warpers,
)
from gvpo_trl.rollout.types import Generate, Turn, TurnRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """What the trainer provides for sampling with its own model."""

    model: Callable[[], AbstractContextManager[torch.nn.Module]]
    """Opens the unwrapped model for generation, with sharded parameters gathered and without gradients."""
    config: GenerationConfig
    """Sampling settings, such as temperature and `top_p`."""
    end_ids: Sequence[int]
    """Ids that end a turn."""
    pad_id: int
    """Id that pads rows; it is never attended to."""
    kv_cache_tokens: int
    """Number of tokens whose keys and values are kept between turns, over all trajectories of this process."""
    stop_after_code: Any | None
    """The tokenizer if a turn ends with its first closed code block, else `None`."""
    equal_forwards: bool
    """Whether all ranks must run the same number of forwards."""


@contextmanager
def transformers_session(source: ModelSource) -> Iterator[Generate]:
    """Yield a `Generate` that uses the trainer's model, which is unwrapped once for the whole rollout.

    The kept key-value cache ends with the session, so it never outlives a change of the weights.
    """
    with source.model() as model, inference_mode(model):
        generate = TransformersGenerate(
            model,
            source.config,
            source.end_ids,
            source.pad_id,
            kv_cache_tokens=source.kv_cache_tokens,
            stop_after_code=source.stop_after_code,
            equal_forwards=source.equal_forwards,
        )
        yield generate
        generate.wait_for_ranks()


class TransformersGenerate:
    """Samples turns in batches, laid out as the module's docstring shows.

    Args:
        model: a causal language model whose weights do not change while this object is in use.
        config: sampling settings. Settings that it leaves open are off, whatever the model's own configuration says.
        end_ids: ids that end a turn.
        pad_id: id that pads rows; it is never attended to.
        kv_cache_tokens: number of tokens whose keys and values are kept between turns, over all trajectories. The
            least recently used trajectories are dropped first. With 0 the whole history is read again in each turn.
        stop_after_code: the tokenizer if a turn ends with its first closed code block, `None` if only an end-of-turn
            id ends it.
        equal_forwards: whether all ranks must run the same number of forwards. If so, call `wait_for_ranks` at the end
            of a rollout.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: GenerationConfig,
        end_ids: Sequence[int],
        pad_id: int,
        *,
        kv_cache_tokens: int = 0,
        stop_after_code: Any | None = None,
        equal_forwards: bool = False,
    ):
        self.model = model
        self.end_ids = frozenset(end_ids)
        self.pad_id = pad_id
        self.fed_tokens = 0
        """Number of prompt and history tokens that the model has read, padding included."""
        self._tokenizer = stop_after_code
        keeps = kv_cache_tokens > 0 and can_keep_cache(model, config)
        self.kept = KeptStates(kv_cache_tokens) if keeps else None
        self._samples = bool(config.do_sample)
        config, self._warpers = split_warpers(config)
        self._config = greedy(config)  # the tokens are drawn by `OwnStreams`
        self._config.eos_token_id, self._config.pad_token_id = list(end_ids), pad_id
        self._ranks = Ranks(next(model.parameters()).device, together=equal_forwards)

    @torch.no_grad()
    def __call__(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        """Sample one turn per request. The batch runs to the longest budget, and each turn is cut to its own."""
        known = [self._known(request) for request in requests]
        unread = [request for request, length in zip(requests, known, strict=True) if not length]
        apart = self._reads_apart(requests, unread)
        _, someone_reads = self._ranks.any(True, apart)
        if apart:
            self._read(unread)
            known = [self._known(request) for request in requests]
        elif someone_reads:
            self._idle_forward()
        longest = max(len(request.ids) for request in requests)
        fresh = max(len(request.ids) - length for request, length in zip(requests, known, strict=True))
        ids, mask = self._pad([request.ids for request in requests], longest)
        self.fed_tokens += fresh * len(requests)
        config = copy.copy(self._config)
        config.return_dict_in_generate = True
        config.max_new_tokens = max(request.max_new_tokens for request in requests)
        recorder = LogprobRecorder()
        output = self._generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            cache=self.kept.assemble(requests, longest - fresh, fresh, config.max_new_tokens) if self.kept else None,
            logits_processor=LogitsProcessorList([*self._warpers, recorder, *self._draws(requests, config)]),
            stopping_criteria=self._stopping(longest),
        )
        sampled = output.sequences[:, longest:]
        logprobs = recorder.finish(sampled).tolist()
        turns = [
            self._turn(row, scores, request)
            for row, scores, request in zip(sampled.tolist(), logprobs, requests, strict=True)
        ]
        if self.kept:
            self._keep(requests, turns, output.cache, longest)
        return turns

    @torch.no_grad()
    def wait_for_ranks(self) -> None:
        """Take part in the forwards of the ranks that still sample, until no rank samples any more."""
        while self._ranks.together:
            someone_samples, someone_reads = self._ranks.any(False, False)
            if not someone_samples:
                return
            if someone_reads:
                self._idle_forward()
            config = copy.copy(self._config)
            config.max_new_tokens = 1
            self._generate(**self._idle_inputs(), generation_config=config)

    def _draws(self, requests: Sequence[TurnRequest], config: GenerationConfig) -> list[OwnStreams]:
        """Return what draws the tokens; nothing if sampling is greedy."""
        if not self._samples:
            return []
        seeds = [torch.randint(2**31, ()).item() if r.seed is None else r.seed for r in requests]
        return [OwnStreams(seeds, config.max_new_tokens, self._ranks.device)]

    def _generate(self, **options: Any) -> Any:
        with own_settings_only(self.model):
            return self.model.generate(**options, synced_gpus=self._ranks.together)

    def _idle_forward(self) -> None:
        self.model(**self._idle_inputs(), use_cache=False)

    def _idle_inputs(self) -> dict[str, torch.Tensor]:
        ids = torch.full((1, 1), self.pad_id, device=self._ranks.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _turn(self, sampled: list[int], logprobs: list[float], request: TurnRequest) -> Turn:
        """Return the row's turn, cut after its first end-of-turn id or after the code block that ended it."""
        length = min(len(sampled), request.max_new_tokens)
        for position, token in enumerate(sampled[:length]):
            if token in self.end_ids:
                length = position + 1
                break
        if self._tokenizer is not None:
            length = length_to_closed_block(self._tokenizer, sampled[:length])
        return Turn(ids=sampled[:length], logprobs=logprobs[:length])

    def _stopping(self, prompt_length: int) -> StoppingCriteriaList | None:
        if self._tokenizer is None:
            return None
        return StoppingCriteriaList([ClosedBlock(self._tokenizer, prompt_length)])

    def _pad(self, rows: Sequence[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (B, `width`) ids, padded on the left, and their attention mask."""
        ids = torch.full((len(rows), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = 1
        return ids.to(self._ranks.device), mask.to(self._ranks.device)

    # The kept cache

    def _known(self, request: TurnRequest) -> int:
        return self.kept.known(request) if self.kept else 0

    def _reads_apart(self, requests: Sequence[TurnRequest], unread: Sequence[TurnRequest]) -> bool:
        """Whether the model reads the prompts of new rows in a batch of their own, before it samples.

        In one batch with new rows, all other rows would have to read their history again. And a prompt that several
        trajectories share, as those of a group do, would be read once for each of them.
        """
        if self.kept is None:
            return False
        distinct = {tuple(request.ids) for request in unread}
        fits = sum(len(request.ids) for request in requests) <= self.kept.capacity
        return fits and (0 < len(unread) < len(requests) or len(distinct) < len(unread))

    def _read(self, requests: Sequence[TurnRequest]) -> None:
        """Read all but the last token of each request into the cache; equal prompts are read once."""
        prompts: dict[tuple[int, ...], list[int]] = {}  # maps leading ids to the trajectories that share them
        for request in requests:
            prompts.setdefault(tuple(request.ids[:-1]), []).append(request.trajectory)
        longest = max(map(len, prompts))
        if longest < 1:
            self._idle_forward()  # other ranks count on one forward of this rank
            return
        ids, mask = self._pad([list(ids) for ids in prompts], longest)
        self.fed_tokens += ids.numel()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=DynamicCache(),
            use_cache=True,
            logits_to_keep=1,
        )
        for row, (read, trajectories) in enumerate(prompts.items()):
            self.kept.keep(trajectories, list(read), output.cache, row, longest)

    def _keep(self, requests: Sequence[TurnRequest], turns: list[Turn], cache: DynamicCache, longest: int) -> None:
        length = cache.get_seq_length()
        for row, (request, turn) in enumerate(zip(requests, turns, strict=True)):
            end = min(longest + len(turn.ids), length)  # the model has not read the last token of the longest turn
            ids = (request.ids + turn.ids)[: len(request.ids) + end - longest]
            self.kept.keep([request.trajectory], ids, cache, row, end)
