"""TextArena's games: `textarena://TicTacToe-v0?players=2`. Players read texts and reply with texts.

The game itself judges moves: it gives a wrong one another try, and then ends with its own penalty.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from creditflow._utils.install import needs
from creditflow.errors import ConfigError, did_you_mean, first_line
from creditflow.plugins.environments.base import TextEnvironment, Turn, View, environment
from creditflow.plugins.environments.tasks import EnvironmentAddress

MOST_CHARACTERS = 4000
"""Characters of a move; games repeat moves in every later observation."""


class TextArenaEnvironment(TextEnvironment):
    """A game of TextArena, whose seats are `player_0`, `player_1` and so on."""

    def __init__(self, env: Any, players: int) -> None:
        self.env, self._players = env, players
        self._random = random.Random(0).getstate()
        self._errors = 0

    @property
    def seats(self) -> Sequence[str]:
        return [_seat(player) for player in range(self._players)]

    async def reset(self, seed: int | None) -> Turn:
        if seed is not None:
            self._random = random.Random(seed).getstate()
        with self._own_random():
            try:
                self.env.reset(num_players=self._players, seed=seed)
            except AssertionError as error:  # TextArena's check of the number of players
                raise ConfigError(f"players: {first_line(error)}; set players=N in the address") from error
        return self._turn({})

    async def step(self, actions: Mapping[str, Any]) -> Turn:
        ((seat, action),) = actions.items()
        with self._own_random():
            done, _ = self.env.step(action=action)
        if not done:
            return self._turn(self._fault(seat))
        rewards, infos = self.env.close()
        if not isinstance(rewards, Mapping):
            raise RuntimeError(f"the game ended with rewards {rewards!r:.80}, expected {{player: reward}}")
        faults = {
            _seat(player): str(info.get("reason", "an invalid move"))
            for player, info in infos.items()
            if info.get("invalid_move") and _seat(player) == seat
        }
        return Turn(rewards={_seat(player): float(reward) for player, reward in rewards.items()}, faults=faults)

    def read(self, text: str, view: View) -> str:
        """Return the reply as the move, shortened and without half surrogate pairs."""
        return text[:MOST_CHARACTERS].encode("utf-8", "replace").decode()

    def _turn(self, faults: Mapping[str, str]) -> Turn:
        player, observation = self.env.get_observation()
        return Turn({_seat(player): observation}, faults=faults)

    def _fault(self, seat: str) -> dict[str, str]:
        """The last move of `seat`, if the game refused it and gives it another try."""
        before, self._errors = self._errors, int(getattr(self.env.state, "error_count", 0))
        return {seat: "the game refused the move"} if self._errors > before else {}

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Use a separate state of the module `random`, from which games draw, and restore the process's state."""
        shared = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(shared)


def _seat(player: int) -> str:
    return f"player_{player}"


@environment("textarena")
def open_address(address: EnvironmentAddress) -> TextEnvironment:
    """Make the game that TextArena has registered under the address's name."""
    with needs(address.text, "textarena"):
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    if address.name not in ENV_REGISTRY:
        hint = did_you_mean(address.name, ENV_REGISTRY)
        raise ConfigError(f"{address.text}: expected a game of TextArena, got {address.name!r}{hint}")
    if address.illegal != "error":
        raise ConfigError(f"{address.text}: illegal: TextArena's games judge moves themselves; leave it out")
    options = dict(address.options)
    players = options.pop("players", 2)
    if isinstance(players, bool) or not isinstance(players, int) or not 1 <= players <= 100:
        raise ConfigError(f"{address.text}: players: expected a whole number from 1 to 100, got {players!r}")
    try:
        return TextArenaEnvironment(textarena.make(address.name, **options), players)
    except Exception as error:  # the game's own code checks its options, each in its own way
        raise ConfigError(f"{address.text}: {type(error).__name__}: {first_line(error)}") from error
