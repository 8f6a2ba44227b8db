"""The protocol of text environments: seats that read texts and write actions, one after another or at once."""

from __future__ import annotations

import random
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from creditflow.data import Message
from creditflow.errors import CreditflowError
from creditflow.plugins.environments.tasks import EnvironmentAddress
from creditflow.registry import Registry

MOST_LISTED = 256
"""Actions of a discrete space that a prompt lists; a larger space has no list of legal actions."""


class IllegalActionError(CreditflowError):
    """Raised by `TextEnvironment.step` if the environment refuses the action. Its state is then unchanged."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The state of an environment between two actions."""

    observations: Mapping[str, Any] = field(default_factory=dict)
    """The observation of each seat that acts next; several seats act at once. Empty: the environment has ended."""
    legal: Mapping[str, Sequence[Any] | None] = field(default_factory=dict)
    """The legal actions of each seat in `observations`; None or missing: not listed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards paid since the turn before, by seat."""
    truncated: bool = False
    """Whether the environment has cut itself short."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """The environment's verdict on a seat's last action, if it is illegal and the environment went on all the same."""


@dataclass(frozen=True, slots=True)
class View:
    """A seat's view of the environment at its turn."""

    env: Any
    """The environment, for details that an observation leaves out."""
    seat: str
    observation: Any
    """The observation without its action mask."""
    legal: tuple[Any, ...] | None
    """Actions allowed now: those of the mask, or without a mask all actions of a discrete space. None if the space is
    not discrete or has more than 256 actions, or if the environment lists none."""
    turn: int
    """Number of earlier actions of this seat."""


class TextEnvironment(ABC):
    """An environment with seats that act by texts.

    A subclass implements `reset` and `step`, and changes `show`, `read`, `check` and `draw` if actions are not numbers.
    The methods are coroutines, so that a remote environment blocks no other rollout.
    """

    env: Any = None
    """The library's own environment, as `View.env`."""

    @property
    @abstractmethod
    def seats(self) -> Sequence[str]:
        """The names of all seats; constant after `reset`."""

    @abstractmethod
    async def reset(self, seed: int | None) -> Turn:
        """Begin, with this seed if it is not None."""

    @abstractmethod
    async def step(self, actions: Mapping[str, Any]) -> Turn:
        """Act for every seat of the last turn's `observations`.

        Raises IllegalActionError if the only acting seat's action is refused. Any other error is the environment's own,
        and fails the trajectory.
        """

    async def close(self) -> None:
        """Release the environment; called once, after errors too."""
        return None

    def show(self, view: View) -> str | Sequence[Message]:
        """Return the prompt of a seat: a text or chat messages."""
        return plain(view)

    def read(self, text: str, view: View) -> Any:
        """Return the action that a reply means. Raises ValueError if it means none."""
        return last_number(text, view)

    def check(self, action: Any, view: View) -> None:
        """Raise ValueError if an action is illegal."""
        if view.legal is not None and action not in view.legal:
            raise ValueError(f"{action} is not legal")

    def draw(self, view: View, chance: random.Random) -> Any:
        """Draw a legal action. Raises NotImplementedError if the environment does not list any."""
        if not view.legal:
            raise NotImplementedError
        return chance.choice(view.legal)


def plain(view: View) -> str:
    """Return the observation as text (arrays row by row), and the legal actions by number."""
    text = _as_text(view.observation)
    if view.legal is None:
        return text
    return f"{text}\nLegal actions: {', '.join(map(str, view.legal))}. Answer with one of them."


def last_number(text: str, view: View) -> int:
    """Return the last number of a reply. Raises ValueError without one, and if it is not a whole number."""
    numbers = re.findall(r"(?<!\w)-?\d+(?:[.,]\d+)*", text, re.ASCII)
    if not numbers:
        raise ValueError("the reply has no number")
    if not re.fullmatch(r"-?\d{1,18}", numbers[-1]):
        raise ValueError(f"expected a whole number of at most 18 digits, got {numbers[-1][:40]}")
    return int(numbers[-1])


def _as_text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_as_text(value)}" for key, value in observation.items())
    if isinstance(observation, np.ndarray):
        return np.array2string(observation, threshold=sys.maxsize, max_line_width=200)
    return str(observation)


Open = Callable[[EnvironmentAddress], TextEnvironment]
"""Makes a fresh environment of an address. Raises ConfigError for an unknown name or option."""

ENVIRONMENTS: Registry[Open] = Registry("data.train_files", "creditflow.plugins.environments.adapters")


def environment(scheme: str) -> Callable[[Open], Open]:
    """Register a function that opens addresses `scheme://name?option=value`.

    The scheme is also an entry point of `creditflow.task_sources`, so that tasks are checked without adapters.
    """

    def register(function: Open) -> Open:
        ENVIRONMENTS.add(scheme, function)
        return function

    return register
