"""`creditflow report`: write a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from creditflow._utils.files import write_named
from creditflow._utils.progress import Reporter
from creditflow.cli._options import number_option
from creditflow.errors import InputError
from creditflow.reports.html import page
from creditflow.reports.tables import results_console
from creditflow.reports.text import plain
from creditflow.runs import Ledger

EXTRA = "report"
MOST_RUNS = 4


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run, and up to three runs to compare.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    samples: Annotated[int, number_option("--samples", "Number of sample trajectories.", 0, 10_000)] = 10,
) -> None:
    """Write a run as one HTML file.

    The page needs no network. It shows findings in sentences, curves, agents, the flow of credit, and the advantage of
    each sampled step. The findings are printed at the end.

    Example: creditflow report runs/RUN -o report.html
    """
    from creditflow.reports.findings import lines
    from creditflow.reports.overview import comparison, left_out
    from creditflow.reports.run_report import indexed, report_data

    if len(runs) > MOST_RUNS:
        raise InputError(f"report: expected at most {MOST_RUNS} runs, got {len(runs)}")
    reporter = Reporter()
    ledgers = [Ledger.open(path) for path in runs]
    indices = []
    with reporter.bar("read", len(ledgers)) as bar:
        for ledger in ledgers:
            indices.append(indexed(ledger))
            bar.advance()
    first = ledgers[0]
    data, findings = report_data(first, indices[0], samples)
    missing = list(data["overview"]["left_out"])
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
    for line in ("findings", *lines(findings)):
        console.print(plain(line), soft_wrap=True)
