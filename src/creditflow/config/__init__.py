"""Typed, documented configuration options, under verl's names where verl has the option.

A recipe is a YAML file; `key=value` overrides apply on top of it. `load_recipe` reads, merges and validates it. The
sections define the allowed values of each option, not the option's effect.
"""

from creditflow._utils.sections import leaves
from creditflow.config.algorithm import credit_options
from creditflow.config.guard import FallbackConfig, default_rules
from creditflow.config.loading import (
    credit_overrides,
    different_options,
    load_recipe,
    with_effect,
    with_options,
)
from creditflow.config.plugins import WorkflowSource, workflow_source
from creditflow.config.recipe import (
    Config,
    Recipe,
    lora_rank_of,
    model_of,
    optim_of,
    policies_in_use,
    recipe_of_dict,
    trained_agents,
    trained_policies,
)
from creditflow.config.rule_files import load_named_files
from creditflow.config.sections import (
    LOSS_AGG_MODES,
    ActorConfig,
    ActorModelConfig,
    CriticConfig,
    DataConfig,
    EndpointConfig,
    OptimConfig,
    PolicyConfig,
)

__all__ = [
    "LOSS_AGG_MODES",
    "ActorConfig",
    "ActorModelConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EndpointConfig",
    "FallbackConfig",
    "OptimConfig",
    "PolicyConfig",
    "Recipe",
    "WorkflowSource",
    "credit_options",
    "credit_overrides",
    "default_rules",
    "different_options",
    "leaves",
    "load_named_files",
    "load_recipe",
    "lora_rank_of",
    "model_of",
    "optim_of",
    "policies_in_use",
    "recipe_of_dict",
    "trained_agents",
    "trained_policies",
    "with_effect",
    "with_options",
    "workflow_source",
]
