"""Attention over packed tokens and over rows with shared prompts, as an attention function of transformers.

Training and prefill: queries, keys and values of T tokens are gathered into rows. Rows are padded on the right and
attention is causal, so they need no mask. Rows with the same prompt gather it from the same tokens. Where it is less
work, prompts become separate rows, and responses attend to them.

Decoding: the one query of each row attends to its prompt, whose keys and values are stored once for all rows with that
prompt, and to its own response. Depends on `PackedSteps`, not on a model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from creditflow.data import Ints
from creditflow.engines.local.packing import PackedSteps

AGREE = 1e-4
"""Largest difference between packed and padded outputs that counts as equal, in standard deviations of the output."""
_WIDE = 512
"""Numbers of a token's queries in all heads from which keys and values are not copied for each head."""
NAME = "creditflow_packed"
"""The function's name in transformers. No mask function is registered under it, so transformers builds no mask."""


@dataclass(slots=True)
class VisibleKeys:
    """The query tokens of b rows, and the tokens that each may attend to."""

    query_at: Tensor
    """[b, Q]"""
    key_at: Tensor
    """[b, K]"""
    mask: Tensor | None
    """[b, 1, Q, K] True where a query attends to a key; None: causal within the row."""


@dataclass(slots=True)
class Layout:
    """The positions of attention rows among T tokens: `PackedSteps` as tensors."""

    rows: tuple[VisibleKeys, ...]
    source: Tensor
    """[T] index of each token's query among the queries of all rows, flattened."""
    calls: int = 0
    """The number of layers that have read this layout."""
    states: list[tuple[Tensor, Tensor]] | None = None
    """If a list: each layer appends its keys and values [1, key heads, T, D]."""

    @property
    def longest(self) -> int:
        """The length of the longest row, in tokens."""
        return max(rows.key_at.shape[1] for rows in self.rows)

    @classmethod
    def from_packed(cls, packed: PackedSteps, device: torch.device) -> Layout:
        """Build the layout of `packed` on `device`."""

        def on_device(column: Ints) -> Tensor:
            return torch.from_numpy(column).to(device)

        split = packed.split
        whole = packed.groups if split is None else split.prompts
        rows = [VisibleKeys(at, at, None) for at in (on_device(group.at) for group in whole)]
        for responses in () if split is None else split.responses:
            query_at, key_at = on_device(responses.query_at), on_device(responses.key_at)
            n_queries, n_keys = query_at.shape[1], key_at.shape[1]
            column = torch.arange(n_keys, device=device)
            before = column <= torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
            mask = before & (column >= on_device(responses.padding)[:, None, None])
            rows.append(VisibleKeys(query_at, key_at, mask[:, None]))
        return cls(tuple(rows), on_device(packed.source if split is None else split.source))


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: Layout | Decoding | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend: `query` [1, heads, T, D], `key` and `value` [1, key heads, T, D] to [1, T, heads, D].

    Decoding: `query` [B, heads, 1, D], `key` and `value` of the responses [B, key heads, t, D] to [B, 1, heads, D].

    Raises NotImplementedError for features that rows do not support: a soft cap, attention sinks, dropout, a window
    shorter than a row.
    """
    if packed_layout is None or others.get("softcap") or others.get("s_aux") is not None or dropout:
        raise NotImplementedError("this model's attention cannot be packed")
    if isinstance(packed_layout, Decoding):
        if sliding_window is not None:
            raise NotImplementedError("rows that share prompts are decoded without windows")
        return packed_layout.attend(module.layer_idx, query, key, value, scaling), None
    if sliding_window is not None and sliding_window < packed_layout.longest:
        raise NotImplementedError("this model's attention sees a window only")
    packed_layout.calls += 1
    if packed_layout.states is not None:
        packed_layout.states.append((key, value))
    q_TH, k_TH, v_TH = (states[0].transpose(0, 1) for states in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    # Wide models let the kernel share keys and values among query heads. Narrow ones repeat them, which gives the same
    # gradients bit for bit as earlier versions, and costs little.
    shares = repeats > 1 and query.shape[1] * query.shape[3] >= _WIDE
    out = []
    for rows in packed_layout.rows:
        q = q_TH[rows.query_at].transpose(1, 2)  # [b, heads, Q, D]
        k, v = (states[rows.key_at].transpose(1, 2) for states in (k_TH, v_TH))  # [b, key heads, K, D]
        if repeats > 1 and not shares:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        seen = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, rows.mask, scale=scaling, is_causal=rows.mask is None, enable_gqa=shares
        )
        out.append(seen.transpose(1, 2).flatten(0, 1))  # [b * Q, heads, D]
    return torch.cat(out)[packed_layout.source].unsqueeze(0), None


def full(states: Tensor) -> Tensor:
    """Cast states to full precision: the log-probs sampled here are the old log-probs of the training ratio.

    Caches of keys and values hold what this returns, so that it casts only new tokens.
    """
    return states.to(torch.promote_types(states.dtype, torch.float32))


@dataclass(slots=True)
class Prompts:
    """One layer's keys and values of U prompts, padded on the right, in float32 or wider (see `full`)."""

    keys: Tensor
    """[U, key heads, D, P], the fastest layout for the product with queries."""
    values: Tensor
    """[U, key heads, P, D]"""
    beyond: Tensor
    """[U, 1, 1, P] 0 within a prompt, -inf after its end."""

    @classmethod
    def from_tokens(cls, keys: Tensor, values: Tensor, tokens_of: Sequence[Ints], width: int) -> Prompts:
        """Gather and pad [1, key heads, T, D]. `tokens_of`: the indices in T of each prompt's tokens."""
        length_U = np.array([len(at) for at in tokens_of])
        inside = np.arange(width)[None, :] < length_U[:, None]
        # After the end: the prompt's last token.
        at = np.stack([np.pad(at, (0, width - len(at)), mode="edge") for at in tokens_of])
        at_UP = torch.from_numpy(at).to(keys.device)
        beyond = torch.from_numpy(np.where(inside, 0, -np.inf).astype(np.float32)).to(keys.device)
        keys_UHPD, values_UHPD = (full(states)[0][:, at_UP].transpose(0, 1) for states in (keys, values))
        return cls(keys_UHPD.transpose(2, 3).contiguous(), values_UHPD.contiguous(), beyond[:, None, None])

    @classmethod
    def together(cls, parts: Sequence[Prompts]) -> Prompts:
        """Concatenate prompts of the same width."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.keys for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat([part.beyond for part in parts]),
        )

    def select(self, which: Tensor) -> Prompts:
        """Select prompts by index, in this order; an index may repeat."""
        return Prompts(self.keys[which], self.values[which], self.beyond[which])


@dataclass(slots=True)
class Decoding:
    """The assignment of B rows to prompts while each row decodes one token."""

    prompts: Sequence[Prompts]
    """One entry per layer."""
    rows: Tensor
    """[U, g] the rows of each prompt; entries after the last row are arbitrary."""
    place: Tensor | None
    """[B] index of each row in the flattened `rows`; None if that is 0, 1, ..., B - 1."""
    beyond: Tensor | None = None
    """[t] 0 at the response tokens in the cache, -inf after the last one; None: the cache ends there."""

    @classmethod
    def from_prompts(cls, prompt_of_row: Ints, prompts: Sequence[Prompts], device: torch.device) -> Decoding:
        """Group rows by prompt. `prompt_of_row` [B] contains each of the U prompts at least once."""
        order = np.argsort(prompt_of_row, kind="stable")
        count = np.bincount(prompt_of_row)
        nth = np.empty(len(order), dtype=np.int64)
        nth[order] = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        rows = np.zeros((len(count), int(count.max())), dtype=np.int64)
        rows[prompt_of_row, nth] = np.arange(len(order))
        place = prompt_of_row * rows.shape[1] + nth
        in_order = rows.size == len(order) and bool((place == np.arange(len(order))).all())
        return cls(prompts, torch.from_numpy(rows).to(device), None if in_order else torch.from_numpy(place).to(device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend with one softmax over prompt and response tokens; returns [B, 1, heads, D]."""
        with torch.autocast(query.device.type, enabled=False):
            seen = self._attend(self.prompts[layer], full(query), full(key), full(value), scaling)
        return seen.to(query.dtype)

    def _attend(self, prompts: Prompts, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        n_rows, heads, _, width = query.shape
        key_heads, n_prompt = prompts.keys.shape[1], prompts.keys.shape[3]
        q = query[:, :, 0].reshape(n_rows, key_heads, -1, width) * (width**-0.5 if scaling is None else scaling)
        # Grouped by prompt, because most of the numbers belong to prompts. Only the responses' scores are reordered.
        to_prompt = self._by_prompt(q) @ prompts.keys
        to_prompt += prompts.beyond
        to_response = self._by_prompt(q @ key.transpose(2, 3))
        if self.beyond is not None:
            to_response += self.beyond
        weights = torch.cat([to_prompt, to_response], -1).softmax(-1)
        of_prompt = weights[..., :n_prompt] @ prompts.values
        of_response = self._by_row(weights[..., n_prompt:], q.shape[2]) @ value
        return (self._by_row(of_prompt, q.shape[2]) + of_response).reshape(n_rows, 1, heads, -1)

    def _by_prompt(self, by_row: Tensor) -> Tensor:
        """Reorder [B, key heads, repeats, X] to [U, key heads, g * repeats, X]."""
        _, key_heads, repeats, last = by_row.shape
        by_place = by_row if self.place is None else by_row[self.rows.flatten()]
        n_prompts, shared = self.rows.shape
        grouped = by_place.reshape(n_prompts, shared, key_heads, repeats, last).transpose(1, 2)
        return grouped.reshape(n_prompts, key_heads, shared * repeats, last)

    def _by_row(self, by_prompt: Tensor, repeats: int) -> Tensor:
        """Reorder [U, key heads, g * repeats, X] to [B, key heads, repeats, X]."""
        n_prompts, key_heads, _, last = by_prompt.shape
        by_place = by_prompt.reshape(n_prompts, key_heads, -1, repeats, last).transpose(1, 2).flatten(0, 1)
        return by_place if self.place is None else by_place[self.place]


_WINDOW_OF = {
    "full_attention": (),
    "attention": (),
    "sliding_attention": ("sliding_window",),
    "chunked_attention": ("attention_chunk_size", "sliding_window"),
}
"""Configuration options with the window of each layer kind; empty for attention over the whole row."""
_BY_TRYING = frozenset({"linear_attention"})
"""Kinds with a state instead of keys and values, which need a trial: MiniMax can decode rows, Qwen3-Next cannot."""


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer, named as in transformers' `layer_types`."""
    text = config.get_text_config(decoder=True)
    if (kinds := getattr(text, "layer_types", None)) is not None:
        return list(kinds)
    windowed = next((kind for kind, options in _WINDOW_OF.items() if options and getattr(text, options[0], None)), None)
    return [windowed or "full_attention"] * int(getattr(text, "num_hidden_layers", 1))


def unknown_kinds(config: Any) -> list[str]:
    """The model's layer kinds that this engine cannot run: neither attention nor linear attention."""
    return sorted({*layer_kinds(config)} - {*_WINDOW_OF} - _BY_TRYING)


def sees(model: Any) -> float:
    """The shortest attention window of `model`'s layers, in tokens; inf without windows, 0 if rows cannot be packed.

    Windows are read from the configuration. Caches do not list all of them (layers that share keys and values have no
    cache), and some windows exist only in masks, which packed rows do not have.
    """
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "attn_temperature_tuning", False):
        return 0  # Llama 4 scales by a token's position in the forward pass, not in its row
    shortest = math.inf
    for kind in {*layer_kinds(model.config)}:
        if kind not in _WINDOW_OF:
            return 0
        if options := _WINDOW_OF[kind]:
            window = next((size for option in options if (size := getattr(text, option, None))), None)
            shortest = min(shortest, 0 if window is None else int(window))
    return shortest


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """Switch `model` to `packed_attention`, which needs the argument `packed_layout`, for one thread at a time."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    with _in_use.setdefault(model, threading.RLock()):
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


_in_use: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
"""One lock per model, because the attention function is a setting of the whole model."""
