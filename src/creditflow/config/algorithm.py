"""The section `algorithm`: the options of credit, the flat keys of the first recipes, and the choice of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from creditflow._utils.sections import Section, Text, checked, expected, options_model
from creditflow.config.rule_files import load_named_files
from creditflow.credit.records import PROPAGATION_RULES, RULE, CreditOptions, Rule
from creditflow.errors import ConfigError, did_you_mean
from creditflow.removed import removed_hint

KEY = "algorithm.propagation"
FLAT = {"propagation_threshold": "theta", "on_closed_gate": "on_closed_gate", "outcome_to": "outcome_to"}
"""Flat keys of `algorithm` -> the option of the rule that they set."""
CHOOSING = ("propagation", "threshold_share", *FLAT)
"""Keys of `algorithm` that choose the rule and its options."""
RENAMED = {"none": "own"}
"""Former names of rules -> their names."""
_DEFAULT = "own"


class FilterGroupsConfig(Section):
    """Dynamic sampling: replace tasks without a learning signal."""

    enable: bool = False
    """Leave out tasks whose rollouts all have the same outcome."""
    max_num_gen_batches: PositiveInt = 10
    """Maximum number of task batches to roll out for one training step."""


class RolloutCorrectionConfig(Section):
    """Importance weights for a sampler whose log-probs differ from the actor's, as in verl."""

    rollout_is: Literal["auto", "token", "sequence"] | None = "auto"
    """Weigh the loss of each token by the probability ratio of actor and sampler: of the `token`, or the product over
    its response (`sequence`). `auto`: `token` with `actor_rollout_ref.rollout.name: vllm`, else null. null: no weights.
    The built-in sampler computes with the actor's own weights and precision, so it needs none."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Upper limit of a weight (truncated importance sampling)."""


_LAMBDA = r"^\s*gae_lambda\s*=\s*(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"


class AlgorithmKeys(Section):
    """The keys of `algorithm` beside the general options of credit."""

    propagation: str | dict[str, Any] = "own"
    """The propagation rule, or `{rule: NAME, option: value}`."""
    preset: str | None = None
    """A published method by name. It sets options of credit, which the run prints; a key of the recipe that contradicts
    one of them is an error. See docs/concepts/published_rules.md."""
    propagation_threshold: float | dict[str, Any] | None = None
    """The same as `propagation: {rule: threshold, theta: ...}`."""
    threshold_share: bool | None = None
    """True/false: the same as `propagation: threshold/discounted`; contradicting it is an error."""
    on_closed_gate: Literal["cut", "freeze"] | None = None
    """The same option of the rule, for rules that have it."""
    outcome_to: Literal["all", "answer"] | None = None
    """The same option of the rule, for rules that have it."""
    error_minimization: Annotated[
        Annotated[dict[Literal["gae_lambda"], float], Field(min_length=1)]
        | Annotated[str, Field(pattern=_LAMBDA)]
        | None,
        expected("{gae_lambda: 0.95} or the string gae_lambda=0.95"),
    ] = None
    """`{gae_lambda: 0.95}` or `gae_lambda=0.95`: the same as `lam`."""
    shadow: dict[str, Any] | None = None
    """Options of a second assignment that is reported but not trained on, such as `{propagation: threshold}`. It takes
    all other options from the first, also those of the rule, if its own rule has them."""
    strata: Text | None = None
    """`file.py:function` that takes a step and returns a label (from the prompt alone) or None."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()

    def options(self) -> CreditOptions:
        """The options of credit. Raises ConfigError for a rule, an option of it or a value that does not exist."""
        general = {name: getattr(self, name) for name in _GENERAL}
        rule = checked_rule(self.propagation)
        options = CreditOptions(propagation=rule, **general)
        if options.estimator.critic and rule_options(self.propagation).get("outcome_to") == "all":
            raise ConfigError(
                f"algorithm.outcome_to: {options.adv_estimator} would count an outcome that is added to all steps once "
                "for each of them: expected answer, got all"
            )
        if self.shadow is None:
            return options
        try:
            shadow = _changed(options, self.shadow, is_shadow=True)
        except ConfigError as error:
            raise ConfigError(str(error).replace("algorithm.", "algorithm.shadow.", 1)) from None
        return CreditOptions(propagation=rule, shadow=shadow, **general)


_GENERAL = tuple(f.name for f in fields(CreditOptions) if f.init and f.name not in ("propagation", "shadow"))
if TYPE_CHECKING:
    AlgorithmConfig = AlgorithmKeys
else:
    AlgorithmConfig = options_model(CreditOptions, "AlgorithmConfig", AlgorithmKeys, ("propagation", "shadow"))


def checked_rule(spec: str | Mapping[str, Any]) -> Rule:
    """The rule with its options. Raises ConfigError for an unknown rule, an unknown option, or a wrong value."""
    options = rule_options(spec)
    if RULE not in options:
        raise ConfigError(f"{KEY}: expected a rule, or {{rule: NAME, option: value}}, got {dict(options)}")
    kind: Any = PROPAGATION_RULES[name := options.pop(RULE)]
    for option in options.keys() - {f.name for f in fields(kind)}:
        if _rules_with(option):
            raise ConfigError(f"{KEY}.{option}: {_lacking(name, option)}")
    values = checked(options_model(kind), options, KEY)
    rule: Rule = kind(**{f.name: getattr(values, f.name) for f in fields(kind)})
    rule.make_threshold()
    return rule


def rule_options(spec: Any) -> dict[str, Any]:
    """`{rule: NAME, option: value}` from a value of `algorithm.propagation`, with today's name of the rule."""
    options = dict(spec or {}) if spec is None or isinstance(spec, Mapping) else {RULE: spec}
    if isinstance(name := options.get(RULE), str):
        options[RULE] = RENAMED.get(name, name)
    return options


def rule_name(layers: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """The layer that chooses the rule, from 0, and the rule; -1 and the default if none does.

    `propagation_threshold` and `threshold_share` choose it if no layer sets `propagation`.
    """
    chosen: dict[str, tuple[int, str]] = {}
    for i, layer in enumerate(layers):
        if (name := rule_options(layer.get("propagation")).get(RULE)) is not None:
            chosen["propagation"] = i, name
        if (share := layer.get("threshold_share")) is not None:
            chosen["threshold_share"] = i, "threshold" if share else "discounted"
        if layer.get("propagation_threshold") is not None:
            chosen["propagation_threshold"] = i, "threshold"
    return next((chosen[key] for key in CHOOSING if key in chosen), (-1, _DEFAULT))


def chosen_rule(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`{rule: NAME, option: value}` from layers of keys of `algorithm`; later layers count more.

    A layer that sets another rule drops the options of lower layers, and their flat keys that it has no option for.
    Raises ConfigError for keys of the wrong type, and for keys that contradict one another.
    """
    for layer in layers:
        checked(AlgorithmConfig, {key: layer[key] for key in CHOOSING if key in layer}, "algorithm")
    rule_at, name = rule_name(layers)
    names = {f.name for f in fields(PROPAGATION_RULES[name])}
    rule, spec, flat = _DEFAULT, dict[str, Any](), dict[str, Any]()
    for i, layer in enumerate(layers):
        own = rule_options(layer.get("propagation"))
        if (named := own.pop(RULE, rule)) != rule:
            rule, spec = named, flat
        spec = merge_options(spec, own)
        share = layer.get("threshold_share")
        if share is not None and i >= rule_at and name != (meant := "threshold" if share else "discounted"):
            words = str(share).lower()
            raise ConfigError(f"algorithm.threshold_share: {words} means propagation {meant!r}, but {KEY} is {name!r}")
        for key, option in FLAT.items():
            if (value := layer.get(key)) is None:
                continue
            if option in names:
                if own.get(option, value) != value:
                    raise ConfigError(f"algorithm.{key}: {value!r}, but {KEY} sets {option} to {own[option]!r}")
                spec, flat = (merge_options(options, {option: value}) for options in (spec, flat))
            elif i >= rule_at:  # else of a recipe that this one extends with another rule
                raise ConfigError(f"algorithm.{key}: {_lacking(name, option)}")
    return {RULE: name, **spec}


def merge_options(before: Mapping[str, Any], after: Mapping[str, Any], name: str = RULE) -> dict[str, Any]:
    """`after` over `before`; none of `before` is kept if `after` has another `name`."""
    if after.get(name, before.get(name)) != before.get(name):
        return dict(after)
    nested = {
        key: merge_options(before[key], value, "kind")
        for key, value in after.items()
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping)
    }
    return {**before, **after, **nested}


def _rules_with(option: str) -> str:
    """The rules that have the option, in words; empty if none has."""
    rules = PROPAGATION_RULES.loaded().items()
    return " or ".join(sorted(name for name, rule in rules if option in {f.name for f in fields(rule)}))


def refuse_misplaced(keys: Iterable[str]) -> None:
    """Raise ConfigError for an option of rules among the keys of `algorithm`."""
    for key in keys:
        if key not in AlgorithmConfig.model_fields and not removed_hint(f"algorithm.{key}") and _rules_with(key):
            raise ConfigError(
                f"algorithm.{key}: expected it as an option of a rule, `propagation: {{rule: NAME, {key}: ...}}`, with "
                f"{_rules_with(key)}"
            )


def _lacking(rule: str, option: str) -> str:
    return f"the rule {rule} has no such option; leave it out, or set propagation: {_rules_with(option)}"


def credit_options(base: CreditOptions | None = None, /, **keys: Any) -> CreditOptions:
    """The options of credit from keys of `algorithm`, such as `propagation="threshold"` or `gamma=1.0`.

    `base`: options that the keys change; default: the defaults. Loads the files that the keys name, in the working
    directory if their paths are relative. Raises ConfigError as a recipe does.
    """
    return _changed(base, load_named_files(keys, Path()))


def expect_options(keys: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key outside the options of credit, and for a value of the wrong type."""
    refuse_misplaced(keys)
    names = {*AlgorithmConfig.model_fields} - {"preset", "strata", "filter_groups", "rollout_correction"}
    for key in keys:
        if key not in names:
            hint = removed_hint(f"algorithm.{key}") or did_you_mean(key, names)
            raise ConfigError(f"algorithm.{key}: expected an option of credit{hint}")
    checked(AlgorithmConfig, dict(keys), "algorithm")


def _changed(base: CreditOptions | None, keys: Mapping[str, Any], *, is_shadow: bool = False) -> CreditOptions:
    """`base` with `keys`. The rule of a shadow keeps the options of the first that it has, too."""
    expect_options(keys)
    layers: list[Mapping[str, Any]] = [keys]
    general = {name: keys[name] for name in keys if name not in CHOOSING}
    if base is not None:
        rule, (at, chosen) = base.propagation, rule_name([keys])
        name = chosen if is_shadow and at == 0 else rule.name
        defaults = {f.name: f.default for f in fields(PROPAGATION_RULES[rule.name])}
        options = {f.name: getattr(rule, f.name) for f in fields(PROPAGATION_RULES[name]) if hasattr(rule, f.name)}
        set_ones = {name: value for name, value in options.items() if value != defaults.get(name, MISSING)}
        layers = [{"propagation": {RULE: name, **set_ones}}, keys]
        general = {**{name: getattr(base, name) for name in _GENERAL}, **general}
    values = {**general, "propagation": chosen_rule(layers)}
    section: AlgorithmKeys = checked(AlgorithmConfig, values, "algorithm")
    return with_lambda(section, "lam" in keys).options()


def with_lambda(section: AlgorithmKeys, is_set: bool) -> AlgorithmKeys:
    """Rewrite `error_minimization` to `lam`. Raises ConfigError if `lam` is set to another value."""
    if (alias := section.error_minimization) is None:
        return section
    lam = float(alias.partition("=")[2]) if isinstance(alias, str) else alias["gae_lambda"]
    if is_set and section.options().lam != lam:
        raise ConfigError(
            f"algorithm.error_minimization: means lam {lam}, but algorithm.lam is {section.options().lam}"
        )
    return checked(AlgorithmConfig, {**section.model_dump(), "lam": lam, "error_minimization": None}, "algorithm")
