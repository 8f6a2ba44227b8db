"""The JSON Schema of recipes, with which editors complete and check them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from creditflow._utils.sections import options_model, schema_of
from creditflow.config.loading import load_recipe
from creditflow.config.presets import PRESETS
from creditflow.config.recipe import Config
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, PROPAGATION_RULES, RULE
from creditflow.registry import is_file_reference

_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def json_schema(recipe: Path | None = None) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a recipe file, with the installed rules and those of files that `recipe` names.

    Every section may be empty, every value may be an interpolation such as `${recipe.operations}`, and no key is
    required, because a recipe may extend another one.
    """
    schema = copy.deepcopy(schema_of(Config))
    rules: dict[str, Any] = dict(PROPAGATION_RULES.items())
    if recipe is not None:
        credit = load_recipe(recipe).config.credit
        rules |= {str(used.propagation): type(used.propagation) for used in (credit, credit.shadow) if used}
    _describe_credit(schema, rules)
    schema["properties"]["extends"] = {"type": "string", "description": "The recipe that this one extends."}
    schema["$defs"]["PolicyConfig"]["properties"]["endpoint"]["anyOf"].append({"type": "string"})
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {name: _loosened(part) for name, part in section["properties"].items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "creditflow recipe"}


def _describe_credit(schema: dict[str, Any], rules: Mapping[str, Any]) -> None:
    """Add the rules with their options, and the names of estimators and presets."""
    properties = schema["$defs"]["AlgorithmConfig"]["properties"]
    names: dict[str, dict[str, Any]] = {
        name: {"type": "string", "pattern": f"(^|/){re.escape(Path(name).name)}$"}
        if is_file_reference(name)
        else {"const": name}
        for name in rules
    }
    described = []
    for name, rule in rules.items():
        options = copy.deepcopy(schema_of(options_model(rule)))
        options["properties"] = {RULE: names[name], **options["properties"]}
        described.append({**options, "required": [RULE]})
    reference = {"type": "string", "pattern": r"\.py:|\$\{"}
    known = [name for name in names.values() if "pattern" in name]
    other = {**reference, "not": {"anyOf": known}} if known else reference
    named = {"anyOf": [{"enum": list(PROPAGATION_RULES.names())}, reference]}
    properties["propagation"] |= {"anyOf": [named, *described, {"type": "object", "properties": {RULE: other}}]}
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
