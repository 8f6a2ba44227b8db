"""Thresholds: the sub-reward above which an agent's gates open, constant or adapted from batch to batch.

A threshold is a small state machine: it returns theta, is updated with the observations of a batch, and can be saved
and restored. Its inputs are sub-rewards, their spread and validation accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeGuard, TypeVar

import numpy as np

from creditflow.data import Bools, Floats, Ints
from creditflow.errors import (
    BatchError,
    ConfigError,
    NotFiniteError,
    ScoreRangeError,
)
from creditflow.registry import Registry, expect_keywords

KEY = "algorithm.propagation_threshold"
METRIC = "propagation/threshold"
ROUNDING = 1e-9
GATE_TOLERANCE = 1e-9
"""Margin for rounding: a sub-reward equal to its threshold up to rounding (a mean of thirds) does not pass."""
LARGEST = 1e100
"""Upper bound of a threshold's absolute value: larger ones are typing errors."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchStats:
    """Observations of a batch, by agent. Agents that are absent or have no scored step have no entry."""

    sub_rewards: Mapping[str, Floats]
    """r of each agent's scored steps, without masked trajectories; each in [0, 1]."""
    spread: Mapping[str, float]
    """Pooled within-group standard deviation of r, at least 0; no entry if no group has two trajectories."""
    accuracy: float | None = None
    """Share of right answers in [0, 1], after an epoch's validation; else None."""

    def __post_init__(self) -> None:
        """Raises NotFiniteError, ScoreRangeError or BatchError, with the agent, the expected and the actual value."""
        for agent, r in self.sub_rewards.items():
            check_sub_rewards(agent, np.asarray(r, dtype=np.float64))
        for agent, sd in self.spread.items():
            if not (is_number(sd) and sd >= 0):
                raise BatchError(f"spread of agent {agent!r}: expected a finite number of at least 0, got {sd!r}")
        if self.accuracy is not None and not (is_number(self.accuracy) and 0 <= self.accuracy <= 1):
            raise BatchError(f"accuracy: expected a number from 0 to 1, got {self.accuracy!r}")


class Threshold(Protocol):
    """The interface of every kind of threshold, built-in or registered by a user."""

    @property
    def floor(self) -> float:
        """Minimum share of open gates among an agent's scored steps, see `open_starved`; 0: no minimum."""

    def theta(self, agent: str) -> float:
        """The threshold for the next batch. A new agent gets the team's estimate."""

    def update(self, observed: BatchStats) -> None:
        """Update the state from a batch. Agents without observations keep their state."""

    def state_dict(self) -> dict[str, Any]:
        """The complete state apart from the options, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Raises ConfigError for a state of another kind, or with unknown or missing keys."""

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold` (for a new agent), `propagation/threshold/<agent>`, and the kind's own metrics."""


AgentNames = tuple[str, ...] | None
"""The names of the agents; None if unknown."""
Kind = TypeVar("Kind", bound=Callable[..., Threshold])

THRESHOLDS: Registry[Callable[..., Threshold]] = Registry(
    f"{KEY}.kind", "creditflow.credit.thresholds", "creditflow.thresholds", decorator="threshold_kind"
)
"""Entries are called with the team's names, and with the keys of `{kind: name, key: value, ...}` as keywords."""


def threshold_kind(name: str) -> Callable[[Kind], Kind]:
    """Register a kind of threshold: a callable of (team, **options) that returns one; its keywords are the keys.

    In a file beside a recipe, `{kind: file.py:Class}` selects it, and the name has no meaning.
    """

    def register(kind: Kind) -> Kind:
        THRESHOLDS.declare(name, kind, kind)
        return kind

    return register


def make_threshold(spec: float | Mapping[str, Any], agents: Iterable[str] | None = None) -> Threshold:
    """Make the threshold of `algorithm.propagation_threshold`; a number is short for `{kind: fixed, value: number}`.

    `agents`: the names of the team, if known; agents named in the option must be among them. Raises ConfigError or
    UnknownAgentError for an invalid option, with the key, the expected and the actual value.
    """
    team = None if agents is None else tuple(agents)
    if is_number(spec):
        return THRESHOLDS["fixed"](team, value=spec)
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{KEY}: expected a finite number, or a mapping with `kind`, got {spec!r}")
    name = spec.get("kind")
    if name not in THRESHOLDS:
        names = " or ".join(THRESHOLDS.names())
        raise ConfigError(f"{KEY}.kind: expected {names}, got {name!r}{THRESHOLDS.hint(name)}")
    kind = THRESHOLDS[str(name)]
    options = {key: value for key, value in spec.items() if key != "kind"}
    expect_keywords(str(name), kind, options, KEY, first=1)
    threshold = kind(team, **options)
    parts = ("floor", "theta", "update", "state_dict", "load_state_dict", "metrics")
    if missing := [part for part in parts if not hasattr(threshold, part)]:
        got = f"{getattr(kind, '__name__', type(threshold).__name__)} without {', '.join(missing)}"
        raise ConfigError(f"{KEY}.kind: {name}: expected a threshold, got {got}")
    return threshold


def thetas(threshold: Threshold, agent_names: Sequence[str]) -> Floats:
    """[A] the threshold in force for each agent. Raises ConfigError if a kind returns no finite number."""
    theta_A = [threshold.theta(agent) for agent in agent_names]
    for agent, theta in zip(agent_names, theta_A, strict=True):
        if not is_number(theta):
            raise ConfigError(f"{KEY}: expected a finite threshold for agent {agent!r}, got {theta!r}")
    return np.array(theta_A, dtype=np.float64)


def open_starved(gate_open_S: Bools, sub_reward_S: Floats, scored_S: Bools, agent_S: Ints, floor: float) -> Bools:
    """[S] the closed scored steps to open, so that each agent has a minimum share of open gates.

    Afterwards at least `ceil(floor * scored steps)` scored steps of each agent are open. The closed steps with the
    highest sub-rewards are opened first, ties in order of position. Cost: a sort of the closed scored steps.
    """
    if floor <= 0:
        return np.zeros_like(gate_open_S)
    agents = int(agent_S.max()) + 1 if agent_S.size else 0
    scored_A = np.bincount(agent_S[scored_S], minlength=agents)
    open_A = np.bincount(agent_S[scored_S & gate_open_S], minlength=agents)
    missing_A = np.ceil(floor * scored_A - ROUNDING).astype(np.int64) - open_A

    at = np.flatnonzero(scored_S & ~gate_open_S)
    at = at[np.lexsort((-sub_reward_S[at], agent_S[at]))]  # stable, so that ties stay in order
    agent = agent_S[at]
    rank = np.arange(len(at)) - np.searchsorted(agent, agent)  # 0 for the best of each agent
    opened_S = np.zeros_like(gate_open_S)
    opened_S[at[rank < missing_A[agent]]] = True
    return opened_S


def theta_metrics(threshold: Threshold, team_estimate: float, agents: Iterable[str]) -> dict[str, float]:
    """Return `propagation/threshold` of a new agent and of each agent."""
    return {METRIC: float(team_estimate)} | {f"{METRIC}/{agent}": threshold.theta(agent) for agent in sorted(agents)}


def mean(values: Iterable[float], otherwise: float) -> float:
    """The mean, summed exactly: independent of the order of agents, and never outside the values by rounding."""
    listed = sorted(values)
    return min(max(math.fsum(listed) / len(listed), listed[0]), listed[-1]) if listed else otherwise


def start(limits: tuple[float, float], initial: float | None) -> float:
    """Return the first threshold: `initial`, or the middle of the range."""
    return sum(limits) / 2 if initial is None else float(initial)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number, not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_) and math.isfinite(value)


def check_sub_rewards(agent: str, r: Floats) -> None:
    """Raise NotFiniteError or ScoreRangeError for sub-rewards outside [0, 1]."""
    bad = r[~np.isfinite(r)]
    if bad.size:
        raise NotFiniteError(f"sub-rewards of agent {agent!r}: expected finite numbers, got {bad[0]}")
    bad = r[(r < -ROUNDING) | (r > 1 + ROUNDING)]
    if bad.size:
        raise ScoreRangeError(f"sub-rewards of agent {agent!r}: expected numbers from 0 to 1, got {bad[0]}")


def expect_number(key: str, value: object, low: float, high: float) -> None:
    """Raise ConfigError unless the value is a number from `low` to `high`."""
    if not (is_number(value) and low <= value <= high):
        raise ConfigError(f"{KEY}.{key}: expected a number from {low:g} to {high:g}, got {value!r}")


def expect_threshold(key: str, value: object) -> None:
    """Raise ConfigError unless the value is a finite number.

    Below 0 all gates are open, from 1 on those of scored steps are closed.
    """
    if not (is_number(value) and abs(value) <= LARGEST):
        raise ConfigError(f"{KEY}.{key}: expected a finite number, got {value!r}")


def expect_whole(key: str, value: object) -> None:
    """Raise ConfigError unless the value is a whole number of at least 1."""
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise ConfigError(f"{KEY}.{key}: expected a whole number of at least 1, got {value!r}")


def expect_range(limits: object, initial: object) -> tuple[float, float]:
    """Return the two limits of a range in [0, 1]. Raises ConfigError for others."""
    pair = list(limits) if isinstance(limits, Sequence) and not isinstance(limits, str) else []
    if not (len(pair) == 2 and all(map(is_number, pair)) and 0 <= pair[0] < pair[1] <= 1):
        raise ConfigError(f"{KEY}.range: expected two numbers from 0 to 1, the lower one first, got {limits!r}")
    if initial is not None:
        expect_number("initial", initial, *pair)
    return float(pair[0]), float(pair[1])


def check_state(state: Mapping[str, Any], kind: str, *keys: str) -> None:
    """Raise ConfigError for a state of another kind, or with other keys."""
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        got = state.get("kind") if isinstance(state, Mapping) else state
        raise ConfigError(f"threshold state: expected one of kind {kind!r}, got {got!r}")
    check_state_keys(state, "kind", *keys)


def check_state_keys(state: Mapping[str, Any], *keys: str) -> None:
    """Raise ConfigError for a state with other keys."""
    if set(state) != set(keys):
        raise ConfigError(f"threshold state: expected the keys {', '.join(keys)}, got {', '.join(map(str, state))}")


def read_agents(state: Mapping[str, Any], *keys: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Return agents and their states. Raises ConfigError for another form."""
    agents = state["agents"]
    if not isinstance(agents, Mapping) or not all(isinstance(entry, Mapping) for entry in agents.values()):
        raise ConfigError(f"threshold state: agents: expected a mapping from agent to its state, got {agents!r}")
    for entry in agents.values():
        check_state_keys(entry, *keys)
    return agents.items()


def read_number(state: Mapping[str, Any], key: str, low: float, high: float = math.inf) -> float:
    """Return a number of a state. Raises ConfigError outside `low` to `high`."""
    value = state[key]
    if not (is_number(value) and low <= value <= high):
        raise ConfigError(f"threshold state: {key}: expected a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def read_numbers(state: Mapping[str, Any], key: str) -> list[float]:
    """Return a list of numbers in [0, 1] of a state. Raises ConfigError for others."""
    values = state[key]
    if not (isinstance(values, Sequence) and all(is_number(v) and 0 <= v <= 1 for v in values)):
        raise ConfigError(f"threshold state: {key}: expected a list of numbers from 0 to 1, got {values!r}")
    return [float(value) for value in values]


@dataclass(slots=True)
class Constant:
    """Constant thresholds by agent, taken from an assignment; not available as a kind in recipes."""

    by_agent: dict[str, float]
    floor: float

    def theta(self, agent: str) -> float:
        """The agent's threshold. Raises KeyError for an agent without one."""
        return self.by_agent[agent]

    def update(self, observed: BatchStats) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No state."""

    def metrics(self) -> dict[str, float]:
        """No metrics."""
        return {}
