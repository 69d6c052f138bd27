"""Turns from transformers' `generate`, with each trajectory's key-value cache kept from one turn to the next.

A trajectory of n turns would read its own history n times. Here the keys and values of what it has read stay, one
compact tensor a layer and trajectory, so any set of trajectories can form the next batch: some may have ended, others
just begun. A batch is laid out exactly as without a cache, left-padded and without holes, which keeps greedy tokens
the same: the last `fresh` tokens of every row are fed, and what stands before them comes from the cache.

    ids     (B, L)   . . p p p p a a b b     p prompt, a sampled, b bridge, . padding
    cached           |---------------|
    fed                              |---|   fresh = the most that any row has to read
"""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import (
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gvpo_trl.generation.kv_cache import GrowingLayer, growing_cache
from gvpo_trl.generation.ranks import Ranks
from gvpo_trl.rollout.code import extract_code
from gvpo_trl.rollout.types import Generate, Turn, TurnRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """What sampling with the trainer's own model needs from the trainer."""

    model: Callable[[], AbstractContextManager[torch.nn.Module]]
    """Opens the model for generation: unwrapped, its sharded parameters gathered, without gradients."""
    config: GenerationConfig
    """Temperature, `top_p` and the like."""
    end_ids: Sequence[int]
    """Ids that end a turn."""
    pad_id: int
    """Fills rows up; never attended to."""
    kv_cache_tokens: int
    """Tokens whose keys and values stay between turns, over all trajectories of this process; 0 keeps none."""
    stop_after_code: Any | None
    """The tokenizer where a turn ends with its first closed code block, else `None`."""
    equal_forwards: bool
    """Whether all ranks must run the same number of forwards."""


@contextmanager
def transformers_session(source: ModelSource) -> Iterator[Generate]:
    """Yield a `Generate` over the trainer's model, which is unwrapped once for the whole rollout.

    The key-value caches end with the session, so no cache outlives a change of the weights.
    """
    with source.model() as model:
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


@dataclass(slots=True)
class _Kept:
    """What a trajectory has read: n ids and, for each layer, keys and values of shape (heads, n, head size)."""

    ids: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class TransformersGenerate:
    """Samples turns in batches; see the module's docstring.

    Args:
        model: a causal language model, its weights fixed while this object lives.
        config: sampling settings.
        end_ids: ids that end a turn.
        pad_id: fills rows up; never attended to.
        kv_cache_tokens: tokens to keep the cache of, over all trajectories; the least recently used go first. 0 reads
            the whole history again each turn.
        stop_after_code: a tokenizer to end turns with that close a code block, `None` to wait for an end-of-turn id.
        equal_forwards: whether all ranks must run the same number of forwards; `wait_for_ranks` then ends a rollout.
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
        self.fed_tokens = 0  # prompt and history tokens that went through the model, padding included
        self._tokenizer = stop_after_code
        self._capacity = kv_cache_tokens if kv_cache_tokens and can_keep_cache(model, config) else 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._config, self._warpers = _split_warpers(config)
        self._ranks = Ranks(next(model.parameters()).device, together=equal_forwards)

    @torch.no_grad()
    def __call__(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        """Sample one turn per request; the batch runs to the longest budget and each turn is cut to its own."""
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
        recorder = _LogprobRecorder()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            cache=self._assemble(requests, longest - fresh, fresh, config.max_new_tokens) if self._capacity else None,
            logits_processor=LogitsProcessorList([*self._warpers, recorder]),
            stopping_criteria=self._stopping(longest),
            synced_gpus=self._ranks.together,
        )
        sampled = output.sequences[:, longest:]
        logprobs = recorder.finish(sampled).tolist()
        turns = [
            self._turn(row, scores, request)
            for row, scores, request in zip(sampled.tolist(), logprobs, requests, strict=True)
        ]
        if self._capacity:
            self._keep(requests, turns, output.cache, longest)
        return turns

    @torch.no_grad()
    def wait_for_ranks(self) -> None:
        """Take part in the forwards of the ranks that still sample, until none does."""
        while self._ranks.together:
            someone_samples, someone_reads = self._ranks.any(False, False)
            if not someone_samples:
                return
            if someone_reads:
                self._idle_forward()
            config = copy.copy(self._config)
            config.max_new_tokens = 1
            self.model.generate(**self._idle_inputs(), generation_config=config, synced_gpus=True)

    def _idle_forward(self) -> None:
        self.model(**self._idle_inputs(), use_cache=False)

    def _idle_inputs(self) -> dict[str, torch.Tensor]:
        ids = torch.full((1, 1), self.pad_id, device=self._ranks.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _turn(self, sampled: list[int], logprobs: list[float], request: TurnRequest) -> Turn:
        """Up to and with the first end-of-turn id, or as far as the code block that ended the turn."""
        length = min(len(sampled), request.max_new_tokens)
        for position, token in enumerate(sampled[:length]):
            if token in self.end_ids:
                length = position + 1
                break
        if self._tokenizer is not None:
            length = _length_to_closed_block(self._tokenizer, sampled[:length])
        return Turn(ids=sampled[:length], logprobs=logprobs[:length])

    def _stopping(self, prompt_length: int) -> StoppingCriteriaList | None:
        if self._tokenizer is None:
            return None
        return StoppingCriteriaList([_ClosedBlock(self._tokenizer, prompt_length)])

    def _pad(self, rows: Sequence[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(rows), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = 1
        return ids.to(self._ranks.device), mask.to(self._ranks.device)

    # The cache

    def _known(self, request: TurnRequest) -> int:
        """How many leading ids of the request are in the cache; always leaves one to feed."""
        kept = self._kept.get(request.trajectory)
        if kept is None:
            return 0
        length = min(len(kept.ids), len(request.ids) - 1)
        if kept.ids[:length] != request.ids[:length]:  # the trajectory began again
            del self._kept[request.trajectory]
            return 0
        return length

    def _reads_apart(self, requests: Sequence[TurnRequest], unread: Sequence[TurnRequest]) -> bool:
        """Whether rows that begin now are read before the batch is sampled.

        Else they would make the others read their history again, and a prompt that begins several trajectories, as
        each of a group does, would be read for each of them.
        """
        distinct = {tuple(request.ids) for request in unread}
        fits = sum(len(request.ids) for request in requests) <= self._capacity
        return fits and (0 < len(unread) < len(requests) or len(distinct) < len(unread))

    def _read(self, requests: Sequence[TurnRequest]) -> None:
        """Fill the cache with all but the last token of each request; equal ones are read once and share it."""
        beginning: dict[tuple[int, ...], list[int]] = {}
        for request in requests:
            beginning.setdefault(tuple(request.ids[:-1]), []).append(request.trajectory)
        longest = max(map(len, beginning))
        if longest < 1:
            self._idle_forward()  # another rank may be reading
            return
        ids, mask = self._pad([list(row) for row in beginning], longest)
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
        for row, (read, trajectories) in enumerate(beginning.items()):
            self._store(trajectories, list(read), output.cache, row, longest)

    def _assemble(self, requests: Sequence[TurnRequest], width: int, fresh: int, new: int) -> DynamicCache:
        """The cache of the batch's first `width` positions: what stands before the last `fresh` tokens of each row.

        It has room for those and for `new` sampled tokens.
        """
        cache = growing_cache(room=new)
        if not width:
            return cache
        room = width + fresh + new
        lengths = [max(0, len(request.ids) - fresh) for request in requests]
        kept = [self._kept.get(request.trajectory) for request in requests]
        template = next(entry for entry in kept if entry is not None)
        for number, states in enumerate(template.layers):
            whole = [part.new_zeros(len(requests), part.shape[0], room, part.shape[2]) for part in states]
            for row, (entry, length) in enumerate(zip(kept, lengths, strict=True)):
                if length:
                    for into, part in zip(whole, entry.layers[number], strict=True):
                        into[row, :, width - length : width] = part[:, :length]
            cache.layers.append(GrowingLayer(new))
            cache.layers[-1].hold(*whole, width)
        return cache

    def _keep(self, requests: Sequence[TurnRequest], turns: list[Turn], cache: DynamicCache, longest: int) -> None:
        length = cache.get_seq_length()
        for row, (request, turn) in enumerate(zip(requests, turns, strict=True)):
            end = min(longest + len(turn.ids), length)  # the last token of the longest turn was never fed
            ids = (request.ids + turn.ids)[: len(request.ids) + end - longest]
            self._store([request.trajectory], ids, cache, row, end)

    def _store(self, trajectories: Sequence[int], ids: list[int], cache: DynamicCache, row: int, end: int) -> None:
        layers = [
            (layer.keys[row, :, end - len(ids) : end].clone(), layer.values[row, :, end - len(ids) : end].clone())
            for layer in cache.layers
        ]
        for trajectory in trajectories:
            self._kept[trajectory] = _Kept(ids, layers)
            self._kept.move_to_end(trajectory)
        while sum(len(kept.ids) for kept in self._kept.values()) > self._capacity:
            self._kept.popitem(last=False)


def can_keep_cache(model: torch.nn.Module, config: GenerationConfig) -> bool:
    """Whether every layer's cache is keys and values by position; says once why not.

    A recurrent or hybrid state cannot be cut to a length, prompt learning puts its own entries in front, and a cache
    of another implementation was asked for on purpose.
    """
    if config.cache_implementation is not None:
        reason = f"cache_implementation={config.cache_implementation!r} is set"
    elif getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        reason = "the adapter is one of prompt learning"
    else:
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
        if kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            return True
        reason = f"{type(model).__name__} has cache layers of another kind"
    if reason not in _SAID:
        _SAID.add(reason)
        logger.warning("No key-value cache is kept between turns, every turn reads the history again: %s.", reason)
    return False


_SAID: set[str] = set()


def _split_warpers(config: GenerationConfig) -> tuple[GenerationConfig, list[LogitsProcessor]]:
    """Take temperature, `top_k`, `top_p` and `min_p` out of a configuration, as processors in transformers' order.

    `generate` applies its own after everybody else's, where nothing could record the distribution sampled from.
    """
    config = copy.deepcopy(config)
    if not config.do_sample:
        return config, []
    warpers: list[LogitsProcessor] = []
    if config.temperature not in (None, 1.0):
        warpers.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(config.min_p))
    config.temperature, config.top_k, config.top_p, config.min_p = 1.0, 0, 1.0, None
    return config, warpers


class _LogprobRecorder(LogitsProcessor):
    """Keeps the log-probability of each sampled token, one step of scores in memory at a time."""

    def __init__(self):
        self._last: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._take(input_ids[:, -1])
        self._last = scores.float().log_softmax(dim=-1)
        return scores

    def finish(self, sampled: torch.Tensor) -> torch.Tensor:
        """(B, T) log-probabilities of the sampled tokens; what stands behind a turn's end has no meaning."""
        self._take(sampled[:, -1])
        return torch.stack(self._columns[: sampled.shape[1]], dim=1)

    def _take(self, tokens: torch.Tensor) -> None:
        if self._last is not None:
            self._columns.append(self._last.gather(1, tokens.unsqueeze(1)).squeeze(1))
            self._last = None


class _ClosedBlock(StoppingCriteria):
    """Ends a row at the end of its first code block."""

    def __init__(self, tokenizer: Any, prompt_length: int):
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for row, text in enumerate(self._tokenizer.batch_decode(input_ids[:, -1:])):
            if "`" in text:  # whole turns are decoded only where a fence may just have ended
                turn = self._tokenizer.decode(input_ids[row, self._prompt_length :], skip_special_tokens=True)
                done[row] = _closes_block(turn)
        return done


def _closes_block(text: str) -> bool:
    code = extract_code(text)
    return code is not None and "```" in text[code.spans[0][1] :]


def _length_to_closed_block(tokenizer: Any, ids: list[int]) -> int:
    """The least number of leading ids that hold a whole code block; all of them when none does."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if _closes_block(tokenizer.decode(ids[:middle], skip_special_tokens=True)):
            high = middle
        else:
            low = middle + 1
    return high
