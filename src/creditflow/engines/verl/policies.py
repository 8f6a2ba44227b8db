"""verl's configuration for each policy that is trained: its own model, its own share of every machine."""

from __future__ import annotations

import math
from typing import Any

from creditflow.config import Config, OptimConfig, lora_rank_of, model_of, optim_of, trained_policies
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
            own.actor_rollout_ref.model.path = model_of(config, name)[0]
            if config.critic.model.path is None:
                own.critic.model.path = own.actor_rollout_ref.model.path
            if name in config.policies:
                _set_own(own.actor_rollout_ref, config, name)
        configs[name] = own
    return configs


def _set_own(section: Any, config: Config, policy: str) -> None:
    """What a policy's own section says of how it is trained."""
    if config.policies[policy].lora_rank is not None:
        section.model.lora_rank = lora_rank_of(config, policy)
    if config.policies[policy].optim:
        actor = config.actor_rollout_ref.actor
        values = optim_values(optim_of(config, policy), config, actor.ppo_epochs)
        if "lr_decay_style" in section.actor.optim:  # what some of verl's engines call it
            values["lr_decay_style"] = values.pop("lr_scheduler_type")
        section.actor.optim.update(values)


def optim_values(optim: OptimConfig, config: Config, epochs: int) -> dict[str, Any]:
    """The optimizer's options under verl's names, of a model that is updated `epochs` times with each mini-batch."""
    updates = math.ceil(config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size) * epochs
    return {
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "betas": optim.betas,
        # Training steps: verl moves the learning rate once a step, the recipe counts updates.
        "lr_warmup_steps": math.ceil(optim.lr_warmup_steps / updates),
        "lr_scheduler_type": optim.lr_scheduler_type,
    }
