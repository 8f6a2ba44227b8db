"""Writing a run's folder and reading it back."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.credit import assign
from creditflow.data import TrajectoryBatch, read_parquet
from creditflow.errors import BatchError, DataError, InputError
from creditflow.runs import Ledger
from creditflow.runs.run_folder import RunFolder, read_metrics
from creditflow.runs.step_files import FORMAT
from tests.builders import batch_of, credit_options, make_trajectory, step
from tests.paths import TOY


def a_folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", {"seed": 1}, "trainer: {}\n")


def a_batch() -> TrajectoryBatch:
    """Three trajectories in order: one right, one without steps, one wrong."""
    return batch_of(
        make_trajectory("a", [step("planner", 1.0, tokens=2), step("executor", 0.5, tokens=1)], outcome=1.0),
        make_trajectory("b", [], outcome=0.0),
        make_trajectory("c", [step("planner", 0.0, tokens=3), step("executor", tokens=1)], outcome=0.0),
    )


def rows_of(folder: RunFolder, step: int) -> list[dict[str, object]]:
    return pq.read_table(folder.path / f"steps/{step:06d}.parquet").to_pylist()


def files_in(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


# The folder


def test_create_writes_run_and_configuration(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "notes.txt").write_text("kept")
    folder = RunFolder.create(tmp_path / "runs" / "one", {"seed": 1, "name": "toy"}, "trainer: {}\n")
    assert json.loads((folder.path / "run.json").read_text()) == {"format": FORMAT, "seed": 1, "name": "toy"}
    assert (folder.path / "config.yaml").read_text() == "trainer: {}\n"
    assert files_in(folder.path) == ["config.yaml", "notes.txt", "run.json"]
    assert (folder.path / "steps").is_dir()


def test_create_refuses_and_keeps_an_existing_run(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    folder.append_metrics(1, {"loss": 0.5})
    message = r"^trainer\.default_local_dir: .*/run holds a run already; name another folder$"
    with pytest.raises(InputError, match=message):
        RunFolder.create(folder.path, {"seed": 2}, "other: {}\n")
    assert json.loads((folder.path / "run.json").read_text()) == {"format": FORMAT, "seed": 1}
    assert (folder.path / "config.yaml").read_text() == "trainer: {}\n"
    assert read_metrics(folder.path) == [{"step": 1, "loss": 0.5}]


# Resuming


def a_run(tmp_path: Path, steps: int) -> RunFolder:
    """A run with an evaluation before training, and a step file and a line of metrics per step."""
    folder, batch = a_folder(tmp_path), a_batch()
    folder.append_metrics(0, {"val/pass_at_1": 0.5})
    for n in range(1, steps + 1):
        folder.write_steps(n, batch)
        folder.append_metrics(n, {"loss": 1 / n, "nan": math.nan})
    return folder


def contents(folder: RunFolder) -> dict[str, bytes]:
    return {name: (folder.path / name).read_bytes() for name in files_in(folder.path)}


def test_open_returns_an_existing_run(tmp_path: Path) -> None:
    created = a_folder(tmp_path)
    (created.path / "steps").rmdir()
    folder = RunFolder.open(created.path)
    folder.write_steps(1, a_batch())
    assert files_in(folder.path) == ["config.yaml", "run.json", "steps/000001.parquet"]
    assert json.loads((folder.path / "run.json").read_text()) == {"format": FORMAT, "seed": 1}


def test_open_refuses_a_missing_run_and_creates_nothing(tmp_path: Path) -> None:
    message = r"^trainer\.default_local_dir: .*/run holds no run: expected a run\.json in it$"
    with pytest.raises(InputError, match=message):
        RunFolder.open(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [0, 2, 4])
def test_rewound_run_continues_like_an_uninterrupted_one(tmp_path: Path, step: int) -> None:
    whole, killed = a_run(tmp_path / "whole", 4), a_run(tmp_path / "killed", 4)
    with (killed.path / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 0.2')
    (killed.path / "steps/.000005.parquet.77.part").write_bytes(b"PAR1")
    (killed.path / ".metrics.jsonl.77.part").write_text("{}")
    folder = RunFolder.open(killed.path)
    folder.rewind(step)
    once = contents(folder)
    folder.rewind(step)
    assert contents(folder) == once
    assert [row["step"] for row in read_metrics(folder.path)] == list(range(step + 1))
    assert files_in(folder.path / "steps") == [f"{n:06d}.parquet" for n in range(1, step + 1)]
    for n in range(step + 1, 5):
        folder.write_steps(n, a_batch())
        folder.append_metrics(n, {"loss": 1 / n, "nan": math.nan})
    assert contents(folder) == contents(whole)


def test_rewind_removes_the_evaluation_and_keeps_unknown_files(tmp_path: Path) -> None:
    folder = a_run(tmp_path, 2)
    folder.write_text("evaluation.json", "longer than what comes next")
    folder.write_text("evaluation.json", "{}\n")
    assert (folder.path / "evaluation.json").read_text() == "{}\n"
    folder.write_text("steps/notes.parquet", "kept")
    folder.rewind(2)
    assert "evaluation.json" in files_in(folder.path)
    folder.rewind(1)
    assert files_in(folder.path) == [
        "config.yaml", "metrics.jsonl", "run.json", "steps/000001.parquet", "steps/notes.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ['{"loss": \n', '{"loss": 0.5}\n'])
def test_rewind_refuses_damaged_metrics_and_removes_nothing(tmp_path: Path, damage: str) -> None:
    folder = a_run(tmp_path, 2)
    file = folder.path / "metrics.jsonl"
    file.write_text(damage + file.read_text())
    before = contents(folder)
    with pytest.raises(
        DataError, match=r"metrics\.jsonl:1: (not JSON: Expecting value, column 10$|expected an object)"
    ):
        folder.rewind(1)
    assert contents(folder) == before


# Metrics


def test_non_finite_metrics_become_null(tmp_path: Path) -> None:
    def strict(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    folder = a_folder(tmp_path)
    folder.append_metrics(
        1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "of_numpy": np.float64("nan"), "x": 2}
    )
    line = (folder.path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=strict) == {
        "step": 1, "nan": None, "inf": None, "minus": None, "of_numpy": None, "x": 2,
    }  # fmt: skip
    assert read_metrics(folder.path)[0]["nan"] is None


def test_read_metrics_skips_a_last_line_torn_at_any_place(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    folder.append_metrics(1, {"loss": 0.5})
    file = folder.path / "metrics.jsonl"
    whole = file.read_text()
    file.write_text("")
    assert read_metrics(folder.path) == []
    file.write_text(whole)
    folder.append_metrics(2, {"loss": 0.25, "n": 12})
    last = file.read_text().removeprefix(whole).rstrip("\n")
    for cut in range(len(last)):
        file.write_text(whole + last[:cut])
        assert read_metrics(folder.path) == [{"step": 1, "loss": 0.5}], last[:cut]
    file.write_text(whole + last)  # the whole line without its newline
    assert read_metrics(folder.path)[1] == {"step": 2, "loss": 0.25, "n": 12}


# Steps


def test_step_file_contains_batch_and_credit_columns(tmp_path: Path) -> None:
    folder, batch = a_folder(tmp_path), a_batch()
    assignment = assign(batch, credit_options(propagation="own", group_by="agent"))
    folder.write_steps(7, batch, assignment)
    assert files_in(folder.path / "steps") == ["000007.parquet"]
    assert read_parquet(folder.path / "steps/000007.parquet").to_trajectories() == (batch.to_trajectories())

    rows = rows_of(folder, 7)
    assert [row["step_id"] for row in rows] == ["a.0", "a.1", None, "c.0", "c.1"]
    of_steps = [row for row in rows if row["step_id"] is not None]
    assert [row["advantage"] for row in of_steps] == assignment.advantage.advantage_S.tolist()
    assert rows[2]["advantage"] is None  # the trajectory without steps
    assert [row["sub_reward"] for row in of_steps][:3] == [1.0, 0.5, 0.0]
    assert [row["scored"] for row in of_steps] == [True, True, True, False]


def test_assignment_columns_do_not_hide_batch_columns(tmp_path: Path) -> None:
    folder, batch = a_folder(tmp_path), a_batch()
    assignment = assign(batch, credit_options())
    folder.write_steps(1, batch)
    folder.write_steps(2, batch, assignment)
    assert read_parquet(folder.path / "steps/000001.parquet").to_trajectories() == batch.to_trajectories()
    of_batch = pq.read_schema(folder.path / "steps/000001.parquet").names
    assert not {"advantage", "credit", "group_id"} & set(of_batch)
    of_both = pq.read_schema(folder.path / "steps/000002.parquet").names
    assert of_both[: len(of_batch)] == of_batch
    assert len(set(of_both)) == len(of_both) > len(of_batch)
    assert not {"group", "order", "select", "in", "out"} & set(of_both)  # SQL keywords


def test_step_file_is_replaced_atomically(tmp_path: Path) -> None:
    folder, batch = a_folder(tmp_path), a_batch()
    folder.write_steps(1, batch)
    smaller = batch_of(make_trajectory("a", [step("planner", 1.0)], outcome=1.0))
    with pytest.raises(BatchError, match="expected 4 values, one per step, got 1"):
        folder.write_steps(1, batch, assign(smaller, credit_options()))
    assert len(rows_of(folder, 1)) == 5
    assert files_in(folder.path / "steps") == ["000001.parquet"]
    folder.write_steps(1, smaller)
    assert len(rows_of(folder, 1)) == 1


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ({"format": 5}, "a file of version 5, and creditflow reads version 4; update creditflow"),
        ({"format": 1}, "a file of version 1, and creditflow reads version 4; read it with the creditflow that wrote"),
        ({}, "a file of version 1, and creditflow reads version 4; read it with the creditflow that wrote it"),
    ],
)
def test_run_of_another_version_is_refused(tmp_path: Path, version: dict, advice: str) -> None:
    folder = a_folder(tmp_path)
    folder.write_text("run.json", json.dumps({"seed": 1, **version}))
    for opened in (RunFolder, Ledger):
        with pytest.raises(DataError, match=rf"run\.json: this is {advice}"):
            opened.open(folder.path)


def test_commands_refuse_a_run_of_another_version(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"engine": "local", "config": {}}, "")
    folder.write_text("run.json", '{"format": 1, "engine": "local", "config": {}}')
    commands = [[name, str(folder.path)] for name in ("report", "view", "why", "recredit", "audit")]
    commands.append(["train", str(TOY), f"trainer.default_local_dir={folder.path}"])
    for words in commands:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, result.output
        lines = [line for line in result.stderr.splitlines() if not line.startswith(("loading ", "credit: "))]
        assert len(lines) == 1
        assert lines[0].startswith(f"error: {folder.path}/run.json: this is a file of version 1, and creditflow reads")
