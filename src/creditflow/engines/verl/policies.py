"""verl configurations of the trained policies, each with its own model and share of every machine."""

from __future__ import annotations

from typing import Any

from creditflow.config import Config, lora_rank_of, model_of, optim_of, trained_policies
from creditflow.engines.verl.options import optim_values
from creditflow.errors import ConfigError


def rollout_devices(verl_config: Any) -> int:
    """The devices for rollouts alone, which only `separate_async` has."""
    rollout = verl_config.actor_rollout_ref.rollout
    separate = verl_config.trainer.v1.trainer_mode == "separate_async"
    return int(rollout.nnodes * rollout.n_gpus_per_node) if separate else 0


def policy_configs(verl_config: Any, config: Config) -> dict[str, Any]:
    """verl's configuration for each trained policy, with the leading policy first.

    Raises ConfigError if the policies cannot share the devices of a machine evenly.
    """
    from omegaconf import OmegaConf, open_dict

    trained = trained_policies(config)
    if len(trained) == 1:
        return {trained[0]: verl_config}
    per_node = verl_config.trainer.n_gpus_per_node
    separate = verl_config.trainer.v1.trainer_mode == "separate_async"
    rollout_per_node = verl_config.actor_rollout_ref.rollout.n_gpus_per_node if separate else per_node
    devices = {"trainer.n_gpus_per_node": per_node, "actor_rollout_ref.rollout.n_gpus_per_node": rollout_per_node}
    for key, number in devices.items():
        if number % len(trained):
            raise ConfigError(
                f"{key}: {number}, which {len(trained)} trained policies ({', '.join(trained)}) cannot share evenly"
            )
    configs = {}
    for place, name in enumerate(trained):
        own = OmegaConf.create(OmegaConf.to_container(verl_config, resolve=True))
        with open_dict(own):
            for key, number in devices.items():
                OmegaConf.update(own, key, number // len(trained))
            if place > 0:
                own.reward.num_workers = 0  # verl's reward workers are idle here, and their Ray names would collide
            own.actor_rollout_ref.model.path = model_of(config, name)[0]
            if config.critic.model.path is None:
                own.critic.model.path = own.actor_rollout_ref.model.path
            if name in config.policies:
                _set_own(own.actor_rollout_ref, config, name)
        configs[name] = own
    return configs


def _set_own(section: Any, config: Config, policy: str) -> None:
    """Apply the training options of a policy's own section."""
    if config.policies[policy].lora_rank is not None:
        section.model.lora_rank = lora_rank_of(config, policy)
    if config.policies[policy].optim:
        actor = config.actor_rollout_ref.actor
        values = optim_values(optim_of(config, policy), config, actor.ppo_epochs)
        if "lr_decay_style" in section.actor.optim:  # the name in some of verl's engines
            values["lr_decay_style"] = values.pop("lr_scheduler_type")
        section.actor.optim.update(values)
