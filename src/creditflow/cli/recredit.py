"""`creditflow recredit`: assign a run's credit again under other settings, without a model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from creditflow._utils.files import make_folder
from creditflow._utils.progress import Reporter
from creditflow.cli._options import Run
from creditflow.credit.analysis.difference import CreditChange, added, moved
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.credit.records import Rule
from creditflow.errors import InputError
from creditflow.monitoring.guard import FALLBACK_RULE
from creditflow.reports.tables import MOVED_MEANING, moved_table, results_console, show
from creditflow.reports.text import in_yaml, plain, steps_words
from creditflow.runs import Ledger, RunFolder

EXTRA = "report"


def recredit(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Credit options to set, such as gamma=0.9.")
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="The folder to write; default: RUN/recredited/KEY=VALUE."),
    ] = None,
) -> None:
    """Assign a run's credit again under other settings.

    Needs no model. Prints how much credit moved, and writes the new assignment as a run, which why, report and view
    read.

    Example: creditflow recredit runs/RUN algorithm.propagation=identical
    """
    from creditflow.config import credit_overrides
    from creditflow.config.algorithm import merge_options, rule_options
    from creditflow.studies.reassignment import reassigned

    settings = overrides or []
    ledger, changed = Ledger.open(run), credit_overrides(settings)
    if "shadow" in changed:
        raise InputError("algorithm.shadow: recredit already computes a second assignment; set that rule's options")
    if not ledger.steps:
        raise InputError(f"{run}: expected recorded training steps, found none")
    named = "".join(c if c.isalnum() or c in "=.-" else "_" for c in "_".join(settings) or "unchanged")[:100]
    option, out = "-o" if out else "RUN", (out or run / "recredited" / named).resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{option}: {out} exists and is not an empty folder; name another one with -o")
    before: Any = earlier if isinstance(earlier := ledger.run.get("changed"), dict) else {}
    rule = merge_options(rule_options(before.get("propagation")), rule_options(changed.get("propagation")))
    in_force = {**before, **changed} | ({"propagation": rule} if rule else {})
    facts = ledger.run | {"recredited_from": str(run.resolve()), "changed": in_force}
    try:
        config = (run / "config.yaml").read_text()
    except OSError as error:
        raise InputError(f"{run / 'config.yaml'}: expected the run's configuration: {error.strerror}") from error
    total: dict[str, CreditChange] = {}
    unassigned: list[int] = []
    rules: dict[int, Rule] = {}
    partial = out.with_name(f".{out.name}.part")  # an interrupted recredit must not look complete
    shutil.rmtree(partial, ignore_errors=True)
    reporter = Reporter()
    try:
        with reporter.bar("recredit", len(ledger.steps)) as bar:
            for recorded, assignment in reassigned(ledger, changed):
                if not partial.exists():  # made this late, so that invalid settings leave no folder
                    make_folder(partial, option)
                    target = RunFolder.create(partial, facts, config)
                target.write_steps(recorded.step, recorded.batch, assignment)
                if assignment is not None:
                    target.append_metrics(recorded.step, credit_metrics(assignment))
                if recorded.assignment is None or assignment is None:
                    unassigned.append(recorded.step)
                else:
                    total = added(total, moved(recorded.assignment, assignment))
                    rules[recorded.step] = assignment.options.propagation
                bar.advance()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for torn in ledger.torn:
        reporter.say(f"set aside: {torn} is incomplete, a crash cut it off")
    _print(f"{' '.join(settings) or 'no settings'}: changes of credit", total, unassigned, rules, out)


def _print(
    title: str, total: Mapping[str, CreditChange], unassigned: Sequence[int], rules: Mapping[int, Rule], out: Path
) -> None:
    """Print the table of changes. `unassigned`: training steps without assigned credit; `rules`: by training step."""
    console = results_console()
    show(title, moved_table(total))
    console.print(MOVED_MEANING)
    if unassigned:
        console.print(f"left out: {steps_words(unassigned)}, without credit, because too many scores had failed")
    names = {step: rule.name for step, rule in rules.items()}
    if rules:
        console.print(f"rule: {plain(in_yaml(rules[min(rules)].spec()))}", soft_wrap=True)
    if kept := [step for step, name in names.items() if name == FALLBACK_RULE and len({*names.values()}) > 1]:
        console.print(f"{steps_words(kept)}: the guard's fallback, the rule {FALLBACK_RULE}, stays in force")
    console.print(f"written: {out}", soft_wrap=True)
