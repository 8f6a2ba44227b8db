"""Tables that plug-ins add to the report: entry points of group `creditflow.report_tables`.

Each names a function from the rows of `metrics.jsonl` to a `PluginTable`, or None if the run has nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from creditflow.registry import Registry


@dataclass(frozen=True, slots=True)
class PluginTable:
    """A table in the section of the agents, and a chart beside theirs."""

    title: str
    columns: Sequence[tuple[str, str]]
    """The heading of each column, and `n` for numbers."""
    rows: Sequence[Sequence[str]]
    chart: str = ""
    """The title of the chart; empty for none."""
    unit: str = ""
    curves: Mapping[str, str] = field(default_factory=dict)
    """The metric of each line of the chart, by its name."""


TABLES: Registry[Callable[[Sequence[Mapping[str, Any]]], PluginTable | None]] = Registry(
    "report table", group="creditflow.report_tables", kind=Callable
)


def plugin_tables(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tables of a run with these metrics, as JSON values."""
    tables = (make(rows) for _, make in TABLES.items())
    return [asdict(table) for table in tables if table is not None]
