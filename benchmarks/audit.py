"""Agreement of each rule's credit with Shapley values: `python -m benchmarks.audit [--quick]`.

Trains the arithmetic team for eight steps, with every agent scored and with the executor alone (`arithmetic_chain`,
`arithmetic_chain_sparse`), 512 rollouts a step. `creditflow audit` then compares each rule's credit on the last step's
trajectories with Shapley values: 28 reruns per trajectory, four of each coalition. Takes about ten minutes on two
cores. Writes to `runs/audit/` and reuses finished runs there. No targets: it is a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, Figure, exit_with, show, write
from benchmarks.sources import TRAINING, Work

RECIPES = ("arithmetic_chain", "arithmetic_chain_sparse")
MEASURES = (
    *TRAINING,
    "src/creditflow/studies/audit.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    *(f"src/creditflow/recipes/{r}.yaml" for r in RECIPES),
)
STEPS, TASKS, TRAJECTORIES = 8, 64, 28
RULES = (
    "identical",
    *(f"{rule} outcome_to={to}" for to in ("all", "answer") for rule in ("none", "discounted", "threshold")),
)


def measured(recipe: str, steps: int, tasks: int, trajectories: int, below: Path) -> dict[str, Any]:
    """The audit of a run, trained first if it does not exist. Its plot stays in the run's folder."""
    folder = below / recipe
    options = [
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={max(steps - 1, 1)}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "data.val_max_samples=64",
        f"data.train_batch_size={tasks}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={tasks // 2}",
        f"trainer.default_local_dir={folder}",
    ]
    command = [sys.executable, "-m", "creditflow"]
    if not (folder / "evaluation.json").exists():
        subprocess.run([*command, "train", recipe, *options], cwd=ROOT, check=True)
    rules = [word for rule in RULES for word in ("--rule", rule)]
    out, plot = folder / "audit.json", folder / "audit.png"
    how = [
        "--rollouts",
        str(trajectories),
        "--budget",
        str(trajectories * tasks * 8),
        "--json",
        str(out),
        "--plot",
        str(plot),
    ]
    subprocess.run([*command, "audit", str(folder), *how, *rules], cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _number(value: float | None) -> float:
    """`value`, or NaN for null, which the audit writes for too few values."""
    return math.nan if value is None else value


def main() -> int:
    """Run, print, write `docs/results/audit.json` and the figures, without targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two training steps of a few trajectories: shows that it runs"
    )
    quick = parser.parse_args().quick
    steps, tasks, trajectories = (2, 4, 7) if quick else (STEPS, TASKS, TRAJECTORIES)
    work = Work.begin("audit", MEASURES, quick=quick)
    figures, details = [], {}
    for recipe in RECIPES:
        found = measured(recipe, steps, tasks, trajectories, work.folder)
        details[recipe] = {key: value for key, value in found.items() if key != "values"}
        for one in found["rules"]:
            for what in ("credit", "advantage", "within"):
                value, low, high = (one[what][key] for key in ("value", "low", "high"))
                spread = None if low is None else (low, high)
                figures.append(Figure(f"{recipe}, {one['rule']}: {what} (95 %)", _number(value), spread=spread))
        what = f"{recipe}: share of the values' variance that is real"
        figures.append(Figure(what, _number(found["reliability"])))
        if not quick:
            shutil.copyfile(work.folder / recipe / "audit.png", RESULTS / f"audit_{recipe}.png")
    missed = show(figures)
    if not quick:
        write("audit", figures, ("creditflow", "torch", "transformers", "numpy"), work.measured, details)
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
