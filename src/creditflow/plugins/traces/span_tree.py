"""Spans as a tree: enclosure, and the order in time of the spans inside one another.

Works on positions, parents and times alone. All functions are iterative and take O(n log n) for n spans of any depth.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")

NEVER = 1 << 63
"""Later than any time, in nanoseconds."""
MISSING, CIRCLE = "a parent that is not in the trace", "a parent that is inside of its own child"
MOST_EXITS = 64
"""The most parents by time of one step, the last to end. Without a limit, m parallel branches followed by n others have
m * n edges."""


@dataclass(frozen=True, slots=True)
class SpanTree:
    """The enclosure of n spans of one trace."""

    parents: list[int]
    """[n] position of the enclosing span; -1: none."""
    order: list[int]
    """[n] all positions, parents before children; children of one span in order of position."""
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
    (by position) of each cycle; `mended` lists both.
    """
    n = len(ids)
    at_id = dict(zip(reversed(ids), range(n - 1, -1, -1), strict=True))
    parents, mended = [-1] * n, dict[int, str]()
    backward = False
    for at, around in enumerate(parent_ids):
        if around:
            parents[at] = parent = at_id.get(around, -1)
            if parent < 0:
                mended[at] = MISSING
            elif parent >= at:
                backward = True
    for at in _closing_circles(parents) if backward else ():
        mended[at] = CIRCLE
        parents[at] = -1
    children: dict[int, list[int]] = {}
    """Parent to children; -1: the roots."""
    for at, parent in enumerate(parents):
        if parent in children:
            children[parent].append(at)
        else:
            children[parent] = [at]
    order: list[int] = []
    stack = children.get(-1, [])[::-1]
    while stack:
        at = stack.pop()
        order.append(at)
        if at in children:
            stack.extend(reversed(children[at]))
    return SpanTree(parents, order, mended)


def _closing_circles(parents: Sequence[int]) -> list[int]:
    """The first position of each cycle."""
    firsts, seen_from = [], [-1] * len(parents)
    for start in range(len(parents)):
        at = start
        while at >= 0 and seen_from[at] < 0:
            seen_from[at] = start
            at = parents[at]
        if at >= 0 and seen_from[at] == start:
            circle, along = [at], parents[at]
            while along != at:
                circle.append(along)
                along = parents[along]
            firsts.append(min(circle))
    return firsts


def before(tree: SpanTree, start: Sequence[int], end: Sequence[int], chosen: Sequence[bool]) -> list[tuple[int, ...]]:
    """[n] for each chosen span, the chosen spans that it follows; empty for other spans.

    `start`, `end`: [n] times, `start < end`. A unit is the set of all chosen spans at and inside one span. To find the
    predecessors of a span:

    1. Take the nearest enclosing span (in the end the trace itself) with a child unit that ended before the span began.
    2. Of the child units that ended by then, keep those that no other such unit came after.
    3. Of each of these, take the spans that nothing in the unit came after, at most `MOST_EXITS`, the last to end.

    A call in an agent's loop thus follows the call before it in the same loop, regardless of parallel work. The first
    call of a branch follows the calls before the branches, and a call after them follows the last calls of each.
    """
    units = _units(tree, start, end, chosen)
    n = len(tree.parents)
    inside: dict[int, list[int]] = {n: []}
    """Span to the units directly inside; n: those of the trace itself."""
    for at in tree.order:
        if at in units:
            around = tree.parents[at] if tree.parents[at] >= 0 else n
            if around in inside:
                inside[around].append(at)
            else:
                inside[around] = [at]
    follows: list[tuple[int, ...]] = [()] * n
    path = _Path()
    siblings: dict[int, _Siblings] = {}
    stack = [n]
    while stack:
        at = stack.pop()
        if at < 0:  # the end of a span's children
            path.pop()
            continue
        if at < n and chosen[at] and (nearest := path.deepest(start[at])) is not None:
            if nearest not in siblings:
                siblings[nearest] = _Siblings.from_units([units[unit] for unit in inside[nearest]])
            follows[at] = siblings[nearest].last_before(start[at], end)
        if at in inside:
            path.push(min([units[unit].ended for unit in inside[at]], default=NEVER), at)
            stack.append(-1)
            stack.extend(reversed(inside[at]))
    return follows


@dataclass(slots=True)
class _Subtree:
    """All chosen spans at and inside one span."""

    began: int
    """The earliest start."""
    last_began: int
    ended: int
    """The latest end."""
    exits: tuple[int, ...]
    """Spans that ended after all had begun, so that nothing in the unit came after them."""


def _units(tree: SpanTree, start: Sequence[int], end: Sequence[int], chosen: Sequence[bool]) -> dict[int, _Subtree]:
    """Span to unit, for each span with a chosen span at or inside it."""
    units: dict[int, _Subtree] = {}
    parts: dict[int, list[_Subtree]] = {}
    """Span to the units directly inside; removed once the span's own unit is made."""
    for at in reversed(tree.order):
        inner = parts.pop(at, None)
        if chosen[at]:
            own = _Subtree(start[at], start[at], end[at], (at,))
            unit = _joined([*inner, own], end) if inner else own
        elif inner:
            unit = inner[0] if len(inner) == 1 else _joined(inner, end)
        else:
            continue
        units[at] = unit
        parent = tree.parents[at]
        if parent in parts:
            parts[parent].append(unit)
        elif parent >= 0:
            parts[parent] = [unit]
    return units


def _joined(parts: Sequence[_Subtree], end: Sequence[int]) -> _Subtree:
    last_began = max([part.last_began for part in parts])
    late = [exit for part in parts for exit in part.exits if end[exit] > last_began]
    return _Subtree(
        min([part.began for part in parts]), last_began, max([part.ended for part in parts]), _last(late, end)
    )


def _last(spans: list[int], end: Sequence[int]) -> tuple[int, ...]:
    """At most `MOST_EXITS` of `spans`, the last to end."""
    return tuple(spans if len(spans) <= MOST_EXITS else heapq.nlargest(MOST_EXITS, spans, key=end.__getitem__))


_BEGAN, _ENDED = attrgetter("began"), attrgetter("ended")


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The units directly inside one span, sorted by end."""

    units: list[_Subtree]
    ends: list[int]
    began_by: list[int]
    """Running maximum of the units' earliest starts."""

    @classmethod
    def from_units(cls, units: list[_Subtree]) -> _Siblings:
        units = sorted(units, key=_ENDED)
        return cls(units, list(map(_ENDED, units)), list(accumulate(map(_BEGAN, units), max)))

    def last_before(self, time: int, end: Sequence[int]) -> tuple[int, ...]:
        """The exits of the units that ended by `time` and that no other such unit came after."""
        stop = bisect_right(self.ends, time)
        first = bisect_right(self.ends, self.began_by[stop - 1], 0, stop)
        if first == stop - 1:
            return self.units[first].exits
        recent = self.units[max(first, stop - MOST_EXITS) : stop]
        return _last([exit for unit in recent for exit in unit.exits], end)


class _Path:
    """The path from the root to the current span, with a number each; finds the deepest span within a bound.

    Only a number with no smaller number below it can be the answer. Such numbers rise with depth, so they are bisected.
    A push overwrites one entry, which the pop restores.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._spans: list[int] = []
        self._size = 0
        self._undo: list[tuple[int, int, int, int]] = []

    def push(self, number: int, span: int) -> None:
        place = bisect_left(self._numbers, number, 0, self._size)
        if place == len(self._numbers):
            self._numbers.append(NEVER)
            self._spans.append(-1)
        self._undo.append((place, self._size, self._numbers[place], self._spans[place]))
        self._numbers[place], self._spans[place], self._size = number, span, place + 1

    def pop(self) -> None:
        place, self._size, self._numbers[place], self._spans[place] = self._undo.pop()

    def deepest(self, most: int) -> int | None:
        """The deepest span whose number is at most `most`."""
        place = bisect_right(self._numbers, most, 0, self._size)
        return self._spans[place - 1] if place else None
