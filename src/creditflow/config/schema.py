"""The JSON Schema of recipes, with which editors complete and check them."""

from __future__ import annotations

import copy
from typing import Any

from creditflow._utils.sections import schema_of
from creditflow.config.algorithm import rule_model
from creditflow.config.presets import PRESETS
from creditflow.config.recipe import Config
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, PROPAGATION_RULES, RULE

_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a recipe file.

    Every section may be empty, every value may be an interpolation such as `${recipe.operations}`, and no key is
    required, because a recipe may extend another one.
    """
    schema = copy.deepcopy(schema_of(Config))
    _describe_credit(schema)
    schema["properties"]["extends"] = {"type": "string", "description": "The recipe that this one extends."}
    schema["$defs"]["PolicyConfig"]["properties"]["endpoint"]["anyOf"].append({"type": "string"})
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {name: _loosened(part) for name, part in section["properties"].items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "creditflow recipe"}


def _describe_credit(schema: dict[str, Any]) -> None:
    """Add the rules with their options, and the names of estimators and presets."""
    properties = schema["$defs"]["AlgorithmConfig"]["properties"]
    rules: dict[str, Any] = {
        name: copy.deepcopy(schema_of(rule_model(rule))) for name, rule in PROPAGATION_RULES.items()
    }
    for name, rule in rules.items():
        rule["properties"] = {RULE: {"const": name}, **rule["properties"]}
        rule["required"] = [RULE]
    named = {"anyOf": [{"enum": list(rules)}, {"type": "string", "pattern": r"\.py:|\$\{"}]}
    other = {"type": "object", "properties": {RULE: {"type": "string", "pattern": r"\.py:|\$\{"}}}
    properties["propagation"] |= {"anyOf": [named, *rules.values(), other]}
    properties["adv_estimator"] |= {"anyOf": [{"enum": list(ADVANTAGE_ESTIMATORS.names())}, {"type": "string"}]}
    properties["preset"]["anyOf"] = [{"enum": list(PRESETS)}, {"type": "null"}]


def _loosened(part: dict[str, Any]) -> dict[str, Any]:
    """The schema of one key, without pydantic's own keywords, and open to null sections and interpolations."""
    about = {key: part[key] for key in ("description", "default") if not isinstance(part.get(key), dict | None)}
    kind = {key: value for key, value in part.items() if key not in ("title", "expected", "default", "description")}
    if isinstance(entries := kind.get("additionalProperties"), dict) and "$ref" in entries:
        kind["additionalProperties"] = {"anyOf": [entries, {"type": "null"}]}
    if not kind or kind == {"type": "string"}:
        return {**about, **kind}
    other = {"type": "null"} if "$ref" in kind or kind.get("type") == "object" else _INTERPOLATION
    return {**about, "anyOf": [*kind.pop("anyOf", [kind]), other]}
