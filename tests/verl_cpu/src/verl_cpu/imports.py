"""Hooks that run when a module is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def after_import(name: str, hook: Hook) -> None:
    """Call `hook` with the module `name`: now if it is imported, or right after its first import."""
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        _FINDER.hooks.setdefault(name, []).append(hook)


class _Finder:
    """A finder, first on sys.meta_path, that runs a module's hooks after the other finders have loaded it."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hooks = self.hooks.pop(name, [])  # removed, because the search below calls this finder again
        spec = find_spec(name) if hooks else None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hook(module: ModuleType) -> None:
            execute(module)
            for hook in hooks:
                hook(module)

        spec.loader.exec_module = execute_and_hook
        return spec


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)
