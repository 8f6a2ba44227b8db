"""Tests of the enclosure and the order of spans against plain definitions."""

from hypothesis import given
from hypothesis import strategies as st

from creditflow.plugins.traces.span_tree import CIRCLE, MISSING, MOST_BEFORE, before, build_tree
from tests.builders import examples


def enclosing(parents: list[int], at: int) -> list[int]:
    found = []
    while (at := parents[at]) >= 0:
        found.append(at)
    return found


def plainly_before(parents: list[int], start: list[int], end: list[int], chosen: list[int], at: int) -> set[int]:
    """Compute the predecessors directly from the definition, with a full search."""
    for around in [*enclosing(parents, at), -1]:
        over = [call for call in chosen if end[call] <= start[at] and around in (*enclosing(parents, call), -1)]
        if over:
            return {call for call in over if all(end[call] > start[other] for other in over)}
    return set()


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    n = draw(st.integers(1, 14))
    parents = [draw(st.integers(-1, at - 1)) for at in range(n)]
    start = [draw(st.integers(0, 20)) for _ in range(n)]
    end = [begin + draw(st.integers(1, 8)) for begin in start]
    return parents, start, end, [at for at in range(n) if draw(st.booleans())]


@examples(500)
@given(traces())
def test_before_matches_the_plain_definition(trace: tuple[list[int], list[int], list[int], list[int]]) -> None:
    parents, start, end, chosen = trace
    ids = [str(at) for at in range(len(parents))]
    tree = build_tree(ids, [None if parent < 0 else str(parent) for parent in parents])
    follows = before(tree, start, end, chosen)
    for at in chosen:
        found = follows.get(at, [])
        assert len(set(found)) == len(found)
        assert set(found) == plainly_before(parents, start, end, chosen, at)
        assert all(end[parent] <= start[at] for parent in found)


def test_cycle_is_cut_at_its_first_span() -> None:
    tree = build_tree(["a", "b", "c", "d"], ["c", "a", "b", "c"])
    assert tree.parents == [-1, 0, 1, 2]
    assert tree.mended == {0: CIRCLE}
    assert build_tree(["a"], ["a"]).parents == [-1]


def test_missing_parent_is_removed() -> None:
    tree = build_tree(["a", "b"], ["nobody", "a"])
    assert tree.parents == [-1, 0]
    assert tree.mended == {0: MISSING}


def test_parents_by_time_are_limited_to_the_last_ended() -> None:
    n = 500
    start = [0] * n + [1000] * n
    end = [1 + at for at in range(n)] + [2000] * n
    follows = before(build_tree([str(at) for at in range(2 * n)], [None] * (2 * n)), start, end, range(2 * n))
    assert all(follows[at] == list(range(n - MOST_BEFORE, n)) for at in range(n, 2 * n))
