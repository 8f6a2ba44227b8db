"""Spans as a tree: enclosure, and the order in time of the spans inside one another.

Works on positions, parents and times alone. All functions are iterative and take O(n log n) for n spans of any depth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

T = TypeVar("T")

MISSING, CIRCLE = "a parent that is not in the trace", "a parent that is inside of its own child"
MOST_BEFORE = 64
"""The most parents by time of one step. Without a limit, m parallel branches followed by n others have m * n edges."""
MOST_LEVELS = 64
"""The number of enclosing spans searched for one with earlier steps, before the trace itself."""


@dataclass(frozen=True, slots=True)
class SpanTree:
    """The enclosure of n spans of one trace."""

    parents: list[int]
    """[n] position of the enclosing span; -1: none."""
    order: list[int]
    """[n] all positions, parents before children, the spans inside one span together."""
    mended: dict[int, str]
    """Position to the defect of its parent, which was removed."""

    def inherited(self, own: Sequence[T | None]) -> list[T | None]:
        """[n] each span's own value, or that of the nearest enclosing span with one."""
        values, parents = list(own), self.parents
        for at in self.order:
            if values[at] is None and parents[at] >= 0:
                values[at] = values[parents[at]]
        return values

    def around(self, spans: Collection[int]) -> list[int | None]:
        """[n] for each span, the span itself if it is one of `spans`, or else the nearest of them that encloses it."""
        return self.inherited([at if at in spans else None for at in range(len(self.parents))])


def build_tree(ids: Sequence[str], parent_ids: Sequence[str | None]) -> SpanTree:
    """Build the tree from ids and parent ids.

    A duplicate id's first span gets the children. A missing parent is removed, and so is the parent of the first span
    (by position) that no other root reaches; `mended` lists both.
    """
    n = len(ids)
    at_id = dict(zip(reversed(ids), range(n - 1, -1, -1), strict=True))
    parents = [at_id.get(id, -1) if id else -1 for id in parent_ids]
    mended = {at: MISSING for at, id in enumerate(parent_ids) if id and parents[at] < 0}
    children: dict[int, list[int]] = {}
    for at, parent in enumerate(parents):
        children.setdefault(parent, []).append(at)
    order: list[int] = []
    reached = [False] * n
    for root in chain(children.get(-1, ()), range(n)):
        if reached[root]:
            continue
        if parents[root] >= 0:
            parents[root], mended[root] = -1, CIRCLE
        stack = [root]
        while stack:
            if not reached[at := stack.pop()]:
                reached[at] = True
                order.append(at)
                stack.extend(reversed(children.get(at, ())))
    return SpanTree(parents, order, mended)


def before(tree: SpanTree, start: Sequence[int], end: Sequence[int], chosen: Iterable[int]) -> dict[int, list[int]]:
    """The chosen spans that each of them follows, in order of their ends.

    `start`, `end`: [n] times, `start < end`. A span follows those inside the nearest enclosing span, of at most
    `MOST_LEVELS`, or else the trace itself, that had ended when it began, without those that another of them came
    after; at most `MOST_BEFORE`, the last to end.

    A call in an agent's loop thus follows the call before it in the same loop, regardless of parallel work. The first
    call of a branch follows the calls before the branches, and a call after them follows their last calls.
    """
    in_order = sorted(chosen, key=end.__getitem__)
    inside: dict[int, list[int]] = {}
    for at in in_order:
        for around in _enclosing(tree.parents, at):
            inside.setdefault(around, []).append(at)
    last_starts = {around: list(accumulate([start[at] for at in spans], max)) for around, spans in inside.items()}
    follows: dict[int, list[int]] = {}
    for at in in_order:
        for around in _enclosing(tree.parents, at):
            spans = inside[around]
            if stop := bisect_right(spans, start[at], key=end.__getitem__):
                first = bisect_right(spans, last_starts[around][stop - 1], 0, stop, key=end.__getitem__)
                follows[at] = spans[max(first, stop - MOST_BEFORE) : stop]
                break
    return follows


def _enclosing(parents: Sequence[int], at: int) -> Iterator[int]:
    """The spans around `at`, the nearest first, at most `MOST_LEVELS`; then -1, the trace itself."""
    for _ in range(MOST_LEVELS):
        if (at := parents[at]) < 0:
            break
        yield at
    yield -1
