"""Trace conventions: one module each, found by itself or through entry points of group `creditflow.traces`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

from creditflow.errors import ConfigError
from creditflow.traces.conventions.base import Convention

GROUP = "creditflow.traces"
"""The entry point group of conventions from other distributions."""


@cache
def conventions() -> tuple[Convention, ...]:
    """All conventions in order of precedence.

    Raises ConfigError for an entry point that cannot be loaded or is not a `Convention`, and for a name given twice.
    """
    found: dict[str, Convention] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            _add(found, importlib.import_module(f"{__name__}.{module.name}").CONVENTION, module.name)
    for point in entry_points(group=GROUP):
        source = f"entry point {point.name} of {GROUP}"
        try:
            convention = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{source}: {point.value!r} cannot be loaded: {error}") from error
        _add(found, convention, source)
    return tuple(sorted(found.values(), key=lambda one: (one.precedence, one.name)))


def _add(found: dict[str, Convention], convention: object, source: str) -> None:
    if not isinstance(convention, Convention):
        raise ConfigError(f"{source}: expected a Convention, got {type(convention).__name__}")
    if found.setdefault(convention.name, convention) is not convention:
        raise ConfigError(f"{source}: a convention named {convention.name!r} exists already")
