"""The live view of a run of a million trajectories: `python -m benchmarks.view [--quick] [--run FOLDER]`.

Writes a run of 977 training steps with 1,024 trajectories of 30 steps each, thirty million steps in all, through the
writer of step files; with `--run`, in that folder, where it is kept and found again. Then it measures the view: the
first page, the overview, filtered pages, a search, an opened trajectory, and the peak memory of the server. Takes about
twenty minutes and 2 GB of disk.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.processes import content_of, live_view, memory_of
from benchmarks.record import Figure, exit_with, quick_parser, show, write
from benchmarks.sources import hashes
from benchmarks.synthetic import chain_batch
from creditflow.config import credit_options
from creditflow.credit import Assignment, assign
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Task, TrajectoryBatch
from creditflow.runs import Ledger, RunFolder

MEASURES = (
    "src/creditflow/runs",
    "src/creditflow/reports",
    "src/creditflow/data/table.py",
)
TRAINING_STEPS = 977
TASKS, TRAJECTORIES, STEPS = 256, 4, 30
KINDS = 4
"""Batches drawn; every training step is one of them under new names and texts."""
QUICK_STEPS = 100
FILTERS = (
    "agent=verifier&outcome=wrong",
    "agent=executor&gate=closed",
    "agent=executor&least_score=0.4&most_score=0.6&outcome=right",
    "training_step=7&most_score=0.1",
)


def main() -> int:
    """Measure, print, write `docs/results/view.json`; 1 if a number falls short."""
    parser = quick_parser(__doc__, "a tenth of the run; holds the same, writes nothing")
    parser.add_argument("--run", type=Path, help="the folder of the run; by default a temporary one")
    given = parser.parse_args()
    measured = hashes(MEASURES)
    n = QUICK_STEPS if given.quick else TRAINING_STEPS
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or Path(folder) / "run"
        ledger = Ledger.open(run) if (run / "run.json").is_file() else write_run(run, n)
        figures = list(_view(ledger))
    failed = show(figures)
    if not given.quick:
        steps = len(ledger.steps) * TASKS * TRAJECTORIES * STEPS
        write("view", figures, ("creditflow", "pyarrow", "duckdb", "fastapi"), measured, {"steps": steps})
    return int(failed)


def write_run(folder: Path, training_steps: int) -> Ledger:
    """Write the run, with one line of metrics per training step."""
    config = {"algorithm": {"propagation": "threshold", "outcome_to": "all"}, "data": {"seed": 0}}
    target = RunFolder.create(folder, {"recipe": "synthetic", "engine": "local", "seed": 0, "config": config}, "")
    drawn = [_drawn(seed) for seed in range(KINDS)]
    for number in range(1, training_steps + 1):
        batch, made = drawn[number % KINDS]
        target.write_steps(number, _renamed(batch, number), made)
        target.append_metrics(number, {"train/pass_at_1": float(batch.outcome.mean()), **credit_metrics(made)})
    return Ledger.open(folder)


def _drawn(seed: int) -> tuple[TrajectoryBatch, Assignment]:
    batch = chain_batch(TASKS, TRAJECTORIES, STEPS, seed=seed)
    return batch, assign(batch, credit_options(propagation="threshold", outcome_to="all"))


def _renamed(batch: TrajectoryBatch, number: int) -> TrajectoryBatch:
    """The batch with the ids, tasks and texts of another training step."""
    rng = np.random.default_rng(number)
    tasks = [
        Task("synthetic", ({"role": "user", "content": f"Compute {a} times {b}, minus {c}."},), str(a * b - c))
        for a, b, c in rng.integers(10, 1000, (TASKS, 3)).tolist()
    ]
    of_trajectory = batch.group_of_trajectory.tolist()
    trajectory_S, index_S = batch.trajectory_of_step.tolist(), batch.index_of_step.tolist()
    numbers_S = rng.integers(0, 1_000_000, batch.n_steps).tolist()
    places = list(zip(trajectory_S, index_S, numbers_S, strict=True))
    questions = [task.text for task in tasks]
    return replace(
        batch,
        trajectory_ids=tuple(f"0-{number}-{n}" for n in range(batch.n_trajectories)),
        step_ids=tuple(f"0-{number}-{n}/{i}" for n, i, _ in places),
        tasks=tuple(tasks[group] for group in of_trajectory),
        prompts=tuple(f"{questions[of_trajectory[n]]} Step {i}: continue from the last line." for n, i, _ in places),
        responses=tuple(f"line {i}: the partial result is {value}, checked twice" for _, i, value in places),
    )


def _view(ledger: Ledger) -> Iterator[Figure]:
    """From the command to the first page, until everything is indexed, then single requests."""
    begin = time.perf_counter()
    with live_view(ledger.path) as (url, process):
        first = json.loads(content_of(f"{url}api/trajectories"))
        yield _most("from the command to the first page", time.perf_counter() - begin, 2.0)
        assert first["trajectories"], "the newest training step is there at once"
        while json.loads(content_of(f"{url}api/overview"))["run"]["indexed"] < len(ledger.steps):
            time.sleep(1.0)
        yield Figure("until all is indexed", time.perf_counter() - begin, unit="s")
        total = json.loads(content_of(f"{url}api/trajectories"))["total"]
        assert total == len(ledger.steps) * TASKS * TRAJECTORIES
        yield _most("the overview", _timed(f"{url}api/overview"), 2.0)
        pages = [_timed(f"{url}api/trajectories?{wanted}") for wanted in FILTERS]
        yield _most("a filtered page, the slowest of 4", max(pages), 1.0)
        yield _most("the last page", _timed(f"{url}api/trajectories?offset={total - 25}"), 1.0)
        yield _most("a search for a common word", _timed(f"{url}api/search?text=checked"), 2.0)
        begin = time.perf_counter()
        portion = json.loads(content_of(f"{url}api/search?text=nowhere"))
        yield _most("a portion of a search", time.perf_counter() - begin, 3.0)
        share = portion["searched"] / portion["of"]
        yield Figure("a whole search for a rare word", (time.perf_counter() - begin) / share, unit="s")
        middle = ledger.steps[len(ledger.steps) // 2]
        at = f"training_step={middle}"
        yield Figure("a trajectory", _timed(f"{url}api/trajectory?{at}&trajectory_id=0-{middle}-9"), unit="s")
        yield Figure("a step", _timed(f"{url}api/step?{at}&step_id=0-{middle}-9/9"), unit="s")
        yield _memory("peak memory", process)


def _most(what: str, seconds: float, bound: float) -> Figure:
    return Figure(what, seconds, bound, at_most=True, unit="s")


def _memory(what: str, process: subprocess.Popen[str]) -> Figure:
    return Figure(what, memory_of("VmHWM", process.pid) / 1e9, 2.0, at_most=True, unit="GB")


def _timed(url: str) -> float:
    begin = time.perf_counter()
    content_of(url)
    return time.perf_counter() - begin


if __name__ == "__main__":
    exit_with(main)
