"""Run folders for tests of reports, built without a model."""

import json
from pathlib import Path

import numpy as np

from creditflow.credit import CreditOptions, assign
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Score, Step, Task, Trajectory, TrajectoryBatch
from creditflow.runs import Ledger, RunFolder

HOSTILE = (
    "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">\u202e\x1b[2J"
)
AGENTS = ("planner", "executor", "verifier")


def a_trajectory(training_step: int, task: int, n: int, rng: np.random.Generator, steps: int = 6) -> Trajectory:
    id = f"0-{training_step}-{task}-{n}"
    made, turns = [], dict.fromkeys(AGENTS, 0)
    for index in range(steps):
        agent = AGENTS[0] if index == 0 else AGENTS[1 + (index + 1) % 2]
        right = rng.uniform() < {"planner": 0.9, "executor": 0.7, "verifier": 0.6}[agent]
        scores = {} if agent == "planner" else {"right": Score(1.0 if right else 0.25, reason="looked at")}
        tokens = int(rng.integers(1, 5))
        made.append(
            Step(
                id=f"{id}/{index}",
                trajectory_id=id,
                index=index,
                agent=agent,
                turn=turns[agent],
                parents=(index - 1,) if index else (),
                prompt=f"prompt {index} of {id}",
                response=f"response {index} of {id}",
                response_ids=tuple(range(tokens)),
                response_mask=(1,) * tokens,
                logprobs=(-0.5,) * tokens,
                scores=scores,
            )
        )
        turns[agent] += 1
    task_of = Task("test", ({"role": "user", "content": f"task {task}: {HOSTILE}"},), "42")
    ended = Score(float(all(s.scores["right"].value == 1.0 for s in made[1:])))
    return Trajectory(id=id, uid=f"0-{training_step}-{task}", task=task_of, steps=made, answer="42", outcome=ended)


def a_batch(training_step: int, tasks: int = 4, trajectories: int = 4, steps: int = 6) -> TrajectoryBatch:
    rng = np.random.default_rng(training_step)
    return TrajectoryBatch.from_trajectories(
        [a_trajectory(training_step, task, n, rng, steps) for task in range(tasks) for n in range(trajectories)]
    )


def a_run(path: Path, training_steps: int = 3, **options: object) -> Ledger:
    """A run with metrics and a guard event."""
    config = {"algorithm": {"propagation": "threshold", **options}, "data": {"seed": 0}}
    folder = RunFolder.create(path, {"recipe": "test", "engine": "local", "seed": 0, "config": config}, "")
    for step in range(1, training_steps + 1):
        write_step(folder, step, **options)
    folder.append_events([{"step": 2, "rule": "entropy", "what": "fired", "metric": "actor/entropy", "action": "warn"}])
    (path / "checkpoints" / "global_step_1").mkdir(parents=True)
    (path / "checkpoints" / "global_step_1" / "tokenizer.json").write_text(json.dumps({"not": "one"}))
    return Ledger.open(path)


def write_step(folder: RunFolder, step: int, batch: TrajectoryBatch | None = None, **options: object) -> None:
    batch = batch or a_batch(step)
    made = assign(batch, CreditOptions(**{"propagation": "threshold", "outcome_to": "answer", **options}))  # type: ignore[arg-type]
    folder.write_steps(step, batch, made)
    folder.append_metrics(step, {"val/pass_at_1": step / 10, "actor/entropy": 1 / step, **credit_metrics(made)})
