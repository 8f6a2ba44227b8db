"""The options of credit assignment: keys of `algorithm.*`, defaults, limits and contradictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from creditflow.credit.groups import LEVELS
from creditflow.credit.records import (
    ADVANTAGE_ESTIMATORS,
    GATE_OPTIONS,
    PROPAGATION_RULES,
    SCORE_OPTIONS,
)
from creditflow.credit.thresholds.base import is_number, make_threshold
from creditflow.errors import ConfigError, did_you_mean
from creditflow.registry import Registry
from creditflow.removed import removed_hint


@dataclass
class CreditOptions:
    """The keys of `algorithm.*` that determine credit. The types are plain ones, as those of a recipe."""

    reward_decomp: bool = True
    """Whether sub-rewards enter credit. False: outcome only, and no gate closes."""
    propagation: str = "posterior"
    """The propagation rule: `identical`, `uniform`, `none`, `discounted`, `threshold`, `posterior`, a registered rule,
    or `file.py:function`. A recipe that sets no rule, but an option that `posterior` cannot use, gets `threshold` for
    options of gates, and `none` for `score_weight`, `score_model`, `w_m` and
    `decomp_granularity: token_level`."""
    propagation_threshold: Any = 0.5
    """theta: a gate is open if the sub-reward is above it. Below 0 all gates are open; from 1 on, those of scored steps
    are closed. A number, or `{kind: fixed | tuned | noise | quantile | file.py:Class, ...}`, see
    `creditflow.credit.thresholds`."""
    decomp_granularity: str = "step"
    """`reward.decomp_granularity`. `trajectory`: outcome only, as without `reward_decomp`; `agent`: an agent's scored
    steps share their mean; `step`: one sub-reward for each step; `token_level`: scores may differ between tokens."""
    adv_estimator: str = "grpo"
    """The advantage estimator: `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gae`, a
    registered estimator, or `file.py:function`."""
    score_weight: str = "fixed"
    """The weight of a step's own reward. `fixed`: `w_r`. `calibrated`: `w_r` times the share of the outcome that
    is lost with the score, per agent, estimated from other groups and earlier batches; with few data, near `w_r`."""
    score_model: str = "none"
    """A model of scores and outcome that adds to a step's own reward. `noisy_and`: `w_m` times the probability that the
    step did harm, given all scores and the outcome, is charged to each scored step. `none`: no model."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's spread, as in GRPO; false: Dr. GRPO (arXiv 2503.20783)."""
    group_by: str = "agent_turn"
    """The key of steps with a common baseline: `task`, `task_agent`, `task_agent_turn`, `task_agent_state` (the same
    prompt), or, across the batch, `agent`, `agent_turn`."""
    max_version_lag: int = 0
    """Groups may mix steps that were sampled at most this many versions before the policy's newest step in the
    batch, as in asynchronous training. Older steps form groups of their own version."""
    gamma: float = 0.99
    """Discount per step of propagation, from 0 to 1."""
    lam: float = 0.95
    """lambda of GAE per step, from 0 to 1; only `gae` reads it."""
    gamma_token: float = 1.0
    """Discount per token inside a step, from 0 to 1: for `gae`, `reinforce_plus_plus` and token scores. verl's `gamma`.
    """
    lam_token: float = 1.0
    """lambda of GAE per token inside a step, from 0 to 1. verl's `lam`."""
    outcome_to: str = "auto"
    """`all`: the outcome is added to every step's credit, neither discounted nor gated. `answer`: it is added to the
    own reward of the answer steps, and flows upstream from there. `auto`: `answer` for the rule `posterior`, whose own
    rewards contain the outcome, and for estimators that refuse `all`; else `all`."""
    sub_reward_origin: float = 1.0
    """b in `w_r * (r - b)`, from 0 to 1. 1 charges for wrong steps; 0 pays for right ones, including needless ones."""
    w_r: float = 1.0
    """Weight of sub-rewards, at least 0."""
    w_o: float = 1.0
    """Weight of the outcome, at least 0."""
    w_m: float = 0.3
    """Weight of the probability of harm under `score_model`, at least 0."""
    shared_reward: str = "outcome"
    """The credit given by `identical` and `uniform`: `outcome`, or `outcome_plus_mean_sub_reward`, which contains the
    same information as the other rules' credit."""
    on_closed_gate: str = "cut"
    """The effect of a closed gate. `cut`: no credit passes. `freeze`: also, the steps upstream of the failure do not
    learn from this trajectory."""
    mask_truncated: bool = False
    """Leave truncated trajectories out of training."""
    step_weight: float = 1.0
    """Weight of the part of a step or an agent, in published rules that add one to the part of the whole trajectory."""
    episode_weight: float = 1.0
    """Weight of the part of the whole trajectory, in those rules."""
    value_prior: float = 1.0
    """`gagpo`: the number of steps that the mean of the same agent and turn counts for in the value of a state. 0: the
    mean of equal states alone."""

    shadow: Any = None
    """Options of a second assignment that is reported but not trained on, such as `{propagation: threshold}`."""

    def validate(self) -> None:
        """Raises ConfigError for the first invalid option: the key, the expected and the actual value."""
        for key, registry in _REGISTRIES.items():
            if (value := getattr(self, key)) not in registry:  # only an error needs the names, which are read from disk
                _expect(False, key, " or ".join(registry.names()), value, registry.hint(value))
        for key, names in _CHOICES.items():
            if not isinstance(value := getattr(self, key), str) or value not in names:
                hint = removed_hint(f"algorithm.{key}", value) or did_you_mean(value, names)
                _expect(False, key, " or ".join(names), value, hint)
        for key in _BOOLS:
            value = getattr(self, key)
            _expect(isinstance(value, bool), key, "true or false", value)
        for key, (low, high, words) in NUMBERS.items():
            value = getattr(self, key)
            _expect(is_number(value) and low <= value <= high, key, words, value)
        lag = self.max_version_lag
        whole = isinstance(lag, int) and not isinstance(lag, bool) and lag >= 0
        _expect(whole, "max_version_lag", "a whole number of at least 0", lag)
        make_threshold(self.propagation_threshold)
        for key, message in self._contradictions():
            raise ConfigError(f"algorithm.{key}: {message}")
        if self.shadow is not None:
            try:
                shadowed = self.shadowed()
                shadowed.validate()
                replace(shadowed, shadow=None).refuse_ignored(self.shadow)
            except ConfigError as error:
                message = str(error)
                if not message.startswith("algorithm.shadow"):
                    message = message.replace("algorithm.", "algorithm.shadow.", 1)
                raise ConfigError(message) from None

    def resolved(self) -> CreditOptions:
        """The same options with a definite `outcome_to`. Rules receive these options."""
        if self.outcome_to != "auto":
            return self
        in_own = self.pays_expected_score or self._outcome_to_answer_alone()
        return replace(self, outcome_to="answer" if in_own else "all")

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """(key, message) for every contradiction between options."""
        estimator, rule = ADVANTAGE_ESTIMATORS[self.adv_estimator], PROPAGATION_RULES[self.propagation]
        models, by_token = self.score_model != "none", self.decomp_granularity == "token_level"
        if self.outcome_to == "all" and self._outcome_to_answer_alone():
            message = f"{self.adv_estimator} would count an outcome that is added to all steps once for each of them"
            yield "outcome_to", f"{message}: expected answer, got all"
        if models and rule.relative:
            message = f"{self.propagation} compares scores and outcomes itself: expected score_model none"
            yield "score_model", message
        if by_token and (models or self.score_weight == "calibrated"):
            message = "gives a step one value: expected decomp_granularity step or agent, got token_level"
            yield "score_model" if models else "score_weight", message
        if by_token and rule.expects:
            message = f"{self.propagation} gives a step one value: expected step or agent, got token_level"
            yield "decomp_granularity", f"{message}; or set another rule, such as propagation: none"
        if rule.relative and not estimator.relative:
            expected = f"expected {' or '.join(_relative(ADVANTAGE_ESTIMATORS))}, got {self.adv_estimator}"
            yield "adv_estimator", f"{self.propagation} compares trajectories itself: {expected}"
        if estimator.relative and not rule.relative:
            expected = "expected a propagation rule that compares trajectories itself"
            message = f"{expected} ({', '.join(_relative(PROPAGATION_RULES))}), got {self.propagation}"
            yield "adv_estimator", f"{self.adv_estimator} has no baseline: {message}"
        if rule.relative and self.group_by != "task":
            message = f"{self.propagation} compares the steps of a task in its own groups: expected task"
            yield "group_by", f"{message}, got {self.group_by}"
        if rule.relative and by_token:
            message = "compares whole steps: expected step, agent or trajectory, got token_level"
            yield "decomp_granularity", f"{self.propagation} {message}"

    def _outcome_to_answer_alone(self) -> bool:
        """Whether rule and estimator require `outcome_to: answer`: a critic counts a shared outcome once per step."""
        return ADVANTAGE_ESTIMATORS[self.adv_estimator].critic and PROPAGATION_RULES[self.propagation].pays_own

    def ignored(self) -> dict[str, tuple[str, ...]]:
        """Options without effect, each with the options that cause this."""
        unread: dict[str, tuple[str, ...]] = {}
        if self.score_model == "none":
            unread["w_m"] = ("score_model",)
        if not self.decomposed:  # no score closes a gate or is paid
            unread |= dict.fromkeys((*GATE_OPTIONS, *SCORE_OPTIONS), ("reward_decomp", "decomp_granularity"))
        unread |= dict.fromkeys(PROPAGATION_RULES[self.propagation].without_effect, ("propagation", "threshold_share"))
        if self.outcome_to != "answer":  # the behaviour of the sharing rules
            unread.pop("outcome_to", None)
        if self.shadow is not None:  # a second rule starts from the same options
            unread_by_shadow = replace(self.shadowed(), shadow=None).ignored()
            unread = {name: causes for name, causes in unread.items() if name in unread_by_shadow}
        return unread

    def why_ignored(self, name: str, causes: tuple[str, ...]) -> str:
        """The message for an option without effect. `causes`: its entry in `ignored`."""
        cause = "reward_decomp" if "reward_decomp" in causes and not self.reward_decomp else causes[0]
        if cause == "reward_decomp" and self.reward_decomp:
            cause = "decomp_granularity"
        value = getattr(self, cause)
        return f"algorithm.{name}: has no effect with {cause}: {str(value).lower() if value is False else value}"

    def reader_of(self, name: str, causes: tuple[str, ...]) -> str:
        """Advice on giving an ignored option an effect."""
        if "score_model" in causes:
            return "set score_model: noisy_and"
        if "propagation" not in causes:
            return "use sub-rewards"
        readers = [rule for rule, record in PROPAGATION_RULES.loaded().items() if name not in record.without_effect]
        return f"set propagation: {' or '.join(readers)}"

    def refuse_ignored(self, names: Iterable[str]) -> None:
        """Raises ConfigError for the first option of `names` without effect; `names`: options set together."""
        ignored = self.ignored()
        for name in names:
            if (causes := ignored.get(name)) is not None:
                why, how = self.why_ignored(name, causes), self.reader_of(name, causes)
                raise ConfigError(f"{why}; leave it out, or {how}")

    @property
    def decomposed(self) -> bool:
        """Whether sub-rewards enter credit."""
        return self.reward_decomp and self.decomp_granularity != "trajectory"

    @property
    def pays_expected_score(self) -> bool:
        """Whether expected sub-rewards enter credit in place of sub-rewards (`creditflow.credit.posteriors`)."""
        return self.decomposed and self.w_r > 0 and PROPAGATION_RULES[self.propagation].expects

    def shadowed(self) -> CreditOptions:
        """The shadow's options. Raises ConfigError for unknown keys and for options that a shadow cannot have."""
        if not isinstance(self.shadow, Mapping):
            raise ConfigError(f"algorithm.shadow: expected options such as {{propagation: none}}, got {self.shadow!r}")
        names = {f.name for f in fields(CreditOptions)} - {"shadow"}
        for key in self.shadow:
            if key not in names:
                hint = removed_hint(f"algorithm.{key}") or did_you_mean(str(key), names)
                raise ConfigError(f"algorithm.shadow.{key}: expected an option of credit{hint}")
        shadowed = replace(self, **{"shadow": None, **self.shadow})
        if ADVANTAGE_ESTIMATORS[shadowed.adv_estimator].critic and not ADVANTAGE_ESTIMATORS[self.adv_estimator].critic:
            raise ConfigError(
                f"algorithm.shadow.adv_estimator: expected an estimator without a critic beside {self.adv_estimator}, "
                f"which has none, got {shadowed.adv_estimator}"
            )
        return shadowed


_BOOLS = ("reward_decomp", "norm_adv_by_std_in_grpo", "mask_truncated")
_LARGEST = 1e100
"""Upper bound of weights: larger values are typing errors, and would overflow in the variance."""
_UNIT = (0.0, 1.0, "a number from 0 to 1")
_WEIGHT = (0.0, _LARGEST, "a finite number of at least 0")
NUMBERS: dict[str, tuple[float, float, str]] = {
    "gamma": _UNIT,
    "lam": _UNIT,
    "gamma_token": _UNIT,
    "lam_token": _UNIT,
    "sub_reward_origin": _UNIT,
    "w_r": _WEIGHT,
    "w_o": _WEIGHT,
    "w_m": _WEIGHT,
    "step_weight": _WEIGHT,
    "episode_weight": _WEIGHT,
    "value_prior": _WEIGHT,
}
_REGISTRIES: dict[str, Registry[Any]] = {"propagation": PROPAGATION_RULES, "adv_estimator": ADVANTAGE_ESTIMATORS}
_CHOICES: dict[str, tuple[str, ...]] = {
    "group_by": tuple(LEVELS),
    "outcome_to": ("auto", "all", "answer"),
    "shared_reward": ("outcome", "outcome_plus_mean_sub_reward"),
    "score_weight": ("fixed", "calibrated"),
    "score_model": ("none", "noisy_and"),
    "decomp_granularity": ("trajectory", "agent", "step", "token_level"),
    "on_closed_gate": ("cut", "freeze"),
}


def choices() -> dict[str, tuple[str, ...]]:
    """The possible values of options that are names, with the installed rules and estimators."""
    return {key: registry.names() for key, registry in _REGISTRIES.items()} | _CHOICES


def _relative(registry: Registry[Any]) -> list[str]:
    """The names of the rules or estimators for which credit is an advantage."""
    return [name for name, entry in registry.loaded().items() if entry.relative]


def _expect(holds: bool, key: str, expected: str, value: object, hint: str = "") -> None:
    if not holds:
        raise ConfigError(f"algorithm.{key}: expected {expected}, got {value!r}{hint}")
