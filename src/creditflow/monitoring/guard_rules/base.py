"""Guard rules decide from the series of a metric whether something is wrong or has recovered.

Each kind tests the series against chance, since a rule that acts on noise does more harm than no rule. A kind receives
numbers with their observation counts; the meaning of the metric and the action are outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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


@runtime_checkable
class GuardRule(Protocol):
    """The interface of every kind, built-in or user-defined. One rule watches one metric."""

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
    f"{KEY}.<rule>.kind", "creditflow.monitoring.guard_rules", "creditflow.guard_rules", decorator="guard_rule"
)
"""`{kind: name, key: value, ...}` calls the entry with the other keys as keywords, once per watched metric."""


def guard_rule(name: str) -> Callable[[Kind], Kind]:
    """Register a kind: a callable that takes the options and returns a rule, or raises ConfigError for bad options."""

    def register(kind: Kind) -> Kind:
        GUARD_RULES.declare(name, kind, kind)
        return kind

    return register


@dataclass(slots=True)
class SeriesRule:
    """A kind with options, and a state of the fields that are no options. It registers as a dataclass.

    The bounds of an option are the metadata of its field, with pydantic's names.
    """

    def state_dict(self) -> dict[str, Any]:
        return {state.name: getattr(self, state.name) for state in fields(self) if not state.init}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(slots=True)
class BoundedRule(SeriesRule):
    """A kind that fires beyond `above` or below `below`."""

    above: float | None = None
    below: float | None = None
    recover: float | None = None
    """Limit of the recovered side; default: the limit of the rule."""

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ConfigError("above, below: expected one of them")
        expect_recovery(self.recover, "below" if self.above is None else "above", *self.limit)

    @property
    def limit(self) -> tuple[float, int]:
        """The bound, and the side on which the rule fires: 1 above, -1 below."""
        return (self.below or 0.0, -1) if self.above is None else (self.above, 1)


def expect_recovery(recover: float | None, option: str, bound: float, sign: int) -> None:
    """Raise ConfigError if a rule would recover where it fires. `option`: that of the bound; `sign`: see `limit`."""
    if recover is not None and sign * (recover - bound) > 0:
        raise ConfigError(
            f"recover: {recover:g} lies where the rule fires ({option} {bound:g}): it would be well and ill at once; "
            f"expected at {'least' if sign < 0 else 'most'} {bound:g}"
        )


def one_sided_p_value(distance: float, standard_error: float) -> float:
    """The p-value of `distance` under a normal error."""
    if standard_error == 0.0:
        return 0.0 if distance > 0 else 1.0
    return 1.0 - NormalDist().cdf(distance / standard_error)
