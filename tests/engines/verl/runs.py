"""Runs of the verl engine for tests: as the command line starts them, on the Ray of the session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import verl_cpu

from creditflow.config import load_recipe
from creditflow.engines.verl.launch import launch
from creditflow.ledger.run_folder import read_metrics
from creditflow.progress import Reporter
from creditflow.trajectory import TrajectoryBatch

REPOSITORY = Path(__file__).parents[3]
TOY = REPOSITORY / "tests/recipes/toy.yaml"
CHAIN = REPOSITORY / "recipes/arithmetic_chain.yaml"


def options(n_ranks: int = 1) -> list[str]:
    """What our trainer needs of `verl_cpu.options`: it asks its replay buffer often enough by itself."""
    return [option for option in verl_cpu.options(n_ranks) if not option.startswith("trainer.v1.sampler")]


@dataclass(frozen=True)
class Run:
    """What a run left in its folder."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    def series(self, name: str) -> np.ndarray:
        """A metric of every training step."""
        return np.array([row[name] for row in self.metrics if row["step"] > 0], dtype=float)

    @property
    def evaluation(self) -> dict[str, Any]:
        return json.loads((self.folder / "evaluation.json").read_text())

    @property
    def steps(self) -> list[Path]:
        return sorted((self.folder / "steps").glob("*.parquet"))

    def batch(self, step: int) -> TrajectoryBatch:
        return TrajectoryBatch.read_parquet(self.folder / f"steps/{step:06d}.parquet")


def run(recipe: Path, folder: Path, *overrides: str, n_ranks: int = 1, verl: tuple[str, ...] = ()) -> Run:
    """Train `recipe` on verl, into `folder`."""
    chosen = load_recipe(recipe, [f"trainer.default_local_dir={folder}", "trainer.device=auto", *overrides])
    launch(chosen, [*options(n_ranks), *verl], Reporter())
    return Run(folder)
