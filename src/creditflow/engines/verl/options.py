"""The table `options.yaml` of a recipe's options and verl's, and a recipe's values under verl's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from creditflow.config import Config, OptimConfig, leaves, lora_rank_of, model_of, optim_of, trained_policies

_TABLE: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text())
MODES = ("sync", "colocate_async", "separate_async")
"""verl's trainer modes: rollouts and updates in turn; both on the same devices, with rollouts that go on after an
update; or each on its own devices at the same time."""
_ONLY_AT_THE_END = 2**31 - 1
"""A frequency for saving and evaluation after the last step only. verl does neither for a frequency of 0 or less."""


def _keys(sections: Mapping[str, str]) -> tuple[str, ...]:
    """The dotted keys of sections with their names."""
    return tuple(f"{section}.{name}".lstrip(".") for section, names in sections.items() for name in names.split())


SAME = _keys(_TABLE["same"])
FIXED = dict(leaves(_TABLE["fixed"]))
"""verl options that this engine requires or sets by default."""
LOCAL: Mapping[str, str] = _TABLE["local"]
"""Recipe options for the embedded engine, and what to do instead."""
MICRO_BATCHES: Mapping[str, str] = _TABLE["micro_batches"]
SEPARATE = _keys(_TABLE["separate_async"])
REFUSED = {key: reason for reason, sections in _TABLE["refused"].items() for key in _keys(sections)}
"""verl keys and sections that cannot be changed, with the reason."""
BACK = tuple(key for key in SAME if key not in _keys(_TABLE["wider"])) + _keys(_TABLE["back"])
"""verl options that also set the recipe."""
_VALUE_OF: Mapping[str, tuple[str, ...]] = {
    **{key: (key,) for key in SAME},
    **{key: tuple(names.split()) for key, names in _TABLE["renamed"].items()},
}
"""The recipe options with the value of a verl option, of which the first that is set counts."""
RECIPE_NAME = {key: names[0] for key, names in _VALUE_OF.items()}
"""The recipe option that sets a verl option, where the two have one meaning."""
RENAMED: Mapping[str, str] = _TABLE["other_names"]
"""Alternative names that some of verl's files use."""


def mapped(config: Config) -> dict[str, Any]:
    """The verl keys and values of the recipe's options; those without a value keep verl's default."""
    values = {
        key: next((value for name in names if (value := attrgetter(name)(config)) is not None), None)
        for key, names in _VALUE_OF.items()
    }
    # With several trained policies, `policies.policy_configs` sets the options of each.
    only = trained[0] if len(trained := trained_policies(config)) == 1 else ""
    return {key: value for key, value in values.items() if value is not None} | _computed(config, only)


def own_options(config: Config, policy: str) -> dict[str, Any]:
    """The verl options in which a policy differs from those that all share."""
    shared = _computed(config)
    return {key: value for key, value in _computed(config, policy).items() if value != shared[key]}


def _computed(config: Config, policy: str = "") -> dict[str, Any]:
    """The verl options with another unit or encoding than the recipe's; with a `policy`, its own."""
    actor, critic, trainer = config.actor_rollout_ref.actor, config.critic, config.trainer
    of_actor = _optim_values(optim_of(config, policy), config, actor.ppo_epochs)
    of_critic = _optim_values(critic.optim, config, critic.ppo_epochs)
    steps = trainer.total_epochs if trainer.total_training_steps is None else trainer.total_training_steps
    return {
        "actor_rollout_ref.model.path": model_of(config, policy)[0],
        "actor_rollout_ref.model.lora_rank": lora_rank_of(config, policy),
        **{f"actor_rollout_ref.actor.optim.{name}": value for name, value in of_actor.items()},
        "critic.model.path": "${actor_rollout_ref.model.path}" if critic.model.path is None else critic.model.path,
        **{f"critic.optim.{name}": value for name, value in of_critic.items()},
        # creditflow's trainer computes credit. verl only derives from this key whether to create a critic.
        "algorithm.adv_estimator": "gae" if config.credit.estimator.critic else "grpo",
        # Enough epochs for all training steps, because verl stops after its epochs. A step is at most one epoch.
        "trainer.total_epochs": max(1, steps),
        "trainer.test_freq": trainer.test_freq if trainer.test_freq > 0 else _ONLY_AT_THE_END,
        "trainer.save_freq": trainer.save_freq if trainer.save_freq > 0 else _ONLY_AT_THE_END,
    }


def _optim_values(optim: OptimConfig, config: Config, epochs: int) -> dict[str, Any]:
    """The optimizer's options under verl's names, for `epochs` updates per mini-batch."""
    updates = math.ceil(config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size) * epochs
    return {
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "betas": optim.betas,
        # In training steps: verl's schedule advances once per step, while the recipe counts updates.
        "lr_warmup_steps": math.ceil(optim.lr_warmup_steps / updates),
        "lr_scheduler_type": optim.lr_scheduler_type,
    }


def sources() -> dict[str, tuple[str, ...]]:
    """The recipe keys from which each verl key is computed."""
    keys = {**{key: (key,) for key in _computed(Config())}, **_VALUE_OF}
    keys["trainer.total_epochs"] = ("trainer.total_epochs", "trainer.total_training_steps")
    return keys | {other: keys[key] for key, other in RENAMED.items()}
