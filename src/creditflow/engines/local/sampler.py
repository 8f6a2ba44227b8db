"""Batched sampling from a causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditflow._utils.progress import spend
from creditflow.engines.local.decoding import rows_of
from creditflow.rollout.client import Generation, GenerationRequest

_COMPACT_AT = {"cpu": 0.75, "cuda": 0.25}
"""Finished rows leave the batch once less than this share is unfinished, by device. Compaction copies the cache; on an
accelerator the next step is also captured again, and a smaller batch is hardly faster."""
_CHECK_EVERY = {"cpu": 1, "cuda": 8}
"""Tokens between two counts of unfinished rows, by device. An accelerator must finish its work for each count."""
_BLOCK = 256
"""Tokens of the vocabulary whose probabilities are summed before one of them is selected."""
_IN_CACHE = 1 << 18
"""Logits that are sampled from together on a processor, so that they stay in its cache."""


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
    temperatures = Temperatures.from_list([request.temperature for request in requests], device)
    uniform = torch.from_numpy(uniforms).to(device)
    limit = torch.tensor([request.max_tokens for request in requests], device=device)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
    check_every, compact_at = _CHECK_EVERY[device.type], _COMPACT_AT[device.type]

    alive = torch.arange(len(requests), device=device)  # indices of the requests that are still in the batch
    tokens = torch.zeros((len(requests), budget), dtype=torch.long, device=device)
    logprobs = torch.zeros((len(requests), budget), dtype=torch.float32, device=device)
    n_tokens = torch.zeros(len(requests), dtype=torch.long, device=device)
    done = torch.zeros(len(requests), dtype=torch.bool, device=device)
    # The last token is not fed.
    with rows_of(model, [request.prompt_ids for request in requests], pad_id, budget - 1, shared=shared) as live:
        logits, n_left = live.logits, len(requests)
        for t in range(budget):
            spend(n_left)
            token, logprob = sample(logits, temperatures, uniform[:, t])
            tokens[alive, t], logprobs[alive, t] = token, logprob
            n_tokens[alive] += ~done[alive]  # tokens of finished rows do not count
            done[alive] |= _among(token, eos) | (limit <= t + 1)
            if t + 1 == budget:
                break
            if (t + 1) % check_every == 0:
                left = ~done[alive]
                n_left = int(left.sum())
                if n_left == 0:
                    break
                if n_left < compact_at * len(alive):
                    kept = left.nonzero().squeeze(1)
                    live.keep(kept)
                    alive, token, temperatures = alive[kept], token[kept], temperatures.select(kept)
                    uniform, limit = uniform[kept], limit[kept]
            logits = live.feed(token)

    last = tokens[torch.arange(len(requests), device=device), n_tokens - 1]
    stopped = _among(last, eos).tolist()
    lengths_out, token_rows, logprob_rows = n_tokens.tolist(), tokens.tolist(), logprobs.tolist()
    return [
        Generation(
            response_ids=tuple(token_rows[row][:n]),
            logprobs=tuple(logprob_rows[row][:n]),
            finish_reason="stop" if stopped[row] else "length",
        )
        for row, n in enumerate(lengths_out)
    ]


def _among(token: Tensor, some: Tensor) -> Tensor:
    """Whether each token [B] is one of `some`."""
    return (token[:, None] == some).any(1)


@dataclass(slots=True)
class Temperatures:
    """The temperatures of B rows. The flags are on the host, so that a device does not wait for them."""

    value: Tensor
    """[B] temperatures, with 1 for greedy rows."""
    greedy: Tensor
    """[B] True for greedy rows."""
    any_greedy: bool
    all_one: bool

    @classmethod
    def from_list(cls, values: Sequence[float], device: torch.device) -> Temperatures:
        """Build from one temperature per row; 0 means greedy."""
        greedy = [temperature == 0 for temperature in values]
        value = [temperature or 1.0 for temperature in values]
        return cls(
            torch.tensor(value, dtype=torch.float32, device=device),
            torch.tensor(greedy, device=device),
            any(greedy),
            all(temperature == 1.0 for temperature in value),
        )

    def select(self, rows: Tensor | slice) -> Temperatures:
        """Select rows."""
        return Temperatures(self.value[rows], self.greedy[rows], self.any_greedy, self.all_one)


def sample(logits: Tensor, temperatures: Temperatures, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inverse CDF: logits [B, V], uniform [B] in [0, 1) to token [B], log-prob [B].

    On a processor, a few rows at a time, because several passes over all logits would read them from memory each time.
    """
    n_rows, n_words = logits.shape
    at_once = n_rows if logits.device.type != "cpu" else max(1, _IN_CACHE // n_words)
    blocks = -(-n_words // _BLOCK)
    weights = torch.zeros((min(at_once, n_rows), blocks * _BLOCK), dtype=torch.float32, device=logits.device)
    parts = []
    for begin in range(0, n_rows, at_once):
        rows = slice(begin, begin + at_once)
        parts.append(_sample(logits[rows], temperatures.select(rows), uniform[rows], weights))
    return torch.cat([token for token, _ in parts]), torch.cat([logprob for _, logprob in parts])


def _sample(logits: Tensor, temperatures: Temperatures, uniform: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sample from logits [b, V]. `weights` [at least b, blocks * _BLOCK]: memory to use, 0 in columns after V."""
    n_rows, n_words = logits.shape
    logits = logits.float()
    if not temperatures.all_one:
        logits = logits / temperatures.value[:, None]
    top = logits.amax(-1, keepdim=True)
    weights = weights[:n_rows]
    torch.sub(logits, top, out=weights[:, :n_words]).exp_()
    by_block = weights.view(n_rows, -1, _BLOCK)
    # Select a block by its share of the total, then a token in it. Each target lies below the last sum, so rounding
    # cannot select a token of probability 0.
    to_block = by_block.sum(-1).cumsum(-1)
    total = to_block[:, -1:]
    target = torch.minimum(uniform[:, None] * total, _below(total))
    block = torch.searchsorted(to_block, target, right=True).clamp_(max=to_block.shape[1] - 1)
    before = to_block.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    to_token = by_block.gather(1, block[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1).cumsum(-1)
    target = torch.minimum((target - before).clamp_(min=0), _below(to_token[:, -1:]))
    token = (block * _BLOCK + torch.searchsorted(to_token, target, right=True)).clamp_(max=n_words - 1)
    if temperatures.any_greedy:
        token = torch.where(temperatures.greedy[:, None], logits.argmax(-1, keepdim=True), token)
    logprob = logits.gather(1, token) - top - total.log()
    return token.squeeze(1), logprob.squeeze(1)


def _below(positive: Tensor) -> Tensor:
    """The next smaller numbers."""
    return torch.nextafter(positive, torch.zeros_like(positive))
