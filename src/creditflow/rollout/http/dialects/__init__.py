"""Wire formats of clients, one a file, found by themselves: each module's `DIALECT`.

A dialect translates requests to the form that all share, and answers back. Every dialect is recorded by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping

from creditflow._utils.plugins import modules_in
from creditflow.rollout.http.requests import Dialect

DIALECTS: Mapping[str, Dialect] = {
    module.__name__.rpartition(".")[2]: module.DIALECT for module in modules_in(__name__)
}
"""The dialects by name."""
REFUSED_FIELDS = frozenset(name for dialect in DIALECTS.values() for name in dialect.request.neutral)
"""Allowed names in `team.ignored_fields`."""
