"""Gates open strictly above their threshold, and a higher threshold never opens one."""

import numpy as np
import pytest
from hypothesis import given

from creditflow.credit import assign
from creditflow.data import Score
from tests.builders import batch_of, credited, make_trajectory, step
from tests.credit.strategies import options, trajectories


def is_open(scores, theta):
    return bool(credited(make_trajectory("t", [step("a", scores)]), propagation_threshold=theta).gate_open_S)


@pytest.mark.parametrize(
    ("r", "theta", "opens"), [(0.5, 0.5, False), (0.51, 0.5, True), (0.0, 0.0, False), (1.0, 1.0, False)]
)
def test_gate_opens_strictly_above_the_threshold(r, theta, opens):
    assert is_open(r, theta) is opens


def test_gate_stays_closed_within_rounding_of_the_threshold():
    tenths = {"f": Score(0.1), "g": Score(0.2), "h": Score(0.3)}
    assert (0.1 + 0.2 + 0.3) / 3 > 0.2
    assert not is_open(tenths, 0.2)


@given(trajectories(), options(propagation="threshold"))
def test_higher_threshold_never_opens_a_gate(trajectories, chosen):
    batch = batch_of(*trajectories)
    before = None
    for theta in (-1.0, 0.0, 0.125, 0.3, 0.5, 0.75, 0.875, 1.0, 2.0):
        chosen.propagation_threshold = theta
        gate_open_S = assign(batch, chosen).gate_open_S
        assert before is None or not (gate_open_S & ~before).any()
        before = gate_open_S


@given(trajectories(), options())
def test_threshold_below_0_equals_discounted(trajectories, chosen):
    batch = batch_of(*trajectories)
    chosen.propagation, chosen.propagation_threshold = "threshold", -0.5
    gated = assign(batch, chosen)
    chosen.propagation = "discounted"
    free = assign(batch, chosen)
    assert np.array_equal(gated.credit_S, free.credit_S)
    assert np.array_equal(gated.advantage_S, free.advantage_S)
    assert (gated.withheld_S == 0.0).all()


@given(
    trajectories(mishaps=False),
    options(reward_decomp=True, decomp_granularity="step", on_closed_gate="cut"),
)
def test_threshold_of_1_with_all_steps_scored_equals_none(trajectories, chosen):
    for trajectory in trajectories:
        for s in trajectory.steps:
            s.scores.setdefault("f", Score(1.0))
    batch = batch_of(*trajectories)
    chosen.propagation, chosen.propagation_threshold = "threshold", 1.0
    gated = assign(batch, chosen)
    chosen.propagation = "none"
    alone = assign(batch, chosen)
    assert np.array_equal(gated.credit_S, alone.credit_S)
    assert np.array_equal(gated.advantage_S, alone.advantage_S)
