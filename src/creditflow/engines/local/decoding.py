"""Batched decoding: prefill the prompts once, then feed each row one token at a time. Independent of sampling.

`SharedRows` is for models that run with `packed_attention` (see `attention.py`): it computes and stores a prompt's keys
and values once for all rows with that prompt. `PaddedRows` is for all other models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from creditflow._utils.huggingface import position_limit
from creditflow.engines.local.attention import Decoding, Layout, Prompts, attending, full
from creditflow.engines.local.packing import pack_prompts

Prompt = tuple[int, ...]

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The cache's name among the arguments and outputs of models, which depends on the version of transformers."""
_ROOM = 32
"""The smallest spare capacity, in tokens, when keys and values are copied."""
_AT_ONCE = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens per prefill pass, by device; on a processor, about as many as its cache holds."""


class DecodingRows(Protocol):
    """B rows that decode together; finished rows can be dropped."""

    logits: Tensor
    """[B, V] logits after the prompts."""

    def feed(self, token: Tensor) -> Tensor:
        """Append `token` [B]; returns the next logits [B, V]."""

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`, given as indices into the current rows."""


@contextmanager
def rows_of(model: Any, prompts: Sequence[Prompt], pad_id: int, *, shared: bool) -> Iterator[DecodingRows]:
    """Prefill `prompts`, one row each.

    `shared`: whether rows may share equal prompts (`Forward.shares`).
    """
    if shared:
        with attending(model):
            yield SharedRows(model, prompts)
    else:
        yield PaddedRows(model, prompts, pad_id)


@torch.no_grad()
def decoding_error(model: Any, pad_id: int, *, shared: bool) -> float:
    """The largest difference between the logits of `rows_of` and those of single rows without a cache.

    Measured on two rows, one of which is dropped, in standard deviations of the logits: about 1e-6 is rounding, 1 is
    nonsense. Exceptions of the model propagate.
    """
    device = next(model.parameters()).device
    n_tokens = model.get_input_embeddings().num_embeddings
    rows = [[k % n_tokens for k in range(begin, begin + length)] for begin, length in ((3, 3), (7, 5))]
    fed = [k % n_tokens for k in (11, 12)]

    def alone(row: int) -> Tensor:
        logits: Tensor = model(input_ids=torch.tensor([rows[row]], device=device), use_cache=False).logits
        return logits[0, -1]

    with rows_of(model, [tuple(row) for row in rows], pad_id, shared=shared) as live:
        batched = [*live.logits]
        live.keep(torch.tensor([0], device=device))
        for token in fed:
            batched += [*live.feed(torch.tensor([token], device=device))]
    single = [alone(0), alone(1)]
    for token in fed:
        rows[0].append(token)
        single.append(alone(0))
    difference, spread = torch.stack(batched) - torch.stack(single), torch.stack(single).std()
    return float(difference.abs().max() / spread.clamp(min=1e-12))


def _last_position(model: Any) -> int:
    """The model's last position.

    Only finished rows that wait for compaction reach positions beyond it.
    """
    return position_limit(model.config).tokens - 1


class PaddedRows:
    """Rows with prompts padded on the left, so that all rows append at the same index."""

    def __init__(self, model: Any, prompts: Sequence[Prompt], pad_id: int) -> None:
        self._model = model
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
        inside = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            inside[row, width - len(prompt) :] = 1
        self._mask = torch.from_numpy(inside).to(device)
        self._length = self._mask.sum(1)
        self._last = _last_position(model)
        self._cache: Any = None
        self.logits = self._run(torch.from_numpy(ids).to(device), self._mask.cumsum(1).sub(1).clamp(min=0))

    def _run(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{_CACHE: self._cache},
        )
        self._cache = out[_CACHE]
        last: Tensor = out.logits[:, -1]
        return last

    def feed(self, token: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(token), 1)], 1)
        self._length = self._length + 1
        return self._run(token.unsqueeze(1), (self._length - 1).clamp(max=self._last).unsqueeze(1))

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask, self._length = self._mask[rows], self._length[rows]


class SharedRows:
    """Rows that share prompts: each distinct prompt is read once, without padding, and stored for all its rows.

    Use it inside `attending(model)`.
    """

    def __init__(self, model: Any, prompts: Sequence[Prompt]) -> None:
        self._model, self._last = model, _last_position(model)
        device = next(model.parameters()).device
        # Prompts with many rows are stored several times, so that each stored prompt has about equally many rows.
        at_once = max(1, round(len(prompts) / len(set(prompts))))
        number, part, count = dict[Prompt, int](), dict[tuple[int, int], int](), Counter[Prompt]()
        part_of_row = []
        for prompt in prompts:
            nth = number.setdefault(prompt, len(number)), count[prompt] // at_once
            part_of_row.append(part.setdefault(nth, len(part)))
            count[prompt] += 1
        self._part_of_row = np.array(part_of_row)
        prompt_of_part = torch.tensor([prompt for prompt, _ in part], device=device)
        prompt_of_row = prompt_of_part[torch.tensor(part_of_row, device=device)]
        logits, read, lengths = self._read(list(number), device)
        self.logits = logits[prompt_of_row]
        self._length = torch.tensor(lengths, device=device)[prompt_of_row]
        # Where each prompt is stored once, a copy would double the memory.
        self._prompts = read if len(part) == len(number) else [layer.select(prompt_of_part) for layer in read]
        self._cache = DynamicCache()
        self._cache.layers = [GrowingLayer() for _ in read]
        self._arrange()

    def _read(self, prompts: list[Prompt], device: torch.device) -> tuple[Tensor, list[Prompts], list[int]]:
        """Prefill distinct prompts; returns their next logits, each layer's padded keys and values, and their lengths.

        Keys and values are padded on the right.
        """
        lengths = [len(prompt) for prompt in prompts]
        width, outs, layers = max(lengths), [], list[list[Prompts]]()
        at_once = _AT_ONCE[device.type]
        begin = 0
        while begin < len(prompts):
            end, size = begin + 1, lengths[begin]
            while end < len(prompts) and size + lengths[end] <= at_once:
                size += lengths[end]
                end += 1
            packed, tokens_of = pack_prompts(prompts[begin:end])
            # The states that attention reads. Some models cache others, and compute these from them.
            states: list[tuple[Tensor, Tensor]] = []
            layout = replace(Layout.from_packed(packed, device), states=states)
            out = self._model(
                input_ids=torch.from_numpy(packed.input_ids).to(device)[None],
                position_ids=torch.from_numpy(packed.position_ids).to(device)[None],
                use_cache=False,
                packed_layout=layout,
                logits_to_keep=torch.from_numpy(packed.predicting).to(device),
            )
            outs.append(out.logits[0])
            layers.append([Prompts.from_tokens(keys, values, tokens_of, width) for keys, values in states])
            begin = end
        return torch.cat(outs), [Prompts.together(parts) for parts in zip(*layers, strict=True)], lengths

    def _arrange(self) -> None:
        """Rebuild `Decoding` for the current rows and drop unused prompts."""
        parts, part_of_row = np.unique(self._part_of_row, return_inverse=True)
        device = self._length.device
        if len(parts) < len(self._prompts[0].keys):
            left = torch.from_numpy(parts).to(device)
            self._prompts = [prompts.select(left) for prompts in self._prompts]
        self._part_of_row = part_of_row
        self._decoding = Decoding.from_prompts(part_of_row, self._prompts, device)

    def feed(self, token: Tensor) -> Tensor:
        out = self._model(
            input_ids=token.unsqueeze(1),
            position_ids=self._length.clamp(max=self._last).unsqueeze(1),
            use_cache=True,
            packed_layout=self._decoding,
            logits_to_keep=1,
            **{_CACHE: self._cache},
        )
        self._length = self._length + 1
        last: Tensor = out.logits[:, -1]
        return last

    def keep(self, rows: Tensor) -> None:
        for layer in self._cache.layers:
            layer.keep(rows)
        self._length = self._length[rows]
        self._part_of_row = self._part_of_row[rows.cpu().numpy()]
        self._arrange()


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A growing cache layer with spare capacity. transformers' layer copies itself for every token."""

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the key and value states of new tokens; returns all keys and values, in float32 or wider."""
        key_states, value_states = full(key_states), full(value_states)
        if self._room is None:
            self.lazy_initialization(key_states, value_states)
            self._take((_roomy(key_states), _roomy(value_states)), key_states.shape[-2])
            return self.keys, self.values
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        room = self._room
        if end > room[0].shape[-2]:
            room = _roomy(self.keys), _roomy(self.values)
        for whole, states in zip(room, (key_states, value_states), strict=True):
            whole[..., begin:end, :] = states
        self._take(room, end)
        return self.keys, self.values

    def _take(self, room: tuple[Tensor, Tensor], length: int) -> None:
        self._room = room
        self.keys, self.values = (states[..., :length, :] for states in room)

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`."""
        if self._room is not None:
            self._take((_roomy(self.keys[rows]), _roomy(self.values[rows])), self.keys.shape[-2])


def _roomy(states: Tensor) -> Tensor:
    """Copy states into a tensor with spare capacity: half their length, at least `_ROOM` tokens."""
    rows, heads, length, width = states.shape
    room = states.new_empty(rows, heads, length + max(_ROOM, length // 2), width)
    room[..., :length, :] = states
    return room
