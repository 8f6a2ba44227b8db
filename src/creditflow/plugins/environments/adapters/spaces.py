"""Actions of Gymnasium's spaces: the ones that are legal, and the ones that a text can name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from creditflow.errors import ConfigError
from creditflow.plugins.environments.base import MOST_LISTED, TextEnvironment, Turn, View, last_number


class SpaceEnvironment(TextEnvironment):
    """An environment whose actions are elements of Gymnasium's spaces."""

    def __init__(self, env: Any) -> None:
        self.env = env

    async def close(self) -> None:
        self.env.close()

    def space(self, seat: str) -> Any:
        """The action space of a seat."""
        space = self.env.action_space
        return space(seat) if callable(space) else space

    def read(self, text: str, view: View) -> Any:
        """Return the last number of a reply, which must be whole; the reply itself, shortened, if actions are texts."""
        from gymnasium.spaces import Text

        space = self.space(view.seat)
        return text[: space.max_length] if isinstance(space, Text) else last_number(text, view)

    def check(self, action: Any, view: View) -> None:
        super().check(action, view)
        if not self.space(view.seat).contains(action):
            raise ValueError(f"{action} is not legal")

    def draw(self, view: View, chance: random.Random) -> Any:
        if view.legal is not None:
            return super().draw(view, chance)
        space = self.space(view.seat)
        space.seed(chance.getrandbits(31))
        drawn = space.sample()
        return int(drawn) if isinstance(drawn, np.integer) else drawn

    def turn(
        self,
        seen: Mapping[str, tuple[Any, Mapping[str, Any]]],
        rewards: Mapping[str, float],
        *,
        truncated: bool = False,
    ) -> Turn:
        """Make a turn. `seen`: the observation and info of each seat that acts next."""
        observations, legal = dict[str, Any](), dict[str, Sequence[Any] | None]()
        for seat, (observation, info) in seen.items():
            observations[seat], mask = without_mask(observation, info)
            legal[seat] = legal_actions(self.space(seat), mask)
        return Turn(observations, legal, rewards, truncated)


def without_mask(observation: Any, info: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the observation and the mask of legal actions, from the observation or the info."""
    mask = info.get("action_mask")
    if isinstance(observation, Mapping) and "action_mask" in observation:
        mask = observation["action_mask"]
        rest = {key: value for key, value in observation.items() if key != "action_mask"}
        observation = rest["observation"] if list(rest) == ["observation"] else rest
    return observation, mask


def legal_actions(space: Any, mask: Any) -> tuple[int, ...] | None:
    """Return the actions of a discrete space that a mask allows; without a mask, all unless the space is too large."""
    from gymnasium.spaces import Discrete

    if not isinstance(space, Discrete) or (mask is None and space.n > MOST_LISTED):
        return None
    allowed = np.arange(space.n) if mask is None else np.flatnonzero(mask)
    return tuple((int(space.start) + allowed).tolist())  # a mask counts from 0, as in Discrete.sample


def expect_readable(environment: SpaceEnvironment, text: str) -> None:
    """Raise ConfigError if the default reading of replies gives no action of a seat's space."""
    from gymnasium.spaces import Discrete, Text

    for seat in environment.seats:
        space = environment.space(seat)
        if not isinstance(space, Discrete | Text):
            raise ConfigError(
                f"{text}: expected actions that are numbers or texts, got {space!r:.80}; write a workflow with `read` "
                "(creditflow.plugins.environments)"
            )
