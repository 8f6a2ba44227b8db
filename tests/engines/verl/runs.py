"""Test runs of the verl engine, launched as from the command line, on the session's Ray."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import verl_cpu

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.data import TrajectoryBatch, read_parquet
from creditflow.engines.verl.launch import launch
from creditflow.reports.run_report import write_run_report
from creditflow.runs.run_folder import read_metrics
from tests.paths import RECIPES

CHAIN = RECIPES / "arithmetic_chain.yaml"
Servers = Literal["transformers", "vllm"]
"""The back ends of rollout servers."""


def options(n_ranks: int = 1, servers: Servers = "transformers") -> list[str]:
    """`verl_cpu.options` without the quick sampler, because creditflow's trainer polls often enough."""
    given = verl_cpu.options(n_ranks, rollout_name=servers)
    return [option for option in given if not option.startswith("trainer.v1.sampler")]


def mode_options(mode: str, n_ranks: int = 1) -> tuple[str, ...]:
    """verl's options for a trainer mode; `separate_async` gets as many devices for rollouts as for training."""
    separate = (
        "actor_rollout_ref.rollout.nnodes=1",
        f"actor_rollout_ref.rollout.n_gpus_per_node={n_ranks}",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    )
    return (f"trainer.v1.trainer_mode={mode}", *(separate if mode == "separate_async" else ()))


@dataclass(frozen=True)
class Run:
    """The content of a run's folder."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    def series(self, name: str) -> np.ndarray:
        """The values of a metric over training steps."""
        return np.array([row[name] for row in self.metrics if row["step"] > 0], dtype=float)

    @property
    def evaluation(self) -> dict[str, Any]:
        return json.loads((self.folder / "evaluation.json").read_text())

    @property
    def steps(self) -> list[Path]:
        return sorted((self.folder / "steps").glob("*.parquet"))

    def batch(self, step: int) -> TrajectoryBatch:
        return read_parquet(self.folder / f"steps/{step:06d}.parquet")


def run(
    recipe: Path,
    folder: Path,
    *overrides: str,
    n_ranks: int = 1,
    verl: tuple[str, ...] = (),
    servers: Servers = "transformers",
) -> Run:
    """Train `recipe` on verl in `folder`."""
    chosen = load_recipe(recipe, [f"trainer.default_local_dir={folder}", "trainer.device=auto", *overrides])
    launch(chosen, [*options(n_ranks, servers), *verl], Reporter(), write_run_report)
    return Run(folder)
