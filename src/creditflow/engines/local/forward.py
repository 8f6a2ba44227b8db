"""Forward pass of a Hugging Face model over packed steps: its output at every response token.

Steps are packed if the model's attention allows it, which a trial pass decides. Otherwise they are rows padded on the
right, group by group. Both give the same numbers up to rounding. Independent of losses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditflow._utils.huggingface import position_limit
from creditflow.config.sections import Precision
from creditflow.data import Ints
from creditflow.engines.local import memory
from creditflow.engines.local.attention import AGREE, Layout, attending, sees
from creditflow.engines.local.packing import PackedSteps, Sequences, micro_batches, micro_batches_by_prefix, pack_pairs
from creditflow.engines.local.products import Linear, use_fast_products
from creditflow.engines.local.recomputing import expect_recomputable, recomputing
from creditflow.errors import ModelError


class Forward:
    """The forward pass of one model over packed steps.

    `packs`: whether to pack; None: pack if a trial pass gives the same numbers. `in_force`: a context entered around
    every pass; see `lora.Adapter`. `recomputes`: whether passes with a gradient use gradient checkpointing.
    `half`: whether to compute in bf16 autocast; None: on CUDA only.
    """

    def __init__(
        self,
        model: Any,
        packs: bool | None = None,
        in_force: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        recomputes: bool = False,
        half: bool | None = None,
    ) -> None:
        use_fast_products(model)
        self.model = model
        self.recomputes = recomputes
        self.in_force = in_force
        self.device = next(model.parameters()).device
        self.half = self.device.type == "cuda" if half is None else half
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._sees = sees(model)
        self.limit = position_limit(model.config)
        self.packs = self._agrees() if packs is None else packs
        self._ends_with_head: bool | None = None

    def recompute(self) -> None:
        """Use gradient checkpointing from now on. Raises ConfigError if the model does not support it."""
        expect_recomputable(self.model)
        self.recomputes = True

    def set_precision(self, name: Precision) -> None:
        """Compute in float32 or in bf16 autocast from now on; `auto`: in bf16 on CUDA only."""
        self.half = self.device.type == "cuda" if name == "auto" else name == "bfloat16"

    @property
    def shares(self) -> bool:
        """Whether decoding rows can share equal prompts (`decoding.SharedRows`)."""
        return self.packs and self._sees == math.inf

    def __call__(self, packed: PackedSteps) -> Tensor:
        """The logits [R, V] (of a value model: values [R, 1]) at the token before each response token.

        Computed in bf16 autocast if `half`, and returned in float32 or wider.
        """
        with self.running():
            logits = self._at(self.model, packed)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def hidden(self, packed: PackedSteps) -> Tensor:
        """The hidden states [R, D] before the output layer, at the token before each response token.

        Computed as in `__call__`, in the model's dtype. Call it within `running`.
        """
        return self._at(self.model.base_model, packed)

    @property
    def head(self) -> torch.nn.Linear | None:
        """The output layer, if the logits are its output for `hidden`; None for models with more after it.

        Such models scale or cap the logits (Gemma, Cohere), or have an adapter in the output layer.
        """
        head = self.model.get_output_embeddings()
        if type(head) not in (torch.nn.Linear, Linear):
            return None
        if self._ends_with_head is None:
            self._ends_with_head = self._ends_with(head)
        return head if self._ends_with_head else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context of every pass: the adapter in force, and bf16 autocast if `half`."""
        half = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.half)
        with self.in_force(), half:
            yield

    def micro_batches(self, batch: Sequences, steps: Ints, max_tokens: int) -> Iterator[PackedSteps]:
        """Pack `steps` into micro-batches with about the memory of `max_tokens` tokens.

        Raises ModelError for a step longer than the model's limit.
        """
        lengths = np.diff(batch.prompt_offsets)[steps] + np.diff(batch.token_offsets)[steps]
        if (longest := int(lengths.max(initial=0))) > self.limit.tokens:
            raise ModelError(f"a step: expected at most {self.limit.tokens} tokens, got {longest}: {self.limit.reason}")
        if self.packs and longest <= self._sees:
            return _with_released_memory(micro_batches_by_prefix(batch, steps, max_tokens))
        return _with_released_memory(micro_batches(batch, steps, max_tokens, max_tokens))

    def _at(self, net: Any, packed: PackedSteps) -> Tensor:
        """The output of `net`, the model or its backbone, at the token before each response token."""
        predicting = self._tensor(packed.predicting)
        layout = Layout.from_packed(packed, self.device) if self.packs else None
        with self._saving(packed=layout is not None and layout.longest <= self._sees):
            if layout is None or layout.longest > self._sees:
                return self._by_row(net, packed)[predicting]
            if self._keeps and net is self.model:
                return self._in_one(net, packed, layout, logits_to_keep=predicting)
            return self._in_one(net, packed, layout)[predicting]

    def _saving(self, *, packed: bool) -> AbstractContextManager[None]:
        """Gradient checkpointing if it is wanted, with the contexts that a layer needs in the backward pass."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return nullcontext()

        @contextmanager
        def again() -> Iterator[None]:
            with self.in_force(), attending(self.model) if packed else nullcontext():
                yield

        return recomputing(self.model, again)

    def _in_one(self, net: Any, packed: PackedSteps, layout: Layout, **keep: Tensor) -> Tensor:
        """The output [T, ...] of `net` for all tokens in one pass, or only for those in `logits_to_keep`."""
        with attending(self.model):
            out = net(
                input_ids=self._tensor(packed.input_ids)[None],
                position_ids=self._tensor(packed.position_ids)[None],
                use_cache=False,
                packed_layout=layout,
                **keep,
            )
        if not layout.calls:
            raise NotImplementedError("this model attends in a way of its own, or not at all")
        hidden: Tensor = out[0][0]
        return hidden

    def _by_row(self, net: Any, packed: PackedSteps) -> Tensor:
        """The output [T, ...] of `net` for all tokens, computed from padded rows."""
        ids, outs = self._tensor(packed.input_ids), []
        for group in packed.groups:
            out = net(
                input_ids=ids[self._tensor(group.at)],
                attention_mask=self._tensor(group.inside.astype(np.int64)),
                position_ids=torch.arange(group.at.shape[1], device=self.device)[None].expand(group.at.shape),
                use_cache=False,
            )
            outs.append(out[0].flatten(0, 1))
        return torch.cat(outs)[self._tensor(packed.source)]

    def _tensor(self, column: Any) -> Tensor:
        return torch.from_numpy(column).to(self.device)

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether packed and padded passes over short example rows agree within `AGREE`."""
        backbone = self.model.base_model  # a new head returns 0 for every token
        n_tokens = self.model.get_input_embeddings().num_embeddings
        tried = pack_pairs(_PAIRS, np.array([0, 0, 1]))
        tried = replace(tried, input_ids=tried.input_ids % n_tokens)
        layout = Layout.from_packed(tried, self.device)
        if layout.longest > self._sees:
            return False
        try:
            in_one, by_row = self._in_one(backbone, tried, layout), self._by_row(backbone, tried)
        except torch.OutOfMemoryError:
            raise
        except _CANNOT:
            return False
        return bool((in_one - by_row).abs().max() <= AGREE * by_row.std())

    @torch.no_grad()
    def _ends_with(self, head: torch.nn.Linear) -> bool:
        """Whether the model returns the output of `head` for the backbone's output unchanged, which a trial decides.

        In the trial, large numbers take the place of the output, because a soft cap hardly changes small ones.
        """
        read: list[Tensor] = []

        def replaced(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            read.append(inputs[0])
            return torch.linspace(-100, 100, output.numel(), device=output.device).view_as(output)

        ids = torch.tensor([_PAIRS[0][0]], device=self.device)
        tried = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        handle = head.register_forward_hook(replaced)
        try:
            with self.running():
                logits, hidden = self.model(**tried)[0], self.model.base_model(**tried)[0]
        except torch.OutOfMemoryError:
            raise
        except _CANNOT:
            return False
        finally:
            handle.remove()
        expected = torch.linspace(-100, 100, logits.numel(), device=logits.device).view_as(logits)
        return len(read) == 1 and torch.equal(read[0], hidden) and torch.equal(logits.float(), expected)


def _with_released_memory(parts: Iterator[PackedSteps]) -> Iterator[PackedSteps]:
    """The micro-batches; before each one, memory that was freed since the last release returns to the system."""
    for packed in parts:
        memory.release(memory.SPARE)
        yield packed


_CANNOT = (NotImplementedError, TypeError, ValueError, RuntimeError, IndexError)
"""Exceptions of models that do not support a trial."""
_PAIRS = [((0, 1, 2), (1, 2, 3, 4)), ((0, 1, 2), (4, 5, 6)), ((3, 4, 5, 6, 0), (6, 0))]
"""The trial input: two prompts and the responses to them, of which two have the same prompt."""
