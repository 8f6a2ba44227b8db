"""Trace conventions: those of this plug-in, and those of entry points of group `creditflow.traces`."""

from __future__ import annotations

from functools import cache

from creditflow._utils.plugins import installed, load
from creditflow.errors import ConfigError
from creditflow.plugins.traces.conventions import opentelemetry, products
from creditflow.plugins.traces.conventions.base import Convention

GROUP = "creditflow.traces"
"""The entry point group of conventions from other distributions."""


@cache
def conventions() -> tuple[Convention, ...]:
    """All conventions in order of precedence.

    Raises ConfigError for an entry point that cannot be loaded or is not a `Convention`, and for a name given twice.
    """
    by_name = {convention.name: convention for convention in (*opentelemetry.CONVENTIONS, *products.CONVENTIONS)}
    for point in installed(GROUP).values():
        convention = load(point, Convention)
        if by_name.setdefault(convention.name, convention) is not convention:
            raise ConfigError(
                f"entry point {point.name!r} of {GROUP}: a convention named {convention.name!r} exists already"
            )
    return tuple(sorted(by_name.values(), key=lambda convention: (convention.precedence, convention.name)))
