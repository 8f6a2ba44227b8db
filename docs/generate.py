"""Write the generated parts of the pages in docs/reference: `make reference`.

A part stands between ``<!-- made by `make reference`: NAME -->`` and `<!-- to here -->`. Its name is a key of PARTS, or
the path of a public class or function. Its text comes from signatures and docstrings.
"""

import html
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from pydantic import TypeAdapter
from typer import Context
from typer.main import get_command

from creditflow._utils.sections import _words, descriptions, options_model, schema_of
from creditflow.cli._app import CommandGroup, app
from creditflow.config import Config
from creditflow.credit.records import LARGEST, PROPAGATION_RULES
from creditflow.monitoring.catalog import all_metrics
from creditflow.rewards.registry import REWARD_FUNCTIONS, declared

FOLDER = Path(__file__).parent / "reference"
PART = re.compile(r"(<!-- made by `make reference`: (\S+) -->\n).*?(<!-- to here -->)", re.DOTALL)
OPTION = re.compile(r"^`(\w+)`: (.*?)(?=^`\w+`: |\n\n|\Z)", re.DOTALL | re.MULTILINE)
FACT = re.compile(r"(?:(?<=\.)\s|^)(Range|Cost|Memory|Source|Raises)\b:?\s", re.MULTILINE)
PIECE = re.compile(r"`([^`]+)`|\bdocs/([\w/]+)\.md|[|<]")
SCORED = {"answer": "`outcome`, `step`", "outcome": "`outcome`", "step": "`step`"}


def filled(page: str) -> str:
    """The page with its generated parts made anew."""

    def part(match: re.Match[str]) -> str:
        lines = PARTS[match[2]]() if match[2] in PARTS else _api(match[2])
        return re.sub(r"\n{3,}", "\n\n", "\n".join((match[1], *lines, "", match[3])))

    return PART.sub(part, page)


# Configuration


def _configuration() -> Iterator[str]:
    yield from _section("", schema_of(Config), schema_of(Config), {})


def _section(
    prefix: str, section: Mapping[str, Any], root: Mapping[str, Any], defaults: Mapping[str, Any], about: str = ""
) -> Iterator[str]:
    """The heading, docstring and keys of a section, then the sections in it.

    `defaults`: values in place of those of the section's class.
    """
    rows, inner = [], []
    for name, value in section["properties"].items():
        part, suffix = _inner(value, root)
        default, meaning = defaults.get(name, value.get("default")), value.get("description", "")
        if part is not None:
            inner.append((f"{prefix}{name}{suffix}.", part, root, {} if suffix else default or {}, meaning))
        else:
            rows.append((f"`{name}`", _value(value, root), _default(default), meaning))
    if prefix:
        yield from ("", f"## `{prefix[:-1]}`", "", _text(f"{section.get('description', '')}\n\n{about}".strip()), "")
    yield from _table(("key", "value", "default", "meaning"), rows)
    if prefix == "algorithm.":
        for name, rule in filter(_is_own, PROPAGATION_RULES.items()):
            options = schema_of(options_model(rule))
            yield from _section(f"algorithm.propagation: {{rule: {name}}}.", options, options, {})
    for each in inner:
        yield from _section(*each)


def _inner(value: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The section that a key holds, if it holds one, and the end of the heading: sections by name, or a list."""
    for kind in value.get("anyOf", [value]):
        for suffix, part in (("", kind), (".<name>", kind.get("additionalProperties")), ("[]", kind.get("items"))):
            if isinstance(part, dict) and "$ref" in part:
                return root["$defs"][part["$ref"].rpartition("/")[2]], suffix
    return None, ""


def _is_own(entry: tuple[str, Any]) -> bool:
    """Whether this repository defines an entry of a registry. Other distributions may have added some."""
    return str(entry[1].__module__).startswith("creditflow.")


def _value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    words = _words(schema, root, "a whole number" if "integer" in json.dumps(schema) else "a number")
    return words.removesuffix(f" and of at most {LARGEST:g}")


def _default(value: Any) -> str:
    if value is None or (isinstance(value, dict) and value):
        return ""
    is_plain = isinstance(value, str | Path) and str(value) == str(value).strip()
    return _code(str(value) if is_plain else json.dumps(value))


# Rewards


def _rewards() -> Iterator[str]:
    functions = list(filter(_is_own, REWARD_FUNCTIONS.items()))
    rows = [(f"[`{name}`](#{name})", SCORED[declared(f).level], _paragraphs(f)[0]) for name, f in functions]
    yield from _table(("name", "level", "value"), rows)
    for name, function in functions:
        yield from ("", f"## `{name}`", "", _text(_paragraphs(function)[0]), "")
        about = "\n\n".join(_paragraphs(function)[1:])
        yield from _table(("option", "value", "default", "meaning"), _options(function, dict(OPTION.findall(about))))
        prose, *facts = FACT.split(OPTION.sub("", about))
        yield from ("", _text(prose.strip()), "")
        for fact, text in zip(facts[::2], facts[1::2], strict=True):
            yield f"* **{fact}**: {_text(' '.join(text.split()))}"


def _paragraphs(function: Any) -> list[str]:
    return (inspect.getdoc(function) or "").split("\n\n")


def _options(function: Any, meanings: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """The rows of a reward's options. The arguments that every reward receives have no row."""
    made = vars(function).get("__init__") if inspect.isclass(function) else function
    for name, option in inspect.signature(made, eval_str=True).parameters.items() if made else ():
        if name not in ("self", "text", "truth", "step", "trajectory"):
            schema = TypeAdapter(option.annotation).json_schema()
            default = "required" if option.default is option.empty else _default(option.default)
            yield f"`{name}`", _value(schema, schema), default, meanings.get(name, "")


# Metrics


def _metrics() -> Iterator[str]:
    notes = {"": "", "local": " (local only)", "verl": " (verl only)"}
    rows = [(f"`{metric.name}`", metric.unit, metric.meaning + notes[metric.engine]) for metric in all_metrics()]
    yield from _table(("metric", "unit", "meaning"), rows)


# Commands


def _commands() -> Iterator[str]:
    root = get_command(app)
    yield from _command("", root, Context(root, info_name="creditflow"))


def _command(name: str, command: Any, context: Any) -> Iterator[str]:
    """The arguments and options of a command, or those of each command of a group."""
    if isinstance(command, CommandGroup):
        for inner in command.list_commands(context):
            if command.entries[inner].origin.startswith("creditflow"):
                yield from _command(f"{name} {inner}".strip(), command.get_command(context, inner), context)
    else:
        about = re.sub(r"(?m)^(Example: )(.+)", r"\1`\2`", command.help or "")
        yield from ("", f"### `creditflow {name}`", "", _text(about), "")
        yield from _table(("argument or option", "default", "meaning"), map(_parameter, command.params))


def _parameter(parameter: Any) -> Sequence[str]:
    """The row of an argument, an option with its value, or a flag, which has no default."""
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        names = f"{', '.join(parameter.opts + parameter.secondary_opts)} {parameter.metavar or ''}".strip()
    default = "" if isinstance(parameter.default, bool) or parameter.default == "" else _default(parameter.default)
    return _code(names), "required" if parameter.required else default, parameter.help or ""


# Python


def _api(path: str) -> Iterator[str]:
    """Signature, docstring, fields and methods of a public class or function."""
    module, _, name = path.rpartition(".")
    item = getattr(import_module(module), name)
    bases = inspect.getmro(item)[::-1] if inspect.isclass(item) else ()
    bases = [base for base in bases if base.__module__.startswith("creditflow.")]
    yield from _documented("###", name, item)
    if is_dataclass(item):
        kinds = {key: kind for base in bases for key, kind in inspect.get_annotations(base).items() if key[0] != "_"}
        texts = descriptions(item)
        kinds = {key: re.sub(r"Annotated\[(.+), (?:Per|Field)\(.+", r"\1", kind) for key, kind in kinds.items()}
        rows = [(_code(key), _code(kind), _initial(item, key), texts.get(key, "")) for key, kind in kinds.items()]
        yield from _table(("field", "type", "default", "meaning"), rows)
    for base in bases:
        for member, value in vars(base).items():
            if member[0] != "_" and isinstance(value, MEMBERS) and inspect.getdoc(value):
                yield from _documented("####", f"{name}.{member}", getattr(value, "__func__", value))


class _Bare(str):
    __repr__ = str.__str__


def _bare(annotation: Any) -> Any:
    """An annotation that a signature shows without quotation marks."""
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _documented(level: str, name: str, item: Any) -> Iterator[str]:
    yield from ("", f"{level} `{name}`", "")
    made = vars(item).get("__init__") if inspect.isclass(item) else item
    if callable(made) and not (is_dataclass(item) or getattr(item, "_is_protocol", False)):
        signature = inspect.signature(made)
        shown = [p.replace(annotation=_bare(p.annotation)) for p in signature.parameters.values()]
        shown = [p for p in shown if p.name not in ("self", "cls")]
        returned = _bare(signature.return_annotation) if made is item else signature.empty
        text = f"{name}{signature.replace(parameters=shown, return_annotation=returned)}"
        yield from ("```", *textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False), "```", "")
    yield from (_text(inspect.getdoc(item) or ""), "")


def _initial(kind: Any, name: str) -> str:
    """The default of a dataclass's field, or the value of a class's attribute; empty without one."""
    field = kind.__dataclass_fields__.get(name)
    value = getattr(kind, name, MISSING) if field is None else field.default
    if field is not None and field.default_factory is not MISSING:
        value = field.default_factory()
    return "" if value is MISSING else _code(repr(value))


# Markdown


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = [f"| {' | '.join(' '.join(_text(cell).split()) for cell in row)} |" for row in rows]
    if lines:
        yield from (f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|", *lines)


def _code(text: str) -> str:
    return f"`{text}`"


def _text(text: str) -> str:
    """Text for a page: outside of code, `<` would begin a tag; in a table, `|` would end the cell, even in code."""
    return PIECE.sub(_piece, text)


def _piece(match: re.Match[str]) -> str:
    code, page = match.groups()
    if page:
        return f"[{Path(page).name}]({os.path.relpath(page, 'reference')}.md)"
    if code and "|" in code:
        return f"<code>{html.escape(code, quote=False).replace('|', '&#124;')}</code>"
    return match[0] if code else {"|": "&#124;", "<": "&lt;"}[match[0]]


MEMBERS = (FunctionType, property, classmethod, cached_property)
PARTS = {"commands": _commands, "configuration": _configuration, "rewards": _rewards, "metrics": _metrics}

if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        path.write_text(filled(path.read_text()))
