"""Tests of the calibration of scores, against counts over all pairs."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.credit import CreditOptions, assign
from creditflow.data import Score, TrajectoryBatch
from creditflow.runs import RunFolder
from creditflow.studies.calibration import ALL, Observations, calibrate, observe
from tests.builders import batch_of, make_trajectory, step
from tests.trees import tree_of_branches


def observations(rows: list[tuple[float, bool, int]]) -> Observations:
    score, right, task = zip(*rows, strict=True)
    return Observations("a", "f", np.array(score), np.array(right), np.array(task))


def auc_by_pairs(rows: list[tuple[float, bool, int]], *, within: bool) -> float:
    pairs = [
        (one[0], other[0])
        for one, other in itertools.product(rows, rows)
        if one[1] and not other[1] and (not within or one[2] == other[2])
    ]
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs) if pairs else math.nan


rows_of_scores = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.booleans(), st.integers(0, 3)), min_size=1, max_size=30
)


@settings(max_examples=100)
@given(rows_of_scores)
def test_auc_and_threshold_match_counting(rows: list[tuple[float, bool, int]]) -> None:
    found = calibrate(observations(rows))
    assert found.auc == pytest.approx(auc_by_pairs(rows, within=False), nan_ok=True)
    assert found.auc_within == pytest.approx(auc_by_pairs(rows, within=True), nan_ok=True)
    right, wrong = ([row[0] for row in rows if row[1] == ended] for ended in (True, False))
    if math.isnan(found.threshold):
        assert not right or not wrong or len({row[0] for row in rows}) == 1
        return

    def separation(theta: float) -> float:
        return float(np.mean([r > theta for r in right]) - np.mean([r > theta for r in wrong]))

    assert found.separation == pytest.approx(separation(found.threshold))
    levels = sorted({row[0] for row in rows})
    between = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    assert found.separation == pytest.approx(max(map(separation, between)))
    assert found.pass_rate == pytest.approx(np.mean([row[0] > found.threshold for row in rows]))


def test_calibration_error_of_honest_and_overconfident_scores() -> None:
    rng = np.random.default_rng(0)
    chance = rng.uniform(size=40_000)
    right = rng.uniform(size=chance.size) < chance
    task = np.arange(chance.size) % 400
    honest = calibrate(Observations("a", "f", chance, right, task))
    assert honest.error < 0.02
    assert honest.auc == pytest.approx(5 / 6, abs=0.01)  # the integral over pairs, for uniform probabilities
    assert honest.auc_low < honest.auc < honest.auc_high
    overconfident = calibrate(Observations("a", "f", np.ones(chance.size), right, task))
    assert overconfident.error == pytest.approx(1 - right.mean())
    assert math.isnan(overconfident.threshold)


def test_interval_is_over_tasks_and_not_over_steps() -> None:
    """Many copies of the same few trajectories add no information."""
    few = [(0.9, True, 0), (0.2, False, 1), (0.4, True, 2), (0.6, False, 3), (0.8, True, 4), (0.5, False, 5)] * 3
    narrow, wide = calibrate(observations(few)), calibrate(observations(few * 300))
    assert (narrow.auc_low, narrow.auc_high) == (wide.auc_low, wide.auc_high)


def a_batch() -> TrajectoryBatch:
    return batch_of(
        make_trajectory("a", [step("plan", {"f": 1.0, "g": 0.5}), step("do", 1.0)], outcome=1.0),
        make_trajectory("b", [step("plan", {"f": 0.0, "g": 0.5}), step("do", "failed")], outcome=0.0),
        make_trajectory("c", [step("plan", {"f": 0.0, "g": Score(0.5, weight=0.0)}), step("do", 0.0)], outcome=None),
        make_trajectory(
            "d", [step("plan", {"f": 0.5, "g": Score(1.0, weight=0.0)}), step("do", 0.5)], outcome=0.0, task="q1"
        ),
    )


def test_observe_collects_scored_steps_with_an_outcome() -> None:
    seen = {(one.agent, one.name): one for one in observe([a_batch(), a_batch()])}
    assert seen["plan", "f"].score_X.tolist() == [1.0, 0.0, 0.5] * 2
    assert seen["plan", "f"].right_X.tolist() == [True, False, False] * 2
    assert seen["plan", "f"].task_X.tolist() == [0, 0, 1] * 2  # the same tasks in both
    assert seen["plan", "g"].score_X.tolist() == [0.5, 0.5, 1.0] * 2  # includes scores of weight 0
    assert seen["plan", ALL].score_X.tolist() == [0.75, 0.25] * 2  # only steps with two weighted functions
    assert seen["do", "f"].score_X.tolist() == [1.0, 0.5] * 2  # without the failed score
    assert ("do", ALL) not in seen


def test_calibrate_prints_a_row_per_agent_and_function(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, "")
    folder.write_steps(1, a_batch(), assign(a_batch(), CreditOptions()))
    arguments = [str(tmp_path / "run"), "--plot", str(tmp_path / "c.png"), "--json", str(tmp_path / "c.json")]
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 0, result.output
    for row in ("plan: f", "plan: g", "plan: sub-reward", "do: f"):
        assert row in result.stdout
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    numbers = json.loads((tmp_path / "c.json").read_text())
    assert [one["steps"] for one in numbers if (one["agent"], one["name"]) == ("plan", "f")] == [3]


def test_calibrate_refuses_a_run_without_scores(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, "")
    folder.write_steps(1, batch_of(make_trajectory("a", [step("plan")], outcome=1.0)))
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "expected a scored step in a trajectory with a scored outcome, found none" in result.stderr


def test_branches_do_not_count_as_observations() -> None:
    trajectories = tree_of_branches()
    whole, alone = (observe([batch_of(*some)]) for some in (trajectories, trajectories[:2]))
    assert [one.agent for one in whole] == ["planner", "executor", "verifier"]
    for one, other in zip(whole, alone, strict=True):
        assert one.score_X.tolist() == other.score_X.tolist()
        assert one.right_X.tolist() == other.right_X.tolist() == [True, False]
