"""The cost of writing and querying a ledger: `python -m benchmarks.ledger [--quick]`.

Writing: `timing/ledger_s` against `timing/step_s` of a run of `arithmetic_chain`, training step by training step.
Querying: that run's trajectories are written repeatedly under new ids, up to a million steps; then `why`, `report` and
`view` are timed as whole processes. Takes about five minutes on two cores, most of it to write the million.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import content_of, live_view
from benchmarks.record import ROOT, Figure, exit_with, quick_parser, show, write
from benchmarks.sources import hashes
from creditflow.credit import Assignment
from creditflow.runs import Ledger, RunFolder
from creditflow.runs.run_folder import read_metrics

MEASURES = (
    "src/creditflow/runs",
    "src/creditflow/reports",
    "src/creditflow/data/table.py",
)
STEPS = 1_000_000
TRAINED = 12
FILTERS = (
    "agent=verifier&gate=closed",
    "outcome=wrong&most_score=0.3",
    "agent=executor&least_score=0.4&most_score=0.6&outcome=right",
    "training_step=7",
)


def main() -> int:
    """Measure, print, write `docs/results/ledger.json`; 1 if a number falls short."""
    quick = quick_parser(__doc__, "a tenth of the steps; holds the same, writes nothing").parse_args().quick
    measured = hashes(MEASURES)
    with tempfile.TemporaryDirectory() as folder:
        trained = _train(Path(folder) / "trained", 4 if quick else TRAINED)
        share = [
            row["timing/ledger_s"] / row["timing/step_s"]
            for row in read_metrics(trained.path)
            if "timing/step_s" in row
        ]
        figures = [Figure.from_values("writing, share of a training step", share[1:], 0.03, at_most=True)]
        large, n = _large(trained, Path(folder) / "large", STEPS // 10 if quick else STEPS)
        size = sum(file.stat().st_size for file in large.path.glob("steps/*.parquet"))
        figures.append(Figure("bytes per step", size / n, unit="B"))
        figures += [*_why(large, 3 if quick else 7), *_report(large, Path(folder), 1 if quick else 3), *_view(large)]
    failed = show(figures)
    if not quick:
        write("ledger", figures, ("creditflow", "pyarrow", "duckdb", "fastapi"), measured, {"steps": n})
    return int(failed)


def _train(folder: Path, steps: int) -> Ledger:
    options = (f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "data.val_max_samples=8")
    _creditflow("train", "arithmetic_chain", *options, f"trainer.default_local_dir={folder}")
    return Ledger.open(folder)


def _large(trained: Ledger, folder: Path, steps: int) -> tuple[Ledger, int]:
    """A run of at least `steps` steps, with one line of metrics per training step; and its number of steps."""
    target = RunFolder.create(folder, trained.run, (trained.path / "config.yaml").read_text())
    recorded = [(of.batch, of.assignment) for of in trained]
    rows = [row for row in read_metrics(trained.path) if row["step"] > 0]
    written, number = 0, 0
    while written < steps:
        batch, assignment = recorded[number % len(recorded)]
        assert isinstance(assignment, Assignment)
        row = {key: value for key, value in rows[number % len(rows)].items() if key != "step"}
        number += 1
        renamed = replace(
            batch,
            trajectory_ids=tuple(f"0-{number}-{n}" for n in range(batch.n_trajectories)),
            step_ids=tuple(
                f"0-{number}-{n}/{i}"
                for n, i in zip(batch.trajectory_of_step.tolist(), batch.index_of_step.tolist(), strict=True)
            ),
        )
        target.write_steps(number, renamed, assignment)
        target.append_metrics(number, {key: value for key, value in row.items() if value is not None})
        written += batch.n_steps
    return Ledger.open(folder), written


def _why(ledger: Ledger, repeats: int) -> Iterator[Figure]:
    rng = random.Random(0)
    ids = [f"0-{rng.choice(ledger.steps)}-{rng.randrange(64)}/{rng.randrange(8)}" for _ in range(repeats)]
    yield Figure.from_values(
        "why, a whole process", [_timed("why", ledger.path, id) for id in ids], 1.0, at_most=True, unit="s"
    )


def _report(ledger: Ledger, folder: Path, repeats: int) -> Iterator[Figure]:
    out = folder / "report.html"
    times = [_timed("report", ledger.path, "-o", out) for _ in range(repeats)]
    yield Figure.from_values("report, a whole process", times, 20.0, at_most=True, unit="s")
    yield Figure("report", out.stat().st_size / 1e6, 5.0, at_most=True, unit="MB")


def _view(ledger: Ledger) -> Iterator[Figure]:
    """Time the first page once the server prints its address, and filtered pages once everything is indexed."""
    begin = time.perf_counter()
    with live_view(ledger.path) as (url, _):
        yield Figure("view, from the command to its address", time.perf_counter() - begin, unit="s")
        begin = time.perf_counter()
        content_of(url)
        first = json.loads(content_of(f"{url}api/trajectories"))
        yield Figure("view, first page of trajectories", time.perf_counter() - begin, 1.0, at_most=True, unit="s")
        assert first["trajectories"], "the newest training step is there at once"
        while json.loads(content_of(f"{url}api/overview"))["run"]["indexed"] < len(ledger.steps):
            time.sleep(0.2)
        yield Figure("view, until all is indexed", time.perf_counter() - begin, unit="s")
        times = []
        for wanted in FILTERS:
            for offset in (0, 1000):
                begin = time.perf_counter()
                content_of(f"{url}api/trajectories?{wanted}&offset={offset}")
                times.append(time.perf_counter() - begin)
        yield Figure("view, a filtered page, the slowest of 8", max(times), 0.3, at_most=True, unit="s")
        yield Figure("view, a filtered page, median", median(times), unit="s")


def _timed(*arguments: Any) -> float:
    begin = time.perf_counter()
    _creditflow(*arguments)
    return time.perf_counter() - begin


def _creditflow(*arguments: Any) -> None:
    command = [sys.executable, "-m", "creditflow", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    exit_with(main)
