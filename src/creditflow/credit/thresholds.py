"""Thresholds: the sub-reward above which an agent's gates open, constant or adapted from batch to batch.

A threshold is a small state machine: it returns theta, is updated with the observations of a batch, and can be saved
and restored. Its inputs are sub-rewards, their spread and validation accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar

import numpy as np

from creditflow.credit.gates import GATE_TOLERANCE
from creditflow.credit.registry import Registry, expect_keywords
from creditflow.data import Bools, Floats, Ints
from creditflow.errors import (
    BatchError,
    ConfigError,
    NotFiniteError,
    ScoreRangeError,
    UnknownAgentError,
    did_you_mean,
)

KEY = "algorithm.propagation_threshold"
METRIC = "propagation/threshold"
_ROUNDING = 1e-9
_LARGEST = 1e100
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
            _check_sub_rewards(agent, np.asarray(r, dtype=np.float64))
        for agent, sd in self.spread.items():
            if not (_is_number(sd) and sd >= 0):
                raise BatchError(f"spread of agent {agent!r}: expected a finite number of at least 0, got {sd!r}")
        if self.accuracy is not None and not (_is_number(self.accuracy) and 0 <= self.accuracy <= 1):
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


Team = tuple[str, ...] | None
"""The names of the agents; None if unknown."""
Kind = TypeVar("Kind", bound=Callable[..., Threshold])

THRESHOLDS: Registry[Callable[..., Threshold]] = Registry(f"{KEY}.kind")
"""Entries are called with the team's names, and with the keys of `{kind: name, key: value, ...}` as keywords."""


def threshold_kind(name: str) -> Callable[[Kind], Kind]:
    """Register a kind of threshold: a callable of (team, **options) that returns one; its keywords are the keys."""

    def register(kind: Kind) -> Kind:
        THRESHOLDS.add(name, kind)
        return kind

    return register


def make_threshold(spec: float | Mapping[str, Any], agents: Iterable[str] | None = None) -> Threshold:
    """Make the threshold of `algorithm.propagation_threshold`; a number is short for `{kind: fixed, value: number}`.

    `agents`: the names of the team, if known; agents named in the option must be among them. Raises ConfigError or
    UnknownAgentError for an invalid option, with the key, the expected and the actual value.
    """
    team = None if agents is None else tuple(agents)
    if _is_number(spec):
        return Fixed(team, value=spec)
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{KEY}: expected a finite number, or a mapping with `kind`, got {spec!r}")
    name = spec.get("kind")
    if name not in THRESHOLDS.names():
        hint = did_you_mean(str(name), THRESHOLDS.names())
        raise ConfigError(f"{KEY}.kind: expected {' or '.join(THRESHOLDS.names())}, got {name!r}{hint}")
    kind = THRESHOLDS[str(name)]
    options = {key: value for key, value in spec.items() if key != "kind"}
    expect_keywords(str(name), kind, options, KEY, first=1)
    return kind(team, **options)


def thetas(threshold: Threshold, agent_names: Sequence[str]) -> Floats:
    """[A] the threshold in force for each agent. Raises ConfigError if a kind returns no finite number."""
    theta_A = np.array([threshold.theta(agent) for agent in agent_names], dtype=np.float64)
    for agent, theta in zip(agent_names, theta_A, strict=True):
        if not np.isfinite(theta):
            raise ConfigError(f"{KEY}: expected a finite threshold for agent {agent!r}, got {theta}")
    return theta_A


def open_starved(gate_open_S: Bools, sub_reward_S: Floats, scored_S: Bools, agent_S: Ints, floor: float) -> Bools:
    """[S] the closed scored steps to open, so that each agent has a minimum share of open gates.

    Afterwards at least `ceil(floor * scored steps)` scored steps of each agent are open. The closed steps with the
    highest sub-rewards are opened first, ties in order of position. Cost: a sort of the closed scored steps.
    """
    agents = int(agent_S.max()) + 1 if agent_S.size else 0
    scored_A = np.bincount(agent_S[scored_S], minlength=agents)
    open_A = np.bincount(agent_S[scored_S & gate_open_S], minlength=agents)
    missing_A = np.ceil(floor * scored_A - _ROUNDING).astype(np.int64) - open_A

    at = np.flatnonzero(scored_S & ~gate_open_S)
    at = at[np.lexsort((-sub_reward_S[at], agent_S[at]))]  # stable, so that ties stay in order
    agent = agent_S[at]
    rank = np.arange(len(at)) - np.searchsorted(agent, agent)  # 0 for the best of each agent
    opened_S = np.zeros_like(gate_open_S)
    opened_S[at[rank < missing_A[agent]]] = True
    return opened_S


@threshold_kind("fixed")
@dataclass(slots=True)
class Fixed:
    """A constant threshold, optionally another one for some agents. It has no target pass rate."""

    team: Team = None
    value: float = 0.5
    agents: Mapping[str, float] = field(default_factory=dict)
    """Values of single agents by name; all others have `value`."""
    floor: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        _expect_threshold("value", self.value)
        if not isinstance(self.agents, Mapping):
            raise ConfigError(f"{KEY}.agents: expected a mapping from agent to number, got {self.agents!r}")
        for agent, value in self.agents.items():
            _expect_threshold(f"agents.{agent}", value)
            if self.team is not None and agent not in self.team:
                hint = did_you_mean(str(agent), self.team)
                raise UnknownAgentError(f"{KEY}.agents: expected {' or '.join(self.team)}, got {agent!r}{hint}")

    def theta(self, agent: str) -> float:
        return float(self.agents.get(agent, self.value))

    def update(self, observed: BatchStats) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, "fixed")

    def metrics(self) -> dict[str, float]:
        return _theta_metrics(self, self.value, {*(self.team or ()), *self.agents})


@threshold_kind("tuned")
@dataclass(slots=True)
class Tuned:
    """One threshold for all agents, lowered once and permanently when validation accuracy drops.

    Accuracy has dropped if it is more than `accuracy_drop` below the best of the last `patience_epochs` validations: a
    symptom of gates so strict that upstream agents receive no credit. The kind has no target pass rate.
    """

    team: Team = None
    initial: float = 0.5
    patience_epochs: int = 5
    accuracy_drop: float = 0.05
    lower_to: float = 0.4
    floor: ClassVar[float] = 0.0
    _accuracies: list[float] = field(init=False, default_factory=list)
    _lowered: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        _expect_threshold("initial", self.initial)
        _expect_threshold("lower_to", self.lower_to)
        _expect_number("accuracy_drop", self.accuracy_drop, 0.0, 1.0)
        _expect_whole("patience_epochs", self.patience_epochs)
        if self.lower_to > self.initial:
            raise ConfigError(f"{KEY}.lower_to: expected at most initial = {self.initial!r}, got {self.lower_to!r}")

    def theta(self, agent: str) -> float:
        return float(self.lower_to if self._lowered else self.initial)

    def update(self, observed: BatchStats) -> None:
        if observed.accuracy is None:
            return
        accuracy = float(observed.accuracy)
        if max(self._accuracies, default=0.0) - accuracy > self.accuracy_drop + _ROUNDING:
            self._lowered = True
        self._accuracies = [*self._accuracies, accuracy][-self.patience_epochs :]

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "tuned", "accuracies": list(self._accuracies), "lowered": self._lowered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, "tuned", "accuracies", "lowered")
        accuracies = _read_numbers(state, "accuracies")
        if not isinstance(state["lowered"], bool):
            raise ConfigError(f"threshold state: lowered: expected true or false, got {state['lowered']!r}")
        self._accuracies, self._lowered = accuracies[-self.patience_epochs :], state["lowered"]

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold_lowered`: 1 after the threshold was lowered, else 0."""
        return _theta_metrics(self, self.theta(""), self.team or ()) | {f"{METRIC}_lowered": float(self._lowered)}


@dataclass(slots=True)
class _Spread:
    """An exponentially weighted mean: the unnormalised sum and its weight (1 - smoothing^updates)."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.weight


@threshold_kind("noise")
@dataclass(slots=True)
class Noise:
    """A lower threshold for agents with noisier sub-rewards: `hi - (hi - lo) * min(1, 2 * sd)`.

    sd is the spread of sub-rewards within groups, smoothed exponentially with bias correction, so that the first update
    counts fully. The factor 2: the largest standard deviation of numbers in [0, 1] is 0.5, a coin's. If scores within
    a group differ that much, a strict gate closes by chance. The kind has no target pass rate.
    """

    team: Team = None
    range: tuple[float, float] = (0.3, 0.7)
    smoothing: float = 0.9
    """Weight of the past at every update, from 0 (the last batch alone) to below 1."""
    initial: float | None = None
    """The threshold before the first spread is known; None: the middle of the range."""
    floor: ClassVar[float] = 0.0
    _spreads: dict[str, _Spread] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.range = _expect_range(self.range, self.initial)
        _expect_number("smoothing", self.smoothing, 0.0, 1.0)
        if self.smoothing == 1:
            raise ConfigError(f"{KEY}.smoothing: expected a number below 1, got {self.smoothing!r}")

    def theta(self, agent: str) -> float:
        if agent not in self._spreads:
            return self._team_estimate()
        low, high = self.range
        return max(low, high - (high - low) * min(1.0, 2.0 * self._spreads[agent].mean))

    def update(self, observed: BatchStats) -> None:
        for agent, sd in observed.spread.items():
            spread = self._spreads.setdefault(agent, _Spread())
            spread.total = self.smoothing * spread.total + (1 - self.smoothing) * float(sd)
            spread.weight = self.smoothing * spread.weight + (1 - self.smoothing)

    def state_dict(self) -> dict[str, Any]:
        spreads = {agent: {"total": spread.total, "weight": spread.weight} for agent, spread in self._spreads.items()}
        return {"kind": "noise", "agents": spreads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, "noise", "agents")
        spreads = {}
        for agent, entry in _read_agents(state, "total", "weight"):
            spread = _Spread(_read_number(entry, "total", 0.0), _read_number(entry, "weight", 0.0, 1.0))
            if not spread.weight:
                raise ConfigError(f"threshold state: weight of agent {agent!r}: expected a number above 0, got 0")
            spreads[agent] = spread
        self._spreads = spreads

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold_spread/<agent>`: the smoothed sd."""
        result = _theta_metrics(self, self._team_estimate(), {*(self.team or ()), *self._spreads})
        return result | {f"{METRIC}_spread/{agent}": spread.mean for agent, spread in self._spreads.items()}

    def _team_estimate(self) -> float:
        return _mean(map(self.theta, self._spreads), _start(self.range, self.initial))


@dataclass(slots=True)
class _Tracked:
    """The state of the quantile threshold for one agent."""

    theta: float
    pass_rate: float
    """Smoothed share of steps above theta."""
    above: Floats
    """[POINTS] the same at every candidate threshold."""
    seen: int = 0
    """Scored steps since the start or the last jump."""
    surprise: float = 0.0
    """Recent mean difference of pass rates from the tracked one."""


@threshold_kind("quantile")
@dataclass(slots=True)
class Quantile:
    """For each agent, the threshold in `range` at which the share `target_pass_rate` of its scored steps passes.

    A streaming quantile. A running mean tracks the share of steps above each of POINTS candidates; it forgets after
    about MEMORY steps, and immediately when the pass rate jumps. theta is the candidate nearest to the target, with
    hysteresis: it moves only if another candidate is nearer by more than DEAD_BAND, among equally near ones to the
    one nearest to the current theta.

    The update `theta += rate * (pass rate - target)` of Robbins and Monro (1951) would be simpler. But with scores of
    few values (quarters, say) there may be no threshold that meets the target: that update then keeps crossing one of
    the values, and the gates of all steps with that score open and close with it.
    """

    team: Team = None
    target_pass_rate: float = 0.8
    range: tuple[float, float] = (0.3, 0.7)
    floor: float = 0.1
    initial: float | None = None
    """The start of the first agents; None: the middle of the range. Later agents start at the mean of the known ones.
    """
    _tracked: dict[str, _Tracked] = field(init=False, default_factory=dict)

    POINTS: ClassVar[int] = 101
    MEMORY: ClassVar[int] = 768
    """In steps, not updates: 16 steps are too few to estimate a quantile, 1000 suffice."""
    RECENT: ClassVar[int] = 128
    """Approximate number of steps over which surprise is averaged; its standard deviation is then at most 0.03."""
    JUMP: ClassVar[float] = 0.1
    """More surprise than this indicates that the distribution of scores has changed."""
    DEAD_BAND: ClassVar[float] = 0.025
    MIN_STEPS: ClassVar[int] = 32
    """Steps that an agent needs before its threshold moves; fewer give no usable quantile."""
    OFF_TARGET: ClassVar[float] = 0.05
    """A threshold is saturated if every pass rate in the range is farther from the target than this."""

    def __post_init__(self) -> None:
        self.range = _expect_range(self.range, self.initial)
        _expect_number("target_pass_rate", self.target_pass_rate, 0.0, 1.0)
        _expect_number("floor", self.floor, 0.0, 1.0)

    def theta(self, agent: str) -> float:
        return self._tracked[agent].theta if agent in self._tracked else self._team_estimate()

    def update(self, observed: BatchStats) -> None:
        start = self._team_estimate()  # the same for all new agents, in any order
        for agent, r in observed.sub_rewards.items():
            if len(r):
                tracked = self._tracked.setdefault(agent, _Tracked(start, 0.0, np.zeros(self.POINTS)))
                self._track(tracked, np.sort(np.asarray(r, dtype=np.float64)))
                self._move(tracked)

    def state_dict(self) -> dict[str, Any]:
        agents = {
            agent: {
                "theta": t.theta,
                "pass_rate": t.pass_rate,
                "above": t.above.tolist(),
                "seen": t.seen,
                "surprise": t.surprise,
            }
            for agent, t in self._tracked.items()
        }
        return {"kind": "quantile", "range": list(self.range), "agents": agents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, "quantile", "range", "agents")
        # The tracked shares belong to the points of one range; for another range they would be silently wrong.
        if state["range"] != list(self.range):
            raise ConfigError(f"threshold state: range: expected {list(self.range)}, got {state['range']!r}")
        tracked = {}
        for agent, entry in _read_agents(state, "theta", "pass_rate", "above", "seen", "surprise"):
            above = np.array(_read_numbers(entry, "above"))
            if len(above) != self.POINTS:
                raise ConfigError(f"threshold state: above: expected {self.POINTS} numbers, got {len(above)}")
            if not (type(entry["seen"]) is int and entry["seen"] > 0):
                raise ConfigError(f"threshold state: seen: expected a whole number of steps, got {entry['seen']!r}")
            tracked[agent] = _Tracked(
                _read_number(entry, "theta", *self.range),
                _read_number(entry, "pass_rate", 0.0, 1.0),
                above,
                int(entry["seen"]),
                _read_number(entry, "surprise", -self.JUMP, self.JUMP),
            )
        self._tracked = tracked

    def metrics(self) -> dict[str, float]:
        """Two metrics for each agent with at least MIN_STEPS steps, in addition to the thresholds.

        `propagation/threshold_pass_rate/<agent>`: the smoothed pass rate, before the floor opens any gate.
        `propagation/threshold_saturated/<agent>`: 1 if no threshold in the range comes within OFF_TARGET of the target.
        """
        result = _theta_metrics(self, self._team_estimate(), {*(self.team or ()), *self._tracked})
        for agent, tracked in self._tracked.items():
            if tracked.seen >= self.MIN_STEPS:
                nearest = min(self._distances(tracked).min(), self._distance(tracked))
                result[f"{METRIC}_pass_rate/{agent}"] = tracked.pass_rate
                result[f"{METRIC}_saturated/{agent}"] = float(nearest > self.OFF_TARGET + _ROUNDING)
        return result

    def _team_estimate(self) -> float:
        return _mean((t.theta for t in self._tracked.values()), _start(self.range, self.initial))

    def _points(self) -> Floats:
        return np.linspace(*self.range, self.POINTS)

    def _track(self, tracked: _Tracked, r: Floats) -> None:
        """Update the shares with a batch's sorted sub-rewards: a plain mean at first, later one that forgets."""
        n, passed = len(r), float(_share_above(r, tracked.theta))
        if tracked.seen:
            tracked.surprise += n / (n + self.RECENT) * (passed - tracked.pass_rate - tracked.surprise)
        if abs(tracked.surprise) > self.JUMP:
            tracked.seen, tracked.surprise = 0, 0.0
        tracked.seen += n
        weight = max(n / tracked.seen, n / (n + self.MEMORY))
        tracked.above += weight * (_share_above(r, self._points()) - tracked.above)
        tracked.pass_rate += weight * (passed - tracked.pass_rate)

    def _move(self, tracked: _Tracked) -> None:
        """Move to the candidate nearest to the target, if it is nearer by more than the dead band."""
        if tracked.seen < self.MIN_STEPS:
            return
        points, distances = self._points(), self._distances(tracked)
        if self._distance(tracked) > distances.min() + self.DEAD_BAND:
            nearest = np.flatnonzero(distances <= distances.min() + _ROUNDING)
            best = nearest[np.abs(points[nearest] - tracked.theta).argmin()]
            tracked.theta, tracked.pass_rate = float(points[best]), float(tracked.above[best])

    def _distance(self, tracked: _Tracked) -> float:
        return abs(tracked.pass_rate - self.target_pass_rate)

    def _distances(self, tracked: _Tracked) -> Floats:
        return np.abs(tracked.above - self.target_pass_rate)


def _share_above(sorted_r: Floats, theta: Floats | float) -> Floats:
    """The share of `sorted_r` that passes the hard gate at each theta."""
    return 1.0 - np.searchsorted(sorted_r, np.asarray(theta) + GATE_TOLERANCE, side="right") / len(sorted_r)


def _theta_metrics(threshold: Threshold, team_estimate: float, agents: Iterable[str]) -> dict[str, float]:
    return {METRIC: float(team_estimate)} | {f"{METRIC}/{agent}": threshold.theta(agent) for agent in sorted(agents)}


def _mean(values: Iterable[float], otherwise: float) -> float:
    """The mean, summed exactly: independent of the order of agents, and never outside the values by rounding."""
    listed = sorted(values)
    return min(max(math.fsum(listed) / len(listed), listed[0]), listed[-1]) if listed else otherwise


def _start(limits: tuple[float, float], initial: float | None) -> float:
    return sum(limits) / 2 if initial is None else float(initial)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_) and math.isfinite(value)


def _check_sub_rewards(agent: str, r: Floats) -> None:
    bad = r[~np.isfinite(r)]
    if bad.size:
        raise NotFiniteError(f"sub-rewards of agent {agent!r}: expected finite numbers, got {bad[0]}")
    bad = r[(r < -_ROUNDING) | (r > 1 + _ROUNDING)]
    if bad.size:
        raise ScoreRangeError(f"sub-rewards of agent {agent!r}: expected numbers from 0 to 1, got {bad[0]}")


def _expect_number(key: str, value: object, low: float, high: float) -> None:
    if not (_is_number(value) and low <= value <= high):
        raise ConfigError(f"{KEY}.{key}: expected a number from {low:g} to {high:g}, got {value!r}")


def _expect_threshold(key: str, value: object) -> None:
    """Accept any finite number: below 0 all gates are open, from 1 on those of scored steps are closed."""
    if not (_is_number(value) and abs(value) <= _LARGEST):
        raise ConfigError(f"{KEY}.{key}: expected a finite number, got {value!r}")


def _expect_whole(key: str, value: object) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise ConfigError(f"{KEY}.{key}: expected a whole number of at least 1, got {value!r}")


def _expect_range(limits: object, initial: object) -> tuple[float, float]:
    pair = list(limits) if isinstance(limits, Sequence) and not isinstance(limits, str) else []
    if not (len(pair) == 2 and all(map(_is_number, pair)) and 0 <= pair[0] < pair[1] <= 1):
        raise ConfigError(f"{KEY}.range: expected two numbers from 0 to 1, the lower one first, got {limits!r}")
    if initial is not None:
        _expect_number("initial", initial, *pair)
    return float(pair[0]), float(pair[1])


def _check_state(state: Mapping[str, Any], kind: str, *keys: str) -> None:
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        got = state.get("kind") if isinstance(state, Mapping) else state
        raise ConfigError(f"threshold state: expected one of kind {kind!r}, got {got!r}")
    _check_state_keys(state, "kind", *keys)


def _check_state_keys(state: Mapping[str, Any], *keys: str) -> None:
    if set(state) != set(keys):
        raise ConfigError(f"threshold state: expected the keys {', '.join(keys)}, got {', '.join(map(str, state))}")


def _read_agents(state: Mapping[str, Any], *keys: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    agents = state["agents"]
    if not isinstance(agents, Mapping) or not all(isinstance(entry, Mapping) for entry in agents.values()):
        raise ConfigError(f"threshold state: agents: expected a mapping from agent to its state, got {agents!r}")
    for entry in agents.values():
        _check_state_keys(entry, *keys)
    return agents.items()


def _read_number(state: Mapping[str, Any], key: str, low: float, high: float = math.inf) -> float:
    value = state[key]
    if not (_is_number(value) and low <= value <= high):
        raise ConfigError(f"threshold state: {key}: expected a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def _read_numbers(state: Mapping[str, Any], key: str) -> list[float]:
    values = state[key]
    if not (isinstance(values, Sequence) and all(_is_number(v) and 0 <= v <= 1 for v in values)):
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
