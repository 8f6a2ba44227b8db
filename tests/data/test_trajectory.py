import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from creditflow.credit import assign
from creditflow.data import Score, Step, Task, Trajectory, TrajectoryBatch, read_parquet, validate, write_parquet
from creditflow.errors import BatchError
from tests.builders import credit_options
from tests.strategies import assert_same


def make_trajectory() -> Trajectory:
    def step(index: int, agent: str, turn: int, parents: tuple[int, ...]) -> Step:
        return Step(f"t/{index}", "t", index, agent, turn, parents, "p", "r", (1, 2), (3, 4), (1, 0), (-0.5, 0.0))

    steps = [step(0, "a", 0, ()), step(1, "b", 0, (0,)), step(2, "a", 1, (0, 1))]
    return Trajectory("t", "u", Task("d", (), "x"), steps, answer_steps=(2,))


def test_columns_match_the_objects() -> None:
    batch = TrajectoryBatch.from_trajectories(
        iter([make_trajectory(), replace(make_trajectory(), id="s", steps=[], answer_steps=())])
    )
    assert batch.n_trajectories == 2
    assert batch.n_steps == 3
    assert batch.agent_names == ("a", "b")
    assert batch.agent_of_step.tolist() == [0, 1, 0]
    assert batch.turn_of_step.tolist() == [0, 0, 1]
    assert list(zip(batch.edge_child.tolist(), batch.edge_parent.tolist(), strict=True)) == [(1, 0), (2, 0), (2, 1)]
    assert batch.is_answer.tolist() == [False, False, True]
    assert batch.token_offsets.tolist() == [0, 2, 4, 6]
    assert batch.response_mask.tolist() == [True, False] * 3
    assert batch.group_of_trajectory.tolist() == [0, 0]
    assert np.isnan(batch.outcome).all()


def test_scores_are_rescaled_and_failed_ones_are_nan() -> None:
    trajectory = make_trajectory()
    trajectory.steps[0].scores = {"f": Score(1.0, range=(-1.0, 3.0), weight=2.0)}
    trajectory.steps[1].scores = {"f": Score(0.0, status="failed", reason="crashed"), "g": Score((0.25, 1.0))}
    batch = TrajectoryBatch.from_trajectories([trajectory])
    np.testing.assert_array_equal(batch.scores, [[0.5, np.nan], [np.nan, 0.25], [np.nan, np.nan]])
    np.testing.assert_array_equal(batch.scored, [[True, False], [False, True], [False, False]])
    np.testing.assert_array_equal(batch.score_weights, [[2, 0], [1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: setattr(t.steps[1], "index", 5), "expected index 1, its place in the trajectory, got 5"),
        (lambda t: setattr(t.steps[1], "trajectory_id", "s"), "expected trajectory_id t, got s"),
        (lambda t: setattr(t.steps[1], "response_mask", (1,)), "2 response tokens, got 1 and 2"),
        (lambda t: setattr(t.steps[1], "ref_logprobs", (-1.0,)), "each of 2 response tokens, got 1 values, 0 of them"),
        (lambda t: t.steps[1].scores.update(f=Score((0.5,))), "score f has 1 values for 2 response tokens"),
        (lambda t: setattr(t, "answer_steps", (3,)), "answer steps"),
        (lambda t: setattr(t.steps[1], "version_spans", ((1, 0),)), r"in rising order from \(0, 0\), below 2 tokens"),
        (lambda t: setattr(t.steps[1], "version_spans", ((0, 0), (2, 1))), "below 2 tokens"),
        (
            lambda t: setattr(t.steps[1], "version_spans", ((0, 3), (1, 4))),
            r"from \(0, 0\), below 2 tokens, got \(\(0, 3\)",
        ),
        (
            lambda t: setattr(t.steps[1], "version_spans", (0, 0)),
            r"expected \(first token, policy version\) .* got \(0, 0\)",
        ),
        (
            lambda t: setattr(t.steps[1], "version_spans", np.zeros((1, 2), int)),
            r"version_spans: expected \(first token, policy version\) in rising order",
        ),
        (lambda t: setattr(t, "outcomes", [1.0]), "outcomes: expected a dict of Score by name, got list"),
        (lambda t: t.outcomes.update(a=1.0), r"outcomes\['a'\]: expected a Score, got float 1.0; write Score"),
    ],
)
def test_inconsistent_fields_are_refused_by_name(spoil: Callable[[Trajectory], None], message: str) -> None:
    trajectory = make_trajectory()
    spoil(trajectory)
    with pytest.raises(BatchError, match=message):
        TrajectoryBatch.from_trajectories([trajectory])


TRAJECTORY = make_trajectory()
STEPS = TRAJECTORY.steps


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        (None, "expected a list of trajectories, got NoneType None"),
        (TRAJECTORY, "expected a list of trajectories, got Trajectory"),
        ([{"id": "t"}], "expected a Trajectory, got dict"),
        ([TRAJECTORY, TRAJECTORY], "trajectory t: expected unique ids in a batch"),
        (
            [TRAJECTORY, replace(TRAJECTORY, id="s", steps=[replace(step, trajectory_id="s") for step in STEPS])],
            "step t/0: expected unique ids in a batch, got this one twice",
        ),
        ([replace(TRAJECTORY, status="trunctated")], r"status: .* got 'trunctated' \(did you mean 'truncated'\?\)"),
        ([replace(TRAJECTORY, steps=[replace(STEPS[0], scores=[0.5])])], "expected a dict of Score by name, got"),
        ([replace(TRAJECTORY, uid=["u"])], r"trajectory t: uid: expected a text, got list"),
        ([replace(TRAJECTORY, steps=None)], r"trajectory t: steps: expected a tuple of Step, got NoneType"),
        ([replace(TRAJECTORY, steps=[{}])], r"trajectory t: expected a Step at index 0, got dict"),
        ([replace(TRAJECTORY, outcome=Score(1.0, weight=None))], r"outcome: weight: expected a number, got NoneType"),
    ],
)
def test_records_of_another_kind_are_refused(trajectories, message):
    with pytest.raises(BatchError, match=message):
        TrajectoryBatch.from_trajectories(trajectories)


def test_missing_reference_logprobs_are_nan() -> None:
    trajectory = make_trajectory()
    assert TrajectoryBatch.from_trajectories([trajectory]).ref_logprobs.shape == (0,)
    trajectory.steps[1].ref_logprobs = (-1.5, -0.25)
    batch = TrajectoryBatch.from_trajectories([trajectory])
    np.testing.assert_array_equal(batch.ref_logprobs, [np.nan, np.nan, -1.5, -0.25, np.nan, np.nan])


def test_unreadable_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(BatchError, match=r"x\.parquet: not a readable Parquet file"):
        read_parquet(tmp_path / "x.parquet")


@pytest.mark.parametrize("score", [np.float64(0.5), 0.5, 1, None, "0.5", [0.5], {"value": 1}])
def test_score_of_another_type_is_refused(score):
    step = make_trajectory()
    step.steps[1].scores["f"] = score
    outcome = replace(make_trajectory(), outcome=score)
    name = type(score).__name__
    with pytest.raises(BatchError, match=rf"step t/1 of trajectory t: scores\['f'\]: expected a Score, got {name}"):
        TrajectoryBatch.from_trajectories([step])
    if score is not None:
        with pytest.raises(BatchError, match=f"trajectory t: outcome: expected a Score, got {name}"):
            TrajectoryBatch.from_trajectories([outcome])


@pytest.mark.parametrize("value", ["0.5", None, [0.5], (0.5, "x"), (None, 1.0)])
def test_non_numeric_score_value_is_refused(value):
    made = make_trajectory()
    made.steps[0].scores["f"] = Score(value)
    with pytest.raises(BatchError, match=r"scores\['f'\]: expected a number"):
        TrajectoryBatch.from_trajectories([made])


@pytest.mark.parametrize("indices", ["0", "t/0", 0, None, ("0",), ["t/0"], (0.0,), (None,)])
def test_indices_of_another_type_are_refused(indices):
    made = make_trajectory()
    made.steps[1].parents = indices
    with pytest.raises(BatchError, match=r"step t/1 of trajectory t: parents: expected .*indices of steps"):
        TrajectoryBatch.from_trajectories([made])
    with pytest.raises(BatchError, match=r"trajectory t: answer_steps: expected .*indices of steps"):
        TrajectoryBatch.from_trajectories([replace(make_trajectory(), answer_steps=indices)])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("agent", 3, "expected a text, got int"),
        ("id", None, "expected a text, got NoneType"),
        ("prompt", None, "expected a text, got NoneType"),
        ("response", b"r", "expected a text, got bytes"),
        ("policy", None, "expected a text, got NoneType"),
        ("stratum", 3, "expected a text, got int 3"),
        ("turn", [0], r"expected one number, got shape \(1,\)"),
        ("turn", "0", "expected whole numbers, got str '0'"),
        ("temperature", None, "expected numbers, got NoneType None"),
        ("policy_version", 0.5, "expected whole numbers, got float 0.5"),
        ("logprobs", None, "expected a tuple of one value per token, got NoneType"),
        ("logprobs", ("a", "b"), "expected numbers, got tuple"),
        ("logprobs", ((0.5, 1.0), (2.0,)), "expected numbers, got tuple"),
        ("response_mask", (1, 2), r"expected values true or false \(1 or 0\)"),
    ],
)
def test_value_of_another_type_is_refused(field, value, message):
    trajectory = make_trajectory()
    setattr(trajectory.steps[1], field, value)
    place = "" if field == "id" else "step t/1 of trajectory t: "
    with pytest.raises(BatchError, match=f"{place}{field}: {message}"):
        TrajectoryBatch.from_trajectories([trajectory])


def test_numpy_numbers_are_accepted():
    made = make_trajectory()
    made.steps[1].scores["f"] = Score(np.float32(0.5))
    made.steps[1].parents, made.answer_steps = (np.int64(0),), [np.int32(2)]
    batch = TrajectoryBatch.from_trajectories([made])
    assert batch.scores[1].tolist() == [0.5]
    assert batch.edge_parent[0] == 0


def test_file_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from creditflow.data import table

    monkeypatch.setattr(table, "FORMAT", 3)
    write_parquet(TrajectoryBatch.from_trajectories([make_trajectory()]), tmp_path / "b.parquet")
    monkeypatch.undo()
    with pytest.raises(BatchError, match=r"b\.parquet: .*a file of format 3; this creditflow reads 2"):
        read_parquet(tmp_path / "b.parquet")


ARRAYS = {
    "trajectory_of_step": np.array([0, 0, 1]),
    "group_of_trajectory": np.array([0, 0]),
    "outcome": np.array([1.0, 0.0]),
}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"trajectory_of_step": [[0, 0, 1]]}, "trajectory_of_step: expected an array of 1 dimensions: .* got shape"),
        ({"trajectory_of_step": [0, 1, 0]}, "non-decreasing indices from 0 to 1.* got 0 at step 2; order the steps by"),
        ({"trajectory_of_step": ["a", "a", "b"]}, "trajectory_of_step: expected indices of trajectories such as"),
        ({"trajectory_of_step": [0, 0, 0]}, "indices from 0 to 1, none left out, for 2 outcomes, got 0 at step 2"),
        ({"trajectory_of_step": [1, 1, 2]}, "got 1 at step 0"),
        ({"trajectory_of_step": [-1, 0, 1]}, "got -1 at step 0"),
        ({"trajectory_of_step": []}, "got no steps; .* leave out trajectories without steps"),
        ({"group_of_trajectory": [0.5, 0.5]}, "group_of_trajectory: expected whole numbers or texts, got list"),
        ({"group_of_trajectory": np.array(["a", 1], dtype=object)}, "expected whole numbers or texts, got an array"),
        ({"group_of_trajectory": [["a"], ["a"]]}, r"group_of_trajectory: .* got shape \(2, 1\)"),
        ({"group_of_trajectory": None}, r"group_of_trajectory: .* whole numbers or texts, got shape \(\)"),
        ({"group_of_trajectory": [0]}, r"group_of_trajectory: expected shape \(2,\), got \(1,\)"),
        ({"outcome": [1.0, None]}, "outcome: expected numbers, NaN for an unknown one, got list"),
        ({"outcome": [np.nan, np.nan]}, "outcome: expected a known value of at least one trajectory, or scores"),
        ({"outcome": [1.0, 2.0]}, r"in outcome_range \(0.0, 1.0\), got 2.0; pass the lowest"),
        ({"outcome_range": (1.0, 0.0)}, "outcome_range: expected a range of finite numbers"),
        ({"agent_of_step": [0, 0, 2], "agent_names": ["a", "b"]}, "entry 2: expected an index from 0 to 1, got 2"),
        ({"agent_of_step": [0, -1, 0]}, "agent_of_step, entry 1: expected an index from 0 to 0, got -1"),
        ({"agent_of_step": [0, 0]}, r"agent_of_step: expected shape \(3,\), got \(2,\)"),
        ({"agent_of_step": ["a", 0, "a"]}, "agent_of_step: expected indices into agent_names, or names, got list"),
        ({"agent_of_step": ["a"] * 3, "agent_names": ["a"]}, "agent_names: expected none, since agent_of_step has"),
        ({"agent_names": "a"}, "agent_names: expected a list of texts, got str 'a'"),
        ({"scores": [[[0.5]]] * 3}, "scores: expected an array of 1 or 2 dimensions"),
        ({"scores": [0.5, None, 0.5]}, "scores: expected numbers, NaN for a step without a score, got list"),
        ({"scores": [0.5]}, r"scores: expected shape \(3, 1\), got \(1, 1\)"),
        ({"scores": [[0.5], [0.5]]}, r"scores: expected shape \(3, 1\), got \(2, 1\)"),
        ({"scores": [[0.5], [1.5], [0.5]]}, "step 0/1, score score_0: expected a value from 0 to 1"),
        ({"scores": [[0.5]] * 3, "score_names": ["f", "g"]}, r"scores: expected shape \(3, 2\), got \(3, 1\)"),
        ({"edges": [[0, 1]]}, "edges: step 0/0 of .*: expected parents that came before it, got step 0/1"),
        ({"edges": [[1, 0], [1, 0]]}, "edges: step 0/1 of .*: expected each parent once, got step 0/0"),
        ({"edges": [[1, -1]]}, "edge_parent, entry 0: expected an index from 0 to 2, got -1"),
        ({"edges": [[2, 1]]}, "parents in its own trajectory, got step 0/1 of trajectory 0"),
        ({"edges": [[1, 3]]}, "edge_parent, entry 0: expected an index from 0 to 2, got 3"),
        ({"edges": [0, 1]}, "edges: expected an array of 2 dimensions"),
        ({"edges": [[0, 1, 2]]}, r"edges: expected shape \(1, 2\), got \(1, 3\)"),
        ({"is_answer": [True]}, r"is_answer: expected shape \(3,\), got \(1,\)"),
        ({"is_answer": [0, 2, 0]}, "is_answer: expected values true or false"),
        ({"prompts": [[1], [2], [3]]}, "prompts: expected a list of texts, got list"),
        ({"prompts": ["p"]}, r"prompts: expected shape \(3,\), got \(1,\)"),
        ({"token_offsets": [0, 1, 2, 3], "response_mask": [True]}, r"response_mask: expected shape \(3,\), got \(1,\)"),
        ({"response_mask": [1, 1]}, "response_mask: expected .* a row of 1 and 0 for each of 3 steps, or"),
        ({"response_mask": [[1, 1], [1], [1]]}, "response_mask: expected a row of 1 and 0 for each of 3 steps"),
        ({"response_mask": [[1, 1]]}, r"response_mask: expected a row of 1 and 0 .*, got shape \(1, 2\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, message):
    with pytest.raises(BatchError, match=message):
        TrajectoryBatch.from_arrays(**{**ARRAYS, **arrays})


def test_tensor_with_a_gradient_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(BatchError, match=r"outcome: expected numbers, .* Use tensor.detach\(\).numpy\(\) instead"):
        TrajectoryBatch.from_arrays(**{**ARRAYS, "outcome": torch.ones(2, requires_grad=True)})


def test_scores_alone_make_a_batch_from_arrays():
    arrays = {**ARRAYS, "outcome": [np.nan, np.nan]}
    assert not assign(TrajectoryBatch.from_arrays(**arrays, scores=[[1.0]] * 3), credit_options()).rewards.known_S.any()


def test_batch_is_validated_once_but_its_copies_again() -> None:
    batch = TrajectoryBatch.from_trajectories([make_trajectory()])
    assert batch.validated
    copy = replace(batch, is_answer=batch.is_answer[:-1])
    assert not copy.validated
    with pytest.raises(BatchError, match="column is_answer: expected shape"):
        validate(copy)


numbers = st.sampled_from((None, 0.0, 0.5, 1.0))
agent_steps = st.tuples(
    st.sampled_from("ba"),
    st.tuples(numbers, numbers),
    st.lists(st.integers(0, 1), max_size=2),
    st.sets(st.integers(0, 3)),
)
rollouts = st.lists(
    st.tuples(st.sampled_from("vu"), numbers, st.lists(agent_steps, min_size=1, max_size=4)), min_size=1, max_size=4
)


@given(rollouts, st.sampled_from((list, np.array, lambda values: np.array(values, dtype=object))))
def test_arrays_hold_the_trajectories_they_describe(made, form):
    expected, edges, first = [], [], 0
    for n, (uid, outcome, steps) in enumerate(made):
        records = []
        for i, (agent, values, mask, used) in enumerate(steps):
            parents, turn = (
                tuple(sorted(parent for parent in used if parent < i)),
                sum(s[0] == agent for s in steps[:i]),
            )
            records.append(Step(f"{n}/{i}", f"{n}", i, agent, turn, parents, "", "", response_mask=tuple(mask)))
            records[-1].response_ids, records[-1].logprobs = (0,) * len(mask), (0.0,) * len(mask)
            records[-1].scores = {f"score_{k}": Score(v) for k, v in enumerate(values) if v is not None}
            edges += [(first + i, first + parent) for parent in parents]
        first += len(steps)
        known = None if outcome is None else Score(outcome, (-1.0, 1.0))
        expected.append(Trajectory(f"{n}", uid, Task("arrays", (), None), records, outcome=known))
    assume(any(t.outcome or any(s.scores for s in t.steps) for t in expected))
    agents, values, masks, _ = zip(*(step for _, _, steps in made for step in steps), strict=True)
    batch = TrajectoryBatch.from_arrays(
        trajectory_of_step=[n for n, (_, _, steps) in enumerate(made) for _ in steps],
        group_of_trajectory=form([uid for uid, _, _ in made]),
        outcome=np.array([outcome for _, outcome, _ in made], dtype=np.float32),
        outcome_range=(-1.0, 1.0),
        agent_of_step=form(agents),
        scores=np.array(values, dtype=np.float64),
        edges=sorted(edges, key=lambda edge: -edge[0]),
        token_offsets=np.cumsum([0, *map(len, masks)]),
        response_mask=[bit for mask in masks for bit in mask],
    )
    assert pickle.loads(pickle.dumps(batch)).to_trajectories() == batch.to_trajectories() == expected
    credit, theirs = (assign(b, credit_options()) for b in (batch, TrajectoryBatch.from_trajectories(expected)))
    assert credit.advantage.advantage_S.tobytes() == theirs.advantage.advantage_S.tobytes()


def test_padded_rows_and_numbers_make_the_same_batch():
    arrays = {**ARRAYS, "scores": [0.5, np.nan, 1.0]}
    padded = TrajectoryBatch.from_arrays(**arrays, response_mask=[[1, 0], [1, 1], [0, 0]])
    flat = {"response_mask": [1, 0, 1, 1, 0, 0], "token_offsets": [0, 2, 4, 6], "edges": [[1, 0]]}
    arrays |= {"scores": [[0.5], [np.nan], [1.0]], "agent_of_step": [0, 0, 0], "agent_names": ["agent_0"]}
    assert_same(padded, TrajectoryBatch.from_arrays(**arrays, **flat, score_names=["score_0"]))
