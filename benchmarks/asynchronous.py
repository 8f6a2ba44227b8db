"""verl's asynchronous mode against the synchronous one: `python -m benchmarks.asynchronous [--minutes M] [--quick]`.

`arithmetic_chain` on verl (on a CPU, by `tests/verl_cpu`). Learning curves: `sync` and `separate_async` with at most
1, 2 and 4 versions between sampling and training, three seeds each. Throughput: every rollout waits as for a tool, a
tenth of them five times as long as the others; training steps of both modes, in turn. Finished runs are reused from
`runs/asynchronous/`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import verl_cpu

from benchmarks.record import ROOT, Figure, exit_with, show, write
from benchmarks.sources import TRAINING, Work
from creditflow._utils.files import write_whole
from creditflow.runs.run_folder import read_metrics

RECIPE = "src/creditflow/recipes/arithmetic_chain.yaml"
MEASURES = (
    *TRAINING,
    "src/creditflow/engines/verl",
    "benchmarks/cases.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    RECIPE,
)
LAGS = (1, 2, 4)
SEEDS, STEPS, LATE = 3, 24, 6
REPEATS, FAST_STEPS = 3, 12
"""Repeats and training steps of the comparison of throughput. The first two steps start processes and do not count."""
_SKIPPED = 2
_FASTER = 1.5
"""The target: training steps of `separate_async` per one of `sync`."""
_DONE = "done"
_COMMON = (
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=4.0e-4",
    "trainer.val_before_train=false",
)


@dataclass(frozen=True)
class Mode:
    """A trainer mode with a limit of staleness."""

    name: str
    lag: int = 0

    @property
    def label(self) -> str:
        """The mode's name in figures."""
        return self.name if self.lag == 0 else f"{self.name}, staleness up to {self.lag}"

    @property
    def options(self) -> list[str]:
        """verl's options."""
        if self.name == "sync":
            return ["trainer.v1.trainer_mode=sync"]
        return [
            f"trainer.v1.trainer_mode={self.name}",
            f"trainer.v1.{self.name}.num_warmup_batches=1",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
        ]


SYNC = Mode("sync")
ASYNC = tuple(Mode("separate_async", lag) for lag in LAGS)


def run(mode: Mode, folder: Path, steps: int, *overrides: str) -> None:
    """Train unless the run is finished."""
    if (folder / _DONE).exists():
        return
    command = [sys.executable, "-m", "creditflow", "train", RECIPE, *_COMMON, *overrides]
    command += [f"algorithm.max_version_lag={mode.lag}", f"trainer.total_training_steps={steps}"]
    command += [f"trainer.default_local_dir={folder}", "--engine", "verl", "--"]
    command += [option for option in verl_cpu.options() if not option.startswith("trainer.v1.sampler")]
    command += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", *mode.options]
    command += ["++ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=16"]
    print(f"{mode.label}: {folder.name}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **verl_cpu.environment()})
    write_whole(folder / _DONE, lambda path: path.write_text("\n"))


def step_seconds(folder: Path) -> float:
    """The mean duration of a training step. A median would hide that asynchronous steps are uneven."""
    return fmean(row["timing/step_s"] for row in read_metrics(folder) if row["step"] > _SKIPPED)


def curves(folder: Path, modes: Sequence[Mode], seeds: Sequence[int]) -> list[Figure]:
    """pass@1 of the last training steps and staleness of each mode, over seeds."""
    figures = []
    for mode in modes:
        rows = [
            read_metrics(folder / f"curve-{mode.name}-{mode.lag}-{seed}")
            for seed in seeds
            if (folder / f"curve-{mode.name}-{mode.lag}-{seed}" / _DONE).exists()
        ]
        if not rows:
            continue
        late = [100 * fmean(row["train/pass_at_1"] for row in of_seed[-LATE:]) for of_seed in rows]
        figures.append(Figure.from_values(f"{mode.label}: pass@1 in training, last {LATE} steps, %", late))
        if mode.lag:
            stale = [fmean(row["rollout/staleness"] for row in of_seed) for of_seed in rows]
            clipped = [100 * fmean(row["rollout_corr/rollout_is_ratio_fraction_high"] for row in of) for of in rows]
            figures.append(Figure.from_values(f"{mode.label}: staleness, versions", stale))
            figures.append(Figure.from_values(f"{mode.label}: truncated weights, % of tokens", clipped))
    return figures


def main() -> int:
    """Do the missing runs and print the figures; 1 if the throughput falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--quick", action="store_true", help="two short runs: shows that it runs, proves nothing")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes if given.minutes is not None else None
    work = Work.begin("asynchronous", MEASURES, quick=given.quick)
    repeats, fast, steps = (1, _SKIPPED + 1, _SKIPPED + 1) if given.quick else (REPEATS, FAST_STEPS, STEPS)
    seeds, modes = (range(1), (SYNC, ASYNC[0])) if given.quick else (range(SEEDS), (SYNC, *ASYNC))
    short = ("recipe.val_tasks=8", "data.val_max_samples=8") if given.quick else ()
    slow = ("team.workflow='benchmarks/cases.py:solve_slowly'", "data.val_max_samples=1", *short[:1])
    todo = [
        (mode, work.folder / f"slow-{mode.name}-{repeat}", fast, (*slow, f"data.seed={repeat}"))
        for repeat in range(repeats)
        for mode in (SYNC, ASYNC[1])
    ]
    todo += [
        (mode, work.folder / f"curve-{mode.name}-{mode.lag}-{seed}", steps, (*short, f"data.seed={seed}"))
        for seed in seeds
        for mode in modes
    ]
    for mode, folder, n_steps, overrides in todo:
        if until is None or time.monotonic() < until:
            run(mode, folder, n_steps, *overrides)
    ratios = [
        step_seconds(work.folder / f"slow-sync-{repeat}") / step_seconds(work.folder / f"slow-separate_async-{repeat}")
        for repeat in range(repeats)
        if (work.folder / f"slow-separate_async-{repeat}" / _DONE).exists()
    ]
    what = "slow tools: training steps of separate_async per step of sync"
    figures = [Figure.from_values(what, ratios, None if given.quick else _FASTER)] if ratios else []
    figures += curves(work.folder, modes, seeds)
    missed = show(figures)
    if not given.quick and all((folder / _DONE).exists() for _, folder, _, _ in todo):
        write("asynchronous", figures, ("creditflow", "verl", "ray", "torch", "transformers"), work.measured)
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
