"""Keys and values of rows that are decoded together, with room to grow. Knows transformers' cache and no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_ROOM = 32
"""Tokens of room at least, whenever a layer is copied."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """transformers' growing layer, which copies itself for every token, as one that copies itself now and then."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._room = _roomy(keys), _roomy(values)
        self._show(keys.shape[-2])

    def _show(self, length: int) -> None:
        self.keys, self.values = (room[..., :length, :] for room in self._room)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; returns all keys and values."""
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        if end > self._room[0].shape[-2]:
            self._room = _roomy(self.keys), _roomy(self.values)
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., begin:end, :] = states
        self._show(end)
        return self.keys, self.values

    def keep(self, rows: Tensor, begin: int) -> None:
        """Go on with `rows` alone, from their column `begin` on."""
        keys, values = self.keys[rows, :, begin:], self.values[rows, :, begin:]
        self._room = _roomy(keys), _roomy(values)
        self._show(keys.shape[-2])


def _roomy(states: Tensor) -> Tensor:
    """A copy with room for a quarter more tokens."""
    *shape, length, width = states.shape
    room = states.new_zeros(*shape, length + max(_ROOM, length // 4), width)
    room[..., :length, :] = states
    return room


def is_plain(cache: Any) -> bool:
    """Whether every layer simply keeps the keys and values of all tokens."""
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def merge(caches: Sequence[Any], rows: Sequence[Tensor], n_rows: int) -> DynamicCache:
    """One cache for the rows of several plain ones, padded on the left.

    `rows`: for each cache [r] pairs in two rows: where in the merged cache, and which of its own rows comes there.
    """
    width = max(cache.get_seq_length() for cache in caches)
    merged = DynamicCache()
    for parts in zip(*(cache.layers for cache in caches), strict=True):
        states = []
        for name in ("keys", "values"):
            first: Tensor = getattr(parts[0], name)
            whole = first.new_zeros(n_rows, first.shape[1], width, first.shape[3])
            for part, (there, here) in zip(parts, rows, strict=True):
                own: Tensor = getattr(part, name)
                whole[there, :, width - own.shape[2] :] = own[here]
            states.append(whole)
        merged.layers.append(RoomyLayer(*states))
    return merged


def keep(cache: Any, rows: Tensor, begin: int) -> int:
    """Go on with `rows` alone; returns how many of `begin` columns, padding in all of them, are gone."""
    if not all(isinstance(layer, RoomyLayer) for layer in cache.layers):
        cache.batch_select_indices(rows)
        return 0
    for layer in cache.layers:
        layer.keep(rows, begin)
    return begin
