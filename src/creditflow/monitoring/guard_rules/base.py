"""Guard rules decide from the series of a metric whether something is wrong or has recovered.

Each kind tests the series against chance, since a rule that acts on noise does more harm than no rule. A kind receives
numbers with their observation counts; the meaning of the metric and the action are outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol, TypeVar, runtime_checkable

from creditflow.errors import ConfigError
from creditflow.registry import Registry

KEY = "guard.rules"


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of a rule after the newest value of a series."""

    bad: bool
    """The rule's condition holds, and chance does not explain it."""
    well: bool
    """The series has met the rule's condition for recovery."""
    numbers: Mapping[str, float]
    """The numbers behind the decision, for display and for the event."""
    suspect: bool = False
    """The newest value is on the wrong side, so a checkpoint saved now may be unfit for a rollback."""
    undecided: bool = False
    """The newest value is on the wrong side, but rests on too few samples to tell. The guard reports it once."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The bound beyond which a rule fires."""

    option: str
    """The option that sets it; rules of one metric with the same option watch for the same fault."""
    value: float
    sign: int = 0
    """1: the rule fires above the bound; -1: below; 0: the bound is not on the metric itself."""
    scale: str = ""
    """The unit of the bound. Only bounds of the same scale can contradict each other."""


@runtime_checkable
class GuardRule(Protocol):
    """The interface of every kind, built-in or user-defined. One rule watches one metric.

    A kind may declare a `limit`, a `Limit`; two rules of one metric with contradicting limits are refused.
    """

    def look(self, value: float, over: float | None) -> RuleResult:
        """Process the next value, which is finite.

        `over`: the value of the rule's second metric, if known: the observation count of a share, or the end of an
        interval.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state for later results, without the options, as JSON types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""


Kind = TypeVar("Kind", bound=Callable[..., GuardRule])

GUARD_RULES: Registry[Callable[..., GuardRule]] = Registry(
    f"{KEY}.<rule>.kind", "creditflow.monitoring.guard_rules", "creditflow.guard_rules"
)
"""`{kind: name, key: value, ...}` calls the entry with the other keys as keywords, once per watched metric."""


def guard_rule(name: str) -> Callable[[Kind], Kind]:
    """Register a kind: a callable that takes the options and returns a rule, or raises ConfigError for bad options."""

    def register(kind: Kind) -> Kind:
        GUARD_RULES.declare(name, kind, kind)
        return kind

    return register


def one_sided_p_value(distance: float, standard_error: float) -> float:
    """The p-value of `distance` under a normal error."""
    if standard_error == 0.0:
        return 0.0 if distance > 0 else 1.0
    return 1.0 - NormalDist().cdf(distance / standard_error)


def is_number(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value is a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and low <= value <= high


def expect_number(key: str, value: object) -> None:
    """Raise ConfigError unless the value is a finite number."""
    if not is_number(value):
        raise ConfigError(f"{key}: expected a finite number, got {value!r}")


def expect_whole(key: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless the value is a whole number of at least `least`."""
    if not (isinstance(value, int) and is_number(value, least)):
        raise ConfigError(f"{key}: expected a whole number of at least {least}, got {value!r}")


def expect_p_value(value: object) -> None:
    """Raise ConfigError unless the value is between 0 and 1."""
    if not is_number(value, 0, 1) or value in (0, 1):
        raise ConfigError(f"p_value: expected a number between 0 and 1, got {value!r}")
