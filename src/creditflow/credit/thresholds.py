"""Thresholds: where the gates of each agent stand, and how that follows what batches show.

A threshold is a small state machine: it says theta, is told what a batch showed, and can be saved and restored. It
knows sub-rewards, their spread and the accuracy of validations; it does not know gates, graphs or credit.
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
from creditflow.errors import (
    BatchError,
    ConfigError,
    NotFiniteError,
    ScoreRangeError,
    UnknownAgentError,
    did_you_mean,
)
from creditflow.trajectory import Bools, Floats, Ints

KEY = "algorithm.propagation_threshold"
METRIC = "propagation/threshold"
_ROUNDING = 1e-9
_LARGEST = 1e100
"""Larger thresholds are typing errors."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What a batch showed, by agent. An agent that is missing was not there, or had nothing scored."""

    sub_rewards: Mapping[str, Floats]
    """r of the agent's scored steps, of trajectories that are not masked; each in [0, 1]."""
    spread: Mapping[str, float]
    """Pooled within-group standard deviation of r, at least 0; absent where no group has two trajectories."""
    accuracy: float | None = None
    """Share of right answers, in [0, 1], where an epoch's validation has just been done."""

    def __post_init__(self) -> None:
        """Raises NotFiniteError, ScoreRangeError, BatchError with the agent, what was expected and what came."""
        for agent, r in self.sub_rewards.items():
            _check_sub_rewards(agent, np.asarray(r, dtype=np.float64))
        for agent, sd in self.spread.items():
            if not (_is_number(sd) and sd >= 0):
                raise BatchError(f"spread of agent {agent!r}: expected a finite number of at least 0, got {sd!r}")
        if self.accuracy is not None and not (_is_number(self.accuracy) and 0 <= self.accuracy <= 1):
            raise BatchError(f"accuracy: expected a number from 0 to 1, got {self.accuracy!r}")


class Threshold(Protocol):
    """What every kind of threshold does, built-in or a user's own."""

    @property
    def floor(self) -> float:
        """Least share of an agent's scored steps whose gates are open, see `open_starved`; 0: none."""

    def theta(self, agent: str) -> float:
        """The threshold in force for the next batch. An agent never seen gets the team's estimate."""

    def update(self, observed: Observed) -> None:
        """Take in what a batch showed. Agents that it does not speak of stay as they are."""

    def state_dict(self) -> dict[str, Any]:
        """All that the future depends on, beside the options, as JSON can hold it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises ConfigError for one of another kind, or with unknown or missing keys."""

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold`: what an agent never seen gets; `propagation/threshold/<agent>`; the kind's own."""


Team = tuple[str, ...] | None
"""The names of the agents; None where they are not known."""
Kind = TypeVar("Kind", bound=Callable[..., Threshold])

THRESHOLDS: Registry[Callable[..., Threshold]] = Registry(f"{KEY}.kind")
"""`{kind: name, key: value, ...}` calls the entry with the team's names and the other keys as keywords."""


def threshold_kind(name: str) -> Callable[[Kind], Kind]:
    """Register a kind of threshold: a callable of (team, **options) that makes one; its keywords are the keys."""

    def register(kind: Kind) -> Kind:
        THRESHOLDS.add(name, kind)
        return kind

    return register


def make_threshold(spec: float | Mapping[str, Any], agents: Iterable[str] | None = None) -> Threshold:
    """The threshold that `algorithm.propagation_threshold` describes; a number is `{kind: fixed, value: number}`.

    `agents`: the names of the team, where they are known; an agent that the option names has to be one of them.
    Raises ConfigError, UnknownAgentError for what makes no sense, with the key, what was expected and what came.
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
    """[A] the threshold in force for each agent. Raises ConfigError where a kind gives no finite number."""
    theta_A = np.array([threshold.theta(agent) for agent in agent_names], dtype=np.float64)
    for agent, theta in zip(agent_names, theta_A, strict=True):
        if not np.isfinite(theta):
            raise ConfigError(f"{KEY}: expected a finite threshold for agent {agent!r}, got {theta}")
    return theta_A


def open_starved(gate_open_S: Bools, sub_reward_S: Floats, scored_S: Bools, agent_S: Ints, floor: float) -> Bools:
    """[S] which closed scored steps are opened so that no agent is starved of what its children earned.

    Per agent, at least `ceil(floor * its scored steps)` scored steps are open afterwards: of the closed ones those with
    the highest sub-reward are opened, ties in order of position. Cost: a sort of the closed scored steps.
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
    """A number that stays, and others for some agents. It looks at nothing, and aims at no pass rate."""

    team: Team = None
    value: float = 0.5
    agents: Mapping[str, float] = field(default_factory=dict)
    """Values of single agents, by name; all others have `value`."""
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

    def update(self, observed: Observed) -> None:
        """Nothing moves."""

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, "fixed")

    def metrics(self) -> dict[str, float]:
        return _theta_metrics(self, self.value, {*(self.team or ()), *self.agents})


@threshold_kind("tuned")
@dataclass(slots=True)
class Tuned:
    """One number for all agents that is lowered once, for good, when the accuracy of validations falls.

    It falls when it is more than `accuracy_drop` below the best of the last `patience_epochs` validations: gates that
    are too strict starve upstream agents, and that shows there. It aims at no pass rate.
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

    def update(self, observed: Observed) -> None:
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
        """`propagation/threshold_lowered`: 1 once it has been lowered."""
        return _theta_metrics(self, self.theta(""), self.team or ()) | {f"{METRIC}_lowered": float(self._lowered)}


@dataclass(slots=True)
class _Spread:
    """An exponentially weighted mean, as its unnormalised sum and the weight in it (1 - smoothing^updates)."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.weight


@threshold_kind("noise")
@dataclass(slots=True)
class Noise:
    """Per agent, lower the noisier its sub-rewards are: `hi - (hi - lo) * min(1, 2 * sd)`.

    sd is the spread of sub-rewards within groups, smoothed exponentially and corrected for its start, so that the first
    counts fully. 0.5 is the largest standard deviation that numbers in [0, 1] can have: a coin's. The reason: where
    scores of plays of the same group differ that much, a strict gate closes by chance. It aims at no pass rate.
    """

    team: Team = None
    range: tuple[float, float] = (0.3, 0.7)
    smoothing: float = 0.9
    """Weight of the past at every update, from 0 (the last batch alone) to below 1."""
    initial: float | None = None
    """Until the first spread is known; None: the middle of the range."""
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

    def update(self, observed: Observed) -> None:
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
    """What the quantile threshold knows of one agent."""

    theta: float
    pass_rate: float
    """Share of steps above theta, smoothed."""
    above: Floats
    """[POINTS] the same at every threshold that it could choose."""
    seen: int = 0
    """Scored steps since the start, or the last jump."""
    surprise: float = 0.0
    """How far pass rates have been from what was tracked, of late."""


@threshold_kind("quantile")
@dataclass(slots=True)
class Quantile:
    """Per agent, the threshold in `range` that lets a share `target_pass_rate` of its scored steps pass.

    A streaming quantile. The share of steps above each of POINTS thresholds is tracked by a running mean that forgets
    after about MEMORY steps, and at once where the pass rate has jumped; theta is the one nearest to the target.
    Hysteresis: it stays where it is unless another one is nearer by more than DEAD_BAND; of equally near ones it goes
    to the one that is nearest to itself.

    It is that, rather than the step `theta += rate * (pass rate - target)` of Robbins and Monro (1951), because scores
    of few values (quarters, say) may let no threshold meet the target: the step then crosses one of the values back and
    forth for ever, and the gates of all steps with that score open and close with it.
    """

    team: Team = None
    target_pass_rate: float = 0.8
    range: tuple[float, float] = (0.3, 0.7)
    floor: float = 0.1
    initial: float | None = None
    """Where the first agents start; None: the middle of the range. Later ones start at the mean of those known."""
    _tracked: dict[str, _Tracked] = field(init=False, default_factory=dict)

    POINTS: ClassVar[int] = 101
    MEMORY: ClassVar[int] = 768
    """In steps, not in updates: 16 steps of an agent say little of its quantile, 1000 say it."""
    RECENT: ClassVar[int] = 128
    """The steps, about, over which surprise is averaged; its standard deviation is then at most 0.03."""
    JUMP: ClassVar[float] = 0.1
    """More surprise than this says that the scores are no longer what they were."""
    DEAD_BAND: ClassVar[float] = 0.025
    MIN_STEPS: ClassVar[int] = 32
    """Fewer have no quantile to speak of: until then an agent stays where it starts."""
    OFF_TARGET: ClassVar[float] = 0.05
    """A pass rate farther from the target than this, whatever the threshold, is called saturated."""

    def __post_init__(self) -> None:
        self.range = _expect_range(self.range, self.initial)
        _expect_number("target_pass_rate", self.target_pass_rate, 0.0, 1.0)
        _expect_number("floor", self.floor, 0.0, 1.0)

    def theta(self, agent: str) -> float:
        return self._tracked[agent].theta if agent in self._tracked else self._team_estimate()

    def update(self, observed: Observed) -> None:
        start = self._team_estimate()  # the same for all that are new, in whatever order they come
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
        # What is tracked belongs to the points of one range; read as another's it would be wrong in silence.
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
        """For each agent that has shown MIN_STEPS steps.

        `propagation/threshold_pass_rate/<agent>`: the smoothed pass rate, before the floor opens anything.
        `propagation/threshold_saturated/<agent>`: 1 where no threshold in the range comes within OFF_TARGET of it.
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
        """Take in the sorted sub-rewards of a batch: a plain mean at first, then one that forgets."""
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
        """Go to the threshold that is nearest to the target, if it is nearer by more than the dead band."""
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
    """Summed exactly, so that no order of agents makes a difference, and never beyond the values by rounding."""
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
    """Any finite number: below 0 all gates are open, from 1 on those of scored steps are closed."""
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
class Standing:
    """Thresholds that stay where they are, agent by agent: no kind of a recipe's, but what one came to."""

    by_agent: dict[str, float]
    floor: float

    def theta(self, agent: str) -> float:
        """See Threshold."""
        return self.by_agent[agent]

    def update(self, observed: Observed) -> None:
        """Nothing moves."""

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is no state."""

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}
