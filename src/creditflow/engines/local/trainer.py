"""The control flow of the embedded engine: sample, score, assign credit, update, record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import numpy as np

from creditflow._utils.progress import Reporter, phase
from creditflow.config import Recipe
from creditflow.credit import Assignment, Threshold, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.data import Floats, TrajectoryBatch
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.common.guard import build_guard, run_guard
from creditflow.engines.common.metrics import (
    evaluation_line,
    status_line,
    step_metrics,
    update_threshold,
    val_metrics,
    warn_of_first_step,
)
from creditflow.engines.common.rollouts import total_steps
from creditflow.engines.common.run import FINISHED, run_path, sole_writer
from creditflow.engines.common.tracked import FolderTrackers
from creditflow.engines.local.fidelity import fidelity_metrics
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import (
    Stopwatch,
    gather,
    sample_trajectories,
    score,
)
from creditflow.engines.local.run import NAME, RunState, apply_guard_action, begin, expect_resumable
from creditflow.errors import ConfigError, CreditflowError, TooManyFailedScores
from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.guard import STOP, GuardEvent
from creditflow.monitoring.notices import failed_rollouts, failure_events, rollout_events, tied_events
from creditflow.monitoring.trackers.base import MakeReport
from creditflow.monitoring.tracking import expect_installed
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import log_failures

_VAL = 1
"""The first part of a validation trajectory's random key; training uses 0."""


def train(recipe: Recipe, reporter: Reporter, make_report: MakeReport | None = None) -> RunFolder:
    """Train the recipe or resume its run; returns the run's folder.

    `make_report`: makes the report of the finished run for its trackers; None: they get none.

    Raises on bad input before anything is written. A tracker that cannot start raises after the run's folder
    exists.
    """
    with reporter.bar("loading tasks and rewards", keep=False):
        components = build_components(recipe)
    steps = total_steps(len(components.train_tasks), recipe.config)
    path = run_path(recipe)
    expect_resumable(components, path, steps)
    guard = build_guard(recipe.config, recipe.folder, components.rewards.functions, NAME)
    expect_installed(recipe.config.trainer.logger)
    with reporter.bar("loading models", keep=False):
        policy_set = PolicySet.from_recipe(recipe, steps, keep_reference=components.rewards.needs_reference)
    memory = policy_set.memory_estimates()
    if problems := [estimate.problem for estimate in memory if estimate.problem]:
        raise ConfigError(problems[0])
    threshold = recipe.config.credit.propagation.make_threshold(tuple(components.agents))
    with sole_writer(path):
        run = begin(components, path, policy_set, threshold, guard, reporter)
        for estimate in memory:
            reporter.say(estimate.text())
        if run.done < steps:  # left by a shorter run; it would mark this run as finished
            (path / FINISHED).unlink(missing_ok=True)
        with FolderTrackers.start(recipe, path, run.done, reporter.say) as run.trackers:
            try:
                asyncio.run(_train(run, steps))
                if make_report is not None:
                    run.trackers.send_report(make_report)
            except CreditflowError as error:
                log_failures(error, run.folder, run.done + 1, [(t.id, t.info) for t in error.trajectories])
                raise
        return run.folder


async def _train(run: RunState, steps: int) -> None:
    trainer = run.config.trainer
    evaluation: Evaluation | None = None
    async with run.components.rewards.open(run.policy_set.policies):
        with run.reporter.bar("before training", keep=False):
            if trainer.val_before_train and run.done == 0:
                evaluation = await _evaluate(run, "before training")
                _record_evaluation(run, evaluation)
            evaluation = await rerun_interrupted_evaluation(run, steps) or evaluation
        with run.reporter.bar("train", steps, "steps") as bar:
            bar.skip(run.done)
            while run.done < steps:
                step = run.done + 1
                metrics = await train_step(step, run)
                warn_of_failures(run, step)
                if step == 1:
                    warn_of_first_step(metrics, run.components, run.folder.path, run.reporter)
                run.done, last = step, step == steps
                bar.advance(status=status_line(metrics))
                tested = step > trainer.test_delay and trainer.test_freq > 0 and step % trainer.test_freq == 0
                run.evaluated = not (last or tested)
                try:
                    if not run.evaluated:
                        evaluation = await _evaluate(run, f"after step {step}")
                        metrics |= val_metrics(evaluation)
                        update_threshold(run.threshold, evaluation)
                        run.evaluated = True
                finally:  # a failed evaluation must not lose the model or the step
                    action = watch_step(run, metrics)
                    run.record(step, {**metrics, **run.guard.metrics(), "guard/rollbacks": float(run.rollbacks)})
                    stops = action is not None and action.action == STOP
                    due = last or (trainer.save_freq > 0 and step % trainer.save_freq == 0)
                    if stops or (action is None and due):
                        run.save(trainer.max_actor_ckpt_to_keep)
                if action is not None:
                    apply_guard_action(action, run)
                    bar.skip(run.done - step)
                    await rerun_interrupted_evaluation(run, steps)
        if evaluation is not None:
            # Written last, because it marks the run as finished.
            run.folder.write_text(FINISHED, evaluation.to_json())


async def rerun_interrupted_evaluation(run: RunState, steps: int) -> Evaluation | None:
    """Re-run an evaluation that was interrupted, by an error before its checkpoint or by a kill in the last one."""
    if run.evaluated and not (run.done == steps and not (run.folder.path / FINISHED).exists()):
        return None
    evaluation = await _evaluate(run, f"after step {run.done}")
    if not run.evaluated:  # the step was recorded without its evaluation
        run.evaluated = True
        update_threshold(run.threshold, evaluation)
        _record_evaluation(run, evaluation)
    return evaluation


async def _evaluate(run: RunState, when: str) -> Evaluation:
    evaluation = await validate(run.components, run.policy_set, run.reporter, when, run)
    warn_of_failures(run, run.done)
    return evaluation


def _record_evaluation(run: RunState, evaluation: Evaluation) -> None:
    """Record the metrics of an evaluation apart from a training step, and act on them."""
    metrics = val_metrics(evaluation)
    run.record(run.done, metrics)
    if (action := watch_step(run, metrics)) is not None:
        apply_guard_action(action, run)


def watch_step(run: RunState, metrics: Mapping[str, float]) -> GuardEvent | None:
    """Run the guard on a step's metrics; print and record its events.

    Returns the event that the engine must act on.
    """
    events, action = run_guard(run.guard, run.done, metrics, run.folder, run.narrow_or_widen)
    for event in events:
        run.reporter.say(event.text)
    return action


def warn_of_failures(run: RunState, step: int) -> None:
    """Report and record the first failure of each reward function in the run."""
    run.warn(failure_events(run.components.rewards.take_report(), step, run.folder.events()))


async def train_step(step: int, run: RunState) -> dict[str, float]:
    """Run one training step: sample, score, assign credit, update, record."""
    config, components, policy_set, timing = run.config, run.components, run.policy_set, Stopwatch()
    processor_s = time.process_time()
    components.endpoint_metrics()  # requests of an evaluation do not count in this step
    policy_set.forget_peaks()
    options = run.guard.options(config.credit)
    try:
        gathered = await gather(step, components, policy_set, run.tasks_taken, timing)
    except TooManyFailedScores as error:
        run.folder.write_steps(step, TrajectoryBatch.from_trajectories(error.trajectories))  # the evidence
        raise
    trajectories, batch = gathered.trajectories, gathered.batch
    run.folder.append_failures(step, ((trajectory.id, trajectory.info) for trajectory in trajectories))
    run.tasks_taken = gathered.tasks_taken
    run.generated_tokens += gathered.response_tokens
    run.warn(rollout_events(batch, step, run.folder.events()))
    with timing("values"), phase("values of the critic"):
        values_T = policy_set.values(batch)
    with timing("propagation"):
        threshold = run.guard.threshold(run.threshold)
        assignment = assign(batch, options, values_T=values_T, threshold=threshold, history=run.history)
        is_audited = config.audit.every > 0 and step % config.audit.every == 0
        audited = _audited(run, assignment, values_T, threshold) if is_audited else None
        run.threshold.update(batch_stats(assignment))
        run.history = assignment.history_after
    if audited is not None:
        with timing("audit"):
            gathered.metrics.update(await fidelity_metrics(run, step, audited, trajectories))
    section = config.actor_rollout_ref.actor
    terms = [name for name, on in (("KL", section.use_kl_loss), ("entropy", section.entropy_coeff)) if on]
    run.warn(tied_events(assignment, terms, step, run.folder.events()))
    observed = policy_set.after_batch(step, trajectories)
    with timing("update"):
        update = _update(run, step, assignment, values_T)
    policy_set.after_update(step)
    with timing("ledger"):
        run.folder.write_steps(step, assignment.batch, assignment)
    with timing("metrics"):
        metrics = {
            **gathered.metrics,
            **components.endpoint_metrics(),
            **step_metrics(assignment.batch, gathered.report, assignment, threshold),
            **update,
            **observed,
            **policy_set.peaks(),
        }
    metrics |= timing.metrics()
    metrics["timing/processor_s"] = time.process_time() - processor_s
    return metrics | {
        "throughput/tokens_per_s": gathered.tokens / metrics["timing/step_s"],
        "throughput/response_tokens_per_s": gathered.response_tokens / metrics["timing/rollout_s"],
        **_update_rate(metrics),
    }


def _audited(run: RunState, assignment: Assignment, values_T: Floats | None, threshold: Threshold) -> Assignment:
    """The assignment to measure the fidelity of.

    In a fallback it is that of the recipe's own rule, so that the guard can see it recover.
    """
    if not run.guard.fallback:
        return assignment
    batch, options = assignment.batch, run.config.credit
    return assign(batch, options, values_T=values_T, threshold=threshold, history=assignment.history)


def _update(run: RunState, step: int, assignment: Assignment, values_T: Floats | None) -> dict[str, float]:
    """Update the critics, and after `trainer.critic_warmup` the policies; returns metrics."""
    config, policy_set, batch = run.config, run.policy_set, assignment.batch
    nth_task = np.arange(batch.n_trajectories) // config.actor_rollout_ref.rollout.n
    mini_batch_of_step = (nth_task // config.actor_rollout_ref.actor.ppo_mini_batch_size)[batch.trajectory_of_step]
    warmed_up = step > config.trainer.critic_warmup
    return policy_set.update(assignment, values_T, mini_batch_of_step, update_actors=warmed_up)


def _update_rate(metrics: Mapping[str, float]) -> dict[str, float]:
    """The rate of an update, over all policies; empty if no token was computed."""
    tokens = sum(value for name, value in metrics.items() if name.endswith("actor/tokens"))
    return {"throughput/update_tokens_per_s": tokens / metrics["timing/update_s"]} if tokens else {}


async def validate(
    components: Components, policy_set: PolicySet, reporter: Reporter, when: str, run: RunState | None = None
) -> Evaluation:
    """Run the validation tasks as `rollout.val_kwargs` configures, and once greedily."""
    kwargs = components.recipe.config.actor_rollout_ref.rollout.val_kwargs
    n, temperature = (kwargs.n, kwargs.temperature) if kwargs.do_sample else (1, 0.0)
    sampled = await evaluation_batch(components, policy_set, reporter, n, temperature, run)
    greedy = await evaluation_batch(components, policy_set, reporter, 1, 0.0, run) if temperature > 0 else sampled
    evaluation = Evaluation.from_batches(sampled, greedy, n)
    reporter.say(evaluation_line(val_metrics(evaluation), when, components))
    return evaluation


async def evaluation_batch(
    components: Components, policy_set: PolicySet, reporter: Reporter, n: int, temperature: float, run: RunState | None
) -> TrajectoryBatch:
    """Sample `n` scored trajectories of each validation task, and warn of failed rollouts.

    A run prints the first warning only, and its folder receives the tracebacks.
    """
    # The random key is the same in every evaluation and every run, so differences come from the policy.
    title = "validation" if temperature > 0 else "greedy validation"
    trajectories = await sample_trajectories(
        components, policy_set, components.val_tasks, n, temperature, (_VAL,), title
    )
    await score(components, trajectories)
    components.label(trajectories)
    batch = TrajectoryBatch.from_trajectories(trajectories)
    if run is None:
        for notice in failed_rollouts(batch):
            reporter.say(f"warning: {notice.text}")
    else:
        run.folder.append_failures(run.done, ((trajectory.id, trajectory.info) for trajectory in trajectories))
        run.warn(rollout_events(batch, run.done, run.folder.events(), validation=True))
    return batch
