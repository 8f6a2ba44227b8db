"""Micro-batches of steps without padding: concatenated tokens, with prompts that steps share stored once.

Computes token positions and attention rows, independent of a model. Linear layers process the [T] tokens. Attention
processes rows (see `attention.py`), gathered from the tokens and padded in groups of similar length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from creditflow.data import Bools, Ints, TrajectoryBatch
from creditflow.data.trajectory import TokenIds

_WASTE = 1.25
"""The largest ratio of row lengths within an attention group of at least `_FEW` rows."""
_FEW = 64
_PADDING = (1024, 8192)
"""The padding, in tokens, that a group of few rows may have: as many as its tokens, within these bounds."""
_ROWS = 4
"""The limit of row tokens in a micro-batch, as a multiple of its tokens. Attention keeps rows for the gradient, with a
shared prompt once per step, but they are a small part of a layer's memory."""
_WORTH = 0.7
"""Prompts are split off if that reduces attention work below this share, because it needs a mask and more calls."""

_WORTH_PREFIX = 0.9
"""Beginnings of prompts are shared if at most this share of the tokens remains."""
_MAX_DEPTH = 64
"""The number of nested beginnings that are compared."""


class Sequences(Protocol):
    """Concatenated prompts and responses: the steps of a TrajectoryBatch, or `TokenSequences`."""

    @property
    def prompt_ids(self) -> TokenIds: ...
    @property
    def prompt_offsets(self) -> Ints: ...
    @property
    def response_ids(self) -> TokenIds: ...
    @property
    def token_offsets(self) -> Ints: ...


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """The steps of a batch as other sequences: cut at another place, or joined."""

    prompt_ids: TokenIds
    prompt_offsets: Ints
    response_ids: TokenIds
    token_offsets: Ints
    token_at: Ints
    """The index of each token of `response_ids` in the batch's [T] columns; -1 for tokens of prompts."""

    @classmethod
    def from_parts(cls, prompts: Sequence[Any], responses: Sequence[Any], token_at: Ints) -> TokenSequences:
        """Concatenate the prompts and responses of all sequences."""
        ends, response_ends = (np.cumsum([0, *map(len, parts)]) for parts in (prompts, responses))
        return cls(np.concatenate(prompts), ends, np.concatenate(responses), response_ends, token_at)

    @classmethod
    def from_prefixes(cls, batch: Sequences, steps: Ints, prefix_B: Ints) -> TokenSequences:
        """The steps, each with the first `prefix_B` tokens of its prompt as the prompt.

        The rest of the prompt precedes the response.
        """
        begin, end = batch.prompt_offsets[steps], batch.prompt_offsets[steps + 1]
        first, last = batch.token_offsets[steps], batch.token_offsets[steps + 1]
        rest, response = end - begin - prefix_B, last - first
        token_at = np.full(int((rest + response).sum()), -1)
        responses_at = ragged(np.cumsum(rest + response) - response, response)
        token_at[responses_at] = ragged(first, response)
        ids = np.empty(len(token_at), dtype=batch.response_ids.dtype)
        ids[responses_at] = batch.response_ids[token_at[responses_at]]
        ids[token_at < 0] = batch.prompt_ids[ragged(begin + prefix_B, rest)]
        prompts = batch.prompt_ids[ragged(begin, prefix_B)]
        return cls(prompts, np.cumsum([0, *prefix_B]), ids, np.cumsum([0, *(rest + response)]), token_at)

    @classmethod
    def from_trajectories(cls, batch: TrajectoryBatch, steps: Ints, longest: int) -> TokenSequences:
        """Join `steps` (ascending; each with a response) by trajectory: the prompt is the first step's.

        `longest`: the limit of a sequence, in tokens. A step that would exceed it starts a new sequence, without the
        preceding context.
        """
        prompts, responses, places = list[TokenIds](), list[list[TokenIds]](), list[Ints]()
        trajectory, size = -1, 0
        for s in steps.tolist():
            prompt = batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]]
            at = np.arange(batch.token_offsets[s], batch.token_offsets[s + 1])
            size += len(prompt) + len(at)
            if batch.trajectory_of_step[s] != trajectory or size > longest:
                trajectory, size = int(batch.trajectory_of_step[s]), len(prompt) + len(at)
                prompts.append(prompt)
                responses.append([])
            else:
                responses[-1].append(prompt)
                places.append(np.full(len(prompt), -1))
            responses[-1].append(batch.response_ids[at])
            places.append(at)
        return cls.from_parts(prompts, [np.concatenate(parts) for parts in responses], np.concatenate(places))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """b attention rows of at most L tokens, each a prompt followed by a response."""

    at: Ints
    """[b, L] the index of each token among the micro-batch's T tokens; arbitrary after a row's end."""
    inside: Bools
    """[b, L] False after the row's end."""


@dataclass(frozen=True, slots=True)
class Responses:
    """b responses of at most Q tokens with their prompts of at most K - Q tokens."""

    query_at: Ints
    """[b, Q] the index of each response token; arbitrary after the response's end."""
    key_at: Ints
    """[b, K] the indices of its keys: the prompt, padded on the left, and the response."""
    padding: Ints
    """[b] the padding columns before the prompt."""


@dataclass(frozen=True, slots=True)
class Split:
    """Separate attention rows for distinct prompts and for responses."""

    prompts: tuple[RowGroup, ...]
    responses: tuple[Responses, ...]
    source: Ints
    """[T] the index of each token in the prompts' rows followed by the responses' queries, flattened."""


@dataclass(frozen=True, slots=True)
class PackedSteps:
    """B steps with R response tokens, packed as T input tokens."""

    steps: Ints
    """[B] step indices in the batch."""
    input_ids: Ints
    """[T] the distinct prompts, then each response without its last token, which predicts nothing."""
    position_ids: Ints
    """[T] the position of each token in its step."""
    groups: tuple[RowGroup, ...]
    """The rows of all B steps, grouped by length."""
    source: Ints
    """[T] the index of each token in the rows of all groups, flattened."""
    split: Split | None
    """The same rows with separate prompts, if that is less work."""
    predicting: Ints
    """[R] the index in T of the token before each response token."""
    row_of_token: Ints
    """[R] the index in `steps` of each response token."""
    token_at: Ints
    """[R] the index of each response token in the batch's [T] columns."""


def micro_batches(batch: Sequences, steps: Ints, max_tokens: int, max_rows: int | None = None) -> Iterator[PackedSteps]:
    """Pack `steps` (indices; each with a prompt and a response) into parts of at most `max_tokens` input tokens.

    `max_rows`: the limit of row tokens in a part, where a prompt counts once per step; default: 4 * `max_tokens`. All
    parts have about the same size. Steps of one prompt stay together if they fit. A step longer than `max_tokens` is
    packed alone.
    """
    if not len(steps):
        return
    max_rows = _ROWS * max_tokens if max_rows is None else max_rows
    prompts, responses = np.diff(batch.prompt_offsets)[steps], np.diff(batch.token_offsets)[steps]
    prompt_of = _same_prompts(batch, steps)
    # Sort prompts by the length of their longest step, so that rows of a part have similar lengths.
    longest = np.zeros(prompt_of.max() + 1, dtype=np.int64)
    np.maximum.at(longest, prompt_of, prompts + responses)
    order = np.lexsort((responses, prompt_of, longest[prompt_of]))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = prompt_of[order][1:] != prompt_of[order][:-1]
    tokens = responses[order] - 1
    row = tokens + prompts[order]
    total = int((tokens + prompts[order] * first).sum())
    target = total / max(1, -(-total // max_tokens), -(-int(row.sum()) // max_rows))
    start, size, rows = 0, 0, 0
    for k, i in enumerate(order):
        fresh = size == 0 or first[k]
        more = int(tokens[k] + prompts[i] * fresh)
        full = size + more > max_tokens or rows + row[k] > max_rows
        if size and (full or (fresh and size >= target)):
            yield pack(batch, steps[order[start:k]], prompt_of[order[start:k]])
            start, size, rows, more = k, 0, 0, int(row[k])
        size, rows = size + more, rows + int(row[k])
    yield pack(batch, steps[order[start:]], prompt_of[order[start:]])


def micro_batches_by_prefix(batch: Sequences, steps: Ints, max_tokens: int) -> Iterator[PackedSteps]:
    """As `micro_batches`, with the beginning that prompts share stored once, if that saves a tenth of the tokens.

    An agent's system prompt and worked examples are the same in every call.
    """
    prompts = [batch.prompt_ids[slice(*batch.prompt_offsets[s : s + 2])] for s in steps.tolist()]
    prefix_B = shared_prefixes(prompts)
    if prefix_B is None:
        yield from micro_batches(batch, steps, max_tokens)
        return
    sequences = TokenSequences.from_prefixes(batch, steps, prefix_B)
    for packed in micro_batches(sequences, np.arange(len(steps)), max_tokens):
        token_at = sequences.token_at[packed.token_at]
        sampled = token_at >= 0
        yield replace(
            packed,
            steps=steps[packed.steps],
            predicting=packed.predicting[sampled],
            row_of_token=packed.row_of_token[sampled],
            token_at=token_at[sampled],
        )


def shared_prefixes(prompts: Sequence[TokenIds]) -> Ints | None:
    """The length [B] of the beginning of each prompt that is worth storing once, or the whole length if none is.

    Chosen to save as many tokens as possible with one beginning per prompt. None if that saves less than a tenth of the
    tokens that remain when only equal prompts are stored once.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].tolist())
    common = [_common_length(prompts[i], prompts[j]) for i, j in pairwise(order)]
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    equal = [length == lengths[i] == lengths[j] for length, (i, j) in zip(common, pairwise(order), strict=True)]
    without = int(lengths.sum() - sum(itertools.compress(common, equal)))
    saved, cuts = _best_prefixes(common, 0, len(prompts), depth=0)
    if int(lengths.sum()) - saved > _WORTH_PREFIX * without:
        return None
    prefix_B = lengths.copy()
    for begin, end, length in cuts:
        prefix_B[order[begin:end]] = length
    return prefix_B


def _best_prefixes(common: Sequence[int], begin: int, end: int, depth: int) -> tuple[int, list[tuple[int, int, int]]]:
    """The saved tokens, and the groups (begin, end, length) of sorted prompts with a shared beginning.

    `common`: the common length of neighbours. A group shares the smallest, unless its parts save more by themselves.
    """
    if end - begin < 2:
        return 0, []
    length = min(common[begin : end - 1])
    whole = ((end - begin - 1) * length, [(begin, end, length)]) if length else (0, [])
    if depth == _MAX_DEPTH:
        return whole
    inner = [k + 1 for k in range(begin, end - 1) if common[k] == length]
    if len(inner) == end - begin - 1:  # all neighbours share equally much
        return whole
    parts = [_best_prefixes(common, first, last, depth + 1) for first, last in pairwise([begin, *inner, end])]
    saved = sum(part for part, _ in parts)
    return (saved, [cut for _, cuts in parts for cut in cuts]) if saved >= whole[0] else whole


def _common_length(ids: TokenIds, other: TokenIds) -> int:
    n = min(len(ids), len(other))
    differs = np.flatnonzero(ids[:n] != other[:n])
    return int(differs[0]) if len(differs) else n


def pack(batch: Sequences, steps: Ints, prompt_of: Ints) -> PackedSteps:
    """Pack `steps` as one micro-batch.

    `prompt_of` [B]: a number per step, equal for equal prompts.
    """
    p_B, r_B = np.diff(batch.prompt_offsets)[steps], np.diff(batch.token_offsets)[steps]
    _, owner_of, prompt_of = np.unique(prompt_of, return_index=True, return_inverse=True)
    owns_B = np.zeros(len(steps), dtype=np.bool_)
    owns_B[owner_of] = True
    prompt_lengths = p_B[owner_of]
    prompt_start_B = (np.cumsum(prompt_lengths) - prompt_lengths)[prompt_of]
    all_prompts = int(prompt_lengths.sum())
    fed_B = r_B - 1
    response_start_B = all_prompts + np.cumsum(fed_B) - fed_B
    prompt_at = ragged(batch.prompt_offsets[steps[owner_of]], prompt_lengths)
    fed_at = ragged(batch.token_offsets[steps], fed_B)
    row_of_token = np.repeat(np.arange(len(steps)), r_B)
    nth = ragged(np.zeros_like(r_B), r_B)
    last_of_prompt = (prompt_start_B + p_B - 1)[row_of_token]
    groups, source = _rows(p_B, fed_B, prompt_start_B, response_start_B, owns_B)
    return PackedSteps(
        steps=steps,
        input_ids=np.concatenate([batch.prompt_ids[prompt_at], batch.response_ids[fed_at]]).astype(np.int64),
        position_ids=np.concatenate([ragged(np.zeros_like(prompt_lengths), prompt_lengths), ragged(p_B, fed_B)]),
        groups=groups,
        source=source,
        split=_split(p_B, fed_B, prompt_start_B, response_start_B, owns_B),
        predicting=np.where(nth == 0, last_of_prompt, response_start_B[row_of_token] + nth - 1),
        row_of_token=row_of_token,
        token_at=ragged(batch.token_offsets[steps], r_B),
    )


def pack_prompts(prompts: Sequence[Sequence[int]]) -> tuple[PackedSteps, list[Ints]]:
    """Pack distinct prompts without responses, with their common beginnings stored once.

    Each is a step with one response token, which is not an input. Also returns the index of each prompt's tokens among
    the T tokens.
    """
    prefixes = shared_prefixes([np.array(prompt, dtype=np.int32) for prompt in prompts])
    prefix_B = np.array([len(prompt) for prompt in prompts]) if prefixes is None else prefixes
    number = dict[tuple[int, ...], int]()
    prompt_of = [number.setdefault(tuple(prompt[:n]), len(number)) for prompt, n in zip(prompts, prefix_B, strict=True)]
    pairs = [(prompt[:n], (*prompt[n:], 0)) for prompt, n in zip(prompts, prefix_B.tolist(), strict=True)]
    packed = pack_pairs(pairs, np.array(prompt_of))
    last = np.cumsum([len(rest) for _, rest in pairs]) - 1
    packed = replace(
        packed,
        predicting=packed.predicting[last],
        row_of_token=packed.row_of_token[last],
        token_at=packed.token_at[last],
    )
    # The layout of `pack`: the distinct prompts, then the rest of each row.
    starts = np.cumsum([0, *map(len, number)])
    rest_B = np.array([len(rest) - 1 for _, rest in pairs])
    rest_starts = starts[-1] + np.cumsum(rest_B) - rest_B
    return packed, [
        np.concatenate([np.arange(starts[u], starts[u] + n), np.arange(start, start + rest)])
        for u, n, start, rest in zip(prompt_of, prefix_B, rest_starts, rest_B, strict=True)
    ]


def pack_pairs(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], prompt_of: Ints) -> PackedSteps:
    """Pack prompts with their responses; `prompt_of`: see `pack`."""
    prompts, responses = zip(*pairs, strict=True)
    steps = TokenSequences.from_parts(prompts, responses, np.arange(sum(map(len, responses))))
    return pack(steps, np.arange(len(pairs)), prompt_of)


def _rows(
    p_B: Ints, fed_B: Ints, prompt_start_B: Ints, response_start_B: Ints, owns_B: Bools
) -> tuple[tuple[RowGroup, ...], Ints]:
    """Build row groups of similar length, and `PackedSteps.source`: the index of each token in them."""
    length_B = p_B + fed_B
    order = np.argsort(length_B, kind="stable")
    source = np.empty(int((p_B * owns_B + fed_B).sum()), dtype=np.int64)
    groups, start, before = [], 0, 0
    for end in [*_cuts(length_B[order]), len(order)]:
        rows = order[start:end]
        column = np.arange(int(length_B[rows].max()))[None, :]
        in_prompt = column < p_B[rows][:, None]
        at = np.where(
            in_prompt,
            prompt_start_B[rows][:, None] + column,
            response_start_B[rows][:, None] + column - p_B[rows][:, None],
        )
        inside = column < length_B[rows][:, None]
        stands = inside & (~in_prompt | owns_B[rows][:, None])
        source[at[stands]] = before + np.flatnonzero(stands.reshape(-1))
        groups.append(RowGroup(np.where(inside, at, 0), inside))
        start, before = end, before + at.size
    return tuple(groups), source


def _split(p_B: Ints, fed_B: Ints, prompt_start_B: Ints, response_start_B: Ints, owns_B: Bools) -> Split | None:
    """Build separate rows for prompts and responses; None if that does not save enough work (see `_WORTH`).

    Work is counted in pairs of tokens: half the squared length for a causal row.
    """
    fed = np.flatnonzero(fed_B)
    order = fed[np.lexsort((p_B[fed], fed_B[fed]))]
    cuts = [0, *_cuts(fed_B[order]), len(order)]
    parts = [order[begin:end] for begin, end in pairwise(cuts) if end > begin]
    apart = (p_B[owns_B] ** 2).sum() / 2 + sum(
        len(rows) * fed_B[rows].max() * (fed_B[rows].max() + p_B[rows].max()) for rows in parts
    )
    if apart > _WORTH * ((p_B + fed_B) ** 2).sum() / 2:
        return None
    owners = np.flatnonzero(owns_B)
    none = np.zeros_like(owners)
    source = np.empty(int((p_B * owns_B + fed_B).sum()), dtype=np.int64)
    at = prompt_start_B[owners]  # prompts come before all responses
    prompts, of_prompts = _rows(p_B[owners], none, at, none, owns_B[owners])
    source[: len(of_prompts)] = of_prompts
    before, responses = sum(group.at.size for group in prompts), []
    for rows in parts:
        q, p = int(fed_B[rows].max()), int(p_B[rows].max())
        column = np.arange(q)[None, :]
        inside = column < fed_B[rows][:, None]
        query_at = np.where(inside, response_start_B[rows][:, None] + column, 0)
        padding = p - p_B[rows]
        in_prompt = np.arange(p)[None, :] - padding[:, None]
        prompt_at = np.where(in_prompt >= 0, prompt_start_B[rows][:, None] + in_prompt, 0)
        responses.append(Responses(query_at, np.concatenate([prompt_at, query_at], 1), padding))
        source[query_at[inside]] = before + np.flatnonzero(inside.reshape(-1))
        before += query_at.size
    return Split(prompts, tuple(responses), source)


def _cuts(lengths: Ints) -> list[int]:
    """Boundaries between groups of rows with ascending `lengths`, chosen to limit padding."""
    cuts, start, tokens = [], 0, 0
    for k, length in enumerate(lengths.tolist()):
        rows = k - start
        padding = rows * length - tokens
        many = rows >= _FEW or padding > min(max(tokens, _PADDING[0]), _PADDING[1])
        if many and length > _WASTE * lengths[start]:
            cuts.append(k)
            start, tokens = k, 0
        tokens += length
    return cuts


def _same_prompts(batch: Sequences, steps: Ints) -> Ints:
    """Number the distinct prompts in order of first appearance; returns the number [B] of each step."""
    ids, offsets, numbers = np.ascontiguousarray(batch.prompt_ids), batch.prompt_offsets, dict[bytes, int]()
    keys = (ids[offsets[s] : offsets[s + 1]].tobytes() for s in steps.tolist())
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """Concatenate the ranges `starts[i], ..., starts[i] + lengths[i] - 1`."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
