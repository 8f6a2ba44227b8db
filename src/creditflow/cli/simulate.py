"""`creditflow simulate`: compare propagation rules on a simulated team, before any training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from creditflow._utils.progress import Reporter
from creditflow.cli._options import CreditOverrides, PlotFile, comma_separated, expect_parent_folders
from creditflow.credit import CreditOptions
from creditflow.credit.records import PROPAGATION_RULES, compared_rules
from creditflow.data import Floats
from creditflow.errors import ConfigError, DataError
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

STEPS = 13
"""Default number of steps."""
THETAS = tuple(round(0.05 * i, 2) for i in range(1, 20))
NOISES = tuple(round(0.05 * i, 2) for i in range(11))


def simulate(
    overrides: CreditOverrides = None,
    *,
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Steps per trajectory; default: {STEPS}. A JSON file has its own.")
    ] = None,
    graph: Annotated[
        str, typer.Option(help="chain, tree or full; or a JSON file with the list of parents of each step.")
    ] = "chain",
    agents: Annotated[
        str, typer.Option(metavar="A,B", help="The first agent makes the first step, the others take turns.")
    ] = "planner,executor,verifier",
    error: Annotated[float, typer.Option(help="Probability of an error on right input.")] = 0.1,
    errors: Annotated[str, typer.Option(metavar="A=P,B=P", help="The same for single agents.")] = "",
    self_conditioning: Annotated[
        float, typer.Option(help="Increase of the probability of an error on wrong input.")
    ] = 0.0,
    recovery: Annotated[float, typer.Option(help="Probability of a right output on wrong input.")] = 0.0,
    noise: Annotated[float, typer.Option(help="Share of verdicts that are wrong.")] = 0.0,
    votes: Annotated[int, typer.Option(min=1, help="Verdicts per score, averaged; 1 gives binary scores.")] = 8,
    scored: Annotated[str, typer.Option(metavar="A,B", help="The scored agents; default: all.")] = "",
    inherits: Annotated[bool, typer.Option("--inherits", help="Score outputs, upstream errors included.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")] = 0,
    plot: PlotFile = None,
) -> None:
    """Compare propagation rules on a simulated team.

    The team is a chain or graph of agents. Trajectories are drawn at random; the code of training assigns their
    credit. Prints how errors, and blame for them, spread under each rule.
    """
    from creditflow.config import credit_overrides, options_from
    from creditflow.reports.simulation_plot import draw_simulation

    team = _team(
        graph,
        steps=steps,
        agents=comma_separated(agents),
        error=error,
        errors=_agent_numbers(errors, "--errors"),
        self_conditioning=self_conditioning,
        recovery=recovery,
        noise=noise,
        votes=votes,
        scored=comma_separated(scored) or None,
        inherits=inherits,
        seed=seed,
    )
    options = options_from(credit_overrides(overrides or []))
    gated = next(rule for rule in compared_rules() if PROPAGATION_RULES[rule].gated)
    with_gates = replace(options, propagation=gated)
    for one in (options, with_gates):
        one.validate()
    expect_parent_folders(plot=plot)
    drawn = draw(team)
    chosen = _by_rule(options)
    results = [credited(rule, drawn, one) for rule, one in chosen.items()]
    moved = moved_outputs(team, drawn)
    theta, signals = best_threshold(drawn, with_gates, THETAS)
    break_even, noises = break_even_noise(team, with_gates, NOISES)

    console = results_console()
    console.print(
        f"{team.n_steps} steps, {team.tasks} x {team.trajectories} trajectories: {drawn.own_NK.mean():.1%} of the "
        f"steps are right, {drawn.output_NK.mean():.1%} of the outputs are right, {drawn.outcome_N.mean():.1%} of the "
        "trajectories end right"
    )
    show("blame by rule", _rule_table(results))
    show("effect of an error, by its step", _step_table(moved, results))
    signal = next(result.signal for result in results if result.rule == gated)
    console.print(_threshold_line(theta, dict(signals), options.propagation_threshold, signal))
    console.print(
        f"the {gated} rule has more signal than the outcome alone at any noise up to {NOISES[-1]:g}"
        if break_even is None
        else f"break-even: with {break_even:.0%} wrong verdicts the {gated} rule has no more signal than the outcome"
    )
    if plot is not None:
        draw_simulation(plot, team, results, moved, signals, noises, (gated, compared_rules()[0]))
        Reporter().say(f"figure: {plot}")


def _by_rule(options: CreditOptions) -> dict[str, CreditOptions]:
    """Options by compared rule; prints and skips rules that contradict them."""
    made = {}
    for rule in dict.fromkeys((*compared_rules(), options.propagation)):
        one = replace(options, propagation=rule)
        try:
            one.validate()
        except ConfigError as error:
            Reporter().say(f"{rule} is left out: {error}")
        else:
            made[rule] = one
    return made


def _team(graph: str, **settings: Any) -> SimulatedTeam:
    """The simulated team. `graph`: a name, or a JSON file with a list of parents per step."""
    file, steps = Path(graph), settings.pop("steps")
    settings = {name: value for name, value in settings.items() if value is not None}
    if not file.is_file():
        return SimulatedTeam(graph=graph, steps=STEPS if steps is None else steps, **settings)
    if steps is not None:
        raise ConfigError(f"--steps: {file} has a number of steps of its own; leave --steps out")
    try:
        parents = [[int(parent) for parent in row] for row in json.loads(file.read_text())]
        return SimulatedTeam(parents=parents, **settings)
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: expected a JSON list with a list of parents for each step: {error}") from error


def _agent_numbers(text: str, option: str) -> dict[str, float]:
    """Parse `planner=0.1,executor=0.3`."""
    try:
        pairs = [part.split("=") for part in text.split(",") if part]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise ConfigError(f"{option}: expected agent=number, separated by commas, got {text!r}") from None


def _rule_table(results: Sequence[SimulatedCredit]) -> Table:
    rows = []
    for result in results:
        ratio = result.blamed_wrong / result.blamed_right if result.blamed_right else math.inf
        rows.append((result.rule, result.wrong_way, result.blamed_right, result.blamed_wrong, ratio, result.signal))
    return new_table(("rule", "wrong sign", "blame, right steps", "blame, wrong steps", "ratio", "signal"), rows)


def _step_table(moved: Floats, results: Sequence[SimulatedCredit]) -> Table:
    """One row for each of at most six steps, including the first and the last."""
    header = ("step", "more wrong outputs", *(f"blame x, {result.rule}" for result in results))
    steps = sorted({round(i * (len(moved) - 1) / 5) for i in range(6)})
    columns = (moved, *(result.amplification_K for result in results))
    return new_table(header, [(str(step + 1), *(number(column[step], 2) for column in columns)) for step in steps])


def _threshold_line(theta: float, signals: dict[float, float], current: Any, signal: float) -> str:
    """The best threshold and its signal, beside those of the current one."""
    if max(signals.values()) - min(signals.values()) <= 1e-9:
        return "best threshold: all give the same signal (binary scores, or no gate with a parent behind it)"
    return f"best threshold: {theta:g} (signal {number(signals[theta])}; at {current} {number(signal)})"
