"""Writes the tables of the configuration from the attribute docstrings of `creditflow.config`, without importing it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.pages import Page

PAGE = "reference/configuration.md"
ROOT_CLASS = "creditflow.config.Config"
ALGORITHM = "creditflow.config.algorithm.AlgorithmConfig"
ALGORITHM_PARTS = ("creditflow.config.algorithm.AlgorithmKeys", "creditflow.credit.records.CreditOptions")
"""The section `algorithm` is made from these classes when it is imported."""
RULES = "creditflow.credit.rules"
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "at_least": "at least", "at_most": "at most"}
NAMED_BOUNDS = {"Positive(Int|Float)": "above 0", "NonNegative(Int|Float)": "at least 0"}
HELPERS = {"field": "", "Field": "", "option": "", "weight": "at least 0", "share": "from 0 to 1"}
"""Functions that make a field from its default, with their bounds."""


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Append the tables to the page of the configuration."""
    return f"{markdown}\n{tables()}" if page.file.src_uri == PAGE else markdown


def tables() -> str:
    """The tables in Markdown, one for each section."""
    return "\n".join(_section("", _root()))


@cache
def _root() -> griffe.Class:
    package = griffe.load("creditflow", search_paths=[Path(__file__).parents[1] / "src"], resolve_aliases=True)
    found = package.modules_collection[ROOT_CLASS]
    return _class(found)


def _class(found: Any) -> griffe.Class:
    target = found.final_target if found.is_alias else found
    assert isinstance(target, griffe.Class), f"{found.path}: expected a class"
    return target


@cache
def _plugin_sections() -> dict[str, str]:
    """The sections of the plug-ins in this repository, by their entry points."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    return dict(project["entry-points"]["creditflow.config"])


def _section(prefix: str, section: griffe.Class) -> Iterator[str]:
    """The table of the keys of `section`, then the sections in it."""
    rows, inner, is_algorithm = [], [], section.path == ALGORITHM_PARTS[0]
    fields = _fields(section)
    if is_algorithm:
        fields = {**_fields(_class(section.modules_collection[ALGORITHM_PARTS[1]])), **fields}
    for name, field in fields.items():
        kind, part = str(field.annotation), _section_class(field)
        if part is not None:
            repeated = ".<name>" if kind.startswith("dict") else "[]" if kind.startswith("list") else ""
            inner.append((f"{prefix}{name}{repeated}", part))
        else:
            meaning = " ".join(field.docstring.value.split()) if field.docstring else ""
            rows.append(f"| `{name}` | {_default(field)} | {_escaped(meaning)} |")
    yield from _table(prefix.rstrip("."), section, rows)
    if is_algorithm:
        for name, rule in _rules(section).items():
            yield from _section(f"algorithm.propagation: {{rule: {name}}}.", rule)
    for name, path in _plugin_sections().items():
        parent, _, key = name.rpartition(".")
        if prefix == (f"{parent}.<name>." if parent else ""):
            inner.append((f"{prefix}{key}", _class(section.modules_collection[path.replace(":", ".")])))
    for key, part in inner:
        yield from _section(f"{key}.", part)


def _fields(section: griffe.Class) -> dict[str, Any]:
    """The fields of a section by name, also those of its bases."""
    return {
        name: field
        for name, field in section.all_members.items()
        if not name.startswith("_")
        and field.is_attribute
        and field.annotation is not None
        and "instance-attribute" in field.labels  # no property and no class variable
        and "init=False" not in str(field.value)
    }


def _table(title: str, section: griffe.Class, rows: list[str]) -> Iterator[str]:
    """The heading of a section, its docstring and its rows."""
    if title:
        yield f"\n## `{title}`\n"
        yield f"{section.docstring.value if section.docstring else ''}\n"
    if rows:
        yield from ("| key | default, bounds | meaning |", "| --- | --- | --- |", *rows)


def _rules(section: griffe.Class) -> dict[str, griffe.Class]:
    """The classes of the propagation rules by name."""
    rules = {}
    for module in section.modules_collection[RULES].modules.values():
        for rule in module.classes.values():
            for call in rule.decorators:
                if name := re.fullmatch(r"propagation_rule\('(\w+)'\)", str(call.value)):
                    rules[name[1]] = rule
    return dict(sorted(rules.items()))


def _escaped(meaning: str) -> str:
    """`meaning` for a cell of a table: outside of code, `|` would end the cell and `<` would begin a tag."""
    meaning = re.sub(r"docs/reference/(\w+)\.md", r"[\1](\1.md)", meaning)
    parts = re.split(r"(`[^`]*`)", meaning)
    return "".join(part if part[:1] == "`" else part.replace("|", "&#124;").replace("<", "&lt;") for part in parts)


def _default(field: Any) -> str:
    """The default and the bounds of a field, as a recipe would write them; empty for none."""
    tree = ast.parse(str(field.value), mode="eval").body
    call = tree if isinstance(tree, ast.Call) and ast.unparse(tree.func) in HELPERS else None
    helper = HELPERS[ast.unparse(call.func)] if call else ""
    if call:
        options = {one.arg: one.value for one in call.keywords}
        tree = call.args[0] if call.args else options.get("default", options.get("default_factory", ast.Constant(None)))
    text = {"dict": "{}", "list": "[]", "None": "", "True": "true", "False": "false"}.get(ast.unparse(tree))
    if text is None:  # a computed default is described by its docstring
        text = (
            "" if isinstance(tree, ast.Name | ast.Call | ast.Lambda | ast.Attribute) else ast.unparse(tree).strip("'\"")
        )
    bounds = [
        f"{BOUNDS[sign]} {limit}"
        for sign, limit in re.findall(rf"\b({'|'.join(BOUNDS)})=([\d.e-]+)", f"{field.annotation}{field.value}")
    ]
    bounds += [words for name, words in NAMED_BOUNDS.items() if re.search(rf"\b{name}", str(field.annotation))]
    return ", ".join([f"`{text}`"] * bool(text) + bounds + [helper] * bool(helper))


def _section_class(field: Any) -> griffe.Class | None:
    """The class of a section's options, where the field is a section or a mapping of them."""
    for part in field.annotation.iterate(flat=True) if not isinstance(field.annotation, str) else ():
        if isinstance(part, griffe.ExprName) and part.canonical_path.startswith("creditflow."):
            path = ALGORITHM_PARTS[0] if part.canonical_path == ALGORITHM else part.canonical_path
            found = field.modules_collection[path]
            if found.is_class:
                return _class(found)
    return None
