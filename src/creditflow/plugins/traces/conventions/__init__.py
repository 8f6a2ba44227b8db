"""Trace conventions: those of this plug-in, and those of entry points of group `creditflow.traces`."""

from __future__ import annotations

from functools import cache

from creditflow.plugins.traces.conventions import opentelemetry, products
from creditflow.plugins.traces.conventions.base import Convention
from creditflow.registry import Registry

CONVENTIONS: Registry[Convention] = Registry("trace convention", group="creditflow.traces", record=Convention)
for convention in (*opentelemetry.CONVENTIONS, *products.CONVENTIONS):
    CONVENTIONS.add(convention.name, convention)


@cache
def conventions() -> tuple[Convention, ...]:
    """All conventions in order of precedence. A wrong entry point is left out with a warning."""
    return tuple(sorted((convention for _, convention in CONVENTIONS.items()), key=lambda c: (c.precedence, c.name)))
