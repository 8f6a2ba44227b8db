"""Attention over packed tokens, as an attention function of transformers; knows `Packed` and no model.

Queries, keys and values of T tokens are gathered into rows, which need no mask: they are padded on the right, and no
token of a row sees what comes after it. What the rows' prompts share is gathered from one and the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditflow.engines.local.packing import Packed

NAME = "creditflow_packed"
"""The name under which transformers knows the function. It has no mask of its own, and so none is made."""


@dataclass(slots=True)
class Layout:
    """Where attention finds its rows among T tokens; tensors of `Packed`."""

    rows: tuple[Tensor, ...]
    """Of each group, [b, L]."""
    source: Tensor
    """[T]"""
    asked: int = 0
    """How many layers have looked here."""

    @classmethod
    def of(cls, packed: Packed, device: torch.device) -> Layout:
        """On `device`."""
        rows = tuple(torch.from_numpy(group.at).to(device) for group in packed.groups)
        return cls(rows, torch.from_numpy(packed.source).to(device))


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: Layout | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`query` [1, heads, T, D], `key` and `value` [1, key heads, T, D] to [1, T, heads, D].

    Raises NotImplementedError for what rows do not have: a soft cap, a window shorter than a row.
    """
    if packed_layout is None or others.get("softcap") or others.get("s_aux") is not None or dropout:
        raise NotImplementedError("this model's attention cannot be packed")
    longest = max(rows.shape[1] for rows in packed_layout.rows)
    if sliding_window is not None and sliding_window < longest:
        raise NotImplementedError("this model's attention sees a window only")
    packed_layout.asked += 1
    q_TH, k_TH, v_TH = (states[0].transpose(0, 1) for states in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    out = []
    for rows in packed_layout.rows:
        q, k, v = (states[rows].transpose(1, 2) for states in (q_TH, k_TH, v_TH))  # [b, heads, L, D]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True)
        out.append(seen.transpose(1, 2).flatten(0, 1))  # [b * L, heads, D]
    return torch.cat(out)[packed_layout.source].unsqueeze(0), None


@contextmanager
def packing(model: Any) -> Iterator[None]:
    """Inside, `model` attends by `packed_attention`, and is called with `packed_layout`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
