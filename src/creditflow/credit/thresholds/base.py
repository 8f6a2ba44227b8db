"""Thresholds: the sub-reward above which an agent's gates open, constant or adapted from batch to batch.

A threshold is a small state machine: it returns theta, is updated with the observations of a batch, and can be saved
and restored. Its inputs are sub-rewards, their spread and validation accuracy.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Generic, Protocol, TypeGuard, TypeVar

import numpy as np

from creditflow.data import Bools, Floats, Ints
from creditflow.errors import ConfigError
from creditflow.registry import Registry, expect_keywords

KEY = "algorithm.propagation.theta"
METRIC = "propagation/threshold"
NEW_AGENT = "*"
"""A name that no agent can have: the threshold for it is the team's estimate."""
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


class Threshold(Protocol):
    """The interface of every kind of threshold, built-in or registered by a user. By default it has no state."""

    @property
    def floor(self) -> float:
        """Minimum share of open gates among an agent's scored steps, see `open_starved`; 0: no minimum."""
        return 0.0

    def theta(self, agent: str) -> float:
        """The threshold for the next batch. A new agent gets the team's estimate."""

    def update(self, observed: BatchStats) -> None:
        """Update the state from a batch. Agents without observations keep their state."""
        return

    def state_dict(self) -> dict[str, Any]:
        """The complete state apart from the options, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Raises ConfigError for a state of another kind, or with unknown or missing keys."""
        return

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold` (for a new agent), `propagation/threshold/<agent>`, and the kind's own metrics."""
        return {}


AgentNames = tuple[str, ...] | None
"""The names of the agents; None if unknown."""
Kind = TypeVar("Kind", bound=Callable[..., Threshold])
State = TypeVar("State")

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
    """Make the threshold of the option `theta` of a rule; a number is short for `{kind: fixed, value: number}`.

    `agents`: the names of the team, if known; agents named in the option must be among them. Raises ConfigError or
    UnknownAgentError for an invalid option, with the key, the expected and the actual value.
    """
    team = None if agents is None else tuple(agents)
    if is_number(spec):
        return THRESHOLDS["fixed"](team, value=spec)
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{KEY}: expected a finite number, or a mapping with `kind`, got {spec!r}")
    options = dict(spec)
    name = options.pop("kind", None)
    kind = THRESHOLDS[name]
    expect_keywords(name, kind, options, KEY, first=1)
    threshold = kind(team, **options)
    parts = ("floor", "theta", "update", "state_dict", "load_state_dict", "metrics")
    if missing := [part for part in parts if not hasattr(threshold, part)]:
        got = f"{getattr(kind, '__name__', type(threshold).__name__)} without {', '.join(missing)}"
        raise ConfigError(f"{KEY}.kind: {name}: expected a threshold, got {got}")
    return threshold


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


def mean(values: Iterable[float], otherwise: float) -> float:
    """The mean, summed exactly: independent of the order of agents, and never outside the values by rounding."""
    listed = sorted(values)
    return min(max(math.fsum(listed) / len(listed), listed[0]), listed[-1]) if listed else otherwise


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number, not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Check:
    """The allowed values of an option, or of a number in a saved state."""

    words: str
    holds: Callable[[Any], bool]

    def expect(self, key: str, value: object) -> None:
        """Raise ConfigError, with the key, the expected and the actual value, unless the value is allowed."""
        if not self.holds(value):
            raise ConfigError(f"{key}: expected {self.words}, got {value!r}")


def between(low: float, high: float) -> Check:
    """Allow numbers from `low` to `high`."""
    return Check(f"a number from {low:g} to {high:g}", lambda value: is_number(value) and low <= value <= high)


SHARE = between(0, 1)
FINITE = Check("a finite number", lambda value: is_number(value) and abs(value) <= LARGEST)
"""A threshold. Below 0 all gates are open, from 1 on those of scored steps are closed."""
WHOLE = Check("a whole number of at least 1", lambda value: type(value) is int and value >= 1)
MAPPING = Check("a mapping by agent", lambda value: isinstance(value, Mapping))
FLAG = Check("true or false", lambda value: isinstance(value, bool))


def shares(length: int | None = None) -> Check:
    """Allow a list of numbers from 0 to 1."""

    def holds(values: Any) -> bool:
        return isinstance(values, list | tuple) and all(map(SHARE.holds, values)) and length in (None, len(values))

    return Check("a list of numbers from 0 to 1" if length is None else f"{length} numbers from 0 to 1", holds)


LIMITS = Check("two numbers from 0 to 1, the lower one first", lambda pair: shares(2).holds(pair) and pair[0] < pair[1])


def option(default: Any, check: Check) -> Any:
    """A field with the check of its values."""
    return field(default=default, metadata={"check": check})


def expect_fields(place: str, kind: Any, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that the check of its field in `kind` does not allow."""
    for f in fields(kind):
        if f.name in values and "check" in f.metadata:
            f.metadata["check"].expect(f"{place}{f.name}", values[f.name])


def expect_state(kind: Any, names: Sequence[str], state: object) -> None:
    """Raise ConfigError for a saved state with other keys than `names`, or with wrong values."""
    if not isinstance(state, Mapping) or set(state) != set(names):
        got = ", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state)
        raise ConfigError(f"threshold state: expected the keys {', '.join(names)}, got {got}")
    expect_fields("threshold state: ", kind, state)


@dataclass
class BuiltIn(Threshold):
    """The options and the state of a built-in kind of threshold: fields, each with the check of its values."""

    kind: ClassVar[str]
    same: ClassVar[tuple[str, ...]] = ("kind",)
    """Attributes that a state must share with the threshold that loads it."""
    saved: ClassVar[tuple[str, ...]] = ()
    """Fields that a state restores."""

    team: AgentNames = None
    agents: Mapping[str, Any] = field(init=False, default_factory=dict, metadata={"check": MAPPING})
    """The state of single agents, by name."""

    def __post_init__(self) -> None:
        expect_fields(f"{KEY}.", self, {f.name: getattr(self, f.name) for f in fields(self)})

    def state_dict(self) -> dict[str, Any]:
        values = {"kind": self.kind, **asdict(self)}
        return {name: values[name] for name in (*self.same, *self.saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expect_state(self, (*self.same, *self.saved), state)
        for name in self.same:
            own = getattr(self, name)
            Check(repr(own), partial(operator.eq, own)).expect(f"threshold state: {name}", state[name])
        for name in self.saved:
            setattr(self, name, copy.deepcopy(state[name]))

    def metrics(self) -> dict[str, float]:
        agents = sorted({*(self.team or ()), *self.agents})
        return {METRIC: self.theta(NEW_AGENT)} | {f"{METRIC}/{agent}": self.theta(agent) for agent in agents}


@dataclass
class ByAgent(BuiltIn, Generic[State]):
    """A kind that adapts the threshold of each agent within a range."""

    state: ClassVar[type[Any]]
    """The dataclass of an agent's state."""
    saved = ("agents",)

    agents: dict[str, State] = field(init=False, default_factory=dict, metadata={"check": MAPPING})
    range: Sequence[float] = option((0.3, 0.7), LIMITS)
    initial: float | None = None
    """The start of the first agents; None: the middle of the range. Later agents start at the mean of the known ones.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.range = [float(limit) for limit in self.range]
        if self.initial is not None:
            between(*self.range).expect(f"{KEY}.initial", self.initial)

    def known(self, state: State) -> float:
        """The threshold of an agent with a state."""
        raise NotImplementedError

    def theta(self, agent: str) -> float:
        if agent in self.agents:
            return self.known(self.agents[agent])
        start = sum(self.range) / 2 if self.initial is None else float(self.initial)
        return mean(map(self.known, self.agents.values()), start)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        agents = state.get("agents") if isinstance(state, Mapping) else None
        for entry in agents.values() if isinstance(agents, Mapping) else ():
            expect_state(self.state, [f.name for f in fields(self.state)], entry)
        super().load_state_dict(state)
        self.agents = {agent: self.state(**entry) for agent, entry in state["agents"].items()}


@dataclass(slots=True)
class Constant(Threshold):
    """Constant thresholds by agent, taken from an assignment; not available as a kind in recipes."""

    by_agent: dict[str, float]
    floor: float = 0.0

    def theta(self, agent: str) -> float:
        """The agent's threshold. Raises KeyError for an agent without one."""
        return self.by_agent[agent]
