"""Spans as a forest: who encloses whom, and what had ended where before something began.

It knows positions, parents and times; not what spans mean. All of it is iterative, and takes n log n for n spans of any
depth.
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
"""So many steps, those that ended last, may be somebody's parents by time: parallel branches that all end before all of
another set begin would have as many edges as the product."""


@dataclass(frozen=True, slots=True)
class Forest:
    """n spans of one trace, those that enclose before those that are enclosed."""

    parents: list[int]
    """[n] of each span the position of the one that encloses it; -1: none."""
    order: list[int]
    """[n] all positions, parents before children, the children of one span by their own positions."""
    mended: dict[int, str]
    """By position: what was wrong with its parent, which it has no longer."""

    def inherited(self, own: Sequence[T | None]) -> list[T | None]:
        """[n] each span's own value, or that of the nearest one around it that has one."""
        found, parents = list(own), self.parents
        for at in self.order:
            if found[at] is None and parents[at] >= 0:
                found[at] = found[parents[at]]
        return found


def forest_of(ids: Sequence[str], parent_ids: Sequence[str | None]) -> Forest:
    """The forest that the parents' names make.

    Where an id stands twice, the first has the children. A parent that is not there, and one of those that would go
    round in a circle (the first by position), is none, and is told in `mended`.
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
    """Of those that have any; of -1 the roots."""
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
    return Forest(parents, order, mended)


def _closing_circles(parents: Sequence[int]) -> list[int]:
    """Of each circle its first position."""
    found, seen_from = [], [-1] * len(parents)
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
            found.append(min(circle))
    return found


def before(forest: Forest, start: Sequence[int], end: Sequence[int], chosen: Sequence[bool]) -> list[tuple[int, ...]]:
    """[n] for each chosen span, the chosen ones that it follows; empty for others.

    `start`, `end`: [n] times, `start < end`. What lies inside one span, taken together, is a unit. A span looks for the
    nearest span around it (the trace itself at last) inside of which a whole unit had ended when it began; of the units
    there it follows those that none of the others had followed; and of each of these units those of its spans that
    nothing in it came after. So a call in an agent's loop follows the one before it in the same loop, whatever goes on
    beside it; the first call of a branch follows what came before the branches; and what comes after them follows the
    last of each. At most `MOST_EXITS` each, those that ended last.
    """
    units = _units(forest, start, end, chosen)
    n = len(forest.parents)
    inside: dict[int, list[int]] = {n: []}
    """Of each span the units directly inside; of n those of the trace itself."""
    for at in forest.order:
        if at in units:
            around = forest.parents[at] if forest.parents[at] >= 0 else n
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
        if at < 0:  # all inside has been gone through
            path.pop()
            continue
        if at < n and chosen[at] and (nearest := path.deepest(start[at])) is not None:
            if nearest not in siblings:
                siblings[nearest] = _Siblings.of([units[unit] for unit in inside[nearest]])
            follows[at] = siblings[nearest].last_before(start[at], end)
        if at in inside:
            path.push(min([units[unit].ended for unit in inside[at]], default=NEVER), at)
            stack.append(-1)
            stack.extend(reversed(inside[at]))
    return follows


@dataclass(slots=True)
class _Unit:
    """All chosen spans at and inside one span."""

    began: int
    """The first beginning."""
    last_began: int
    ended: int
    """The last end."""
    exits: tuple[int, ...]
    """Those that ended after all had begun: nothing in the unit came after them."""


def _units(forest: Forest, start: Sequence[int], end: Sequence[int], chosen: Sequence[bool]) -> dict[int, _Unit]:
    """The units of the spans where something is chosen."""
    units: dict[int, _Unit] = {}
    parts: dict[int, list[_Unit]] = {}
    """Of the spans that enclose any, the units directly inside; gone once the span's own is made."""
    for at in reversed(forest.order):
        inner = parts.pop(at, None)
        if chosen[at]:
            own = _Unit(start[at], start[at], end[at], (at,))
            unit = _joined([*inner, own], end) if inner else own
        elif inner:
            unit = inner[0] if len(inner) == 1 else _joined(inner, end)
        else:
            continue
        units[at] = unit
        parent = forest.parents[at]
        if parent in parts:
            parts[parent].append(unit)
        elif parent >= 0:
            parts[parent] = [unit]
    return units


def _joined(parts: Sequence[_Unit], end: Sequence[int]) -> _Unit:
    last_began = max([part.last_began for part in parts])
    late = [exit for part in parts for exit in part.exits if end[exit] > last_began]
    return _Unit(min([part.began for part in parts]), last_began, max([part.ended for part in parts]), _last(late, end))


def _last(spans: list[int], end: Sequence[int]) -> tuple[int, ...]:
    """At most `MOST_EXITS`, those that ended last."""
    return tuple(spans if len(spans) <= MOST_EXITS else heapq.nlargest(MOST_EXITS, spans, key=end.__getitem__))


_BEGAN, _ENDED = attrgetter("began"), attrgetter("ended")


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The units directly inside one span, by their ends."""

    units: list[_Unit]
    ends: list[int]
    began_by: list[int]
    """The latest first beginning of a unit up to each."""

    @classmethod
    def of(cls, units: list[_Unit]) -> _Siblings:
        units = sorted(units, key=_ENDED)
        return cls(units, list(map(_ENDED, units)), list(accumulate(map(_BEGAN, units), max)))

    def last_before(self, time: int, end: Sequence[int]) -> tuple[int, ...]:
        """The exits of those units that had ended by `time` and that no other such unit came after."""
        stop = bisect_right(self.ends, time)
        first = bisect_right(self.ends, self.began_by[stop - 1], 0, stop)
        if first == stop - 1:
            return self.units[first].exits
        recent = self.units[max(first, stop - MOST_EXITS) : stop]
        return _last([exit for unit in recent for exit in unit.exits], end)


class _Path:
    """Numbers from the root down to where one is, and the deepest that is at most a given one.

    Only a number that no deeper one undercuts can be the answer: these rise with depth, so they are bisected. A push
    overwrites one place of them, which a pop restores.
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
