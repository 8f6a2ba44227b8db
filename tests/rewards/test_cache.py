import asyncio
from dataclasses import replace

import numpy as np
import pytest

from creditflow.data import Score
from creditflow.rewards import RewardFunction, RewardManager
from creditflow.rewards.cache import Cache, Keys
from creditflow.rewards.calls import PlacedScore, Returned, RewardCall
from creditflow.rewards.entries import RewardFunctionConfig, load_reward_functions
from tests.rewards.trajectories import a_trajectory, load


def counting(value=0.5, **kwargs):
    asked = []

    def call(*arguments):
        asked.append(arguments[-1].id)
        return value() if callable(value) else value

    return asked, RewardFunction("f", **{"level": "step", "call": call, "version": "v1", "identity": "f", **kwargs})


def returned(value):
    return Returned((PlacedScore(Score(value)),))


def score(manager, *trajectories):
    return asyncio.run(manager.score(trajectories))


def test_repeated_inputs_are_called_once():
    asked, function = counting()
    manager = RewardManager([function])
    report = score(manager, a_trajectory("a"), a_trajectory("b"))
    assert asked == ["a"] * 3
    assert (report.functions[0].calls, report.functions[0].cached, report.functions[0].matched) == (3, 3, 6)
    trajectory = a_trajectory("c")
    report = score(manager, trajectory)
    assert len(asked) == 3
    assert [step.scores["f"] for step in trajectory.steps] == [Score(0.5, version="v1")] * 3
    assert report.metrics()["reward/f/cached"] == 3


CHANGES = {
    "answer": lambda trajectory: setattr(trajectory, "answer", "73"),
    "info": lambda trajectory: trajectory.info.update(seen=1),
    "a step's info": lambda trajectory: trajectory.steps[0].info.update(seen=1),
    "response": lambda trajectory: setattr(trajectory.steps[2], "response", "other"),
    "prompt": lambda trajectory: setattr(trajectory.steps[0], "prompt", "other"),
    "a token": lambda trajectory: setattr(trajectory.steps[1], "response_ids", (5, 7)),
    "a log-prob": lambda trajectory: setattr(trajectory.steps[1], "logprobs", (-1.0, -1.5)),
    "agent": lambda trajectory: setattr(trajectory.steps[1], "agent", "q"),
    "truth": lambda trajectory: setattr(trajectory, "task", replace(trajectory.task, ground_truth="73")),
    "one step less": lambda trajectory: trajectory.steps.pop(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_readable_inputs_change_the_key(what):
    _, function = counting()
    changed, trajectory = a_trajectory(), a_trajectory()
    CHANGES[what](changed)
    calls = [RewardCall(function, read, read.steps[0]) for read in (changed, trajectory)]
    assert Keys().key_for(calls[0]) != Keys().key_for(calls[1])


def test_key_ignores_ids_but_not_step_version_or_level():
    _, function = counting()
    trajectory, other = a_trajectory("a"), a_trajectory("b")
    other.steps[0].scores["g"] = Score(1.0)
    keys = Keys()
    key = keys.key_for(RewardCall(function, trajectory, trajectory.steps[0]))
    assert key == keys.key_for(RewardCall(function, other, other.steps[0]))
    assert key != keys.key_for(RewardCall(function, trajectory, trajectory.steps[1]))
    assert key != keys.key_for(RewardCall(replace(function, version="v2"), trajectory, trajectory.steps[0]))
    assert key != keys.key_for(RewardCall(replace(function, level="outcome"), trajectory))


def test_own_cache_key_merges_equal_inputs():
    trajectories = [a_trajectory("a"), a_trajectory("b", "pp"), a_trajectory("c", answer="73")]
    report = score(RewardManager([load("numeric_match")]), *trajectories)
    assert [trajectory.outcome.value for trajectory in trajectories] == [1.0, 1.0, 0.0]
    assert (report.functions[0].calls, report.functions[0].cached) == (2, 1)


def test_failure_is_tried_again():
    values = iter([None, Score(0.0, status="failed"), 0.5])
    asked, function = counting(lambda: next(values))
    manager = RewardManager([function], 1.0)
    trajectory = a_trajectory(agents="p")
    for status in ("failed", "failed", "ok", "ok"):
        score(manager, trajectory)
        assert trajectory.steps[0].scores["f"].status == status
    assert len(asked) == 3


@pytest.mark.parametrize("kwargs", [{"cache": False}, {"identity": ""}, {"cache_key": lambda *_: {}["key"]}])
def test_uncacheable_functions_are_called_every_time(kwargs):
    asked, function = counting(**kwargs)
    score(RewardManager([function]), a_trajectory("a"), a_trajectory("b"))
    assert len(asked) == 6


@pytest.mark.parametrize(("info", "size"), [({"object": object()}, 1000), ({}, 0)], ids=["no key", "no room"])
def test_uncached_inputs_are_called_every_time(info, size):
    asked, function = counting()
    manager = RewardManager([function], cache_size=size)
    for name in "ab":
        score(manager, a_trajectory(name, agents="p", info=dict(info)))
    assert len(asked) == 2


def test_least_recently_used_answer_is_evicted_first():
    cache = Cache(22)
    keys = [("v", str(i)) for i in range(3)]
    cache.put(keys[0], returned(0.0))
    cache.put(keys[1], returned(0.1))
    assert cache.get(keys[0]) == returned(0.0)
    cache.put(keys[2], returned(0.2))
    assert [cache.get(key) is not None for key in keys] == [True, False, True]


SAME_SOURCE = """
import functools

def at_least(n):
    def check(step, trajectory): return float(len(step.response) >= n)
    return check

easy, hard = at_least(1), at_least(100)

class Checker:
    def __init__(self, value): self.value = value
    def __call__(self, step, trajectory): return self.value

lax, strict = Checker(1.0), Checker(0.0)

def given(value, step, trajectory): return value
def turned(value, step, trajectory): return 1.0 - value

full, none, other = functools.partial(given, 1.0), functools.partial(given, 0.0), functools.partial(turned, 0.5)
"""


def test_functions_with_equal_source_are_distinct(tmp_path):
    for folder, limit in (("a", 1), ("b", 100)):
        (tmp_path / folder).mkdir()
        text = f"LIMIT = {limit}\ndef f(step, trajectory): return float(len(step.response) >= LIMIT)\n"
        (tmp_path / folder / "same.py").write_text(text)
    (tmp_path / "mine.py").write_text(SAME_SOURCE)
    values = {
        "mine.py:easy": 1.0, "mine.py:hard": 0.0, "mine.py:lax": 1.0, "mine.py:strict": 0.0, "mine.py:full": 1.0,
        "mine.py:none": 0.0, "mine.py:other": 0.5, "a/same.py:f": 1.0, "b/same.py:f": 0.0,
    }  # fmt: skip
    functions = load_reward_functions([RewardFunctionConfig(fn=fn, name=fn) for fn in values], tmp_path, ())
    trajectory = a_trajectory()
    score(RewardManager(functions), trajectory)
    assert {name: score.value for name, score in trajectory.steps[0].scores.items()} == values


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([[1, 2], [3, 4]]), np.array([1, 2, 3, 4])),
        (np.float64(1.0), np.int64(4607182418800017408)),
        (np.arange(2000), np.where(np.arange(2000) == 1000, 0, np.arange(2000))),
    ],
)
def test_arrays_that_look_alike_are_distinct(one, other):
    asked, function = counting()
    manager = RewardManager([function])
    for array in (one, other):
        score(manager, a_trajectory(agents="p", info={"array": array}))
    assert len(asked) == 2
    compared, trajectory = load("exact_match"), a_trajectory()
    for truth in (one, other):
        trajectory.task = replace(trajectory.task, ground_truth=truth)
        assert Keys().key_for(RewardCall(compared, trajectory)) is None


def test_cache_capacity_counts_numbers():
    cache = Cache(1000)
    for i in range(100):
        cache.put(("k", str(i)), returned((0.5,) * 40))
    held = [i for i in range(100) if cache.get(("k", str(i)))]
    assert held == list(range(80, 100))  # 50 numbers each: the values, and ten for the entry
    cache.put(("k", "large"), returned((0.5,) * 2000))
    assert cache.get(("k", "large")) is None


def test_shared_trajectory_call_is_made_once(tmp_path):
    (tmp_path / "once.py").write_text(
        "from creditflow import reward\nCALLS = []\n"
        "@reward(level='trajectory')\n"
        "def each(trajectory):\n    CALLS.append(1)\n    return [len(CALLS) / 10] * len(trajectory.steps)\n"
    )
    function = load("sum", tmp_path, args={"parts": [{"fn": "once.py:each", "cache": False}]})
    trajectory = a_trajectory("t", "p" * 50)
    score(RewardManager([function]), trajectory)
    assert {step.scores["sum"].value for step in trajectory.steps} == {0.1}
