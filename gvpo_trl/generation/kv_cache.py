"""A key-value cache that is written into. transformers' own copies itself to every new token, all layers of it."""

import functools
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values at the beginning of tensors that have room behind them.

    Args:
        room: tokens to leave room for whenever the tensors are made anew.
    """

    def __init__(self, room: int):
        super().__init__()
        self._room = room
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None

    def hold(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Take tensors (rows, heads, at least `length`, head size) over, whose first `length` tokens are filled."""
        self.lazy_initialization(keys, values)
        self._whole = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens, (rows, heads, new, head size), and return all."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if self._whole is None or self._whole[0].shape[2] < end:
            old, length = (self.keys, self.values), end + self._room
            self.hold(_longer(key_states, length), _longer(value_states, length), end)
            if start:
                self.keys[:, :, :start], self.values[:, :, :start] = old
        keys, values = self._whole
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values


def _longer(states: torch.Tensor, length: int) -> torch.Tensor:
    rows, heads, _, size = states.shape
    return states.new_empty(rows, heads, length, size)


def growing_cache(room: int) -> DynamicCache:
    """An empty cache whose layers have room for that many tokens after the first ones."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = functools.partial(GrowingLayer, room)
    return cache
