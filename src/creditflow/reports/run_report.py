"""The report of one run: the content of its page, and the page with a short summary for trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditflow._utils.files import write_whole
from creditflow.reports.evidence import findings_of
from creditflow.reports.findings import Finding, as_json
from creditflow.reports.html import page
from creditflow.reports.index import Index
from creditflow.reports.overview import overview
from creditflow.reports.samples import samples
from creditflow.reports.text import number, plain
from creditflow.runs import Ledger

SAMPLES = 10
"""Default number of sample trajectories."""
FILE = "report.html"


def indexed(ledger: Ledger) -> Index:
    """An index of all that the run has recorded so far. Raises InputError if duckdb is not installed."""
    index = Index.stored(ledger)
    index.refresh(ledger)
    return index


def report_data(ledger: Ledger, index: Index, count: int = SAMPLES) -> tuple[dict[str, Any], list[Finding]]:
    """The content of a run's page, with `count` sample trajectories, and its findings.

    `overview.left_out` names the missing parts.
    """
    found = findings_of(ledger, index)
    shown = [one.trajectory for one in found if one.trajectory is not None]
    data: dict[str, Any] = {
        "overview": overview(ledger, index) | {"findings": as_json(found)},
        "samples": samples(ledger, index, count, shown),
    }
    data["overview"]["left_out"] = [*data["overview"]["left_out"], *data["samples"].pop("left_out")]
    return data, found


def write_run_report(path: Path) -> tuple[Path, str]:
    """Write `report.html` into the folder of a run; returns the file, and a summary in Markdown.

    Raises InputError if duckdb is not installed.
    """
    ledger = Ledger.open(path)
    index = indexed(ledger)
    try:
        data, found = report_data(ledger, index)
    finally:
        index.close()
    text = page(data, f"creditflow: {path.resolve().name}")
    write_whole(path / FILE, lambda aside: aside.write_text(text, encoding="utf-8"))
    return path / FILE, _summary(data["overview"], found)


def _summary(shown: dict[str, Any], found: Sequence[Finding]) -> str:
    """The findings and notices of a run, and a table of its agents."""
    columns = ("steps", "error_rate", "pass_rate", "credit", "share", "wrong_rewarded", "right_blamed")
    sentences = (*(one.sentence for one in found), *shown["notices"], *shown["left_out"])
    lines = [f"* {plain(sentence, 400)}" for sentence in sentences]
    lines += ["", f"| agent | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
    for row in shown["agents"]:
        cells = (row[name] for name in columns)
        name = plain(str(row["agent"]), 60).replace("|", " ").replace("`", "'")
        numbers = ("-" if cell is None else str(cell) if isinstance(cell, int) else number(cell) for cell in cells)
        lines.append(f"| `{name}` | {' | '.join(numbers)} |")
    return "\n".join(lines).strip()
