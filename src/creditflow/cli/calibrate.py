"""`creditflow calibrate`: how well each agent's scores predict the outcome, from a run's trajectories."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from creditflow._utils.files import write_json
from creditflow._utils.progress import Reporter
from creditflow.cli._options import JsonFile, PlotFile, Run, expect_parent_folders
from creditflow.data import TrajectoryBatch
from creditflow.errors import DataError
from creditflow.reports.tables import new_table, show
from creditflow.reports.text import number
from creditflow.runs import Ledger
from creditflow.studies import calibration
from creditflow.studies.calibration import Calibration


def calibrate(
    run: Run,
    *,
    last: Annotated[
        int | None, typer.Option(min=1, help="Use only the newest LAST training steps; default: all.")
    ] = None,
    plot: PlotFile = None,
    json: JsonFile = None,
) -> None:
    """Measure how well each agent's sub-rewards predict the outcome.

    Prints one row per agent and score, with the threshold that separates right from wrong trajectories best.
    """
    expect_parent_folders(plot=plot, json=json)
    reporter = Reporter()
    ledger = Ledger.open(run)
    steps = ledger.steps[-last:] if last else ledger.steps
    with reporter.bar("read", len(steps)) as bar:

        def batches() -> Iterator[TrajectoryBatch]:
            for step in steps:
                yield ledger.read(step).batch
                bar.advance()

        observations = calibration.observe(batches())
    if not observations:
        raise DataError(f"{run}: expected a scored step in a trajectory with a scored outcome, found none")
    results = [calibration.calibrate(observed) for observed in observations]
    results.sort(key=lambda result: (result.agent, result.name == calibration.ALL))
    header = (
        "agent: score", "steps", "mean", "right", "AUC", "95 %", "within tasks", "error", "threshold", "separates"
    )  # fmt: skip
    title = f"scores as predictors of the outcome, training steps {steps[0]} to {steps[-1]}"
    show(title, new_table(header, map(_row, results)))
    if plot is not None:
        from creditflow.reports.calibration_plot import draw_calibration

        draw_calibration(plot, results)
        reporter.say(f"figure: {plot}")
    if json is not None:
        write_json(json, [asdict(result) for result in results])


def _row(result: Calibration) -> list[str | float]:
    interval = "-" if math.isnan(result.auc_low) else f"[{number(result.auc_low)}, {number(result.auc_high)}]"
    at = "-" if math.isnan(result.threshold) else f"{result.threshold:.3g} ({result.pass_rate:.0%} pass)"
    means = (result.mean_score, result.mean_right, result.auc)
    rest = (interval, result.auc_within, result.error, at, number(result.separation, 2))
    return [f"{result.agent}: {result.name}", result.steps, *means, *rest]
