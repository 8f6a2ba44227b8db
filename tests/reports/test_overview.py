"""The overview of a run, against the trajectories in its ledger."""

import json
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from creditflow.credit import assign
from creditflow.data import RIGHT, TrajectoryBatch
from creditflow.errors import DataError
from creditflow.reports.detail import Spelling, step_detail, trajectory_graph
from creditflow.reports.findings import tables_of
from creditflow.reports.index import Filter, Index
from creditflow.reports.overview import POINTS, advantages, names_of, of_agents, overview, thinned
from creditflow.reports.run_report import samples
from creditflow.reports.why import worth_a_look
from creditflow.runs import Ledger, Recorded, RunFolder
from creditflow.runs.sql import connect
from tests.builders import batch_of, credit_options, make_trajectory, step
from tests.cli.commands import refused
from tests.reports.runs import a_batch, a_run, indexed, write_step


def test_agent_rows_are_means_of_ledger_columns(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    rows = {row["agent"]: row for row in of_agents(indexed(ledger))}
    made = [recorded.assignment for recorded in ledger if recorded.assignment is not None]
    assert len(made) == 3
    for agent, row in rows.items():
        at = [a.batch.agent_of_step == a.batch.agent_names.index(agent) for a in made]

        def every(name: str, at: list[np.ndarray] = at) -> np.ndarray:
            return np.concatenate([attrgetter(name)(a)[s] for a, s in zip(made, at, strict=True)])

        assert row["steps"] == len(every("credit.total_S"))
        assert row["credit"] == pytest.approx(every("credit.total_S").mean())
        assert row["scored"] == every("rewards.scored_S").mean()
        if row["scored"]:
            wrong = every("rewards.sub_reward_S") < RIGHT
            assert row["error_rate"] == pytest.approx(wrong.mean())
            assert row["pass_rate"] == pytest.approx(every("credit.gate_open_S").mean())
            assert row["wrong_raised"] == pytest.approx((every("advantage.advantage_S")[wrong] > 0).mean())
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)


def test_untrained_policies_have_no_credit_in_sums(tmp_path: Path) -> None:
    config = {"policies": {"default": {}, "it's old": {"trainable": False}}}
    folder = RunFolder.create(tmp_path / "run", {"config": config}, "")
    frozen = {"policy": "it's old", "response_mask": (0, 0)}
    made = [
        make_trajectory(str(k), [step("write", k / 7, tokens=2), step("rival", k % 2, tokens=2, **frozen)], outcome=0.0)
        for k in range(8)
    ]
    write_step(folder, 1, batch_of(*made), propagation="own")
    ledger = Ledger.open(folder.path)
    index, recorded = indexed(ledger), ledger.read(1)
    assert recorded.assignment is not None
    assert recorded.assignment.groups.trained_S.all()
    rival, write = of_agents(index)
    assert (rival["steps"], rival["scored"], rival["error_rate"], rival["share"]) == (8, 1.0, 0.5, None)
    assert (rival["credit"], rival["wrong_raised"], rival["right_lowered"]) == (None, None, None)
    assert write["share"] == 1.0
    assert list(advantages(index)["agents"]) == ["write"]
    assert [row["assigned"] for row in tables_of(ledger, index).steps] == [0, 8]
    assert overview(ledger, index)["left_out"] == []
    assert [s["trained"] for s in trajectory_graph(recorded, "3")["steps"]] == [True, False]
    assert {recorded.batch.agent_of_step[s] for s, _ in worth_a_look(recorded.assignment)} == {0}


def test_folder_named_key_value_does_not_change_columns(tmp_path: Path) -> None:
    index = indexed(a_run(tmp_path / "agent=x" / "turn=7"))
    assert [row["agent"] for row in of_agents(index)] == ["executor", "planner", "verifier"]
    assert index.ask("SELECT count(DISTINCT turn) AS n FROM sums")[0]["n"] > 1


def test_file_with_a_damaged_footer_is_set_aside(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run", training_steps=4)
    rng = np.random.default_rng(0)
    whole = ledger.file(2).read_bytes()
    for _ in range(10):
        length = int.from_bytes(whole[-8:-4], "little")
        damaged = bytearray(whole)
        for at in rng.integers(len(whole) - 8 - length, len(whole) - 8, 40):
            damaged[at] = rng.integers(256)
        ledger.file(2).write_bytes(bytes(damaged))
        index = indexed(ledger)
        assert {*index.taken, *index.damaged} == {1, 2, 3, 4}
        assert {1, 3, 4} <= set(index.taken)


@pytest.mark.parametrize("scale", [0.013, 1.0, 700.0])
def test_histogram_edges_are_round_and_hold_all_steps(tmp_path: Path, scale: float) -> None:
    made = [make_trajectory(str(k), [step("write", 1.0)], outcome=k / 15, task="q") for k in range(16)]
    made += [make_trajectory(f"same {k}", [step("write", 1.0)], outcome=1.0, task="r") for k in range(3)]
    folder = RunFolder.create(tmp_path / "run", {}, "")
    batch = batch_of(*made)
    assigned = assign(batch, credit_options(propagation="identical", group_by="task"))
    advantage_S = scale * assigned.advantage.advantage_S
    folder.write_steps(1, batch, replace(assigned, advantage=replace(assigned.advantage, advantage_S=advantage_S)))
    of = advantages(indexed(Ledger.open(folder.path)))
    edges, tick = of["edges"], of["tick"]
    assert len(edges) <= 41
    assert edges == [-edge for edge in reversed(edges)]
    width = edges[len(edges) // 2 + 1]
    assert f"{width:e}".partition("e")[0] in ("1.000000", "2.000000", "5.000000")
    assert f"{tick:e}".partition("e")[0] in ("1.000000", "2.000000", "5.000000")
    assert edges[-1] / tick == pytest.approx(round(edges[-1] / tick))
    assert of["zero"] == 3
    counts = of["agents"]["write"]
    assert sum(counts[: len(counts) // 2]) == (advantage_S < 0).sum() == 8
    assert sum(counts) == 16


def test_pages_contain_the_filtered_trajectories(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    index = indexed(ledger)
    for wanted, fits in (
        (Filter(), lambda a, at, right: True),
        (Filter(outcome="right"), lambda a, at, right: right),
        (Filter(agent="verifier", gate="closed"), lambda a, at, right: any(
            a.batch.agent_names[a.batch.agent_of_step[s]] == "verifier" and not a.credit.gate_open_S[s] for s in at)),
        (Filter(most_score=0.5, outcome="wrong", training_step=2), lambda a, at, right: not right and any(
            a.rewards.sub_reward_S[s] <= 0.5 for s in at)),
    ):  # fmt: skip
        expected = []
        for recorded in reversed(list(ledger)):
            a = recorded.assignment
            assert a is not None
            for n, id in enumerate(a.batch.trajectory_ids):
                at = np.flatnonzero(a.batch.trajectory_of_step == n)
                if wanted.training_step in (None, recorded.step) and fits(a, at, a.batch.outcome[n] == 1.0):
                    expected.append(id)
        pages = [index.page(wanted, offset, 7) for offset in range(0, len(expected) + 7, 7)]
        assert [trajectory["trajectory_id"] for page in pages for trajectory in page["trajectories"]] == expected
        assert {page["total"] for page in pages} == {len(expected)}


def test_names_of_equal_folders_have_their_parents(tmp_path: Path) -> None:
    ledgers = [a_run(tmp_path / parent / "own" / "seed0", 1) for parent in ("a", "b")]
    assert names_of(ledgers) == ["a/own/seed0", "b/own/seed0"]
    assert names_of([*ledgers[:1], *ledgers[:1]]) == ["seed0", "seed0"]


def test_overview_is_json_of_bounded_size(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    assert len(json.dumps(overview(ledger, indexed(ledger)), allow_nan=False)) < 100_000
    measured = [(k, 1000.0 if k == 70_000 else k / 7e5) for k in range(100_000)]
    long = thinned(measured)
    assert len(long) == POINTS
    assert all(value == float(f"{measured[int(step)][1]:.6g}") for step, value in long)
    assert (max(long, key=itemgetter(1)), long[-1]) == ([70_000, 1000], [99_999, 0.142856])
    assert thinned([(1, 0.123456789)]) == [[1, 0.123457]]


def test_index_accepts_half_a_surrogate_pair(tmp_path: Path) -> None:
    batch = a_batch(1)
    trajectories = batch.to_trajectories()
    trajectories[0].task = replace(trajectories[0].task, ground_truth={"said": "half \ud83d of \U0001f600"})
    folder = RunFolder.create(tmp_path / "run", {}, "")
    write_step(folder, 1, TrajectoryBatch.from_trajectories(trajectories))
    ledger = Ledger.open(folder.path)
    index = indexed(ledger)
    assert set(index.taken) == {1}
    assert ledger.read(1).batch.tasks[0].ground_truth == {"said": "half \ufffd of \U0001f600"}


def test_curves_leave_out_non_finite_values(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    with (ledger.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "actor/entropy": NaN, "actor/loss": 1e999, "actor/kl": 1' + "0" * 400 + "}\n")
    last = ledger.metrics()[-1]
    assert last == {"step": 4, "actor/entropy": None, "actor/loss": None, "actor/kl": None}
    json.dumps(overview(ledger, Index(ledger)), allow_nan=False)


def test_tokens_without_a_finite_logprob_have_none(tmp_path: Path) -> None:
    batch = a_batch(1)
    batch.logprobs[:2] = -np.inf, np.nan
    batch.logprobs[2:] = -0.5
    recorded, spelling = Recorded(1, batch, None), Spelling(a_run(tmp_path / "run", 0))
    tokens = [token for id in batch.step_ids[:4] for token in step_detail(recorded, id, None, spelling)["tokens"]]
    assert [logprob for *_, logprob in tokens] == [None, None, *[-0.5] * (len(tokens) - 2)]


@pytest.mark.parametrize("line", ["[1]", '{"actor/entropy": 1}', '{"step": "four"}', "nothing"])
def test_malformed_jsonl_lines_give_a_one_line_error(tmp_path: Path, line: str) -> None:
    ledger = a_run(tmp_path / "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        file = ledger.path / name
        before = file.read_text()
        file.write_text(f"{line}\n{before}")
        assert f"{name}:1: " in refused("report", ledger.path, "-o", tmp_path / "report.html")
        file.write_text(before)


def test_overview_lists_torn_lines_and_unassigned_steps(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        with (ledger.path / name).open("a") as file:
            file.write('{"step": 4, "actor/entr')
    RunFolder.open(ledger.path).write_steps(4, a_batch(4))
    said = overview(Ledger.open(ledger.path), indexed(Ledger.open(ledger.path)))["left_out"]
    assert said == [
        "no credit is shown for 000004.parquet: none was assigned, too many scores failed",
        "metrics.jsonl: line 4, the last, is torn and left out",
        "events.jsonl: line 2, the last, is torn and left out",
    ]


def test_unreadable_files_with_one_reason_share_a_notice(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run", training_steps=5)
    for n in ledger.steps:
        table = pq.read_table(ledger.file(n))
        facts = json.loads(table.schema.metadata[b"creditflow"])
        facts["options"] |= {"propagation": "of_another_package"}
        facts["version"] = 1 if n == 5 else facts["version"]
        pq.write_table(table.replace_schema_metadata({b"creditflow": json.dumps(facts).encode()}), ledger.file(n))
    index = indexed(ledger)
    old, many = overview(ledger, index)["left_out"]
    assert many.startswith("the trajectories in 000001.parquet, 000002.parquet, 000003.parquet and 1 more cannot be")
    assert "got 'of_another_package'" in many
    assert old.startswith("000005.parquet cannot be read: this is a file of version 1")
    assert "read it with the creditflow that wrote it" in old
    assert (set(index.taken), set(index.damaged)) == ({1, 2, 3, 4}, {5})
    with pytest.raises(DataError, match=r"000005.parquet: this is a file of version 1"):
        connect(ledger)
    assert samples(ledger, index, 10) == {"trajectories": [], "graphs": {}, "steps": {}, "left_out": []}


def test_samples_report_long_texts_and_unspelled_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = a_run(tmp_path / "run")
    index = indexed(ledger)
    (unspelled,) = samples(ledger, index, 10)["left_out"]
    assert "tokens of policy 'default' are shown as ids" in unspelled
    monkeypatch.setattr("creditflow.reports.run_report._STEPS", 20)  # three samples of six steps fit
    found = samples(ledger, index, 10)
    assert len(found["trajectories"]) == 3
    assert "7 of 10 sample trajectories are left out: they are long; creditflow view shows all" in found["left_out"]


def test_samples_begin_with_the_named_trajectories(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    ids = {step: [id for recorded in ledger for id in recorded.batch.trajectory_ids if id.startswith(f"0-{step}-")]
           for step in (1, 3)}  # fmt: skip
    first = [*((id, 1) for id in ids[1][:7]), (ids[3][5], 3), ("0-9-0-0", 9)]
    found = samples(ledger, indexed(ledger), 12, first)
    shown = [(row["trajectory_id"], row["training_step"]) for row in found["trajectories"]]
    assert set(shown[:8]) == set(first[:8])
    assert [step for _, step in shown[8:]] == [3] * 4
    assert len(set(shown)) == len(found["graphs"]) == 12
