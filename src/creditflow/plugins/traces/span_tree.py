"""Spans as a tree: enclosure, and the order in time of the spans inside one another.

Works on positions, parents and times alone. All functions are iterative and take O(n log n) for n spans of any depth.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress
from operator import attrgetter
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MISSING, CIRCLE = "a parent that is not in the trace", "a parent that is inside of its own child"
MOST_EXITS = 64
"""The most parents by time of one step, the last to end. Without a limit, m parallel branches followed by n others have
m * n edges."""
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


class _Unit(NamedTuple):
    """All chosen spans at and inside one span."""

    began: int
    """The earliest start."""
    last_began: int
    ended: int
    """The latest end."""
    exits: tuple[int, ...]
    """Spans that ended after all had begun, so that nothing in the unit came after them."""


def before(tree: SpanTree, start: Sequence[int], end: Sequence[int], chosen: Sequence[bool]) -> list[tuple[int, ...]]:
    """[n] for each chosen span, the chosen spans that it follows; empty for other spans.

    `start`, `end`: [n] times, `start < end`. A unit is the set of all chosen spans at and inside one span. To find the
    predecessors of a span:

    1. Take the nearest enclosing span, of at most `MOST_LEVELS`, or else the trace itself, with a child unit that ended
       before the span began.
    2. Of the child units that ended by then, keep those that no other such unit came after.
    3. Of each of these, take the spans that nothing in the unit came after, at most `MOST_EXITS`, the last to end.

    A call in an agent's loop thus follows the call before it in the same loop, regardless of parallel work. The first
    call of a branch follows the calls before the branches, and a call after them follows the last calls of each.
    """
    siblings = {
        around: (units, [unit.ended for unit in units], list(accumulate([unit.began for unit in units], max)))
        for around, units in _units(tree, start, end, chosen).items()
    }
    follows: list[tuple[int, ...]] = [()] * len(chosen)
    for at in compress(range(len(chosen)), chosen):
        for around in _enclosing(tree.parents, at):
            units, ends, began_by = siblings[around]
            if stop := bisect_right(ends, start[at]):
                first = max(bisect_right(ends, began_by[stop - 1], 0, stop), stop - MOST_EXITS)
                follows[at] = _last([exit for unit in units[first:stop] for exit in unit.exits], end)
                break
    return follows


def _enclosing(parents: Sequence[int], at: int) -> Iterator[int]:
    """The spans around `at`, the nearest first, at most `MOST_LEVELS`; then -1, the trace itself."""
    for _ in range(MOST_LEVELS):
        if (at := parents[at]) < 0:
            break
        yield at
    yield -1


def _units(tree: SpanTree, start: Sequence[int], end: Sequence[int], chosen: Sequence[bool]) -> dict[int, list[_Unit]]:
    """Span to the units directly inside, in order of their ends; -1: those of the trace itself."""
    inside: dict[int, list[_Unit]] = {}
    for at in reversed(tree.order):
        parts = inside.get(at, [])
        if chosen[at]:
            parts = [*parts, _Unit(start[at], start[at], end[at], (at,))]
        if parts:
            last_began = max([part.last_began for part in parts])
            exits = _last([exit for part in parts for exit in part.exits if end[exit] > last_began], end)
            unit = _Unit(min([part.began for part in parts]), last_began, max([part.ended for part in parts]), exits)
            inside.setdefault(tree.parents[at], []).append(unit)
    for units in inside.values():
        units.sort(key=attrgetter("ended"))
    return inside


def _last(spans: list[int], end: Sequence[int]) -> tuple[int, ...]:
    """At most `MOST_EXITS` of `spans`, the last to end."""
    return tuple(spans if len(spans) <= MOST_EXITS else heapq.nlargest(MOST_EXITS, spans, key=end.__getitem__))
