"""Names of the standard library that solutions, and tests of them, may use without an import."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Set
from functools import cache

USUAL_MODULES = (
    *("typing", "json", "sys", "io", "operator", "functools", "itertools", "statistics", "random", "math", "copy"),
    *("bisect", "heapq", "collections", "datetime", "fractions", "decimal", "re", "string"),
)
"""Modules whose names LeetCode and LiveCodeBench import for every solution; the first one with a name counts."""


@cache
def usual_names() -> dict[str, str]:
    """The usual names and modules, with the statements that import them."""
    imports = {module: f"import {module}" for module in USUAL_MODULES}
    for module in map(importlib.import_module, reversed(USUAL_MODULES)):
        public = getattr(module, "__all__", [public for public in vars(module) if not public.startswith("_")])
        imports |= {name: f"from {module.__name__} import {name}" for name in public}
    return {**{name: text for name, text in imports.items() if name not in vars(builtins)}, "random": "import random"}


def usual_imports(names: Set[str]) -> str:
    """Statements that import the usual names among these. The box's Python may be older."""
    usual = sorted(usual_names().items())
    return "".join(f"try: {text}\nexcept ImportError: pass\n" for name, text in usual if name in names)
