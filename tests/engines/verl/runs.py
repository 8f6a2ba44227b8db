"""Test runs of the verl engine, launched as from the command line, on the session's Ray."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import verl_cpu

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.data import TrajectoryBatch, read_parquet
from creditflow.engines.local.policy import Policy
from creditflow.engines.verl.engine import ENGINE
from creditflow.reports.run_report import write_run_report
from creditflow.runs.run_folder import read_metrics
from tests.paths import RECIPES

CHAIN = RECIPES / "arithmetic_chain.yaml"
SMALL = (
    "recipe.val_tasks=8",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.optim.lr=3.0e-4",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",  # on a CPU, packed rows attend to the whole micro-batch
)
"""Options of a small run of CHAIN."""
TWO_POLICIES = (
    *("policies.first.model.path=tiny", "policies.second.model.path=tiny"),
    *("team.agents.writer.policy=first", "team.agents.critic.policy=second"),
)
"""Options of TOY with a policy for each agent."""
Servers = Literal["transformers", "vllm"]
"""The back ends of rollout servers."""


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
    ENGINE.train(chosen, [*verl_cpu.options(n_ranks, servers), *verl], Reporter(), write_run_report)
    return Run(folder)


def recomputed(batch: TrajectoryBatch, steps: Iterable[int], folder: Path) -> tuple[np.ndarray, float]:
    """Recompute the log-probs of the steps' responses with the weights in `folder`, one row at a time.

    Returns the log-probs [T], as recorded for other steps, and the largest logit.
    """
    model, logprobs_T, largest = Policy.load(folder, torch.device("cpu")).model, batch.logprobs.copy(), 0.0
    for step in steps:
        prompt = batch.prompt_ids[batch.prompt_offsets[step] : batch.prompt_offsets[step + 1]]
        span = slice(*batch.token_offsets[step : step + 2].tolist())
        response = batch.response_ids[span]
        with torch.no_grad():
            logits = model(torch.from_numpy(np.concatenate([prompt, response]))[None].long()).logits[0]
        largest = max(largest, float(logits.abs().max()))
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1).numpy()
        logprobs_T[span] = logprobs[np.arange(len(response)), response]
    return logprobs_T, largest
