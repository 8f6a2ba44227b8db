"""The guard of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from creditflow.config import Config, policies_in_use
from creditflow.monitoring import Guard
from creditflow.monitoring.catalog import Names
from creditflow.rewards import RewardFunction


def build_guard(config: Config, folder: Path, functions: Sequence[RewardFunction], engine: str = "local") -> Guard:
    """Build a recipe's guard, without rules if `guard.enable` is false.

    `folder`: the base of `file.py:kind`. `functions`: the recipe's reward functions. Raises ConfigError for an invalid
    rule or an unknown metric.
    """
    if not config.guard.enable:
        return Guard(())
    return Guard.from_rules(
        config.guard.rules,
        metric_names(config, [function.name for function in functions], engine),
        config.algorithm,
        has_outcome=any(function.level == "outcome" for function in functions),
        folder=folder,
    )


def metric_names(config: Config, functions: Sequence[str], engine: str) -> Names:
    """The names that a recipe's metrics contain."""
    return Names(
        agents=tuple(config.team.agents),
        functions=functions,
        policies=tuple(policies_in_use(config)),
        rules=tuple(config.guard.rules),
        engine=engine,
    )
