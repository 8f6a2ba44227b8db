"""`creditflow calibrate`: how well each agent's scores predict the outcome, from a run's trajectories."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from creditflow._utils.files import json_ready
from creditflow._utils.progress import Bar, Reporter
from creditflow.data import TrajectoryBatch
from creditflow.errors import ConfigError, DataError
from creditflow.reports.tables import new_table, results_console, show
from creditflow.reports.text import number
from creditflow.runs import Ledger
from creditflow.studies.calibration import ALL, Calibration, calibrate, observe


def calibrate_run(path: Path, last: int | None, plot: Path | None, out: Path | None, reporter: Reporter) -> None:
    """Print a row per agent and function. `last`: read only this number of training steps, the newest."""
    for option, file in (("--plot", plot), ("--json", out)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option}: {file.parent} is no folder")
    ledger = Ledger.open(path)
    steps = ledger.steps[-last:] if last else ledger.steps
    with reporter.bar("read", len(steps)) as bar:
        seen = observe(_told(ledger, steps, bar))
    if not seen:
        raise DataError(f"{path}: no scored step of a trajectory with a scored outcome is on record")
    found = sorted((calibrate(one) for one in seen), key=lambda one: (one.agent, one.name == ALL))
    console = results_console()
    table = new_table(
        "agent: score", "steps", "mean", "ended right", "AUC", "95 %", "within tasks", "error", "threshold", "separates"
    )
    for one in found:
        table.add_row(f"{one.agent}: {one.name}", *_cells(one))
    show(console, f"what scores say of the outcome, training steps {steps[0]} to {steps[-1]}", table)
    if plot is not None:
        from creditflow.reports.calibration_plot import draw_calibration

        draw_calibration(plot, found)
        reporter.say(f"figure: {plot}")
    if out is not None:
        numbers = json_ready([asdict(one) for one in found])
        out.write_text(json.dumps(numbers, indent=1) + "\n")


def _told(ledger: Ledger, steps: Sequence[int], bar: Bar) -> Iterator[TrajectoryBatch]:
    for step in steps:
        yield ledger.read(step).batch
        bar.advance()


def _cells(one: Calibration) -> list[str]:
    interval = "-" if math.isnan(one.auc_low) else f"[{number(one.auc_low)}, {number(one.auc_high)}]"
    at = "-" if math.isnan(one.threshold) else f"{one.threshold:.3g} ({one.pass_rate:.0%} pass)"
    return [
        f"{one.steps:,}",
        *(number(value) for value in (one.mean_score, one.mean_right, one.auc)),
        interval,
        number(one.auc_within),
        number(one.error),
        at,
        number(one.separation, 2),
    ]
