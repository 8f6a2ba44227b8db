"""The JSON Schema of recipes, with which editors complete and check them."""

from __future__ import annotations

import ast
import copy
import inspect
from itertools import pairwise
from typing import Any

from creditflow._utils.sections import schema_of
from creditflow.config.recipe import Config
from creditflow.credit.options import NUMBERS, CreditOptions, choices
from creditflow.credit.presets import PRESETS

_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
_OPEN = ("propagation", "adv_estimator")
"""Options with registered values beside the built-in ones."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a recipe file.

    Every section may be empty, every value may be an interpolation such as `${recipe.operations}`, and no key is
    required, because a recipe may extend another one.
    """
    schema = copy.deepcopy(schema_of(Config))
    _describe_credit(schema["$defs"]["AlgorithmConfig"]["properties"])
    schema["properties"]["extends"] = {"type": "string", "description": "The recipe that this one extends."}
    schema["$defs"]["PolicyConfig"]["properties"]["endpoint"]["anyOf"].append({"type": "string"})
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {name: _loosened(part) for name, part in section["properties"].items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "creditflow recipe"}


def _describe_credit(properties: dict[str, Any]) -> None:
    """Add the descriptions, choices and bounds of the credit options."""
    for name, text in _docstrings(CreditOptions).items():
        properties[name]["description"] = text
    for name, names in choices().items():
        allowed = {"enum": list(names)}
        properties[name] |= {"anyOf": [allowed, {"type": "string"}]} if name in _OPEN else allowed
    properties["preset"]["anyOf"] = [{"enum": list(PRESETS)}, {"type": "null"}]
    for name, (low, high, _) in NUMBERS.items():
        properties[name] |= {"minimum": low, "maximum": high}


def _docstrings(cls: type) -> dict[str, str]:
    """The docstrings of a class's own fields."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


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
