"""Tables that plug-ins add to the report: entry points of group `creditflow.report_tables`.

Each names a function from the rows of `metrics.jsonl` to a `PluginTable`, or None if the run has nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from creditflow._utils.plugins import installed, load
from creditflow.runs import Ledger

ENTRY_POINTS = "creditflow.report_tables"
"""The entry point group."""


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


def plugin_tables(ledger: Ledger) -> list[dict[str, Any]]:
    """The tables of a run, as JSON values."""
    made = (load(point)(ledger.metrics()) for point in installed(ENTRY_POINTS).values())
    return [asdict(table) for table in made if table is not None]
