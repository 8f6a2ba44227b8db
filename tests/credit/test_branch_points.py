"""Decisions are drawn with their probabilities, within a budget; their weights ignore later events."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit import CreditOptions, assign
from creditflow.credit.branch_points import PREFERENCES, branch_cost, choose_branch_points, mean_surprisal
from creditflow.errors import ConfigError
from tests.builders import batch_of, make_trajectory, step

AGENTS = ("planner", "solver", "solver", "checker", "solver")


def batch(lengths, tokens=2, surprisals=None):
    """Trajectories of given lengths; `surprisals`: by trajectory, of each step's tokens."""
    rows = []
    for n, length in enumerate(lengths):
        of_steps = [1.0] * length if surprisals is None else surprisals[n]
        steps = [
            step(agent, tokens=tokens, logprobs=(-value,) * tokens)
            for agent, value in zip(AGENTS, of_steps, strict=False)
        ]
        rows.append(make_trajectory(str(n), steps[:length], float(n % 2)))
    return batch_of(*rows)


def points(of, at="random", budget=lambda tokens: 0.5 * tokens, seed=0, candidates=None, **more):
    chosen_S = np.ones(of.n_steps, dtype=np.bool_) if candidates is None else candidates
    rng = np.random.default_rng(seed)
    return choose_branch_points(of, chosen_S, at, branch_cost(of, 2, 1), budget, rng, **more)


def test_branch_cost_counts_new_tokens():
    of = batch([3], tokens=4)
    assert branch_cost(of, 2, 1).tolist() == [12.0, 8.0, 4.0]
    assert branch_cost(of, 3, 2).tolist() == [24.0 + 24.0, 16.0 + 12.0, 8.0 + 0.0]


@pytest.mark.parametrize("at", ["random", "agents", "uncertain", "disputed"])
def test_steps_are_drawn_with_their_probabilities(at):
    rng = np.random.default_rng(1)
    lengths = [5, 3, 4, 5]
    of = batch(lengths, surprisals=[rng.uniform(0.1, 3.0, 5).tolist() for _ in lengths])
    posterior = {"posterior_S": rng.uniform(size=of.n_steps)}
    drawn_S = np.zeros(of.n_steps)
    for seed in range(4000):
        made = points(of, at, seed=seed, **posterior)
        drawn_S[made.step_N[made.step_N >= 0]] += 1 / 4000
    assert drawn_S == pytest.approx(made.probability_S, abs=0.03)
    assert np.bincount(of.trajectory_of_step, made.probability_S).max() <= 1.0


@given(st.lists(st.integers(1, 5), min_size=2, max_size=12), st.integers(0, 99), st.floats(0.05, 4.0))
def test_trajectory_branches_at_most_once_and_at_a_candidate(lengths, seed, share):
    of = batch(lengths)
    candidate_S = np.random.default_rng(seed).uniform(size=of.n_steps) < 0.7
    made = points(of, seed=seed, budget=lambda tokens: share * tokens, candidates=candidate_S)
    drawn = made.step_N[made.step_N >= 0]
    assert candidate_S[drawn].all()
    assert np.array_equal(of.trajectory_of_step[drawn], np.flatnonzero(made.step_N >= 0))
    assert abs(len(drawn) - made.probability_S.sum()) < 1.0 + 1e-9
    assert not made.probability_S[~candidate_S].any()


def test_expected_cost_equals_the_budget():
    of = batch([5] * 40)
    made = points(of, budget=lambda tokens: 0.3 * tokens)
    assert made.probability_S @ branch_cost(of, 2, 1) == pytest.approx(0.3 * len(of.response_ids))


def test_draws_of_one_batch_are_spread_over_all_steps():
    of = batch([5] * 40)
    drawn = points(of, budget=lambda tokens: 9.0 * tokens).step_N
    assert np.bincount(of.index_of_step[drawn]) == pytest.approx([8] * 5, abs=1)


def test_exhausted_budget_draws_nothing():
    of = batch([5] * 4)
    assert (points(of, budget=lambda tokens: -7.0).step_N == -1).all()


def test_weights_are_1_in_workflows_of_fixed_length():
    of = batch([5] * 6)
    for at in ("random", "agents"):
        assert (points(of, at).weight_S == 1.0).all()


@given(st.lists(st.integers(1, 5), min_size=3, max_size=8), st.integers(1, 5), st.sampled_from(["random", "agents"]))
def test_expected_weight_ignores_later_events(lengths, other, at):
    """p * w of a first step stays the same if its trajectory takes another course."""
    one, two = batch([3, *lengths]), batch([other, *lengths])
    expected = [made.probability_S[0] * made.weight_S[0] for made in (points(one, at), points(two, at))]
    assert expected[0] == pytest.approx(expected[1], rel=1e-12)


@given(st.lists(st.floats(0.01, 5.0), min_size=5, max_size=5), st.lists(st.floats(0.01, 5.0), min_size=5, max_size=5))
def test_expected_weight_ignores_later_surprisals(before, after):
    others = [[0.5, 1.0, 2.0, 0.1, 1.0], [1.0, 0.2, 0.3, 0.4, 2.0]]
    made = [points(batch([5, 5, 5], surprisals=[one, *others]), "uncertain") for one in (before, after)]
    expected = [one.probability_S[:5] * one.weight_S[:5] for one in made]
    assert expected[0] == pytest.approx(expected[1], rel=1e-9)
    assert (made[0].probability_S[:5] > 0).all()


def test_uncertain_prefers_surprising_steps():
    of = batch([3, 3], surprisals=[[0.1, 2.9, 0.1], [1.0, 1.0, 1.0]])
    assert mean_surprisal(of)[:3] == pytest.approx([0.1, 2.9, 0.1])
    share = points(of, "uncertain").probability_S[:3]
    assert share / share.sum() == pytest.approx([0.5 * x / 3.1 + 1 / 6 for x in (0.1, 2.9, 0.1)])


def test_disputed_prefers_posteriors_near_one_half():
    of = batch([3, 3])
    posterior_S = np.array([0.5, 1.0, 0.0, np.nan, 0.9, 0.1])
    share = points(of, "disputed", posterior_S=posterior_S).probability_S
    assert share[:3] / share[:3].sum() == pytest.approx([0.5 + 1 / 6, 1 / 6, 1 / 6])
    assert share[3] > share[4] == pytest.approx(share[5])


@pytest.mark.parametrize("other", ["missing", "unreliable"])
def test_disputed_spares_steps_with_reliable_scores(other):
    rng, rows = np.random.default_rng(3), []
    for n in range(400):
        right = rng.uniform(size=2) < 0.8
        noisy = float(right[1] != (rng.uniform() < 0.35))  # a third is inverted
        scores = {"planner": float(right[0]), "checker": None if other == "missing" else noisy}
        steps = [step(agent, score, tokens=2) for agent, score in scores.items()]
        rows.append(make_trajectory(str(n), steps, float(right.all())))
    of = batch_of(*rows)
    posterior_S = assign(of, CreditOptions(propagation="none", score_model="noisy_and")).harmless_S
    failed_S = of.outcome[of.trajectory_of_step] == 0
    place_S = points(of, "disputed", posterior_S=posterior_S).probability_S
    reliable, disputed = (place_S[failed_S & (of.agent_of_step == a)].mean() for a in range(2))
    assert disputed > 1.5 * reliable


def test_disputed_without_a_posterior_is_refused():
    with pytest.raises(ConfigError, match=r"branching\.at: disputed needs the posterior of each step being right"):
        points(batch([3, 3]), "disputed")


def test_agents_have_equal_probabilities():
    of = batch([5, 5])
    share = points(of, "agents").probability_S[:5]
    by_agent = {agent: share[[a == agent for a in AGENTS]].sum() for agent in set(AGENTS)}
    assert list(by_agent.values()) == pytest.approx([share.sum() / 3] * 3)


def test_every_preference_has_a_choice_in_the_configuration():
    from typing import get_args

    from creditflow.config.rollout import BranchingConfig

    assert get_args(BranchingConfig.model_fields["at"].annotation) == tuple(PREFERENCES)


def test_single_trajectory_may_branch():
    made = points(batch([4]), budget=lambda tokens: 9.0 * tokens)
    assert made.step_N[0] >= 0
    assert (made.weight_S == 1.0).all()
