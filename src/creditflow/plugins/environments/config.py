"""The section `policies.<name>.pool`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from creditflow.errors import ConfigError
from creditflow.plugins import PolicySource

if TYPE_CHECKING:
    from creditflow.config import Config


class PoolConfig(PolicySource):
    """Opponents for self-play: frozen snapshots of a trained policy, one of which acts in each group of rollouts.

    `of` is the trained policy; the first snapshot is the policy before training.
    """

    every: PositiveInt = 5
    """Training steps between snapshots."""
    size: Annotated[int, Field(ge=2)] = 8
    """Maximum number of snapshots. Beyond it the oldest one is dropped, except the first, from which ratings count."""

    def expect_valid(self, config: Config, key: str) -> None:
        """Raise ConfigError if snapshots cannot be taken, which are copies of all weights of a policy."""
        from creditflow.config import lora_rank_of

        if lora_rank_of(config, self.of):
            raise ConfigError(f"{key}.of: expected a policy without an adapter (lora_rank: 0), got {self.of}")
        if config.guard.fallback.trainable == "lora":
            raise ConfigError(f"{key}: snapshots need all weights, but guard.fallback.trainable is lora; use all")
