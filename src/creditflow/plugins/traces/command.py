"""`creditflow convert`: turn traces of other systems into trajectories."""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from creditflow._utils.files import write_named
from creditflow._utils.progress import Reporter
from creditflow.credit import CreditOptions, assign
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Step, Trajectory, TrajectoryBatch
from creditflow.errors import BatchError, DataError, InputError
from creditflow.plugins import traces
from creditflow.plugins.traces import Converted, ConvertOptions, Span, read_spans
from creditflow.reports.tables import new_table, results_console, show
from creditflow.reports.text import counted, plain
from creditflow.runs import RunFolder

EXTRA = "traces"
_MOST_ROWS = 20
"""Maximum rows of a table of counts."""


def convert(
    spans: Annotated[
        list[Path],
        typer.Argument(
            metavar="SPANS...",
            help="Files of OpenTelemetry spans and log records (OTLP), exports of LangSmith, Langfuse, MLflow, Phoenix "
            "or Agent Lightning, chat logs, or Parquet files of creditflow.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The Parquet file to write.")],
    agent_match: Annotated[str, typer.Option(metavar="REGEX", help="Keep only calls of agents that match.")] = "",
    outcome: Annotated[str, typer.Option(metavar="NAME", help="The reward to use as the outcome.")] = "",
    range: Annotated[
        list[str] | None, typer.Option(metavar="NAME=LOW:HIGH", help="A reward's range; else 0:1.")
    ] = None,
    trajectory_by: Annotated[str, typer.Option(metavar="KEY", help="Trajectory attribute; else the trace.")] = "",
    uid_by: Annotated[str, typer.Option(metavar="KEY", help="Task attribute; else the first prompt.")] = "",
    left_out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the left-out records.")] = None,
    credit: Annotated[Path | None, typer.Option(metavar="RUN", help="Also assign credit and write a run.")] = None,
) -> None:
    """Turn traces of other systems into trajectories.

    Each model call becomes a step. Prints steps by agent, rewards by name, and the records left out with the reasons.

    Example: creditflow convert spans.jsonl -o trajectories.parquet
    """
    from creditflow.data import write_parquet

    if out.suffix != ".parquet":
        raise InputError(f"--out: expected a name that ends with .parquet, got {out}")
    if credit is not None and (credit / "run.json" if credit.is_dir() else credit).exists():
        kind = "run" if credit.is_dir() else "file"
        raise InputError(f"--credit: {credit} is a {kind} already; name another folder")
    options = traces.ConvertOptions(agent_match, outcome, _ranges(range or []), trajectory_by, uid_by)
    reporter, console = Reporter(), results_console()
    records, copied = _read(spans, options, reporter)
    converted = traces.convert(records, options)
    _expect_named_fields(records, converted, options)
    if left_out is not None:
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in converted.left_out)
        write_named(left_out, lambda path: path.write_text(lines), "--left-out")
    if records:
        _print(converted)
    if converted.trajectories and all(trajectory.outcome is None for trajectory in converted.trajectories):
        reporter.say(
            "warning: no trajectory has an outcome, so that credit comes from the sub-rewards alone; --outcome names a "
            "reward as the outcome"
        )
    if copied:
        console.print(f"creditflow's Parquet: {_size(copied)}, unchanged", soft_wrap=True)
    trajectories, files = [*converted.trajectories, *copied], ", ".join(map(str, spans))
    if not trajectories:
        hint = "left out gives the reasons, and how tracers record messages: docs/how_to/traces.md"
        raise DataError(f"{files}: nothing to write, no model call has become a step; {hint}")
    ids = Counter(trajectory.id for trajectory in trajectories)
    if repeated := [id for id, n in ids.items() if n > 1]:
        hint = "give each trajectory once; chat logs without ids: convert them together, or set trajectory_id"
        raise DataError(f"{files}: trajectory {repeated[0]} occurs twice; {hint}")
    batch = TrajectoryBatch.from_trajectories(trajectories)
    write_named(out, partial(write_parquet, batch), "--out")
    console.print(f"written: {out}", soft_wrap=True)
    if credit is not None:
        _write_run(batch, credit, spans)
        arguments = [str(credit), batch.step_ids[-1]]
        dashes = ["--"] if any(argument.startswith("-") for argument in arguments) else []
        why = shlex.join(["creditflow", "why", *dashes, *arguments])
        console.print(f"written: {credit}; see {why}", soft_wrap=True)


def _read(
    sources: Sequence[Path], options: ConvertOptions, reporter: Reporter
) -> tuple[Sequence[Span], list[Trajectory]]:
    """The spans of the traces, and the trajectories of creditflow's Parquet files."""
    from creditflow.data import read_parquet

    parquet = [source for source in sources if source.suffix == ".parquet"]
    if parquet and options != ConvertOptions():
        raise InputError(
            f"{parquet[0]}: creditflow's Parquet is copied unchanged; convert it apart from traces, without options"
        )
    try:
        copied = [trajectory for source in parquet for trajectory in read_parquet(source).to_trajectories()]
    except BatchError as error:
        raise DataError(str(error)) from error  # the message names the file
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spans = read_spans(source for source in sources if source not in parquet)
    for warning in caught:
        reporter.say(f"warning: {warning.message}")
    return spans, copied


def _expect_named_fields(spans: Sequence[Span], converted: Converted, options: ConvertOptions) -> None:
    """Raise InputError if an option names a missing attribute or reward; it would silently have no effect."""
    for option, key in (("--trajectory-by", options.trajectory_by), ("--uid-by", options.uid_by)):
        if key and spans and not any(key in span.attributes or key in span.resource for span in spans):
            raise InputError(f"{option}: no span has an attribute {key!r}")
    if not converted.trajectories:
        return
    rewards = {name for trajectory in converted.trajectories for step in trajectory.steps for name in step.scores}
    for trajectory in converted.trajectories:
        rewards |= {*trajectory.info.get("rewards", ()), trajectory.info.get("outcome")} - {None}
    outcome = [("--outcome", options.outcome)] if options.outcome else []
    for option, name in (*outcome, *(("--range", name) for name in options.ranges)):
        if name not in rewards:
            names = ", ".join(sorted(map(str, rewards))) or "none"
            raise InputError(f"{option}: no reward is called {name!r}; the traces have {names}")


def _write_run(batch: TrajectoryBatch, run: Path, sources: Sequence[Path]) -> None:
    """Write the trajectories as a run of one training step, with credit under the default options."""
    facts = {"engine": "none", "converted_from": [str(source.resolve()) for source in sources], "config": {}}
    assignment = assign(batch, CreditOptions())
    folder = RunFolder.create(run, facts, "{}\n")
    folder.write_steps(1, batch, assignment)
    folder.append_metrics(1, credit_metrics(assignment))


def _ranges(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Parse `NAME=LOW:HIGH`."""
    ranges: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, bounds = text.partition("=")
        low, _, high = bounds.partition(":")
        if name in ranges:
            raise InputError(f"--range: {name} is given twice")
        try:
            ranges[name] = float(low), float(high)
        except ValueError as error:
            raise InputError(f"--range: expected NAME=LOW:HIGH, such as right=-1:1, got {text!r}") from error
    return ranges


def _print(converted: Converted) -> None:
    """Print the steps, the rewards, and the records left out or mended."""
    console = results_console()
    steps = [step for trajectory in converted.trajectories for step in trajectory.steps]
    console.print(f"{counted(converted.spans, 'span')}: {_size(converted.trajectories)}", soft_wrap=True)
    if steps:
        show("steps", new_table(("agent", "steps", "parents by text", "with tokens"), _step_rows(steps)))
    scores = [item for step in steps for item in step.scores.items()]
    values: dict[str, list[float]] = defaultdict(list)
    """Values of each reward; NaN for a failed score."""
    for trajectory in converted.trajectories:
        if trajectory.outcome is not None:
            scores.append((f"{trajectory.info['outcome']} (outcome)", trajectory.outcome))
        for name, value in trajectory.info.get("rewards", {}).items():
            values[f"{name} (in info)"].append(value)
    for name, score in scores:
        values[name].append(score.value if isinstance(score.value, float) else math.nan)
    if values:
        show("rewards", new_table(("reward", "count", "mean", "failed"), _reward_rows(values)))
    for name, reason in {name: score.reason for name, score in scores if score.status != "ok"}.items():
        console.print(plain(f"{name}: {reason}"), soft_wrap=True)
    kinds = Counter(f"{record.what}: {record.reason.partition(' as span ')[0]}" for record in converted.left_out)
    for title, counts in (("left out", kinds), ("mended", converted.mended), ("passed over", converted.passed_over)):
        rows = counts.most_common(_MOST_ROWS)
        rows += [("others", counts.total() - sum(n for _, n in rows))] if len(counts) > len(rows) else []
        if rows:
            show(title, new_table((title, "spans"), rows))


def _step_rows(steps: Sequence[Step]) -> Iterator[Sequence[object]]:
    for agent, n in Counter(step.agent for step in steps).most_common():
        own = [step for step in steps if step.agent == agent]
        by_text = sum(step.info.get("parents_by") == "text" for step in own)
        yield agent, n, by_text, sum(bool(step.response_ids) for step in own)


def _reward_rows(values: Mapping[str, Sequence[Any]]) -> Iterator[Sequence[object]]:
    for name, group in values.items():
        valid = [value for value in group if math.isfinite(value)]
        yield name, len(group), mean(valid) if valid else "", len(group) - len(valid)


def _size(trajectories: Sequence[Trajectory]) -> str:
    tasks, steps = len({trajectory.uid for trajectory in trajectories}), sum(len(t.steps) for t in trajectories)
    n = counted(len(trajectories), "trajectory", "trajectories")
    return f"{n} of {counted(tasks, 'task')}, {counted(steps, 'step')}"
