"""`creditflow recredit`: assign a run's credit again under other settings, without a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from creditflow._utils.progress import Reporter
from creditflow.config import credit_overrides
from creditflow.credit import Assignment, BatchStats, assign, make_threshold
from creditflow.credit.analysis.difference import CreditChange, added, moved
from creditflow.credit.analysis.metrics import batch_stats, credit_metrics
from creditflow.errors import BatchError, InputError
from creditflow.reports.tables import MOVED_MEANING, moved_table, results_console, show
from creditflow.reports.text import steps_words
from creditflow.runs import Ledger, Recorded, RunFolder


def recredit(path: Path, overrides: Sequence[str], out: Path | None, reporter: Reporter) -> None:
    """Assign a run's credit again under `overrides`, print the changes, and write the result as a new run."""
    ledger, changed = Ledger.open(path), credit_overrides(overrides)
    if "shadow" in changed:
        raise InputError("algorithm.shadow: recredit is itself a second rule beside the one in force; name its options")
    if not ledger.steps:
        raise InputError(f"{path}: no training step is on record yet")
    out = out or path / "recredited" / _name(overrides)
    if (out / "run.json").exists():
        raise InputError(f"{out} holds an assignment already; name another folder with -o")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"-o: {out} is there already, and is no empty folder; name another one")
    run = ledger.run
    before = run.get("changed")
    in_force = {**(before if isinstance(before, dict) else {}), **changed}
    facts = run | {"recredited_from": str(path.resolve()), "changed": in_force}
    try:
        config = (path / "config.yaml").read_text()
    except OSError as error:
        raise InputError(
            f"{path / 'config.yaml'}: {error.strerror}; expected what the run was configured with"
        ) from error
    total: dict[str, CreditChange] = {}
    never: list[int] = []
    aside = out.with_name(f".{out.name}.part")  # an interrupted recredit must not look complete
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with reporter.bar("recredit", len(ledger.steps)) as bar:
            for recorded, made in reassigned(ledger, changed):
                if not aside.exists():  # created this late, so that invalid settings leave no folder
                    target = RunFolder.create(aside, facts, config)
                target.write_steps(recorded.step, recorded.batch, made)
                if made is not None:
                    target.append_metrics(recorded.step, credit_metrics(made))
                if recorded.assignment is None or made is None:
                    never.append(recorded.step)
                else:
                    total = added(total, moved(recorded.assignment, made))
                bar.advance()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for torn in ledger.torn:
        reporter.say(f"set aside: {torn} is incomplete, a crash cut it off")
    _print(f"{' '.join(overrides) or 'nothing changed'}: what moved", total, never, out)


def _print(title: str, total: Mapping[str, CreditChange], never: Sequence[int], out: Path) -> None:
    """Print the table of changes. `never`: training steps without assigned credit."""
    console = results_console()
    show(console, title, moved_table(total))
    console.print(MOVED_MEANING)
    if never:
        console.print(f"left out: {steps_words(never)}, where credit was never assigned: too many scores had failed")
    console.print(f"written: {out}", soft_wrap=True)


def reassigned(ledger: Ledger, changed: Mapping[str, Any]) -> Iterator[tuple[Recorded, Assignment | None]]:
    """Yield each recorded training step with its assignment under the recorded options and `changed`.

    Without a changed threshold, the recorded thresholds apply; a changed one adapts from training step to training
    step, as in training. A training step without assigned credit yields None. Raises InputError if options are invalid
    or need a critic that the run did not have.
    """
    spec = changed.get("propagation_threshold")
    moving = make_threshold(spec) if "propagation_threshold" in changed and spec is not None else None
    accuracy = {row["step"]: row["val/pass_at_1"] for row in ledger.metrics() if "val/pass_at_1" in row}
    for recorded in ledger:
        was = recorded.assignment
        if was is None:
            yield recorded, None
            continue
        options = replace(was.options, shadow=None, **changed)
        options.validate()
        options.refuse_ignored(changed)
        threshold = was.standing_threshold() if moving is None else moving
        values_T = None if was.critic is None else was.critic.values_T
        try:
            made = assign(recorded.batch, options, values_T=values_T, threshold=threshold)
        except BatchError as error:
            raise InputError(f"training step {recorded.step}: {error}") from error
        if moving is not None:
            moving.update(batch_stats(made))
            if accuracy.get(recorded.step) is not None:
                moving.update(BatchStats({}, {}, accuracy=accuracy[recorded.step]))
        yield recorded, made


def _name(overrides: Sequence[str]) -> str:
    """A folder name made of the overrides."""
    text = "_".join(overrides) or "same"
    return "".join(c if c.isalnum() or c in "=.-" else "_" for c in text)[:100]
