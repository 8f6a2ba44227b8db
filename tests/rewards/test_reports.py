"""Tests of merging the reports of many scorings, possibly from several processes, into one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.errors import TooManyFailedScores
from creditflow.monitoring.notices import failure_events, failure_summary, rollout_events
from creditflow.rewards.manager import FunctionReport, ScoringReport, expect_few_failures
from tests.builders import batch_of, make_trajectory


def function(name="f", matched=4, failed=0, mean=0.5, level="step", **more):
    reasons = more.pop("reasons", (f"{name}, step t.0: broken",) if failed else ())
    return FunctionReport(name, level, matched, failed, mean if matched > failed else math.nan, 1.5, reasons, **more)


def merged(*functions):
    (report,) = ScoringReport.merge([ScoringReport((f,), 1.0) for f in functions]).functions
    return report


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)).filter(lambda row: row[1] <= row[0]),
        min_size=1,
        max_size=5,
    )
)
def test_merge_adds_counts_and_weights_means(rows):
    report = merged(
        *(
            function("f", n, bad, mean, timeouts=bad, calls=n, cached=n - bad, extra={"acc": (mean * n, n)})
            for n, bad, mean in rows
        )
    )
    matched, failed = sum(n for n, _, _ in rows), sum(bad for _, bad, _ in rows)
    assert (report.matched, report.failed, report.timeouts, report.calls) == (matched, failed, failed, matched)
    assert (report.cached, report.seconds) == (matched - failed, 1.5 * len(rows))
    assert report.extra["acc"] == (pytest.approx(sum(mean * n for n, _, mean in rows)), matched)
    values = [mean for n, bad, mean in rows for _ in range(n - bad)]
    assert report.mean == pytest.approx(sum(values) / len(values) if values else math.nan, nan_ok=True)


def test_merge_groups_by_name_and_level_in_order():
    reports = [
        ScoringReport((function("f"), function("out", level="outcome")), 1.0),
        ScoringReport((), 0.0),
        ScoringReport((function("g"), function("f"), function("out", level="outcome")), 2.0),
    ]
    report = ScoringReport.merge(reports)
    assert [(f.name, f.level, f.matched) for f in report.functions] == [
        ("f", "step", 8), ("out", "outcome", 8), ("g", "step", 4),
    ]  # fmt: skip
    assert report.seconds == report.metrics()["timing/reward_s"] == 3.0
    assert ScoringReport.merge([]) == ScoringReport((), 0.0)
    assert ScoringReport.merge([report]) == report


def test_merge_keeps_the_first_distinct_reasons():
    seen = ("step a.0: slow", "step b.0: slow", "step b.1: gone: 503", "trajectory c: no", "step c.0: odd")
    report = merged(*(function(failed=1, reasons=(reason,)) for reason in seen))
    assert report.reasons == ("step a.0: slow", "step b.1: gone: 503", "trajectory c: no")


def test_merge_adds_counters_except_maxima():
    report = merged(
        function(counted={"requests": 2.0, "latency_max_s": 0.5}),
        function(counted={"requests": 3.0, "latency_max_s": 2.0}),
        function(counted={"requests": 0.0, "part/cost": 1.0}),
    )
    assert report.counted == {"requests": 5.0, "latency_max_s": 2.0, "part/cost": 1.0}


def test_too_many_failures_raise_with_the_first_reasons():
    report = ScoringReport((function(matched=10, failed=2), function("out", 10, 1, level="outcome")), 1.0)
    expect_few_failures(report, 0.2)
    with pytest.raises(
        TooManyFailedScores,
        match=r"more than reward\.max_failed_frac=0\.1 of a function's scores failed: f 2 of 10 \(20%\); .*broken",
    ):
        expect_few_failures(report, 0.1)
    alone = ScoringReport((function(matched=90), function("out", 10, 3, level="outcome")), 1.0)
    with pytest.raises(TooManyFailedScores, match=r"out 3 of 10 \(30%\)"):
        expect_few_failures(alone, 0.2)


def test_failure_limit_holds_for_each_function():
    quiet = [function(name, matched=160) for name in ("a", "b", "c")]
    report = ScoringReport((*quiet, function("writer", matched=32, failed=29), function("judge", 4, 1)), 1.0)
    assert report.failed_frac < 0.2
    with pytest.raises(TooManyFailedScores, match=r"failed: writer 29 of 32 \(91%\), judge 1 of 4 \(25%\); first"):
        expect_few_failures(report, 0.2)
    expect_few_failures(report, 0.91)


def test_failure_event_names_a_function_once():
    report = ScoringReport((function("a"), function("b", matched=8, failed=2)), 1.0)
    (event,) = failure_events(report, 3, [])
    assert event.text == (
        "warning: at training step 3, reward function b failed on 2 of 8 scores; the first: b, step t.0: broken"
    )
    assert failure_events(report, 4, [event.to_dict()]) == []
    other = ScoringReport((function("a", failed=1), function("b", failed=1)), 1.0)
    assert [one.metric for one in failure_events(other, 5, [event.to_dict()])] == ["reward/a/failed_frac"]


def test_failure_summary_counts_a_whole_run():
    reports = [ScoringReport((function("a", matched=8), function("b", matched=8, failed=n)), 1.0) for n in (0, 2, 1)]
    rows = [{"step": 0, "val/pass_at_1": 0.5}] + [{**r.metrics(), "step": i} for i, r in enumerate(reports, 1)]
    assert failure_summary(rows) == [
        "reward function b failed on 3 of 24 scores (12.5%), in 2 training steps, the first 2; failed scores are "
        "masked, not counted as 0"
    ]


def test_rollout_events_name_the_first_failure_once():
    trajectories = [make_trajectory(f"t{n}", [], None) for n in range(4)]
    trajectories[1].status, trajectories[1].info = "failed", {"error": "KeyError: 'labels' (team.py:4 in solve)"}
    trajectories[2].info = {"timed_out": 600.0, "agent_error": "the rollout took more than 600 s"}
    trajectories[3].status, trajectories[3].info = "failed", {"timed_out": 600.0, "error": "RolloutTimedOut: too long"}
    failed, late = rollout_events(batch_of(*trajectories), 2, [])
    assert failed.text == (
        "warning: at training step 2, 2 of 4 rollouts failed and are masked; the first: "
        "KeyError: 'labels' (team.py:4 in solve)"
    )
    assert late.text == (
        "warning: at training step 2, 1 of 4 rollouts exceeded their time limit and count as outcome 0; the first: "
        "the rollout took more than 600 s"
    )
    assert rollout_events(batch_of(*trajectories), 3, [failed.to_dict(), late.to_dict()]) == []
    assert rollout_events(batch_of(trajectories[0]), 3, []) == []
    validation = rollout_events(batch_of(*trajectories), 3, [failed.to_dict()], validation=True)
    assert [event.metric for event in validation] == ["val/rollout/failed_frac", "val/rollout/timeout_frac"]
    assert validation[0].text.startswith("warning: in the validation at training step 3, 2 of 4 rollouts failed")
