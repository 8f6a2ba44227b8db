"""Credit from end to end: equality with textbook GRPO, and invariants of any batch."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit import CreditOptions, assign
from creditflow.credit.groups import LEVELS
from tests.builders import batch_of, credited, make_trajectory, step
from tests.credit.strategies import eighths, options, scores, trajectories

RULES = ("identical", "uniform", "none", "discounted", "threshold")


def assert_same(got, expected, what):
    expected = np.array([math.nan if value is None else value for value in expected], dtype=float)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12, err_msg=what)


@given(st.lists(st.lists(eighths, min_size=2, max_size=6), min_size=1, max_size=4), st.booleans())
def test_neutral_settings_equal_textbook_grpo(rewards, by_std):
    neutral = CreditOptions(propagation="none", group_by="task", norm_adv_by_std_in_grpo=by_std)
    batch = batch_of(
        *(
            make_trajectory(f"t{q}.{n}", [step()], reward, task=f"q{q}")
            for q, group in enumerate(rewards)
            for n, reward in enumerate(group)
        )
    )
    expected = []
    for group in rewards:
        mean, sd = statistics.fmean(group), statistics.stdev(group)
        expected += [(reward - mean) / (sd + 1e-6 if by_std else 1.0) for reward in group]
    for rule in RULES:
        neutral.propagation = rule
        assert_same(assign(batch, neutral).advantage_S, expected, rule)


@pytest.mark.parametrize("by_std", [True, False])
def test_group_tied_up_to_rounding_has_advantage_zero(by_std):
    third = {"f": 0.1, "g": 0.2, "h": 0.3}
    batch = batch_of(
        make_trajectory("t0", [step("a", third)], 0.1),
        make_trajectory("t1", [step("a", 0.2)], 0.1),
        make_trajectory("t2", [step("a", 0.2)], 0.1),
    )
    assigned = assign(batch, CreditOptions(propagation="threshold", norm_adv_by_std_in_grpo=by_std))
    assert assigned.tied_S.all()
    assert assigned.advantage_S.tolist() == [0.0, 0.0, 0.0]


@given(trajectories(), options(decomp_granularity="step", gamma_token=1.0))
def test_advantage_equals_the_formula_of_its_terms(trajectories, chosen):
    a = assign(batch_of(*trajectories), chosen)
    assert np.array_equal(a.credit_S, a.own_S + a.received_S + a.shared_S)
    learns = a.trained_S & (a.group_S >= 0) & ~a.tied_S
    assert np.array_equal(
        a.advantage_S[learns], (a.weight_S * ((a.credit_S - a.baseline_S - a.shift_S) / a.divisor_S))[learns]
    )
    assert (a.advantage_S[~learns] == 0.0).all()


@given(trajectories(), options())
def test_masked_trajectories_do_not_affect_the_others(trajectories, chosen):
    def masked(t):
        outcomes = [t.outcomes.get(one.agent, t.outcome) for one in t.steps]
        failed = t.status == "failed" or all(score is not None and score.status != "ok" for score in outcomes)
        return failed or (t.status == "truncated" and chosen.mask_truncated)

    kept = [t for t in trajectories if not masked(t)]
    if not kept:
        return
    with_all = assign(batch_of(*trajectories), chosen)
    of_kept = np.isin(with_all.batch.trajectory_of_step, [i for i, t in enumerate(trajectories) if not masked(t)])
    assert_same(with_all.advantage_S[of_kept], assign(batch_of(*kept), chosen).advantage_S, "advantage")
    assert (with_all.advantage_S[~of_kept] == 0.0).all()


@given(trajectories(), options(), st.randoms(use_true_random=False))
def test_permuted_trajectories_give_permuted_results(trajectories, chosen, random):
    shuffled = list(trajectories)
    random.shuffle(shuffled)
    first, second = assign(batch_of(*trajectories), chosen), assign(batch_of(*shuffled), chosen)
    place = {id: s for s, id in enumerate(second.batch.step_ids)}
    order = [place[id] for id in first.batch.step_ids]
    for name in ("credit_S", "advantage_S", "baseline_S", "spread_S", "weight_S", "group_size_S"):
        assert_same(getattr(second, name)[order], getattr(first, name), name)


def test_all_right_trajectories_have_advantage_zero():
    trajectories_of_lengths = [make_trajectory(f"t{n}", [step("a", 1.0) for _ in range(n)], 1.0) for n in (1, 3, 7)]
    for outcome_to in ("all", "answer"):
        for group_by in LEVELS:
            chosen = CreditOptions(
                propagation="threshold", gamma=1.0, sub_reward_origin=1.0, outcome_to=outcome_to, group_by=group_by
            )
            assert (assign(batch_of(*trajectories_of_lengths), chosen).advantage_S == 0.0).all(), (outcome_to, group_by)


def test_needless_retry_pays_at_origin_0_only():
    short = make_trajectory("short", [step("plan", 1.0), step("write", 1.0)], 1.0)
    longer = make_trajectory("long", [step("plan", 1.0), step("write", 1.0), step("write", 1.0)], 1.0)
    first_of_each = [0, 2]
    charging = credited(short, longer, gamma=1.0, sub_reward_origin=1.0)
    assert charging.credit_S[first_of_each].tolist() == [1.0, 1.0]
    assert (charging.advantage_S == 0.0).all()
    paying = credited(short, longer, gamma=1.0, sub_reward_origin=0.0)
    assert paying.credit_S[first_of_each].tolist() == [3.0, 4.0]
    assert paying.advantage_S[2] > 0 > paying.advantage_S[0]


@given(trajectories(mishaps=False), options())
def test_assign_does_not_change_its_arguments(trajectories, chosen):
    batch = batch_of(*trajectories)
    before = {
        name: getattr(batch, name).copy()
        for name in ("scores", "score_weights", "outcome", "edge_child", "edge_parent", "stratum_of_step")
    }
    as_it_was = vars(chosen).copy()
    assign(batch, chosen)
    assert vars(chosen) == as_it_was
    for name, values in before.items():
        assert np.array_equal(getattr(batch, name), values, equal_nan=True)


def test_threshold_without_sub_rewards_equals_the_outcome():
    trajectories = [
        make_trajectory("t0", [step("a", 0.2), step("a", "failed")], 1.0),
        make_trajectory("t1", [step("a", 1.0), step("a", 0.9)], 0.0),
    ]
    off = credited(*trajectories, reward_decomp=False)
    shared = credited(*trajectories, propagation="identical")
    assert np.isnan(off.sub_reward_S).all()
    assert off.gate_open_S.all()
    assert off.trained_S.all()
    assert np.array_equal(off.advantage_S, shared.advantage_S)


def test_token_advantages_repeat_the_step_at_sampled_tokens():
    batch = batch_of(
        make_trajectory("t0", [step("a", tokens=2), step("b")], 1.0),
        make_trajectory("t1", [step("a", tokens=3, response_mask=(1, 0, 1))], 0.0),
    )
    assigned = assign(batch, CreditOptions(propagation="threshold"))
    first, second = assigned.advantage_S[0], assigned.advantage_S[2]
    assert first > 0 > second
    assert assigned.token_advantages().tolist() == [first, first, second, 0.0, second]


def test_token_advantages_are_written_to_a_given_array():
    batch = batch_of(
        make_trajectory("t0", [step("a", tokens=2)], 1.0), make_trajectory("t1", [step("a", tokens=1)], 0.0)
    )
    assigned, out = assign(batch, CreditOptions(propagation="threshold")), np.full(3, 9.0, dtype=np.float32)
    assert assigned.token_advantages(out=out) is out
    assert out.tolist() == assigned.token_advantages(dtype=np.float32).tolist()


@given(trajectories(scores=scores), options(propagation="threshold"))
def test_strata_of_unscored_steps_have_no_effect(trajectories, chosen):
    before = assign(batch_of(*trajectories), chosen)
    for trajectory in trajectories:
        for s in trajectory.steps:
            counting = [score for score in s.scores.values() if score.weight > 0]
            if not counting or any(score.status != "ok" for score in counting):
                s.stratum = None if s.stratum else "other"
    after = assign(batch_of(*trajectories), chosen)
    assert_same(after.advantage_S, before.advantage_S, "advantage")


def test_credit_import_loads_no_heavy_module():
    heavy = "torch numba omegaconf pyarrow transformers ray verl"
    code = f"import sys, creditflow.credit; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
