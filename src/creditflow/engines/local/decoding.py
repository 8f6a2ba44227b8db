"""Batched decoding: prefill the prompts once, then feed each row one token at a time. Independent of sampling.

`SharedRows` is for models that run with `packed_attention` (see `attention.py`): it computes and stores a prompt's keys
and values once for all rows with that prompt. `PaddedRows` is for all other models.

On CUDA, `SharedRows` captures the step of a token in a CUDA graph and replays it, because launching a kernel takes
longer than running it. All tensors of such a step have a fixed shape and address, and it must not wait for the device.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from creditflow._utils.huggingface import position_limit
from creditflow.engines.local.attention import Decoding, Layout, Prompts, attending, full
from creditflow.engines.local.packing import pack_prompts
from creditflow.engines.local.waits import Waits
from creditflow.errors import first_line

Prompt = tuple[int, ...]

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The cache's name among the arguments and outputs of models, which depends on the version of transformers."""
_ROOM = {"cpu": 32, "cuda": 256}
"""The first capacity of a cache, in tokens, by device; it doubles when it is full, up to the tokens that may be fed."""
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


Step = Callable[[], Tensor]
"""A decoding step of tensors with fixed shapes and addresses: it updates some of them and returns the next logits."""


def _cuda_graph(step: Step) -> Step:
    """Capture the kernels of `step` without running them; returns a step that launches all of them at once."""
    graph = torch.cuda.CUDAGraph()
    # The outer context restores the stream after a failed capture.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits.clone()  # the next replay overwrites them

    return replay


_CAPTURE: dict[str, Callable[[Step], Step]] = {"cuda": _cuda_graph}
"""How a step is captured, by device. On a processor, launches cost less than attention to spare capacity."""
_LEAST_REPLAYS = 16
"""The fewest replays that are worth a capture, which runs the step's Python, waits for the device and returns unused
memory to it. An estimate; not measured."""
_capturable: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Whether the steps of a model can be captured, once tried: they do not wait for the device, and no capture failed."""


@contextmanager
def rows_of(model: Any, prompts: Sequence[Prompt], pad_id: int, most: int, *, shared: bool) -> Iterator[DecodingRows]:
    """Prefill `prompts`, one row each, to which at most `most` tokens will be fed.

    `shared`: whether rows may share equal prompts (`Forward.shares`).
    """
    if shared:
        with attending(model):
            yield SharedRows(model, prompts, most)
    else:
        yield PaddedRows(model, prompts, pad_id)


@torch.no_grad()
def decoding_error(model: Any, pad_id: int, *, shared: bool) -> float:
    """The largest difference between the logits of `rows_of` and those of single rows without a cache.

    Measured on two rows, one of which is dropped, in standard deviations of the logits: about 1e-6 is rounding, 1 is
    nonsense. Exceptions of the model propagate. Three tokens are fed, so that a captured step is replayed.
    """
    device = next(model.parameters()).device
    n_tokens = model.get_input_embeddings().num_embeddings
    rows = [[k % n_tokens for k in range(begin, begin + length)] for begin, length in ((3, 3), (7, 5))]
    fed = [k % n_tokens for k in (11, 12, 13)]

    def alone(row: int) -> Tensor:
        logits: Tensor = model(input_ids=torch.tensor([rows[row]], device=device), use_cache=False).logits
        return logits[0, -1]

    with rows_of(model, [tuple(row) for row in rows], pad_id, 1 + _LEAST_REPLAYS, shared=shared) as live:
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

    def __init__(self, model: Any, prompts: Sequence[Prompt], most: int) -> None:
        self._model, self._last = model, _last_position(model)
        device = next(model.parameters()).device
        self._most, self._n_fed, self._n_steps = max(1, most), 0, 0
        self._replay: Step | None = None
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
        # The index of the newest token in the cache, if shapes are fixed.
        self._place = torch.full((1,), -1, device=device) if self._captures() else None
        self._cache, self._room = DynamicCache(), min(_ROOM[device.type], self._most)
        self._cache.layers = [GrowingLayer(self._room, self._place) for _ in read]
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
        if self._place is not None:
            self._decoding.beyond = torch.full((self._room,), -torch.inf, device=device)
            self._decoding.beyond[: self._n_fed] = 0
        self._token = torch.empty_like(self._length)
        self._replay, self._n_steps, self._waits = None, 0, Waits()

    def _captures(self) -> bool:
        """Whether to capture the second step of the current rows."""
        pays = self._most - (self._n_fed - self._n_steps) > _LEAST_REPLAYS
        return pays and self._length.device.type in _CAPTURE and _capturable.get(self._model, True)

    def feed(self, token: Tensor) -> Tensor:
        if self._n_fed == self._room:
            self._room = min(2 * self._room, max(self._most, self._n_fed + 1))
            for layer in self._cache.layers:
                layer.grow(self._room)
            self._arrange()
        self._token.copy_(token)
        self._n_fed += 1
        self._n_steps += 1
        if self._n_steps == 1 and self._captures():  # this step also loads kernels, which a capture cannot do
            with nullcontext() if self._model in _capturable else self._waits:
                return self._step()
        if self._n_steps == 2 and self._captures():
            try:
                # After a failed capture, torch cannot return memory to the device, so certain failures are not tried.
                if self._waits.names:
                    raise RuntimeError(f"a step waits for the device ({self._waits.names[0]})")
                # The graph reads autocast's copies of weights. They exist since the first step, and last as long as the
                # outermost autocast context, which encloses the whole generation.
                self._replay = _CAPTURE[token.device.type](self._step)
                _capturable[self._model] = True
            except RuntimeError as error:
                _capturable[self._model] = False
                warnings.warn(f"decoding without a CUDA graph, which is slow: {first_line(error)}", stacklevel=2)
        return self._step() if self._replay is None else self._replay()

    def _step(self) -> Tensor:
        """Run the model on `self._token`. If steps are captured, all tensors have a fixed shape and address."""
        if self._place is not None and (beyond := self._decoding.beyond) is not None:
            self._place += 1
            beyond.index_fill_(0, self._place, 0)
        out = self._model(
            input_ids=self._token.unsqueeze(1),
            position_ids=self._length.clamp(max=self._last).unsqueeze(1),
            use_cache=True,
            packed_layout=self._decoding,
            logits_to_keep=1,
            **{_CACHE: self._cache},
        )
        self._length += 1
        last: Tensor = out.logits[:, -1]
        return last

    def keep(self, rows: Tensor) -> None:
        for layer in self._cache.layers:
            layer.keep(rows)
        self._length = self._length[rows]
        self._part_of_row = self._part_of_row[rows.cpu().numpy()]
        self._arrange()


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A cache layer with spare capacity. transformers' layer copies itself for every token."""

    def __init__(self, room: int, place: Tensor | None = None) -> None:
        """`room`: the first capacity, in tokens.

        `place` [1]: where the next token is written, if shapes are fixed; `update` then returns the whole room.
        """
        super().__init__()
        self._room, self._place, self._length = room, place, 0
        self._rooms: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the key and value states of one token; returns all keys and values, in float32 or wider."""
        new = full(key_states), full(value_states)
        if not self._rooms:
            self.lazy_initialization(*new)
            # Zeros matter: a weight of 0 times NaN is NaN.
            self._rooms = tuple(part.new_zeros(*part.shape[:2], self._room, part.shape[3]) for part in new)
        begin, self._length = self._length, self._length + 1
        for room, states in zip(self._rooms, new, strict=True):
            if self._place is None:
                room[:, :, begin : self._length] = states
            else:
                room.index_copy_(2, self._place, states)
        self._take(self._rooms)
        return self.keys, self.values

    def _take(self, rooms: tuple[Tensor, ...]) -> None:
        self._rooms = rooms
        if rooms:  # a layer may use another one's keys and values
            filled = rooms if self._place is not None else (room[:, :, : self._length] for room in rooms)
            self.keys, self.values = filled

    def grow(self, room: int) -> None:
        """Increase the capacity to `room` tokens."""
        self._take(tuple(torch.nn.functional.pad(old, (0, 0, 0, room - old.shape[2])) for old in self._rooms))

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`."""
        self._take(tuple(room[rows] for room in self._rooms))
