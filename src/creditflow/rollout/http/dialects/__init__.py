"""Wire formats of clients, one a file, found by themselves: each module's `DIALECT`.

A dialect translates requests to the form that all share, and answers back. Every dialect is recorded by the same code.
"""

from __future__ import annotations

from creditflow.registry import Registry
from creditflow.rollout.http.requests import Dialect

DIALECTS: Registry[Dialect] = Registry("dialect", __name__, constant="DIALECT", record=Dialect)
REFUSED_FIELDS = frozenset(name for _, dialect in DIALECTS.items() for name in dialect.request.neutral)
"""Allowed names in `team.ignored_fields`."""
