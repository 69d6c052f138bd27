"""A key-value cache that is kept between turns, and cache layers that grow without copying.

Without a kept cache, a trajectory of n turns would read its own history n times. `KeptStates` holds the keys and
values of what each trajectory has read, in compact tensors per trajectory and layer. Any trajectories can therefore
form the next batch, even where some have ended and others have just begun. `GrowingLayer` replaces transformers' own
layers, which copy all keys and values at every new token.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from gvpo_trl.rollout.types import TurnRequest

logger = logging.get_logger(__name__)


class GrowingLayer(DynamicLayer):
    """A cache layer whose tensors have room for more tokens after the keys and values that they hold.

    Args:
        room: number of additional tokens that fit whenever new tensors are allocated.
    """

    def __init__(self, room: int):
        super().__init__()
        self._room = room
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None

    def hold(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Use these tensors, (rows, heads, at least `length`, head size), whose first `length` tokens are filled."""
        self.lazy_initialization(keys, values)
        self._whole = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens, (rows, heads, new, head size), and return the keys and values of all tokens."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if self._whole is None or self._whole[0].shape[2] < end:
            old, length = (self.keys, self.values), end + self._room
            self.hold(_empty_of_length(key_states, length), _empty_of_length(value_states, length), end)
            if start:
                self.keys[:, :, :start], self.values[:, :, :start] = old
        keys, values = self._whole
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values


def _empty_of_length(states: torch.Tensor, length: int) -> torch.Tensor:
    rows, heads, _, size = states.shape
    return states.new_empty(rows, heads, length, size)


def growing_cache(room: int) -> DynamicCache:
    """Return an empty cache whose layers, once first filled, have room for `room` more tokens."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = functools.partial(GrowingLayer, room)
    return cache


@dataclass(slots=True)
class _TrajectoryStates:
    """The n ids that a trajectory has read and, for each layer, keys and values of shape (heads, n, head size)."""

    ids: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class KeptStates:
    """The keys and values of each trajectory's history.

    Args:
        capacity: number of tokens to keep over all trajectories; the least recently used trajectories are dropped
            first.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._kept: OrderedDict[int, _TrajectoryStates] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Number of tokens whose keys and values are kept now."""
        return sum(len(kept.ids) for kept in self._kept.values())

    def known(self, request: TurnRequest) -> int:
        """Return how many leading ids of the request are kept: at most all but the last, which the model must read."""
        kept = self._kept.get(request.trajectory)
        if kept is None:
            return 0
        length = min(len(kept.ids), len(request.ids) - 1)
        if kept.ids[:length] != request.ids[:length]:  # the trajectory was started again
            del self._kept[request.trajectory]
            return 0
        return length

    def assemble(self, requests: Sequence[TurnRequest], width: int, fresh: int, new: int) -> DynamicCache:
        """Return the cache of the batch's first `width` positions, which precede the last `fresh` tokens of each row.

        The cache has room for those tokens and for `new` sampled tokens.
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

    def keep(self, trajectories: Sequence[int], ids: list[int], cache: DynamicCache, row: int, end: int) -> None:
        """Keep a row's states of `ids`, whose last one is at position `end - 1`, for one or several trajectories."""
        layers = [
            (layer.keys[row, :, end - len(ids) : end].clone(), layer.values[row, :, end - len(ids) : end].clone())
            for layer in cache.layers
        ]
        for trajectory in trajectories:
            self._kept[trajectory] = _TrajectoryStates(ids, layers)
            self._kept.move_to_end(trajectory)
        while self.tokens > self.capacity:
            self._kept.popitem(last=False)


def can_keep_cache(model: torch.nn.Module, config: GenerationConfig) -> bool:
    """Whether a cache can be kept between turns, that is, whether every layer caches keys and values by position.

    If not, a warning gives the reason once. A recurrent or hybrid state cannot be cut to a length, prompt learning
    puts its own entries in front, and a user who sets `cache_implementation` or `use_cache` wants that cache or none.
    """
    if config.cache_implementation is not None:
        reason = f"cache_implementation={config.cache_implementation!r} is set"
    elif config.use_cache is False:
        reason = "use_cache=False is set"
    elif getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        reason = "the adapter is one of prompt learning"
    else:
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
        if kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            return True
        reason = f"{type(model).__name__} has cache layers of another kind"
    logger.warning_once(f"No key-value cache is kept between turns, every turn reads the history again: {reason}.")
    return False
