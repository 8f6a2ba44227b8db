"""The embedded engine's control flow: play, score, credit, update, record. It reads like the algorithm."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from creditflow.config import Recipe, different_options
from creditflow.credit import Observed, Threshold, assign, make_threshold
from creditflow.engines.local import checkpoint
from creditflow.engines.local.crew import Crew
from creditflow.engines.local.plays import Stopwatch, UnscoredPlays, gather, needs_reference, play, total_steps
from creditflow.errors import ConfigError, InputError
from creditflow.ledger import RunFolder
from creditflow.monitor import Evaluation, rollout_metrics, sub_reward_metrics
from creditflow.parts import Parts, build_parts
from creditflow.progress import Reporter
from creditflow.trajectory import Trajectory, TrajectoryBatch

_VAL = 1
"""First part of a play's random key, where training has 0."""


def train(recipe: Recipe, reporter: Reporter) -> RunFolder:
    """Train as the recipe says, or go on with it; returns the run's folder. Bad input raises before anything is
    written.
    """
    parts = build_parts(recipe)
    steps = total_steps(len(parts.train_tasks), recipe.config)
    path = run_path(recipe)
    expect_to_go_on(recipe, path, steps)
    crew = Crew.of(recipe, steps, keep_reference=needs_reference(parts))
    threshold = make_threshold(recipe.config.algorithm.propagation_threshold, parts.agents)
    run = begin(recipe, path, crew, threshold, reporter)
    if run.done < steps:  # of a shorter run: it would say that this one is finished
        (path / "evaluation.json").unlink(missing_ok=True)
    asyncio.run(_with_rewards(run, parts, steps, reporter))
    return run.folder


@dataclass(slots=True)
class Run:
    """What lives as long as a run."""

    folder: RunFolder
    crew: Crew
    threshold: Threshold
    done: int = 0
    """Training steps that are behind it."""
    tasks_taken: int = 0
    """Where it is in the order of the tasks."""
    evaluated: bool = True
    """False: it was stopped in the evaluation that was due after step `done`."""


def begin(recipe: Recipe, path: Path, crew: Crew, threshold: Threshold, reporter: Reporter) -> Run:
    """A new run in `path`, or the one that is there, as it was at its newest whole checkpoint."""
    if not (path / "run.json").exists():
        folder = RunFolder.create(path, run_facts(recipe, crew), recipe.to_yaml())
        reporter.say(f"run folder: {folder.path}")
        return Run(folder, crew, threshold)
    folder = RunFolder.open(path)
    named = recipe.config.trainer.resume_from_path
    if named is not None:
        found = checkpoint.step_of(path, named)
        state = checkpoint.load(path, found, crew)
    else:
        found, state = checkpoint.newest(path, crew, reporter.say) or (0, {})
    if state:
        threshold.load_state_dict(state["threshold"])
    checkpoint.sweep(path, found)
    folder.rewind(found if state else -1)
    reporter.say(f"run folder: {folder.path}, goes on after step {found}")
    return Run(folder, crew, threshold, found, state.get("tasks_taken", 0), state.get("evaluated", True))


def expect_to_go_on(recipe: Recipe, path: Path, steps: int) -> None:
    """Raises InputError where `path` holds a run that `recipe` cannot go on with."""
    trainer = recipe.config.trainer
    if not (path / "run.json").exists():
        if trainer.resume_mode == "resume_path":
            raise ConfigError(f"trainer.resume_from_path: {path} holds no run; name its folder as default_local_dir")
        return
    holds = f"trainer.default_local_dir: {path} holds a run"
    if trainer.resume_mode == "disable":
        raise InputError(f"{holds} already, and trainer.resume_mode is disable; name another folder")
    try:
        facts = json.loads((path / "run.json").read_text())
        engine, began = facts["engine"], facts["config"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{holds} already, whose run.json does not say what it is; name another folder") from None
    if engine != "local":
        raise InputError(f"{holds} of --engine {engine}; name another folder")
    if trainer.resume_mode == "auto":
        now = json.loads(json.dumps(recipe.to_dict()))
        if changed := sorted(set(different_options(began, now)) - MAY_CHANGE):
            raise InputError(
                f"{holds} that began with another {', '.join(changed)}; name another folder, or go on all the same by "
                "trainer.resume_mode=resume_path"
            )
        if (newest := next(iter(checkpoint.saved_steps(path)), 0)) > steps:
            raise InputError(
                f"{holds} that has come to step {newest} already, and the recipe ends at {steps}; name another folder, "
                "or raise trainer.total_training_steps"
            )
        if (path / "evaluation.json").exists() and steps in checkpoint.saved_steps(path)[:1]:
            raise InputError(
                f"{holds} that is finished, at step {steps}; name another folder, or raise trainer.total_training_steps"
            )
    elif checkpoint.step_of(path, str(trainer.resume_from_path)) > steps:
        raise ConfigError(
            f"trainer.resume_from_path: {trainer.resume_from_path} is of a later step than {steps}, at which the "
            "recipe ends; raise trainer.total_training_steps"
        )


MAY_CHANGE = {
    f"trainer.{name}"
    for name in (
        *("default_local_dir", "total_training_steps", "total_epochs", "save_freq", "test_freq"),
        *("resume_mode", "resume_from_path", "max_actor_ckpt_to_keep"),
    )
}
"""Options that a run may go on with after another value."""


async def _with_rewards(run: Run, parts: Parts, steps: int, reporter: Reporter) -> None:
    async with parts.rewards.open(run.crew.policies):
        await _train(run, parts, steps, reporter)


async def _train(run: Run, parts: Parts, steps: int, reporter: Reporter) -> None:
    trainer, folder, crew = parts.recipe.config.trainer, run.folder, run.crew
    evaluation: Evaluation | None = None
    if trainer.val_before_train and run.done == 0:
        evaluation = await validate(parts, crew, reporter, "before training")
        folder.append_metrics(0, val_metrics(evaluation))
    # It was stopped in an evaluation: by an error, and then the step is on record without; or by a kill, in the last.
    if not run.evaluated or (run.done == steps and not (folder.path / "evaluation.json").exists()):
        evaluation = await validate(parts, crew, reporter, f"after step {run.done}")
        if not run.evaluated:
            run.threshold.update(Observed({}, {}, accuracy=evaluation.metrics["pass_at_1"]))
            folder.append_metrics(run.done, val_metrics(evaluation))
    with reporter.bar("train", steps) as bar:
        bar.advance(run.done)
        for step in range(run.done + 1, steps + 1):
            metrics = await train_step(step, parts, run, note=bar.note)
            if step == 1:
                warn_of_first_step(metrics, parts, reporter)
            last = step == steps
            bar.advance(status=status_line(metrics))
            run.evaluated = not (last or (trainer.test_freq > 0 and step % trainer.test_freq == 0))
            try:
                if not run.evaluated:
                    evaluation = await validate(parts, crew, reporter, f"after step {step}")
                    metrics |= val_metrics(evaluation)
                    run.threshold.update(Observed({}, {}, accuracy=evaluation.metrics["pass_at_1"]))
                    run.evaluated = True
            finally:  # an evaluation may fail, and must lose neither the model nor the step
                folder.append_metrics(step, metrics)
                if last or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
                    state = {
                        "threshold": run.threshold.state_dict(),
                        "tasks_taken": run.tasks_taken,
                        "evaluated": run.evaluated,
                    }
                    checkpoint.save(folder.path, step, crew, state, trainer.max_actor_ckpt_to_keep)
    if evaluation is not None:
        folder.write_text("evaluation.json", evaluation.to_json())  # the last file: it says that the run is finished


def warn_of_first_step(metrics: Mapping[str, float], parts: Parts, reporter: Reporter) -> None:
    """Say which agents no signal reached and whether many plays were cut short, by the metrics of the first step."""
    for agent in (agent for agents in parts.trained_policies.values() for agent in agents):
        if metrics.get(f"credit/reach/{agent}") == 0.0:
            reporter.say(
                f"warning: no signal reached {agent} in the first step; score it, or let the outcome reach it "
                "(algorithm.outcome_to: all)"
            )
    if (cut_short := metrics.get("rollout/truncated_frac", 0.0)) > _MANY_TRUNCATED:
        reporter.say(
            f"warning: {cut_short:.0%} of the first step's plays were truncated: a prompt was longer, or a response "
            "would have been, than data.max_prompt_length, data.max_response_length or the model's positions allow; "
            "creditflow check shows the first"
        )


_MANY_TRUNCATED = 0.1
"""Some plays are cut short in any run."""


async def train_step(
    step: int, parts: Parts, run: Run, note: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """One training step: play tasks, score, assign credit, update, record. `note`: told what is being done."""
    config, timing, crew = parts.recipe.config, Stopwatch(), run.crew
    parts.endpoint_metrics()  # what an evaluation asked of them is not of this step
    try:
        gathered = await gather(step, parts, crew, run.tasks_taken, timing, note)
    except UnscoredPlays as error:
        run.folder.write_steps(step, TrajectoryBatch.from_trajectories(error.trajectories))  # the evidence
        raise error.cause from None
    run.tasks_taken = gathered.tasks_taken
    batch = TrajectoryBatch.from_trajectories(gathered.trajectories)
    with timing("values"):
        values_T = crew.values(batch)
    with timing("propagation"):
        assignment = assign(batch, config.algorithm, values_T=values_T, threshold=run.threshold)
        run.threshold.update(assignment.observed())
    with timing("update"):
        note("updating")
        nth_task = np.arange(batch.n_trajectories) // config.actor_rollout_ref.rollout.n
        mini_batch_of_step = (nth_task // config.actor_rollout_ref.actor.ppo_mini_batch_size)[batch.trajectory_of_step]
        update = crew.update(
            batch,
            assignment.token_advantages(),
            assignment.returns_T,
            values_T,
            assignment.trained_S,
            mini_batch_of_step,
            critics_only=step <= config.trainer.critic_warmup,
        )
    with timing("ledger"):
        run.folder.write_steps(step, batch, assignment)
    metrics = {
        **gathered.metrics,
        **rollout_metrics(batch),
        **parts.endpoint_metrics(),
        **gathered.report.metrics(),
        **sub_reward_metrics(batch),
        **run.threshold.metrics(),
        **assignment.metrics(),
        **update,
        **timing.metrics(),
    }
    return metrics | {
        "throughput/tokens_per_s": gathered.tokens / metrics["timing/step_s"],
        "throughput/response_tokens_per_s": gathered.response_tokens / metrics["timing/rollout_s"],
    }


async def validate(parts: Parts, crew: Crew, reporter: Reporter, when: str) -> Evaluation:
    """Plays the validation tasks as `rollout.val_kwargs` says, and greedily."""
    kwargs = parts.recipe.config.actor_rollout_ref.rollout.val_kwargs
    n, temperature = (kwargs.n, kwargs.temperature) if kwargs.do_sample else (1, 0.0)
    sampled = await evaluation_plays(parts, crew, n, temperature)
    greedy = await evaluation_plays(parts, crew, 1, 0.0) if temperature > 0 else sampled
    evaluation = Evaluation.of(TrajectoryBatch.from_trajectories(sampled), TrajectoryBatch.from_trajectories(greedy), n)
    reporter.say(f"{when}: {status_line(val_metrics(evaluation))} on {len(parts.val_tasks)} tasks")
    return evaluation


async def evaluation_plays(parts: Parts, crew: Crew, n: int, temperature: float) -> list[Trajectory]:
    """`n` scored plays of each validation task."""
    # The same plays at every evaluation of a run and in every run: differences come from the policy.
    trajectories = await play(parts, crew, parts.val_tasks, n, temperature, (_VAL,))
    await parts.rewards.score(trajectories)
    parts.label(trajectories)
    return trajectories


def val_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`val/*`."""
    return {f"val/{key}": value for key, value in evaluation.metrics.items()}


def run_path(recipe: Recipe) -> Path:
    """`trainer.default_local_dir`, else runs/<recipe>-<time>."""
    named = recipe.config.trainer.default_local_dir
    if named:
        return Path(named)
    path = Path("runs") / f"{recipe.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    # Two runs begun in one second must not share a folder.
    return path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")


def run_facts(recipe: Recipe, crew: Crew) -> dict[str, object]:
    """What `run.json` says: configuration, versions, seed, machine."""
    return {
        "recipe": recipe.name,
        "engine": "local",
        "seed": recipe.config.data.seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(next(iter(crew.policies.values())).device),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("creditflow", "torch", "transformers", "numpy")},
        "parameters": sum(weight.numel() for actor in crew.actors.values() for weight in actor.policy.parameters),
        "config": recipe.to_dict(),
    }


def status_line(metrics: Mapping[str, float]) -> str:
    """How a run stands, in a line: the most telling of a training step's or an evaluation's metrics."""
    shown = {
        "train/pass_at_1": "train pass@1",
        "reward/step_error_rate": "step errors",
        "val/pass_at_1": "pass@1",
        "val/pass_at_1_greedy": "greedy",
        "val/step_error_rate": "val step errors",
    }
    said = [f"{name} {metrics[key]:.3f}" for key, name in shown.items() if key in metrics]
    if "timing/step_s" in metrics:
        parts = {"rollout": "rollout", "reward": "reward", "propagation": "credit", "update": "update"}
        split = [f"{name} {metrics[key]:.1f}" for part, name in parts.items() if (key := f"timing/{part}_s") in metrics]
        said.append(f"{metrics['timing/step_s']:.1f} s" + (f" ({', '.join(split)})" if split else ""))
    if "throughput/tokens_per_s" in metrics:
        said.append(f"{metrics['throughput/tokens_per_s']:,.0f} tokens/s")
    return "  ".join(said)
