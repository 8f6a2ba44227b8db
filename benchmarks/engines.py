"""The same recipe on both engines: `python -m benchmarks.engines [--quick]`.

Trains `arithmetic_chain` on the local engine and on verl (on a CPU, by `tests/verl_cpu`), three seeds each, from the
same model. Writes to `runs/engines/` and reuses finished runs there. Targets: the engines end within each other's
spread, and verl's rollout and actor agree on log-probs. In full, an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import verl_cpu

from benchmarks.record import RESULTS, Figure, exit_with, show, write
from benchmarks.sources import TRAINING, Work
from creditflow.monitoring import Evaluation
from creditflow.reports.comparison_plot import draw_comparison
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.comparison.results import ArmResult, RunResult

ROOT = Path(__file__).parent.parent
RECIPE = "src/creditflow/recipes/arithmetic_chain.yaml"
MEASURES = (*TRAINING, "src/creditflow/engines/verl", "src/creditflow/recipes/arithmetic_chain.py", RECIPE)
ENGINES = ("local", "verl")
LATE = 10
"""Number of last training steps in the mean pass@1 to compare."""
QUICK = ("trainer.total_training_steps=3", "data.val_max_samples=32", "data.train_batch_size=8")


def main() -> int:
    """Run missing measurements, print, write, draw; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, three steps; holds nothing but the log-probs")
    quick = parser.parse_args().quick
    work, seeds = Work.begin("engines", MEASURES, quick=quick), range(1 if quick else 3)
    folder = work.folder
    for seed in seeds:
        for engine in ENGINES:
            run(engine, seed, folder / f"{engine}-{seed}", QUICK if quick else ())
    arms = [arm(engine, [folder / f"{engine}-{seed}" for seed in seeds]) for engine in ENGINES]
    figures = compared(arms, hold=not quick)
    differences = [
        row["training/rollout_probs_diff_max"]
        for seed in seeds
        for row in read_metrics(folder / f"verl-{seed}")
        if row["step"] > 0
    ]
    what = "verl: largest difference of a probability, rollout and actor"
    figures.append(Figure.from_values(f"{what}, in a training step", differences, 1e-5, at_most=True))
    figures.append(Figure(f"{what}, in all of them", max(differences)))  # rounding of float32: see the tests
    short = show(figures)
    if not quick:
        write("engines", figures, ("creditflow", "verl", "ray", "torch", "transformers", "numpy"), work.measured)
        draw_comparison(RESULTS / "engines.png", "arithmetic_chain on both engines, three seeds", arms)
    return int(short)


def run(engine: str, seed: int, folder: Path, settings: tuple[str, ...]) -> None:
    """Train unless the run is finished."""
    if (folder / "evaluation.json").exists():
        return
    command = [sys.executable, "-m", "creditflow", "train", RECIPE, *settings, f"data.seed={seed}"]
    command += [f"trainer.default_local_dir={folder}"]
    environment = dict(os.environ)
    if engine == "verl":
        environment |= verl_cpu.environment()
        options = [option for option in verl_cpu.options() if not option.startswith("trainer.v1.sampler")]
        # Without flash attention, packed rows attend to their whole micro-batch: short ones are cheap on a CPU.
        options.append("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024")
        cluster = ["++ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=16"]
        command += ["--engine", "verl", "--", *options, *cluster]
    print(f"{engine}, seed {seed}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def arm(engine: str, folders: list[Path]) -> ArmResult:
    """The runs of an engine, by seed."""
    before = []
    for folder in folders:
        first = read_metrics(folder)[0]
        metrics = {key.removeprefix("val/"): value for key, value in first.items() if key.startswith("val/")}
        before.append(Evaluation(metrics, [], [], []))
    return ArmResult(engine, before, [RunResult.read(folder) for folder in folders])


def compared(arms: list[ArmResult], hold: bool) -> list[Figure]:
    """Final figures of each engine, and the gap between the engines' ranges over seeds."""
    figures = []
    for what, values in {
        "pass@1 on validation tasks": [arm.after("pass_at_1") for arm in arms],
        "step error rate on validation tasks": [arm.after("step_error_rate") for arm in arms],
        f"pass@1 in training, last {LATE} steps": [
            [float(np.mean(run.train_pass_at_1[-LATE:])) for run in arm.runs] for arm in arms
        ],
    }.items():
        figures += [Figure.from_values(f"{arm.name}: {what}", ends) for arm, ends in zip(arms, values, strict=True)]
        local, verl = values
        gap = np.ptp([*local, *verl]) - np.ptp(local) - np.ptp(verl)  # positive if the ranges are disjoint
        figures.append(Figure(f"gap between their ranges: {what}", float(gap), 0.0 if hold else None, at_most=True))
    return figures


if __name__ == "__main__":
    exit_with(main)
