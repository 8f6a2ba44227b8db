"""The score model and the rule `posterior`: exact posterior, learned rates, options."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit import CreditOptions, assign, explain, posteriors
from creditflow.credit.history import History, Observations
from creditflow.credit.posteriors import BINS, PART, SLIPS, Rates, bins, step_posteriors
from creditflow.data import Score, TrajectoryBatch
from creditflow.errors import ConfigError, DataError
from tests.builders import batch_of, examples, make_trajectory, step
from tests.credit.strategies import situations
from tests.oracle import fitted as oracle

MODEL = CreditOptions(
    propagation="none", score_model="noisy_and", w_r=0.0, w_m=1.0, group_by="task_agent", adv_estimator="rloo"
)

RULE = CreditOptions(propagation="posterior", group_by="task_agent", adv_estimator="rloo")

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
    agents = assigned.fitted["model"]["agents"]
    assert agents["planner"]["harm"] == pytest.approx(0.3, abs=0.05)
    assert agents["executor"]["harm"] == pytest.approx(0.1, abs=0.03)
    harm, no_harm = agents["executor"]["scores"]
    assert (harm[-1], no_harm[-1]) == pytest.approx((0.2, 0.8), abs=0.06)


def test_posterior_separates_harm_better_than_noisy_scores():
    trajectories = simulated(100, {"planner": 0.1, "executor": 0.1}, 0.35, seed=1, scored=("planner", "executor"))
    assigned = assign(batch_of(*trajectories), MODEL)
    fine_S = np.array([fine for trajectory in trajectories for fine in trajectory.info["states"]])
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
    trajectories = [
        make_trajectory(f"{i}", [step("planner"), step("executor", score)], outcome, task=f"q{i % 10}")
        for i, (_, score, outcome) in enumerate(rows)
    ]
    assigned = assign(batch_of(*trajectories), MODEL)
    planner_S = assigned.batch.agent_of_step == assigned.batch.agent_names.index("planner")
    unexplained, explained = (assigned.harmless_S[planner_S][at::3].mean() for at in (1, 2))
    assert unexplained < explained - 0.3
    assert (assigned.own_S[planner_S] == 0.0).all()
    assert (assigned.own_S[~planner_S][2::3] < 0.0).all()


@pytest.mark.parametrize(("options", "between"), [(MODEL, 0.5), (RULE, 0.6)])
def test_model_remembers_earlier_batches(options: CreditOptions, between: float):
    often = {"planner": 0.7, "executor": 0.02}
    first = assign(batch_of(*simulated(50, often, 0.1, seed=3)), options).history_after
    few = batch_of(*simulated(1, often, 0.1, seed=4))
    alone, informed = assign(few, options), assign(few, options, history=first)
    harm = [a.fitted["model"]["agents"]["planner"]["harm"] for a in (alone, informed)]
    assert harm[0] < between < harm[1]
    assert set(informed.history_after.parts) == ({PART, SLIPS} if options is MODEL else set())
    assert len(informed.history_after.observations) == (0 if options is MODEL else 2)


def test_model_ignores_sums_of_another_shape():
    batch = batch_of(*simulated(5, HARM, 0.1, seed=5))
    foreign = History({PART: {"planner": np.ones((3, 3))}, SLIPS: {"": np.ones(5)}})
    assert (assign(batch, MODEL, history=foreign).credit_S == assign(batch, MODEL).credit_S).all()


def test_bins_hold_0_halves_and_1():
    assert bins(np.array([0.0, 0.25, 0.5, 0.75, 1.0])).tolist() == [0, 1, 2, 2, 3]


def test_charge_for_harm_adds_to_the_score():
    batch = batch_of(*simulated(8, {"planner": 0.3, "executor": 0.1}, 0.2, seed=6))
    assigned = assign(batch, replace(MODEL, w_r=1.0, w_m=0.3))
    expected_S = assigned.sub_reward_S - 1.0 + 0.3 * (assigned.harmless_S - 1.0)
    assert assigned.own_S == pytest.approx(np.where(assigned.scored_S, expected_S, 0.0))


@pytest.mark.parametrize(
    ("options", "words", "of_unscored"),
    [(MODEL, "probability of no harm", False), (RULE, "probability of being right", True)],
)
def test_explain_shows_the_probability(options, words, of_unscored):
    assigned = assign(batch_of(*simulated(4, {"planner": 0.3, "executor": 0.1}, 0.2, seed=5)), options)
    assert [words in str(explain(assigned, step)) for step in (0, 1)] == [of_unscored, True]


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


def test_posterior_pays_the_expected_sub_reward():
    trajectories = simulated(20, {"planner": 0.2, "executor": 0.2}, 0.2, seed=7)
    for trajectory in trajectories[::3]:
        trajectory.steps[2] = replace(trajectory.steps[2], scores={"r": Score(0.25)})
    assigned = assign(batch_of(*trajectories), replace(RULE, w_r=2.0, outcome_to="all"))
    right_S, score_S = assigned.harmless_S, assigned.sub_reward_S
    executor_S = assigned.batch.agent_of_step == assigned.batch.agent_names.index("executor")
    below_S = assigned.scored_S & (score_S < 1.0)
    worth_S = np.where(below_S, score_S, np.where(executor_S, score_S[below_S & executor_S].mean(), 0.0))
    assert assigned.own_S == pytest.approx(2.0 * (right_S + (1.0 - right_S) * worth_S - 1.0), abs=1e-12)
    assert assigned.shared_S == pytest.approx(assigned.batch.outcome[assigned.batch.trajectory_of_step])


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
    assert np.abs(assign(batch, RULE).harmless_S - of_true.harmless_S).mean() < 0.04


def test_posterior_blames_an_unscored_agent_for_lone_failures():
    rows = [((1, 1, 1), 1.0)] * 4 + [((1, 1, 1), 0.0)] * 4 + [((1, 0, 1), 0.0)] * 8
    trajectories = [
        make_trajectory(f"{i}", [step("planner"), *(step("executor", float(s)) for s in scores)], outcome)
        for i, (scores, outcome) in enumerate(rows)
    ]
    assigned = assign(batch_of(*trajectories), RULE)
    planner_N = assigned.own_S[assigned.batch.index_of_step == 0]
    assert planner_N[4:8].max() < planner_N[8:].min() < planner_N[:4].min()


def test_posterior_without_evidence_trains_no_step():
    trajectories = [make_trajectory(f"{i}", [step("planner"), step("executor", 0.5)], None) for i in range(2)]
    assigned = assign(batch_of(*trajectories), RULE)
    assert assigned.trained_S.tolist() == [False, True, False, True]
    assert (assigned.credit_S[::2] == 0.0).all()
    assert (assigned.reached_S.astype(bool) == assigned.scored_S).all()
    assert (assigned.own_S[1::2] < 0.0).all()
    assert explain(assigned, 0).operations[-1].note == "neither its score nor the outcome is known"


def test_outcome_between_its_ends_counts_in_proportion():
    def harmless(outcome: float, low: float = 0.0, high: float = 1.0) -> float:
        trajectory = make_trajectory("t", [step("planner", 0.0), step("executor", 1.0)], None)
        trajectory.outcome = Score(outcome, range=(low, high))
        return float(assign(batch_of(*others, trajectory), RULE).harmless_S[-2])

    # The rates depend on one trajectory among many as good as not at all.
    others = simulated(150, {"planner": 0.2, "executor": 0.2}, 0.2, seed=10, scored=("planner", "executor"))
    between = harmless(0.4)
    assert between == pytest.approx(0.4 * harmless(1.0) + 0.6 * harmless(0.0), abs=2e-3)
    for rescaled in (harmless(40.0, 0.0, 100.0), harmless(-0.2, -1.0, 1.0)):
        assert rescaled == pytest.approx(between, abs=1e-9)


@examples(100)
@given(situations(propagation="posterior", decomp_granularity="step"))
def test_posterior_explains_the_credit_of_every_step(situation):
    trajectories, chosen, values_T = situation
    values = None if values_T is None else np.array(values_T)
    assigned = assign(batch_of(*trajectories), chosen, values_T=values)
    for s in range(assigned.batch.n_steps):
        explained = explain(assigned, s)
        assert explained.replay() == assigned.advantage_S[s]
        credit = [operation.value for operation in explained.operations if operation.name == "credit"]
        assert credit in ([], [assigned.credit_S[s]])


@pytest.mark.parametrize("options", [RULE, MODEL])
def test_model_is_finite_in_long_trajectories(options: CreditOptions):
    long = [step("planner"), *(step("executor", 0.0) for _ in range(3000))]
    trajectories = [make_trajectory(f"{i}", long, float(i % 2)) for i in range(2)]
    assigned = assign(batch_of(*trajectories, *simulated(2, {"planner": 0.3, "executor": 0.1}, 0.2, seed=11)), options)
    assert np.isfinite(assigned.harmless_S).all()
    assert np.isfinite(assigned.fitted["model"]["slip"])


def test_history_of_observations_is_restored_from_json():
    history = History()
    for seed in range(10):
        history = assign(batch_of(*simulated(2, HARM, 0.2, seed=seed)), RULE, history=history).history_after
    assert len(history.observations) == 7
    restored = History.from_json(json.loads(json.dumps(history.to_json())))
    few = batch_of(*simulated(1, HARM, 0.1, seed=4))
    own = [assign(few, RULE, history=earlier).own_S for earlier in (history, restored)]
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
    assert np.abs(part.harmless_S - whole.harmless_S).mean() < 0.1


def test_posterior_without_sub_rewards_is_the_outcome():
    batch = batch_of(*simulated(4, {"planner": 0.3, "executor": 0.1}, 0.2, seed=9))
    alone = replace(RULE, reward_decomp=False)
    same = assign(batch, replace(alone, propagation="none"))
    assert (assign(batch, alone).credit_S == same.credit_S).all()
