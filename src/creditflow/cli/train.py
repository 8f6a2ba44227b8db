"""`creditflow train`: train a recipe, and print its evaluation and warnings."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from creditflow._utils.progress import Reporter
from creditflow.cli._app import Command
from creditflow.cli._options import EngineName, Overrides, Recipe, credit_lines
from creditflow.errors import ConfigError
from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.notices import failure_summary, rollout_summary
from creditflow.reports.tables import evaluation_table, show
from creditflow.runs.run_folder import read_metrics

_AFTER_DASHES = "creditflow.after_dashes"
"""Key in `ctx.meta` of the arguments after `--`; absent if the command line has no `--`."""


class CommandClass(Command):
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
    engine: EngineName = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print verl's configuration; start nothing.")
    ] = False,
) -> None:
    """Train a team with a recipe.

    With --engine verl, arguments after -- set verl's own keys in Hydra's language: key=value, +key=value, ~key.

    Example: creditflow train my_team/recipe.yaml data.seed=1
    """
    from creditflow.config import load_recipe

    reporter = Reporter()
    options = context.meta.get(_AFTER_DASHES)
    loaded = load_recipe(recipe, overrides or [])
    with reporter.bar(f"loading {loaded.name}", announce=not dry_run, keep=False):
        from creditflow.engines.base import expect_supported, find_engine

        chosen = find_engine(engine)
    if not chosen.has_options and (dry_run or options is not None):
        raise ConfigError(f"{'--dry-run' if dry_run else '--'}: is for verl's configuration; add --engine verl")
    if dry_run:
        print(chosen.configuration(loaded, options or (), reporter), end="")
        references = re.findall(r'"([^"]+\.py):\w+"', json.dumps(loaded.absolute().to_dict(), ensure_ascii=False))
        for file in dict.fromkeys(file for file in references if not os.path.exists(file)):  # noqa: PTH110 (long texts)
            reporter.say(f"warning: {file}: the recipe names this file, and {loaded.folder.resolve()} has none")
        return
    expect_supported(loaded.config, chosen.name)
    for line in credit_lines(loaded.config):
        reporter.say(line)
    for notice in loaded.notices:
        reporter.say(f"notice: {notice}")
    folder = chosen.train(loaded, options or (), reporter, _make_report)
    rows, file = read_metrics(folder.path), folder.path / "evaluation.json"
    if file.exists():
        evaluation = Evaluation.from_json(file.read_text(), str(file))
        tasks = loaded.validation_words(len(evaluation.sampled))
        first = next((row for row in rows if row["step"] == 0 and "val/pass_at_1" in row), None)
        before = first and {key.removeprefix("val/"): value for key, value in first.items()}
        show(f"validation, on {tasks}", evaluation_table(evaluation, before))
    for line in (*rollout_summary(rows), *failure_summary(rows)):
        reporter.say(f"warning: {line}")
    run = shlex.quote(str(folder.path))
    print(f"run folder: {folder.path}")
    print(f"\nnext:\n  creditflow why {run}\n  creditflow report {run} -o report.html")


def _make_report(run: Path) -> tuple[Path, str]:
    from creditflow.reports.run_report import write_run_report

    return write_run_report(run)
