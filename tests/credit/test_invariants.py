"""Invariants of credit for any batch: neutrality, equivariance, and independence between steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit import Credit, CreditOptions, advantage_estimator, assign, propagation_rule
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.credit.groups import LEVELS, describe
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.data import OK, Score
from creditflow.errors import ConfigError, NotFiniteError, ShapeError
from tests.builders import batch_of, credited, make_trajectory, step
from tests.credit.strategies import options, trajectories


def same(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)


@given(
    trajectories(mishaps=False),
    options(outcome_to="all", sub_reward_origin=1.0, decomp_granularity="step"),
    st.integers(0, 2**30 - 1),
)
def test_threshold_with_binary_scores_at_origin_1_equals_none(trajectories, chosen, right):
    """A closed step passes nothing, and an open one, being right, has a credit of 0 to pass."""
    for n, made in enumerate(made for trajectory in trajectories for made in trajectory.steps):
        made.scores = {"f": Score(float(right >> n & 1))}
    batch = batch_of(*trajectories)
    gates = {"on_closed_gate": "cut", "adv_estimator": "grpo"}
    gated = assign(batch, replace(chosen, propagation="threshold", reward_decomp=True, **gates))
    alone = assign(batch, replace(chosen, propagation="none", reward_decomp=True, **gates))
    assert np.array_equal(gated.credit_S, alone.credit_S)
    assert np.array_equal(gated.advantage_S, alone.advantage_S)


@given(trajectories(), options(), st.permutations("abc"))
def test_renamed_agents_give_the_same_numbers(trajectories, chosen, names):
    before = assign(batch_of(*trajectories), chosen)
    renamed = dict(zip("abc", names, strict=True))
    for trajectory in trajectories:
        trajectory.outcomes = {renamed[agent]: score for agent, score in trajectory.outcomes.items()}
        for made in trajectory.steps:
            made.agent = renamed[made.agent]
    after = assign(batch_of(*trajectories), chosen)
    same(after.credit_S, before.credit_S)
    same(after.advantage_S, before.advantage_S)
    assert np.array_equal(after.masked_S, before.masked_S)


@given(trajectories(), options(), st.integers(1, 3))
def test_padding_does_not_change_advantages(trajectories, chosen, n):
    before = assign(batch_of(*trajectories), chosen)
    for trajectory in trajectories:
        for made in trajectory.steps:
            if not any(made.response_mask):  # a score without sampled tokens is the mean over all tokens
                continue
            made.response_ids += (0,) * n
            made.response_mask += (0,) * n
            made.logprobs += (0.0,) * n
            made.ref_logprobs += (0.0,) * n if made.ref_logprobs else ()
            made.scores = {
                name: replace(score, value=(*score.value, *[score.range[0]] * n))
                if isinstance(score.value, tuple)
                else score
                for name, score in made.scores.items()
            }
    padded = batch_of(*trajectories)
    after = assign(padded, chosen)
    assert np.array_equal(after.credit_S, before.credit_S)
    same(after.advantage_S, before.advantage_S)
    mask_T = padded.response_mask
    same(after.token_advantages()[mask_T], before.token_advantages()[before.batch.response_mask])
    assert (after.token_advantages()[~mask_T] == 0.0).all()


@given(
    trajectories(mishaps=False),
    options(on_closed_gate="cut", decomp_granularity="step", adv_estimator="grpo"),
    st.data(),
)
def test_failed_score_only_affects_related_baselines(trajectories, chosen, data):
    before_batch = batch_of(*trajectories)
    scored = np.flatnonzero(
        (before_batch.score_status == OK).any(axis=1) & (before_batch.score_weights > 0).any(axis=1)
    )
    if not scored.size:
        return
    s = int(data.draw(st.sampled_from(scored.tolist())))
    before = assign(before_batch, chosen)
    n, index = int(before_batch.trajectory_of_step[s]), int(before_batch.index_of_step[s])
    made = trajectories[n].steps[index]
    made.scores = {name: replace(score, status="failed") for name, score in made.scores.items()}
    after = assign(batch_of(*trajectories), chosen)

    concerned = {index}  # the step and its ancestors
    for other in reversed(trajectories[n].steps):
        if other.index in concerned:
            concerned |= set(other.parents)
    if chosen.propagation in ("identical", "uniform"):  # there the mean sub-reward reaches all steps
        concerned = {other.index for other in trajectories[n].steps}
    touched = np.flatnonzero(
        (before_batch.trajectory_of_step == n) & np.isin(before_batch.index_of_step, list(concerned))
    )
    keys = {
        describe(before_batch, level, int(t), int(assigned.stratum_S[t]))
        for level in LEVELS
        for t in touched
        for assigned in (before, after)
    }
    for t in range(before_batch.n_steps):
        name = before.group_name(t)
        if name is not None and name not in keys:
            assert after.group_name(t) == name
            same(after.baseline_S[t], before.baseline_S[t])


def test_failed_score_is_excluded_from_its_baseline():
    def batch(score):
        return batch_of(*(make_trajectory(f"t{n}", [step("a", r)], 0.0) for n, r in enumerate([0.25, 0.75, score])))

    failed = assign(batch("failed"), CreditOptions(propagation="threshold"))
    two = credited(*(make_trajectory(f"t{n}", [step("a", r)], 0.0) for n, r in enumerate([0.25, 0.75])))
    assert failed.baseline_S[:2].tolist() == two.baseline_S.tolist()
    assert failed.advantage_S.tolist() == [*two.advantage_S.tolist(), 0.0]


def test_trajectories_of_a_group_may_have_different_agents():
    """A plan with five executors and a judge over five answers, and trajectories without these agents."""
    wide = make_trajectory(
        "t0",
        [
            step("plan", 0.75),
            *(step("write", r, (0,)) for r in (0.0, 0.25, 0.5, 0.75, 1.0)),
            step("judge", 1.0, range(1, 6)),
        ],
        1.0,
    )
    short = make_trajectory("t1", [step("plan", 0.25), step("write", 0.5)], 0.0)
    bare = make_trajectory("t2", [step("write", 1.0, ())], 1.0)
    a = credited(wide, short, bare, gamma=1.0, outcome_to="answer", sub_reward_origin=0.0)
    # The judge passes 1 + 1 to five parents, 0.4 each; only the writers with 0.75 and 1 are above the threshold.
    assert a.credit_S[:7] == pytest.approx([0.75 + (0.75 + 0.4) + (1.0 + 0.4), 0.4, 0.65, 0.9, 1.15, 1.4, 2.0])
    assert a.group_name(0) == "agent=plan turn=0 policy=default version=0"
    assert np.isnan(a.baseline_S[6])  # no other judge to compare with


def test_freeze_trains_only_steps_at_and_after_the_failure():
    wrong = make_trajectory("t0", [step("plan", 1.0), step("write", 0.0), step("verify", 1.0)], 0.0)
    right = make_trajectory("t1", [step("plan", 0.75), step("write", 1.0), step("verify", 0.75)], 1.0)
    a = credited(wrong, right, on_closed_gate="freeze")
    assert a.frozen_S.tolist() == [True, False, False, False, False, False]
    assert a.advantage_S[0] == 0.0
    assert credit_metrics(a)["groups/frozen_steps"] == 1.0


def test_shadow_reports_another_rule_without_training_on_it():
    batch = batch_of(
        make_trajectory("t0", [step("plan", 1.0), step("write", 0.0)], 1.0),
        make_trajectory("t1", [step("plan", 0.5), step("write", 1.0)], 0.0),
    )
    alone = assign(batch, CreditOptions(propagation="identical"))
    watched = assign(
        batch, CreditOptions(propagation="identical", shadow={"propagation": "none", "outcome_to": "answer"})
    )
    assert np.array_equal(alone.advantage_S, watched.advantage_S)
    metrics = credit_metrics(watched)
    assert metrics["shadow/flipped/plan"] == 0.0
    assert metrics["shadow/moved/plan"] == pytest.approx((1.0 + 0.5) / (0.0 + 1.0 + 0.5 + 0.0))
    assert "shadow/moved/plan" not in credit_metrics(alone)


def test_assignment_records_the_threshold_of_each_step():
    batch = batch_of(make_trajectory("t0", [step("plan", 0.6), step("write", 0.6)], 1.0))
    chosen = CreditOptions(
        propagation="threshold", propagation_threshold={"kind": "fixed", "value": 0.5, "agents": {"write": 0.7}}
    )
    a = assign(batch, chosen)
    assert a.threshold_S.tolist() == [0.5, 0.7]
    assert a.gate_open_S.tolist() == [True, False]


def test_floor_opens_the_best_closed_steps_and_counts_them():
    batch = batch_of(make_trajectory("t0", [step("a", r) for r in (0.1, 0.25, 0.2, 0.0, 0.05)], 1.0))
    a = assign(batch, CreditOptions(propagation="threshold", propagation_threshold={"kind": "quantile", "floor": 0.4}))
    assert a.forced_open_S.tolist() == [False, True, True, False, False]
    assert a.gate_S.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert credit_metrics(a)["propagation/forced_open/a"] == 0.4


def test_floor_ignores_masked_trajectories():
    kept = [make_trajectory(f"t{n}", [step("a", r)], float(n)) for n, r in enumerate((0.1, 0.2, 0.25, 0.05))]
    failed = make_trajectory("t9", [step("a", 0.29), step("a", 0.28)], 0.0, status="failed")
    chosen = CreditOptions(propagation="threshold", propagation_threshold={"kind": "quantile", "floor": 0.5})
    with_failed = assign(batch_of(*kept, failed), chosen)
    assert with_failed.forced_open_S.tolist() == [False, True, True, False, False, False]


def test_token_advantages_check_the_output_array():
    a = credited(make_trajectory("t0", [step("a", tokens=4)], 1.0), make_trajectory("t1", [step("a", tokens=4)], 0.0))
    for out in (np.zeros(3), np.zeros((2, 4)), np.zeros(8, dtype=np.int64), np.zeros(8, dtype=np.float16)):
        with pytest.raises(ShapeError, match=r"expected float32 or float64 of shape \(8,\), got"):
            a.token_advantages(out=out)


def test_rule_with_nan_credit_raises():
    @propagation_rule("nowhere")
    def nowhere(inputs):
        nothing_S = np.zeros_like(inputs.paid_S)
        return Credit(nothing_S + np.nan, nothing_S, nothing_S, nothing_S, np.zeros(len(nothing_S), dtype=np.uint8))

    try:
        with pytest.raises(
            NotFiniteError, match=r"step t0\.0: expected a finite credit from propagation nowhere, got nan"
        ):
            credited(make_trajectory("t0", [step("a")], 1.0), propagation="nowhere")
    finally:
        PROPAGATION_RULES.remove("nowhere")


def test_estimator_without_comparison_raises():
    with pytest.raises(ConfigError, match="expected groups to compare within, or whitening"):
        advantage_estimator("alone", grouped=False)(lambda inputs: None)
