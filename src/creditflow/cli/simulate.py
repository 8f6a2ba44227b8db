"""`creditflow simulate`: compare propagation rules on a simulated team, before any training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from creditflow._utils.progress import Reporter
from creditflow.config import credit_overrides
from creditflow.credit import CreditOptions
from creditflow.errors import ConfigError, DataError
from creditflow.reports.simulation_plot import draw_simulation
from creditflow.reports.tables import new_table, results_console, show
from creditflow.reports.text import number
from creditflow.studies.simulation import (
    SimulatedCredit,
    SimulatedTeam,
    best_threshold,
    break_even_noise,
    credited,
    draw,
    moved_outputs,
)

RULES = ("identical", "none", "discounted", "threshold")
THETAS = tuple(round(0.05 * i, 2) for i in range(1, 20))
NOISES = tuple(round(0.05 * i, 2) for i in range(11))


def simulate(team: SimulatedTeam, overrides: Sequence[str], plot: Path | None, reporter: Reporter) -> None:
    """Print tables that compare the rules on the team. `plot`: also draw this PNG."""
    options = CreditOptions(**credit_overrides(overrides))
    options.validate()
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot: {plot.parent} is no folder")
    drawn = draw(team)
    found = [credited(rule, drawn, replace(options, propagation=rule)) for rule in RULES]
    moved = moved_outputs(team, drawn)
    threshold = replace(options, propagation="threshold")
    theta, signals = best_threshold(drawn, threshold, THETAS)
    even, noises = break_even_noise(team, threshold, NOISES)

    console = results_console()
    console.print(
        f"{team.n_steps} steps, {team.tasks} x {team.trajectories} trajectories: {drawn.own_NK.mean():.1%} of the "
        f"steps do right, {drawn.output_NK.mean():.1%} of the outputs are right, {drawn.outcome_N.mean():.1%} of the "
        "trajectories end right"
    )
    show(console, "what each rule makes of it", _table(found))
    places = _places(team.n_steps)
    show(console, "an error at this step, against none", _by_place(places, moved, found))
    flat = max(signal for _, signal in signals) - min(signal for _, signal in signals) <= 1e-9
    console.print(
        "best threshold: all the same (binary scores, or gates that nothing is behind)"
        if flat
        else f"best threshold: {theta:g} (signal {number(dict(signals)[theta])}; at {options.propagation_threshold} "
        f"{number(next(f.signal for f in found if f.rule == 'threshold'))})"
    )
    console.print(
        f"the threshold rule tells more than the outcome alone at any noise up to {NOISES[-1]:g}"
        if even is None
        else f"break-even: with {even:.0%} of the verdicts mistaken the threshold rule tells no more than the outcome"
    )
    if plot is not None:
        draw_simulation(plot, team, found, moved, signals, noises)
        reporter.say(f"figure: {plot}")


def team_of(graph: str, **given: Any) -> SimulatedTeam:
    """The simulated team of the command line. `graph`: a name, or a JSON file with a list of parents per step."""
    given = {name: value for name, value in given.items() if value is not None}
    file = Path(graph)
    if not file.is_file():
        return SimulatedTeam(graph=graph, **given)
    try:
        parents = json.loads(file.read_text())
        return SimulatedTeam(parents=[[int(parent) for parent in used] for used in parents], **given)
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: expected a JSON list with a list of parents for each step: {error}") from error


def shares_of(text: str, key: str) -> dict[str, float]:
    """Parse `planner=0.1,executor=0.3`."""
    try:
        pairs = [part.split("=") for part in text.split(",") if part]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise ConfigError(f"{key}: expected agent=number, separated by commas, got {text!r}") from None


def _table(found: Sequence[SimulatedCredit]) -> Any:
    table = new_table("rule", "wrong sign", "blame, right steps", "blame, wrong steps", "ratio", "signal")
    for one in found:
        ratio = one.blamed_wrong / one.blamed_right if one.blamed_right else math.inf
        cells = (one.wrong_way, one.blamed_right, one.blamed_wrong, ratio, one.signal)
        table.add_row(one.rule, *(number(cell) for cell in cells))
    return table


def _places(n: int) -> list[int]:
    """Indices of the steps to show: at most six, including the first and the last."""
    return sorted({round(i * (n - 1) / 5) for i in range(6)})


def _by_place(places: Sequence[int], moved: Any, found: Sequence[SimulatedCredit]) -> Any:
    table = new_table("step", "outputs more that are wrong", *(f"blame x, {one.rule}" for one in found))
    for place in places:
        cells = [one.amplification_K[place] for one in found]
        table.add_row(str(place + 1), number(moved[place], 2), *("-" if math.isnan(c) else number(c, 2) for c in cells))
    return table
