"""Log-probs and entropies of tokens from hidden states and the output layer, without holding all logits.

The logits of a few rows are computed at a time, and again for the gradient, as Liger's fused linear cross entropy (Hsu
et al. 2024, arXiv 2410.10989) does on GPUs. Independent of models and losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from creditflow.engines.local.products import linear

WHOLE = 1 << 25
"""The largest number of logits of a micro-batch that are computed at once, without this module."""
CHUNK = 1 << 23
"""The largest number of logits computed at once: 32 MiB in float32, which suits the caches of processors."""
KEPT = 1 << 26
"""The largest number of probabilities that are kept for the gradient: 256 MiB in float32. Others are recomputed."""


def logprobs_from_hidden(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    temperature_R: Tensor | None,
    token_ids_R: Tensor,
    *,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob [R] of each token of `softmax((hidden @ weight + bias) / temperature)`, and the entropy [R].

    In float32 or wider; under autocast, the products are computed in its dtype. `temperature_R`: None for 1.
    `entropy_grad`: whether the entropy has a gradient, too.
    """
    kind = hidden_RD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    keeps = KEPT if torch.is_grad_enabled() else 0
    apply: Any = _FromHidden.apply
    logprobs, entropy = apply(hidden_RD, weight_VD, bias_V, temperature_R, token_ids_R, dtype, keeps)
    return logprobs, entropy if entropy_grad else entropy.detach()


class _FromHidden(torch.autograd.Function):
    """The computation and its gradient.

    With logits l = (h W' + b) / T, probabilities p and entropy H: dlogp_y/dl = onehot(y) - p, and dH/dl_j = -p_j (log
    p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        temperature_R: Tensor | None,
        token_ids_R: Tensor,
        dtype: torch.dtype,
        keeps: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        logprobs, entropy, log_sum = (hidden_RD.new_empty(len(hidden_RD), dtype=wide) for _ in range(3))
        kept: list[Tensor] = []
        with torch.autocast(hidden_RD.device.type, enabled=False):
            weight = weight_VD.to(dtype)
            bias = None if bias_V is None else bias_V.to(dtype)
            for rows in _chunks(len(hidden_RD), len(weight)):
                logits = _logits(hidden_RD[rows].to(dtype), weight, bias, _rows_of(temperature_R, rows))
                logits -= logits.amax(-1, keepdim=True)
                exponentials = logits.exp()
                total = exponentials.sum(-1)
                log_sum[rows] = total.log()
                logprobs[rows] = logits.gather(1, token_ids_R[rows, None]).squeeze(1) - log_sum[rows]
                entropy[rows] = log_sum[rows] - _dot(exponentials, logits) / total
                if exponentials.numel() <= keeps:
                    keeps -= exponentials.numel()
                    kept.append(exponentials.div_(total[:, None]))
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, temperature_R, token_ids_R, entropy)
        ctx.kept, ctx.dtype = kept, dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_VD, bias_V, temperature_R, token_ids_R, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight = weight_VD.to(ctx.dtype)
        bias = None if bias_V is None else bias_V.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden_RD) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V) if needs_bias else None
        for nth, rows in enumerate(_chunks(len(hidden_RD), len(weight))):
            hidden = hidden_RD[rows].to(ctx.dtype)
            if nth < len(ctx.kept):
                p, ctx.kept[nth] = ctx.kept[nth], None
            else:
                p = _logits(hidden, weight, bias, _rows_of(temperature_R, rows)).softmax(-1)
            of_logprob, of_entropy = (_rows_of(column, rows) for column in grads)
            warm = _rows_of(temperature_R, rows)
            grad = _grad_of_logits(p, token_ids_R[rows], of_logprob, of_entropy, entropy[rows, None], warm)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            narrow = grad.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = linear(narrow, weight.t()).to(hidden_RD.dtype)
            if grad_weight is None:
                continue
            if grad_weight.dtype == narrow.dtype:
                grad_weight.addmm_(narrow.T, hidden)  # in place, which is faster than a product of this size by oneDNN
            else:
                grad_weight += narrow.T @ hidden
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _grad_of_logits(
    p: Tensor,
    token_ids: Tensor,
    of_logprob: Tensor | None,
    of_entropy: Tensor | None,
    entropy: Tensor,
    temperature: Tensor | None,
) -> Tensor:
    """The gradient of the logits, computed in place of the probabilities `p` [r, V]; other columns are [r, 1]."""
    of_p = None if of_entropy is None else (torch.special.entr(p) - p * entropy) * of_entropy
    if of_logprob is None:
        p.zero_()
    else:
        of_logprob = of_logprob.to(p.dtype)
        p.mul_(-of_logprob).scatter_add_(1, token_ids[:, None], of_logprob)
    if of_p is not None:
        p += of_p
    return p if temperature is None else p.div_(temperature)


def _chunks(n_rows: int, n_tokens: int) -> Iterator[slice]:
    """Slices of at most `CHUNK` logits, and of at least one row."""
    n = max(1, CHUNK // n_tokens)
    return (slice(start, start + n) for start in range(0, n_rows, n))


def _rows_of(column: Tensor | None, rows: slice) -> Tensor | None:
    return None if column is None else column[rows, None]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None) -> Tensor:
    logits = linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature is None else logits.div_(temperature)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """The dot product of each row, without a copy."""
    return torch.bmm(first[:, None], second[:, :, None]).flatten()
