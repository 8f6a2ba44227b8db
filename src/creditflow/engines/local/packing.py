"""Cuts steps into micro-batches without padding: tokens one after the other, a prompt that steps share there once.

Knows where tokens lie and which may see which; no model. Linear layers work on the [T] tokens; attention works on rows
(see `attention.py`), which are gathered from them and padded in groups of similar length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from creditflow.trajectory import Bools, Ints, TokenIds, TrajectoryBatch

_WASTE = 1.25
"""Rows of one attention group differ in length by this factor at most, unless there are few of them."""
_FEW = 64
_PADDING = (1024, 8192)
"""Tokens of padding that few rows may have: so many in any case, and so many at most; between, as many as they have."""
_ROWS = 4
"""Tokens of a micro-batch's rows, in units of its tokens: attention keeps them for the gradient, a prompt of many
steps once for each, but they are a small part of what a layer keeps."""
_WORTH = 0.7
"""Prompts are taken apart where that leaves less than this share of the work: it has a mask, and more calls."""


class Sequences(Protocol):
    """Prompts and responses, one after the other: a TrajectoryBatch's steps, or `Plays`."""

    @property
    def prompt_ids(self) -> TokenIds: ...
    @property
    def prompt_offsets(self) -> Ints: ...
    @property
    def response_ids(self) -> TokenIds: ...
    @property
    def token_offsets(self) -> Ints: ...


@dataclass(frozen=True, slots=True)
class Plays:
    """Plays as if each were one step: the prompt of its first step, and then all that follows."""

    prompt_ids: TokenIds
    prompt_offsets: Ints
    response_ids: TokenIds
    token_offsets: Ints
    token_at: Ints
    """Where each token of `response_ids` lies in the batch's [T] columns; -1 for those of later prompts."""

    @classmethod
    def of(cls, batch: TrajectoryBatch, steps: Ints, longest: int) -> Plays:
        """The plays of `steps` (ascending; each with a response), of those steps alone.

        `longest`: tokens of a play at most. Where a step would make it longer, another begins with it, as if nothing
        had come before.
        """
        heads, tails, places = list[TokenIds](), list[list[TokenIds]](), list[list[Ints]]()
        play, size = -1, 0
        for s in steps.tolist():
            prompt = batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]]
            at = np.arange(batch.token_offsets[s], batch.token_offsets[s + 1])
            size += len(prompt) + len(at)
            if batch.trajectory_of_step[s] != play or size > longest:
                play, size = int(batch.trajectory_of_step[s]), len(prompt) + len(at)
                heads.append(prompt)
                tails.append([])
                places.append([])
            else:
                tails[-1].append(prompt)
                places[-1].append(np.full(len(prompt), -1))
            tails[-1].append(batch.response_ids[at])
            places[-1].append(at)
        joined = [np.concatenate(tail) for tail in tails]
        return cls(
            np.concatenate(heads),
            np.cumsum([0, *map(len, heads)]),
            np.concatenate(joined),
            np.cumsum([0, *map(len, joined)]),
            np.concatenate([at for place in places for at in place]),
        )


@dataclass(frozen=True, slots=True)
class RowGroup:
    """b rows of at most L tokens, as attention sees them: a prompt and a response, one after the other."""

    at: Ints
    """[b, L] where in the micro-batch's T tokens each lies; beyond a row's end, anywhere."""
    inside: Bools
    """[b, L] False beyond the row's end."""


@dataclass(frozen=True, slots=True)
class Responses:
    """b responses of at most Q tokens, each with the prompt that it follows, of at most K - Q."""

    query_at: Ints
    """[b, Q] where each token of a response lies; beyond its end, anywhere."""
    key_at: Ints
    """[b, K] where what it sees lies: the prompt, padded on the left, and the response."""
    padding: Ints
    """[b] columns before the prompt."""


@dataclass(frozen=True, slots=True)
class Split:
    """Attention of prompts, each distinct one once, apart from that of responses."""

    prompts: tuple[RowGroup, ...]
    responses: tuple[Responses, ...]
    source: Ints
    """[T] which entry of the prompts' rows and then the responses' queries, flat, stands for each token."""


@dataclass(frozen=True, slots=True)
class Packed:
    """B steps with R response tokens, as T tokens of input."""

    steps: Ints
    """[B] indices in the batch."""
    input_ids: Ints
    """[T] the distinct prompts, then each response but for its last token, which nothing follows."""
    position_ids: Ints
    """[T] of each token in its own step."""
    groups: tuple[RowGroup, ...]
    """All rows, the B steps in some order."""
    source: Ints
    """[T] which entry of the groups' rows, one group after the other and flat, stands for each token."""
    split: Split | None
    """The same rows with prompts apart, where that is less work."""
    predicting: Ints
    """[R] where in T the token lies that comes before each response token."""
    row_of_token: Ints
    """[R] index in `steps`."""
    token_at: Ints
    """[R] where the token lies in the batch's [T] columns."""


def micro_batches(batch: Sequences, steps: Ints, max_tokens: int, max_rows: int | None = None) -> Iterator[Packed]:
    """`steps` (indices; each with a prompt and a response) in parts of at most `max_tokens` tokens of input.

    `max_rows`: tokens of all its rows at most, a prompt counted for each of its steps; default: four times as many.
    All parts are of about the same size. Steps of one prompt stay together where they fit; a single step that is longer
    than `max_tokens` makes a part of its own.
    """
    if not len(steps):
        return
    max_rows = _ROWS * max_tokens if max_rows is None else max_rows
    prompts, responses = np.diff(batch.prompt_offsets)[steps], np.diff(batch.token_offsets)[steps]
    prompt_of = _same_prompts(batch, steps)
    # Prompts by the length of their longest step, so that rows of a part are alike.
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


def pack(batch: Sequences, steps: Ints, prompt_of: Ints) -> Packed:
    """`steps` as one micro-batch. `prompt_of`: [B] the same number where the prompts are the same tokens."""
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
    return Packed(
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


def pack_prompts(prompts: Sequence[Sequence[int]]) -> Packed:
    """Prompts alone, each a step whose response has one token, which is not fed."""
    p_B = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    start_B, none_B, n = np.cumsum(p_B) - p_B, np.zeros_like(p_B), len(p_B)
    groups, source = _rows(p_B, none_B, start_B, none_B, np.ones(n, dtype=np.bool_))
    return Packed(
        steps=np.arange(n),
        input_ids=np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts]),
        position_ids=ragged(none_B, p_B),
        groups=groups,
        source=source,
        split=None,
        predicting=start_B + p_B - 1,
        row_of_token=np.arange(n),
        token_at=np.arange(n),
    )


def _rows(
    p_B: Ints, fed_B: Ints, prompt_start_B: Ints, response_start_B: Ints, owns_B: Bools
) -> tuple[tuple[RowGroup, ...], Ints]:
    """The rows in groups of similar length, and for each token the entry of them that stands for it."""
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
    """Attention of prompts apart from that of responses; None where that is not much less work.

    Work is counted in pairs of tokens: of a row that sees what is before it, half of its square.
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
    at = prompt_start_B[owners]  # prompts lie before all responses, one after the other
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
    """Where rows of ascending `lengths` are cut, so that little of a group is padding."""
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
    """[B] a number for each distinct sequence of prompt tokens, in order of first appearance."""
    ids, offsets, numbers = np.ascontiguousarray(batch.prompt_ids), batch.prompt_offsets, dict[bytes, int]()
    keys = (ids[offsets[s] : offsets[s + 1]].tobytes() for s in steps.tolist())
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """`starts[0], starts[0] + 1, ...` for `lengths[0]` numbers, then the same of the next."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
