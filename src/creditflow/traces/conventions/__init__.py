"""Trace conventions: one module each, found by itself or through entry points of group `creditflow.traces`."""

from __future__ import annotations

from functools import cache

from creditflow._utils.plugins import installed, load, modules_in
from creditflow.errors import ConfigError
from creditflow.traces.conventions.base import Convention

GROUP = "creditflow.traces"
"""The entry point group of conventions from other distributions."""


@cache
def conventions() -> tuple[Convention, ...]:
    """All conventions in order of precedence.

    Raises ConfigError for an entry point that cannot be loaded or is not a `Convention`, and for a name given twice.
    """
    by_name: dict[str, Convention] = {}
    for module in modules_in(__name__):
        if hasattr(module, "CONVENTION"):
            _add(by_name, module.CONVENTION, module.__name__)
    for point in installed(GROUP).values():
        _add(by_name, load(point), f"entry point {point.name!r} of {GROUP}")
    return tuple(sorted(by_name.values(), key=lambda one: (one.precedence, one.name)))


def _add(by_name: dict[str, Convention], convention: object, source: str) -> None:
    if not isinstance(convention, Convention):
        raise ConfigError(f"{source}: expected a Convention, got {type(convention).__name__}")
    if by_name.setdefault(convention.name, convention) is not convention:
        raise ConfigError(f"{source}: a convention named {convention.name!r} exists already")
