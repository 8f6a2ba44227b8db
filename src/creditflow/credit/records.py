"""The records of propagation rules and estimators: the properties of each that other code reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from creditflow.errors import ConfigError, did_you_mean
from creditflow.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

FORMULA, NOTHING, UNKNOWN = "formula", "nothing", "unknown"
"""Values of `PropagationRule.flows`: by the formula of docs/concepts/credit.md; no movement; in the rule's own way."""
SPREAD, ONE = "spread", "one"
"""Values of `Estimator.divisor`: the group's spread with `norm_adv_by_std_in_grpo`, else 1; always 1."""
DISCOUNTED, BY_CRITIC = "discounted", "critic"
"""Values of `Estimator.tokens`: credit times `gamma_token` for each later token; by `CriticTerms`, as in `gae`."""

GATE_OPTIONS = ("propagation_threshold", "on_closed_gate")
"""Options that set the gates and the effect of a closed one."""
SCORE_OPTIONS = ("score_weight", "score_model", "w_m")
"""Options that set the pay for a step's own score."""
RULE_OPTIONS = ("step_weight", "episode_weight", "value_prior")
"""Options that only the rules that declare them in `reads` read."""


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
    decomposed: bool = False
    """Whether own and shared credit follow `outcome_to`, so that explanations list them term by term."""
    comparison_rank: int = 0
    """The place among the rules that are compared by default, from 1, the baseline; 0: not compared by default."""
    relative: bool = False
    """Whether credit is an advantage already: the rule compares trajectories itself, and the estimator must be one that
    does not (`Estimator.relative`)."""
    reads: tuple[str, ...] = ()
    """The options of RULE_OPTIONS that the rule reads."""
    expects: bool = False
    """Whether a step's own reward is that of its expected sub-reward, given all scores and the outcome
    (`creditflow.credit.posteriors`)."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown value of a property."""
        _expect_one("flows", self.flows, (FORMULA, NOTHING, UNKNOWN))
        if self.expects and not self.pays_own:
            raise ConfigError(
                "expects: a rule that pays expected scores pays own ones: expected pays_own=True, got False"
            )

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Options of credit without effect: `ignores`, RULE_OPTIONS without `reads`, and those of unpaid scores."""
        unread = tuple(name for name in RULE_OPTIONS if name not in self.reads)
        unpaid = SCORE_OPTIONS if self.expects or not self.pays_own else ()
        return (*self.ignores, *unread, *unpaid)

    @property
    def gated(self) -> bool:
        """Whether gates act on the credit that the rule moves."""
        return self.flows != NOTHING and "propagation_threshold" not in self.ignores


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator, and the properties that other code reads."""

    estimate: Callable[..., Any]
    """Takes an `EstimatorInput` and returns an `Estimate` (`creditflow.credit.estimators.base`)."""
    grouped: bool = True
    """Whether steps are compared within groups; if not, all steps of a policy form one group."""
    whitened: bool = False
    """Whether the result is whitened over all trained tokens of a policy."""
    critic: bool = False
    """Whether the estimator needs `values_T`."""
    divisor: str = UNKNOWN
    """The divisor, for explanations: SPREAD, ONE or UNKNOWN. Not read for a whitened estimator."""
    tokens: str = UNKNOWN
    """How the values of single tokens arise, for explanations: DISCOUNTED, BY_CRITIC or UNKNOWN."""
    min_rollouts: int = 1
    """The smallest number of rollouts of a task with which the estimator can learn."""
    relative: bool = False
    """Whether credit is taken as the advantage, without a baseline. Needs a rule that compares trajectories itself."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown value of a property, or if steps would be compared with nothing."""
        _expect_one("divisor", self.divisor, (SPREAD, ONE, UNKNOWN))
        _expect_one("tokens", self.tokens, (DISCOUNTED, BY_CRITIC, UNKNOWN))
        if not (self.grouped or self.whitened) or (self.critic and not self.whitened):
            raise ConfigError(
                "expected groups to compare within, or whitening over the policy (with a critic always), got "
                f"grouped={self.grouped}, whitened={self.whitened}, critic={self.critic}"
            )


def _expect_one(name: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ConfigError(f"{name}: expected one of {', '.join(words)}, got {value!r}{did_you_mean(str(value), words)}")


PROPAGATION_RULES: Registry[PropagationRule] = Registry(
    "algorithm.propagation",
    "creditflow.credit.rules",
    "creditflow.rules",
    decorator="propagation_rule",
    record=PropagationRule,
)
ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry(
    "algorithm.adv_estimator",
    "creditflow.credit.estimators",
    "creditflow.estimators",
    decorator="advantage_estimator",
    record=Estimator,
)


def compared_rules() -> tuple[str, ...]:
    """The rules that are compared by default, the baseline first."""
    ranks = {name: rule.comparison_rank for name, rule in PROPAGATION_RULES.loaded().items()}
    return tuple(sorted((name for name, rank in ranks.items() if rank), key=ranks.__getitem__))


def propagation_rule(name: str, **properties: Any) -> Callable[[F], F]:
    """Register a function from PropagationInput to Credit as `algorithm.propagation: name`.

    In a file beside a recipe, `algorithm.propagation: file.py:function` selects it, and the name has no meaning. The
    keywords are the fields of `PropagationRule`. Raises ConfigError if the name is taken.
    """

    def register(function: F) -> F:
        PROPAGATION_RULES.declare(name, PropagationRule(function, **properties), function)
        return function

    return register


def advantage_estimator(name: str, **properties: Any) -> Callable[[F], F]:
    """Register a function from EstimatorInput to Estimate as `algorithm.adv_estimator: name`.

    In a file beside a recipe, `algorithm.adv_estimator: file.py:function` selects it, and the name has no meaning. The
    keywords are the fields of `Estimator`. Raises ConfigError if the name is taken.
    """

    def register(function: F) -> F:
        ADVANTAGE_ESTIMATORS.declare(name, Estimator(function, **properties), function)
        return function

    return register
