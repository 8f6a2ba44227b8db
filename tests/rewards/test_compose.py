import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Score
from creditflow.errors import RewardError
from creditflow.rewards import outcome, reward
from creditflow.rewards.execution.backends import make_backend
from tests.builders import unlocated
from tests.rewards.trajectories import a_trajectory, load, score

ASKED: list[str] = []
NUMBERS = itertools.count()


@reward
class Says:
    """A part with a score set by the test."""

    def __init__(self, value=0.0, name="says", range=(0.0, 1.0)):
        self.value, self.name, self.range = value, name, tuple(range)

    def __call__(self, step, trajectory):
        ASKED.append(self.name)
        if self.value == "fails":
            raise ValueError("no such thing")
        return self.value


@outcome
def whole(trajectory):
    return 0.75


@reward(level="trajectory")
def each(trajectory):
    return [step.index / 10 for step in trajectory.steps]


def part(value, name=None, **more):
    name = name or f"says {next(NUMBERS)}"
    args = {"value": value, "name": name} | ({"range": more.pop("range")} if "range" in more else {})
    return {"fn": f"{__name__}:Says", "name": name, "args": args, **more}


def loaded(fn, **entry):
    return load(fn, agents=("p", "e", "v"), **entry)


def scored(fn, trajectory=None, **args) -> Score:
    trajectory = trajectory or a_trajectory(agents="p")
    ASKED.clear()
    score([loaded(fn, args=args)], [trajectory])
    return trajectory.steps[0].scores[fn]


def test_sum_weighs_rescaled_parts():
    parts = [part(0.5, "a", weight=3.0), part(-1.0, "b", range=[-1, 1]), part(5, "c", range=[0, 10])]
    score = scored("sum", parts=parts)
    assert score.value == 3 * 0.5 + 0.0 + 0.5
    assert score.range == (0.0, 5.0)
    assert score.rescaled == 2.0 / 5.0
    assert score.reason == "a 0.5, b -1, c 5"


def test_negative_weight_is_a_penalty():
    score = scored("sum", parts=[part(1.0, "right"), part(1.0, "long", weight=-0.5)])
    assert (score.value, score.range) == (0.5, (-0.5, 1.0))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-5, 5)), min_size=1, max_size=5))
def test_sum_stays_in_its_range(pairs):
    if not any(weight for _, weight in pairs):
        return
    score = scored("sum", parts=[part(value, weight=weight) for value, weight in pairs])
    assert score.status == "ok"
    assert math.isclose(score.value, sum(value * weight for value, weight in pairs), abs_tol=1e-12)


def test_failed_part_fails_the_whole_with_its_name():
    score = scored("sum", parts=[part(0.0, "a"), part("fails", "b")])
    assert (score.status, unlocated(score.reason)) == ("failed", "b: ValueError: no such thing")


def test_token_values_are_combined_token_by_token():
    assert scored("sum", parts=[part([0.0, 1.0]), part(0.5)]).value == (0.5, 1.5)
    assert scored("sum", parts=[part([0.5, 1.0]), part([0.5, 0.0], weight=2)]).value == (1.5, 1.0)


def test_trajectory_function_can_be_part_of_a_step_score():
    trajectory = a_trajectory()
    scored("sum", trajectory, parts=[{"fn": f"{__name__}:each"}, part(0.5)])
    assert [step.scores["sum"].value for step in trajectory.steps] == [0.5, 0.6, 0.7]


def test_outcome_sum_compares_the_answer():
    trajectory = a_trajectory(answer="72")
    parts = [{"fn": "numeric_match"}, {"fn": f"{__name__}:whole"}]
    score([loaded("sum", level="outcome", args={"parts": parts})], [trajectory])
    assert trajectory.outcome.value == 1.75


def test_step_sum_compares_the_response():
    trajectory = a_trajectory(agents="p")
    trajectory.steps[0].response = "it is 72"
    assert scored("sum", trajectory, parts=[{"fn": "numeric_match"}]).value == 1.0


def test_parts_run_on_the_backend():
    functions = [loaded("sum", args={"parts": [part(1.0), part(1.0, "other")]})]
    backend, trajectory = make_backend("process", functions), a_trajectory()
    ASKED.clear()
    report = score(functions, [trajectory], backend=backend)
    backend.close()
    assert ASKED == []  # not here
    assert [step.scores["sum"].value for step in trajectory.steps] == [2.0] * 3
    assert report.functions[0].calls == 6


def test_weights_and_parts_change_the_version():
    def version(**args):
        return loaded("sum", args=args).version

    one = version(parts=[part(0.5, "a")])
    assert one == version(parts=[part(0.5, "a")])
    others = [[part(0.5, "a", weight=2.0)], [part(0.25, "a")], [part(0.5, "a"), part(0.5, "b")]]
    assert len({one, *(version(parts=parts) for parts in others)}) == 4


@pytest.mark.parametrize(
    ("fn", "entry", "message"),
    [
        ("sum", {}, r"reward\.functions\[0\] \(sum\): expected args with `parts`"),
        ("sum", {"args": {"parts": []}}, "expected args with `parts`"),
        ("sum", {"args": {"parts": ["judge"]}}, r"parts\[0\]: expected a function \{fn: ..., args: ...\}, got 'judge'"),
        ("sum", {"args": {"parts": [{"fn": "exact_mach"}]}}, r"parts\[0\]\.fn: .*did you mean 'exact_match'"),
        (
            "sum",
            {"args": {"parts": [{"fn": "exact_match", "wight": 1}]}},
            r"unknown key '.*parts\[0\]\.wight' \(did you mean '.*parts\[0\]\.weight'\?\)",
        ),
        ("sum", {"args": {"parts": [part(1.0, weight=0.0)]}}, r"low < high, got \(0"),
        ("sum", {"args": {"parts": [part(1.0, "a"), part(1.0, "a")]}}, "the name 'a' is taken by"),
        ("sum", {"args": {"parts": [part(1.0, timeout="soon")]}}, r"parts\[0\]\.timeout: expected .*, got 'soon'"),
        ("sum", {"args": {"parts": [{"fn": 5}]}}, "expected a name|no ready-made reward function '5'"),
        ("sum", {"args": {"parts": [part(1.0, agent_match="p")]}}, "agent_match belongs to the sum"),
        ("sum", {"args": {"parts": [part(1.0, when="f.py:g")]}}, "when belongs to the sum"),
        ("sum", {"args": {"parts": [{"fn": f"{__name__}:whole"}]}}, "level outcome, its sum of level step"),
        ("sum", {"level": "trajectory", "args": {"parts": [part(1.0)]}}, "expected level step or outcome"),
        ("sum", {"args": {"parts": [part(1.0)], "above": 1}}, "`parts` .a list of functions. and nothing else"),
        ("sum", {"args": {"parts": [{"fn": "sum", "args": {"parts": [part(1.0)]}}]}}, "a part cannot be a sum"),
        ("gate", {}, "no ready-made reward function 'gate'; removed in 0.1: write a function"),
        ("summ", {}, "did you mean 'sum'"),
    ],
)
def test_invalid_sum_is_refused(fn, entry, message):
    with pytest.raises(RewardError, match=message):
        loaded(fn, **entry)


def test_timed_out_part_times_out_the_whole():
    score = scored("sum", parts=[part(1.0, "a"), {"fn": f"{__name__}:is_late"}])
    assert (score.status, score.reason) == ("timeout", "is_late: took longer than 5 s")


@reward
def is_late(step, trajectory):
    return Score(0.0, status="timeout", reason="took longer than 5 s")
