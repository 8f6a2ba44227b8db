"""The policies of a run, with their actors and critics.

Independent of rollouts and rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from creditflow._utils.huggingface import PositionLimit
from creditflow.config import (
    Config,
    DataConfig,
    FallbackConfig,
    Recipe,
    lora_rank_of,
    model_of,
    optim_of,
    policies_in_use,
    trained_policies,
)
from creditflow.credit import Assignment
from creditflow.data import Floats, Ints, Trajectory, TrajectoryBatch
from creditflow.engines.base import MemoryEstimate
from creditflow.engines.local import memory, planning
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.correction import RolloutCorrection
from creditflow.engines.local.critic import Critic
from creditflow.engines.local.hooks import EngineHook, load_hooks
from creditflow.engines.local.learner import Schedule
from creditflow.engines.local.lora import Adapter, expect_fits
from creditflow.engines.local.planning import MemoryPlan
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.local.products import cast_bytes
from creditflow.engines.local.samplers.vllm import attach_samplers
from creditflow.engines.models.folders import critic_folder, model_folder
from creditflow.errors import ConfigError
from creditflow.monitoring.memory import forget_peak, peak_gib

FALLBACK_KEY = "guard.fallback"


def _expect_lengths(data: DataConfig, limit: PositionLimit, key: str) -> None:
    """Raise ConfigError if steps may exceed the range of a model's rotary frequencies.

    Other limits truncate prompts and responses, and truncations are counted. This limit needs an error, because the
    model accepts longer inputs without one.
    """
    longest = data.max_prompt_length + data.max_response_length
    if limit.rope and longest > limit.tokens:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length: expected at most {limit.tokens} with {key}, got "
            f"{longest}: {limit.reason}"
        )


def _expect_critic(data: DataConfig, critic: Critic, policy: Policy, key: str) -> None:
    """Raise ConfigError if the policy's steps may be longer than the critic's limit."""
    longest = min(policy.max_positions, data.max_prompt_length + data.max_response_length)
    if longest > critic.limit.tokens:
        raise ConfigError(
            f"{key}: expected a model that reads steps of {longest} tokens (data.max_prompt_length + "
            f"data.max_response_length), got at most {critic.limit.tokens}: {critic.limit.reason}"
        )


def _load_policies_and_hooks(recipe: Recipe) -> tuple[dict[str, Policy], dict[str, EngineHook]]:
    """Load the recipe's policies without an endpoint, on its device, and the hooks that provide some of them."""
    policies = load_policies(recipe)
    hooks = load_hooks(recipe, policies)
    for hook in hooks.values():
        policies |= hook.policies
    return {name: policies[name] for name in policies_in_use(recipe.config) if name in policies}, hooks


def load_policies(recipe: Recipe) -> dict[str, Policy]:
    """Load the recipe's policies that are models, on its device.

    Policies with adapters share a base model with others of the same path, and so do frozen policies.
    """
    config, trained = recipe.config, trained_policies(recipe.config)
    device = pick_device(config.trainer.device)

    def load(name: str, folder: Path) -> Policy:
        policy = Policy.load(folder, device)
        policy.forward.set_precision(config.trainer.precision)
        _expect_lengths(config.data, policy.limit, model_of(config, name)[1])
        return policy

    others = {name for name, policy in config.policies.items() if policy.endpoint is not None or policy.source}
    names = [name for name in policies_in_use(config) if name not in others]
    policies, bases, adapted = dict[str, Policy](), dict[Path, Policy](), dict[Path, Policy]()
    for place, name in enumerate(sorted(names, key=lambda name: name not in trained)):  # frozen ones last
        folder, rank = model_folder(recipe, name), lora_rank_of(config, name)
        if name in trained and not rank:
            policies[name] = load(name, folder)
            continue
        if folder not in bases:
            bases[folder] = load(name, folder)
        if name in trained:
            before = adapted[folder].adapter if folder in adapted else None
            under = bases[folder].model if before is None else before.model
            seed = config.data.seed + place
            adapter = Adapter.add(under, f"policy_{place}", rank, config.actor_rollout_ref.model, seed)
            policies[name] = adapted[folder] = bases[folder].with_adapter(adapter)
        else:
            policies[name] = adapted[folder].reference() if folder in adapted else bases[folder]
    policies = {name: policies[name] for name in names}
    if config.actor_rollout_ref.rollout.name == "vllm":
        attach_samplers(policies, config)
    return policies


def _load_critics(recipe: Recipe, policies: Mapping[str, Policy], schedule: Schedule) -> dict[str, Critic]:
    """The critic of each trained policy."""
    config, critics = recipe.config, dict[str, Critic]()
    for name in trained_policies(config):
        folder, key = critic_folder(recipe, name)
        critics[name] = Critic.load(folder, key, policies[name].device, config.critic, schedule)
        critics[name].forward.set_precision(config.trainer.precision)
        _expect_critic(config.data, critics[name], policies[name], key)
    return critics


@dataclass(frozen=True)
class PolicySet:
    """The policies by name; each trained one has an actor and, if the estimator needs it, a critic."""

    policies: dict[str, Policy]
    actors: dict[str, Actor]
    critics: dict[str, Critic]
    fallback: FallbackConfig = field(default_factory=FallbackConfig)
    """Options of the adapters that `narrow` trains."""
    seed: int = 0
    correction: RolloutCorrection | None = None
    """Corrects updates for a sampler whose log-probs differ from the actors'."""
    hooks: dict[str, EngineHook] = field(default_factory=dict)
    """The hooks of plug-ins, by name."""
    plans: dict[str, MemoryPlan] = field(default_factory=dict)
    """The memory of a training step while actors or critics are updated, by the option of their micro-batch size."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, steps: int, *, keep_reference: bool) -> PolicySet:
        """Load all models for a run of `steps` training steps.

        `keep_reference`: whether to keep reference policies even without a KL loss. Raises ConfigError and ModelError,
        before anything is written.
        """
        config, (policies, hooks) = recipe.config, _load_policies_and_hooks(recipe)
        section = config.actor_rollout_ref.actor
        mini_batches = math.ceil(config.data.train_batch_size / section.ppo_mini_batch_size)
        learning = steps - min(steps, config.trainer.critic_warmup)
        actors = dict[str, Actor]()
        for name in trained_policies(config):
            actors[name] = Actor(
                policies[name],
                section,
                (learning, mini_batches * section.ppo_epochs),
                optim=optim_of(config, name),
                keep_reference=keep_reference,
            )
        critics = dict[str, Critic]()
        if config.credit.estimator.critic:
            critics = _load_critics(recipe, policies, (steps, mini_batches * config.critic.ppo_epochs))
        correction = RolloutCorrection.from_config(config)
        policy_set = cls(policies, actors, critics, config.guard.fallback, config.data.seed, correction, hooks)
        if config.actor_rollout_ref.model.enable_gradient_checkpointing:
            for part in policy_set._trained:
                part.forward.recompute()
        policy_set._plan_memory(config)
        if config.guard.fallback.trainable == "lora":
            if not policy_set._whole_actors():
                raise ConfigError(
                    f"{FALLBACK_KEY}.trainable: expected all where every policy trains adapters already, got lora"
                )
            for actor in policy_set._whole_actors():
                expect_fits(actor.policy.model, config.guard.fallback, FALLBACK_KEY)
        return policy_set

    @classmethod
    def for_rollouts(cls, recipe: Recipe) -> PolicySet:
        """Load only the policies, without actors and critics."""
        policies, hooks = _load_policies_and_hooks(recipe)
        return cls(policies, {}, {}, hooks=hooks)

    @property
    def _trained(self) -> list[Actor | Critic]:
        return [*self.actors.values(), *self.critics.values()]

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Set the micro-batch sizes, by option."""
        for part in self._trained:
            part.max_tokens = sizes.get(part.size_key, part.max_tokens)

    @property
    def sizes(self) -> dict[str, int]:
        """The micro-batch size in tokens, by option."""
        return {part.size_key: part.max_tokens for part in self._trained}

    @property
    def max_tokens(self) -> int:
        """The tokens of one micro-batch of the actors, also used for references."""
        return self.sizes.get(Actor.size_key, planning.MOST)

    def _plan_memory(self, config: Config) -> None:
        """Fill `plans`, and set the micro-batch sizes that the recipe leaves open.

        They follow from the models and all memory of the device, not from its free memory, so that a run can be
        repeated.
        """
        rollout, data = config.actor_rollout_ref.rollout, config.data
        policies = self.policies.values()
        models = [policy.model for policy in (*policies, *self.references.values())]
        models += [critic.model for critic in self.critics.values()]
        models += [model for hook in self.hooks.values() for model in hook.reserved_models()]
        trained = [weight for part in self._trained for weight in part.learner.parameters]
        rows = min(rollout.max_num_seqs, rollout.n * data.train_batch_size)
        row_tokens = data.max_prompt_length + data.max_response_length
        sampled = {id(policy.model): policy.model for policy in policies if policy.forward.half}
        fixed = MemoryPlan(
            weights=planning.bytes_of(weight for model in models for weight in model.parameters())
            + sum(map(cast_bytes, sampled.values())),
            trained=planning.bytes_of(trained),
            per_token=0,
            per_pass=planning.bytes_per_pass(trained),
            sampling=max(planning.sampling_bytes(policy.model, rows, row_tokens) for policy in policies),
            base=planning.BASE[self.device.type],
        )
        for key in self.sizes:
            forwards = [part.forward for part in self._trained if part.size_key == key]
            self.plans[key] = planning.with_activations(fixed, forwards)
        allowed = planning.SHARE[self.device.type] * planning.memory_limit(self.device)
        for part in self._trained:
            if part.config.ppo_max_token_len_per_gpu is None:
                part.max_tokens = self.plans[part.size_key].max_tokens(allowed, part.most_tokens)

    def memory_estimates(self) -> tuple[MemoryEstimate, ...]:
        """The memory of a training step, by the option of its micro-batch size, and whether it is available now."""
        limit, sizes = planning.memory_limit(self.device), self.sizes
        had = planning.held_memory(self.device) + planning.free_memory(self.device)
        return tuple(
            MemoryEstimate(
                key, sizes[key], plan.peak(sizes[key]), limit, had, planning.problem(plan, sizes[key], had, key)
            )
            for key, plan in self.plans.items()
        )

    @property
    def device(self) -> torch.device:
        """The device of all local models."""
        return next(iter(self.policies.values())).device

    def after_batch(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Show the hooks the trajectories of a training step; returns their metrics."""
        return {
            key: value for hook in self.hooks.values() for key, value in hook.after_batch(step, trajectories).items()
        }

    def after_update(self, step: int) -> None:
        """Show the hooks the policies after a training step."""
        for hook in self.hooks.values():
            hook.after_update(step, self.policies)

    @property
    def references(self) -> dict[str, Policy]:
        """Each policy's reference: the state before training, or the policy itself if it is frozen."""
        kept = {name: actor.reference for name, actor in self.actors.items()}
        return {name: kept.get(name) or policy for name, policy in self.policies.items()}

    def freeze(self, trajectories: Sequence[Trajectory]) -> None:
        """Zero the response mask of frozen policies' steps, if any policy is trained."""
        for step in (step for trajectory in trajectories for step in trajectory.steps):
            if self.actors and step.policy in self.policies and step.policy not in self.actors:
                step.response_mask = (0,) * len(step.response_ids)

    def values(self, batch: TrajectoryBatch) -> Floats | None:
        """The values [T] that each critic assigns to the tokens of its steps; None without critics."""
        if not self.critics:
            return None
        values_T = np.full(len(batch.response_ids), np.nan)
        for name, critic in self.critics.items():
            own_T = critic.values(batch, batch.sampled_by(name))
            values_T = np.where(np.isnan(own_T), values_T, own_T)
        return values_T

    def update(
        self,
        assignment: Assignment,
        values_T: Floats | None,
        mini_batch_of_step: Ints,
        *,
        update_actors: bool = True,
    ) -> dict[str, float]:
        """Update each critic and, with `update_actors`, each actor from its policy's steps; returns metrics.

        With several trained policies, metric names start with the policy's name.
        `values_T`: the result of `values`.
        """
        memory.release()  # what sampling left
        batch, returns_T, advantage_T = assignment.batch, assignment.returns_T, assignment.token_advantages()
        metrics: dict[str, dict[str, float]] = {name: {} for name in self.actors}
        for name, critic in self.critics.items():
            assert returns_T is not None
            assert values_T is not None
            own_S = assignment.groups.trained_S & batch.sampled_by(name)
            metrics[name] |= critic.update(batch, returns_T, values_T, own_S, mini_batch_of_step)
        for name, actor in self.actors.items() if update_actors else ():
            own_S = assignment.groups.trained_S & batch.sampled_by(name)
            corrected, weighted_T = batch, advantage_T
            if self.correction is not None:
                corrected, weighted_T, measured = self.correction.apply(actor, batch, weighted_T, own_S)
                metrics[name] |= measured
            metrics[name] |= actor.update(corrected, weighted_T, own_S, mini_batch_of_step)
        return {key: value for name, own in metrics.items() for key, value in self._named(name, own).items()}

    @property
    def narrowed(self) -> bool:
        """Whether adapters are currently trained instead of all weights."""
        return any(actor.narrowed for actor in self.actors.values())

    @property
    def can_narrow(self) -> bool:
        """Whether any policy trains all weights, or did so before `narrow`."""
        return self.narrowed or bool(self._whole_actors())

    def narrow(self) -> None:
        """Train `fallback` adapters instead of all weights. Policies with adapters do not change."""
        for place, actor in enumerate(self._whole_actors()):
            base, options = actor.policy.model, self.fallback
            name, seed = f"fallback_{place}", self.seed + place
            actor.narrow(Adapter.add(base, name, options.lora_rank, options, seed, FALLBACK_KEY))
        self._take_policies()

    def widen(self) -> None:
        """Merge the fallback adapters and train all weights again."""
        for actor in self.actors.values():
            if actor.narrowed:
                actor.widen()
        self._take_policies()

    def _whole_actors(self) -> list[Actor]:
        return [actor for actor in self.actors.values() if actor.policy.adapter is None]

    def _take_policies(self) -> None:
        self.policies.update({name: actor.policy for name, actor in self.actors.items()})

    def forget_peaks(self) -> None:
        """Return freed memory to the system, and reset the peak memory that `peaks` reports."""
        memory.release()
        forget_peak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> dict[str, float]:
        """Peak memory since `forget_peaks`, as `memory/*` metrics."""
        metrics = {"memory/peak_gib": peak_gib()}
        if self.device.type == "cuda":
            metrics["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated(self.device) / (1 << 30)
        return metrics

    def _named(self, policy: str, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict(metrics) if len(self.actors) == 1 else {f"{policy}/{key}": value for key, value in metrics.items()}
