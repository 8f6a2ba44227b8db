"""`creditflow train`: train a recipe, and print its evaluation and warnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from creditflow.cli._options import Overrides, Recipe
from creditflow.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from creditflow._utils.progress import Reporter
    from creditflow.config import Recipe as LoadedRecipe
    from creditflow.runs import RunFolder

_AFTER_DASHES = "creditflow.after_dashes"
"""Key in `ctx.meta` of the arguments after `--`; absent if the command line has no `--`."""


class CommandClass(TyperCommand):
    """Command that keeps the arguments after `--` apart; click would merge them with the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_AFTER_DASHES] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--\xa0VERL_KEY=VALUE...]"]


def train(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    engine: Annotated[str, typer.Option(help="local: in this process. verl: on a Ray cluster.")] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print verl's configuration; start nothing.")
    ] = False,
) -> None:
    """Train a team with a recipe.

    With --engine verl, arguments after -- set verl's own keys in Hydra's language: key=value, +key=value, ~key.
    """
    from creditflow._utils.progress import Reporter
    from creditflow.config import load_recipe
    from creditflow.monitoring import Evaluation
    from creditflow.monitoring.notices import failure_summary, idle_gate_summary, rollout_summary
    from creditflow.reports.tables import evaluation_table, results_console, show
    from creditflow.runs.run_folder import read_metrics

    reporter = Reporter()
    verl_overrides = context.meta.get(_AFTER_DASHES)
    if engine not in _ENGINES:
        raise ConfigError(f"--engine: expected {' or '.join(_ENGINES)}, got {engine!r}{did_you_mean(engine, _ENGINES)}")
    if engine != "verl" and (dry_run or verl_overrides is not None):
        raise ConfigError(f"{'--dry-run' if dry_run else '--'}: is for verl's configuration; add --engine verl")
    loaded = load_recipe(recipe, overrides or [])
    if dry_run:
        from creditflow.engines.verl.launch import dry_run as verl_configuration

        print(verl_configuration(loaded, verl_overrides or (), reporter), end="")
        return
    for notice in loaded.notices:
        reporter.say(f"notice: {notice}")
    folder = _ENGINES[engine](loaded, verl_overrides or (), reporter)
    console = results_console()
    file = folder.path / "evaluation.json"
    if file.exists():
        evaluation = Evaluation.from_json(file.read_text(), str(file))
        tasks = loaded.validation_words(len(evaluation.sampled))
        show(console, f"after training, on {tasks}", evaluation_table(evaluation))
    rows = read_metrics(folder.path)
    for line in (*rollout_summary(rows), *failure_summary(rows), *idle_gate_summary(rows)):
        reporter.say(f"warning: {line}")
    console.print(f"run folder: {folder.path}", soft_wrap=True)


def _train_locally(recipe: LoadedRecipe, verl_overrides: Sequence[str], reporter: Reporter) -> RunFolder:
    from creditflow.engines.local.trainer import train

    return train(recipe, reporter)


def _train_on_verl(recipe: LoadedRecipe, verl_overrides: Sequence[str], reporter: Reporter) -> RunFolder:
    from creditflow.engines.verl.launch import launch

    return launch(recipe, verl_overrides, reporter)


_ENGINES: dict[str, Callable[[LoadedRecipe, Sequence[str], Reporter], RunFolder]] = {
    "local": _train_locally,
    "verl": _train_on_verl,
}
