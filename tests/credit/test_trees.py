"""Replay credit on trees of branches, against a slow implementation (`tests/oracle/trees.py`)."""

import numpy as np
import pytest

from creditflow.credit import CreditOptions, assign, explain
from creditflow.credit.analysis.difference import moved
from creditflow.credit.analysis.metrics import batch_stats, credit_metrics
from creditflow.credit.trees import KEY, rollouts_of
from creditflow.data import Score, read_parquet, write_parquet
from creditflow.errors import BatchError, ConfigError
from tests.builders import batch_of, make_trajectory, step
from tests.credit.forests import forest
from tests.credit.test_explain import assert_explained
from tests.oracle import trees as oracle
from tests.oracle.fitted import harmless
from tests.trees import tree_of_branches

WEIGHTS = {"weight 1": (1.0,), "other weights": (0.5, 1.0, 1.75)}
ESTIMATORS = {
    "rloo": ({"adv_estimator": "rloo"}, {}),
    "dr grpo": ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, {"own_in_mean": True}),
    "grpo": ({"adv_estimator": "grpo"}, {"own_in_mean": True, "scaled": True}),
}


def options(**more):
    return CreditOptions(**({"propagation": "replay", "adv_estimator": "rloo", "group_by": "task_agent_turn"} | more))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_credit_of_trees_equals_the_oracle(weights, estimator):
    chosen, keywords = ESTIMATORS[estimator]
    compared = 0
    for seed in range(60):
        trajectories, trees = forest(seed, weights=WEIGHTS[weights], failures=0.15)
        a = assign(batch_of(*trajectories), options(**chosen))
        within = [a.level_names.index(level) for level in ("task_agent_turn", "decision")]
        expected = oracle.contributions(trees, **keywords)
        pushed = dict(zip(a.batch.step_ids, (a.share_S * a.advantage_S).tolist(), strict=True))
        for s, id in enumerate(a.batch.step_ids):
            if id in expected and np.isfinite(expected[id]) and a.level_S[s] in within:
                assert pushed[id] == pytest.approx(expected[id], rel=0, abs=1e-11), (seed, id)
                compared += 1
            elif id not in expected:
                assert pushed[id] == 0.0
    assert compared > 1000


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("estimator", ["rloo", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_replay_explanations_give_equal_bits(estimator, weights):
    for seed in range(4):
        trajectories, _ = forest(seed, weights=WEIGHTS[weights], failures=0.15)
        assert_explained(assign(batch_of(*trajectories), options(adv_estimator=estimator, w_o=0.7)))


def one_decision(**more):
    """Two rollouts of a task; the first branches at its second step into two alternatives of two continuations."""

    def made(id, outcome, new=None, of=None):
        steps = [step("a", tokens=1), step("b", tokens=1), step("c", tokens=2)]
        for place, spec in enumerate(steps):
            spec.more["branch_of"] = "x" if place == new else None
        one = make_trajectory(id, steps, outcome)
        one.info |= {KEY: of} if of else {}
        return one

    recorded = made("t", 1.0, of={"at": 1, "probability": 0.3, "weight": 1.0})
    branches = [
        made("t~0.1", 0.0, 2, {"of": "t", "alternative": 0, "continuation": 1}),
        made("t~1.0", 0.0, 1, {"of": "t", "alternative": 1, "continuation": 0}),
        made("t~1.1", 0.0, 2, {"of": "t", "alternative": 1, "continuation": 1}),
    ]
    return assign(batch_of(recorded, made("other", 0.0), *branches), options(**more))


def by_id(assigned, column_S):
    return dict(zip(assigned.batch.step_ids, column_S.tolist(), strict=True))


def test_alternatives_are_compared_with_one_another():
    a = one_decision()
    credit, advantage, share = (by_id(a, column_S) for column_S in (a.credit_S, a.advantage_S, a.share_S))
    assert (credit["t.1"], credit["t~1.0.1"]) == (0.5, 0.0)
    assert (advantage["t.1"], advantage["t~1.0.1"]) == (0.5, -0.5)
    assert credit["t.0"] == 0.25  # the mean of the four leaves
    assert (advantage["t.2"], advantage["t~0.1.2"]) == (1.0, 0.0)
    assert [share[id] for id in ("t.0", "t.1", "t.2", "t~1.1.2")] == [1.0, 0.5, 0.25, 0.25]


def test_copied_steps_are_not_trained_again():
    a = one_decision()
    trained = {id for id, one in by_id(a, a.trained_S).items() if one}
    assert trained == {"t.0", "t.1", "t.2", "other.0", "other.1", "other.2", "t~0.1.2", "t~1.0.1", "t~1.0.2", "t~1.1.2"}
    assert "copy of a recorded step" in str(explain(a, "t~1.1.1"))


def test_shares_of_a_tree_sum_to_one_trajectory():
    a = one_decision()
    share_I = np.bincount(a.batch.index_of_step, np.where(a.trained_S, a.share_S, 0.0))
    assert share_I.tolist() == [2.0, 2.0, 2.0]  # two recorded trajectories


def test_explanation_names_siblings_and_returns():
    text = str(explain(one_decision(), "t.1"))
    assert "return of t = 1.0" in text
    assert "return of t~0.1 = 0.0" in text
    assert "baseline = sum for baseline" in text
    assert "credit of t~1.0.1 = 0.0" in text


@pytest.mark.parametrize("rule", ["none", "identical", "threshold"])
def test_other_rules_ignore_branches(rule):
    trajectories, _ = forest(3, failures=0.2)
    recorded = [one for one in trajectories if "~" not in one.id]
    whole = assign(batch_of(*trajectories), CreditOptions(propagation=rule))
    alone = assign(batch_of(*recorded), CreditOptions(propagation=rule))
    n = alone.batch.n_steps
    assert np.array_equal(whole.advantage_S[:n], alone.advantage_S)
    assert np.array_equal(whole.baseline_S[:n], alone.baseline_S, equal_nan=True)
    assert not whole.trained_S[n:].any()
    assert f"it is in a branch, and {rule} trains on none" in str(explain(whole, whole.batch.n_steps - 1))


def test_replay_without_branches_equals_none():
    trajectories = [one for one in forest(5)[0] if "~" not in one.id]
    one, other = (assign(batch_of(*trajectories), CreditOptions(propagation=rule)) for rule in ("replay", "none"))
    assert np.array_equal(one.advantage_S, other.advantage_S)


def test_branches_are_in_no_baseline():
    trajectories, _ = forest(8)
    recorded = [one for one in trajectories if "~" not in one.id]
    whole = assign(batch_of(*trajectories), options(adv_estimator="grpo"))
    alone = assign(batch_of(*recorded), options(adv_estimator="grpo", propagation="none"))
    decided = whole.level_names.index("decision")
    at = np.flatnonzero(whole.level_S[: alone.batch.n_steps] != decided)
    assert np.array_equal(whole.baseline_S[at], alone.baseline_S[at], equal_nan=True)
    assert len(at) < alone.batch.n_steps


def test_branch_without_its_recorded_trajectory_is_refused():
    trajectories, _ = forest(8)
    branches = [one for one in trajectories if "~" in one.id]
    with pytest.raises(BatchError, match=r"expected the trajectory .*, of which it is a branch, in the same batch"):
        assign(batch_of(*branches), options())


def test_trees_survive_a_round_trip_through_parquet(tmp_path):
    batch = batch_of(*forest(4, weights=(0.5, 1.0))[0])
    write_parquet(batch, tmp_path / "batch.parquet")
    again = read_parquet(tmp_path / "batch.parquet")
    one, two = assign(batch, options()), assign(again, options())
    assert np.array_equal(one.advantage_S, two.advantage_S)
    assert np.array_equal(one.share_S, two.share_S)


def test_score_model_reads_copies_and_learns_from_rollouts():
    trajectories = tree_of_branches()
    for one in trajectories:  # the planner of `t` was wrong, and its branches repeat that
        for own in one.steps:
            right = own.agent != "planner" or one.id == "other"
            own.scores = {"f": Score(float(right))}
    chosen = {"propagation": "replay", "score_model": "noisy_and"}
    whole = assign(batch_of(*trajectories), options(**chosen))
    alone = assign(batch_of(*trajectories[:2]), options(**chosen))
    n = alone.batch.n_steps
    assert whole.fitted == alone.fitted
    assert np.array_equal(whole.harmless_S[:n], alone.harmless_S)
    model = whole.fitted["model"]
    agents = [model["agents"][one.agent] for one in trajectories[2].steps]
    wrong, right = 0, 3  # bins of the scores
    bins = (wrong, right, right)
    likelihoods = [(of["scores"][0][b], of["scores"][1][b]) for of, b in zip(agents, bins, strict=True)]
    expected = harmless([one["harm"] for one in agents], likelihoods, model["slip"], False)
    assert by_id(whole, whole.harmless_S)["t~0.1.2"] == pytest.approx(expected[2], abs=1e-12)


def test_stratum_weights_count_shares_of_branches():
    trajectories = tree_of_branches()
    for one in trajectories:
        for own in one.steps:
            own.stratum = f"{own.agent} of {'other' if one.id == 'other' else 't'}"
    a = assign(batch_of(*trajectories), options())
    assert a.weight_S[a.trained_S] == pytest.approx(1.0)  # two trajectories, one in each stratum


REFUSED = {
    "adv_estimator": "gae",
    "outcome_to": "answer",
    "outcome_baseline": "prefix",
    "baseline": "shrunk",
    "decomp_granularity": "token_level",
}


@pytest.mark.parametrize("key", REFUSED)
def test_replay_refuses_contradicting_options(key):
    more = {"adv_estimator": "gae", "outcome_to": "answer"} if key == "adv_estimator" else {key: REFUSED[key]}
    with pytest.raises(ConfigError, match=r"algorithm\.(adv_estimator|outcome_to|outcome_baseline|baseline|decomp)"):
        options(**more).validate()


def test_alternatives_do_not_count_as_alone():
    assert credit_metrics(one_decision())["groups/alone/b"] == 0.0


def test_copies_count_as_neither_masked_nor_frozen_steps():
    metrics = credit_metrics(one_decision())
    assert metrics["groups/masked_steps"] == metrics["groups/frozen_steps"] == 0.0
    assert not any(name.startswith("groups/frozen/") and share for name, share in metrics.items())


@pytest.mark.parametrize("rule", ["none", "identical", "threshold"])
def test_metrics_of_other_rules_count_no_branches(rule):
    whole, alone = (
        assign(batch_of(*some), CreditOptions(propagation=rule, outcome_to="answer"))
        for some in (tree_of_branches(), tree_of_branches()[:2])
    )
    assert credit_metrics(whole) == credit_metrics(alone)
    for agent, values in batch_stats(alone).sub_rewards.items():
        assert batch_stats(whole).sub_rewards[agent].tolist() == values.tolist()


def test_changes_of_credit_count_no_branches():
    whole, alone = (
        [assign(batch_of(*some), options(propagation=rule)) for rule in ("replay", "none")]
        for some in (tree_of_branches(), tree_of_branches()[:2])
    )
    found, expected = moved(*whole), moved(*alone)
    assert {name: one.steps for name, one in found.items()} == {name: one.steps for name, one in expected.items()}
    assert not any(one.masked or one.unmasked for one in found.values())


def test_foreign_entries_under_the_key_are_no_branches():
    batch = batch_of(make_trajectory("a", [step("a", tokens=1)], 1.0), make_trajectory("b", [step("a", tokens=1)], 0.0))
    for info, entry in zip(
        batch.trajectory_info, ("main", {"of": 3, "alternative": 1, "continuation": 0}), strict=True
    ):
        info[KEY] = entry
    assert rollouts_of(batch).all()
