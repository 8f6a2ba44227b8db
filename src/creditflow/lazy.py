"""Names of a package that are imported when they are first asked for: its import stays light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(package: str, where: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of `package` (PEP 562); `where`: the names that each module of it gives.

    No name may be that of a module of the package: once that is imported, it stands in the name's place.
    """
    module_of = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return get
