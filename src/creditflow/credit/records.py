"""The records of propagation rules and estimators: what the rest of the code knows about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from creditflow.credit.registry import Registry
from creditflow.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

FORMULA, NOTHING, UNKNOWN = "formula", "nothing", "unknown"
"""Values of `PropagationRule.flows`: by the formula of docs/concepts/credit.md; no movement; in the rule's own way."""
ENGINES = ("local", "verl")

GATE_OPTIONS = ("propagation_threshold", "gate", "tau", "gate_at", "gate_unscored", "on_closed_gate")
"""Options that set the gates and the effect of a closed one."""


@dataclass(frozen=True, slots=True)
class PropagationRule:
    """A propagation rule, and the properties that other code reads."""

    credit: Callable[..., Any]
    """Takes a `PropagationInput` and returns a `Credit` (`creditflow.credit.rules.base`)."""
    pays_own: bool = True
    """Whether a step is paid for its own score, so that a step with failed scoring must be masked."""
    shares: bool = False
    """Whether every step of a trajectory gets the same global reward."""
    ignores: tuple[str, ...] = ()
    """Options of credit that the rule never reads; a recipe that sets the rule and one of them is refused."""
    flows: str = UNKNOWN
    """How credit moves along edges, for explanations and graphs: FORMULA, NOTHING or UNKNOWN."""
    needs_replays: bool = False
    """Whether the rule reads counterfactual values, for which each trajectory is replayed without some agents."""
    engines: tuple[str, ...] = ENGINES
    """The engines that can run the rule."""
    decomposed: bool = False
    """Whether own and shared credit follow `outcome_to`, so that explanations list them term by term."""

    @property
    def gated(self) -> bool:
        """Whether gates act on the credit that the rule moves."""
        return self.flows != NOTHING and "gate" not in self.ignores


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator, and the properties that other code reads."""

    estimate: Callable[..., Any]
    """Takes an `EstimatorInput` and returns an `Estimate` (`creditflow.credit.estimators.base`)."""
    grouped: bool
    """Whether steps are compared within groups; if not, all steps of a policy form one group."""
    whitened: bool
    """Whether the result is whitened over all trained tokens of a policy."""
    critic: bool
    """Whether the estimator needs `values_T`."""


PROPAGATION_RULES: Registry[PropagationRule] = Registry(
    "algorithm.propagation", "creditflow.credit.rules", "creditflow.rules"
)
ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry(
    "algorithm.adv_estimator", "creditflow.credit.estimators", "creditflow.estimators"
)


def propagation_rule(
    name: str,
    *,
    pays_own: bool = True,
    shares: bool = False,
    ignores: tuple[str, ...] = (),
    flows: str = UNKNOWN,
    needs_replays: bool = False,
    engines: tuple[str, ...] = ENGINES,
    decomposed: bool = False,
) -> Callable[[F], F]:
    """Register a function from PropagationInput to Credit as `algorithm.propagation: name`.

    The keywords are the fields of `PropagationRule`. Raises ConfigError if the name is taken.
    """

    def register(function: F) -> F:
        rule = PropagationRule(function, pays_own, shares, ignores, flows, needs_replays, engines, decomposed)
        PROPAGATION_RULES.add(name, rule)
        return function

    return register


def advantage_estimator(
    name: str, *, grouped: bool = True, whitened: bool = False, critic: bool = False
) -> Callable[[F], F]:
    """Register a function from EstimatorInput to Estimate as `algorithm.adv_estimator: name`.

    Raises ConfigError if it is neither grouped nor whitened, or has a critic and is not whitened: it would have nothing
    to compare with, and train nothing.
    """
    if not (grouped or whitened) or (critic and not whitened):
        raise ConfigError(
            f"algorithm.adv_estimator: {name}: expected groups to compare within, or whitening over the policy (with a "
            f"critic always), got grouped={grouped}, whitened={whitened}, critic={critic}"
        )

    def register(function: F) -> F:
        ADVANTAGE_ESTIMATORS.add(name, Estimator(function, grouped, whitened, critic))
        return function

    return register
