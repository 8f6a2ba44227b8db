"""The records of the stages of `assign`, the base class of rules, and the options of credit.

A stage is a function from records to one record. `creditflow.credit.assignment` has the list of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.history import History
from creditflow.credit.thresholds.base import Constant, Threshold
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import ConfigError, did_you_mean
from creditflow.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound="type[Rule]")

LARGEST = 1e100
"""Upper bound of weights: larger values are typing errors, and would overflow in the variance."""
SIGNAL, OUTCOME, BITS = np.uint8(1), np.uint8(2), np.uint8(3)
"""Bits of `Credit.reached_S`: any signal that depends on this trajectory; the outcome; both."""
NOTHING, FORMULA, UNKNOWN = "nothing", "formula", "unknown"
"""Values of `Rule.flow`."""


NOT_STORED = {"stored": False}
"""Metadata of a record's field without a column in step files."""

Formulas = Mapping[str, tuple[str, ...]]
"""Formulas of terms for `explain`, by the name of the term. The first that gives the recorded value is shown."""

Factors = tuple[Floats, Floats, Floats, Floats]
"""Weight, baseline, shift and divisor, each [S]."""


# ---- options ---


def option(default: Any, *, at_least: float | None = None, at_most: float | None = None) -> Any:
    """A field of a rule or of `CreditOptions`: an option of a recipe, with its bounds."""
    bounds = {"ge": at_least, "le": at_most}
    return field(default=default, metadata={name: bound for name, bound in bounds.items() if bound is not None})


def weight(default: float) -> Any:
    """An option that is a finite number of at least 0."""
    return option(default, at_least=0.0, at_most=LARGEST)


def share(default: float) -> Any:
    """An option that is a number from 0 to 1."""
    return option(default, at_least=0.0, at_most=1.0)


@dataclass(frozen=True)
class Rule:
    """A propagation rule. Derive a dataclass from it, or from a class below, and register it with `propagation_rule`.

    The fields are options of `algorithm.propagation: {rule: NAME, option: value}`; the class variables are properties
    that other code reads.
    """

    name: ClassVar[str] = ""
    """The registered name, or the reference of a file."""
    flow: ClassVar[str] = UNKNOWN
    """How credit moves along edges, for explanations and graphs: FORMULA (of this module), NOTHING, or UNKNOWN: in the
    rule's own way."""
    pays_scores: ClassVar[bool] = False
    """Whether a step is paid for its own score, so that a step with failed scoring must be masked."""
    pays_tokens: ClassVar[bool] = False
    """Whether `decomp_granularity: token_level` may pay that score token by token."""
    shares: ClassVar[bool] = False
    """Whether every step of a trajectory gets the same global reward."""
    relative: ClassVar[bool] = False
    """Whether credit is an advantage already: the rule compares trajectories itself, and the estimator must be one that
    does not (`Estimator.relative`)."""
    learns: ClassVar[bool] = False
    """Whether the rule has a `fit`."""
    gated: ClassVar[bool] = False
    """Whether gates act on the credit that the rule moves."""
    why_frozen: ClassVar[str] = "frozen by its rule"
    """The reason for a step in `Credit.frozen_S`, in words."""
    comparison_rank: ClassVar[int] = 0
    """The place among the rules that are compared by default, from 1, the baseline; 0: not compared by default."""

    def credit(self, inputs: RuleInput) -> Credit:
        """Compute the credit of every step."""
        raise NotImplementedError(f"rule {self.name}: expected a method `credit`")

    def fit(self, rewards: Rewards, options: CreditOptions, history: History) -> Fit | None:
        """Learn from this batch and earlier ones, before `credit`, if the rule `learns`; None: not these options."""
        raise NotImplementedError(f"rule {self.name}: expected a method `fit`, since it learns")

    def make_threshold(self, team: tuple[str, ...] | None = None) -> Threshold:
        """The thresholds of a rule with gates, in their first state; `team`: its agents, if known."""
        return Constant({})

    def formulas(self, options: CreditOptions) -> Formulas:
        """How the terms of `Credit` are made of recorded terms and options; a term without a formula is shown as it is.

        A formula has names of the records' fields, without suffix, and of options: `"own": ("w_r * sub_reward",)`.
        """
        return {}

    def spec(self) -> str | dict[str, Any]:
        """The value of `algorithm.propagation` that means this rule with these options."""
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"rule": self.name, **options} if options else self.name

    def __str__(self) -> str:
        return self.name


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
    relative: bool = False
    """Whether credit is taken as the advantage, without a baseline. Needs a rule that compares trajectories itself."""
    formulas: Formulas = field(default_factory=dict, metadata=NOT_STORED)
    """How `divisor`, or the value `raw` of a token that replaces credit, is made of recorded terms; see `explain`."""

    def __post_init__(self) -> None:
        """Raise ConfigError if steps would be compared with nothing."""
        if not (self.grouped or self.whitened) or (self.critic and not self.whitened):
            raise ConfigError(
                "expected groups to compare within, or whitening over the policy (with a critic always), got "
                f"grouped={self.grouped}, whitened={self.whitened}, critic={self.critic}"
            )


PROPAGATION_RULES: Registry[type[Rule]] = Registry(
    "algorithm.propagation", "creditflow.credit.rules", "creditflow.rules", decorator="propagation_rule"
)
"""The classes of rules by name."""
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


def propagation_rule(name: str) -> Callable[[R], R]:
    """Register a dataclass derived from `Rule` as `algorithm.propagation: name`.

    In a file beside a recipe, `algorithm.propagation: file.py:Class` selects it, and the name has no meaning. Raises
    ConfigError for another object, and if the name is taken.
    """

    def register(rule: R) -> R:
        if not (isinstance(rule, type) and issubclass(rule, Rule) and "__dataclass_fields__" in vars(rule)):
            raise ConfigError(
                f"algorithm.propagation: {name}: expected a class derived from Rule, with @dataclass(frozen=True) "
                f"below @propagation_rule, got {getattr(rule, '__name__', repr(rule))}"
            )
        expect_free_names([f.name for f in fields(rule)], f"algorithm.propagation: {name}")
        for f in fields(rule):
            low, high = f.metadata.get("ge", -np.inf), f.metadata.get("le", np.inf)
            if f.metadata and not low <= f.default <= high:
                order = f"{low} <= {f.default!r} <= {high}"
                raise ConfigError(f"{rule.__name__}.{f.name}: expected at_least <= default <= at_most, got {order}")
        rule.name = name
        PROPAGATION_RULES.declare(name, rule, rule)
        return rule

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


RULE = "rule"
"""The key of the rule's name in `algorithm.propagation`."""


def expect_free_names(options: Iterable[str], key: str) -> None:
    """Raise ConfigError for an option of a rule with the name of a property of rules."""
    for option in options:
        if option == RULE or hasattr(Rule, option):
            raise ConfigError(
                f"{key}: the field {option!r} has a meaning of its own: rename the option, or declare the property as "
                "ClassVar"
            )


def make_rule(spec: str | Mapping[str, Any] | Rule) -> Rule:
    """A rule: as it is, from its name, or from `{rule: NAME, option: value}`. Checks no number.

    Raises ConfigError for an unknown rule, and for an option that it does not have.
    """
    if isinstance(spec, Rule):
        return spec
    options: dict[Any, Any] = dict(spec) if isinstance(spec, Mapping) else {RULE: spec}
    name = options.pop(RULE, None)
    try:
        return PROPAGATION_RULES[name](**options)
    except TypeError as error:
        raise ConfigError(f"algorithm.propagation: {name}: {error}") from error


def _expect_choices(options: Any, key: str) -> None:
    """Raise ConfigError for an option with a value outside of its choices."""
    for name, hint in get_type_hints(type(options)).items():
        choices, value = get_args(hint), getattr(options, name)
        if get_origin(hint) is Literal and value not in choices:
            expected = f"expected one of {', '.join(choices)}, got {value!r}{did_you_mean(value, choices)}"
            raise ConfigError(f"{key}.{name}: {expected}")


@dataclass(frozen=True)
class CreditOptions:
    """The options of `assign`."""

    propagation: Rule = "own"  # type: ignore[assignment]  # `__post_init__` makes the rule
    """The propagation rule: `own`, `identical`, `uniform`, `discounted`, `threshold`, `posterior`, `calibrated`, a
    registered rule, or `file.py:Class`; with options `{rule: NAME, option: value}`."""
    reward_decomp: bool = True
    """Whether sub-rewards enter credit. False: outcome only, and no gate closes."""
    decomp_granularity: Literal["trajectory", "agent", "step", "token_level"] = "step"
    """`reward.decomp_granularity`. `trajectory`: outcome only, as without `reward_decomp`; `agent`: an agent's scored
    steps share their mean; `step`: one sub-reward for each step; `token_level`: scores may differ between tokens."""
    adv_estimator: str = "grpo"
    """The advantage estimator: `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gae`,
    `relative`, a registered estimator, or `file.py:function`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's spread, as in GRPO; false: Dr. GRPO (arXiv 2503.20783)."""
    group_by: Literal["task", "task_agent", "task_agent_turn", "task_agent_state", "agent", "agent_turn"] = "agent_turn"
    """The key of steps with a common baseline: `task`, `task_agent`, `task_agent_turn`, `task_agent_state` (the same
    prompt), or, across the batch, `agent`, `agent_turn`. A rule that compares trajectories itself has `task`."""
    max_version_lag: int = option(0, at_least=0)
    """Groups may mix steps that were sampled at most this many versions before the policy's newest step in the
    batch, as in asynchronous training. Older steps form groups of their own version."""
    gamma: float = share(0.99)
    """Discount per step of propagation, from 0 to 1."""
    lam: float = share(0.95)
    """lambda of GAE per step, from 0 to 1; only `gae` and the rule `gagpo` read it."""
    gamma_token: float = share(1.0)
    """Discount per token inside a step, from 0 to 1: for `gae`, `reinforce_plus_plus` and token scores. verl's `gamma`.
    """
    lam_token: float = share(1.0)
    """lambda of GAE per token inside a step, from 0 to 1. verl's `lam`."""
    mask_truncated: bool = False
    """Leave truncated trajectories out of training."""
    shadow: CreditOptions | None = None
    """Options of a second assignment that is reported but not trained on, such as `{propagation: threshold}`. It takes
    all other options from the first, also those of the rule, if its own rule has them."""

    estimator: Estimator = field(init=False, repr=False, compare=False)
    """The record of the estimator in force."""
    decomposed: bool = field(init=False, repr=False, compare=False)
    """Whether sub-rewards enter credit."""
    pays_by_token: bool = field(init=False, repr=False, compare=False)
    """Whether a step's score is paid token by token."""

    def __post_init__(self) -> None:
        """Make the rule. Raises ConfigError for unknown names, and for a rule and an estimator that do not fit."""
        rule, estimator = make_rule(self.propagation), ADVANTAGE_ESTIMATORS[self.adv_estimator]
        decomposed = self.reward_decomp and self.decomp_granularity != "trajectory"
        by_token = self.decomp_granularity == "token_level" and decomposed and rule.pays_tokens
        group_by = "task" if rule.relative else self.group_by
        made = {"propagation": rule, "estimator": estimator, "decomposed": decomposed, "pays_by_token": by_token}
        for name, value in {**made, "group_by": group_by}.items():
            object.__setattr__(self, name, value)
        _expect_choices(self, "algorithm")
        _expect_choices(rule, "algorithm.propagation")
        if rule.relative != estimator.relative:
            names = [name for name, entry in ADVANTAGE_ESTIMATORS.loaded().items() if entry.relative == rule.relative]
            how = "compares trajectories itself" if rule.relative else "compares no trajectories"
            raise ConfigError(
                f"algorithm.adv_estimator: propagation {rule} {how}: expected {' or '.join(sorted(names))}, "
                f"got {self.adv_estimator}"
            )
        if self.decomp_granularity == "token_level" and rule.pays_scores and not rule.pays_tokens:
            raise ConfigError(
                f"algorithm.decomp_granularity: {rule} gives a step one value: expected step, agent or trajectory, "
                "got token_level; or set another rule, such as propagation: own"
            )
        if self.shadow is not None and self.shadow.estimator.critic and not estimator.critic:
            raise ConfigError(
                f"algorithm.shadow.adv_estimator: expected an estimator without a critic beside {self.adv_estimator}, "
                f"which has none, got {self.shadow.adv_estimator}"
            )


# ---- stages ---


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """Sub-rewards and outcomes of S steps, with the steps that were scored, failed or masked."""

    batch: TrajectoryBatch = field(repr=False)
    sub_reward_S: Floats
    """[S] r_t in [0, 1], NaN for none. If `failed_S`: its substitute, a mean over other trajectories."""
    scored_S: Bools
    """[S] every matching function of positive weight gave a score."""
    failed_S: Bools
    """[S] at least one matching function of positive weight failed or timed out."""
    outcome_S: Floats
    """[S] R of the step's agent in its original units: its own outcome, else the common one; 0 without one."""
    known_S: Bools
    """[S] whether that outcome is known. An unscored truncated trajectory has outcome 0; a masked step has none."""
    masked_S: Bools
    """[S] left out of training, with the trajectory, or because the outcome of the step's agent failed."""
    masked_N: Bools
    """[N] trajectories left out of training as a whole."""
    stratum_S: Ints
    """[S] the stratum in force, -1 for none. A step without an own score has none, whatever its label."""
    token_score_T: Floats | None = field(default=None, repr=False)
    """[T] rho: the weighted mean of the scores at each token, 0 for steps that are not scored; None unless paid by
    token."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Values that a rule learned from this batch and earlier ones, for S steps."""

    score_weight_S: Floats | None = None
    """[S] the weight of the step's sub-reward, set by the rule in place of `w_r`."""
    score_spread_S: Floats | None = None
    """[S] the spread of the sub-rewards in the step's group; 0: all equal, or none."""
    outcome_spread_S: Floats | None = None
    """[S] the spread of the outcomes likewise."""
    harmless_S: Floats | None = None
    """[S] the probability that the step did no harm; NaN: none."""
    if_wrong_S: Floats | None = None
    """[S] the sub-reward of the step if it is wrong."""
    facts: dict[str, Any] = field(default_factory=dict, repr=False)
    """Slopes and rates as plain numbers, for the record of a training step."""
    history: History | None = field(default=None, repr=False)
    """The history with this batch, for the next one; None if read from a file."""


@dataclass(frozen=True, slots=True, eq=False)
class RuleInput:
    """The input of a rule."""

    batch: TrajectoryBatch
    rewards: Rewards
    options: CreditOptions
    threshold: Threshold
    """The thresholds of a rule with gates."""
    fit: Fit | None = None
    """The record of the rule's `fit`."""


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The credit of S steps: `own + received + shared`. A rule without flow needs the first four fields."""

    formulas: ClassVar[Formulas] = {
        "credit": ("own + received + shared", "own + received + shared - paid"),  # the second: paid token by token
        "passed": ("own + received",),
    }
    own_S: Floats
    """[S] e_t: the step's own reward, with its part of the outcome where that goes to the answer."""
    received_S: Floats
    """[S] credit received from children, discounted."""
    shared_S: Floats
    """[S] credit that is the same at all steps of an agent in the trajectory: the outcome, or a global reward."""
    reached_S: NDArray[np.uint8]
    """[S] bits SIGNAL (a score, the outcome, or credit from a child with a signal reached the step) and OUTCOME (the
    outcome did). A step can have a signal and credit 0: at origin 1, every right step has 0."""
    paid_S: Floats | None = None
    """[S] the part of `own_S` that is paid for the step's sub-reward; None if the rule does not tell it apart."""
    gate_S: Floats | None = None
    """[S] the factor on credit passed to parents, in [0, 1]; None: the rule moves no credit."""
    withheld_S: Floats | None = None
    """[S] credit withheld by the step's gate from its parents; None for a rule without gates."""
    threshold_S: Floats | None = None
    """[S] theta_t, the threshold in force; None for a rule without gates."""
    gate_open_S: Bools | None = None
    """[S] unscored, with a sub-reward above the threshold, or `forced_open_S`; None for a rule without gates."""
    forced_open_S: Bools | None = None
    """[S] opened below the threshold, to keep the floor on the share of open gates; None for a rule without gates."""
    frozen_S: Bools | None = None
    """[S] steps that the rule does not train, see `Rule.why_frozen`; None: no such step."""
    misled_S: Bools | None = None
    """[S] steps whose credit lacks the outcome of a later answer step, because that agent's outcome failed; None: none.
    They are not trained."""
    total_S: Floats = field(default_factory=partial(np.empty, 0))
    """[S] c_t: own + received + shared, which `assign` adds up."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The steps in the loss, and the group that each is compared with. Steps without one have NaN, -1, 0 or False."""

    trained_S: Bools
    """[S] whether the step is trained; the others are in no baseline and have advantage 0."""
    group_S: Ints
    """[S] id of the group behind the baseline, unique within the batch; -1: none."""
    level_S: Ints
    """[S] index into LEVEL_NAMES: the key of that group, after any back-off; -1: none."""
    group_size_S: Ints
    """[S] number of trajectories in that group; 0: none."""
    spread_S: Floats
    """[S] the square root of `n/(n-1) * mean over trajectories of mean_t (c - m)^2`; NaN: none."""
    tied_S: Bools
    """[S] whether all credits of the group are the same: `max - min <= 1e-9 * max(1, |m|)`. It teaches nothing."""
    singletons: int
    """Number of groups of one trajectory at the level `group_by`, whose steps backed off."""
    mean_S: Floats = field(default_factory=partial(np.empty, 0), repr=False, metadata=NOT_STORED)
    """[S] m: the mean over trajectories of each trajectory's mean."""
    others_S: Floats = field(default_factory=partial(np.empty, 0), repr=False, metadata=NOT_STORED)
    """[S] the same without the step's own trajectory."""


@dataclass(frozen=True, slots=True, eq=False)
class EstimatorInput:
    """The input of an estimator."""

    rewards: Rewards
    options: CreditOptions
    credit: Credit
    """The terms of c_t, and the gates they passed."""
    credit_S: Floats
    """[S] c_t, without the part paid token by token (`decomp_granularity: token_level`)."""
    reward_S: Floats
    """[S] own + shared: the part of credit_S that enters at the step itself."""
    groups: Groups
    """The groups. For an estimator registered with `grouped=False`, no step has one."""
    values_T: Floats | None = None
    """[T] the critic's values; None without a critic."""
    token_reward_T: Floats | None = None
    """[T] rewards paid token by token, for an estimator with a critic."""

    @property
    def batch(self) -> TrajectoryBatch:
        """The batch."""
        return self.rewards.batch


@dataclass(frozen=True, slots=True)
class CriticTerms:
    """The terms of `gae`'s advantages, before whitening.

    The advantages of tokens are computed again when needed, which costs less than keeping them.
    """

    values_T: Floats
    """[T] V_j: the critic's values. Not read at tokens that were not sampled."""
    token_reward_T: Floats
    """[T] rewards paid token by token; may be empty."""
    reward_S: Floats
    """[S] the reward at the step's last sampled token."""
    down_S: Floats
    """[S] the part received from the children's values and advantages."""
    first_S: Floats
    """[S] A_j at the step's first sampled token; 0 if it has none."""
    kept_S: Floats | None = None
    """[S] the pay for its own score in the worth of a step, which its parents do not get; None: gates pass it on."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The output of an estimator. The caller sets the advantage of masked, tied and ungrouped steps to 0."""

    baseline_S: Floats
    """[S] the value to subtract from credit."""
    divisor_S: Floats | None = None
    """[S] the value to divide by; None: 1. Must be None for a whitened estimator: whitening sets the divisor."""
    unscaled_T: Floats | None = None
    """[T] token values that replace credit, if the tokens of a step differ."""
    moments_S: Floats | None = None
    """[S, 5] count, mean, sum of squared differences, minimum and maximum over each step's tokens, if they differ;
    not needed with `unscaled_T`."""
    shift_S: Floats | None = None
    """[S] set by whitening: the mean that is subtracted in addition to the baseline."""
    critic: CriticTerms | None = None
    """The terms of `gae`, whose tokens differ without `unscaled_T`."""


@dataclass(frozen=True, slots=True, eq=False)
class Advantage:
    """The advantages of S steps and their tokens, with the terms of the formula.

    With a critic or token scores the tokens of a step differ, and `advantage_S` belongs to its first trained token.
    """

    learns_S: Bools
    """[S] trained, with a group that is not tied: the advantage is not exactly 0."""
    weight_S: Floats
    """[S] the weight that balances strata; 1 without strata."""
    baseline_S: Floats
    """[S] the value subtracted from credit; NaN: none."""
    shift_S: Floats
    """[S] the mean that whitening subtracts in addition to the baseline; 0 without whitening."""
    divisor_S: Floats
    """[S] the divisor of the difference; 1 without scaling."""
    advantage_S: Floats
    """[S] the input of the loss, weight included."""
    advantage_T: Floats | None = field(default=None, repr=False)
    """[T] the same for each response token, with token scores; else None. `Assignment.token_advantages` returns it in
    all cases."""
    unscaled_T: Floats | None = field(default=None, repr=False)
    """[T] token values that replace credit if the tokens of a step differ; else None."""
    token_term_T: Floats | None = field(default=None, repr=False)
    """[T] the term added by token scores, before the weight; None without `token_level`."""
    critic: CriticTerms | None = field(default=None, repr=False)
    """The terms of an estimator with a critic; else None."""

    @property
    def factors(self) -> Factors:
        """The terms of the formula."""
        return self.weight_S, self.baseline_S, self.shift_S, self.divisor_S
