"""Cuts steps into padded micro-batches of similar lengths, so that little of the work is padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch


@dataclass(frozen=True, slots=True)
class Rows:
    """B steps as padded rows: prompts padded on the left to P, responses on the right to R."""

    step_indices: Ints
    input_ids: Tensor
    """[B, P + R]"""
    attention_mask: Tensor
    """[B, P + R]"""
    position_ids: Tensor
    response_ids: Tensor
    """[B, R]"""
    response_mask: Tensor
    """[B, R] 1.0 where the token was sampled by the policy."""
    old_logprobs: Tensor
    """[B, R] as recorded when it was sampled."""
    temperature: Tensor
    """[B] at which the row was sampled; 1 for greedy rows, whose mask is 0."""


def bucket(batch: TrajectoryBatch, steps: Ints, max_tokens: int) -> list[Ints]:
    """Cut `steps` (indices) into groups of similar prompt and response length, each at most `max_tokens` when padded.

    A single step longer than that makes a group of its own.
    """
    prompts = np.diff(batch.prompt_offsets)[steps]
    responses = np.diff(batch.token_offsets)[steps]
    order = np.lexsort((responses, prompts))
    groups: list[Ints] = []
    start, widest_prompt, widest_response, least = 0, 0, 0, 0
    for position, k in enumerate(order):
        width_p, width_r = max(widest_prompt, prompts[k]), max(widest_response, responses[k])
        size = position - start
        # A step much shorter than those behind it is better padded little in a group of its own kind.
        wasteful = size >= 64 and (width_p + width_r) > 1.25 * least
        if size and ((width_p + width_r) * (size + 1) > max_tokens or wasteful):
            groups.append(steps[order[start:position]])
            start, width_p, width_r, size = position, prompts[k], responses[k], 0
        if size == 0:
            least = prompts[k] + responses[k]
        widest_prompt, widest_response = width_p, width_r
    if len(order):
        groups.append(steps[order[start:]])
    return groups


def pad(batch: TrajectoryBatch, steps: Ints, pad_id: int, device: torch.device) -> Rows:
    """The rows of `steps`."""
    prompt_lengths = np.diff(batch.prompt_offsets)[steps]
    temperature = batch.temperature_of_step[steps]
    P = int(prompt_lengths.max())
    prompt_at = batch.prompt_offsets[steps][:, None] + np.arange(P)[None, :] - (P - prompt_lengths)[:, None]
    in_prompt = np.arange(P)[None, :] >= (P - prompt_lengths)[:, None]
    response_at, in_response = _response_positions(batch, steps)
    prompt_ids = _gather(batch.prompt_ids, prompt_at, in_prompt, pad_id).astype(np.int64)
    response_ids = _gather(batch.response_ids, response_at, in_response, pad_id).astype(np.int64)
    attention = np.concatenate([in_prompt, in_response], axis=1)

    def tensor(values: Ints | Floats | Bools, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    return Rows(
        step_indices=steps,
        input_ids=tensor(np.concatenate([prompt_ids, response_ids], axis=1), torch.long),
        attention_mask=tensor(attention, torch.long),
        position_ids=tensor(np.maximum(attention.cumsum(1) - 1, 0), torch.long),
        response_ids=tensor(response_ids, torch.long),
        response_mask=tensor(_gather(batch.response_mask, response_at, in_response, 0), torch.float32),
        old_logprobs=tensor(_gather(batch.logprobs, response_at, in_response, 0), torch.float32),
        temperature=tensor(np.where(temperature > 0, temperature, 1.0), torch.float32),
    )


def token_rows(batch: TrajectoryBatch, steps: Ints, values_T: Floats) -> Floats:
    """[B, R] a column of response tokens as the rows that `pad` makes of `steps`; 0 beyond a response's end."""
    at, inside = _response_positions(batch, steps)
    return np.asarray(_gather(values_T, at, inside, 0.0), dtype=np.float64)


def _response_positions(batch: TrajectoryBatch, steps: Ints) -> tuple[Ints, Bools]:
    """[B, R] where each row's tokens lie in the [T] columns, and whether there is one."""
    lengths = np.diff(batch.token_offsets)[steps]
    columns = np.arange(int(lengths.max()))[None, :]
    return batch.token_offsets[steps][:, None] + columns, columns < lengths[:, None]


def _gather(values: NDArray[Any], at: Ints, inside: Bools, fill: float) -> NDArray[Any]:
    return np.where(inside, values[np.where(inside, at, 0)], fill)
