"""Sections of options as pydantic models: their base class, types of values, and one-line errors."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Annotated, Any, TypeVar, cast, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import CoreSchema, ErrorDetails

from creditflow.errors import ConfigError, did_you_mean
from creditflow.removed import removed_hint

T = TypeVar("T")

OPTIONS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
"""Unknown keys are errors, values are not converted, numbers are finite, docstrings are descriptions."""


class Section(BaseModel):
    """Base class of the sections of a recipe."""

    model_config = OPTIONS


def _text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value


Text = Annotated[str, BeforeValidator(_text)]
"""A text; YAML reads some of them as numbers (`experiment_name: 7`)."""


def json_or_text(text: str) -> Any:
    """The value of an option that is written as JSON or as plain text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class PluginSection(Section):
    """A section of a recipe that a plug-in adds; null where the recipe leaves it out."""

    def expect_valid(self, config: Any, key: str) -> None:
        """Check the section against the rest of the recipe, a `Config`. Raises ConfigError that names `key`."""


class PolicySource(PluginSection):
    """A key of a policy that an engine hook of the plug-in provides in place of a model. Such a policy is frozen."""

    of: Text = ""
    """The policy with the model and the tokenizer that the provided one has."""


class FromMapping:
    """Annotation of a dataclass with `OPTIONS` that may be given as a mapping; its fields stay strict."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(source))  # type: ignore[assignment]
        schema["strict"] = False
        return cast(CoreSchema, schema)


def expected(words: str) -> Any:
    """Field metadata: the description of the allowed values in error messages."""
    return Field(json_schema_extra={"expected": words})


Share = Annotated[float, Field(ge=0, le=1), expected("a share from 0 to 1")]


def checked(kind: type[T], values: object, key: str = "") -> T:
    """Make a section of `kind` from nested mappings.

    `key`: the section's key in the recipe. Raises ConfigError for the first unknown key or wrong value, with its full
    key, the expected and the actual value, and the nearest known word.
    """
    form: Any = kind  # a type, or an annotated one
    try:
        return cast(T, _adapter(form).validate_python(values))
    except ValidationError as error:
        raise ConfigError(_message(error.errors(), values, schema_of(form), key)) from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@functools.cache
def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a section. Callers must not change it."""
    return _adapter(kind).json_schema()


@functools.cache
def options_model(
    kind: Any, name: str | None = None, base: type[BaseModel] = Section, leave_out: tuple[str, ...] = ()
) -> Any:
    """The pydantic model of a dataclass of options: its types, defaults, bounds and docstrings."""
    types, texts = get_type_hints(kind, include_extras=True), descriptions(kind)
    definitions: dict[str, Any] = {
        f.name: (
            types[f.name],
            Field(default=... if default is MISSING else default, description=texts.get(f.name), **f.metadata),
        )
        for f in fields(kind)
        if f.init and f.name not in leave_out
        for default in [f.default if f.default_factory is MISSING else f.default_factory()]
    }
    return create_model(name or f"{kind.__name__}Options", __base__=base, __doc__=kind.__doc__, **definitions)


def descriptions(kind: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, with those of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        with suppress(OSError, TypeError):  # a class without a file, such as one of a recorded run
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for pair in pairwise(getattr(node, "body", ())):
                match pair:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        texts[name] = inspect.cleandoc(text)
    return texts


def leaves(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested sections; an empty section counts as a value."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def mergeable(values: Any, kind: type) -> Any:
    """Nested mappings in which empty sections (null) are left out, so that they keep the values of lower layers.

    Raises ConfigError for a list in place of a mapping, and the reverse, which cannot be merged.
    """
    return _mergeable(values, schema_of(kind), schema_of(kind), "")


_CONTAINERS: dict[str, type] = {"object": dict, "array": list}


def _mergeable(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Any:
    if value is None and _resolved(schema, root).get("type") == "object":
        return {}
    kinds = [_CONTAINERS[part["type"]] for part in _alternatives(schema, root) if part.get("type") in _CONTAINERS]
    if kinds and isinstance(value, dict | list) and type(value) not in kinds:
        raise ConfigError(f"{path}: expected {_words(schema, root)}, got {value!r}")
    if not isinstance(value, dict):
        return value
    return {
        key: _mergeable(item, _part(schema, key, root) or {}, root, _joined(path, key)) for key, item in value.items()
    }


# ---- errors

_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument", "invalid_key"}


def _message(errors: Sequence[ErrorDetails], values: Any, root: Mapping[str, Any], key: str) -> str:
    """The message for the first error; an unknown key comes first, as it explains a missing one."""
    error = min(errors, key=lambda detail: detail["type"] not in _UNKNOWN)
    if error["loc"][-1:] == ("[key]",) and not isinstance(error["input"], str):
        place = ".".join(map(str, (*filter(None, [key]), *error["loc"][:-1])))
        return f"{place}: expected a text as the name, got {error['input']!r}; put it in quotes"
    schema, path, value = root, key, values
    for name in error["loc"]:
        part = _part(schema, name, root)
        if part is None and error["type"] in _UNKNOWN and name == error["loc"][-1]:
            siblings = [name for part in _alternatives(schema, root) for name in part.get("properties", ())]
            full = _joined(path, name)
            return f"unknown key {full!r}{removed_hint(full) or _nearest(str(name), path, siblings, root)}"
        if part is None or "expected" in schema:  # the name of an alternative, or an item of a described value
            break
        schema, path = part, _joined(path, name)
        value = value[name] if isinstance(name, int) else value.get(name)
    names = _choices(schema, root)
    if isinstance(value, str) and "fn" in _resolved(schema, root).get("properties", ()):
        return f"{path}: expected a mapping of options, got {value!r}; write {{fn: {value}}}"
    number = _NUMBERS.get(error["type"], "a number")
    got = "nothing" if error["type"] == "missing" else repr(str(value) if names and type(value) is int else value)
    hint = removed_hint(path, value) or did_you_mean(value, names)
    return f"{path}: expected {_words(schema, root, number)}, got {got}{hint}"


def _joined(path: str, name: object) -> str:
    return f"{path}[{name}]" if isinstance(name, int) and path else f"{path}.{name}" if path else str(name)


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    return root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in schema.get("anyOf", [schema]):
        if part.get("type") != "null":
            yield _resolved(part, root)


def _part(schema: Mapping[str, Any], name: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a key or an item, or None."""
    for part in _alternatives(schema, root):
        if isinstance(name, int) and "items" in part:
            return dict(part["items"])
        if name in part.get("properties", ()):
            return dict(part["properties"][name])
        if isinstance(others := part.get("additionalProperties"), dict):
            return others
    return None


def _choices(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    values = [value for part in _alternatives(schema, root) for value in part.get("enum", [part.get("const")])]
    return [value for value in values if isinstance(value, str)]


def _words(schema: Mapping[str, Any], root: Mapping[str, Any], number: str = "a number") -> str:
    """The allowed values in words. `number`: the words for a number."""
    if "expected" in schema:
        return str(schema["expected"])
    if names := _choices(schema, root):
        return f"one of {', '.join(names)}"
    return " or ".join(dict.fromkeys(_kind(part, number) for part in _alternatives(schema, root)))


_NUMBERS = {"int_type": "a whole number", "int_from_float": "a whole number", "finite_number": "a finite number"}
_KINDS = {"boolean": "true or false", "string": "a text", "array": "a list", "object": "a mapping of options"}
_LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "of at least",
    "exclusiveMaximum": "below",
    "maximum": "of at most",
}


def _kind(schema: Mapping[str, Any], number: str) -> str:
    if (kind := schema.get("type")) in _KINDS:
        return _KINDS[str(kind)]
    limits = " and ".join(f"{words} {schema[limit]:.15g}" for limit, words in _LIMITS.items() if limit in schema)
    return f"{number.replace('finite ', '')} {limits}" if limits else number


def _nearest(key: str, path: str, siblings: Sequence[str], root: Mapping[str, Any]) -> str:
    """The most likely intended key: a sibling of `key`, or a key of the same name elsewhere."""
    if key == "model" and path.startswith("team.agents."):
        return "; an agent has the model of its policy: set policies.NAME.model, and policy: NAME at the agent"
    keys = list(_known_keys(root, root))
    same_name = [name for name in keys if name.rpartition(".")[2] == key]
    if not difflib.get_close_matches(key, siblings, n=1) and same_name:
        return f" (did you mean {same_name[0]!r}?)"
    full = _joined(path, key)
    return did_you_mean(full, [_joined(path, name) for name in siblings]) or did_you_mean(full, keys)


def _known_keys(schema: Mapping[str, Any], root: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, part in schema.get("properties", {}).items():
        yield path + name
        yield from _known_keys(_resolved(part, root), root, f"{path}{name}.")
