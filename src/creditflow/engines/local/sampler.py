"""Many prompts to many responses with one KV cache; knows a causal language model and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from creditflow.engines.local import kv_cache
from creditflow.engines.local.packing import cuts
from creditflow.rollout.client import Generation, GenerationRequest

_COMPACT_AT = 0.75
"""Finished rows leave the batch when fewer than this share of its rows are still alive: compacting copies the cache."""


@torch.inference_mode()
def generate(
    model: Any, requests: Sequence[GenerationRequest], eos_ids: frozenset[int], pad_id: int
) -> list[Generation]:
    """Sample a response to each request; B rows decode together, each with its own random numbers.

    Prompts are padded on the left, so that all rows append at the same position; one that several requests share is
    computed once. A row's tokens depend on its own seed and prompt alone, up to rounding in the model (the shape of a
    batch may change the last bits of its logits).
    """
    device = next(model.parameters()).device
    lengths = [len(request.prompt_ids) for request in requests]
    width, budget = max(lengths), max(request.max_tokens for request in requests)
    uniforms = np.zeros((len(requests), budget), dtype=np.float32)
    for row, request in enumerate(requests):
        if request.temperature > 0:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(request.seed)))
            uniforms[row, : request.max_tokens] = rng.random(request.max_tokens, dtype=np.float32)
    length = torch.tensor(lengths, device=device)
    mask = (torch.arange(width + budget, device=device) >= width - length.unsqueeze(1)).long()
    temperature = torch.tensor([request.temperature for request in requests], dtype=torch.float32, device=device)
    uniform = torch.from_numpy(uniforms).to(device)
    limit = torch.tensor([request.max_tokens for request in requests], device=device)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)

    alive = torch.arange(len(requests), device=device)  # rows of `requests` that are still in the batch
    tokens = torch.full((len(requests), budget), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros((len(requests), budget), dtype=torch.float32, device=device)
    n_tokens = torch.zeros(len(requests), dtype=torch.long, device=device)
    done = torch.zeros(len(requests), dtype=torch.bool, device=device)
    logits, cache = _read(model, [request.prompt_ids for request in requests], pad_id, device)
    for t in range(budget):
        token, logprob = _sample(logits.float(), temperature, uniform[:, t])

        writing = ~done[alive]
        rows = alive[writing]
        tokens[rows, t] = token[writing]
        logprobs[rows, t] = logprob[writing]
        n_tokens[rows] = t + 1
        done[rows] = torch.isin(token[writing], eos) | (limit[writing] <= t + 1)

        left = ~done[alive]
        n_left = int(left.sum())
        if n_left == 0:
            break
        if n_left < _COMPACT_AT * len(alive):
            alive, token, mask, length = alive[left], token[left], mask[left], length[left]
            temperature, uniform, limit = temperature[left], uniform[left], limit[left]
            gone = kv_cache.keep(cache, left.nonzero().squeeze(1), width - int(length.max()))
            mask, width = mask[:, gone:], width - gone
        out = model(
            input_ids=token.unsqueeze(1),
            attention_mask=mask[:, : width + t + 1],
            position_ids=(length + t).unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits, cache = out.logits[:, -1], out.past_key_values

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


def _read(model: Any, prompts: Sequence[tuple[int, ...]], pad_id: int, device: torch.device) -> tuple[Tensor, Any]:
    """[B, V] the logits after each prompt, and the rows' cache, padded on the left.

    Each distinct prompt is read once, among others of about its length.
    """
    number: dict[tuple[int, ...], int] = {}
    number_of_row = np.array([number.setdefault(prompt, len(number)) for prompt in prompts])
    distinct = sorted(number, key=len)
    place = np.empty(len(distinct), dtype=np.int64)  # of each distinct prompt, by its number, among those sorted
    place[[number[prompt] for prompt in distinct]] = np.arange(len(distinct))
    place_of_row = place[number_of_row]
    ends = [*cuts(np.array([len(prompt) for prompt in distinct])), len(distinct)]
    if not kv_cache.is_plain(DynamicCache(config=model.config)):  # rows of unequal width cannot be merged
        ends = ends[-1:]
    outs, rows, begin = [], [], 0
    for end in ends:
        outs.append(_read_together(model, distinct[begin:end], pad_id, device))
        there = np.flatnonzero((place_of_row >= begin) & (place_of_row < end))
        rows.append(torch.from_numpy(np.stack([there, place_of_row[there] - begin])).to(device))
        begin = end
    if not all(kv_cache.is_plain(out.past_key_values) for out in outs):
        (out,) = outs if len(outs) == 1 else [_read_together(model, distinct, pad_id, device)]
        cache = out.past_key_values
        here = torch.from_numpy(place_of_row).to(device)
        if len(distinct) < len(prompts) or (place_of_row != np.arange(len(prompts))).any():
            cache.batch_select_indices(here)
        return out.logits[here, -1], cache
    logits = outs[0].logits.new_empty(len(prompts), outs[0].logits.shape[-1])
    for out, (there, here) in zip(outs, rows, strict=True):
        logits[there] = out.logits[here, -1]
    return logits, kv_cache.merge([out.past_key_values for out in outs], rows, len(prompts))


def _read_together(model: Any, prompts: Sequence[tuple[int, ...]], pad_id: int, device: torch.device) -> Any:
    width = max(map(len, prompts))
    ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
    inside = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        inside[row, width - len(prompt) :] = 1
    mask = torch.from_numpy(inside).to(device)
    return model(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=mask,
        position_ids=mask.cumsum(1).sub(1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )


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
