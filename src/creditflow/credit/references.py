"""Options of credit that name a file, `file.py:name`, and the recorded properties of the rule or estimator behind them.

Reads no file: the caller loads them. The properties alone explain recorded credit, so that a run can be read without
running its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from creditflow.credit.options import CreditOptions
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, PROPAGATION_RULES
from creditflow.credit.thresholds.base import THRESHOLDS, Constant
from creditflow.errors import ConfigError
from creditflow.registry import Registry, is_file_reference

REGISTRIES: tuple[Registry[Any], ...] = (PROPAGATION_RULES, ADVANTAGE_ESTIMATORS, THRESHOLDS)
_BY_NAME: tuple[tuple[str, Registry[Any]], ...] = (
    ("propagation", PROPAGATION_RULES),
    ("adv_estimator", ADVANTAGE_ESTIMATORS),
)
Change = Callable[[Registry[Any], str, str], str]
"""Takes the registry, the option's key and the reference; returns the new reference."""


def change_references(options: Mapping[str, Any], change: Change, section: str = "algorithm") -> dict[str, Any]:
    """Options of credit by name, with `change` applied to each reference to a file, also those of the shadow."""
    changed = dict(options)
    for name, registry in _BY_NAME:
        if is_file_reference(reference := changed.get(name)):
            changed[name] = change(registry, f"{section}.{name}", reference)
    threshold, shadow = changed.get("propagation_threshold"), changed.get("shadow")
    if isinstance(threshold, Mapping) and is_file_reference(kind := threshold.get("kind")):
        kind = change(THRESHOLDS, f"{section}.propagation_threshold.kind", kind)
        changed["propagation_threshold"] = {**threshold, "kind": kind}
    if isinstance(shadow, Mapping):
        changed["shadow"] = change_references(shadow, change, f"{section}.shadow")
    return changed


Recorded = dict[str, dict[str, dict[str, Any]]]
"""Properties by the key of the registry, the reference, and the field."""


def recorded_properties(options: CreditOptions) -> Recorded:
    """The properties of every rule, estimator and threshold that `options` name by file, for the record of a run."""
    properties: Recorded = {}

    def note(registry: Registry[Any], key: str, reference: str) -> str:
        properties.setdefault(registry.key, {})[reference] = _properties(registry, reference)
        return reference

    change_references(vars(options), note)
    return properties


def _properties(registry: Registry[Any], reference: str) -> dict[str, Any]:
    entry = registry[reference]
    own = fields(entry)[1:] if registry.record is not None else ()  # the first field is the function
    return {field.name: getattr(entry, field.name) for field in own}


def recall_properties(recorded: object) -> None:
    """Register recorded properties, so that a run can be read. Raises ConfigError for properties of another form.

    Such a rule or estimator can be explained. It assigns credit only after its file is loaded.
    """
    try:
        by_key = _RECORDED.validate_python(recorded)
        for registry in REGISTRIES:
            for reference, properties in by_key.get(registry.key, {}).items():
                if is_file_reference(reference):
                    registry.recall(reference, _entry(registry, reference, properties))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"recorded properties: {place}: {first['msg']}") from error


_RECORDED = TypeAdapter(Recorded)


def _entry(registry: Registry[Any], reference: str, properties: Mapping[str, Any]) -> Any:
    def unloaded(*_: object) -> Any:
        raise ConfigError(f"{registry.key}: {reference}: its file is not loaded")

    if registry.record is None:
        return lambda team, **_: _UnloadedThreshold({}, 0.0, unloaded)
    function = fields(registry.record)[0].name
    return TypeAdapter(registry.record).validate_python({**properties, function: unloaded})


@dataclass(slots=True)
class _UnloadedThreshold(Constant):
    raise_error: Callable[..., Any]

    def theta(self, agent: str) -> float:
        return float(self.raise_error())
