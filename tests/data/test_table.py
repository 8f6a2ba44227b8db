"""Tests of batches as tables, messages and files: every conversion preserves the batch."""

import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from creditflow.credit import Assignment, assign
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Score, Trajectory, TrajectoryBatch, read_parquet, write_parquet
from creditflow.data.table import SCHEMA, Column, batch_of, join, pack, read_part, table_of
from creditflow.errors import BatchError, CreditflowError
from tests.builders import make_trajectory, step
from tests.credit.strategies import situations
from tests.strategies import assert_same, trajectories

TOKENS = {"tokens": 2, "prompt_ids": (1, 2, 3)}


def team(id: str = "t", task: str = "q0") -> Trajectory:
    """Three steps of two agents: the first step has two scores, the second a failed one."""
    return make_trajectory(
        id,
        [
            step("a", {"f": 0.5, "g": Score((1.0, 0.0), weight=0.0)}, **TOKENS),
            step("b", "failed", **TOKENS),
            step("a", parents=(0, 1), **TOKENS, stratum="right"),
        ],
        outcome=1.0,
        task=task,
        answer_steps=(1, 2),
    )


def unpack(messages: Iterable[bytes | memoryview]) -> pa.Table:
    """The trajectories of several messages as one table."""
    return join([read_part(message, f"message {place}") for place, message in enumerate(messages)])


def sent(trajectories: list[Trajectory]) -> TrajectoryBatch:
    return batch_of(unpack(map(pack, trajectories)))


# ---- round trips ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(trajectories())
def test_objects_tables_messages_and_files_hold_the_same(tmp_path, trajectories):
    batch, file = TrajectoryBatch.from_trajectories(trajectories), tmp_path / "batch.parquet"
    assert batch.to_trajectories() == trajectories
    write_parquet(batch, file)
    from_file = read_parquet(file)
    write_parquet(from_file, file)
    whole, together, apart = table_of(trajectories), unpack([memoryview(pack(trajectories))]), sent(trajectories)
    for other in (from_file, read_parquet(file), *map(batch_of, (whole, table_of(batch), together)), apart):
        assert_same(other, batch)
        assert other.to_trajectories() == trajectories
    assert together.to_pylist() == whole.to_pylist()
    rows, rows_apart = whole.to_pylist(), apart.table.to_pylist()
    for row in (*rows, *rows_apart):  # the order of a step's scores depends on the message
        lists = [row.pop(f"score_{name}") or [] for name in ("names", "values", "status", "weights")]
        row["scores as numbers"] = sorted(zip(*lists, strict=True), key=str)
    assert rows_apart == rows


@given(situations())
def test_credit_is_bitwise_equal_after_transfer(situation):
    trajectories, options, values = situation
    values = None if values is None else np.array(values)

    def credit_of(batch: TrajectoryBatch) -> object:
        try:
            assignment = assign(batch, options, values_T=values)
        except CreditflowError as error:
            return f"{type(error)}: {error}"
        columns = [getattr(assignment, field.name) for field in fields(Assignment)]
        arrays = [column for column in (*columns, assignment.token_advantages()) if isinstance(column, np.ndarray)]
        return [(array.dtype, array.tobytes()) for array in arrays], repr(credit_metrics(assignment))

    assert credit_of(TrajectoryBatch.from_trajectories(trajectories)) == credit_of(sent(trajectories))


def test_nan_failed_and_missing_scores_round_trip():
    one = team()
    one.steps[0].scores["f"] = Score(float("nan"), (-1.0, 1.0), 2.0, "timeout", "too slow", 3.5, "v")
    one.steps[1].scores = {"h": Score(float("nan"), status="failed")}
    batch, again = TrajectoryBatch.from_trajectories([one]), sent([one])
    assert repr(tuple(again.raw_scores)) == repr(batch.raw_scores)
    for name in ("scores", "score_status", "score_weights"):
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))


def test_joined_tables_form_one_batch(tmp_path: Path) -> None:
    parts = [[team("a"), make_trajectory("b", [])], [], [team("c", "q1")], [make_trajectory("d", [], task="q0")]]
    joined = batch_of(pa.concat_tables([unpack(map(pack, part)) for part in parts]))
    assert_same(joined, TrajectoryBatch.from_trajectories([trajectory for part in parts for trajectory in part]))
    write_parquet(joined, tmp_path / "b.parquet")
    assert_same(read_parquet(tmp_path / "b.parquet"), joined)


def test_pickled_batch_has_its_values_and_no_table():
    trajectories = [make_trajectory(str(n), [step("x", prompt="y" * 10_000)]) for n in range(50)]
    batch = sent([*trajectories, make_trajectory("u", [])])
    assert len(pickle.dumps(batch)) < 700_000
    again = pickle.loads(pickle.dumps(batch))
    assert_same(again, batch)
    assert again.table is None


def test_messages_above_the_limit_of_arrow_are_refused():
    one = team()
    one.task.extra_info["tests"] = "x" * (1 << 26)
    part = read_part(pack(one), "one")
    with pytest.raises(BatchError, match="33 messages are too large for one batch; train on fewer tasks"):
        join([part] * 33)


def test_trajectory_columns_are_stored_once():
    one = team()
    one.task.extra_info["tests"] = "x" * 100_000
    assert table_of([replace(one, steps=one.steps), team("u")]).nbytes < 130_000
    assert len(unpack([pack(one)]).column("task").chunk(0).dictionary) == 1


# ---- invalid input -------------------------------------------------------------------------------------------------


def test_damaged_message_is_refused():
    whole = pack(team())
    for at in range(0, len(whole), 7):
        torn = bytearray(whole)
        torn[at] ^= 0x10
        with pytest.raises(
            BatchError, match=r"message 1 of packed trajectories: its \d+ bytes do not fit their checksum"
        ):
            unpack([whole, bytes(torn)])
    for end in (0, 3, 11, 12, len(whole) - 1):
        with pytest.raises(BatchError, match="do not fit their checksum"):
            unpack([whole[:end]])


def column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    place = table.column_names.index(name)
    return table.set_column(place, name, pa.array(values, table.schema.field(name).type))


PARTS: list[tuple[str, list[object], str]] = [
    ("trajectory_id", ["t", "t", None, "u"], "row 2: expected a trajectory_id, got none"),
    ("trajectory_id", ["t", "u", "t", "u"], "trajectory t: ids must be unique and rows lie together"),
    ("uid", [None] * 4, "trajectory t: expected a value in column uid, got none"),
    ("status", ["odd"] * 4, "column status: expected one of ok, failed, truncated, got odd"),
    ("answer_steps", [[2, 1]] * 4, "trajectory t: answer steps must rise and be of its 3, got (2, 1)"),
    ("answer_steps", [[-1]] * 4, "trajectory t: answer steps must rise and be of its 3, got (-1,)"),
    ("index", [0, 2, 1, None], "expected index 1, its place in the trajectory, got 2"),
    ("index", [0, 0, 2, None], "trajectory t: ids must be unique and rows lie together, but it begins twice"),
    ("index", [0, None, 2, None], "expected a value in column index, got none"),
    ("step_id", ["t.0", "t.1", None, None], "trajectory t: expected a step_id for each of its steps, got none for one"),
    ("agent", ["a", "b", None, None], "step t.2 of trajectory t: expected a value in column agent, got none"),
    ("parents", [[], [0], [0, 2], None], "step t.2 of trajectory t: parents must come before it (0 to 1), got (0, 2)"),
    ("parents", [[], [-1], [0], None], "step t.1 of trajectory t: parents must come before it (0 to 0), got (-1,)"),
    ("parents", [[], [0], [1, 1], None], "edges: step t.2 of trajectory t: expected each parent once, got step t.1"),
    ("parents", [[], None, [0], None], "step t.1 of trajectory t: expected a value in column parents, got none"),
    ("response_mask", [[1, 1], [1], [1, 1], None], "step t.1 of trajectory t: expected a mask and a log-probability "
     "for each of 2 response tokens, got 1 and 2"),
    ("logprobs", [[-1.0] * 2, [None, -1.0], [-1.0] * 2, None], "step t.1 of trajectory t: expected numbers in"),
    ("ref_logprobs", [[], [-1.0, float("nan")], [], None], "step t.1 of trajectory t: expected no reference "
     "log-probabilities, or a number for each of 2 response tokens, got 2 values, 1 of them NaN"),
    ("score_values", [[0.5], [None], [], None], "step t.0 of trajectory t: expected 2 values of"),
    ("score_names", [["f", "f"], ["f"], [], None], "step t.0 of trajectory t: expected 2 scores of different names"),
    ("score_names", [["f", "g"], [None], [], None], "step t.1 of trajectory t: expected names in column score_names"),
    ("score_status", [[1, 1], [9], [], None], "step t.1 of trajectory t: expected 1 scores of different names"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "message"), PARTS)
def test_inconsistent_columns_are_refused_by_name(name: str, values: list, message: str, tmp_path: Path) -> None:
    table = plain(table_of([team(), make_trajectory("u", [])]))
    assert batch_of(table).n_steps == 3
    pq.write_table(column(table, name, values), tmp_path / "odd.parquet")
    with pytest.raises(BatchError, match=rf"odd\.parquet: .*{re.escape(message)}"):
        read_parquet(tmp_path / "odd.parquet")


def test_row_without_a_step_is_not_a_step():
    table = plain(table_of([team(), make_trajectory("u", [])]))
    step = {"prompt_ids": [1], "ref_logprobs": [0.5], "parents": [0], "score_names": ["f"], "turn": 1}
    for name, value in step.items():
        values = table.column(name).to_pylist()
        assert_same(batch_of(column(table, name, [*values[:-1], value])), batch_of(table))


def plain(table: pa.Table) -> pa.Table:
    """The table as another program would write it, without dictionaries."""
    return table.cast(SCHEMA)


def test_missing_or_mistyped_column_is_refused():
    table = table_of([team()])
    with pytest.raises(BatchError, match="expected the columns of a trajectory batch, missing agent, uid"):
        batch_of(table.drop_columns(["uid", "agent"]))
    with pytest.raises(BatchError, match="column turn: expected int64, got string"):
        batch_of(table.set_column(table.column_names.index("turn"), "turn", pa.array(["x"] * 3)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.info.update(it=object()), "trajectory t: expected what can be written as JSON"),
        (lambda t: t.steps[1].info.update(it={1, 2}), "step t.1: expected what can be written as JSON"),
        (lambda t: setattr(t.steps[1], "prompt", "\ud800"), "step 't.1': expected text that UTF-8 can hold"),
        (lambda t: setattr(t.steps[1], "prompt_ids", (2**31,)), "prompt_ids: expected whole numbers of 32 bits"),
        (lambda t: setattr(t.steps[1], "index", 0), "expected index 1, its place in the trajectory, got 0"),
        (lambda t: setattr(t, "outcome", Score((0.5,))), "expected one number as outcome"),
    ],
)
def test_pack_refuses_unwritable_trajectories(spoil: Callable[[Trajectory], Any], message: str) -> None:
    trajectory = team()
    spoil(trajectory)
    with pytest.raises(BatchError) as raised:
        pack(trajectory)
    assert message in str(raised.value)


# ---- columns decoded on access -------------------------------------------------------------------------------------


def test_column_has_its_values_as_a_tuple_has():
    values = ("a", None, "cé", "")
    column = Column(pa.chunked_array([["a", None], [], ["cé", ""]], pa.string()))
    assert tuple(column) == values
    assert [column[0], column[2], column[-1], column[np.int64(1)]] == ["a", "cé", "", None]
    assert column[1:] == values[1:]
    assert column.index("cé") == 2
    assert "x" not in column
    for at in (4, -5):
        with pytest.raises(IndexError):
            column[at]


def test_column_decodes_each_value_once_on_access():
    decoded: list[str] = []

    def decode(text: str) -> dict[str, str]:
        decoded.append(text)
        return {"text": text}

    column = Column(pa.chunked_array([["a", "b", "c"]]), decode)
    column[1]["more"] = "x"
    assert column[1] == {"text": "b", "more": "x"}
    assert decoded == ["b"]
    assert [value["text"] for value in column] == ["a", "b", "c"]
    assert decoded == ["b", "a", "c"]


# ---- files ---------------------------------------------------------------------------------------------------------


def test_batch_from_a_table_is_written_as_that_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = sent([team(), make_trajectory("u", []), team("v")])
    monkeypatch.setattr(TrajectoryBatch, "to_trajectories", None)
    monkeypatch.setattr(Column, "_at", None)
    write_parquet(batch, tmp_path / "b.parquet", {"S": {"advantage": np.arange(6.0)}})
    monkeypatch.undo()
    assert pq.read_table(tmp_path / "b.parquet").column("advantage").to_pylist() == [0, 1, 2, None, 3, 4, 5]
    assert_same(read_parquet(tmp_path / "b.parquet"), batch)


def test_replaced_columns_are_written(tmp_path: Path) -> None:
    batch = replace(sent([team()]), prompts=("x", "y", "z"))
    assert batch.table is None
    write_parquet(batch, tmp_path / "b.parquet")
    assert read_parquet(tmp_path / "b.parquet").prompts[:] == ("x", "y", "z")


def task_bytes(path: Path) -> int:
    """Return the uncompressed bytes of column task."""
    group = pq.read_metadata(path).row_group(0)
    columns = {c.path_in_schema: c for c in map(group.column, range(group.num_columns))}
    return columns["task"].total_uncompressed_size


def test_long_task_is_stored_once_whatever_the_row_groups(tmp_path: Path) -> None:
    """Earlier versions wrote row groups, whose dictionaries differ."""
    first, groups, second = (tmp_path / f"{name}.parquet" for name in ("first", "groups", "second"))
    trajectories = [team(f"t{n}", f"q{n % 3}") for n in range(20)]
    for trajectory in trajectories:
        trajectory.task = replace(trajectory.task, extra_info={"tests": trajectory.uid * 100_000})
    write_parquet(TrajectoryBatch.from_trajectories(trajectories), first)
    pq.write_table(pq.read_table(first), groups, row_group_size=7)
    assert pq.read_metadata(groups).num_row_groups > 3
    write_parquet(read_parquet(groups), second)
    for path in (first, groups, second):
        assert read_parquet(path).to_trajectories() == trajectories
    assert max(task_bytes(first), task_bytes(second)) < 1.1 * 3 * 200_000


def test_file_has_scores_as_numbers(tmp_path: Path) -> None:
    write_parquet(TrajectoryBatch.from_trajectories([team()]), tmp_path / "b.parquet")
    table = pq.read_table(tmp_path / "b.parquet")
    assert table.schema.field("task").type == pa.string()  # for readers without support for dictionaries
    columns = table.to_pydict()
    assert columns["score_names"] == [["f", "g"], ["f"], []]
    assert columns["score_values"] == [[0.5, 0.5], [None], []]
    assert columns["score_status"] == [[1, 1], [2], []]
    assert columns["score_weights"] == [[1.0, 0.0], [1.0], []]


def test_outcome_with_failed_scoring_is_missing() -> None:
    table = plain(table_of([team()]))
    failed = '{"value":1.0,"range":[0.0,1.0],"status":"failed","reason":"away \\"status\\": \\"ok\\""}'
    for outcome, score in ((1.0, failed), (1.0, failed.replace('","', '", "').replace('":"', '": "'))):
        odd = column(column(table, "outcome", [outcome] * 3), "outcome_score", [score] * 3)
        with pytest.raises(BatchError, match=r"trajectory t: an outcome of 1\.0, but its scoring has status failed"):
            batch_of(odd)
    none = column(column(table, "outcome", [None] * 3), "outcome_score", [failed] * 3)
    assert np.isnan(batch_of(none).outcome).all()
    ok = '{"value":1.0,"range":[0,1],"status":"ok"}'  # as another program would write it
    spaced = column(column(table, "outcome", [1.0] * 3), "outcome_score", [ok] * 3)
    assert batch_of(spaced).outcome.tolist() == [1.0]


def test_undecodable_value_is_refused_on_access() -> None:
    table = plain(table_of([team()]))
    spoilt = batch_of(column(table, "scores", ["{}", "{", '{"f": {"value": 1.0}}']))
    assert spoilt.raw_scores[0] == {}
    for at in (1, 2):
        with pytest.raises(BatchError, match=f"column scores, entry {at}: "):
            spoilt.raw_scores[at]
    with pytest.raises(BatchError, match="column task, entry 0: "):
        batch_of(column(table, "task", ["[]"] * 3)).tasks[0]
    deep = f'{{"a": {"[" * 100_000 + "]" * 100_000}}}'
    with pytest.raises(BatchError, match="column step_info, entry 1"):
        batch_of(column(table, "step_info", ["{}", deep, "{}"])).step_info[1]


def test_further_column_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    batch = TrajectoryBatch.from_trajectories([team()])
    with pytest.raises(BatchError, match="column turn: a trajectory batch has one of that name already"):
        write_parquet(batch, tmp_path / "odd.parquet", {"S": {"turn": np.zeros(3)}})
    with pytest.raises(BatchError, match="column advantage: expected 3 values"):
        write_parquet(batch, tmp_path / "odd.parquet", {"S": {"advantage": np.zeros(2)}})


def test_step_infos_with_a_key_are_found() -> None:
    infos = ({"tool_calls": [1]}, {}, {"text": "a tool_calls in a value"}, {"a": 3}, {"action": 1}, {"é": 1})
    trajectory = make_trajectory("t", [step(info=dict(info)) for info in infos], 1.0)
    batch, packed = TrajectoryBatch.from_trajectories([trajectory]), batch_of(unpack([pack(trajectory)]))
    for made in (batch, packed):
        assert made.step_infos_with({"tool_calls", "action", "é"}) == {0: infos[0], 4: infos[4], 5: infos[5]}
