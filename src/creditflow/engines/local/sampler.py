"""Many prompts to many responses with one KV cache; knows a causal language model and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditflow.rollout.client import Generation, GenerationRequest

_COMPACT_AT = 0.75
"""Finished rows leave the batch when fewer than this share of its rows are still alive: compacting copies the cache."""


@torch.inference_mode()
def generate(
    model: Any, requests: Sequence[GenerationRequest], eos_ids: frozenset[int], pad_id: int
) -> list[Generation]:
    """Sample a response to each request; B rows decode together, each with its own random numbers.

    Prompts are padded on the left, so that all rows append at the same position. A row's tokens depend on its own seed
    and prompt alone, up to rounding in the model (the shape of a batch may change the last bits of its logits).
    """
    device = next(model.parameters()).device
    lengths = [len(request.prompt_ids) for request in requests]
    width, budget = max(lengths), max(request.max_tokens for request in requests)
    prompt_ids = np.full((len(requests), width), pad_id, dtype=np.int64)
    attention = np.zeros((len(requests), width + budget), dtype=np.int64)
    uniforms = np.zeros((len(requests), budget), dtype=np.float32)
    for row, request in enumerate(requests):
        prompt_ids[row, width - lengths[row] :] = request.prompt_ids
        attention[row, width - lengths[row] :] = 1
        if request.temperature > 0:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(request.seed)))
            uniforms[row, : request.max_tokens] = rng.random(request.max_tokens, dtype=np.float32)

    input_ids = torch.from_numpy(prompt_ids).to(device)
    mask = torch.from_numpy(attention).to(device)
    position = mask[:, :width].cumsum(1).sub(1).clamp(min=0)
    temperature = torch.tensor([request.temperature for request in requests], dtype=torch.float32, device=device)
    uniform = torch.from_numpy(uniforms).to(device)
    limit = torch.tensor([request.max_tokens for request in requests], device=device)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)

    alive = torch.arange(len(requests), device=device)  # rows of `requests` that are still in the batch
    tokens = torch.full((len(requests), budget), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros((len(requests), budget), dtype=torch.float32, device=device)
    n_tokens = torch.zeros(len(requests), dtype=torch.long, device=device)
    done = torch.zeros(len(requests), dtype=torch.bool, device=device)
    cache: Any = None
    for t in range(budget):
        out = model(
            input_ids=input_ids,
            attention_mask=mask[:, : width + t],
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        token, logprob = _sample(out.logits[:, -1].float(), temperature, uniform[:, t])

        writing = ~done[alive]
        rows = alive[writing]
        tokens[rows, t] = token[writing]
        logprobs[rows, t] = logprob[writing]
        n_tokens[rows] = t + 1
        done[rows] = torch.isin(token[writing], eos) | (limit[writing] <= t + 1)

        keep = ~done[alive]
        n_alive = int(keep.sum())
        if n_alive == 0:
            break
        if n_alive < _COMPACT_AT * len(alive):
            cache.batch_select_indices(keep.nonzero().squeeze(1))
            alive, token, mask, position = alive[keep], token[keep], mask[keep], position[keep]
            temperature, uniform, limit = temperature[keep], uniform[keep], limit[keep]
        input_ids = token.unsqueeze(1)
        position = position[:, -1:] + 1

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
    """Inverse-CDF sampling: logits [B, V], temperature [B], uniform [B] in [0, 1) to token [B] and log-prob [B]."""
    greedy = temperature == 0
    scaled = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature).unsqueeze(1), dim=-1)
    cumulative = scaled.exp().cumsum(-1)
    # Scaled by the total, so that rounding in the sum can never ask for a token beyond the last.
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    sampled = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    token = torch.where(greedy, logits.argmax(-1), sampled)
    return token, scaled.gather(1, token.unsqueeze(1)).squeeze(1)
