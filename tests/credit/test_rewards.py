"""Sub-rewards and outcomes, and the cases of a missing score."""

import math

import pytest

from creditflow.credit import assign
from creditflow.data import Score
from tests.builders import batch_of, credit_options, credited, make_trajectory, step


def sub_rewards(*trajectories, **chosen):
    return credited(*trajectories, **chosen).rewards.sub_reward_S.tolist()


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_score_of_weight_0_never_enters_credit(status):
    measured = {"f": 0.5, "m": Score(1.0, weight=0.0, status=status)}
    assigned = credited(make_trajectory("t", [step("a", measured)]))
    assert assigned.rewards.sub_reward_S.tolist() == [0.5]
    assert assigned.groups.trained_S.tolist() == [True]


@pytest.mark.parametrize("scores", [None, {"m": Score(0.0, weight=0.0)}])
def test_unmatched_step_has_an_open_gate_and_learns(scores):
    batch = batch_of(
        *(make_trajectory(f"t{n}", [step("a", 0.8), step("b", scores), step("c", r)]) for n, r in enumerate((1.0, 0.6)))
    )
    a = assign(batch, credit_options(propagation="threshold", gamma=1.0))
    assert math.isnan(a.rewards.sub_reward_S[1])
    assert a.credit.own_S[1] == 0.0
    assert a.credit.gate_open_S[1]
    assert a.groups.trained_S[1]
    assert a.credit.received_S[[0, 1, 3, 4]].tolist() == pytest.approx([0.0, 0.0, -0.4, -0.4])
    assert a.advantage.advantage_S[1] > 0 > a.advantage.advantage_S[4]


def test_one_failed_score_masks_the_step():
    batch = batch_of(
        make_trajectory("t0", [step("a", {"easy": 1.0, "hard": "timeout"})], 1.0),
        make_trajectory("t1", [step("a", {"easy": 1.0, "hard": 0.0})], 1.0),
        make_trajectory("t2", [step("a", {"easy": 0.0, "hard": 0.0})], 0.0),
    )
    a = assign(batch, credit_options(propagation="threshold"))
    assert a.groups.trained_S.tolist() == [False, True, True]
    assert a.rewards.sub_reward_S.tolist() == [0.25, 0.5, 0.0]  # the mean of the others, not the easy half
    assert a.advantage.advantage_S[0] == 0.0
    assert a.groups.group_size_S.tolist() == [0, 2, 2]


def test_substitute_falls_back_from_group_to_agent_to_nan():
    failing = [step("a", "failed", turn=0)]
    same_turn = make_trajectory("t1", [step("a", 1.0, turn=0)])
    other_turn = make_trajectory("t2", [step("a", 0.5, turn=3)])
    other_agent = make_trajectory("t3", [step("b", 0.25, turn=0)])
    assert sub_rewards(make_trajectory("t0", failing), same_turn, other_turn, other_agent)[0] == 1.0
    assert sub_rewards(make_trajectory("t0", failing), other_turn, other_agent)[0] == 0.5
    assert math.isnan(sub_rewards(make_trajectory("t0", failing), other_agent)[0])


def test_failed_status_or_outcome_masks_the_trajectory():
    a = credited(
        make_trajectory("t0", [step("a", 1.0), step("b", 1.0)], 1.0, status="failed"),
        make_trajectory("t1", [step("a", 1.0), step("b", 1.0)], "timeout"),
        make_trajectory("t2", [step("a", 1.0), step("b", 1.0)], "failed", status="truncated"),
        make_trajectory("t3", [step("a", 1.0), step("b", 0.0)], 1.0),
        make_trajectory("t4", [step("a", 1.0), step("b", 1.0)], 0.0),
    )
    assert a.rewards.masked_N.tolist() == [True, True, True, False, False]
    assert a.groups.trained_S.tolist() == [False] * 6 + [True] * 4
    assert (a.advantage.advantage_S[:6] == 0.0).all()
    assert set(a.groups.group_size_S[6:].tolist()) == {2}


def test_outcome_keeps_its_units():
    batch = batch_of(make_trajectory("t0", [step()], Score(7.0, (-10.0, 10.0))), make_trajectory("t1", [step()], -2.0))
    assert assign(batch, credit_options(propagation="threshold")).credit.total_S.tolist() == [7.0, -2.0]
