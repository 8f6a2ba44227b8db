"""The score model: exact posterior, learned rates, options."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from creditflow.credit import CreditOptions, assign, explain
from creditflow.credit.score_model import BINS, PART, SLIPS, Rates, bins, posterior
from creditflow.errors import ConfigError
from tests.builders import batch_of, make_trajectory, step
from tests.credit.strategies import situations
from tests.oracle import fitted as oracle

MODEL = CreditOptions(
    propagation="none", score_model="noisy_and", w_r=0.0, w_m=1.0, group_by="task_agent", adv_estimator="rloo"
)

chances = st.floats(0.02, 0.98)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 1), st.integers(-1, BINS - 1)), min_size=1, max_size=6), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    st.tuples(chances, chances),
    chances,
    st.integers(0, 2**32 - 1),
)
def test_posterior_equals_a_sum_over_all_states(trajectories, harm, slip, seed):
    drawn = np.random.default_rng(seed)
    score_AZB = drawn.dirichlet(np.ones(BINS), (2, 2)) * 0.9 + 0.1 / BINS
    rates = Rates(np.array(harm), score_AZB, slip)
    cell_S = np.repeat(np.arange(len(trajectories)), [len(steps) for steps, _ in trajectories])
    agent_S, bin_S = np.array([one for steps, _ in trajectories for one in steps]).T
    passed_S = np.array([passed for steps, passed in trajectories for _ in steps])
    known_S = cell_S % 3 != 2
    found, alone, slips = posterior(rates, cell_S, agent_S, bin_S, passed_S, known_S)
    expected, expected_alone, failed_clean = [], [], 0.0
    for cell, (steps, passed) in enumerate(trajectories):
        likelihoods = [(1.0, 1.0) if b < 0 else tuple(score_AZB[a, :, b]) for a, b in steps]
        harms = [harm[a] for a, _ in steps]
        known = passed if cell % 3 != 2 else None
        expected += oracle.harmless(harms, likelihoods, slip, known)
        expected_alone += oracle.harmless(harms, likelihoods, slip, None)
        if known is False:
            clean = np.prod(oracle.harmless(harms, likelihoods, slip, None))
            failed_clean += slip * clean / (1 - (1 - slip) * clean)
    assert found == pytest.approx(np.array(expected), abs=1e-12)
    assert alone == pytest.approx(np.array(expected_alone), abs=1e-12)
    assert slips[0] == pytest.approx(failed_clean, abs=1e-12)


@settings(max_examples=50)
@given(situations(score_model="noisy_and", decomp_granularity="step", propagation="none", reward_decomp=True))
def test_harmless_is_a_probability_of_every_kept_step(situation):
    trajectories, chosen, values_T = situation
    values = None if values_T is None else np.array(values_T)
    assigned = assign(batch_of(*trajectories), chosen, values_T=values)
    kept_S = ~assigned.masked_S
    assert ((assigned.harmless_S[kept_S] >= 0) & (assigned.harmless_S[kept_S] <= 1)).all()
    assert np.isnan(assigned.harmless_S[~kept_S]).all()


def simulated(
    tasks: int, harm: dict[str, float], flip: float, seed: int, scored: tuple[str, ...] = ("executor",)
) -> list:
    """Chains whose outcome is the absence of harm. A share of the binary verdicts is flipped."""
    drawn, made = random.Random(seed), []
    for task in range(tasks):
        for i in range(8):
            states = [(agent, drawn.random() >= harm[agent]) for agent in ("planner", *["executor"] * 4)]
            steps = [
                step(agent, float(fine != (drawn.random() < flip))) if agent in scored else step(agent)
                for agent, fine in states
            ]
            outcome = float(all(fine for _, fine in states))
            made.append(make_trajectory(f"{task}-{i}", steps, outcome, task=f"q{task}"))
            made[-1].info["states"] = [fine for _, fine in states]
    return made


def test_learned_rates_approach_the_true_ones():
    assigned = assign(batch_of(*simulated(150, {"planner": 0.3, "executor": 0.1}, 0.2, seed=0)), MODEL)
    agents = assigned.fitted["model"]["agents"]
    assert agents["planner"]["harm"] == pytest.approx(0.3, abs=0.05)
    assert agents["executor"]["harm"] == pytest.approx(0.1, abs=0.03)
    harm, no_harm = agents["executor"]["scores"]
    assert (harm[-1], no_harm[-1]) == pytest.approx((0.2, 0.8), abs=0.06)


def test_posterior_separates_harm_better_than_noisy_scores():
    trajectories = simulated(100, {"planner": 0.1, "executor": 0.1}, 0.35, seed=1, scored=("planner", "executor"))
    assigned = assign(batch_of(*trajectories), MODEL)
    fine_S = np.array([fine for one in trajectories for fine in one.info["states"]])
    by_score = np.mean((assigned.sub_reward_S > 0.5) == fine_S)
    by_model = np.mean((assigned.harmless_S > 0.5) == fine_S)
    assert by_model > by_score + 0.2


def test_steps_of_a_successful_trajectory_cost_nothing():
    assigned = assign(batch_of(*simulated(8, {"planner": 0.2, "executor": 0.1}, 0.3, seed=2)), MODEL)
    passed_S = assigned.batch.outcome[assigned.batch.trajectory_of_step] == 1.0
    assert (assigned.own_S[passed_S] == 0.0).all()
    assert (assigned.own_S[~passed_S & assigned.scored_S] < 0.0).all()


def test_unscored_agent_explains_failures_and_is_not_charged():
    rows = [("right", 1.0, 1.0), ("right", 1.0, 0.0), ("wrong", 0.0, 0.0)] * 40
    made = [
        make_trajectory(f"{i}", [step("planner"), step("executor", score)], outcome, task=f"q{i % 10}")
        for i, (_, score, outcome) in enumerate(rows)
    ]
    assigned = assign(batch_of(*made), MODEL)
    planner_S = assigned.batch.agent_of_step == assigned.batch.agent_names.index("planner")
    unexplained, explained = (assigned.harmless_S[planner_S][at::3].mean() for at in (1, 2))
    assert unexplained < explained - 0.3
    assert (assigned.own_S[planner_S] == 0.0).all()
    assert (assigned.own_S[~planner_S][2::3] < 0.0).all()


def test_model_remembers_earlier_batches():
    often = {"planner": 0.7, "executor": 0.02}
    first = assign(batch_of(*simulated(50, often, 0.1, seed=3)), MODEL).history_after
    few = batch_of(*simulated(1, often, 0.1, seed=4))
    alone, informed = assign(few, MODEL), assign(few, MODEL, history=first)
    harm = [one.fitted["model"]["agents"]["planner"]["harm"] for one in (alone, informed)]
    assert harm[0] < 0.5 < harm[1]
    assert set(informed.history_after.parts) == {PART, SLIPS}


def test_bins_hold_0_halves_and_1():
    assert bins(np.array([0.0, 0.25, 0.5, 0.75, 1.0])).tolist() == [0, 1, 2, 2, 3]


def test_charge_for_harm_adds_to_the_score():
    batch = batch_of(*simulated(8, {"planner": 0.3, "executor": 0.1}, 0.2, seed=6))
    assigned = assign(batch, replace(MODEL, w_r=1.0, w_m=0.3))
    expected_S = assigned.sub_reward_S - 1.0 + 0.3 * (assigned.harmless_S - 1.0)
    assert assigned.own_S == pytest.approx(np.where(assigned.scored_S, expected_S, 0.0))


def test_explain_shows_the_probability():
    assigned = assign(batch_of(*simulated(4, {"planner": 0.3, "executor": 0.1}, 0.2, seed=5)), MODEL)
    lines = [str(explain(assigned, step)) for step in (0, 1)]
    assert ["probability of no harm" in text for text in lines] == [False, True]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"decomp_granularity": "token_level"}, "expected decomp_granularity step or agent"),
        ({"score_model": "or"}, "expected none or noisy_and, got 'or'"),
    ],
)
def test_contradicting_options_are_refused(more: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(MODEL, **more).validate()


def test_rule_without_own_rewards_refuses_the_model():
    with pytest.raises(ConfigError, match="score_model: has no effect with propagation: identical"):
        replace(MODEL, propagation="identical").refuse_ignored(["score_model"])
