"""`creditflow guard`: test a recipe's guard rules on a series of metrics, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from creditflow.config import Recipe, load_recipe
from creditflow.engines.common.components import build_components
from creditflow.engines.common.guard import build_guard
from creditflow.errors import ConfigError, DataError, did_you_mean
from creditflow.monitoring import Guard, GuardEvent
from creditflow.monitoring.catalog import matching
from creditflow.monitoring.scenarios import SCENARIOS, Row, Setting, series
from creditflow.reports.tables import new_table, results_console


def test(path: Path, overrides: Sequence[str], scenario: str, seed: int, steps: int | None) -> None:
    """Replay `scenario` (a name, a run's folder, or a file of metrics), and print the guard's events."""
    recipe = load_recipe(path, overrides)
    components = build_components(recipe, tasks=False)
    guard = build_guard(recipe.config, recipe.folder, components.rewards.functions)
    if not guard.rules:
        raise ConfigError("guard: it is switched off, or has no rules")
    rows = _rows(scenario, recipe, seed, steps)
    events = [event for row in rows for event in guard.look(int(row["step"]), _numbers(row))]
    _show(events, guard, rows, scenario)


def _rows(scenario: str, recipe: Recipe, seed: int, steps: int | None) -> list[Row]:
    found = Path(scenario)
    if scenario in SCENARIOS:
        trainer = recipe.config.trainer
        setting = Setting(
            agents=tuple(recipe.config.team.agents),
            steps=steps or max(trainer.total_training_steps or 0, 60),
            test_freq=trainer.test_freq if trainer.test_freq > 0 else Setting().test_freq,
        )
        return series(scenario, setting, seed)
    if (found / "metrics.jsonl").is_file():
        return _rows_of_file(found / "metrics.jsonl")
    if found.is_file():
        return _rows_of_file(found)
    names = ", ".join(SCENARIOS)
    raise ConfigError(
        f"--scenario: expected {names}, a run's folder, or a file of metrics (one JSON object a line), got "
        f"{scenario!r}{did_you_mean(scenario, SCENARIOS)}"
    )


def _rows_of_file(file: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}:{number}: expected an object of metrics, got {line[:40]}")
        row.setdefault("step", number)
        if not isinstance(row["step"], int):
            raise DataError(f"{file}:{number}: step: expected a whole number, got {row['step']!r}")
        rows.append(row)
    if not rows:
        raise DataError(f"{file}: holds no metrics")
    return rows


def _numbers(row: Row) -> Row:
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


def _show(events: Sequence[GuardEvent], guard: Guard, rows: Sequence[Row], scenario: str) -> None:
    console = results_console()
    table = new_table("step", "rule", "", "metric", "action", "numbers")
    for event in events:
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in event.numbers.items())
        table.add_row(str(event.step), event.rule, event.what, event.metric, event.note or event.action, numbers)
    console.print(f"{scenario}: {SCENARIOS[scenario].said if scenario in SCENARIOS else 'recorded metrics'}")
    console.print(table)
    seen = {name for row in rows for name in row}
    if blind := [rule.name for rule in guard.rules if not matching(rule.metric, seen)]:
        console.print(f"without anything to look at: {', '.join(blind)}")
    in_force = ["credit is the shared global reward"] if guard.fallback else []
    in_force += [f"thresholds are at most {guard.cap:g}"] if guard.cap is not None else []
    console.print(f"after step {int(rows[-1]['step'])}: {'; '.join(in_force) or 'nothing is changed'}")
