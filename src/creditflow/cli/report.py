"""`creditflow report`: write a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from creditflow._utils.files import write_named
from creditflow._utils.progress import Reporter
from creditflow.errors import InputError
from creditflow.reports.html import page
from creditflow.reports.index import Index
from creditflow.reports.tables import results_console
from creditflow.reports.text import plain
from creditflow.runs import Ledger

MOST_RUNS = 4


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run, and up to three runs to compare.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    samples: Annotated[int, typer.Option(min=0, max=10_000, help="Number of sample trajectories.")] = 10,
) -> None:
    """Write a run as one HTML file.

    The page needs no network. It shows findings in sentences, curves, agents, the flow of credit, and the advantage of
    each sampled step. The findings are printed at the end.
    """
    from creditflow.reports.comparison import comparison
    from creditflow.reports.evidence import findings_of
    from creditflow.reports.findings import as_json, lines
    from creditflow.reports.overview import left_out, overview
    from creditflow.reports.samples import samples as sample_trajectories

    if len(runs) > MOST_RUNS:
        raise InputError(f"report: expected at most {MOST_RUNS} runs, got {len(runs)}")
    reporter = Reporter()
    ledgers = [Ledger.open(path) for path in runs]
    indices = []
    with reporter.bar("read", len(ledgers)) as bar:
        for ledger in ledgers:
            index = Index.stored(ledger)
            index.refresh(ledger)
            indices.append(index)
            bar.advance()
    first, index = ledgers[0], indices[0]
    found = findings_of(first, index)
    shown = [one.trajectory for one in found if one.trajectory is not None]
    data: dict[str, Any] = {
        "overview": overview(first, index) | {"findings": as_json(found)},
        "samples": sample_trajectories(first, index, samples, shown),
    }
    missing = [*data["overview"]["left_out"], *data["samples"].pop("left_out")]
    if len(ledgers) > 1:
        data["comparison"] = comparison(ledgers, indices)
        for run, ledger, other in zip(data["comparison"]["runs"][1:], ledgers[1:], indices[1:], strict=True):
            missing += [f"{run['name']}: {sentence}" for sentence in left_out(ledger, other)]
    data["overview"]["left_out"] = missing
    text = page(data, f"creditflow: {first.path.resolve().name}")
    write_named(out, lambda path: path.write_text(text, encoding="utf-8"), "-o")
    for sentence in missing:
        reporter.say(f"warning: {sentence}")
    reporter.say(f"report: {out} ({len(text.encode()) / 1e6:.1f} MB)")
    for index in indices:
        index.close()
    console = results_console()
    for line in ("findings", *lines(found)):
        console.print(plain(line), soft_wrap=True)
