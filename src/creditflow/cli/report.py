"""`creditflow report`: write a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from creditflow._utils.files import write_named
from creditflow._utils.progress import Reporter
from creditflow.errors import InputError
from creditflow.reports.html import page
from creditflow.reports.index import Index
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

    The page needs no network. It shows curves, agents, the flow of credit, and the advantage of each sampled step.
    """
    from creditflow.reports.overview import left_out, overview
    from creditflow.reports.samples import samples as sample_trajectories

    if len(runs) > MOST_RUNS:
        raise InputError(f"report: expected at most {MOST_RUNS} runs, got {len(runs)}")
    reporter = Reporter()
    ledgers = [Ledger.open(path) for path in runs]
    indices = []
    with reporter.bar("read", len(ledgers)) as bar:
        for ledger in ledgers:
            index = Index(ledger)
            index.refresh(ledger)
            indices.append(index)
            bar.advance()
    first, index = ledgers[0], indices[0]
    data: dict[str, Any] = {"overview": overview(first, index), "samples": sample_trajectories(first, index, samples)}
    missing = [*data["overview"]["left_out"], *data["samples"].pop("left_out")]
    if len(ledgers) > 1:
        data["comparison"] = _comparison(ledgers, indices)
        for run, ledger, other in zip(data["comparison"]["runs"][1:], ledgers[1:], indices[1:], strict=True):
            missing += [f"{run['name']}: {sentence}" for sentence in left_out(ledger, other)]
    data["overview"]["left_out"] = missing
    text = page(data, f"creditflow: {first.path.resolve().name}")
    write_named(out, lambda path: path.write_text(text, encoding="utf-8"), "-o")
    for sentence in missing:
        reporter.say(f"warning: {sentence}")
    reporter.say(f"report: {out} ({len(text.encode()) / 1e6:.1f} MB)")


def _comparison(ledgers: Sequence[Ledger], indices: Sequence[Index]) -> dict[str, Any]:
    from creditflow.reports.overview import curves, different, of_agents, settings

    names = [ledger.path.resolve().name for ledger in ledgers]
    if len(set(names)) < len(names):
        names = [f"{ledger.path.resolve().parent.name}/{name}" for ledger, name in zip(ledgers, names, strict=True)]
    runs = [
        {"name": name, "curves": curves(ledger), "agents": of_agents(index)}
        for name, ledger, index in zip(names, ledgers, indices, strict=True)
    ]
    return {"runs": runs, "settings": different([settings(ledger) for ledger in ledgers])}
