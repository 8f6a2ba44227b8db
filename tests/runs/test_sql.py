"""SQL access to a ledger, and the columns and queries in docs/reference/ledger.md."""

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from creditflow.credit import assign
from creditflow.data import Score
from creditflow.runs import Ledger, RunFolder
from creditflow.runs.sql import connect
from tests.builders import batch_of, credit_options, make_trajectory, step
from tests.paths import DOCS

DOCS = DOCS / "reference" / "ledger.md"
QUERIES = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    folder = RunFolder.create(tmp_path / "it's run [12]", {"seed": 1}, "trainer: {}\n")
    for number in (1, 2):
        batch = batch_of(
            make_trajectory(
                f"{number}a", [step("planner", 1.0, tokens=2), step("executor", 0.5, tokens=1)], outcome=1.0
            ),
            make_trajectory(f"{number}b", [], outcome=0.0),
            make_trajectory(
                f"{number}c", [step("planner", "failed", tokens=3), step("executor", 0.0, tokens=1)], outcome=0.0
            ),
        )
        folder.write_steps(number, batch, assign(batch, credit_options(propagation="threshold")))
        folder.append_metrics(number, {"actor/entropy": 1 / number})
    folder.append_events([{"step": 2, "rule": "entropy"}])
    return Ledger.open(folder.path)


def test_documented_queries_return_rows(ledger: Ledger) -> None:
    results = {query: connect(ledger).execute(query).fetchall() for query in QUERIES}
    assert len(results) == 5
    assert all(results.values())
    (failures,) = [rows for query, rows in results.items() if "reason" in query]
    assert [(name, status, n) for name, status, _, n in failures] == [("f", "failed", 2)]


def test_views_contain_steps_metrics_and_events(ledger: Ledger) -> None:
    other = RunFolder.create(ledger.path.with_name("it's run 1"), {}, "")  # which the pattern `run [12]` fits
    other.append_metrics(1, {"actor/entropy": 7.0})
    shutil.copy(ledger.file(2), other.path / "steps" / ledger.file(1).name)
    connection = connect(ledger)
    result = connection.execute(
        "SELECT training_step, step_id, advantage FROM steps WHERE step_id IS NOT NULL ORDER BY ALL"
    )
    rows = result.fetchall()
    expected = [
        (recorded.step, id, advantage)
        for recorded in ledger
        if recorded.assignment is not None
        for id, advantage in zip(
            recorded.batch.step_ids, recorded.assignment.advantage.advantage_S.tolist(), strict=True
        )
    ]
    assert rows == expected
    assert connection.execute('SELECT step, "actor/entropy" FROM metrics').fetchall() == [(1, 1.0), (2, 0.5)]
    assert connection.execute("SELECT rule FROM events").fetchall() == [("entropy",)]


def test_metrics_view_has_columns_and_types_of_all_lines(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, "")
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {k}, "loss": 0}}\n' for k in range(1, 25_000))  # DuckDB samples 20,480 lines
    folder.append_metrics(25_000, {"loss": 0.5, **{f"late{k}": 1.0 for k in range(250)}})
    query = "SELECT max(loss), max(late249), count(*) FROM metrics"
    assert connect(Ledger.open(folder.path)).execute(query).fetchall() == [(0.5, 1.0, 25_000)]


def test_empty_run_has_no_views(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {}, "")
    connection = connect(Ledger.open(tmp_path / "run"))
    assert connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall() == []


def test_docs_name_exactly_the_columns_of_a_step_file(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, "")
    batch = batch_of(
        make_trajectory("a", [step("planner", Score((1.0, 0.5)), tokens=2)], outcome=1.0),
        make_trajectory("b", [step("planner", Score((0.0, 0.5, 0.5)), tokens=3)], outcome=0.0),
        make_trajectory("c", [step("planner"), step("executor")], outcome=1.0, outcomes={"executor": "failed"}),
    )
    by_token = {"propagation": "threshold", "decomp_granularity": "token_level", "outcome_to": "answer"}
    chosen = [
        credit_options(on_closed_gate="freeze", **by_token),
        credit_options(adv_estimator="gae", **by_token),
        credit_options(adv_estimator="gae", **{**by_token, "propagation": "own"}),
        credit_options(adv_estimator="reinforce_plus_plus", gamma_token=0.5),
        credit_options(propagation="calibrated"),
        credit_options(propagation="decoupled"),
        credit_options(propagation="posterior"),
    ]
    for number, options in enumerate(chosen, 1):
        values_T = np.arange(float(len(batch.response_ids))) if options.estimator.critic else None
        folder.write_steps(number, batch, assign(batch, options, values_T=values_T))
    files = (folder.path / "steps").iterdir()
    written = {name for file in files for name in pq.read_schema(file).names}

    section = DOCS.read_text().split("## The step file")[1].split("## Five questions")[0]
    documented = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented.append(section.split("**Only where the tokens")[1].split("a value for each response token:")[1])
    named = {name for text in documented for name in re.findall(r"`(\w+)`", text)}
    assert named == written
