"""Errors for invalid batches, which name the column or step, the expected and the actual value."""

from dataclasses import fields, replace

import numpy as np
import pytest

from creditflow.credit import assign
from creditflow.data import Score, TrajectoryBatch
from creditflow.errors import BatchError, ConfigError, NotFiniteError, ScoreRangeError, ShapeError
from tests.builders import batch_of, credit_options, make_trajectory, step


@pytest.fixture
def batch():
    return batch_of(
        make_trajectory("t0", [step("a", 0.5), step("b", 0.25), step("c", 1.0, (0, 1))], 1.0),
        make_trajectory("t1", [step("a", 0.5), step("b", 0.25)], 0.0),
    )


def changed(column, at, value):
    column = column.copy()
    column[at] = value
    return column


def refusal(batch):
    """The class and the message of the error."""
    with pytest.raises(BatchError) as error:
        assign(batch, credit_options())
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("trajectories", [[], [make_trajectory("t0", [])]])
def test_empty_batch_raises(trajectories):
    places = f"batch of {len(trajectories)} trajectories"
    assert refusal(batch_of(*trajectories)) == f"EmptyBatchError: {places}: expected at least one step, got none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: {"edge_child": b.edge_parent, "edge_parent": b.edge_child},
            "OrderError: edges: step t0.0 of trajectory t0: expected parents that came before it, "
            "got step t0.1 of trajectory t0",
        ),
        (
            lambda b: {"edge_parent": changed(b.edge_parent, -1, 2)},
            "BatchError: edges: step t1.1 of trajectory t1: expected parents in its own trajectory, "
            "got step t0.2 of trajectory t0",
        ),
        (
            lambda b: {"edge_parent": changed(b.edge_parent, b.edge_child == 2, 1)},
            "BatchError: edges: step t0.2 of trajectory t0: expected each parent once, got step t0.1 of trajectory t0",
        ),
        (
            lambda b: {"edge_parent": changed(b.edge_parent, 0, -1)},
            "BatchError: column edge_parent, entry 0: expected an index from 0 to 4, got -1",
        ),
        (
            lambda b: {"agent_of_step": changed(b.agent_of_step, 2, 3)},
            "BatchError: column agent_of_step, entry 2: expected an index from 0 to 2, got 3",
        ),
        (
            lambda b: {"trajectory_of_step": np.array([0, 1, 0, 1, 1])},
            "OrderError: step t0.2 of trajectory t0: expected steps trajectory by trajectory, "
            "got it after step t0.1 of trajectory t1",
        ),
        (
            lambda b: {"index_of_step": np.array([0, 1, 2, 0, 2])},
            "OrderError: step t1.1 of trajectory t1: expected index 1, its place in the trajectory, got 2",
        ),
        (
            lambda b: {"edge_child": b.edge_child[::-1], "edge_parent": b.edge_parent[::-1]},
            "OrderError: edges: expected edges sorted by child, got step t0.2 of trajectory t0 after a later one",
        ),
        (lambda b: {"prompts": None}, "ShapeError: column prompts: expected shape (5,), got None"),
        (lambda b: {"scores": None}, "ShapeError: column scores: expected an array of float64, got NoneType"),
        (lambda b: {"score_names": ()}, "ShapeError: column scores: expected shape (5, 0), got (5, 1)"),
        (lambda b: {"score_names": ("f", "g")}, "ShapeError: column scores: expected shape (5, 2), got (5, 1)"),
    ],
)
def test_wrong_column_is_refused_with_its_place(batch, change, message):
    assert refusal(replace(batch, **change(batch))) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.01, 1.01])
def test_ok_score_outside_0_to_1_raises(batch, value):
    message = refusal(replace(batch, scores=changed(batch.scores, (3, 0), value)))
    kind = "ScoreRangeError" if np.isfinite(value) else "NotFiniteError"
    ending = "expected a value from 0 to 1 after rescaling from its range"
    assert message == f"{kind}: step t1.0, score f: {ending}, got {value}"


def test_score_outside_its_declared_range_raises():
    with pytest.raises(ScoreRangeError, match=r"step t\.0, score f: expected a value from 0 to 1"):
        batch_of(make_trajectory("t", [step("a", {"f": Score(3.0, (-1.0, 1.0))})], 1.0))


def test_score_outside_its_range_by_rounding_passes(batch):
    assign(replace(batch, scores=changed(batch.scores, (3, 0), 1.0 + 1e-15)), credit_options())


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_negative_or_nan_weight_raises(batch, value):
    message = refusal(replace(batch, score_weights=changed(batch.score_weights, (1, 0), value)))
    kind = "NotFiniteError" if np.isnan(value) else "ScoreRangeError"
    assert message == f"{kind}: step t0.1, score f: expected a finite weight of 0 or more, got {value}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_ok_outcome_that_is_not_finite_raises(batch, value):
    message = refusal(replace(batch, outcome=changed(batch.outcome, 1, value)))
    assert message == f"NotFiniteError: trajectory t1: expected a finite outcome where its scoring was ok, got {value}"


@pytest.mark.parametrize("column", [f.name for f in fields(TrajectoryBatch) if not f.name.endswith("_names")])
def test_every_column_checks_its_length(column):
    given = batch_of(
        make_trajectory(
            "t0",
            [step("a", 0.5, tokens=2, prompt_ids=(1, 2), version_spans=((0, 0), (1, 1))), step("b", 0.5, tokens=1)],
            1.0,
            outcomes={"b": 0.5},
        ),
        make_trajectory("t1", [step("a", 0.5, tokens=1)], 0.0),
    )
    values = getattr(given, column)
    twice = np.concatenate([values, values]) if isinstance(values, np.ndarray) else values + values
    for wrong in (values[:-1], twice):
        with pytest.raises(ShapeError, match=r"^column \w+: expected shape \(.*\), got \(.*\)$"):
            assign(replace(given, **{column: wrong}), credit_options())


@pytest.mark.parametrize(
    ("column", "make", "expected", "got"),
    [
        ("trajectory_of_step", np.float64, "int64", "float64"),
        ("edge_child", np.uint64, "int64", "uint64"),
        ("score_status", np.bool_, "int64", "bool"),
        ("agent_of_step", ">i8", "int64", ">i8"),
        ("index_of_step", None, "int64", "list"),
        ("scores", np.int64, "float64", "int64"),
        ("score_weights", np.float16, "float64", "float16"),
        ("outcome", object, "float64", "object"),
        ("is_answer", np.int8, "bool", "int8"),
        ("response_mask", np.float64, "bool", "float64"),
    ],
)
def test_column_of_the_wrong_type_raises(batch, column, make, expected, got):
    values = getattr(batch, column)
    wrong = values.tolist() if make is None else values.astype(make)
    message = refusal(replace(batch, **{column: wrong}))
    assert message == f"ShapeError: column {column}: expected an array of {expected}, got {got}"


def test_narrow_types_give_the_same_result(batch):
    narrow = replace(
        batch,
        scores=batch.scores.astype(np.float32),
        edge_child=batch.edge_child.astype(np.int8),
        edge_parent=batch.edge_parent.astype(np.int8),
        trajectory_of_step=batch.trajectory_of_step.astype(np.int32),
        token_offsets=batch.token_offsets.astype(np.int32),
    )
    expected, got = (assign(b, credit_options()).advantage.advantage_S.tolist() for b in (batch, narrow))
    assert got == expected  # the scores are quarters, exact in both types


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 4], "ShapeError: column token_offsets: expected 0 as the first, got 1"),
        ([-1, 2, 4], "ShapeError: column token_offsets: expected 0 as the first, got -1"),
        ([0, 5, 4], "ShapeError: step t0.1: expected token_offsets that do not decrease, got 4 after 5"),
        ([0, 2, 5], "ShapeError: column response_mask: expected shape (5,), got (4,)"),
    ],
)
def test_invalid_token_offsets_raise(offsets, message):
    given = batch_of(make_trajectory("t0", [step("a", 0.5, tokens=2), step("b", 0.5, tokens=2)], 1.0))
    assert refusal(replace(given, token_offsets=np.array(offsets))) == message


@pytest.mark.parametrize("limits", [(1.0, 1.0), (1.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_ok_score_with_an_empty_range_raises(limits):
    at_step = make_trajectory("t0", [step("a", Score(1.0, limits))], 1.0)
    with pytest.raises(ScoreRangeError, match=r"step t0\.0 of trajectory t0, score f: expected a range .* got \("):
        batch_of(at_step)
    with pytest.raises(ScoreRangeError, match=r"trajectory t0: outcome: expected a range of finite numbers, low < hi"):
        batch_of(make_trajectory("t0", [step("a")], Score(1.0, limits)))
    batch_of(make_trajectory("t0", [step("a", Score(1.0, limits, status="failed"))], 1.0))


def test_gae_needs_finite_values_at_sampled_tokens():
    batch = batch_of(make_trajectory("t0", [step("a", tokens=2), step("b", tokens=2, response_mask=(1, 0))], 1.0))
    chosen = credit_options(adv_estimator="gae", outcome_to="answer")
    assign(batch, chosen, values_T=np.array([0.0, 0.0, 0.0, np.nan]))  # the last entry is not read
    with pytest.raises(ConfigError, match="gae expects a critic's values for each token, got none"):
        assign(batch, chosen)
    with pytest.raises(ShapeError, match=r"values: expected shape \(4,\), got \(3,\)"):
        assign(batch, chosen, values_T=np.zeros(3))
    with pytest.raises(NotFiniteError, match=r"step t0\.1, token 0: expected a finite value, got inf"):
        assign(batch, chosen, values_T=np.array([0.0, 0.0, np.inf, 0.0]))
