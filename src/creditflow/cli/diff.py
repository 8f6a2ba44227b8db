"""`creditflow diff`: compare two runs, or two assignments of one run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from creditflow._utils.progress import Reporter
from creditflow.credit.analysis.difference import CreditChange, added, moved
from creditflow.reports.overview import different
from creditflow.reports.overview import settings as settings_of
from creditflow.reports.tables import MOVED_MEANING, moved_table, new_table, results_console, show
from creditflow.reports.text import number, steps_words
from creditflow.runs import Ledger, Recorded


def diff(first: Path, second: Path, reporter: Reporter) -> None:
    """Print the differences in settings, credit and final metrics."""
    one, two = Ledger.open(first), Ledger.open(second)
    console = results_console()
    for ledger in (one, two):
        for torn in ledger.torn:
            reporter.say(f"set aside: {torn} is incomplete, a crash cut it off")
    settings = new_table("setting", "first", "second")
    for key, values in different([settings_of(one), settings_of(two)]).items():
        settings.add_row(key, *(json.dumps(value) for value in values))
    show(console, "settings", settings) if settings.row_count else console.print("settings: the same")
    common = [step for step in one.steps if step in two.steps]
    sides = _Sides()
    with reporter.bar("read", len(common)) as bar:
        for step in common:
            sides.take(one.read(step), two.read(step))
            bar.advance()
    if sides.moved:
        show(console, f"the same trajectories in {sides.same} training steps: what moved", moved_table(sides.moved))
        console.print(MOVED_MEANING)
    if sides.others:
        show(console, f"{sides.others} training steps of other trajectories, by agent", sides.table())
    apart = sorted({*one.steps} ^ {*two.steps})
    for words, steps in (("only one run has", apart), ("credit was never assigned in", sides.unassigned)):
        if steps:
            console.print(f"left out: {words} {steps_words(steps)}")
    metrics = new_table("metric", "first", "second")
    last = [_last_metrics(ledger) for ledger in (one, two)]
    for name in _SHOWN:
        if all(name in of_run for of_run in last):
            metrics.add_row(name, *(number(of_run[name]) for of_run in last))
    if metrics.row_count:
        show(console, "metrics, last of each run", metrics)


_SHOWN = (
    "train/pass_at_1",
    "val/pass_at_1",
    "val/pass_at_1_greedy",
    "val/step_error_rate",
    "propagation/pass_rate",
    "reward/error_rate",
    "actor/entropy",
    "actor/grad_norm",
    "timing/step_s",
)


@dataclass(slots=True)
class _Sides:
    """Differences between two runs, summed over training steps."""

    moved: dict[str, CreditChange] = field(default_factory=dict)
    same: int = 0
    others: int = 0
    unassigned: list[int] = field(default_factory=list)
    """Training steps in which at least one run has no assignment."""
    sums: dict[str, Any] = field(default_factory=dict)
    """Per agent, [2, 5]: for each run the sums of steps, credit, |advantage|, scored steps and open scored steps."""

    def take(self, one: Recorded, two: Recorded) -> None:
        a, b = one.assignment, two.assignment
        if a is None or b is None:
            self.unassigned.append(one.step)
            return
        if a.batch.step_ids == b.batch.step_ids and a.batch.responses == b.batch.responses:
            self.moved, self.same = added(self.moved, moved(a, b)), self.same + 1
            return
        self.others += 1
        for side, made in enumerate((a, b)):
            open_S = made.scored_S & made.gate_open_S
            columns = (np.ones(made.batch.n_steps), made.credit_S, np.abs(made.advantage_S), made.scored_S, open_S)
            for agent, name in enumerate(made.batch.agent_names):
                at = made.batch.agent_of_step == agent
                self.sums.setdefault(name, np.zeros((2, 5)))[side] += [float(column[at].sum()) for column in columns]

    def table(self) -> Any:
        table = new_table("agent", "steps", "mean credit", "mean |advantage|", "pass rate")
        for name, sums in self.sums.items():
            cells = []
            for at, over in ((0, None), (1, 0), (2, 0), (4, 3)):
                pair = [
                    f"{s[at]:,.0f}" if over is None else number(s[at] / s[over] if s[over] else float("nan"))
                    for s in sums
                ]
                cells.append(" / ".join(pair))
            table.add_row(name, *cells)
        return table


def _last_metrics(ledger: Ledger) -> dict[str, float]:
    """The newest value of each metric."""
    found: dict[str, float] = {}
    for row in ledger.metrics():
        found |= {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    return found
