"""The ready-made check of a response's form: a regular expression, or JSON that fits a schema.

Pattern and schema come from the recipe. The response comes from a model, so its length is bounded, and nothing in it is
run or fetched. jsonschema is imported when a schema is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from creditflow.data import Score, Step, Trajectory
from creditflow.errors import did_you_mean, first_line
from creditflow.rewards.registry import builtin, reward
from creditflow.rewards.support.fences import blocks_in

MAX_CHARACTERS = 100_000
"""A longer response has the wrong form."""
MAX_STRAY_BRACES = 16
"""Number of unclosed braces that the search for the last `{...}` tolerates."""
_REASON_CHARACTERS = 160
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


@builtin
@reward(name="format")
class Format:
    """1 if the response has the form that the recipe requires, else 0, with the mismatch as the reason.

    Give either `pattern` or `schema`.

    `pattern`: A regular expression of Python's `re` (flags inline: `(?s)`).
    `schema`: A JSON Schema, Draft 2020-12. References lead into the schema itself (`#/$defs/...`); nothing is ever
    fetched. The keyword `format` is an annotation. JSON is read strictly: no NaN, no Infinity.
    `where`: The part of the response that must match. For a pattern `all` (re.fullmatch), its `start`, its `end`, or
    `anywhere` (re.search). For a schema `all`, the last fenced block of the language json (`fence`), or the `last`
    `{...}`.

    A pattern such as `(a+)+b` takes time exponential in the response, and so may a pattern in a schema. The function
    runs in a worker that is killed at the time-out, and the score is then `timeout`, not 0: choose patterns without
    nested repetitions.

    Range: 0 or 1. Cost: microseconds for a plain pattern; some 100 microseconds for a schema. Source: JSON Schema Draft
    2020-12, by the library jsonschema. Raises ValueError if pattern, schema or `where` is wrong.
    """

    def __init__(self, pattern: str | None = None, schema: Mapping[str, Any] | None = None, where: str = "all") -> None:
        if (pattern is None) == (schema is None):
            raise ValueError("expected either a pattern or a schema")
        places: Mapping[str, Any] = _PATTERNS if schema is None else _PLACES
        if where not in places:
            raise ValueError(f"expected where to be {', '.join(places)}, got {where!r}{did_you_mean(where, places)}")
        self.where = where
        self.pattern = None if pattern is None else _compile(pattern, where)
        self.schema = None if schema is None else _checked(schema)

    def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        fault = self.fault(step.response)
        return Score(float(not fault), reason=fault)

    def fault(self, text: str) -> str:
        """The mismatch; empty if the text has the form."""
        if len(text) > MAX_CHARACTERS:
            return f"longer than {MAX_CHARACTERS} characters"
        if self.pattern is not None:
            return "" if self.pattern.search(text) else f"the pattern matches not {_PATTERNS[self.where][1]}"
        place = _PLACES[self.where](text)
        if place is None:
            return {"fence": "no ```json fence", "last": "no {...}"}[self.where]
        try:
            value = json.loads(place, parse_constant=_refuse_constant)
        except RecursionError:
            return "JSON nested too deep"
        except ValueError as error:
            return f"not JSON: {first_line(error)}"[:_REASON_CHARACTERS]
        return self._schema_fault(value)

    def _schema_fault(self, value: object) -> str:
        try:
            error = next(_validator(self.schema).iter_errors(value), None)
            return "" if error is None else f"{error.json_path[:80]}: {error.message[:_REASON_CHARACTERS]}"
        except RecursionError:
            return "JSON nested too deep"
        except (ArithmeticError, ValueError) as error:  # a number beyond the range of the schema's checks
            return f"cannot be checked: {first_line(error)}"[:_REASON_CHARACTERS]


# Patterns

_PATTERNS: dict[str, tuple[str, str]] = {
    "all": (r"\A(?:{})\Z", "all of it"),
    "start": (r"\A(?:{})", "its start"),
    "end": (r"(?:{})\Z", "its end"),
    "anywhere": (r"(?:{})", "any of it"),
}
_FLAGS = re.compile(r"\A\(\?([aimsux]+)\)")


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        flags = re.compile(pattern).flags
        bare = _FLAGS.sub("", pattern)
        if flags & re.VERBOSE:
            bare += "\n"  # the pattern may end in a comment
        # (?m) changes the meaning of ^ and $, never of \A and \Z
        return re.compile(_PATTERNS[where][0].replace("{}", bare), flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern[:80]!r} is not a regular expression: {error}") from error


# JSON in a text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_ONE_LINE = re.compile(r"^([^\n`]*```json)\b(.+)```[ \t]*$", re.IGNORECASE | re.MULTILINE)


def _last_fence(text: str) -> str | None:
    blocks = blocks_in(_ONE_LINE.sub(r"\1\n\2\n```", text))
    return next((block.text for block in blocks[::-1] if block.language == "json" and block.is_closed), None)


def _last_object(text: str) -> str | None:
    """The last outermost {...}; braces inside of strings do not count, nor do quotes outside of braces."""
    place: tuple[int, int] | None = None
    at = 0
    for _ in range(MAX_STRAY_BRACES + 1):
        stray = -1
        for start, end in _objects(text, at):
            if end < 0:
                stray = start
            else:
                place = (start, end)
        if stray < 0:
            break
        at = stray + 1
    return None if place is None else text[place[0] : place[1]]


def _objects(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Start and end of each outermost {...} from `at`; end -1 for one that never closes."""
    depth, start, in_string = 0, -1, False
    for match in _BRACES.finditer(text, at):
        character = match.group()
        if in_string:
            in_string = character != '"'
        elif character == "{":
            start = match.start() if depth == 0 else start
            depth += 1
        elif character == '"':
            in_string = depth > 0
        elif character == "}" and depth:
            depth -= 1
            if depth == 0:
                yield start, match.end()
    if depth:
        yield start, -1


_BRACES = re.compile(r'[{}"]|\\.', re.DOTALL)
_PLACES: dict[str, Callable[[str], str | None]] = {"all": str.strip, "fence": _last_fence, "last": _last_object}


# Schemas


def _checked(schema: Mapping[str, Any]) -> str:
    """The schema as JSON text. Raises ValueError if it is wrong."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    if not isinstance(schema, Mapping):
        raise ValueError(f"expected a schema as a mapping, got a {type(schema).__name__}")
    plain: dict[str, Any] = json.loads(json.dumps(dict(schema)))
    if str(plain.get("$schema", _DRAFT)).rstrip("#") != _DRAFT:
        raise ValueError(f"expected a schema of Draft 2020-12 ({_DRAFT}), got {plain['$schema']}")
    try:
        Draft202012Validator.check_schema(plain)
    except SchemaError as error:
        raise ValueError(f"the schema is wrong at {error.json_path}: {first_line(error.message)}") from error
    _check_references(plain)
    return json.dumps(plain)


def _check_references(schema: dict[str, Any]) -> None:
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver(schema.get("$id", ""))
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(f"expected references into the schema itself (#...), got {reference!r}: none is fetched")
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"the schema's reference {reference!r} leads nowhere") from error


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            elif key not in ("const", "enum", "default", "examples"):  # those hold data
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend
    from referencing import Registry

    def multiple_of(validator: Any, factor: float, value: Any, _: object) -> Iterator[ValidationError]:
        # Divides decimals as written. Binary floats leave a rest for 19.99 and 0.01.
        if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(factor)):
            yield ValidationError(f"{value!r} is not a multiple of {factor}")

    # The default registry would fetch unknown references.
    return extend(Draft202012Validator, {"multipleOf": multiple_of})(json.loads(schema), registry=Registry())
