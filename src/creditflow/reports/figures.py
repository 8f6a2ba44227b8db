"""Figures of a run for notebooks. Importing this module imports matplotlib (the `report` extra)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from creditflow.errors import InputError, did_you_mean
from creditflow.reports.comparison_plot import COLOURS, STYLES
from creditflow.runs import Ledger
from creditflow.runs.sql import connect

_CURVES = ("val/pass_at_1", "val/pass_at_1_greedy", "train/pass_at_1", "reward/step_error_rate")
_POSITIONS = 40
"""Positions in the heat maps; later ones are counted in the last."""


class RunFigure(Figure):
    """A matplotlib figure that notebooks display without pyplot."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=90)
        return stream.getvalue()


def learning_curve(ledger: Ledger, metrics: Sequence[str] = ()) -> RunFigure:
    """Draw metrics over training. Raises InputError for a metric that the run has not measured."""
    rows = ledger.metrics()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                points.setdefault(name, []).append((row["step"], value))
    for name in metrics:
        if name not in points:
            raise InputError(f"{ledger.path}: expected a measured metric, got {name!r}{did_you_mean(name, points)}")
    chosen = list(metrics) or [name for name in _CURVES if name in points]
    if not chosen:
        raise InputError(f"{ledger.path}: expected measured pass rates, found none yet; name a metric to draw")
    figure = RunFigure(figsize=(8, 3.8), layout="constrained")
    axis = figure.subplots()
    for i, name in enumerate(chosen):
        _line(axis, i, points[name], name)
    _finish(axis, "while training", "share" if not metrics else "")
    return figure


def credit_by_position(ledger: Ledger) -> RunFigure:
    """Draw heat maps of mean credit, and of the mean size of advantages, by agent and position.

    The mean advantage itself is near 0 wherever a step's group is its agent or position.
    """
    rows = _ask(
        ledger,
        f'SELECT agent, least("index", {_POSITIONS - 1}), avg(credit), avg(abs(advantage)) FROM steps '
        "WHERE trained AND step_id IS NOT NULL GROUP BY ALL ORDER BY ALL",
    )
    agents = list(dict.fromkeys(row[0] for row in rows))
    n_positions = max(row[1] for row in rows) + 1
    figure, axes = _panels(2)
    for axis, column, title in zip(axes, (2, 3), ("mean credit", "mean size of advantages"), strict=True):
        mean_AP = np.full((len(agents), n_positions), np.nan)
        for row in rows:
            mean_AP[agents.index(row[0]), row[1]] = row[column]
        far = float(np.nanmax(np.abs(mean_AP))) or 1.0
        colours = ("PuOr", -far) if column == 2 else ("viridis", 0.0)
        image = axis.imshow(mean_AP, aspect="auto", cmap=colours[0], vmin=colours[1], vmax=far, interpolation="nearest")
        figure.colorbar(image, ax=axis)
        axis.set_yticks(range(len(agents)), [_shown(agent) for agent in agents])
        axis.set(title=title, xlabel="position in the trajectory")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def gates(ledger: Ledger) -> RunFigure:
    """Draw the share of open gates, and of withheld credit, by agent over training.

    Raises InputError for a run without gates.
    """
    rows = _ask(
        ledger,
        "SELECT agent, training_step, avg(gate_open::INT) FILTER (WHERE scored), "
        "sum(abs(withheld)) FILTER (WHERE NOT isnan(withheld)) / nullif(sum(abs(credit) + abs(withheld)), 0) "
        "FROM steps WHERE step_id IS NOT NULL AND credit IS NOT NULL GROUP BY ALL ORDER BY ALL",
        "recorded credit of a rule with gates",
    )
    return _over_training(
        rows, ("open gates of scored steps", "share"), ("credit that gates withheld", "share of all credit")
    )


def reward_functions(ledger: Ledger) -> RunFigure:
    """Draw each reward function's mean score and share of failures over training."""
    rows = _ask(
        ledger,
        "SELECT function, training_step, avg(value) FILTER (WHERE status = 1), avg((status != 1)::INT) FROM ("
        "SELECT training_step, unnest(score_names) AS function, unnest(score_values) AS value, "
        "unnest(score_status) AS status FROM steps) GROUP BY ALL ORDER BY ALL",
    )
    return _over_training(rows, ("reward functions", "mean score"), ("scores that failed", "share"))


def _ask(ledger: Ledger, query: str, expected: str = "recorded steps with credit or scores") -> list[tuple[Any, ...]]:
    """The rows of a query. Raises InputError if the run has nothing to draw."""
    import duckdb

    try:
        rows: list[tuple[Any, ...]] = connect(ledger).execute(query).fetchall() if ledger.steps else []
    except duckdb.BinderException:  # no step file has such columns
        rows = []
    if not rows:
        raise InputError(f"{ledger.path}: expected {expected}, found none")
    return rows


def _panels(count: int) -> tuple[RunFigure, list[Any]]:
    figure = RunFigure(figsize=(5.6 * count, 3.8), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _over_training(rows: Sequence[tuple[Any, ...]], *panels: tuple[str, str]) -> RunFigure:
    """One panel per column after the second: a line per name in the first, over the training steps in the second.

    `panels`: the title and the unit of each.
    """
    figure, axes = _panels(len(panels))
    for column, (axis, (title, unit)) in enumerate(zip(axes, panels, strict=True), 2):
        for i, name in enumerate(dict.fromkeys(row[0] for row in rows)):
            _line(axis, i, [(row[1], row[column]) for row in rows if row[0] == name and row[column] is not None], name)
        _finish(axis, title, unit)
    return figure


def _line(axis: Any, i: int, points: Sequence[tuple[float, float]], name: str) -> None:
    look = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)], "marker": "."}
    axis.plot([step for step, _ in points], [value for _, value in points], label=_shown(name), **look)


def _shown(name: str) -> str:
    """A name as matplotlib prints it: without formulas, and not hidden from the legend by a leading underscore."""
    text = name if len(name) <= 40 else f"{name[:39]}…"
    return text.replace("$", r"\$").removeprefix("_") or "_"


def _finish(axis: Any, title: str, unit: str) -> None:
    axis.set(title=title, xlabel="training step", ylabel=unit)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, fontsize="small", frameon=False)
