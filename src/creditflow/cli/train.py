"""`creditflow train`: train a recipe, and print its evaluation and warnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, load_recipe
from creditflow.errors import ConfigError, did_you_mean
from creditflow.monitoring import Evaluation
from creditflow.monitoring.notices import failure_summary, idle_gate_summary, rollout_summary
from creditflow.reports.tables import evaluation_table, results_console, show
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import read_metrics


def train(
    path: Path,
    overrides: Sequence[str],
    engine: str,
    reporter: Reporter,
    *,
    verl_overrides: Sequence[str] | None = None,
    dry_run: bool = False,
) -> None:
    """Train the recipe on `engine`. `verl_overrides`: the arguments after `--`; None without a `--`."""
    if engine not in _ENGINES:
        raise ConfigError(f"--engine: expected {' or '.join(_ENGINES)}, got {engine!r}{did_you_mean(engine, _ENGINES)}")
    if engine != "verl" and (dry_run or verl_overrides is not None):
        raise ConfigError(f"{'--dry-run' if dry_run else '--'}: is for verl's configuration; add --engine verl")
    recipe = load_recipe(path, overrides)
    if dry_run:
        from creditflow.engines.verl.launch import dry_run as verl_configuration

        print(verl_configuration(recipe, verl_overrides or (), reporter), end="")
        return
    for notice in recipe.notices:
        reporter.say(f"notice: {notice}")
    folder = _ENGINES[engine](recipe, verl_overrides or (), reporter)
    console = results_console()
    file = folder.path / "evaluation.json"
    if file.exists():
        evaluation = Evaluation.from_json(file.read_text(), str(file))
        show(
            console,
            f"after training, on {recipe.validation_words(len(evaluation.sampled))}",
            evaluation_table(evaluation),
        )
    rows = read_metrics(folder.path)
    for line in (*rollout_summary(rows), *failure_summary(rows), *idle_gate_summary(rows)):
        reporter.say(f"warning: {line}")
    console.print(f"run folder: {folder.path}", soft_wrap=True)


def _locally(recipe: Recipe, verl_overrides: Sequence[str], reporter: Reporter) -> RunFolder:
    from creditflow.engines.local.trainer import train

    return train(recipe, reporter)


def _on_verl(recipe: Recipe, verl_overrides: Sequence[str], reporter: Reporter) -> RunFolder:
    from creditflow.engines.verl.launch import launch

    return launch(recipe, verl_overrides, reporter)


_ENGINES: dict[str, Callable[[Recipe, Sequence[str], Reporter], RunFolder]] = {"local": _locally, "verl": _on_verl}
