"""Checks of a whole recipe, across its sections; each field checks its own type and bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from creditflow._utils.install import needs
from creditflow._utils.sections import PluginSection, PolicySource
from creditflow.config.recipe import Config, optim_of, policies_in_use, trained_policies
from creditflow.config.sections import DEFAULT_POLICY, SUM_NORM, AgentConfig, EndpointConfig, PolicyConfig
from creditflow.errors import ConfigError, did_you_mean
from creditflow.monitoring.guard import specs
from creditflow.monitoring.trackers.base import TRACKERS
from creditflow.rollout.endpoint import address_of, check_body, check_headers, variable_name


def validate(config: Config) -> None:
    """Check a recipe beyond the types and bounds of its fields. Raises ConfigError."""
    config.algorithm.options().propagation.make_threshold(tuple(config.team.agents))
    _validate_training(config)
    _validate_agents(config.team.agents)
    _validate_ignored_fields(config.team.ignored_fields)
    _validate_policies(config)
    for key, section in config:
        if isinstance(section, PluginSection):
            section.expect_valid(config, key)
    specs(config.guard.rules)  # without their metrics, which need the names of the reward functions
    for tracker in config.trainer.logger:
        TRACKERS[tracker]  # raises for an unknown name


def _validate_training(config: Config) -> None:
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    if not config.team.workflow:
        raise ConfigError(
            "team.workflow: expected package.module:function, file.py:function or scheme://..., got nothing"
        )
    if rollout.n == 1 and config.algorithm.filter_groups.enable:
        raise ConfigError(
            "actor_rollout_ref.rollout.n: algorithm.filter_groups compares the rollouts of a task and would leave out "
            "every task with one; expected at least 2, got 1 (lower data.train_batch_size for the same cost)"
        )
    if actor.ppo_mini_batch_size > config.data.train_batch_size:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size: expected at most data.train_batch_size, "
            f"{config.data.train_batch_size} tasks, got {actor.ppo_mini_batch_size}; lower it, or raise "
            "data.train_batch_size"
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        raise ConfigError(
            "trainer.resume_from_path: expected a checkpoint's path with trainer.resume_mode=resume_path, and none "
            "otherwise"
        )
    options = config.algorithm.options()
    if trainer.critic_warmup and not options.estimator.critic:
        raise ConfigError(
            f"trainer.critic_warmup: {trainer.critic_warmup}, but algorithm.adv_estimator: {options.adv_estimator} has "
            "no critic"
        )
    for section, averaged in (("actor_rollout_ref.actor", actor), ("critic", config.critic)):
        if averaged.loss_agg_mode == SUM_NORM and averaged.loss_scale_factor is None:
            raise ConfigError(
                f"{section}.loss_scale_factor: {SUM_NORM} divides by it; expected a number, such as "
                "data.max_response_length"
            )


def _validate_agents(agents: Mapping[str, AgentConfig]) -> None:
    from creditflow.rollout.team import Team

    if not agents:
        raise ConfigError("team.agents: expected at least one agent, got none")
    for agent in agents:
        if agent.startswith("_") or hasattr(Team, agent):
            raise ConfigError(f"team.agents.{agent}: `team.{agent}` has a meaning of its own; name the agent otherwise")
        if "/" in agent or "*" in agent:
            raise ConfigError(f"team.agents.{agent}: expected a name without / and *, as metrics are named by agents")


def _validate_ignored_fields(fields: Sequence[str]) -> None:
    if not fields:
        return
    with needs("team.ignored_fields", "serve"):
        from creditflow.rollout.http.dialects import REFUSED_FIELDS
    for name in fields:
        if name not in REFUSED_FIELDS:
            meant = did_you_mean(name, REFUSED_FIELDS)
            raise ConfigError(f"team.ignored_fields: {name!r} is no field that is refused{meant}")


def _validate_policies(config: Config) -> None:
    """Check that every agent's policy exists, every policy has an agent, and at least one policy is trained."""
    agents_of = policies_in_use(config)
    names = list(config.policies) or [DEFAULT_POLICY]
    for policy, agents in agents_of.items():
        if policy not in names:
            raise ConfigError(
                f"team.agents.{agents[0]}.policy: {policy!r} is no policy of the recipe{did_you_mean(policy, names)}; "
                f"there is {', '.join(names)}"
            )
    for name, policy_config in config.policies.items():
        if not re.fullmatch(r"\w[\w.-]*", name) or name == "state":
            # A checkpoint has a folder of this name.
            raise ConfigError(
                f"policies.{name}: expected letters, digits, _, - or . (no - or . first), and not `state`"
            )
        if name not in agents_of:
            raise ConfigError(
                f"policies.{name}: no agent acts through it{did_you_mean(name, agents_of)}; name it as the policy of "
                "an agent (team.agents) or, if it is frozen, of a judge (reward.functions), or leave it out"
            )
        optim_of(config, name)
        frozen = not policy_config.trained
        if frozen and (option := next((key for key in ("lora_rank", "optim") if getattr(policy_config, key)), None)):
            raise ConfigError(f"policies.{name}.{option}: is of how a policy is trained, and this one is not")
        if policy_config.source is not None:
            _validate_source(config, name, *policy_config.source)
        if policy_config.endpoint is not None:
            _validate_endpoint(f"policies.{name}", policy_config, policy_config.endpoint)
    if not trained_policies(config):
        raise ConfigError(f"policies: expected one at least that is trained; {', '.join(names)} is frozen")


def _validate_source(config: Config, name: str, key: str, source: PolicySource) -> None:
    """Check a policy that a plug-in provides: it has no own model, and is frozen."""
    policy, key = config.policies[name], f"policies.{name}.{key}"
    options = {"trainable": policy.trainable, "endpoint": policy.endpoint, "model.path": policy.model.path}
    if taken := next((option for option, value in options.items() if value), None):
        raise ConfigError(f"policies.{name}.{taken}: {key} provides the policy, which is frozen; leave it out")
    trained = trained_policies(config)
    if source.of not in trained:
        hint = did_you_mean(source.of, trained)
        names = ", ".join(trained) or "the recipe has none"
        raise ConfigError(f"{key}.of: expected a trained policy ({names}), got {source.of!r}{hint}")
    source.expect_valid(config, key)


def _validate_endpoint(key: str, policy: PolicyConfig, endpoint: EndpointConfig) -> None:
    if policy.trainable:
        raise ConfigError(f"{key}.trainable: a model behind an endpoint cannot be trained; take `endpoint` away")
    named = [name for name in (endpoint.model, policy.model.path) if name is not None]
    if not named or not all(isinstance(name, str) and name for name in named) or len(set(named)) > 1:
        got = " and ".join(map(repr, named)) or "nothing"
        raise ConfigError(f"{key}.endpoint.model: expected the model's name as the server knows it, got {got}")
    try:
        address_of(endpoint.base_url, "base_url")
        variable_name(endpoint.api_key_env)
        check_headers(endpoint.headers)
        check_body(endpoint.extra_body)
    except ValueError as error:
        raise ConfigError(f"{key}.endpoint.{error}") from error
