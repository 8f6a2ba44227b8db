"""Gymnasium's environments, in which one agent acts: `gymnasium://FrozenLake-v1?is_slippery=false`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditflow._utils.install import needs
from creditflow.errors import ConfigError, first_line
from creditflow.plugins.environments.adapters.spaces import SpaceEnvironment, expect_readable
from creditflow.plugins.environments.base import TextEnvironment, Turn, environment
from creditflow.plugins.environments.tasks import EnvironmentAddress

SEAT = "agent"


class GymnasiumEnvironment(SpaceEnvironment):
    """An `Env` with one seat. An `action_mask` is read from its `info`."""

    def __init__(self, env: Any, seat: str = SEAT) -> None:
        super().__init__(env)
        self._seat = seat

    @property
    def seats(self) -> Sequence[str]:
        return [self._seat]

    async def reset(self, seed: int | None) -> Turn:
        observation, info = self.env.reset(seed=seed)
        return self.turn({self._seat: (observation, info)}, {})

    async def step(self, actions: Mapping[str, Any]) -> Turn:
        observation, paid, terminated, truncated, info = self.env.step(actions[self._seat])
        seen = {} if terminated or truncated else {self._seat: (observation, info)}
        return self.turn(seen, {self._seat: float(paid)}, truncated=bool(truncated and not terminated))


@environment("gymnasium")
def open_address(address: EnvironmentAddress) -> TextEnvironment:
    """Make the environment that Gymnasium has registered under the address's name."""
    with needs(address.text, "environments"):
        import gymnasium
    if ":" in address.name:  # gymnasium would import the module before the colon
        raise ConfigError(f"{address.text}: expected a name without a module, got {address.name}")
    try:
        adapter = GymnasiumEnvironment(gymnasium.make(address.name, **address.options))
    except Exception as error:  # the environment's own code checks its options, each in its own way
        raise ConfigError(f"{address.text}: {type(error).__name__}: {first_line(error)}") from error
    expect_readable(adapter, address.text)
    return adapter
