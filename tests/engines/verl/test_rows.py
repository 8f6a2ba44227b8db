import numpy as np
import pytest

pytest.importorskip("verl")

import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue import KVBatchMeta

from creditflow.data import TrajectoryBatch
from creditflow.engines.verl import rows as rows_module
from creditflow.engines.verl.rollouts import RolloutRecords
from creditflow.engines.verl.rows import VerlRows, select
from creditflow.engines.verl.runner import sampled_steps
from creditflow.errors import BatchError
from creditflow.rewards import ScoringReport
from tests.builders import examples, make_trajectory, step


def trajectories_of(*trajectories) -> RolloutRecords:
    keys = tuple(f"u{t.uid}_{n}" for n, t in enumerate(trajectories))
    batch = TrajectoryBatch.from_trajectories(trajectories)
    return RolloutRecords(batch, keys, ScoringReport((), 0.0), len(trajectories))


def meta(*keys) -> KVBatchMeta:
    return KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id="train")


TEAM = (
    make_trajectory("a", [step("planner", tokens=2), step("frozen", policy="other"), step("executor", 0.5, tokens=3)]),
    make_trajectory("b", [step("planner", tokens=1, response_mask=(0,)), step("executor", 1.0, tokens=4)]),
    make_trajectory("c", []),
    make_trajectory("d", [step("executor", "failed", tokens=1)]),
)


STEPS = st.tuples(st.sampled_from(["default", "other"]), st.integers(0, 2), st.booleans())


@given(st.lists(st.lists(STEPS, max_size=5), max_size=5))
@examples(50)
def test_row_keys_match_the_workers(specs):
    team = [
        make_trajectory(
            f"t{n}", [step("x", tokens=k, policy=policy, response_mask=(sampled,) * k) for policy, k, sampled in steps]
        )
        for n, steps in enumerate(specs)
    ]
    for policies in (["default"], ["default", "other"]):
        records = trajectories_of(*team)
        steps = records.steps_of_rows(policies)
        expected = [
            (f"{key}_{i}", index)
            for key, trajectory in zip(records.keys, team, strict=True)
            for i, index in enumerate(sampled_steps(trajectory, policies))
        ]
        assert [(key, records.batch.index_of_step[s]) for key, s in steps.items()] == expected


@pytest.fixture
def team() -> tuple[VerlRows, list[str], list[int], np.ndarray]:
    """The rows of TEAM's policy `default`, their keys and steps, and the offsets of the steps' tokens."""
    records = trajectories_of(*TEAM)
    steps, offsets = records.steps_of_rows(["default"]), records.batch.token_offsets
    return VerlRows(steps, offsets), [*steps], [*steps.values()], offsets


def test_nested_selects_rows_and_zeroes_padding(team):
    rows, keys, steps, offsets = team
    column_T = np.arange(int(offsets[-1]), dtype=np.float64)
    nested = rows.nested(meta(keys[2], "pad_0_0", keys[0]), column_T)
    want = [column_T[offsets[steps[k]] : offsets[steps[k] + 1]].tolist() for k in (2, 0)]
    assert [row.tolist() for row in nested.unbind()] == [want[0], [0.0], want[1]]


def test_values_reach_the_tokens_of_their_steps(team, monkeypatch):
    rows, keys, steps, offsets = team
    values_T = np.full(int(offsets[-1]), np.nan)
    expected_T = values_T.copy()
    expected_T[offsets[steps[2]] : offsets[steps[2] + 1]] = 2.0
    expected_T[offsets[steps[0]] : offsets[steps[0] + 1]] = 1.0
    lengths = [int(offsets[steps[2] + 1] - offsets[steps[2]]), 1, int(offsets[steps[0] + 1] - offsets[steps[0]])]
    rows_of = [torch.full((n,), value) for n, value in zip(lengths, (2.0, 9.0, 1.0), strict=True)]
    column = {"values": torch.nested.nested_tensor(rows_of, layout=torch.jagged)}
    monkeypatch.setattr(rows_module.tq, "kv_batch_get", lambda **_: column)
    rows.values(meta(keys[2], "pad_0_0", keys[0]), values_T)
    np.testing.assert_array_equal(values_T, expected_T)


def test_expect_all_rejects_unknown_and_missing_rows(team):
    rows, keys, steps, _ = team
    assert rows.expect_all(meta(*reversed(keys))).tolist() == steps[::-1]
    with pytest.raises(BatchError, match="row nobody_0_0: no step"):
        rows.expect_all(meta(*keys, "nobody_0_0"))
    with pytest.raises(BatchError, match=f"1 rows of the trajectories did not come, among them {keys[-1]}"):
        rows.expect_all(meta(*keys[:-1]))


def test_columns_of_another_length_are_rejected(team, monkeypatch):
    rows, keys, _, offsets = team
    n_tokens = int(offsets[-1])
    with pytest.raises(BatchError, match=f"a value for each of {n_tokens} tokens, got {n_tokens - 1}"):
        rows.nested(meta(*keys), np.zeros(n_tokens - 1))
    short = {"values": torch.nested.nested_tensor([torch.zeros(1)] * len(keys), layout=torch.jagged)}
    monkeypatch.setattr(rows_module.tq, "kv_batch_get", lambda **_: short)
    with pytest.raises(BatchError, match=f"values: expected one for each of 10 tokens, got {len(keys)}"):
        rows.values(meta(*keys), np.zeros(n_tokens))


def test_select_keeps_keys_and_tags_together():
    rows = KVBatchMeta(keys=["a", "b", "c"], tags=[{"i": 0}, {"i": 1}, {"i": 2}], partition_id="train")
    select(rows, np.array([False, True, True])).tags[0]["i"] = 9  # tags are copied
    chosen = select(rows, np.array([True, False, True]))
    assert (chosen.keys, chosen.tags, len(chosen), chosen.size) == (["a", "c"], [{"i": 0}, {"i": 2}], 2, 2)
    assert select(rows, np.ones(3, dtype=bool)) is rows
