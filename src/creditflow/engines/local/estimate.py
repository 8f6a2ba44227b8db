"""The duration of a run, estimated from the rollouts and scores of a check and two timed updates.

A small batch is decoded at a lower rate than a training batch, so the rate at both sizes is measured. The update is
timed on one micro-batch, after another one as a warm-up; its time grows with the tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from creditflow.credit import Assignment
from creditflow.data import Bools, TrajectoryBatch
from creditflow.engines.base import RunEstimate
from creditflow.engines.common.components import Components
from creditflow.engines.common.rollouts import total_steps
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.learner import sampled_tokens
from creditflow.engines.local.packing import PackedSteps
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import Stopwatch
from creditflow.rollout import GenerationRequest

_FEW, _MANY = 2, 10
"""The response tokens of two timed batches. Their difference is the time of decoding, without prompts."""


def estimate_run(
    components: Components, policy_set: PolicySet, assignment: Assignment, n_tasks: int, watch: Stopwatch
) -> RunEstimate:
    """Estimate the seconds of a training step and of the whole run. The actors are trained: discard them after this.

    `watch`: the measured seconds of sampling (`rollout`) and of scoring the `n_tasks` tasks (`scoring`, all
    trajectories but one).
    """
    config, batch = components.recipe.config, assignment.batch
    rollout = config.actor_rollout_ref.rollout
    seconds = watch.metrics()
    tasks = config.data.train_batch_size
    scale = tasks / n_tasks
    here, there = (min(rollout.max_num_seqs, n * rollout.n) for n in (n_tasks, tasks))
    slower = _decoding_ratio(policy_set, batch, here, there)
    n_scored = max(1, batch.n_trajectories - 1)
    sampling = seconds["timing/rollout_s"] * scale * slower
    scoring = seconds["timing/scoring_s"] * tasks * rollout.n / n_scored
    steps = total_steps(len(components.train_tasks), config)
    section = config.actor_rollout_ref.actor
    n_updates = section.ppo_epochs * math.ceil(tasks / section.ppo_mini_batch_size)
    trainer, kwargs = config.trainer, rollout.val_kwargs
    update = sum(
        _update_seconds(actor, assignment, batch.sampled_by(name), scale, n_updates)
        for name, actor in policy_set.actors.items()
    )
    evaluations = 1 + trainer.val_before_train
    if trainer.test_freq > 0:
        evaluations += (steps - 1) // trainer.test_freq
    per_trajectory = (sampling + scoring) / (tasks * rollout.n)
    samples = (kwargs.n if kwargs.do_sample and kwargs.temperature > 0 else 0) + 1
    return RunEstimate(
        sampling_s=sampling,
        scoring_s=scoring,
        update_s=update,
        steps=steps,
        evaluations=evaluations,
        evaluation_s=len(components.val_tasks) * samples * per_trajectory,
    )


def _decoding_ratio(policy_set: PolicySet, batch: TrajectoryBatch, here: int, there: int) -> float:
    """Seconds per token in batches of `there` rows, relative to batches of `here` rows."""
    policy = next((policy_set.policies[name] for name in policy_set.actors), None)
    if policy is None or here == there or not batch.n_steps:
        return 1.0
    bounds = zip(batch.prompt_offsets[:-1].tolist(), batch.prompt_offsets[1:].tolist(), strict=True)
    prompts = [tuple(batch.prompt_ids[start:end].tolist()) for start, end in bounds]
    return _seconds_per_token(policy, prompts, there) / _seconds_per_token(policy, prompts, here)


def _seconds_per_token(policy: Policy, prompts: Sequence[tuple[int, ...]], n_rows: int) -> float:
    def run(n_tokens: int) -> float:
        requests = [GenerationRequest(prompts[k % len(prompts)], n_tokens, 1.0, (k,)) for k in range(n_rows)]
        return _timed(lambda: policy.generate(requests))

    return max(run(_MANY) - run(_FEW), 1e-9) / ((_MANY - _FEW) * n_rows)


def _update_seconds(actor: Actor, assignment: Assignment, own_S: Bools, scale: float, n_updates: int) -> float:
    """Seconds of an actor's updates in one training step.

    `scale`: training tasks per checked task. `n_updates`: optimizer updates in a training step.
    """
    batch, config = assignment.batch, actor.config
    step_of_token, sampled_S = sampled_tokens(batch)
    steps = np.flatnonzero(own_S & assignment.groups.trained_S & (sampled_S > 0))
    if not len(steps):
        return 0.0
    if not (config.use_kl_loss or config.entropy_coeff):  # steps with advantage 0 are skipped
        moving = step_of_token[assignment.token_advantages() != 0]
        moves_S = np.bincount(moving, minlength=batch.n_steps) > 0
        steps = steps[moves_S[steps]] if moves_S[steps].any() else steps
    parts = list(actor.policy.forward.micro_batches(batch, steps, actor.max_tokens))
    tokens = config.ppo_epochs * scale * sum(len(part.input_ids) for part in parts)
    largest = max(parts, key=lambda part: len(part.input_ids))

    def update(part: PackedSteps) -> float:
        only_S, first = np.zeros(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
        only_S[part.steps] = True
        return _timed(lambda: actor.update(batch, np.ones(len(batch.response_ids)), only_S, first)) / config.ppo_epochs

    update(parts[0])
    whole = update(largest)
    optimizer = _timed(actor.learner.step)
    return tokens * max(whole - optimizer, 0.0) / len(largest.input_ids) + n_updates * optimizer


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
