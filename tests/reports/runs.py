"""Run folders for tests of reports, built without a model."""

import json
from pathlib import Path

import numpy as np

from creditflow.credit import assign
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Score, Task, Trajectory, TrajectoryBatch
from creditflow.reports.index import Index
from creditflow.runs import Ledger, RunFolder
from tests.builders import credit_options, make_trajectory, step

HOSTILE = (
    "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">\u202e\x1b[2J"
)
AGENTS = ("planner", "executor", "verifier")


def a_trajectory(training_step: int, task: int, n: int, rng: np.random.Generator, steps: int = 6) -> Trajectory:
    id, specs, all_right = f"0-{training_step}-{task}-{n}", [], True
    for index in range(steps):
        agent = AGENTS[0] if index == 0 else AGENTS[1 + (index + 1) % 2]
        right = rng.uniform() < {"planner": 0.9, "executor": 0.7, "verifier": 0.6}[agent]
        scores = {} if agent == "planner" else {"right": Score(1.0 if right else 0.25, reason="looked at")}
        all_right &= right or not scores
        texts = {"prompt": f"prompt {index} of {id}", "response": f"response {index} of {id}"}
        specs.append(step(agent, scores, tokens=int(rng.integers(1, 5)), **texts))
    trajectory = make_trajectory(id, specs, outcome=float(all_right), task=f"0-{training_step}-{task}")
    trajectory.task = Task("test", ({"role": "user", "content": f"task {task}: {HOSTILE}"},), "42")
    trajectory.answer = "42"
    for own in trajectory.steps:
        own.id = f"{id}/{own.index}"
    return trajectory


def a_batch(training_step: int, tasks: int = 4, trajectories: int = 4, steps: int = 6) -> TrajectoryBatch:
    rng = np.random.default_rng(training_step)
    return TrajectoryBatch.from_trajectories(
        [a_trajectory(training_step, task, n, rng, steps) for task in range(tasks) for n in range(trajectories)]
    )


def a_run(path: Path, training_steps: int = 3, **options: object) -> Ledger:
    """A run with metrics and a guard event."""
    config = {"algorithm": {"propagation": {"rule": "threshold"}, **options}, "data": {"seed": 0}}
    folder = RunFolder.create(path, {"recipe": "test", "engine": "local", "seed": 0, "config": config}, "")
    for training_step in range(1, training_steps + 1):
        write_step(folder, training_step, **options)
    folder.append_events([{"step": 2, "rule": "entropy", "what": "fired", "metric": "actor/entropy", "action": "warn"}])
    (path / "checkpoints" / "global_step_1").mkdir(parents=True)
    (path / "checkpoints" / "global_step_1" / "tokenizer.json").write_text(json.dumps({"not": "one"}))
    return Ledger.open(path)


def indexed(ledger: Ledger) -> Index:
    index = Index(ledger)
    index.refresh(ledger)
    return index


def write_step(folder: RunFolder, number: int, batch: TrajectoryBatch | None = None, **options: object) -> None:
    batch = batch or a_batch(number)
    made = assign(batch, credit_options(**{"propagation": "threshold", "outcome_to": "answer", **options}))  # type: ignore[arg-type]
    folder.write_steps(number, batch, made)
    folder.append_metrics(number, {"val/pass_at_1": number / 10, "actor/entropy": 1 / number, **credit_metrics(made)})
