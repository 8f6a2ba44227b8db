"""A whole recipe: its sections, its origin, and the options of each policy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from creditflow._utils.sections import Section, checked
from creditflow.config.algorithm import AlgorithmConfig
from creditflow.config.guard import GuardConfig
from creditflow.config.plugins import extensible
from creditflow.config.rule_files import load_named_files
from creditflow.config.sections import (
    DEFAULT_POLICY,
    ActorRolloutRefConfig,
    AuditConfig,
    CriticConfig,
    DataConfig,
    OptimConfig,
    PolicyConfig,
    RayConfig,
    RewardConfig,
    TeamConfig,
    TrainerConfig,
)
from creditflow.credit.records import CreditOptions


@extensible("")
class Config(Section):
    """A whole recipe."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = RewardConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Default: one trained policy, `default`, with the model `actor_rollout_ref.model`. Names have letters, digits,
    `_`, `-` and `.`; checkpoints have folders of these names."""
    team: TeamConfig = TeamConfig()
    trainer: TrainerConfig = TrainerConfig()
    audit: AuditConfig = AuditConfig()
    guard: GuardConfig = GuardConfig()
    ray_kwargs: RayConfig = RayConfig()
    verl: dict[str, Any] = Field(default_factory=dict)
    """Any options of verl, nested as in its own files; only `--engine verl` reads them. `verl.config_name` chooses the
    base file."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Options of the recipe's own functions (`recipe.operations` and the like)."""
    compare: dict[str, Any] = Field(default_factory=dict)
    """Overrides for the arms of `creditflow compare`: `values.<value>` and `arms.<name>`."""

    @property
    def credit(self) -> CreditOptions:
        """The options of credit."""
        return self.algorithm.options()


@dataclass(frozen=True)
class Recipe:
    """A configuration and its origin."""

    config: Config
    name: str
    folder: Path
    """The folder of relative `file.py:function` references."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Options that a preset replaces, former names of rules, guard rules left out; `check` and `train` print them."""
    overridden: frozenset[str] = field(default=frozenset(), compare=False)
    """The keys set on the command line; they take precedence over the recipe."""

    def validation_words(self, count: int) -> str:
        """Count and source of the validation tasks, for messages."""
        tasks = f"{count} {'task' if count == 1 else 'tasks'}"
        is_set = self.config.data.val_files is not None
        return tasks if is_set else f"{tasks} of data.train_files (data.val_files is not set)"

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, as stored with a run."""
        return self.config.model_dump()

    def to_yaml(self) -> str:
        """The resolved configuration as YAML that loads again as a recipe, from any folder."""
        from omegaconf import OmegaConf

        # Escaped, so that resolved text is not interpolated again.
        config = absolute_paths(self.to_dict(), self.folder, Path())
        config = _with_texts(config, lambda text, key: text.replace("${", "\\${"))
        config["trainer"]["default_local_dir"] = None  # a run of this recipe gets a new folder
        return str(OmegaConf.to_yaml(OmegaConf.create(config)))

    def absolute(self) -> Recipe:
        """Make relative paths and references absolute, so that they hold in any working directory."""
        config = recipe_of_dict(absolute_paths(self.to_dict(), self.folder, Path()), self.name, self.folder).config
        return replace(self, config=config)


_MODEL_KEYS = ("path", "reference", "tokenizer")
"""Keys of model folders, of policies and of reward functions; they are relative to the working directory."""
_DATA_KEYS = ("train_files", "val_files")


def absolute_paths(value: Any, *folders: Path) -> Any:
    """Make paths in `value` absolute: `file.py:function`, tasks under `_DATA_KEYS`, models under `_MODEL_KEYS`.

    Models are relative to the working directory, others to the first of `folders` that has them. A path that does not
    exist stays as it is.
    """

    def changed(text: str, key: str) -> str:
        reference = re.fullmatch(r"(.+\.py):\w+", text)
        file = reference[1] if reference else text
        if reference or (text and key in _DATA_KEYS):
            # Unlike Path, os.path raises no error for a text that is longer than any path.
            existing = next((path for path in (folder / file for folder in folders) if os.path.exists(path)), None)  # noqa: PTH110
            return f"{existing.resolve()}{text[len(file) :]}" if existing else text
        if text and key in _MODEL_KEYS and os.path.isfile(Path(text, "config.json")):  # noqa: PTH113
            return str(Path(text).resolve())
        return text

    return _with_texts(value, changed)


def _with_texts(value: Any, changed: Callable[[str, str], str], key: str = "") -> Any:
    """Copy nested mappings and lists, with `changed` applied to every text and its key.

    `key`: the key of `value`.
    """
    if isinstance(value, dict):
        return {name: _with_texts(item, changed, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item, changed, key) for item in value]
    return changed(value, key) if isinstance(value, str) else value


def recipe_of_dict(values: Mapping[str, Any], name: str, folder: Path) -> Recipe:
    """Rebuild a recipe from `Recipe.to_dict`, without interpolating its values again.

    Loads the files of rules, estimators and thresholds that it names. Raises ConfigError if that fails.
    """
    algorithm = load_named_files(values["algorithm"], folder)
    return Recipe(config=checked(Config, {**values, "algorithm": algorithm}), name=name, folder=folder)


def policies_in_use(config: Config) -> dict[str, tuple[str, ...]]:
    """The agents of each policy that an agent or, as a judge, a reward function names, in the order of the recipe."""
    judges = [entry.args.get("policy") for entry in config.reward.functions]
    frozen = [name for name, policy in config.policies.items() if name in judges and not policy.trained]
    named = [*(agent.policy for agent in config.team.agents.values()), *frozen]
    return {policy: tuple(a for a, spec in config.team.agents.items() if spec.policy == policy) for policy in named}


def trained_policies(config: Config) -> tuple[str, ...]:
    """The names of the policies that are trained, in the order of the recipe."""
    return (
        tuple(name for name, policy in config.policies.items() if policy.trained)
        if config.policies
        else (DEFAULT_POLICY,)
    )


def trained_agents(config: Config) -> list[str]:
    """The names of the agents of trained policies."""
    return [name for policy in trained_policies(config) for name in policies_in_use(config)[policy]]


def lora_rank_of(config: Config, policy: str) -> int:
    """The rank of a policy's trained adapter; 0: all weights are trained."""
    own = config.policies[policy].lora_rank if policy in config.policies else None
    return config.actor_rollout_ref.model.lora_rank if own is None else own


def optim_of(config: Config, policy: str) -> OptimConfig:
    """The optimizer options of a policy. Raises ConfigError for an unknown option or a wrong value."""
    base = config.actor_rollout_ref.actor.optim
    own = config.policies[policy].optim if policy in config.policies else {}
    return checked(OptimConfig, {**base.model_dump(), **own}, f"policies.{policy}.optim") if own else base


def model_of(config: Config, policy: str) -> tuple[Any, str]:
    """The model path of a local policy, and its config key."""
    if policy in config.policies and (source := config.policies[policy].source) is not None:
        return model_of(config, source[1].of)
    own = config.policies[policy].model.path if policy in config.policies else None
    if own is not None:
        return own, f"policies.{policy}.model.path"
    return config.actor_rollout_ref.model.path, "actor_rollout_ref.model.path"
