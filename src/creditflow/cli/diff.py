"""`creditflow diff`: compare two runs, or two assignments of one run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from creditflow._utils.progress import Reporter
from creditflow.credit.analysis.difference import CreditChange, added, moved
from creditflow.credit.trees import rollouts_of
from creditflow.data import Floats
from creditflow.reports.tables import MOVED_MEANING, moved_table, new_table, results_console, show
from creditflow.reports.text import number, steps_words
from creditflow.runs import Ledger, Recorded


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a recredit of one.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="The run to compare.")],
) -> None:
    """Compare two runs, or a run with a recredit of it.

    Prints the differences in settings, credit and final metrics.
    """
    from creditflow.reports.overview import different
    from creditflow.reports.overview import settings as settings_of

    one, two = Ledger.open(first), Ledger.open(second)
    console, reporter = results_console(), Reporter()
    for ledger in (one, two):
        for torn in ledger.torn:
            reporter.say(f"set aside: {torn} is incomplete, a crash cut it off")
    settings = different([settings_of(one), settings_of(two)])
    if settings:
        rows = [(key, *map(json.dumps, values)) for key, values in settings.items()]
        show("settings", new_table(("setting", "first", "second"), rows))
    else:
        console.print("settings: the same")
    common = [step for step in one.steps if step in two.steps]
    comparison = _Comparison()
    with reporter.bar("read", len(common)) as bar:
        for step in common:
            comparison.add(one.read(step), two.read(step))
            bar.advance()
    if comparison.moved:
        title = f"the same trajectories in {comparison.same} training steps: changes of credit"
        show(title, moved_table(comparison.moved))
        console.print(MOVED_MEANING)
    if comparison.others:
        show(f"{comparison.others} training steps with different trajectories, by agent", comparison.table())
    unpaired = sorted({*one.steps} ^ {*two.steps})
    for reason, steps in (("only one run has", unpaired), ("no credit was assigned in", comparison.unassigned)):
        if steps:
            console.print(f"left out: {reason} {steps_words(steps)}")
    last = [_last_metrics(ledger) for ledger in (one, two)]
    if metrics := [(name, *(values[name] for values in last)) for name in _SHOWN if all(name in v for v in last)]:
        show("last metrics of each run", new_table(("metric", "first", "second"), metrics))


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
class _Comparison:
    """Differences between two runs, summed over training steps."""

    moved: dict[str, CreditChange] = field(default_factory=dict)
    same: int = 0
    """Training steps with the same trajectories in both runs."""
    others: int = 0
    """Training steps with different trajectories."""
    unassigned: list[int] = field(default_factory=list)
    """Training steps in which at least one run has no assignment."""
    sums: dict[str, Floats] = field(default_factory=dict)
    """Per agent, [2, 5]: for each run the sums of steps, credit, |advantage|, scored steps and open scored steps.

    Steps of branches do not count."""

    def add(self, one: Recorded, two: Recorded) -> None:
        """Add a training step that both runs have."""
        a, b = one.assignment, two.assignment
        if a is None or b is None:
            self.unassigned.append(one.step)
            return
        if a.batch.step_ids == b.batch.step_ids and a.batch.responses == b.batch.responses:
            self.moved, self.same = added(self.moved, moved(a, b)), self.same + 1
            return
        self.others += 1
        for side, assignment in enumerate((a, b)):
            open_S = assignment.scored_S & assignment.gate_open_S
            ones_S = np.ones(assignment.batch.n_steps)
            rollout_S = rollouts_of(assignment.batch)[assignment.batch.trajectory_of_step]
            columns = (ones_S, assignment.credit_S, np.abs(assignment.advantage_S), assignment.scored_S, open_S)
            for agent, name in enumerate(assignment.batch.agent_names):
                at = rollout_S & (assignment.batch.agent_of_step == agent)
                self.sums.setdefault(name, np.zeros((2, 5)))[side] += [float(column[at].sum()) for column in columns]

    def table(self) -> Table:
        """One row per agent, `first / second` in each cell."""

        def pair(sums: Floats, at: int, over: int) -> str:
            return " / ".join(number(run[at] / run[over] if run[over] else math.nan) for run in sums)

        rows = []
        for name, sums in self.sums.items():
            steps = " / ".join(f"{run[0]:,.0f}" for run in sums)
            rows.append((name, steps, pair(sums, 1, 0), pair(sums, 2, 0), pair(sums, 4, 3)))
        return new_table(("agent", "steps", "mean credit", "mean |advantage|", "pass rate"), rows)


def _last_metrics(ledger: Ledger) -> dict[str, float]:
    """The newest value of each metric."""
    metrics: dict[str, float] = {}
    for row in ledger.metrics():
        metrics |= {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    return metrics
