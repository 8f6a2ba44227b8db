"""Levels of tasks that follow the success at them."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Task, TrajectoryBatch
from creditflow.data.curriculum import Curriculum, CurriculumRule
from creditflow.errors import DataError
from tests.builders import examples, make_trajectory, step

RULE = CurriculumRule(raise_at=0.7, lower_at=0.2, window=4)


def tasks(**sizes: tuple[int, ...]) -> list[Task]:
    """Tasks of each family, with the given number at each level."""
    return [
        Task(name, ({"role": "user", "content": f"{name} {level} {n}"},), "1", {"level": level})
        for name, by_level in sizes.items()
        for level, size in enumerate(by_level)
        for n in range(size)
    ]


def observed(of: list[Task], drawn: list[int], outcome: float | None) -> TrajectoryBatch:
    """Two trajectories of each drawn task, all with the same outcome."""
    made = []
    for place, index in enumerate(drawn):
        for number in range(2):
            one = make_trajectory(f"{place}-{number}", [step("solver")], outcome, f"{place}")
            one.task = of[index]
            made.append(one)
    return TrajectoryBatch.from_trajectories(made)


def advance(curriculum: Curriculum, of: list[Task], count: int, outcome: float | None) -> list[Task]:
    drawn = curriculum.draw(count)
    curriculum.observe(observed(of, drawn, outcome))
    return [of[index] for index in drawn]


def levels(curriculum: Curriculum) -> dict[str, int]:
    return {name: family["level"] for name, family in curriculum.to_json().items()}


def test_level_rises_and_falls_with_success():
    every = tasks(sums=(8, 8, 8))
    curriculum = Curriculum(every, RULE, seed=0)
    assert {task.extra_info["level"] for task in advance(curriculum, every, 4, 0.6)} == {0}
    assert levels(curriculum) == {"sums": 0}
    advance(curriculum, every, 4, 0.7)
    assert levels(curriculum) == {"sums": 1}
    advance(curriculum, every, 4, 0.1)
    assert levels(curriculum) == {"sums": 1}, "not all four were of level 1, fewer than the window"
    advance(curriculum, every, 4, 0.1)
    assert levels(curriculum) == {"sums": 0}
    for _ in range(6):
        advance(curriculum, every, 8, 1.0)
    assert levels(curriculum) == {"sums": 2}, "the highest level"


def test_level_stays_at_exactly_the_lower_limit():
    every = tasks(sums=(8, 8))
    curriculum = Curriculum(every, CurriculumRule(raise_at=0.7, lower_at=0.25, window=4), seed=0)
    advance(curriculum, every, 4, 1.0)
    advance(curriculum, every, 5, 0.25)  # one of the five is of level 0
    assert levels(curriculum) == {"sums": 1}


def test_passed_levels_are_reviewed():
    every = tasks(sums=(5, 50))
    curriculum = Curriculum(every, RULE, seed=0)
    advance(curriculum, every, 4, 1.0)
    levels = Counter(task.extra_info["level"] for task in advance(curriculum, every, 100, 0.5))
    assert levels == {1: 80, 0: 20}, "a fifth of all drawn tasks, the first four included"


def test_tasks_without_an_outcome_move_no_level():
    every = tasks(sums=(8, 8))
    curriculum = Curriculum(every, RULE, seed=0)
    advance(curriculum, every, 8, None)
    assert curriculum.metrics() == {"curriculum/level/sums": 0.0}


@examples(50)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=3), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.0, 0.5, 1.0])), max_size=8),
    st.integers(0, 7),
    st.booleans(),
)
def test_restored_curriculum_draws_the_same_tasks(sizes, turns, stop, shuffle):
    every = tasks(**{f"family{n}": tuple(by_level) for n, by_level in enumerate(sizes)})
    curriculum = Curriculum(every, RULE, seed=3, shuffle=shuffle)
    kept = json.dumps(curriculum.to_json())
    drawn = []
    for turn, (count, outcome) in enumerate(turns):
        drawn.append([task.text for task in advance(curriculum, every, count, outcome)])
        if turn < stop:
            kept = json.dumps(curriculum.to_json())
    restored = Curriculum(every, RULE, seed=3, shuffle=shuffle)
    restored.restore(json.loads(kept))
    again = [[task.text for task in advance(restored, every, count, outcome)] for count, outcome in turns[stop:]]
    assert again == drawn[stop:]


@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(1, 60))
def test_families_are_drawn_by_their_share(sizes, count):
    every = tasks(**{f"family{n}": (size, size) for n, size in enumerate(sizes)})
    drawn = Counter(every[index].data_source for index in Curriculum(every, RULE, seed=0).draw(count))
    for n, size in enumerate(sizes):
        assert abs(drawn[f"family{n}"] - count * size / sum(sizes)) <= len(sizes)


def test_each_pass_over_a_level_draws_every_task_once():
    every = tasks(sums=(7, 7))
    drawn = Curriculum(every, RULE, seed=1).draw(14)
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == list(range(7))
    assert drawn[:7] != drawn[7:]


def test_tasks_of_one_level_are_refused():
    with pytest.raises(DataError, match=r"data\.curriculum: expected tasks of several levels"):
        Curriculum(tasks(sums=(3,), gcds=(2,)), RULE, seed=0)


@pytest.mark.parametrize("level", ["1", -1, 1.5, True], ids=repr)
def test_level_that_is_no_whole_number_is_refused(level):
    with pytest.raises(DataError, match=r"extra_info\.level: expected a whole number"):
        Curriculum([Task("sums", (), "1", {"level": level})], RULE, seed=0)


def test_state_of_other_families_is_refused():
    state = Curriculum(tasks(sums=(1, 1)), RULE, seed=0).to_json()
    with pytest.raises(DataError, match="the checkpoint has the families sums, the tasks have gcds"):
        Curriculum(tasks(gcds=(1, 1)), RULE, seed=0).restore(state)
