"""verl configurations of the trained policies, each with its own model and share of every machine."""

from __future__ import annotations

from typing import Any

from creditflow.config import Config, model_of, trained_policies
from creditflow.engines.verl.options import RENAMED, own_options
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
            names = ", ".join(trained)
            raise ConfigError(f"{key}: {number}, which {len(trained)} trained policies ({names}) cannot share evenly")
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
            for key, value in own_options(config, name).items():
                OmegaConf.update(own, key if OmegaConf.select(own, key) is not None else RENAMED[key], value)
        configs[name] = own
    return configs
