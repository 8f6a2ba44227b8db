"""Batched sampling from a causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditflow.engines.local.decoding import rows_of
from creditflow.rollout.client import Generation, GenerationRequest

_COMPACT_AT = 0.75
"""Finished rows leave the batch once less than this share is unfinished, because compaction copies the cache."""


@torch.inference_mode()
def generate(
    model: Any, requests: Sequence[GenerationRequest], eos_ids: frozenset[int], pad_id: int, *, shared: bool = False
) -> list[Generation]:
    """Sample one response per request, in one batch with separate random numbers per row.

    A row's tokens depend only on its seed and prompt, up to rounding in the model (the batch shape may change the last
    bits of its logits). `shared`: see `rows_of`.
    """
    device = next(model.parameters()).device
    budget = max(request.max_tokens for request in requests)
    uniforms = np.zeros((len(requests), budget), dtype=np.float32)
    for row, request in enumerate(requests):
        if request.temperature > 0:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(request.seed)))
            uniforms[row, : request.max_tokens] = rng.random(request.max_tokens, dtype=np.float32)
    temperature = torch.tensor([request.temperature for request in requests], dtype=torch.float32, device=device)
    uniform = torch.from_numpy(uniforms).to(device)
    limit = torch.tensor([request.max_tokens for request in requests], device=device)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)

    alive = torch.arange(len(requests), device=device)  # indices of the requests that are still in the batch
    tokens = torch.zeros((len(requests), budget), dtype=torch.long, device=device)
    logprobs = torch.zeros((len(requests), budget), dtype=torch.float32, device=device)
    n_tokens = torch.zeros(len(requests), dtype=torch.long, device=device)
    done = torch.zeros(len(requests), dtype=torch.bool, device=device)
    with rows_of(model, [request.prompt_ids for request in requests], pad_id, shared=shared) as live:
        logits = live.logits
        for t in range(budget):
            token, logprob = _sample(logits.float(), temperature, uniform[:, t])
            tokens[alive, t], logprobs[alive, t] = token, logprob
            n_tokens[alive] += ~done[alive]  # tokens of finished rows do not count
            done[alive] |= torch.isin(token, eos) | (limit <= t + 1)

            left = ~done[alive]
            n_left = int(left.sum())
            if n_left == 0:
                break
            if n_left < _COMPACT_AT * len(alive):
                live.keep(left.nonzero().squeeze(1))
                alive, token = alive[left], token[left]
                temperature, uniform, limit = temperature[left], uniform[left], limit[left]
            logits = live.feed(token)

    last = tokens[torch.arange(len(requests), device=device), n_tokens - 1]
    stopped = torch.isin(last, eos).tolist()
    lengths_out, token_rows, logprob_rows = n_tokens.tolist(), tokens.tolist(), logprobs.tolist()
    return [
        Generation(
            response_ids=tuple(token_rows[row][:n]),
            logprobs=tuple(logprob_rows[row][:n]),
            finish_reason="stop" if stopped[row] else "length",
        )
        for row, n in enumerate(lengths_out)
    ]


def _sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inverse CDF: logits [B, V], temperature [B], uniform [B] in [0, 1) to token [B], log-prob [B]."""
    greedy = temperature == 0
    scaled = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature).unsqueeze(1), dim=-1)
    cumulative = scaled.exp().cumsum(-1)
    # Scaled by the total, so that rounding in the sum cannot select a token beyond the last.
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    sampled = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    token = torch.where(greedy, logits.argmax(-1), sampled)
    return token, scaled.gather(1, token.unsqueeze(1)).squeeze(1)
