"""Data frames of a run against the step files, and figures of it."""

import sys

import numpy as np
import pyarrow as pa
import pytest

import creditflow
from creditflow.errors import InputError
from creditflow.runs import Ledger, RunFolder
from tests.builders import batch_of, make_trajectory, step
from tests.reports.runs import a_run

LIBRARIES = ("pandas", "polars", "arrow")
TABLES = ("metrics", "trajectories", "steps", "credit", "scores")


def columns(frame):
    """The columns of a frame of any library as lists."""
    if isinstance(frame, pa.Table):
        return frame.to_pydict()
    return {name: frame[name].to_list() for name in frame.columns}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("runs") / "run")


def test_frames_warn_of_a_torn_step_file(tmp_path) -> None:
    ledger = a_run(tmp_path / "run")
    file = ledger.path / "steps" / "000002.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    run = creditflow.open_run(str(ledger.path), frames="arrow")
    for table in (run.trajectories, run.steps, run.credit, run.scores):
        with pytest.warns(UserWarning, match="000002.parquet is left out: it is incomplete"):
            assert set(columns(table())["training_step"]) == {1, 3}


@pytest.mark.parametrize("library", LIBRARIES)
def test_frames_hold_the_recorded_credit(ledger, library) -> None:
    if library != "arrow":
        pytest.importorskip(library)
    run = creditflow.open_run(str(ledger.path), frames=library)
    credit = columns(run.credit())
    assert type(run.credit()).__module__.startswith({"arrow": "pyarrow"}.get(library, library))
    made = [recorded.assignment for recorded in ledger]
    for name, columns_S in (
        ("credit", [a.credit.total_S for a in made]),
        ("withheld", [a.credit.withheld_S for a in made]),
        ("advantage", [a.advantage.advantage_S for a in made]),
    ):
        assert np.array_equal(np.array(credit[name], dtype=float), np.concatenate(columns_S), equal_nan=True)
    assert credit["step_id"] == [id for recorded in ledger for id in recorded.batch.step_ids]
    assert sorted(set(credit["training_step"])) == list(ledger.steps)


def test_frames_have_one_row_for_each_record(ledger) -> None:
    run = creditflow.open_run(ledger.path, frames="arrow")
    batches = [recorded.batch for recorded in ledger]
    n_steps = sum(batch.n_steps for batch in batches)
    assert run.metrics().num_rows == len(ledger.steps)
    assert run.trajectories().num_rows == sum(len(batch.trajectory_ids) for batch in batches)
    assert run.steps().num_rows == n_steps
    assert run.scores().num_rows == sum(int(batch.scored.sum()) for batch in batches)
    assert "prompt_ids" not in run.steps().column_names
    tokens = run.steps(tokens=True).to_pydict()["response_ids"]
    assert [len(ids) for ids in tokens] == [n for batch in batches for n in np.diff(batch.token_offsets).tolist()]


def test_trajectories_frame_sums_their_steps(ledger) -> None:
    rows = creditflow.open_run(ledger.path, frames="arrow").trajectories().to_pylist()
    recorded = ledger.read(ledger.steps[0])
    for n, row in enumerate(rows[: len(recorded.batch.trajectory_ids)]):
        mine = recorded.batch.trajectory_of_step == n
        assert row["trajectory_id"] == recorded.batch.trajectory_ids[n]
        assert row["steps"] == mine.sum()
        assert row["credit"] == pytest.approx(recorded.assignment.credit.total_S[mine].sum(), abs=1e-12)
        assert row["outcome"] == recorded.batch.outcome[n]


def test_frames_name_failed_scores(tmp_path) -> None:
    folder = RunFolder.create(tmp_path / "it's a run", {"recipe": "failed"}, "")
    failed = make_trajectory("a", [step("planner", "failed", tokens=2), step("executor", 0.5)], outcome=1.0)
    folder.write_steps(1, batch_of(failed, make_trajectory("empty", [], outcome=0.0)))
    run = creditflow.open_run(folder.path, frames="arrow")
    scores = run.scores().to_pylist()
    assert [(row["status"], row["value"]) for row in scores] == [("failed", None), ("ok", 0.5)]
    assert [row["steps"] for row in run.trajectories().to_pylist()] == [2, 0]
    with pytest.raises(InputError, match="expected recorded credit"):
        run.credit()
    with pytest.raises(InputError, match="found none"):
        run.plot_credit()


def test_frames_of_an_empty_run_name_what_is_missing(tmp_path) -> None:
    run = creditflow.open_run(RunFolder.create(tmp_path / "run", {}, "").path, frames="arrow")
    assert run.metrics().num_rows == 0
    for name in TABLES[1:]:
        with pytest.raises(InputError, match="expected recorded training steps, found none"):
            getattr(run, name)()
    with pytest.raises(InputError, match="expected measured pass rates"):
        run.plot_learning_curve()


def test_open_run_refuses_other_folders_and_libraries(tmp_path, ledger, monkeypatch) -> None:
    with pytest.raises(InputError, match="expected the folder of a run"):
        creditflow.open_run(tmp_path)
    with pytest.raises(InputError, match="did you mean 'polars'"):
        creditflow.open_run(ledger.path, frames="polar")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(InputError, match=r"polars is not installed: pip install 'creditflow\[report,polars\]'"):
        creditflow.open_run(ledger.path, frames="polars")


def test_figures_show_data_of_the_run(ledger) -> None:
    pytest.importorskip("matplotlib")
    run = creditflow.open_run(ledger.path, frames="arrow")
    for figure in (run.plot_learning_curve(), run.plot_credit(), run.plot_gates(), run.plot_rewards()):
        assert any(axis.has_data() for axis in figure.axes)
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_learning_curve_draws_the_named_metrics(ledger) -> None:
    pytest.importorskip("matplotlib")
    run = creditflow.open_run(ledger.path, frames="arrow")
    (line,) = run.plot_learning_curve("actor/entropy").axes[0].lines
    assert line.get_ydata().tolist() == run.metrics()["actor/entropy"].to_pylist()
    with pytest.raises(InputError, match="did you mean 'actor/entropy'"):
        run.plot_learning_curve("actor/entropi")
