"""Lazy imports of a package's names, so that importing the package is fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(package: str, where: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` (PEP 562); `where` maps each of its modules to the names in it.

    A name must not equal the name of a module of the package: importing that module would replace it. If a package is
    missing, the function raises ConfigError with the command that installs it.
    """
    module_of = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(module_of[name]), name)
        except ModuleNotFoundError as error:
            from creditflow._utils.install import missing_package  # most imports find all packages

            raise missing_package(f"{package}.{name}", error, "report") from error
        setattr(sys.modules[package], name, value)  # later look-ups skip this function
        return value

    return get
