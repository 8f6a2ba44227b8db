"""Trackers of real runs, read back with the trackers' own readers."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.engines.common.tracked import FolderTrackers
from creditflow.engines.local.trainer import train
from creditflow.errors import ConfigError, InputError
from creditflow.monitoring.trackers.base import COLUMNS, TRACKERS, TrackedRun, TrackerKind
from creditflow.monitoring.trackers.mlflow import accepted_names
from creditflow.monitoring.tracking import Trackers, final_rows, sample_rows
from creditflow.reports.run_report import write_run_report
from creditflow.runs import Ledger
from creditflow.runs.run_folder import read_metrics
from tests.engines.small_runs import WATCHED, run
from tests.rewards.processes import HANG_S, alive, descendants, until

KEYS = ("actor/entropy", "reward/verdicts", "credit/mean/writer", "guard/fallback", "val/pass_at_1")


@pytest.fixture(autouse=True)
def new_process() -> None:
    """accelerate's state belongs to the process: without this, a test could rely on an earlier one."""
    PartialState = pytest.importorskip("accelerate").PartialState
    PartialState._reset_state()


def written(path: Path, key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in read_metrics(path) if row.get(key) is not None]


def close(logged: list[tuple[int, float]], path: Path, key: str) -> bool:
    expected = written(path, key)
    return 0 < len(expected) == len(logged) and np.allclose(logged, expected, rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def resumed(shared_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that goes on after its second step and sends a report, with two trackers."""
    for module in ("tensorboard", "mlflow"):
        pytest.importorskip(module)
    pytest.importorskip("accelerate").PartialState._reset_state()
    path = tmp_path_factory.mktemp("tracked") / "run"
    options = ("trainer.logger=[console,tensorboard,mlflow]", "trainer.project_name=teams", "trainer.save_freq=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        run(shared_recipe, path, *options, "trainer.total_training_steps=2")
        whole = load_recipe(shared_recipe, [*options, f"trainer.default_local_dir={path}"])
        return train(whole, Reporter(), write_run_report).path


def expected_rows(path: Path) -> list[list]:
    ledger = Ledger.open(path)
    return final_rows(ledger.read(ledger.steps[-1]).assignment)


def tensorboard_events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard" / path.name))
    events.Reload()
    return events


def tensorboard_numbers(path: Path, key: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in tensorboard_events(path).Scalars(key)]


def tensorboard_texts(path: Path) -> dict[str, str]:
    events = tensorboard_events(path)
    tags = {tag.partition("/")[0]: tag for tag in events.Tags()["tensors"]}
    return {name: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for name, tag in tags.items()}


def test_tensorboard_has_metrics_and_report_of_a_resumed_run(resumed) -> None:
    path, texts = resumed, tensorboard_texts(resumed)
    for key in KEYS:
        assert close(tensorboard_numbers(path, key), path, key), key
    assert "`report.html`" in texts["report"]
    assert "| `writer` |" in texts["report"]
    rows = expected_rows(path)
    lines = texts["final_trajectories"].splitlines()
    assert len(lines) == 2 + len(rows)
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines)
    assert lines[2].rstrip("| ").endswith(f"{rows[0][-1]:.3f}")
    assert (path / "report.html").stat().st_size > 10_000


def test_mlflow_has_metrics_options_and_report_of_a_resumed_run(resumed, tmp_path) -> None:
    mlflow, path = pytest.importorskip("mlflow"), resumed
    client = mlflow.MlflowClient(f"sqlite:///{path / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'teams'")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.data.params["algorithm.propagation.rule"] == "own"
    assert tracked.info.run_name == "run"
    run_id = (path / "mlflow_run_id").read_text()
    assert tracked.info.run_id == run_id
    for key in KEYS:
        history = sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, key))
        assert close(history, path, key), key
    names = {entry.path for entry in client.list_artifacts(run_id)}
    assert {"report.html", "summary.md", "final_trajectories.json"} <= names
    table = json.loads(Path(client.download_artifacts(run_id, "final_trajectories.json", str(tmp_path))).read_text())
    assert table["columns"] == list(COLUMNS)
    rows = expected_rows(path)
    assert [row[-1] for row in table["data"]] == pytest.approx([row[-1] for row in rows])
    page = Path(client.download_artifacts(run_id, "report.html", str(tmp_path)))
    assert page.read_bytes() == (path / "report.html").read_bytes()


def test_failing_report_leaves_the_run_complete(recipe_file, capsys) -> None:
    pytest.importorskip("tensorboard")

    def fails(path):
        raise InputError("duckdb is not installed")

    options = ["trainer.logger=[tensorboard]", f"trainer.default_local_dir={recipe_file.parent / 'run'}"]
    path = train(load_recipe(recipe_file, options), Reporter(), fails).path
    assert (path / "evaluation.json").exists()
    assert "the trackers get no report: duckdb is not installed" in capsys.readouterr().err


def test_mlflow_metric_names_stay_distinct() -> None:
    sent = accepted_names({"credit/mean/a(b": 1.0, "credit/mean/a)b": 2.0, "credit/mean/ä b": 3.0})
    assert sent == {"credit/mean/a_x28b": 1.0, "credit/mean/a_x29b": 2.0, "credit/mean/ä b": 3.0}


def test_mlflow_metrics_of_another_thread_reach_the_same_run(recipe_file, monkeypatch, tmp_path) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = load_recipe(recipe_file, ["trainer.logger=[mlflow]", "trainer.project_name=teams"])
    with FolderTrackers.start(recipe, tmp_path, 0, print) as tracked:
        thread = threading.Thread(target=tracked.send_step, args=(1, {"loss": 0.5}))
        thread.start()
        thread.join()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'teams'")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.data.metrics == {"loss": 0.5}


def wandb_lines(path: Path) -> list[dict]:
    (file,) = path.glob("wandb/offline-run-*/run-*.wandb")
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout.splitlines()
    return [json.loads(line) for line in lines]


def staged_files(path: Path) -> list[Path]:
    """The files that wandb has set aside for artifacts."""
    staging = Path(os.environ["WANDB_DATA_DIR"]) if "WANDB_DATA_DIR" in os.environ else path
    return [file for file in staging.rglob("*") if file.is_file() and file.parent.name != "run"]


@pytest.fixture
def wandb_offline(monkeypatch, tmp_path):
    """wandb without a network; its background process is ended afterwards."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # artifacts are set aside there
        monkeypatch.setenv(name, str(tmp_path / "wandb_data"))
    before = descendants()
    yield
    wandb.teardown()
    until(lambda: not any(alive(pid) for pid in descendants() - before))


def test_wandb_offline_has_metrics_tables_and_the_report(recipe_file, wandb_offline) -> None:
    options = ["trainer.logger=[wandb]", f"trainer.default_local_dir={recipe_file.parent / 'run'}"]
    path = train(load_recipe(recipe_file, options), Reporter(), write_run_report).path
    records = wandb_lines(path)
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    tables = [json.loads(file.read_text()) for file in path.glob("wandb/offline-run-*/files/media/table/*.json")]
    for key in KEYS:
        assert close([(row["step"], row[key]) for row in rows if key in row], path, key), key
    for name, step in (("trajectories", 1), ("final_trajectories", 3)):
        assert [row["step"] for row in rows if any(key.startswith(name) for key in row)] == [step]
        (table,) = [table for table in tables if {row[0] for row in table["data"]} == {step}]
        assert table["columns"] == ["step", *COLUMNS]
        assert {row[table["columns"].index("agent")] for row in table["data"]} == {"writer", "editor"}
        assert all(isinstance(row[-1], float) for row in table["data"])
    assert [row[-1] for row in table["data"]] == pytest.approx([row[-1] for row in expected_rows(path)])
    assert any("report.html" in json.dumps(record) for record in records)
    assert any((path / "report.html").read_bytes() == file.read_bytes() for file in staged_files(path))


class Fails:
    def log(self, step, metrics):
        raise ConnectionError("the server is gone")

    finished = 0

    def finish(self):
        self.finished += 1
        raise ConnectionError("still gone")


def test_failing_tracker_is_reported_and_left_out() -> None:
    messages: list[str] = []
    tracker = Fails()
    trackers = Trackers(messages.append, {"mlflow": tracker})
    trackers.log(1, {"a": 1.0})
    trackers.log(2, {"a": 1.0})
    trackers.finish()
    assert (len(messages), tracker.finished) == (1, 1)
    assert "mlflow failed and is left out from now on: the server is gone" in messages[0]


class Records:
    def __init__(self):
        self.logged, self.tables = [], []

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def table(self, step, rows):
        self.tables.append((step, rows))


def test_tracker_that_is_named_twice_is_opened_once(monkeypatch, tmp_path) -> None:
    opened: list[Records] = []

    def open_records(tracked: TrackedRun) -> Records:
        opened.append(Records())
        return opened[-1]

    monkeypatch.setitem(TRACKERS._entries, "records", TrackerKind(open_records))
    Trackers.start(["records", "records"], TrackedRun("project", "name", tmp_path, {}), print).log(1, {"a": 1.0})
    assert [records.logged for records in opened] == [[(1, {"a": 1.0})]]


def test_trackers_of_a_folder_get_tables_of_existing_steps(finished, tmp_path) -> None:
    messages: list[str] = []
    records, path = Records(), Path(shutil.copytree(finished(*WATCHED), tmp_path / "run"))
    tracked = FolderTrackers(Trackers(messages.append, {"wandb": records}), path, table_freq=2)
    for step in range(3):
        tracked.send_step(step, {"a": float(step)})
    (path / "steps" / "000002.parquet").unlink()  # as in a rollback
    tracked.send_step(2, {"a": 0.5})
    assert [(step, metrics["a"]) for step, metrics in records.logged] == [(0, 0.0), (1, 1.0), (2, 2.0), (2, 0.5)]
    ledger = Ledger.open(path)
    assert [step for step, _ in records.tables] == [1, 2]
    assert str(records.tables[0][1]) == str(sample_rows(ledger.read(1).assignment))  # numbers may be nan
    assert len(messages) == 1
    assert "the trackers get no table of step 2" in messages[0]


def test_unknown_tracker_is_rejected(recipe_file) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        run(recipe_file, "run", "trainer.logger=[tensorbord]")
    assert not (recipe_file.parent / "run").exists()


def test_failed_tracker_setup_raises_a_config_error(recipe_file, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nosuch://somewhere")
    with pytest.raises(ConfigError, match=r"trainer\.logger: mlflow cannot be set up"):
        run(recipe_file, "run", "trainer.logger=[mlflow]")
