"""verl's configuration for each policy that is trained: its own model, its own share of every machine."""

from __future__ import annotations

from typing import Any

from creditflow.config import Config, model_of, trained_policies
from creditflow.errors import ConfigError


def policy_configs(verl_config: Any, config: Config) -> dict[str, Any]:
    """verl's configuration for each trained policy, the first one leading; raises ConfigError where the devices of a
    machine cannot be shared out evenly.
    """
    from omegaconf import OmegaConf, open_dict

    trained = trained_policies(config)
    if len(trained) == 1:
        return {trained[0]: verl_config}
    per_node = verl_config.trainer.n_gpus_per_node
    if per_node % len(trained):
        raise ConfigError(
            f"trainer.n_gpus_per_node: {per_node}, which {len(trained)} trained policies ({', '.join(trained)}) cannot "
            "share evenly"
        )
    configs = {}
    for place, name in enumerate(trained):
        own = OmegaConf.create(OmegaConf.to_container(verl_config, resolve=True))
        with open_dict(own):
            own.trainer.n_gpus_per_node = per_node // len(trained)
            own.actor_rollout_ref.rollout.n_gpus_per_node = per_node // len(trained)
            if place > 0:
                own.reward.num_workers = 0  # verl's own, which Ray knows by name; they have nothing to do
            own.actor_rollout_ref.model.path = own.critic.model.path = model_of(config, name)[0]
        configs[name] = own
    return configs
