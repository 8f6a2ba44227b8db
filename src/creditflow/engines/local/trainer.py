"""The embedded engine's control flow: play, score, credit, update, record. It reads like the algorithm."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from creditflow.config import Config, Recipe, model_of, trained_policies
from creditflow.credit import Observed, Threshold, assign, make_threshold
from creditflow.credit.advantage import ADVANTAGE_ESTIMATORS
from creditflow.engines.local.actor import Actor, fill_reference_logprobs
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.local.tiny import tiny_byte_model
from creditflow.errors import ConfigError, CreditflowError, TooManyFailedScores
from creditflow.files import make_whole
from creditflow.ledger import RunFolder
from creditflow.loading import is_reference, load_object
from creditflow.monitor import Evaluation, evaluation_metrics, rollout_metrics, sub_reward_metrics
from creditflow.parts import Parts, build_parts
from creditflow.progress import Reporter
from creditflow.reward.registry import leaves
from creditflow.rollout import ChatClient, ModelClient, Play, Scheduler, play_all
from creditflow.trajectory import Ints, Task, Trajectory, TrajectoryBatch

_TRAIN, _VAL = 0, 1
"""First part of a play's random key."""


def load_policy(recipe: Recipe) -> Policy:
    """The model that the recipe names, on the device that it names."""
    return Policy.load(model_folder(recipe), pick_device(recipe.config.trainer.device))


def model_folder(recipe: Recipe) -> Path:
    """The trained policy's model as a folder: made first, if it is `tiny` or a function that makes one."""
    path, key = model_of(recipe.config, trained_policy(recipe.config))
    if recipe.config.trainer.num_threads:  # here: what a warm-up comes to depends on it, in the last bits
        torch.set_num_threads(recipe.config.trainer.num_threads)
    if path is None:
        raise ConfigError(f"{key}: expected a Hugging Face folder, `tiny` or `file.py:function`, got nothing")
    if path == "tiny":
        return tiny_byte_model()
    if is_reference(path):
        return Path(load_object(path, recipe.folder, key)(recipe.config.recipe))
    if not isinstance(path, str):
        raise ConfigError(f"{key}: expected a Hugging Face folder, `tiny` or `file.py:function`, got {path!r}")
    return Path(path)


def trained_policy(config: Config) -> str:
    """The name of the policy that is trained; raises ConfigError where the recipe names what cannot be held here."""
    trained = trained_policies(config)
    if len(trained) > 1:
        raise ConfigError(
            f"policies: the local engine trains one policy, and {', '.join(trained)} are trained; use --engine verl, "
            "or let the others answer behind an endpoint"
        )
    for name, policy in config.policies.items():
        if name not in trained and policy.endpoint is None:
            raise ConfigError(
                f"policies.{name}.trainable: false, but the local engine holds the model that it trains and no other; "
                f"serve this one, and name its address as policies.{name}.endpoint"
            )
    return trained[0]


def train(recipe: Recipe, reporter: Reporter) -> RunFolder:
    """Train as the recipe says; returns the run's folder. Bad input raises before anything is written."""
    parts = build_parts(recipe)
    config = recipe.config
    expect_no_critic(config)
    policy = load_policy(recipe)
    batches = task_batches(len(parts.train_tasks), config)
    update = config.actor_rollout_ref.actor
    updates_per_step = math.ceil(config.data.train_batch_size / update.ppo_mini_batch_size) * update.ppo_epochs
    total_updates = len(batches) * updates_per_step
    actor = Actor(policy, update, total_updates, keep_reference=needs_reference(parts))
    folder = RunFolder.create(run_path(recipe), run_facts(recipe, policy), recipe.to_yaml())
    reporter.say(f"run folder: {folder.path}")
    asyncio.run(_with_rewards(parts, actor, batches, folder, reporter))
    return folder


def expect_no_critic(config: Config) -> None:
    """Raises ConfigError where the recipe asks for an estimator that this engine cannot serve."""
    name = config.algorithm.adv_estimator
    if ADVANTAGE_ESTIMATORS[name].critic:
        others = ", ".join(other for other in ADVANTAGE_ESTIMATORS.names() if not ADVANTAGE_ESTIMATORS[other].critic)
        raise ConfigError(
            f"algorithm.adv_estimator: {name} needs a critic, and the local engine trains none; use {others}"
        )


def needs_reference(parts: Parts) -> bool:
    """Whether a reward function of the recipe reads `step.ref_logprobs`; it says so by `needs_reference = True`."""
    return any(getattr(function.instance, "needs_reference", False) for function in leaves(parts.rewards.functions))


async def _with_rewards(
    parts: Parts, actor: Actor, batches: Sequence[Ints], folder: RunFolder, reporter: Reporter
) -> None:
    async with parts.rewards.open({trained_policy(parts.recipe.config): actor.policy}):
        await _train(parts, actor, batches, folder, reporter)


async def _train(parts: Parts, actor: Actor, batches: Sequence[Ints], folder: RunFolder, reporter: Reporter) -> None:
    trainer = parts.recipe.config.trainer
    threshold = make_threshold(parts.recipe.config.algorithm.propagation_threshold, parts.agents)
    evaluation: Evaluation | None = None
    if trainer.val_before_train:
        evaluation = await validate(parts, actor.policy, reporter, "before training", actor.reference)
        folder.append_metrics(0, val_metrics(evaluation))
    with reporter.bar("train", len(batches)) as bar:
        for step, batch in enumerate(batches, start=1):
            tasks = [parts.train_tasks[i] for i in batch]
            metrics = await train_step(step, tasks, parts, actor, threshold, folder, note=bar.note)
            if step == 1:
                warn_of_unreached(metrics, parts, reporter)
            last = step == len(batches)
            if last or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
                save_model(actor.policy, folder, step)
            bar.advance(status=status_line(metrics))
            try:
                if last or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
                    evaluation = await validate(parts, actor.policy, reporter, f"after step {step}", actor.reference)
                    metrics |= val_metrics(evaluation)
                    threshold.update(Observed({}, {}, accuracy=evaluation.metrics["pass_at_1"]))
            finally:  # an evaluation may fail, and must lose neither the model nor the step
                folder.append_metrics(step, metrics)
    if evaluation is not None:
        folder.write_text("evaluation.json", evaluation.to_json())  # the last file: it says that the run is finished


def warn_of_unreached(metrics: Mapping[str, float], parts: Parts, reporter: Reporter) -> None:
    """Say which agents no signal reached, by the metrics of a run's first step."""
    for agent in (agent for agents in parts.trained_policies.values() for agent in agents):
        if metrics.get(f"credit/reach/{agent}") == 0.0:
            reporter.say(
                f"warning: no signal reached {agent} in the first step; score it, or let the outcome reach it "
                "(algorithm.outcome_to: all)"
            )


async def train_step(
    step: int,
    tasks: Sequence[Task],
    parts: Parts,
    actor: Actor,
    threshold: Threshold,
    folder: RunFolder,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """One training step: play the tasks, score, assign credit, update, record. `note`: told what is being done."""
    config, timing = parts.recipe.config, Stopwatch()
    n = config.actor_rollout_ref.rollout.n
    parts.endpoint_metrics()  # what an evaluation asked of them is not of this step
    with timing("rollout"):
        note(f"playing {len(tasks) * n} times")
        temperature = parts.sampling.temperature
        trajectories = await play(parts, actor.policy, tasks, n, temperature, (_TRAIN, step), actor.reference)
    with timing("reward"):
        parts.label(trajectories)
        try:
            report = await parts.rewards.score(
                trajectories, progress=lambda done, wanted: note(f"scoring {done}/{wanted}")
            )
        except TooManyFailedScores:
            folder.write_steps(step, TrajectoryBatch.from_trajectories(trajectories))  # the evidence
            raise
    with timing("propagation"):
        batch = TrajectoryBatch.from_trajectories(trajectories)
        assignment = assign(batch, config.algorithm, threshold=threshold)
        threshold.update(assignment.observed())
    with timing("update"):
        note("updating")
        mini_batch_of_task = np.arange(len(tasks)) // config.actor_rollout_ref.actor.ppo_mini_batch_size
        mini_batch_of_step = np.repeat(mini_batch_of_task, n)[batch.trajectory_of_step]
        own_S = np.array(batch.policy_names)[batch.policy_of_step] == trained_policy(config)
        trained_S = assignment.trained_S & own_S
        update = actor.update(batch, assignment.token_advantages(), trained_S, mini_batch_of_step)
    with timing("ledger"):
        folder.write_steps(step, batch, assignment)
    played = evaluation_metrics(batch, n=1)
    return {
        "train/pass_at_1": played["pass_at_1"],
        **rollout_metrics(batch),
        **parts.endpoint_metrics(),
        **report.metrics(),
        **sub_reward_metrics(batch),
        **threshold.metrics(),
        **assignment.metrics(),
        **update,
        **timing.metrics(),
    }


async def play(
    parts: Parts,
    policy: Policy,
    tasks: Sequence[Task],
    n: int,
    temperature: float,
    key: tuple[int, ...],
    reference: Policy | None = None,
) -> list[Trajectory]:
    """`n` plays of each task, all live together. Same key and seed: the same plays.

    Where a reward function needs them, the plays come with the log-probs of `reference`. Without one, where nothing is
    trained, the policy is its own: functions find it where it started.
    """
    config = parts.recipe.config
    clients: dict[str, ModelClient | ChatClient] = {trained_policy(config): policy, **parts.chat_clients}
    scheduler = Scheduler(clients, config.actor_rollout_ref.rollout.max_num_seqs)
    prefix = "-".join(map(str, key))
    plays = [
        Play(task, f"{prefix}-{t}", f"{prefix}-{t}-{k}", (config.data.seed, *key, t, k))
        for t, task in enumerate(tasks)
        for k in range(n)
    ]
    sampling = replace(parts.sampling, temperature=temperature)
    try:
        trajectories = await play_all(plays, parts.workflow, parts.agents, scheduler, sampling)
    finally:
        for client in parts.chat_clients.values():
            await client.aclose()
    _check_played(trajectories, config.actor_rollout_ref.rollout.max_failed_frac)
    if needs_reference(parts):
        max_tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        fill_reference_logprobs(reference or policy, trajectories, max_tokens)
    return trajectories


def _check_played(trajectories: Sequence[Trajectory], max_failed_frac: float) -> None:
    failed = [trajectory.info["error"] for trajectory in trajectories if trajectory.status == "failed"]
    if len(failed) > max_failed_frac * len(trajectories):
        raise CreditflowError(
            f"{len(failed)} of {len(trajectories)} plays failed, more than actor_rollout_ref.rollout.max_failed_frac="
            f"{max_failed_frac:g} allows; the first: {failed[0]}"
        )
    if not any(trajectory.steps for trajectory in trajectories):
        info = trajectories[0].info
        why = info.get("truncated") or info.get("agent_error") or info.get("error") or "the workflow calls no agent"
        raise CreditflowError(f"none of {len(trajectories)} plays made a step; the first: {why}")


async def validate(
    parts: Parts, policy: Policy, reporter: Reporter, when: str, reference: Policy | None = None
) -> Evaluation:
    """Plays the validation tasks as `rollout.val_kwargs` says, and greedily. `reference`: as for `play`."""
    kwargs = parts.recipe.config.actor_rollout_ref.rollout.val_kwargs
    n, temperature = (kwargs.n, kwargs.temperature) if kwargs.do_sample else (1, 0.0)
    sampled = await evaluation_plays(parts, policy, n, temperature, reference)
    greedy = await evaluation_plays(parts, policy, 1, 0.0, reference) if temperature > 0 else sampled
    evaluation = Evaluation.of(TrajectoryBatch.from_trajectories(sampled), TrajectoryBatch.from_trajectories(greedy), n)
    reporter.say(f"{when}: {status_line(val_metrics(evaluation))} on {len(parts.val_tasks)} tasks")
    return evaluation


async def evaluation_plays(
    parts: Parts, policy: Policy, n: int, temperature: float, reference: Policy | None = None
) -> list[Trajectory]:
    """`n` scored plays of each validation task. `reference`: as for `play`."""
    # The same plays at every evaluation of a run and in every run: differences come from the policy.
    trajectories = await play(parts, policy, parts.val_tasks, n, temperature, (_VAL,), reference)
    await parts.rewards.score(trajectories)
    parts.label(trajectories)
    return trajectories


def val_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`val/*`."""
    return {f"val/{key}": value for key, value in evaluation.metrics.items()}


def task_batches(n_tasks: int, config: Config) -> list[Ints]:
    """The tasks of every training step: each epoch a new order, what does not fill a batch left out of it."""
    size, steps = config.data.train_batch_size, config.trainer.total_training_steps
    per_epoch = n_tasks // size
    if steps is None:
        steps = per_epoch * config.trainer.total_epochs
    batches: list[Ints] = []
    epoch = 0
    while len(batches) < steps:
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((config.data.seed, epoch))))
        order = rng.permutation(n_tasks) if config.data.shuffle else np.arange(n_tasks)
        batches += list(order[: per_epoch * size].reshape(per_epoch, size))
        epoch += 1
    return batches[:steps]


def save_model(policy: Policy, folder: RunFolder, step: int) -> Path:
    """`checkpoints/global_step_N`: a Hugging Face folder. Raises CreditflowError or OSError if it cannot be written."""
    target = folder.path / "checkpoints" / f"global_step_{step}"
    try:
        make_whole(target, policy.save)
    except SafetensorError as error:  # a full disk above all; it is no OSError there
        raise CreditflowError(f"{target}: the model cannot be saved: {error}") from error
    return target


def run_path(recipe: Recipe) -> Path:
    """`trainer.default_local_dir`, else runs/<recipe>-<time>."""
    named = recipe.config.trainer.default_local_dir
    if named:
        return Path(named)
    path = Path("runs") / f"{recipe.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    # Two runs begun in one second must not share a folder.
    return path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")


def run_facts(recipe: Recipe, policy: Policy) -> dict[str, object]:
    """What `run.json` says: configuration, versions, seed, machine."""
    return {
        "recipe": recipe.name,
        "engine": "local",
        "seed": recipe.config.data.seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(policy.device),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("creditflow", "torch", "transformers", "numpy")},
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "config": recipe.to_dict(),
    }


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`timing/<name>_s`, and their sum as `timing/step_s`."""
        metrics = {f"timing/{name}_s": seconds for name, seconds in self._seconds.items()}
        return metrics | {"timing/step_s": sum(self._seconds.values())}


def status_line(metrics: Mapping[str, float]) -> str:
    """How a run stands, in a line: the most telling of a training step's or an evaluation's metrics."""
    shown = {
        "train/pass_at_1": "train pass@1",
        "reward/step_error_rate": "step errors",
        "val/pass_at_1": "pass@1",
        "val/pass_at_1_greedy": "greedy",
        "val/step_error_rate": "val step errors",
        "timing/step_s": "seconds",
    }
    return "  ".join(f"{name} {metrics[key]:.3f}" for key, name in shown.items() if key in metrics)
