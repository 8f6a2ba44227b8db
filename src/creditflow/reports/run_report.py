"""The report of one run: the content of its page, and the page with a short summary for trackers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from creditflow._utils.files import write_whole
from creditflow.errors import DataError, first_line
from creditflow.reports.detail import Spelling, step_detail, trajectory_graph
from creditflow.reports.findings import Finding, as_json, findings, tables_of
from creditflow.reports.html import page
from creditflow.reports.index import ROW, Index
from creditflow.reports.overview import overview
from creditflow.reports.text import number, plain
from creditflow.reports.why import worth_a_look
from creditflow.runs import Ledger

SAMPLES = 10
"""Default number of sample trajectories."""
FILE = "report.html"
_STEPS = 2000
"""Maximum steps of all samples after the first, since browsers cannot open a report of many thousands of steps."""
_SIZE = 4_000_000
"""Maximum characters of all samples as JSON, likewise."""


def indexed(ledger: Ledger) -> Index:
    """An index of all that the run has recorded so far. Raises InputError if duckdb is not installed."""
    index = Index(ledger)
    index.refresh(ledger)
    return index


def report_data(ledger: Ledger, index: Index, count: int = SAMPLES) -> tuple[dict[str, Any], list[Finding]]:
    """The content of a run's page, with `count` sample trajectories, and its findings.

    `overview.left_out` names the missing parts.
    """
    found = findings(tables_of(ledger, index))
    shown = [finding.trajectory for finding in found if finding.trajectory is not None]
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


def _summary(shown: dict[str, Any], findings: Sequence[Finding]) -> str:
    """The findings and notices of a run, and a table of its agents."""
    columns = ("steps", "error_rate", "pass_rate", "credit", "share", "wrong_raised", "right_lowered")
    sentences = (*(finding.sentence for finding in findings), *shown["notices"], *shown["left_out"])
    lines = [f"* {plain(sentence, 400)}" for sentence in sentences]
    lines += ["", f"| agent | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
    for row in shown["agents"]:
        cells = (row[name] for name in columns)
        name = plain(str(row["agent"]), 60).replace("|", " ").replace("`", "'")
        numbers = ("-" if cell is None else str(cell) if isinstance(cell, int) else number(cell) for cell in cells)
        lines.append(f"| `{name}` | {' | '.join(numbers)} |")
    return "\n".join(lines).strip()


def samples(ledger: Ledger, index: Index, count: int, first: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    """Return `{trajectories, graphs, steps, left_out}` of sample trajectories.

    They are rows of the list, their graphs and steps, and sentences on missing parts. The trajectories `first`, each
    with its training step, come first. Then right trajectories and others alternate: those of steps that are worth a
    look, then those with the largest advantages, up or down. They come from the newest readable training step, and from
    earlier ones if it has too few. If the samples are too long, the last trajectories are left out, but never the
    first. `left_out` covers only parts that the overview does not state.
    """
    trajectories: list[dict[str, Any]] = []
    graphs: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    missing: list[str] = []
    spelling, written, is_full = Spelling(ledger), 0, False
    readable = sorted(index.taken.keys() - index.reasons.keys(), reverse=True)  # the overview states the reasons
    of_first = sorted({at for _, at in first}.intersection(readable))
    read = lru_cache(maxsize=1)(ledger.read)  # the newest is often the last with some of `first`
    for step, is_first in [*((step, True) for step in of_first), *((step, False) for step in readable)]:
        if is_full or len(trajectories) == count:
            break
        try:
            recorded = read(step)
        except DataError as error:
            missing.append(f"no sample is from {ledger.file(step).name}: {first_line(error)}")
            continue
        batch, assigned = recorded.batch, recorded.assignment
        told = [] if assigned is None else [batch.trajectory_of_step[s] for s, _ in worth_a_look(assigned)]
        lists = [id for id, at in first if at == step], [batch.trajectory_ids[n] for n in told]
        rows = _of_step(index, step, count - len(trajectories), *lists, is_first=is_first)
        for done, row in enumerate(rows):
            graph = trajectory_graph(recorded, row["trajectory_id"])
            # Only our engines put the training step into ids; elsewhere two training steps may share an id.
            details = {
                f"{recorded.step} {step['id']}": step_detail(recorded, step["id"], None, spelling)
                for step in graph["steps"]
            }
            size = len(json.dumps([graph, details]))
            is_full = bool(trajectories) and (written + size > _SIZE or len(steps) + len(details) > _STEPS)
            if is_full:
                n_left = len(rows) - done
                missing.append(
                    f"{n_left} of {len(trajectories) + n_left} sample trajectories are left out: they are long; "
                    "creditflow view shows all"
                )
                break
            written += size
            trajectories.append(row)
            graphs[f"{recorded.step} {row['trajectory_id']}"] = graph
            steps |= details
    policies = dict.fromkeys(step["policy"] for step in steps.values() if step["tokens"] and not step["spelled"])
    missing += [
        f"tokens of policy {policy!r} are shown as ids: no readable tokenizer.json is in the run's checkpoints"
        for policy in policies
    ]
    return {"trajectories": trajectories, "graphs": graphs, "steps": steps, "left_out": list(dict.fromkeys(missing))}


def _of_step(
    index: Index, step: int, count: int, first: Sequence[str], told: Sequence[str], *, is_first: bool
) -> list[dict[str, Any]]:
    """Rows of a training step: those of the trajectories `first`, or of the others, of which `told` come first."""
    return index.ask(
        f"""
        WITH ranked AS (
            SELECT *, row_number() OVER (
                PARTITION BY coalesce(ended_right, false)
                ORDER BY list_position($4, trajectory_id) NULLS LAST, largest DESC NULLS LAST, number
            ) AS rank
            FROM trajectories WHERE training_step = $1 AND list_contains($3, trajectory_id) = $5
        )
        SELECT {ROW} FROM ranked LEFT JOIN tasks USING (task_key) ORDER BY rank, ended_right LIMIT $2
        """,
        [step, count, list(first), list(told), is_first],
    )
