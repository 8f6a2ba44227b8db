"""Every estimator of the local engine on the arithmetic team: `python -m benchmarks.estimators [--quick]`.

Runs `creditflow compare arithmetic_estimators` with 3 seeds. Writes to `runs/estimators/` and reuses
finished runs there. Takes about forty minutes on two cores.

Targets: pass@1 of every arm ends at least 15 points above its start (mean of the seeds); in every seed the critic
explains at least 0.3 of the variance of its returns, and of credit, at the end (mean over the last training steps, on
trajectories before the critic learns from them).
"""

from __future__ import annotations

import argparse
from statistics import mean

from benchmarks.record import RESULTS, Figure, compare, exit_with, show, write
from benchmarks.sources import TRAINING, Work
from creditflow.runs.run_folder import read_metrics

MEASURES = (
    *TRAINING,
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_estimators.yaml",
)
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
ARMS = ("dr_grpo", "dapo")
SEEDS, LAST = 3, 5
POINTS, EXPLAINED = 15.0, 0.3


def main() -> int:
    """Run, print, write `docs/results/estimators.json` and the figure; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three training steps: shows that it runs, proves nothing")
    quick = parser.parse_args().quick
    work = Work.begin("estimators", MEASURES, quick=quick)
    folder = work.folder
    more = ["--only", ",".join((*ESTIMATORS, *ARMS))]
    more += ["trainer.total_training_steps=3", "data.val_max_samples=64"] if quick else []
    seeds = 1 if quick else SEEDS
    compared = compare("arithmetic_estimators", "algorithm.adv_estimator", ESTIMATORS, seeds, folder, *more)
    figures = []
    for arm in (*ESTIMATORS, *ARMS):
        passed = compared["values"][arm]["pass_at_1"]
        gained = [100 * (after - passed["before"]) for after in passed["after"]["seeds"]]
        spread = (min(gained), max(gained))
        figures.append(Figure(f"pass@1 gained, {arm}", mean(gained), POINTS, unit="points", spread=spread))
    learned = [read_metrics(run.parent)[-LAST:] for run in sorted((folder / "gae").glob("seed*/run.json"))]
    for what, key in (
        ("the returns that it learns from, the worst seed", "critic/vf_explained_var"),
        ("credit itself, the worst seed", "critic/credit_explained_var"),
    ):
        explained = [mean(row[key] for row in rows) for rows in learned]
        spread = (min(explained), max(explained))
        figures.append(Figure(f"variance that the critic explains of {what}", min(explained), EXPLAINED, spread=spread))
    batches = [
        mean(row["rollout/gen_batches"] for row in read_metrics(run.parent) if "rollout/gen_batches" in row)
        for run in sorted((folder / "dapo").glob("seed*/run.json"))
    ]
    figures.append(Figure.from_values("batches taken for one of dapo's", batches))
    missed = show(figures)
    if not quick:
        packages = ("creditflow", "torch", "transformers", "numpy")
        write("estimators", figures, packages, work.measured, {"compared": compared})
        (RESULTS / "estimators.png").write_bytes((folder / "comparison.png").read_bytes())
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
