"""The live view of a run of a million trajectories: `python -m benchmarks.view [--quick] [--run FOLDER]`.

Writes a run of 977 training steps with 1,024 trajectories of 30 steps each, thirty million steps in all, through the
writer of step files. Then it measures the view cold (without its index) and warm, a filtered page, a search, an
opened trajectory, an export, and the peak memory of the server. Takes about forty minutes and 5 GB of disk.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.synthetic import chain_batch
from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Task, TrajectoryBatch
from creditflow.runs import Ledger, RunFolder

TRAINING_STEPS = 977
TASKS, TRAJECTORIES, STEPS = 256, 4, 30
KINDS = 4
"""Batches drawn; every training step is one of them under new names and texts."""


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
    return batch, assign(batch, CreditOptions(propagation="threshold", outcome_to="all"))


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("n", type=int)
    given = parser.parse_args()
    write_run(given.run, given.n)
