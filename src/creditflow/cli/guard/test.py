"""`creditflow guard test`: test a recipe's guard rules on a series of metrics, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from creditflow.cli._options import Overrides, Recipe
from creditflow.errors import ConfigError, DataError, did_you_mean
from creditflow.monitoring import Guard, GuardEvent
from creditflow.monitoring.catalog import matching
from creditflow.monitoring.scenarios import SCENARIOS, Row, Setting, series
from creditflow.reports.tables import new_table, results_console

if TYPE_CHECKING:
    from creditflow.config import Recipe as LoadedRecipe


def test(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    scenario: Annotated[
        str,
        typer.Option(
            metavar="S",
            help=f"A synthetic series ({', '.join(SCENARIOS)}), the folder of a run, or a file of metrics with one "
            "JSON object per line.",
        ),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of a synthetic series.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps of a synthetic series; default: the recipe's, at least 60."),
    ] = None,
) -> None:
    """Replay a series of metrics against a recipe's guard rules.

    Prints each firing with its step, action and numbers, and the changes in force at the end.
    """
    from creditflow.config import load_recipe
    from creditflow.engines.common.components import build_components
    from creditflow.engines.common.guard import build_guard

    loaded = load_recipe(recipe, overrides or [])
    components = build_components(loaded, tasks=False)
    guard = build_guard(loaded.config, loaded.folder, components.rewards.functions, engine="")
    if not guard.rules:
        raise ConfigError("guard: expected rules to test, but the guard is switched off or has none")
    rows = _rows(scenario, loaded, seed, steps)
    events = [event for row in rows for event in guard.look(int(row["step"]), _numbers(row))]
    _print(events, guard, rows, scenario)


def _rows(scenario: str, recipe: LoadedRecipe, seed: int, steps: int | None) -> list[Row]:
    """The metrics of a scenario, one row per training step."""
    path = Path(scenario)
    if scenario in SCENARIOS:
        trainer = recipe.config.trainer
        setting = Setting(
            agents=tuple(recipe.config.team.agents),
            steps=steps or max(trainer.total_training_steps or 0, 60),
            test_freq=trainer.test_freq if trainer.test_freq > 0 else Setting().test_freq,
        )
        return series(scenario, setting, seed)
    if (path / "metrics.jsonl").is_file():
        return _read_rows(path / "metrics.jsonl")
    if path.is_file():
        return _read_rows(path)
    names = ", ".join(SCENARIOS)
    raise ConfigError(
        f"--scenario: expected {names}, a run's folder, or a file of metrics (one JSON object per line), got "
        f"{scenario!r}{did_you_mean(scenario, SCENARIOS)}"
    )


def _read_rows(file: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}:{number}: expected an object of metrics, got {line[:40]!r}")
        row.setdefault("step", number)
        if not isinstance(row["step"], int):
            raise DataError(f"{file}:{number}: step: expected a whole number, got {row['step']!r}")
        rows.append(row)
    if not rows:
        raise DataError(f"{file}: holds no metrics")
    return rows


def _numbers(row: Row) -> Row:
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


def _event_row(event: GuardEvent) -> tuple[str, ...]:
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in event.numbers.items())
    return str(event.step), event.rule, event.what, event.metric, event.note or event.action, numbers


def _print(events: Sequence[GuardEvent], guard: Guard, rows: Sequence[Row], scenario: str) -> None:
    console = results_console()
    console.print(f"{scenario}: {SCENARIOS[scenario].fault if scenario in SCENARIOS else 'recorded metrics'}")
    header = ("step", "rule", "", "metric", "action", "numbers")
    console.print(new_table(header, [_event_row(event) for event in events]))
    recorded = {name for row in rows for name in row}
    if idle := [rule.name for rule in guard.rules if not matching(rule.metric, recorded)]:
        console.print(f"rules without metrics in this series: {', '.join(idle)}")
    in_force = ["credit is the shared global reward"] if guard.fallback else []
    in_force += [f"thresholds are at most {guard.cap:g}"] if guard.cap is not None else []
    console.print(f"after step {int(rows[-1]['step'])}: {'; '.join(in_force) or 'nothing has changed'}")
