"""PettingZoo's environments: `pettingzoo://classic/tictactoe_v3`, or with `parallel=true` its parallel form.

In an `AECEnv` seats act in turn, in a `ParallelEnv` at once.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from creditflow._utils.install import needs, pip_install
from creditflow.errors import ConfigError, did_you_mean, first_line
from creditflow.plugins.environments.adapters.spaces import SpaceEnvironment, expect_readable
from creditflow.plugins.environments.base import TextEnvironment, Turn, environment
from creditflow.plugins.environments.tasks import EnvironmentAddress

_NAME = re.compile(r"[a-z]\w*/[a-z]\w*", re.ASCII)
_FAMILIES = ("atari", "butterfly", "classic", "mpe", "sisl")
"""Modules of environments; `pettingzoo.test` and `pettingzoo.utils` hold others."""


class _PettingZooEnvironment(SpaceEnvironment):
    @property
    def seats(self) -> Sequence[str]:
        return list(self.env.possible_agents)


class AecEnvironment(_PettingZooEnvironment):
    """An `AECEnv`, in which seats act in turn."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._paid: dict[str, float] = {}
        """Rewards that a seat was paid since its last action."""

    async def reset(self, seed: int | None) -> Turn:
        self.env.reset(seed=seed)
        self._paid = dict.fromkeys(self.seats, 0.0)
        return self._next(dict.fromkeys(self.seats, 0.0))

    async def step(self, actions: Mapping[str, Any]) -> Turn:
        ((_, action),) = actions.items()
        self.env.step(action)
        # `last` covers only the current seat. The rewards of the others are those of `rewards`, as PettingZoo's
        # `api_test` requires; `_cumulative_rewards` may still contain rewards that were paid before.
        rewards = dict.fromkeys(self.seats, 0.0)
        for seat, paid in self.env.rewards.items():
            rewards[seat] += float(paid)
            self._paid[seat] += float(paid)
        return self._next(rewards)

    def _next(self, rewards: dict[str, float]) -> Turn:
        """Return the turn of the next seat that is not over. `rewards` is paid with it, and corrected by `last`."""
        env, cut = self.env, list[bool]()
        while env.agents:
            seat = env.agent_selection
            observation, total, terminated, truncated, info = env.last()
            rewards[seat] += float(total) - self._paid[seat]
            self._paid[seat] = 0.0
            if not (terminated or truncated):
                return self.turn({seat: (observation, info)}, rewards)
            cut.append(bool(truncated and not terminated))
            if len(cut) > len(env.possible_agents):  # an endless loop would block all rollouts
                raise RuntimeError(f"{seat} has ended, and is not taken from the environment's agents")
            env.step(None)
        return Turn(rewards=rewards, truncated=bool(cut) and all(cut))


class ParallelEnvironment(_PettingZooEnvironment):
    """A `ParallelEnv`, in which seats act at once."""

    async def reset(self, seed: int | None) -> Turn:
        observed, infos = self.env.reset(seed=seed)
        return self.turn(self._seen(observed, infos), {})

    async def step(self, actions: Mapping[str, Any]) -> Turn:
        observed, paid, terminated, truncated, infos = self.env.step(dict(actions))
        cut = [truncated.get(seat, False) and not terminated.get(seat, False) for seat in actions]
        rewards = {seat: float(paid.get(seat, 0.0)) for seat in actions}
        return self.turn(self._seen(observed, infos), rewards, truncated=not self.env.agents and all(cut))

    def _seen(self, observed: Mapping[str, Any], infos: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The observation and info of each seat that is not over."""
        return {seat: (observed[seat], infos.get(seat, {})) for seat in self.env.agents}


@environment("pettingzoo")
def open_address(address: EnvironmentAddress) -> TextEnvironment:
    """Make the environment of the module `pettingzoo.<family>.<name>`."""
    if not _NAME.fullmatch(address.name):
        raise ConfigError(f"{address.text}: expected family/name, such as classic/tictactoe_v3, got {address.name}")
    family = address.name.split("/")[0]
    if family not in _FAMILIES:
        hint = did_you_mean(family, _FAMILIES)
        raise ConfigError(f"{address.text}: expected a family of {', '.join(_FAMILIES)}, got {family}{hint}")
    options = dict(address.options)
    at_once = options.pop("parallel", False)
    if not isinstance(at_once, bool):
        raise ConfigError(f"{address.text}: parallel: expected true or false, got {at_once!r}")
    module = f"pettingzoo.{address.name.replace('/', '.')}"
    try:
        with needs(address.text, "environments"):
            import pettingzoo  # noqa: F401
        maker = getattr(importlib.import_module(module), "parallel_env" if at_once else "env")
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            raise ConfigError(f"{address.text}: PettingZoo has no module {module}") from error
        raise ConfigError(f"{address.text} needs {error.name}: {pip_install(f'pettingzoo[{family}]')}") from error
    except AttributeError as error:
        raise ConfigError(f"{address.text}: {first_line(error)}{at_once * '; leave out parallel=true'}") from error
    try:
        env = maker(**options)
    except Exception as error:  # the environment's own code checks its options, each in its own way
        raise ConfigError(f"{address.text}: {type(error).__name__}: {first_line(error)}") from error
    adapter = ParallelEnvironment(env) if at_once else AecEnvironment(env)
    expect_readable(adapter, address.text)
    return adapter
