"""Options of credit that name a file, `file.py:name`, and the recorded properties of the rule or estimator behind them.

Reads no file: the caller loads them. The properties alone explain recorded credit, so that a run can be read without
running its code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Literal

from pydantic import StrictBool

from creditflow._utils.sections import checked
from creditflow.credit.records import (
    ADVANTAGE_ESTIMATORS,
    PROPAGATION_RULES,
    CreditOptions,
    Estimator,
    Rule,
    expect_free_names,
)
from creditflow.credit.thresholds.base import THRESHOLDS, Threshold
from creditflow.errors import ConfigError
from creditflow.registry import Registry, is_file_reference

REGISTRIES: tuple[Registry[Any], ...] = (PROPAGATION_RULES, ADVANTAGE_ESTIMATORS, THRESHOLDS)
Change = Callable[[Registry[Any], str, str], str]
"""Takes the registry, the option's key and the reference; returns the new reference."""


def change_references(options: Mapping[str, Any], change: Change, section: str = "algorithm") -> dict[str, Any]:
    """Options of credit by name, with `change` applied to each reference to a file, also those of the shadow."""
    changed = dict(options)
    spec, key = changed.get("propagation"), f"{section}.propagation"
    if is_file_reference(spec):
        changed["propagation"] = change(PROPAGATION_RULES, key, spec)
    elif isinstance(spec, Mapping):
        changed["propagation"] = rule = dict(spec)
        if is_file_reference(reference := rule.get("rule")):
            rule["rule"] = change(PROPAGATION_RULES, key, reference)
        if "theta" in rule:
            rule["theta"] = _threshold(rule["theta"], change, f"{key}.theta.kind")
    if is_file_reference(reference := changed.get("adv_estimator")):
        changed["adv_estimator"] = change(ADVANTAGE_ESTIMATORS, f"{section}.adv_estimator", reference)
    if "propagation_threshold" in changed:
        theta, flat = changed["propagation_threshold"], f"{section}.propagation_threshold.kind"
        changed["propagation_threshold"] = _threshold(theta, change, flat)
    if isinstance(shadow := changed.get("shadow"), Mapping):
        changed["shadow"] = change_references(shadow, change, f"{section}.shadow")
    return changed


def _threshold(theta: Any, change: Change, key: str) -> Any:
    if isinstance(theta, Mapping) and is_file_reference(kind := theta.get("kind")):
        return {**theta, "kind": change(THRESHOLDS, key, kind)}
    return theta


Recorded = dict[str, dict[str, dict[str, Any]]]
"""Properties by the key of the registry, the reference, and the field."""


def spelled_out(options: CreditOptions) -> dict[str, Any]:
    """The options as keys of a recipe, without the shadow: plain values."""
    general = {f.name: getattr(options, f.name) for f in fields(CreditOptions) if f.init and f.name not in _NESTED}
    return {"propagation": options.propagation.spec(), **general}


_NESTED = ("propagation", "shadow")


def recorded_properties(options: CreditOptions) -> Recorded:
    """The properties of every rule, estimator and threshold that `options` name by file, for the record of a run."""
    properties: Recorded = {}

    def note(registry: Registry[Any], key: str, reference: str) -> str:
        properties.setdefault(registry.key, {})[reference] = _properties(registry, reference, options)
        return reference

    change_references(spelled_out(options), note)
    return properties


def _is_arithmetic(formula: str) -> bool:
    """Whether a formula uses only numbers, names and + - * /, in at most 200 characters."""
    try:
        nodes = list(ast.walk(ast.parse(formula, mode="eval"))) if len(formula) <= 200 else [None]
    except (SyntaxError, ValueError):
        return False
    numbers = [type(node.value) in (int, float) for node in nodes if isinstance(node, ast.Constant)]
    return all(numbers) and all(isinstance(node, _ARITHMETIC) for node in nodes)


_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, *_OPERATORS, ast.Constant, ast.Name, ast.Load)


@dataclass
class _RuleProperties:
    """The recorded class variables of a rule, the names of its options, and its formulas under them."""

    options: list[str] = field(default_factory=list)
    formulas: dict[str, list[str]] = field(default_factory=dict)
    flow: Literal["nothing", "formula", "unknown"] = "unknown"
    pays_scores: StrictBool = False
    pays_tokens: StrictBool = False
    shares: StrictBool = False
    relative: StrictBool = False
    gated: StrictBool = False


_FLAGS = tuple(f.name for f in fields(Estimator) if isinstance(f.default, bool))
"""The properties of an estimator that are recorded."""


def _properties(registry: Registry[Any], reference: str, options: CreditOptions) -> dict[str, Any]:
    entry = registry[reference]
    if registry is PROPAGATION_RULES:
        place = f"{registry.key}: {reference}: formulas"
        formulas = checked(dict[str, list[str]], options.propagation.formulas(options), place)
        given = {"options": [f.name for f in fields(entry)], "formulas": formulas}
        return {f.name: given.get(f.name, getattr(entry, f.name, None)) for f in fields(_RuleProperties)}
    return {} if registry.record is None else {name: getattr(entry, name) for name in _FLAGS}


def recall_properties(recorded: object) -> None:
    """Register recorded properties, so that a run can be read. Raises ConfigError for properties of another form.

    Such a rule or estimator can be explained. It assigns credit only after its file is loaded.
    """
    by_key = checked(Recorded, recorded, "recorded properties")
    for registry in REGISTRIES:
        for reference, properties in by_key.get(registry.key, {}).items():
            if is_file_reference(reference):
                key = f"recorded properties: {reference}"
                registry.recall(reference, _entry(registry, reference, properties, key))


def _entry(registry: Registry[Any], reference: str, properties: Mapping[str, Any], key: str) -> Any:
    def unloaded(*_: object) -> Any:
        raise ConfigError(f"{registry.key}: {reference}: its file is not loaded")

    if registry is PROPAGATION_RULES:
        members: dict[str, Any] = vars(checked(_RuleProperties, properties, key))
        expect_free_names(members["options"], key)
        options = [(name, Any, field(default=None)) for name in members.pop("options")]
        # `explain` evaluates formulas, and a run may be of unknown origin
        formulas = {term: tuple(filter(_is_arithmetic, texts)) for term, texts in members["formulas"].items()}
        members |= {"formulas": lambda *_: formulas, "name": reference, "credit": unloaded, "make_threshold": unloaded}
        try:
            return make_dataclass("RecordedRule", options, bases=(Rule,), namespace=members, frozen=True)
        except TypeError as error:
            raise ConfigError(f"{key}: {error}") from error
    if registry.record is None:
        return lambda team, **_: _UnloadedThreshold(unloaded)
    flags = checked(dict[str, StrictBool], {name: properties[name] for name in _FLAGS if name in properties}, key)
    return registry.record(**flags, estimate=unloaded)


@dataclass(slots=True)
class _UnloadedThreshold(Threshold):
    raise_error: Callable[..., Any]

    def theta(self, agent: str) -> float:
        return float(self.raise_error())
