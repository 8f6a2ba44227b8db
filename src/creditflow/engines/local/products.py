"""Matrix products of linear layers, by the fastest library for the processor. Independent of models.

torch computes float32 products with MKL, which uses only AVX2 on AMD processors. oneDNN is part of torch too and uses
AVX-512, which halves the time. In bf16 autocast without gradients, torch casts each weight again for every token; the
layers here keep the cast weight until it changes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SMALLEST = 1 << 21
"""Multiplications of the smallest product for oneDNN; below it, MKL's lower cost per call wins."""


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN computes float32 products faster than MKL: with AVX-512 on a processor that is not Intel's."""
    built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return built and torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() not in ("GenuineIntel", "")


def _vendor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` in float32 or wider: x [..., I], weight [O, I], bias [O] to [..., O].

    Chosen by the processor, the shape and the dtype only, so that a repeated run computes the same bits.
    """
    if not _suits(x, weight):
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        product: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own signature
        return product if bias is None else product + bias
    return _onednn(x, weight, bias)


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.shape[0] >= _SMALLEST
        and prefers_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


class _Product(torch.autograd.Function):
    """x [..., I] and weight [O, I] to [..., O], with both gradients by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_x = _onednn(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = _onednn(gradient.flatten(0, -2).t(), x.flatten(0, -2).t())
        return of_x, of_weight


class Linear(torch.nn.Linear):
    """A linear layer that computes with `linear`, and casts its weight once for inference in autocast."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Compute x [..., I] to [..., O]."""
        kind = input.device.type
        if torch.is_grad_enabled() or not torch.is_autocast_enabled(kind):
            return linear(input, self.weight, self.bias)
        dtype = torch.get_autocast_dtype(kind)
        weight, bias = self._cast(dtype)
        with torch.autocast(kind, enabled=False):
            return functional.linear(input.to(dtype), weight, bias)

    def _cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The weight and bias as `dtype`, cast again only after a change."""
        # In-place changes under autograd count up a tensor's version. `forget_casts` covers changes of `.data`.
        state = dtype, *((part.data_ptr(), part._version) for part in (self.weight, self.bias) if part is not None)
        cast = self.__dict__.get("_known")
        if cast is None or cast[0] != state:
            with torch.no_grad():
                bias = None if self.bias is None else self.bias.to(dtype)
                cast = state, self.weight.to(dtype), bias
            self.__dict__["_known"] = cast
        return cast[1], cast[2]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_known"}  # a copy casts again


def use_fast_products(model: Any) -> None:
    """Turn the linear layers of `model` into `Linear`. Names, weights and subclasses of torch's layer do not change.

    Switches off a check of transformers, which looks for padding and reads a number back from the device in every call.
    """
    for part in model.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = Linear
        if hasattr(part, _PADDING_CHECK):
            setattr(part, _PADDING_CHECK, _skip)


_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


def _skip(*_: object) -> None:
    """Do nothing: rows without a mask have no padding."""


def forget_casts(model: Any) -> None:
    """Discard all cast weights of `model`: after a change that torch does not count, or to free their memory."""
    for part in model.modules():
        part.__dict__.pop("_known", None)


def cast_bytes(model: Any) -> int:
    """The memory of the bf16 weights that sampling in autocast keeps."""
    return sum(2 * part.weight.numel() for part in model.modules() if isinstance(part, Linear))
