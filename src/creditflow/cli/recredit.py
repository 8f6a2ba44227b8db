"""`creditflow recredit`: assign a run's credit again under other settings, without a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from creditflow.cli._options import CreditOverrides, Run
from creditflow.errors import BatchError, InputError

if TYPE_CHECKING:
    from creditflow.credit import Assignment
    from creditflow.credit.analysis.difference import CreditChange
    from creditflow.runs import Ledger, Recorded


def recredit(
    run: Run,
    overrides: CreditOverrides = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="The folder to write; default: RUN/recredited/KEY=VALUE."),
    ] = None,
) -> None:
    """Assign a run's credit again under other settings.

    Needs no model. Prints how much credit moved, and writes the new assignment as a run, which why, diff, report and
    view read.
    """
    from creditflow._utils.progress import Reporter
    from creditflow.config import credit_overrides
    from creditflow.credit.analysis.difference import added, moved
    from creditflow.credit.analysis.metrics import credit_metrics
    from creditflow.runs import Ledger, RunFolder

    settings = overrides or []
    ledger, changed = Ledger.open(run), credit_overrides(settings)
    if "shadow" in changed:
        raise InputError("algorithm.shadow: recredit already computes a second assignment; set that rule's options")
    if not ledger.steps:
        raise InputError(f"{run}: expected recorded training steps, found none")
    out = (out or run / "recredited" / _folder_name(settings)).resolve()
    if (out / "run.json").exists():
        raise InputError(f"{out} holds an assignment already; name another folder with -o")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"-o: {out} exists and is not an empty folder; name another one")
    before = ledger.run.get("changed")
    in_force = {**(before if isinstance(before, dict) else {}), **changed}
    facts = ledger.run | {"recredited_from": str(run.resolve()), "changed": in_force}
    try:
        config = (run / "config.yaml").read_text()
    except OSError as error:
        raise InputError(f"{run / 'config.yaml'}: expected the run's configuration: {error.strerror}") from error
    total: dict[str, CreditChange] = {}
    unassigned: list[int] = []
    partial = out.with_name(f".{out.name}.part")  # an interrupted recredit must not look complete
    shutil.rmtree(partial, ignore_errors=True)
    reporter = Reporter()
    try:
        with reporter.bar("recredit", len(ledger.steps)) as bar:
            for recorded, assignment in reassigned(ledger, changed):
                if not partial.exists():  # created this late, so that invalid settings leave no folder
                    target = RunFolder.create(partial, facts, config)
                target.write_steps(recorded.step, recorded.batch, assignment)
                if assignment is not None:
                    target.append_metrics(recorded.step, credit_metrics(assignment))
                if recorded.assignment is None or assignment is None:
                    unassigned.append(recorded.step)
                else:
                    total = added(total, moved(recorded.assignment, assignment))
                bar.advance()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for torn in ledger.torn:
        reporter.say(f"set aside: {torn} is incomplete, a crash cut it off")
    _print(f"{' '.join(settings) or 'no settings'}: changes of credit", total, unassigned, out)


def _print(title: str, total: Mapping[str, CreditChange], unassigned: Sequence[int], out: Path) -> None:
    """Print the table of changes. `unassigned`: training steps without assigned credit."""
    from creditflow.reports.tables import MOVED_MEANING, moved_table, results_console, show
    from creditflow.reports.text import steps_words

    console = results_console()
    show(console, title, moved_table(total))
    console.print(MOVED_MEANING)
    if unassigned:
        console.print(f"left out: {steps_words(unassigned)}, without credit, because too many scores had failed")
    console.print(f"written: {out}", soft_wrap=True)


def reassigned(ledger: Ledger, changed: Mapping[str, Any]) -> Iterator[tuple[Recorded, Assignment | None]]:
    """Yield each recorded training step with its assignment under the recorded options and `changed`.

    Without a changed threshold, the recorded thresholds apply; a changed one adapts from training step to training
    step, as in training. A training step without assigned credit yields None. Runs the files that the options name.
    Raises InputError if options are invalid, cannot be loaded, or need a critic that the run did not have.
    """
    from creditflow.config import with_loaded_files
    from creditflow.credit import BatchStats, assign, make_threshold
    from creditflow.credit.analysis.metrics import batch_stats

    spec = changed.get("propagation_threshold")
    new_threshold = make_threshold(spec) if "propagation_threshold" in changed and spec is not None else None
    accuracy = {row["step"]: row["val/pass_at_1"] for row in ledger.metrics() if "val/pass_at_1" in row}
    for recorded in ledger:
        before = recorded.assignment
        if before is None:
            yield recorded, None
            continue
        options = with_loaded_files(replace(before.options, shadow=None, **changed), Path.cwd())
        options.validate()
        options.refuse_ignored(changed)
        threshold = before.standing_threshold() if new_threshold is None else new_threshold
        values_T = None if before.critic is None else before.critic.values_T
        try:
            assignment = assign(recorded.batch, options, values_T=values_T, threshold=threshold)
        except BatchError as error:
            raise InputError(f"training step {recorded.step}: {error}") from error
        if new_threshold is not None:
            new_threshold.update(batch_stats(assignment))
            if accuracy.get(recorded.step) is not None:
                new_threshold.update(BatchStats({}, {}, accuracy=accuracy[recorded.step]))
        yield recorded, assignment


def _folder_name(overrides: Sequence[str]) -> str:
    """A folder name made of the overrides."""
    text = "_".join(overrides) or "unchanged"
    return "".join(c if c.isalnum() or c in "=.-" else "_" for c in text)[:100]
