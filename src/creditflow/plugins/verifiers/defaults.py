"""The workflow source of verifiers, and a recipe's defaults with it: agents, tasks and rewards."""

from __future__ import annotations

from creditflow.config import Config, WorkflowSource
from creditflow.config.sections import AgentConfig
from creditflow.errors import ConfigError, did_you_mean
from creditflow.plugins.verifiers.workflow import environment_of, verifiers_workflow
from creditflow.rewards.entries import RewardFunctionConfig

_KEY = "team.workflow"


def fill_from_verifiers(config: Config) -> None:
    """Fill `team.agents`, `data.train_files` and `reward.functions` from the environment, where they are not set.

    Raises ConfigError if `team.agents` lacks a role, or has an agent that is none.
    """
    address = config.team.workflow
    environment = environment_of(address, _KEY)
    roles = environment.roles
    if not config.team.agents:
        config.team.agents = {role: AgentConfig() for role in roles}
    for agent in config.team.agents:
        if agent not in roles:
            hint = did_you_mean(agent, roles)
            raise ConfigError(f"team.agents.{agent}: expected a role of {address} ({', '.join(roles)}){hint}")
    if missing := [role for role in roles if role not in config.team.agents]:
        raise ConfigError(f"team.agents: expected every role of {address}, got none for {missing[0]}")
    if config.data.train_files is None:
        config.data.train_files = address
    if not config.reward.functions:
        config.reward.functions = _functions(environment.weights)


def _functions(weights: dict[str, float]) -> list[RewardFunctionConfig]:
    """The outcome, in the range of the declared weights, and each declared reward of weight 0 or more as a part.

    A part of negative weight would have to be low for a good trace: it counts in the outcome alone.
    """
    low, high = sum(min(w, 0.0) for w in weights.values()), sum(max(w, 0.0) for w in weights.values())
    args = {"range": [low, high]} if low < high and weights else {}
    parts = [
        RewardFunctionConfig(fn="verifiers_part", name=name, args={"part": name}, weight=weight)
        for name, weight in weights.items()
        if weight >= 0 and len(weights) > 1
    ]
    return [RewardFunctionConfig(fn="verifiers", args=args), *parts]


SOURCE = WorkflowSource(verifiers_workflow, fill_from_verifiers)
