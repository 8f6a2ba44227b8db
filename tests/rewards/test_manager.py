import asyncio
import math
import re
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from creditflow.data import Score, TrajectoryBatch
from creditflow.errors import TooManyFailedScores
from creditflow.rewards import RewardFunction, RewardManager
from tests.builders import unlocated
from tests.rewards.processes import HANG_S
from tests.rewards.trajectories import Mute, NoException, a_trajectory, score


def of_steps(call, **kwargs) -> RewardFunction:
    return RewardFunction("f", "step", call, **kwargs)


def one_score(value, function=None) -> Score:
    trajectory = a_trajectory(agents="e")
    score([function or of_steps(lambda step, trajectory: value)], [trajectory])
    return trajectory.steps[0].scores["f"]


def test_each_level_fills_its_own_scores():
    trajectory = a_trajectory()
    score(
        [
            RewardFunction("place", "step", lambda step, trajectory: step.index / 2),
            RewardFunction("all", "trajectory", lambda trajectory: [0.25, 0.5, 0.75], weight=3.0, version="v1"),
            RewardFunction("right", "outcome", lambda trajectory: trajectory.answer == "72", range=(-1.0, 1.0)),
        ],
        [trajectory],
    )
    assert [step.scores["place"] for step in trajectory.steps] == [Score(0.0), Score(0.5), Score(1.0)]
    assert [step.scores["all"] for step in trajectory.steps] == [
        Score(value, weight=3.0, version="v1") for value in (0.25, 0.5, 0.75)
    ]
    assert trajectory.outcome == Score(1.0, range=(-1.0, 1.0))
    assert list(trajectory.steps[0].scores) == ["place", "all"]


def test_agents_and_when_select_the_steps():
    asked = []

    def is_second_turn(step):
        asked.append(step.index)
        return np.bool_(step.turn % 2)

    trajectory = a_trajectory(agents="peepv")
    score(
        [
            of_steps(lambda *_: 1.0, agent_match=re.compile("^e$"), when=lambda step: step.turn % 2 == 1),
            RewardFunction("g", "trajectory", lambda trajectory: [0.0, 0.1, 0.2, 0.3, 0.4], re.compile("v|p")),
            RewardFunction("h", "trajectory", lambda trajectory: [0.5, 0.6, 0.7, 0.8, 0.9], when=is_second_turn),
            RewardFunction("no agent", "trajectory", lambda trajectory: 1 / 0, re.compile("^x$")),
            RewardFunction("no step", "trajectory", lambda trajectory: 1 / 0, when=lambda step: False),
        ],
        [trajectory],
    )
    values = [{name: score.value for name, score in step.scores.items()} for step in trajectory.steps]
    assert values == [{"g": 0.0}, {}, {"f": 1.0, "h": 0.7}, {"g": 0.3, "h": 0.8}, {"g": 0.4}]
    assert asked == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        (lambda step: 1 / 0, "`when` raised ZeroDivisionError: division by zero"),
        (lambda step: None, "expected `when` to answer True or False, got None"),
    ],
)
@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_failing_when_fails_the_score(when, reason, level):
    trajectory = a_trajectory(agents="pe")
    report = score([RewardFunction("f", level, lambda *_: 1 / 0, when=when, agent_match=re.compile("e"))], [trajectory])
    assert trajectory.steps[0].scores == {}
    failed = trajectory.steps[1].scores["f"]
    assert (failed.status, unlocated(failed.reason)) == ("failed", reason)
    assert [(of.matched, of.failed) for of in report.functions] == [(1, 1)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(False), 0.0),
        (np.array(0.25), 0.25),
        (Fraction(1, 4), 0.25),
        ([0.5, 1], (0.5, 1.0)),
        ((0.5, True), (0.5, 1.0)),
        (np.array([0.25, 0.75]), (0.25, 0.75)),
        (Decimal("0.5"), 0.5),
        ({"score": 0.5, "acc": True}, 0.5),
        (0.1 * 0.1 * 100, 1.0),
        (-1e-17, 0.0),
        ([1.0000009, -0.0000009], (1.0, 0.0)),
        (Score(1 + 1e-9), 1.0),
        (Score(7.0, range=(0.0, 10.0)), 7.0),
    ],
)
def test_all_kinds_of_numbers_and_token_values_are_accepted(value, expected):
    result = one_score(value)
    assert result.status == "ok"
    assert result.value == expected
    assert type(result.value) is type(expected)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "expected a number, got nothing"),
        ("1.0", "expected a number, got a str"),
        ({}, "expected a number, got a dict"),
        (float("nan"), r"expected a value in \[0, 1\], got nan"),
        (float("inf"), r"expected a value in \[0, 1\], got inf"),
        (10**400, r"expected a value in \[0, 1\], got inf"),
        (1.0000021, r"expected a value in \[0, 1\], got 1\.0000021$"),
        (-1.1e-6, r"expected a value in \[0, 1\], got -1\.1e-06$"),
        ([1.0000021, 0], r"expected a value in \[0, 1\], got 1\.0000021$"),
        (Decimal("NaN"), r"expected a value in \[0, 1\], got nan"),
        ({"acc": True}, r"expected a number, got a dict; of a dict, the number under 'score' is read"),
        ({"score": None}, "expected a number, got nothing"),
        ((0.5, "why"), r"expected a number, got a number with a text; .* Score\(value, reason=\.\.\.\)"),
        (1.01, r"expected a value in \[0, 1\], got 1.01"),
        (-1, r"expected a value in \[0, 1\], got -1"),
        ([0.5], "expected one value for each of 2 response tokens, got 1"),
        ([], "expected one value for each of 2 response tokens, got 0"),
        ([0.5, None], "expected a number, got nothing"),
        ([0.5, float("nan")], r"expected a value in \[0, 1\], got nan"),
        ([[0.5], [0.5]], "expected a number, got a list"),
        (Score(11.0, range=(0.0, 10.0)), r"expected a value in \[0, 10\], got 11"),
        (Score(1.0, range=(1.0, 1.0)), "expected a Score with a range of finite"),
        (Score(float("nan")), r"expected a value in \[0, 1\], got nan"),
        (Score(0.9, status="timeout", reason="the judge slept"), "the judge slept$"),
    ],
)
def test_invalid_value_fails_with_its_reason(value, reason):
    result = one_score(value)
    assert result.status == getattr(value, "status", "failed").replace("ok", "failed")
    assert math.isnan(result.rescaled)
    assert re.match(reason, result.reason)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (-2e-3, -1e-3), (0.0, 1e6)])
def test_rounding_beyond_a_bound_is_clipped(low, high):
    width = high - low
    within, beyond = 0.99e-6 * width, 1.01e-6 * width
    for bound, away in ((low, -1.0), (high, 1.0)):
        for level in ("step", "outcome"):
            for far, status in ((within, "ok"), (beyond, "failed")):
                trajectory = a_trajectory(agents="e")
                value = bound + away * far
                score([RewardFunction("f", level, lambda *_, value=value: value, range=(low, high))], [trajectory])
                got = trajectory.outcome if level == "outcome" else trajectory.steps[0].scores["f"]
                assert got.status == status
                assert got.value == bound if status == "ok" else repr(value) in got.reason


def test_unawaited_coroutine_is_named():
    coroutine = asyncio.sleep(0)
    reason = "expected a number, got a coroutine; an `await` or an `async def` is missing"
    assert one_score(coroutine).reason == reason
    reason = one_score(None, of_steps(lambda *_: coroutine.lower())).reason
    assert reason.startswith("AttributeError: 'coroutine' object has no attribute 'lower'; an `await` is missing (")
    coroutine.close()


def test_token_values_without_tokens_fail():
    trajectory = a_trajectory(agents="e")
    trajectory.steps[0].response_ids = trajectory.steps[0].response_mask = trajectory.steps[0].logprobs = ()
    score([of_steps(lambda step, trajectory: [])], [trajectory])
    assert trajectory.steps[0].scores["f"].status == "failed"


def test_exception_fails_one_score():
    def sometimes(step, trajectory):
        if step.index == 1:
            raise ValueError("no\nsuch thing")
        return 1.0

    trajectory = a_trajectory()
    report = score([of_steps(sometimes)], [trajectory])
    assert [step.scores["f"].status for step in trajectory.steps] == ["ok", "failed", "ok"]
    line = sometimes.__code__.co_firstlineno + 2
    where = f"ValueError: no such thing (test_manager.py:{line} in sometimes)"
    assert trajectory.steps[1].scores["f"].reason == where
    assert report.functions[0].reasons == (f"f, step t/1: {where}",)
    (traceback,) = trajectory.info["tracebacks"].values()
    assert traceback.startswith("Traceback (most recent call last):")
    assert traceback.endswith("ValueError: no\nsuch thing\n")


def test_score_gets_weight_range_and_version_of_its_function():
    function = of_steps(
        lambda step, trajectory: Score(-0.5, reason="half wrong", seconds=9.0),
        weight=2.0,
        range=(-1.0, 1.0),
        version="v",
    )
    assert one_score(None, function) == Score(-0.5, (-1.0, 1.0), 2.0, "ok", "half wrong", 0.0, "v")


@pytest.mark.parametrize(
    ("answer", "statuses"),
    [
        *[
            (lambda value=value: value, ["failed"] * 3)
            for value in ([0.5, 0.5], [0.5] * 4, 0.5, None, "abc", {1, 2, 3})
        ],
        (lambda: 1 / 0, ["failed"] * 3),
        (lambda: [0.5, 2.0, Score(1.0)], ["ok", "failed", "ok"]),
    ],
)
def test_malformed_list_fails_all_steps_and_a_bad_entry_one(answer, statuses):
    trajectory = a_trajectory()
    report = score([RewardFunction("g", "trajectory", lambda trajectory: answer())], [trajectory])
    assert [step.scores["g"].status for step in trajectory.steps] == statuses
    assert (report.functions[0].matched, report.functions[0].failed) == (3, statuses.count("failed"))


def test_outcome_is_one_number():
    trajectory = a_trajectory()
    score([RewardFunction("o", "outcome", lambda trajectory: [0.5, 0.5])], [trajectory])
    assert trajectory.outcome.status == "failed"
    assert math.isnan(TrajectoryBatch.from_trajectories([trajectory]).outcome[0])


def test_failed_trajectories_are_not_scored():
    trajectory = a_trajectory(status="failed", answer=None)
    functions = [of_steps(lambda step, trajectory: 1.0), RewardFunction("o", "outcome", lambda t: 1.0)]
    report = score(functions, [trajectory])
    assert trajectory.outcome is None
    assert all(step.scores == {} for step in trajectory.steps)
    assert report.failed_frac == score([], [a_trajectory()]).failed_frac == score(functions, []).failed_frac == 0.0


def test_agent_error_gives_the_worst_outcome_without_a_call():
    asked = []
    trajectory = a_trajectory(answer=None, info={"agent_error": "no move in the reply"})
    report = score(
        [of_steps(lambda step, trajectory: 1.0), RewardFunction("o", "outcome", asked.append, version="v")],
        [trajectory],
    )
    assert trajectory.outcome == Score(0.0, reason="the agents went wrong: no move in the reply", version="v")
    assert asked == []
    assert trajectory.steps[0].scores["f"].value == 1.0
    assert report.metrics()["reward/o/mean"] == 0.0


def test_truncated_trajectory_without_answer_scores_zero():
    right = RewardFunction("o", "outcome", lambda trajectory: float(trajectory.answer == "72"))
    answered, ended = a_trajectory("a", status="truncated"), a_trajectory("b", status="truncated", answer=None)
    ended.info["ended_early"] = "a's prompt is too long"
    score([right], [answered, ended])
    assert answered.outcome == Score(1.0)
    assert ended.outcome == Score(0.0, reason="truncated before there was an answer: a's prompt is too long")


@pytest.mark.parametrize(("limit", "most"), [({}, 30), ({"max_in_flight": 5}, 5)])
def test_async_calls_run_at_the_same_time_up_to_a_limit(limit, most):
    running, counts, arrived = 0, [], asyncio.Event()

    async def judge(step, trajectory):
        nonlocal running
        running += 1
        counts.append(running)
        if running == most:
            arrived.set()
        await asyncio.wait_for(arrived.wait(), timeout=HANG_S)  # fewer calls at the same time would wait here forever
        await asyncio.sleep(0.001)
        running -= 1
        return 0.5

    trajectories = [a_trajectory(str(i)) for i in range(10)]
    functions = [of_steps(judge, is_async=True), RewardFunction("g", "step", lambda step, trajectory: 1.0)]
    report = score(functions, trajectories, **limit)
    assert max(counts) == most
    values = [[(name, score.value) for name, score in step.scores.items()] for t in trajectories for step in t.steps]
    assert values == [[("f", 0.5), ("g", 1.0)]] * 30
    assert report.failed_frac == 0.0


def test_metrics_match_the_report():
    def half(step, trajectory):
        return {0: 0.5, 1: 1.0}[step.index]

    trajectory = a_trajectory()
    never = RewardFunction("n", "step", lambda step, trajectory: None, agent_match=re.compile("p"))
    metrics = score([of_steps(half), RewardFunction("o", "outcome", lambda t: 1.0), never], [trajectory]).metrics()
    assert metrics["reward/f/mean"] == 0.75
    assert metrics["reward/f/failed_frac"] == pytest.approx(1 / 3)
    assert metrics["reward/o/mean"] == 1.0
    assert "reward/n/mean" not in metrics
    assert metrics["reward/n/failed_frac"] == 1.0
    assert metrics["reward/failed_frac"] == 0.4
    assert metrics["timing/reward_s"] >= metrics["timing/reward_s/f"] > 0
    assert {step.scores["f"].seconds for step in trajectory.steps} == {0.0}  # scores hold no clock readings
    timings = {key for key in metrics if key.startswith("timing/")}
    assert timings == {f"timing/reward_s{name}" for name in ("", "/f", "/n", "/o")}
    assert all(math.isfinite(value) for value in metrics.values())


def test_too_many_failures_stop_with_distinct_reasons():
    def bad(step, trajectory):
        raise ValueError("no key" if step.index else "no net")

    trajectory = a_trajectory()
    with pytest.raises(TooManyFailedScores) as error:
        score([of_steps(bad)], [trajectory], max_failed_frac=0.2)
    message = str(error.value)
    assert message.startswith("more than reward.max_failed_frac=0.2 of a function's scores failed: ")
    assert (message.count("no key"), message.count("no net")) == (1, 1)
    assert trajectory.steps[0].scores["f"].status == "failed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(3), "it tried to end the process: sys.exit(3)"),
        (NoException("a panic"), "NoException: a panic"),
        (Mute(), "Mute"),
        (asyncio.CancelledError(), "it cancelled itself"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_exceptions_of_functions_never_end_the_run(error, reason, is_async):
    def plain(step, trajectory):
        if step.index == 1:
            raise error
        return 1.0

    async def waiting(step, trajectory):
        return plain(step, trajectory)

    trajectory = a_trajectory()
    score([of_steps(waiting if is_async else plain, is_async=is_async)], [trajectory])
    assert [step.scores["f"].status for step in trajectory.steps] == ["ok", "failed", "ok"]
    if is_async or not isinstance(error, asyncio.CancelledError):
        assert unlocated(trajectory.steps[1].scores["f"].reason) == reason


def test_reused_list_is_copied_at_once():
    shared = [0.0, 0.0]

    def graded(step, trajectory):
        shared[:] = [step.index / 10, 0.5]
        return shared

    def wrapped(step, trajectory):
        return Score(graded(step, trajectory))

    for function in (graded, wrapped):
        trajectory = a_trajectory()
        score([of_steps(function)], [trajectory])
        assert [step.scores["f"].value for step in trajectory.steps] == [(0.0, 0.5), (0.1, 0.5), (0.2, 0.5)]


def test_progress_reports_every_answer():
    reported = []
    manager = RewardManager([of_steps(lambda step, trajectory: 1.0)])
    asyncio.run(manager.score([a_trajectory()], progress=lambda *counts: reported.append(counts)))
    assert reported == [(1, 3), (2, 3), (3, 3)]


def test_slow_async_function_is_timed_out_and_can_clean_up():
    tidied = []

    async def sleeps(step, trajectory):
        try:
            await asyncio.sleep(1000 if step.index == 1 else 0)
        finally:
            await asyncio.sleep(0.01)
            tidied.append(step.index)
        return 1.0

    trajectory = a_trajectory()
    report = score([of_steps(sleeps, is_async=True, timeout=1.0)], [trajectory])
    statuses = [(step.scores["f"].status, step.scores["f"].reason) for step in trajectory.steps]
    assert statuses == [("ok", ""), ("timeout", "took longer than 1 s"), ("ok", "")]
    assert sorted(tidied) == [0, 1, 2]
    assert report.functions[0].timeouts == 1


class Counting:
    """Counts its calls; its `aclose` fails."""

    calls, ended = 0, False

    def __call__(self, step, trajectory):
        self.calls += 1
        return 1.0

    def metrics(self):
        return {"requests": float(self.calls)}

    async def aclose(self):
        self.ended = True
        raise ConnectionError("gone")


def test_failing_aclose_does_not_stop_the_other_ones():
    first, second, closed = Counting(), Counting(), []

    backend = SimpleNamespace(close=lambda: closed.append(True))
    functions = [of_steps(first, instance=first), RewardFunction("g", "step", second, instance=second)]

    async def run():
        async with RewardManager(functions, backend=backend).open():
            pass

    with pytest.raises(ConnectionError):
        asyncio.run(run())
    assert (first.ended, second.ended, closed) == (True, True, [True])
