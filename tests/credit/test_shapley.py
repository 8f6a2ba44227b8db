"""Shapley and left-out values against the definition, over all joining orders of a team."""

import itertools
import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit import CreditOptions, assign, explain
from creditflow.credit.shapley import KEY, Plan, Values, plan, values, values_of_agents
from creditflow.data import Score
from creditflow.errors import BatchError, ConfigError
from tests.builders import batch_of, make_trajectory, step

OPTIONS = CreditOptions(propagation="shapley")


def by_definition(value_of: dict[int, float], agents: int) -> list[float]:
    """The mean, over all orders, of each agent's gain when it joins."""
    added = np.zeros(agents)
    orders = list(itertools.permutations(range(agents)))
    for order in orders:
        team = 0
        for agent in order:
            added[agent] += value_of[team | 1 << agent] - value_of[team]
            team |= 1 << agent
    return list(added / len(orders))


def outcomes_of(of: Plan, value_of: dict[int, float]) -> np.ndarray:
    return np.array([value_of[coalition] for coalition in of.coalition_P.tolist()])


games = st.integers(1, 4).flatmap(
    lambda agents: st.tuples(
        st.just(agents), st.lists(st.floats(-1, 1), min_size=2**agents, max_size=2**agents), st.integers(1, 3)
    )
)


@given(games)
def test_exact_values_equal_the_definition(game):
    agents, listed, times = game
    value_of = dict(enumerate(listed))
    of = plan(agents, times * (2**agents - 1), np.random.default_rng(0))
    assert of.order_OA is None
    assert len(of.coalition_P) == times * (2**agents - 1)

    found = values(of, value_of[2**agents - 1], outcomes_of(of, value_of))

    np.testing.assert_allclose(found.shapley_A, by_definition(value_of, agents), atol=1e-12)
    assert math.isclose(found.shapley_A.sum(), listed[-1] - listed[0], abs_tol=1e-12)
    left_out = [listed[-1] - value_of[2**agents - 1 - (1 << a)] for a in range(agents)]
    np.testing.assert_allclose(found.left_out_A, left_out, atol=1e-12)
    if times > 1:
        np.testing.assert_allclose(found.shapley_se_A, 0.0, atol=1e-12)
    else:
        assert np.isnan(found.shapley_se_A).all()


@given(st.integers(5, 8), st.integers(0, 1000))
def test_sampled_values_are_exact_for_additive_games(agents, seed):
    rng = np.random.default_rng(seed)
    alone, value = rng.normal(size=agents), rng.normal(size=2**agents)
    adds_up = {c: float(sum(alone[a] for a in range(agents) if c >> a & 1)) for c in range(2**agents)}
    any_game = dict(enumerate(value.tolist()))
    of = plan(agents, 2 * agents**2 + 3, rng)
    assert len(of.coalition_P) == 2 * agents**2
    assert 2**agents - 1 not in of.coalition_P

    found = values(of, adds_up[2**agents - 1], outcomes_of(of, adds_up))
    np.testing.assert_allclose(found.shapley_A, alone, atol=1e-9)
    np.testing.assert_allclose(found.left_out_A, alone, atol=1e-9)
    of_any = values(of, any_game[2**agents - 1], outcomes_of(of, any_game))
    assert math.isclose(of_any.shapley_A.sum(), value[-1] - value[0], abs_tol=1e-9)


def test_sampled_values_are_unbiased_with_calibrated_errors():
    agents, rng = 5, np.random.default_rng(1)
    value_of = dict(enumerate(rng.uniform(size=2**agents).tolist()))
    truth = np.array(by_definition(value_of, agents))
    offs, errors = [], []
    for _ in range(400):
        of = plan(agents, 4 * agents**2, rng)
        noisy = outcomes_of(of, value_of) + rng.normal(scale=0.3, size=len(of.coalition_P))
        found = values(of, value_of[2**agents - 1], noisy)
        offs.append(found.shapley_A - truth)
        errors.append(found.shapley_se_A)
    assert np.abs(np.mean(offs, axis=0)).max() < 4 * np.std(offs, axis=0).max() / math.sqrt(400)
    said, was = np.sqrt(np.mean(np.square(errors))), np.sqrt(np.mean(np.square(offs)))
    assert 0.9 < said / was < 1.4  # the rotations make it slightly better than estimated


def test_standard_errors_of_exact_values_are_calibrated():
    rng, agents = np.random.default_rng(2), 3
    chance = rng.uniform(size=2**agents)
    of = plan(agents, 10 * (2**agents - 1), rng)
    truth = np.array(by_definition(dict(enumerate([*chance[:-1].tolist(), 1.0])), agents))
    offs, errors = [], []
    for _ in range(1000):
        found = values(of, 1.0, (rng.uniform(size=len(of.coalition_P)) < chance[of.coalition_P]).astype(float))
        offs.append(found.shapley_A - truth)
        errors.append(found.shapley_se_A)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(errors), axis=0)), np.std(offs, axis=0), rtol=0.1)


def test_failed_replay_makes_dependent_values_nan():
    of = plan(2, 6, np.random.default_rng(0))
    outcome = np.array([0.0, 0.5, np.nan, 0.2, 0.5, np.nan])  # none, the first, the second: twice each
    found = values(of, 1.0, outcome)
    assert np.isnan(found.shapley_A).all()
    assert np.isnan(found.left_out_A[0])  # the second alone has no successful replay
    assert found.left_out_A[1] == 0.5
    outcome[5] = 0.7
    assert math.isclose(values(of, 1.0, outcome).shapley_A[1], (1.0 - 0.5 + 0.7 - 0.1) / 2)


@pytest.mark.parametrize(("agents", "budget", "least"), [(3, 6, 7), (4, 14, 15), (5, 24, 25)])
def test_too_small_budget_error_gives_the_minimum(agents, budget, least):
    with pytest.raises(ValueError, match=f"at least {least} rollouts for {agents} agents, got {budget}"):
        plan(agents, budget, np.random.default_rng(0))


@pytest.mark.parametrize("agents", [25, 62])
def test_teams_of_up_to_62_agents_are_sampled(agents):
    of = plan(agents, agents**2, np.random.default_rng(0))
    outcome = np.array([sum(a + 1.0 for a in range(agents) if int(c) >> a & 1) for c in of.coalition_P])
    found = values(of, agents * (agents + 1) / 2, outcome)
    np.testing.assert_allclose(found.shapley_A, np.arange(1, agents + 1))
    with pytest.raises(ValueError, match="at most 62 agents, got 63"):
        plan(63, 63**2, np.random.default_rng(0))


@given(games)
def test_values_survive_a_json_round_trip(game):
    agents, listed, times = game
    of = plan(agents, times * (2**agents - 1), np.random.default_rng(0))
    made = values(of, listed[-1], outcomes_of(of, dict(enumerate(listed))), tuple("abcd"[:agents]))
    read = Values.from_json(json.loads(json.dumps(made.to_json())))
    assert (read.agents, read.rollouts) == (made.agents, made.rollouts)
    for name in ("shapley_A", "shapley_se_A", "left_out_A", "left_out_se_A"):
        np.testing.assert_array_equal(getattr(read, name), getattr(made, name))


def test_values_of_agents_are_those_of_their_own_games():
    """Two players of a zero-sum game: alone, each wins; together, the first wins."""
    of = plan(2, 3, np.random.default_rng(0))
    first = {0b00: 0.5, 0b01: 1.0, 0b10: 0.0}
    outcome_PA = np.array([(first[int(c)], 1.0 - first[int(c)]) for c in of.coalition_P])
    found = values_of_agents(of, np.array([1.0, 0.0]), outcome_PA, ("a", "b"))
    # a joins b, and a is first: ((1 - 0) + (1 - 0.5)) / 2; b the same in the game of its outcome.
    assert found.shapley_A.tolist() == [0.75, ((0.0 - 0.0) + (1.0 - 0.5)) / 2]
    assert found.left_out_A.tolist() == [1.0, 0.0]
    assert (found.rollouts, found.agents) == (3, ("a", "b"))


def test_values_of_equal_outcomes_equal_the_common_values():
    of = plan(3, 14, np.random.default_rng(0))
    outcome_P = np.random.default_rng(1).random(len(of.coalition_P))
    outcome_P[3] = np.nan
    common = values(of, 0.75, outcome_P, ("a", "b", "c"))
    own = values_of_agents(of, np.full(3, 0.75), np.column_stack([outcome_P] * 3), ("a", "b", "c"))
    for field in fields(Values):
        np.testing.assert_array_equal(getattr(own, field.name), getattr(common, field.name), err_msg=field.name)


def test_agent_with_a_failed_outcome_has_the_value_zero():
    of = plan(2, 3, np.random.default_rng(0))
    found = values_of_agents(of, np.array([np.nan, 1.0]), np.full((3, 2), 0.5), ("a", "b"))
    assert found.known
    assert found.shapley_A.tolist() == [0.0, 0.25]


def test_shapley_rule_masks_an_agent_with_a_failed_outcome():
    failed = measured("a", 1.0, {"planner": 0.75, "executor": 0.25})
    failed.outcomes = {"planner": Score(0.0, status="failed"), "executor": Score(0.5)}
    made = assign(batch_of(failed, measured("b", 0.0, {"planner": 0.5, "executor": 0.5})), OPTIONS)
    assert made.shared_S.tolist() == [0.0, 0.25, 0.5, 0.5]
    assert made.trained_S.tolist() == [False, True, True, True]
    assert explain(made, 1).replay() == made.advantage_S[1]


def measured(id: str, outcome: float, shapley: dict[str, float | None], score: float = 0.5):
    made = make_trajectory(id, [step("planner", score, tokens=2), step("executor", tokens=1)], outcome=outcome)
    made.info[KEY] = noted(shapley)
    return made


def noted(shapley: dict[str, float | None]):
    value_A = np.array(list(shapley.values()), dtype=np.float64)
    return Values(value_A, value_A, value_A, value_A, 7, tuple(shapley)).to_json()


def test_shapley_rule_adds_own_reward_and_agent_value():
    batch = batch_of(
        measured("a", 1.0, {"planner": 0.75, "executor": 0.25}),
        measured("b", 0.0, {"planner": -0.5, "executor": 0.0}, score=1.0),
        make_trajectory("c", [step("planner", 0.5, tokens=1)], outcome="failed"),  # without values, and masked
    )
    made = assign(batch, replace(OPTIONS, w_o=2.0, w_r=0.5))
    np.testing.assert_array_equal(made.credit_S[:4], [-0.25 + 1.5, 0.5, -1.0, 0.0])
    assert not made.trained_S[4]
    for s in range(4):
        said = explain(made, s)
        assert said.replay() == said.advantage == made.advantage_S[s]
        assert "Shapley value" in [operation.name for operation in said.operations]


def test_trajectory_without_steps_needs_no_values():
    batch = batch_of(
        *(measured(id, 1.0, {"planner": 0.5, "executor": 0.5}) for id in "ab"), make_trajectory("c", [], outcome=0.0)
    )
    assert assign(batch, OPTIONS).shared_S.tolist() == [0.5] * 4


def test_frozen_agent_adds_nothing():
    batch = batch_of(*(measured(id, 1.0, {"planner": 0.5}) for id in "ab"))
    assert assign(batch, OPTIONS).shared_S.tolist() == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("entry", [None, {"shapley": 3}, "mine", {"planner": None, "executor": 0.0}])
def test_trajectory_without_values_raises(entry):
    batch = batch_of(*(measured(id, 1.0, {"planner": 0.5, "executor": 0.5}) for id in "ab"))
    info = {} if entry is None else {KEY: noted(entry) if "planner" in entry else entry}
    with pytest.raises(BatchError, match="trajectory a: expected Shapley values, found none"):
        assign(replace(batch, trajectory_info=(info, batch.trajectory_info[1])), OPTIONS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outcome_to": "answer"}, "outcome_to: shapley .* expected all, got answer"),
        ({"adv_estimator": "gae"}, "adv_estimator: gae has values of its own"),
        (
            {"propagation": "none", "shadow": {"propagation": "shapley"}},
            "shadow.propagation: shapley needs rollouts",
        ),
    ],
)
def test_options_incompatible_with_shapley_raise(options, said):
    with pytest.raises(ConfigError, match=said):
        replace(OPTIONS, **options).validate()
