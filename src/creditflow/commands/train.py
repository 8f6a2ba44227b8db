"""`creditflow train`: one run, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from creditflow.config import load_recipe
from creditflow.engines.local.trainer import train as train_locally
from creditflow.errors import ConfigError
from creditflow.monitor import Evaluation
from creditflow.progress import Reporter
from creditflow.report.tables import evaluation_table, results_console, show

ENGINES = ("local",)


def train(path: Path, overrides: Sequence[str], engine: str, reporter: Reporter) -> None:
    """Train as the recipe says, on the engine that is named."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine: expected {' or '.join(ENGINES)}, got {engine!r}")
    folder = train_locally(load_recipe(path, overrides), reporter)
    console = results_console()
    file = folder.path / "evaluation.json"
    if file.exists():
        evaluation = Evaluation.from_json(file.read_text(), str(file))
        show(console, f"after training, on {len(evaluation.sampled)} tasks", evaluation_table(evaluation))
    console.print(f"run folder: {folder.path}", soft_wrap=True)
