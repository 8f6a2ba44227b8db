"""Thresholds, floors, shadows and outputs of `assign`, and the rules and arguments that it refuses."""

from dataclasses import dataclass, make_dataclass

import numpy as np
import pytest
from hypothesis import given

from creditflow.credit import Credit, Rule, advantage_estimator, assign, option, propagation_rule
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.errors import BatchError, ConfigError, NotFiniteError, ShapeError
from creditflow.studies.reassignment import standing_threshold
from tests.builders import batch_of, credit_options, credited, make_trajectory, step
from tests.credit.strategies import options, registered, trajectories


def test_shadow_reports_another_rule_without_training_on_it():
    batch = batch_of(
        make_trajectory("t0", [step("plan", 1.0), step("write", 0.0)], 1.0),
        make_trajectory("t1", [step("plan", 0.5), step("write", 1.0)], 0.0),
    )
    alone = assign(batch, credit_options(propagation="identical"))
    watched = assign(batch, credit_options("identical", shadow=credit_options(outcome_to="answer")))
    assert np.array_equal(alone.advantage.advantage_S, watched.advantage.advantage_S)
    metrics = credit_metrics(watched)
    assert metrics["shadow/flipped/plan"] == 0.0
    assert metrics["shadow/moved/plan"] == pytest.approx((1.0 + 0.5) / (0.0 + 1.0 + 0.5 + 0.0))
    assert "shadow/moved/plan" not in credit_metrics(alone)


def test_assignment_records_the_threshold_of_each_step():
    batch = batch_of(make_trajectory("t0", [step("plan", 0.6), step("write", 0.6)], 1.0))
    chosen = credit_options(
        propagation="threshold", propagation_threshold={"kind": "fixed", "value": 0.5, "agents": {"write": 0.7}}
    )
    a = assign(batch, chosen)
    assert a.credit.threshold_S.tolist() == [0.5, 0.7]
    assert [standing_threshold(a).theta(agent) for agent in ("write", "plan")] == [0.7, 0.5]
    assert a.credit.gate_open_S.tolist() == [True, False]


def test_floor_opens_the_best_closed_steps_and_counts_them():
    batch = batch_of(make_trajectory("t0", [step("a", r) for r in (0.1, 0.25, 0.2, 0.0, 0.05)], 1.0))
    a = assign(batch, credit_options(propagation="threshold", propagation_threshold={"kind": "quantile", "floor": 0.4}))
    assert a.credit.forced_open_S.tolist() == [False, True, True, False, False]
    assert a.credit.gate_S.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert credit_metrics(a)["propagation/forced_open/a"] == 0.4


def test_floor_ignores_masked_trajectories():
    kept = [make_trajectory(f"t{n}", [step("a", r)], float(n)) for n, r in enumerate((0.1, 0.2, 0.25, 0.05))]
    failed = make_trajectory("t9", [step("a", 0.29), step("a", 0.28)], 0.0, status="failed")
    chosen = credit_options(propagation="threshold", propagation_threshold={"kind": "quantile", "floor": 0.5})
    with_failed = assign(batch_of(*kept, failed), chosen)
    assert with_failed.credit.forced_open_S.tolist() == [False, True, True, False, False, False]


def test_token_advantages_check_the_output_array():
    a = credited(make_trajectory("t0", [step("a", tokens=4)], 1.0), make_trajectory("t1", [step("a", tokens=4)], 0.0))
    for out in (np.zeros(3), np.zeros((2, 4)), np.zeros(8, dtype=np.int64), np.zeros(8, dtype=np.float16)):
        with pytest.raises(ShapeError, match=r"expected float32 or float64 of shape \(8,\), got"):
            a.token_advantages(out=out)


@pytest.mark.parametrize(
    ("credit", "error", "message"),
    [
        (lambda zero_S: None, ConfigError, "propagation: wrong: expected `credit` to return Credit, got NoneType"),
        (
            lambda zero_S: {"own_S": np.zeros(3)},
            ConfigError,
            r"wrong: expected own_S as a floating array of shape \(1,\), got float64 of shape \(3,\)",
        ),
        (lambda zero_S: {"shared_S": [0.0]}, ConfigError, r"expected shared_S as .*, got <class 'list'> of shape \(\)"),
        (lambda zero_S: {"reached_S": zero_S}, ConfigError, "expected reached_S as a uint8 array .*, got float64"),
        (lambda zero_S: {"reached_S": zero_S > 0}, ConfigError, "expected reached_S as a uint8 array .*, got bool"),
        (lambda zero_S: {"frozen_S": zero_S}, ConfigError, "expected frozen_S as a bool array .*, got float64"),
        (
            lambda zero_S: {"reached_S": np.full(1, 7, np.uint8)},
            ConfigError,
            "wrong: expected reached_S of the bits SIGNAL and OUTCOME, got 7",
        ),
        (lambda zero_S: {"own_S": zero_S}, ConfigError, "Credit.gate_S, or, if no credit moves, to declare flow"),
        (lambda zero_S: {"received_S": zero_S + 1}, ConfigError, "expected rule 'wrong' to fill Credit.gate_S"),
        (
            lambda zero_S: {"own_S": zero_S + np.nan, "gate_S": zero_S},
            NotFiniteError,
            r"propagation: wrong: step t0\.0: expected a finite own_S, got nan",
        ),
    ],
)
def test_wrong_credit_of_a_rule_raises(credit, error, message):
    with registered(PROPAGATION_RULES, "wrong"):

        @propagation_rule("wrong")
        @dataclass(frozen=True)
        class Wrong(Rule):
            def credit(self, inputs):
                zero_S = np.zeros(inputs.batch.n_steps)
                columns = credit(zero_S)
                zeros = dict.fromkeys(("own_S", "received_S", "shared_S"), zero_S)
                return columns and Credit(**{**zeros, "reached_S": np.zeros(1, dtype=np.uint8), **columns})

        chosen = credit_options("wrong", adv_estimator="gae")
        batch = batch_of(make_trajectory("t0", [step("a", tokens=1)], 1.0))
        with pytest.raises(error, match=message):
            assign(batch, chosen, values_T=np.zeros(1))


def test_assign_names_the_types_it_expects():
    with pytest.raises(ConfigError, match="options: expected CreditOptions, got dict"):
        assign(batch_of(), {})
    with pytest.raises(BatchError, match="batch: expected a TrajectoryBatch, got list"):
        assign([], credit_options())


def test_estimator_without_comparison_raises():
    with pytest.raises(ConfigError, match="expected groups to compare within, or whitening"):
        advantage_estimator("alone", grouped=False)(lambda inputs: None)


def test_rule_that_is_no_dataclass_is_refused():
    for rule in (lambda inputs: None, type("Undecorated", (Rule,), {})):
        with pytest.raises(ConfigError, match="mine: expected a class derived from Rule, with @data"):
            propagation_rule("mine")(rule)
    with pytest.raises(ConfigError, match="mine: the field 'rule' has a meaning of its own: rename"):
        propagation_rule("mine")(make_dataclass("Mine", [("rule", str, "a")], bases=(Rule,), frozen=True))


def test_default_outside_its_bounds_is_refused():
    for default, bounds, got in (
        (5.0, {"at_least": 0.0, "at_most": 1.0}, "0.0 <= 5.0 <= 1.0"),
        (-1.0, {"at_least": 0.0}, "0.0 <= -1.0 <= inf"),
        (0.5, {"at_least": 1.0, "at_most": 0.0}, "1.0 <= 0.5 <= 0.0"),
    ):
        rule = make_dataclass("Mine", [("fade", float, option(default, **bounds))], bases=(Rule,), frozen=True)
        with pytest.raises(ConfigError, match=f"Mine.fade: expected at_least <= default <= at_most, got {got}"):
            propagation_rule("mine")(rule)


# ---- from end to end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_std", [True, False])
def test_group_tied_up_to_rounding_has_advantage_zero(by_std):
    third = {"f": 0.1, "g": 0.2, "h": 0.3}
    batch = batch_of(
        make_trajectory("t0", [step("a", third)], 0.1),
        make_trajectory("t1", [step("a", 0.2)], 0.1),
        make_trajectory("t2", [step("a", 0.2)], 0.1),
    )
    assigned = assign(batch, credit_options(propagation="threshold", norm_adv_by_std_in_grpo=by_std))
    assert assigned.groups.tied_S.all()
    assert assigned.advantage.advantage_S.tolist() == [0.0, 0.0, 0.0]


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


def test_token_advantages_are_written_to_a_given_array():
    batch = batch_of(
        make_trajectory("t0", [step("a", tokens=2)], 1.0), make_trajectory("t1", [step("a", tokens=1)], 0.0)
    )
    assigned, out = assign(batch, credit_options(propagation="threshold")), np.full(3, 9.0, dtype=np.float32)
    assert assigned.token_advantages(out=out) is out
    assert out.tolist() == assigned.token_advantages(dtype=np.float32).tolist()


# ---- gates -----------------------------------------------------------------------------------------------------------


def test_gate_stays_closed_within_rounding_of_the_threshold():
    tenths = make_trajectory("t", [step("a", {"f": 0.1, "g": 0.2, "h": 0.3})])
    assert (0.1 + 0.2 + 0.3) / 3 > 0.2
    assert not credited(tenths, propagation_threshold=0.2).credit.gate_open_S.any()
