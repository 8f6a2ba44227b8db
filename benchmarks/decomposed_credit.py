"""Decomposed against shared credit on the arithmetic recipes: `python -m benchmarks.decomposed_credit [--quick]`.

Runs `creditflow compare` on each recipe, writes to `runs/decomposed_credit/`, reuses finished runs there, and compares
the results with the targets of DESIGN 12. In full, about an hour and a half on two cores.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from benchmarks.record import Figure, compare, exit_with, show, write
from benchmarks.sources import TRAINING, Work

RULES = ("identical", "none", "discounted", "threshold")


@dataclass(frozen=True)
class Study:
    """One comparison and its targets: points of pass@1 above `identical`, share of step errors saved."""

    recipe: str
    points: float | None = None
    fewer_errors: float | None = None
    rules: tuple[str, ...] = RULES
    arms: tuple[str, ...] = ("none_answer",)
    """The recipe's decomposed arms that are not plain rules; empty: run none of the recipe's arms."""


STUDIES = (
    Study("arithmetic_chain", points=0.08, fewer_errors=0.25),
    Study("arithmetic_chain_long", points=0.12, fewer_errors=0.25),
    Study("arithmetic_chain_sparse", rules=("identical", "none", "threshold"), arms=()),
)
MEASURES = (
    *TRAINING,
    "src/creditflow/recipes/arithmetic_chain.py",
    *(f"src/creditflow/recipes/{study.recipe}.yaml" for study in STUDIES),
)
QUICK = ("trainer.total_training_steps=2", "data.val_max_samples=64")


def main() -> int:
    """Run, print, write `docs/results/decomposed_credit.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two training steps: shows that it runs, proves nothing")
    quick = parser.parse_args().quick
    work = Work.begin("decomposed_credit", MEASURES, quick=quick)
    figures: list[Figure] = []
    results: dict[str, Any] = {}
    for study in STUDIES[:1] if quick else STUDIES:
        more = (*(() if study.arms else ("--no-arms",)), *(QUICK if quick else ()))
        seeds, folder = 1 if quick else 3, work.folder / study.recipe
        found = compare(study.recipe, "algorithm.propagation", study.rules, seeds, folder, *more)
        best, points, fewer = _best(study, found["values"])
        figures += [
            Figure(f"{study.recipe}: pass@1, {best} - identical", points, study.points),
            Figure(f"{study.recipe}: share of step errors that {best} saves", fewer, study.fewer_errors),
        ]
        results[study.recipe] = {"best": best, "points": points, "fewer_step_errors": fewer, **found}
    missed = show(figures)
    if not quick:
        packages = ("creditflow", "torch", "transformers", "numpy")
        write("decomposed_credit", figures, packages, work.measured, {"results": results})
    return int(missed)


def _best(study: Study, values: dict[str, Any]) -> tuple[str, float, float]:
    """The decomposed arm with the highest pass@1: its gain over `identical`, and the share of step errors it saves."""

    def mean(rule: str, metric: str) -> float:
        return float(values[rule][metric]["after"]["mean"])

    best = max((*study.rules[1:], *study.arms), key=lambda rule: mean(rule, "pass_at_1"))
    points = mean(best, "pass_at_1") - mean("identical", "pass_at_1")
    return best, points, 1 - mean(best, "step_error_rate") / mean("identical", "step_error_rate")


if __name__ == "__main__":
    exit_with(main)
