"""Metrics: each by hand on a small batch, and agents without a signal."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given

from creditflow.credit import assign, unreached_agents
from creditflow.credit.analysis.metrics import batch_stats, credit_metrics
from creditflow.credit.groups import describe
from creditflow.data import Score
from tests.builders import batch_of, credit_options, credited, make_trajectory, step
from tests.credit.strategies import options, trajectories


def metrics(*trajectories, **chosen):
    return credit_metrics(credited(*trajectories, **chosen))


def test_pass_rate_is_the_share_of_open_gates():
    got = metrics(
        make_trajectory("t0", [step("plan"), step("write", 0.75), step("verify", 1.0)], 1.0),
        make_trajectory("t1", [step("plan"), step("write", 0.25), step("verify", 0.5)], 1.0),
        make_trajectory("t2", [step("plan"), step("write", 0.0)], 1.0, status="failed"),
    )
    assert got["propagation/pass_rate"] == 0.5
    assert got["propagation/pass_rate/write"] == 0.5
    assert got["propagation/pass_rate/verify"] == 0.5
    assert "propagation/pass_rate/plan" not in got


def test_gated_off_is_the_share_of_withheld_credit():
    got = metrics(
        make_trajectory("t0", [step("plan"), step("write", 1.0)]),
        make_trajectory("t1", [step("plan"), step("write", 0.25)]),
        make_trajectory("t2", [step("plan"), step("write", 0.5)]),
        sub_reward_origin=0.0,
    )
    assert got["credit/gated_off/write"] == pytest.approx((0.25 + 0.5) / 1.75)
    assert "credit/gated_off/plan" not in got
    assert got["credit/mean/plan"] == pytest.approx(0.99 / 3)


def test_mis_credited_counts_contradictions_of_measured_scores():
    def measured(id, verdict, outcome):
        return make_trajectory(id, [step("a", {"m": Score(verdict, weight=0.0)})], outcome)

    got = metrics(
        measured("t0", 1.0, 0.0),  # right, with a negative advantage
        measured("t1", 0.5, 1.0),  # wrong, with a positive advantage
        measured("t2", 1.0, 1.0),
        measured("t3", 0.0, 0.0),
        make_trajectory("t4", [step("a")], 0.0),  # unscored
    )
    assert got["credit/mis_credited/a"] == 0.5


def test_mis_credited_ignores_advantages_of_0():
    equal = [make_trajectory(f"t{n}", [step("a", 0.5)]) for n in range(2)]
    assert metrics(*equal)["credit/mis_credited/a"] == 0.0


def test_group_metrics_count_groups_and_steps():
    got = metrics(
        make_trajectory("t0", [step("a", 0.5), step("b", 1.0), step("c", 1.0)]),
        make_trajectory("t1", [step("a", 0.5), step("b", 0.0), step("b", "failed")]),
        propagation="none",
    )
    assert got["groups/zero_variance"] == 1.0  # a
    assert got["groups/singletons"] == 1.0  # c
    assert got["groups/no_baseline"] == 1.0  # c
    assert got["groups/masked_steps"] == 1.0  # the failed one


def test_credit_explained_var_uses_the_final_credit():
    scores = (0.0, 0.5, 1.0)
    batch = batch_of(
        *(
            make_trajectory(f"t{n}", [step("a", r, tokens=2), step("b", 1 - r, tokens=1)], r)
            for n, r in enumerate(scores)
        )
    )
    chosen = {"adv_estimator": "gae", "outcome_to": "answer", "propagation": "discounted"}
    credit_T = assign(batch, credit_options(**chosen, lam=1.0), values_T=np.zeros(len(batch.response_ids))).returns_T
    key = "critic/credit_explained_var"
    for lam in (0.0, 0.5, 1.0):
        options = credit_options(**chosen, lam=lam)
        assert credit_metrics(assign(batch, options, values_T=credit_T))[key] == pytest.approx(1.0)
        half = credit_metrics(assign(batch, options, values_T=0.5 * credit_T))[key]
        assert half == pytest.approx(0.75)
    assert key not in credit_metrics(assign(batch, credit_options(propagation="threshold")))


def unscored_planner(n, r, outcome=1.0):
    return make_trajectory(f"t{n}", [step("plan"), step("write", r), step("verify")], outcome)


@pytest.mark.parametrize(
    ("chosen", "reach"),
    [
        ({}, {"plan": 1.0, "write": 1.0, "verify": 1.0}),
        ({"propagation": "identical"}, {"plan": 1.0, "write": 1.0, "verify": 1.0}),
        ({"propagation": "none", "outcome_to": "answer"}, {"plan": 0.0, "write": 1.0, "verify": 1.0}),
        ({"propagation": "discounted", "w_o": 0.0}, {"plan": 1.0, "write": 1.0, "verify": 0.0}),
        ({"propagation": "threshold", "w_o": 0.0}, {"plan": 0.5, "write": 1.0, "verify": 0.0}),
        (
            {"propagation": "discounted", "outcome_to": "answer", "gamma": 0.0},
            {"plan": 0.0, "write": 1.0, "verify": 1.0},
        ),
        ({"propagation": "none", "w_o": 0.0, "w_r": 0.0}, {"plan": 0.0, "write": 0.0, "verify": 0.0}),
        (
            {"reward_decomp": False, "outcome_to": "answer", "propagation": "none"},
            {"plan": 0.0, "write": 0.0, "verify": 1.0},
        ),
    ],
)
def test_reach_is_the_share_of_trajectories_with_a_signal(chosen, reach):
    assigned = credited(unscored_planner(0, 1.0), unscored_planner(1, 0.25), **chosen)
    got = credit_metrics(assigned)
    assert {agent: got[f"credit/reach/{agent}"] for agent in reach} == reach
    assert unreached_agents(assigned) == tuple(agent for agent, share in reach.items() if share == 0.0)


def test_values_of_a_critic_carry_the_outcome_to_unscored_agents():
    batch = batch_of(unscored_planner(0, 1.0), unscored_planner(1, 0.25, 0.0))
    for w_o, unreached in ((1.0, ()), (0.0, ("plan", "verify"))):
        chosen = credit_options("own", adv_estimator="gae", w_o=w_o)
        assigned = assign(batch, chosen, values_T=np.zeros(batch.response_mask.size))
        assert unreached_agents(assigned) == unreached


def test_right_child_with_credit_0_counts_as_a_signal():
    assigned = credited(make_trajectory("t", [step("plan"), step("write", 1.0)]))
    assert assigned.credit.received_S[0] == 0.0
    assert unreached_agents(assigned) == ()


def test_agents_without_any_reward_are_unreached():
    assigned = credited(make_trajectory("t", [step("plan"), step("write")]))
    assert unreached_agents(assigned) == ("plan", "write")


def test_substitute_for_a_failed_score_gives_no_reach():
    trajectories = [make_trajectory("t0", [step("a", "failed")]), make_trajectory("t1", [step("a", 0.5)])]
    assert metrics(*trajectories)["credit/reach/a"] == 0.5


@given(trajectories(), options())
def test_metrics_are_finite_and_shares_are_in_0_to_1(trajectories, chosen):
    for name, value in credit_metrics(assign(batch_of(*trajectories), chosen)).items():
        assert isinstance(value, float)
        assert math.isfinite(value)
        if not name.startswith(("credit/mean", "groups/", "propagation/threshold")):
            assert 0.0 <= value <= 1.0 + 1e-12, name


def test_alone_tied_and_frozen_are_shares_by_agent():
    trajectories = [
        make_trajectory(f"t{n}", [step("plan", 1.0), step("write", r)], 0.0) for n, r in enumerate((0.0, 1.0))
    ]
    trajectories.append(make_trajectory("t2", [step("plan", 1.0), step("write", 1.0), step("write", 0.75)], 0.0))
    got = credit_metrics(credited(*trajectories, on_closed_gate="freeze"))
    assert got["groups/frozen_steps"] == 1.0
    assert got["groups/frozen/plan"] == pytest.approx(1 / 3)
    assert got["groups/tied/plan"] == 0.0  # the third one's child has a score below 1
    assert got["groups/alone/write"] == 0.25
    assert got["groups/alone/plan"] == 0.0


@given(trajectories(), options(propagation="threshold", decomp_granularity="step"))
def test_batch_stats_pool_the_spread_over_groups(trajectories, chosen):
    a = assign(batch_of(*trajectories), chosen)
    level = chosen.group_by if "agent" in chosen.group_by else "task_agent"
    rewards, groups = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for s in np.flatnonzero(a.rewards.scored_S & ~a.rewards.masked_S & ~np.isnan(a.rewards.sub_reward_S)).tolist():
        agent = a.batch.agent_names[a.batch.agent_of_step[s]]
        rewards[agent].append(a.rewards.sub_reward_S[s])
        key = describe(a.batch, level, s, int(a.rewards.stratum_S[s]))
        groups[agent, key][a.batch.trajectory_of_step[s]].append(a.rewards.sub_reward_S[s])
    squares, freedom = Counter(), Counter()
    for (agent, _), members in groups.items():
        if len(members) > 1:
            mean = np.mean([np.mean(values) for values in members.values()])
            squares[agent] += sum(np.mean((np.array(values) - mean) ** 2) for values in members.values())
            freedom[agent] += len(members) - 1
    stats = batch_stats(a, 0.5)
    assert {agent: values.tolist() for agent, values in stats.sub_rewards.items()} == rewards
    assert stats.spread == pytest.approx({agent: np.sqrt(squares[agent] / n) for agent, n in freedom.items()})
    assert stats.accuracy == 0.5
