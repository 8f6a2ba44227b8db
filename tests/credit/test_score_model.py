"""The charge for harm of `calibrated`, and the rule `posterior`: exact posterior, learned rates."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit import CreditOptions, assign, explain
from creditflow.credit.fits import posteriors
from creditflow.credit.fits.posteriors import BINS, PART, SLIPS, Rates, bins, step_posteriors
from creditflow.credit.groups import LEVELS
from creditflow.credit.history import History, Observations
from creditflow.data import Score, TrajectoryBatch
from creditflow.errors import DataError
from creditflow.reports.why import worth_a_look
from tests.builders import batch_of, credit_options, examples, make_trajectory, step
from tests.credit.strategies import situations
from tests.oracle import fitted as oracle

BY_AGENT = {"group_by": "task_agent", "adv_estimator": "rloo"}
MODEL = credit_options("calibrated", score_weight="fixed", w_r=0.0, **BY_AGENT)
RULE = credit_options("posterior", **BY_AGENT)

HARM = {"planner": 0.3, "executor": 0.1}

chances = st.floats(0.02, 0.98)


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 1), st.integers(-1, BINS - 1)), min_size=1, max_size=6), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    st.tuples(chances, chances),
    st.sampled_from([(0.0, 0.0), (0.1, 0.4), (0.9, 0.0)]),
    chances,
    st.integers(0, 2**32 - 1),
)
def test_posterior_equals_a_sum_over_all_states(trajectories, harm, survives, slip, seed):
    drawn = np.random.default_rng(seed)
    score_AZB = drawn.dirichlet(np.ones(BINS), (2, 2)) * 0.9 + 0.1 / BINS
    rates = Rates(np.array(harm), score_AZB, np.array(survives), slip)
    cell_S = np.repeat(np.arange(len(trajectories)), [len(steps) for steps, _ in trajectories])
    agent_S, bin_S = np.array([row for steps, _ in trajectories for row in steps]).T
    success_C = np.array([-1.0 if cell % 3 == 2 else float(passed) for cell, (_, passed) in enumerate(trajectories)])
    result = step_posteriors(rates, Observations(("a", "b"), cell_S, agent_S, bin_S, success_C))
    expected, expected_alone, failed_clean = [], [], 0.0
    for cell, (steps, passed) in enumerate(trajectories):
        likelihoods = [(1.0, 1.0) if b < 0 else tuple(score_AZB[a, :, b]) for a, b in steps]
        harms, survived = [harm[a] for a, _ in steps], [survives[a] for a, _ in steps]
        known = passed if cell % 3 != 2 else None
        expected += oracle.harmless(harms, likelihoods, slip, known, survived)
        expected_alone += oracle.harmless(harms, likelihoods, slip, None)
        if known is False:
            alone = np.array(oracle.harmless(harms, likelihoods, slip, None))
            alive = np.prod(alone + (1 - alone) * survived)
            failed_clean += slip * np.prod(alone) / (1 - (1 - slip) * alive)
    assert result.harmless_S == pytest.approx(np.array(expected), abs=1e-12)
    assert result.alone_S == pytest.approx(np.array(expected_alone), abs=1e-12)
    assert result.slips[0] == pytest.approx(failed_clean, abs=1e-12)
    assert (result.survived_S <= 1 - result.harmless_S + 1e-12).all()


@examples(50)
@given(situations(propagation="calibrated", decomp_granularity="step", reward_decomp=True))
def test_harmless_is_a_probability_of_every_kept_step(situation):
    trajectories, chosen, values_T = situation
    values = None if values_T is None else np.array(values_T)
    assigned = assign(batch_of(*trajectories), chosen, values_T=values)
    kept_S = ~assigned.rewards.masked_S
    assert ((assigned.fit.harmless_S[kept_S] >= 0) & (assigned.fit.harmless_S[kept_S] <= 1)).all()
    assert np.isnan(assigned.fit.harmless_S[~kept_S]).all()


def simulated(
    tasks: int, harm: dict[str, float], flip: float, seed: int, scored: tuple[str, ...] = ("executor",)
) -> list:
    """Chains whose outcome is the absence of harm. A share of the binary verdicts is flipped."""
    drawn, trajectories = random.Random(seed), []
    for task in range(tasks):
        for i in range(8):
            states = [(agent, drawn.random() >= harm[agent]) for agent in ("planner", *["executor"] * 4)]
            steps = [
                step(agent, float(fine != (drawn.random() < flip))) if agent in scored else step(agent)
                for agent, fine in states
            ]
            outcome = float(all(fine for _, fine in states))
            trajectories.append(make_trajectory(f"{task}-{i}", steps, outcome, task=f"q{task}"))
            trajectories[-1].info["states"] = [fine for _, fine in states]
    return trajectories


def test_learned_rates_approach_the_true_ones():
    assigned = assign(batch_of(*simulated(150, {"planner": 0.3, "executor": 0.1}, 0.2, seed=0)), MODEL)
    agents = assigned.fit.facts["model"]["agents"]
    assert agents["planner"]["harm"] == pytest.approx(0.3, abs=0.05)
    assert agents["executor"]["harm"] == pytest.approx(0.1, abs=0.03)
    harm, no_harm = agents["executor"]["scores"]
    assert (harm[-1], no_harm[-1]) == pytest.approx((0.2, 0.8), abs=0.06)


def test_posterior_separates_harm_better_than_noisy_scores():
    trajectories = simulated(100, {"planner": 0.1, "executor": 0.1}, 0.35, seed=1, scored=("planner", "executor"))
    assigned = assign(batch_of(*trajectories), MODEL)
    fine_S = np.array([fine for trajectory in trajectories for fine in trajectory.info["states"]])
    by_score = np.mean((assigned.rewards.sub_reward_S > 0.5) == fine_S)
    by_model = np.mean((assigned.fit.harmless_S > 0.5) == fine_S)
    assert by_model > by_score + 0.2


def test_steps_of_a_successful_trajectory_cost_nothing():
    assigned = assign(batch_of(*simulated(8, {"planner": 0.2, "executor": 0.1}, 0.3, seed=2)), MODEL)
    passed_S = assigned.batch.outcome[assigned.batch.trajectory_of_step] == 1.0
    assert (assigned.credit.own_S[passed_S] == 0.0).all()
    assert (assigned.credit.own_S[~passed_S & assigned.rewards.scored_S] < 0.0).all()


def test_unscored_agent_explains_failures_and_is_not_charged():
    rows = [("right", 1.0, 1.0), ("right", 1.0, 0.0), ("wrong", 0.0, 0.0)] * 40
    trajectories = [
        make_trajectory(f"{i}", [step("planner"), step("executor", score)], outcome, task=f"q{i % 10}")
        for i, (_, score, outcome) in enumerate(rows)
    ]
    assigned = assign(batch_of(*trajectories), MODEL)
    planner_S = assigned.batch.agent_of_step == assigned.batch.agent_names.index("planner")
    unexplained, explained = (assigned.fit.harmless_S[planner_S][at::3].mean() for at in (1, 2))
    assert unexplained < explained - 0.3
    assert (assigned.credit.own_S[planner_S] == 0.0).all()
    assert (assigned.credit.own_S[~planner_S][2::3] < 0.0).all()


@pytest.mark.parametrize(("options", "between"), [(MODEL, 0.5), (RULE, 0.6)])
def test_model_remembers_earlier_batches(options: CreditOptions, between: float):
    often = {"planner": 0.7, "executor": 0.02}
    first = assign(batch_of(*simulated(50, often, 0.1, seed=3)), options).history_after
    few = batch_of(*simulated(1, often, 0.1, seed=4))
    alone, informed = assign(few, options), assign(few, options, history=first)
    harm = [a.fit.facts["model"]["agents"]["planner"]["harm"] for a in (alone, informed)]
    assert harm[0] < between < harm[1]
    assert set(informed.history_after.parts) == ({PART, SLIPS} if options is MODEL else set())
    assert len(informed.history_after.observations) == (0 if options is MODEL else 2)


def test_model_ignores_sums_of_another_shape():
    batch = batch_of(*simulated(5, HARM, 0.1, seed=5))
    foreign = History({PART: {"planner": np.ones((3, 3))}, SLIPS: {"": np.ones(5)}})
    assert (assign(batch, MODEL, history=foreign).credit.total_S == assign(batch, MODEL).credit.total_S).all()


def test_bins_hold_0_halves_and_1():
    assert bins(np.array([0.0, 0.25, 0.5, 0.75, 1.0])).tolist() == [0, 1, 2, 2, 3]


def test_charge_for_harm_adds_to_the_score():
    batch = batch_of(*simulated(8, {"planner": 0.3, "executor": 0.1}, 0.2, seed=6))
    assigned = assign(batch, credit_options("calibrated", score_weight="fixed", w_m=0.3, **BY_AGENT))
    expected_S = assigned.rewards.sub_reward_S - 1.0 + 0.3 * (assigned.fit.harmless_S - 1.0)
    assert assigned.credit.own_S == pytest.approx(np.where(assigned.rewards.scored_S, expected_S, 0.0))


@pytest.mark.parametrize(
    ("options", "words", "of_unscored"),
    [(MODEL, "w_m * (harmless - 1)", False), (RULE, "w_r * (harmless + (1 - harmless) * if_wrong", True)],
)
def test_explain_shows_the_probability(options, words, of_unscored):
    assigned = assign(batch_of(*simulated(4, {"planner": 0.3, "executor": 0.1}, 0.2, seed=5)), options)
    assert [words in str(explain(assigned, step)) for step in (0, 1)] == [of_unscored, True]


def test_posterior_pays_the_expected_sub_reward():
    trajectories = simulated(20, {"planner": 0.2, "executor": 0.2}, 0.2, seed=7)
    for trajectory in trajectories[::3]:
        trajectory.steps[2] = replace(trajectory.steps[2], scores={"r": Score(0.25)})
    assigned = assign(batch_of(*trajectories), credit_options("posterior", w_r=2.0, **BY_AGENT))
    right_S, score_S = assigned.fit.harmless_S, assigned.rewards.sub_reward_S
    executor_S = assigned.batch.agent_of_step == assigned.batch.agent_names.index("executor")
    below_S = assigned.rewards.scored_S & (score_S < 1.0)
    worth_S = np.where(below_S, score_S, np.where(executor_S, score_S[below_S & executor_S].mean(), 0.0))
    assert assigned.credit.own_S == pytest.approx(2.0 * (right_S + (1.0 - right_S) * worth_S - 1.0), abs=1e-12)
    assert assigned.credit.total_S.tolist() == assigned.credit.own_S.tolist()  # the outcome is not paid again


def test_learned_posteriors_approach_those_of_the_true_rates():
    score_AZB = np.array([[[0.4, 0.3, 0.2, 0.1], [0.1, 0.0, 0.1, 0.8]], [[0.5, 0.2, 0.2, 0.1], [0.05, 0.05, 0.1, 0.8]]])
    rates = Rates(np.array([0.4, 0.1]), score_AZB, np.array([0.05, 0.3]), 0.02)
    drawn, n = np.random.default_rng(0), 4000
    agent_S, cell_S = np.tile([0, 1, 1, 1, 1, 1], n), np.repeat(np.arange(n), 6)
    right_S = drawn.random(6 * n) >= rates.harm_A[agent_S]
    below_SB = score_AZB[agent_S, right_S.astype(int)].cumsum(axis=1)[:, :-1]
    bin_S = (drawn.random((6 * n, 1)) >= below_SB).sum(axis=1)
    killed_S = ~right_S & (drawn.random(6 * n) >= rates.survives_A[agent_S])
    passed_N = (np.bincount(cell_S, killed_S, n) == 0) & (drawn.random(n) >= rates.slip)
    seen = Observations(("planner", "executor"), cell_S, agent_S, bin_S, passed_N.astype(float))
    of_true = step_posteriors(rates, seen)
    batch = TrajectoryBatch.from_arrays(
        trajectory_of_step=cell_S,
        group_of_trajectory=np.arange(n) // 8,
        outcome=passed_N.astype(float),
        agent_of_step=agent_S,
        agent_names=("planner", "executor"),
        scores=np.array([0.0, 0.25, 0.75, 1.0])[bin_S][:, None],
    )
    assert np.abs(assign(batch, RULE).fit.harmless_S - of_true.harmless_S).mean() < 0.04


def test_posterior_blames_an_unscored_agent_for_lone_failures():
    rows = [((1, 1, 1), 1.0)] * 4 + [((1, 1, 1), 0.0)] * 4 + [((1, 0, 1), 0.0)] * 8
    trajectories = [
        make_trajectory(f"{i}", [step("planner"), *(step("executor", float(s)) for s in scores)], outcome)
        for i, (scores, outcome) in enumerate(rows)
    ]
    assigned = assign(batch_of(*trajectories), RULE)
    planner_N = assigned.credit.own_S[assigned.batch.index_of_step == 0]
    assert planner_N[4:8].max() < planner_N[8:].min() < planner_N[:4].min()


def test_posterior_without_evidence_trains_no_step():
    trajectories = [make_trajectory(f"{i}", [step("planner"), step("executor", 0.5)], None) for i in range(2)]
    assigned = assign(batch_of(*trajectories), RULE)
    assert assigned.groups.trained_S.tolist() == [False, True, False, True]
    assert (assigned.credit.total_S[::2] == 0.0).all()
    assert (assigned.credit.reached_S.astype(bool) == assigned.rewards.scored_S).all()
    assert (assigned.credit.own_S[1::2] < 0.0).all()
    assert explain(assigned, 0).operations[-1].note == "neither its score nor the outcome is known"
    assert "neither its score nor the outcome is known" in dict(worth_a_look(assigned)).values()


def test_outcome_between_its_ends_counts_in_proportion():
    def harmless(outcome: float, low: float = 0.0, high: float = 1.0) -> float:
        trajectory = make_trajectory("t", [step("planner", 0.0), step("executor", 1.0)], None)
        trajectory.outcome = Score(outcome, range=(low, high))
        return float(assign(batch_of(*others, trajectory), RULE).fit.harmless_S[-2])

    # The rates depend on one trajectory among many as good as not at all.
    others = simulated(150, {"planner": 0.2, "executor": 0.2}, 0.2, seed=10, scored=("planner", "executor"))
    between = harmless(0.4)
    assert between == pytest.approx(0.4 * harmless(1.0) + 0.6 * harmless(0.0), abs=2e-3)
    for rescaled in (harmless(40.0, 0.0, 100.0), harmless(-0.2, -1.0, 1.0)):
        assert rescaled == pytest.approx(between, abs=1e-9)


@pytest.mark.parametrize("options", [RULE, MODEL])
def test_model_is_finite_in_long_trajectories(options: CreditOptions):
    long = [step("planner"), *(step("executor", 0.0) for _ in range(3000))]
    trajectories = [make_trajectory(f"{i}", long, float(i % 2)) for i in range(2)]
    assigned = assign(batch_of(*trajectories, *simulated(2, {"planner": 0.3, "executor": 0.1}, 0.2, seed=11)), options)
    assert np.isfinite(assigned.fit.harmless_S).all()
    assert np.isfinite(assigned.fit.facts["model"]["slip"])


def test_history_of_observations_is_restored_from_json():
    history = History()
    for seed in range(10):
        history = assign(batch_of(*simulated(2, HARM, 0.2, seed=seed)), RULE, history=history).history_after
    assert len(history.observations) == 7
    restored = History.from_json(json.loads(json.dumps(history.to_json())))
    few = batch_of(*simulated(1, HARM, 0.1, seed=4))
    own = [assign(few, RULE, history=earlier).credit.own_S for earlier in (history, restored)]
    assert (own[0] == own[1]).all()
    broken = history.to_json()
    broken["observations"][0]["agent_S"][0] = 9
    with pytest.raises(DataError, match="history of credit"):
        History.from_json(broken)


def test_rates_of_a_large_batch_come_from_a_part_of_it(monkeypatch: pytest.MonkeyPatch):
    trajectories = simulated(60, {"planner": 0.2, "executor": 0.2}, 0.2, seed=12)
    whole = assign(batch_of(*trajectories), RULE)
    monkeypatch.setattr(posteriors, "_LEARNED_STEPS", 600)
    part = assign(batch_of(*trajectories), RULE, history=whole.history_after)
    assert len(part.history_after.observations[-1].cell_S) == 600
    assert np.abs(part.fit.harmless_S - whole.fit.harmless_S).mean() < 0.1


def test_posterior_without_sub_rewards_follows_the_outcome():
    batch = batch_of(*simulated(4, {"planner": 0.3, "executor": 0.1}, 0.2, seed=9))
    assigned = assign(batch, replace(RULE, reward_decomp=False))
    for agent in (0, 1):
        success_S = batch.outcome[batch.trajectory_of_step] == 1.0
        of_agent_S = batch.agent_of_step == agent
        low, high = (np.unique(assigned.credit.total_S[of_agent_S & at_S]) for at_S in (~success_S, success_S))
        assert low.max() < high.min()


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from((None, 0.0, 0.5, 1.0))), min_size=1, max_size=5),
            st.sampled_from((0.0, 1.0)),
        ),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from(tuple(LEVELS)),
)
def test_posterior_prefers_a_step_of_a_success(rows, group_by):
    """No step has a lower advantage than one of its agent and group with the same score in a failed rollout."""
    trajectories = [
        make_trajectory(f"{n}", [step(*of_step) for of_step in steps], outcome, task=f"q{n % 2}")
        for n, (steps, outcome) in enumerate(rows)
    ]
    assigned = assign(batch_of(*trajectories), credit_options("posterior", group_by=group_by))
    outcome_S = assigned.batch.outcome[assigned.batch.trajectory_of_step]
    score_S = np.nan_to_num(assigned.rewards.sub_reward_S, nan=-1.0)
    alike_S3 = np.column_stack([assigned.groups.group_S, assigned.batch.agent_of_step, score_S])
    for key in np.unique(alike_S3, axis=0):
        alike_S = (alike_S3 == key).all(axis=1)
        success, failure = (assigned.advantage.advantage_S[alike_S & (outcome_S == value)] for value in (1.0, 0.0))
        assert success.min(initial=np.inf) >= failure.max(initial=-np.inf) - 1e-9


@pytest.mark.parametrize("group_by", ["agent", "agent_turn", "task_agent"])
def test_posterior_praises_every_right_step_of_a_success(group_by):
    """Right steps of a solver and a checker, but for one wrong solver step in a quarter of the rollouts, which fail."""
    drawn, trajectories = random.Random(0), []
    for n in range(64):
        pairs = 1 + n // 8 % 4
        wrong = drawn.randrange(pairs) if n % 4 == 0 else -1
        steps = [s for k in range(pairs) for s in (step("solver", float(k != wrong)), step("checker", 1.0))]
        trajectories.append(make_trajectory(f"{n}", steps, float(wrong < 0), task=f"q{n // 8}"))
    assigned = assign(batch_of(*trajectories), credit_options("posterior", group_by=group_by))
    success_S = assigned.batch.outcome[assigned.batch.trajectory_of_step] == 1.0
    assert (assigned.advantage.advantage_S[success_S] > 0).all()
