"""A batch whose columns contradict one another is refused by name, and nothing is returned."""

from dataclasses import replace

import numpy as np
import pytest

from creditflow.credit import CreditOptions, assign
from creditflow.errors import (
    BatchError,
    ConfigError,
    CycleError,
    EmptyBatchError,
    NotFiniteError,
    OrderError,
    ScoreRangeError,
    ShapeError,
    UnknownAgentError,
)
from creditflow.trajectory import Score
from tests.builders import batch_of, play, step


@pytest.fixture
def batch():
    return batch_of(
        play("t0", [step("a", 0.5), step("b", 0.25), step("c", 1.0, (0, 1))], 1.0),
        play("t1", [step("a", 0.5), step("b", 0.25)], 0.0),
    )


def changed(column, at, value):
    column = column.copy()
    column[at] = value
    return column


def refusal(batch):
    with pytest.raises(BatchError) as error:
        assign(batch, CreditOptions())
    return str(error.value)


def test_the_batch_is_sound_before_it_is_broken(batch):
    assign(batch, CreditOptions())


@pytest.mark.parametrize("plays", [[], [play("t0", [])]])
def test_an_empty_batch_is_refused(plays):
    assert "expected at least one step, got none" in refusal(batch_of(*plays))


def test_a_parent_after_its_child_is_refused(batch):
    swapped = replace(batch, edge_child=batch.edge_parent, edge_parent=batch.edge_child)
    assert refusal(swapped) == "step t0.0: expected parents that came before it, got t0.1"


def test_a_parent_in_another_trajectory_is_refused(batch):
    message = refusal(replace(batch, edge_parent=changed(batch.edge_parent, -1, 2)))
    assert message == "step t1.1: expected parents in its own trajectory t1, got t0.2 of t0"


def test_a_parent_named_twice_is_refused(batch):
    last_of_t0 = np.flatnonzero(batch.edge_child == 2)
    message = refusal(replace(batch, edge_parent=changed(batch.edge_parent, last_of_t0, 1)))
    assert message == "step t0.2: expected each parent once, got t0.1 twice"


def test_an_edge_to_nowhere_is_refused(batch):
    message = refusal(replace(batch, edge_parent=changed(batch.edge_parent, 0, -1)))
    assert message == "column edge_parent, entry 0: expected an index from 0 to 4, got -1"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.01, 1.01])
def test_a_score_that_is_ok_but_no_number_from_0_to_1_is_refused(batch, value):
    message = refusal(replace(batch, scores=changed(batch.scores, (3, 0), value)))
    assert message == f"step t1.0, score f: expected a value from 0 to 1 after rescaling from its range, got {value}"


def test_a_score_outside_its_declared_range_is_refused():
    outside = batch_of(play("t", [step("a", {"f": Score(3.0, (-1.0, 1.0))})], 1.0))
    assert "step t.0, score f: expected a value from 0 to 1" in refusal(outside)


def test_a_score_may_overshoot_its_range_by_rounding(batch):
    assign(replace(batch, scores=changed(batch.scores, (3, 0), 1.0 + 1e-15)), CreditOptions())


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_weight_below_0_is_refused(batch, value):
    message = refusal(replace(batch, score_weights=changed(batch.score_weights, (1, 0), value)))
    assert message == f"step t0.1, score f: expected a finite weight of 0 or more, got {value}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_outcome_that_is_ok_but_no_number_is_refused(batch, value):
    message = refusal(replace(batch, outcome=changed(batch.outcome, 1, value)))
    assert message == f"trajectory t1: expected a finite outcome where its scoring was ok, got {value}"


def test_steps_out_of_order_are_refused(batch):
    message = refusal(replace(batch, trajectory_of_step=np.array([0, 1, 0, 1, 1])))
    assert message == "step t0.2: expected steps to lie trajectory by trajectory, got one of t0 after one of t1"
    assert refusal(replace(batch, index_of_step=np.array([0, 1, 2, 0, 2]))) == "step t1.1: expected index 1, got 2"


def test_a_column_of_the_wrong_length_is_refused(batch):
    message = refusal(replace(batch, agent_of_step=batch.agent_of_step[:-1]))
    assert message == "column agent_of_step: expected shape (5,), got (4,)"


def test_an_unknown_agent_is_refused(batch):
    message = refusal(replace(batch, agent_of_step=changed(batch.agent_of_step, 2, 3)))
    assert message == "column agent_of_step, entry 2: expected an index from 0 to 2, got 3"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (EmptyBatchError, {"step_ids": ()}),
        (ShapeError, {"response_mask": np.ones(3, dtype=np.bool_)}),
        (ShapeError, {"turn_of_step": np.zeros(1, dtype=np.int64)}),
        (CycleError, {"edge_child": np.array([0, 1]), "edge_parent": np.array([1, 0])}),
        (OrderError, {"edge_child": np.array([0]), "edge_parent": np.array([1])}),
        (OrderError, {"edge_child": np.array([2, 1]), "edge_parent": np.array([1, 0])}),
        (NotFiniteError, {"scores": np.full((3, 1), np.nan)}),
        (ScoreRangeError, {"scores": np.full((3, 1), 1.5)}),
    ],
)
def test_each_kind_of_bad_input_has_an_error_of_its_own(kind, change):
    good = batch_of(play("t0", [step("a", 0.5), step("b", 0.5), step("a", 0.5)], 1.0))
    with pytest.raises(BatchError, match=r"expected .*got ") as error:
        assign(replace(good, **change), CreditOptions())
    assert type(error.value) is kind


def test_a_cycle_is_told_step_by_step():
    good = batch_of(play("t0", [step("a"), step("b"), step("c")], 1.0))
    circle = replace(good, edge_child=np.array([0, 1, 2]), edge_parent=np.array([2, 0, 1]))
    with pytest.raises(CycleError, match=r"t0\.\d <- t0\.\d <- t0\.\d <- t0\.\d"):
        assign(circle, CreditOptions())


def test_an_agent_that_a_threshold_names_and_nobody_plays_is_refused():
    batch = batch_of(play("t0", [step("verifier")], 1.0))
    chosen = CreditOptions(propagation_threshold={"kind": "fixed", "agents": {"verifer": 0.7}})
    with pytest.raises(UnknownAgentError, match=r"expected verifier, got 'verifer' \(did you mean 'verifier'\?\)"):
        assign(batch, chosen)


def test_a_critic_has_to_say_a_finite_value_for_every_sampled_token():
    batch = batch_of(play("t0", [step("a", tokens=2), step("b", tokens=2, response_mask=(1, 0))], 1.0))
    chosen = CreditOptions(adv_estimator="gae", outcome_to="answer")
    assign(batch, chosen, values_T=np.array([0.0, 0.0, 0.0, np.nan]))  # nobody reads the last
    with pytest.raises(ConfigError, match="gae expects a critic's values for each token, got none"):
        assign(batch, chosen)
    with pytest.raises(ShapeError, match=r"values: expected shape \(4,\), got \(3,\)"):
        assign(batch, chosen, values_T=np.zeros(3))
    with pytest.raises(NotFiniteError, match=r"step t0\.1, token 0: expected a finite value, got inf"):
        assign(batch, chosen, values_T=np.array([0.0, 0.0, np.inf, 0.0]))
