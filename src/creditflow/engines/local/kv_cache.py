"""Keys and values of rows that are decoded together, with room to grow. Knows transformers' cache and no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_ROOM = 32
"""Tokens of room at least, whenever a layer is copied."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """transformers' growing layer, which copies itself for every token, as one that copies itself now and then.

    `room`: keys and values, of which the first `length` tokens are filled.
    """

    def __init__(self, room: tuple[Tensor, Tensor], length: int) -> None:
        super().__init__()
        self.lazy_initialization(*room)
        self._take(room, length)

    def _take(self, room: tuple[Tensor, Tensor], length: int) -> None:
        self._room = room
        self.keys, self.values = (states[..., :length, :] for states in room)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; returns all keys and values."""
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        if end > self._room[0].shape[-2]:
            self._room = _copied(self.keys, end), _copied(self.values, end)
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., begin:end, :] = states
        self._take(self._room, end)
        return self.keys, self.values

    def keep(self, rows: Tensor, begin: int) -> None:
        """Go on with `rows` alone, from their column `begin` on."""
        length = self.keys.shape[-2] - begin
        keys, values = (_copied(states[rows, :, begin:], length) for states in (self.keys, self.values))
        self._take((keys, values), length)


def _empty(like: Tensor, n_rows: int, length: int) -> Tensor:
    """Room for `length` tokens and a quarter more."""
    return like.new_empty(n_rows, like.shape[1], length + max(_ROOM, length // 4), like.shape[3])


def _copied(states: Tensor, length: int) -> Tensor:
    room = _empty(states, states.shape[0], length)
    room[..., : states.shape[-2], :] = states
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
        keys, values = (_side_by_side([getattr(part, name) for part in parts], rows, n_rows, width) for name in _SIDES)
        merged.layers.append(RoomyLayer((keys, values), width))
    return merged


_SIDES = ("keys", "values")


def _side_by_side(parts: Sequence[Tensor], rows: Sequence[Tensor], n_rows: int, width: int) -> Tensor:
    whole = _empty(parts[0], n_rows, width)
    for own, (there, here) in zip(parts, rows, strict=True):
        padding = width - own.shape[2]
        whole[there, :, padding:width] = own[here]
        if padding:  # no weight is laid on it, but no weight of what is not finite would not be nothing
            whole[there, :, :padding] = 0
    return whole


def keep(cache: Any, rows: Tensor, begin: int) -> int:
    """Go on with `rows` alone; returns how many of `begin` columns, padding in all of them, are gone."""
    if not all(isinstance(layer, RoomyLayer) for layer in cache.layers):
        cache.batch_select_indices(rows)
        return 0
    for layer in cache.layers:
        layer.keep(rows, begin)
    return begin
