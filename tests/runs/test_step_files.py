"""A step file restores the trajectories and every term of their credit."""

import json
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from creditflow.credit import Assignment, assign, explain, propagation_rule
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.rules.own import Own
from creditflow.errors import DataError
from creditflow.runs.step_files import FORMAT, read_step_file, write_step_file
from tests.builders import batch_of, credit_options, examples, unregister
from tests.credit.strategies import situations
from tests.credit.test_explain import ALL_CORNERS, sampled_tokens
from tests.runs.test_run_folder import a_batch
from tests.strategies import assert_same as assert_same_batch


def written(tmp_path: Path, assigned: Assignment) -> Path:
    write_step_file(tmp_path / "000007.parquet", 7, assigned.batch, assigned)
    return tmp_path / "000007.parquet"


def assert_same(mine: object, its: object, name: str) -> None:
    """Assert that stored values are equal; the batch, the history and the options are compared apart."""
    if isinstance(its, np.ndarray):
        assert isinstance(mine, np.ndarray), name
        np.testing.assert_array_equal(mine, its, err_msg=name)
        assert mine.dtype == its.dtype, name
    elif is_dataclass(its):
        assert type(mine) is type(its), name
        for field in fields(its):
            if field.name not in ("batch", "history", "options", "shadow") and field.metadata.get("stored", True):
                assert_same(getattr(mine, field.name), getattr(its, field.name), f"{name}.{field.name}")
    else:
        assert mine == its, name


@pytest.mark.parametrize("corner", ALL_CORNERS)
def test_read_assignment_equals_the_written_one(corner: str, tmp_path: Path) -> None:
    @examples(25)
    @given(situations(**ALL_CORNERS[corner]))
    def check(situation) -> None:
        trajectories, chosen, values_T = situation
        batch = batch_of(*trajectories)
        assignment = assign(batch, chosen, values_T=None if values_T is None else np.array(values_T))
        recorded = read_step_file(written(tmp_path, assignment))
        read = recorded.assignment
        assert read is not None
        assert recorded.step == 7
        assert_same(read, assignment, "assignment")
        assert read.history.to_json() == assignment.history.to_json()
        assert read.options == assignment.options
        np.testing.assert_array_equal(read.token_advantages(), assignment.token_advantages())
        assert_same_batch(read.batch, batch)
        if batch.n_steps:
            last = batch.n_steps - 1
            for token in (None, *sampled_tokens(batch, last)):
                assert explain(read, last, token) == explain(assignment, last, token)

    check()


def test_file_keeps_the_history_of_a_fitted_shadow(tmp_path: Path) -> None:
    chosen = credit_options(shadow=credit_options(propagation="calibrated"))
    first = assign(a_batch(), chosen)
    assignment = assign(a_batch(), chosen, history=first.history_after)
    read = read_step_file(written(tmp_path, assignment)).assignment
    assert read is not None
    assert read.history.to_json() == assignment.history.to_json()
    again = assign(read.batch, chosen, history=read.history).shadow
    assert again is not None
    assert assignment.shadow is not None
    np.testing.assert_array_equal(again.advantage.advantage_S, assignment.shadow.advantage.advantage_S)


def test_trajectory_without_steps_keeps_its_place_and_mask(tmp_path: Path) -> None:
    batch = a_batch()
    failed = replace(batch, status_of_trajectory=np.array([0, 1, 0]))
    assignment = assign(failed, credit_options())
    read = read_step_file(written(tmp_path, assignment)).assignment
    assert read is not None
    assert read.rewards.masked_N.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("version", "advice"),
    [(FORMAT + 1, "update creditflow"), (FORMAT - 1, "read it with the creditflow that wrote it"), (0, "read it with")],
)
def test_step_file_of_another_version_is_refused(tmp_path: Path, version: int, advice: str) -> None:
    path = written(tmp_path, assign(a_batch(), credit_options()))
    rewritten(path, version=version)
    message = rf"000007\.parquet: this is a file of version {version}, and creditflow reads version {FORMAT}; {advice}"
    with pytest.raises(DataError, match=message):
        read_step_file(path)


def rewritten(path: Path, **changed: object) -> None:
    """Write the file again with changed facts."""
    facts = json.loads(pq.read_metadata(path).metadata[b"creditflow"]) | changed
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"creditflow": json.dumps(facts)})


def test_truncated_file_raises_a_readable_error(tmp_path: Path) -> None:
    path = written(tmp_path, assign(a_batch(), credit_options()))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"000007\.parquet: not a readable Parquet file of steps"):
        read_step_file(path)


def test_file_of_an_unregistered_rule_names_the_rule(tmp_path: Path) -> None:
    @propagation_rule("of_the_user")
    @dataclass(frozen=True)
    class OfTheUser(Own):
        """The rule `own` under another name."""

    try:
        path = written(tmp_path, assign(a_batch(), credit_options(propagation="of_the_user")))
        assert read_step_file(path).assignment is not None
    finally:
        unregister(PROPAGATION_RULES, "of_the_user")
    with pytest.raises(DataError, match=r"got 'of_the_user'; import the module that registers"):
        read_step_file(path)
