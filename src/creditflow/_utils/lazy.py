"""Lazy imports of a package's names, so that importing the package is fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from creditflow.errors import MissingAttributeError


def attach(package: str, where: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` (PEP 562); `where` maps each of its modules to the names in it.

    A name must not equal the name of a module of the package: importing that module would replace it. If a package is
    missing, the function raises ConfigError with the command that installs it. The error is an AttributeError, too, so
    that `hasattr` and `help` work, except in `from package import name`, which hides the message of an AttributeError.
    """
    module_of = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(module_of[name]), name)
        except ModuleNotFoundError as error:
            from creditflow._utils.install import missing_package  # most imports find all packages

            missing = missing_package(f"{package}.{name}", error, "report")
            is_from_import = sys._getframe(1).f_globals["__name__"] == "importlib._bootstrap"
            raise (missing if is_from_import else MissingAttributeError(str(missing))) from error
        setattr(sys.modules[package], name, value)  # later look-ups skip this function
        return value

    return get
