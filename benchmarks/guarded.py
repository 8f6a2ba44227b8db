"""Runs with injected faults, with and without the guard: `python -m benchmarks.guarded [--quick]`.

`arithmetic_chain`, 30 training steps of 16 tasks and 8 rollouts, a validation on 256 tasks every fifth, 3 seeds of each
scenario. From step 10 on

* `failing`: 15 % of the verdicts fail;
* `contradictory`: every verdict is inverted;
* `misleading`: the executor's verdicts are inverted, validations run every third step, and the rule on accuracy is the
  only acting rule;
* `not_finite`: three steps' losses are NaN, once;
* `shut_out`: only the executor is scored, its scores never pass the threshold, and the outcome starts at the answer:
  the planner receives no credit;

or, from the start, `huge_lr`: ten times the learning rate, which destroys the policy within two steps. Also five
healthy runs of 50 steps. Writes to `runs/guarded/` and reuses finished runs there. Takes about three quarters of an
hour on two cores.

Targets: with the guard, pass@1 on the 256 tasks ends no lower than without it (the mean difference is at least -3
points, and its 95 % bootstrap interval over seeds and tasks reaches 0); with inverted verdicts it ends higher; and no
acting rule fires in a healthy run.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import Figure, exit_with, show, write
from benchmarks.runs import Run, finish
from benchmarks.sources import TRAINING, Work
from creditflow.config.shipped import find_recipe
from creditflow.runs.run_folder import read_events
from creditflow.studies.comparison.bootstrap import paired_difference
from creditflow.studies.comparison.results import ArmResult

MEASURES = (
    *TRAINING,
    "src/creditflow/monitoring/guard.py",
    "src/creditflow/monitoring/guard_rules",
    "benchmarks/cases.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
)
SEEDS, HEALTHY, MARGIN = 3, 5, 0.03
FIRST, SPOILT = 10, 3
FUNCTIONS = ("plan_right", "digits_right", "verdict_right")
RECIPE = find_recipe("arithmetic_chain")
ALWAYS = (
    "trainer.test_freq=5",
    "trainer.save_freq=5",
    "data.val_max_samples=256",
    "reward.backend=inline",
)


def rewards(wrong: str, paid: Sequence[str] = FUNCTIONS) -> str:
    """The recipe's reward functions, with step functions from `benchmarks.cases`."""
    args = f"args: {{wrong: {wrong}, first: {FIRST}}}"
    of_steps = [
        f"{{fn: 'benchmarks/cases.py:{name}', {args}{'' if name in paid else ', weight: 0'}}}" for name in FUNCTIONS
    ]
    return f"reward.functions=[{{fn: 'arithmetic_chain.py:answer_right'}}, {', '.join(of_steps)}]"


def spoil_losses() -> None:
    """Make the losses of three training steps NaN, like a hardware fault: repeated steps have finite losses."""
    actor: Any = importlib.import_module("creditflow.engines.local.actor")
    made, updates = actor.token_weights, 0

    def token_weights(*args: Any) -> Any:
        nonlocal updates
        updates += 1  # two a training step
        return made(*args) * (math.nan if 0 < updates - 2 * (FIRST - 1) <= 2 * SPOILT else 1.0)

    actor.token_weights = token_weights


@dataclass(frozen=True)
class Scenario:
    """One kind of fault."""

    overrides: tuple[str, ...] = ()
    prepare: Callable[[], None] | None = None
    saved: bool = False
    """Whether the guard must do better, rather than no worse."""


SICK = {
    "failing": Scenario((rewards("failing"),)),
    "contradictory": Scenario((rewards("contradictory"),), saved=True),
    "misleading": Scenario(
        (rewards("misleading"), "guard.rules.error_rate=null", "guard.rules.agreement=null", "trainer.test_freq=3")
    ),
    "not_finite": Scenario(prepare=spoil_losses),
    "shut_out": Scenario((rewards("never_enough", ["digits_right"]), "algorithm.outcome_to=answer")),
    "huge_lr": Scenario(("actor_rollout_ref.actor.optim.lr=6.0e-3",)),
}


def main() -> int:
    """Run, print, write `docs/results/guarded.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two training steps: shows that it runs, proves nothing")
    quick = parser.parse_args().quick
    work = Work.begin("guarded", MEASURES, quick=quick)
    folder = work.folder
    short = ("trainer.total_training_steps=2", "data.val_max_samples=32") if quick else ()
    seeds = 1 if quick else SEEDS
    runs = {(name, guarded): runs_of(name, guarded, folder, seeds, short) for name in SICK for guarded in (True, False)}
    well = [
        Run(RECIPE, (*ALWAYS, "trainer.total_training_steps=50", *short), folder / "healthy" / f"seed{seed}", seed)
        for seed in range(1 if quick else HEALTHY)
    ]
    finish([run for group in runs.values() for run in group] + well, "guarded")
    figures = [figure for name in SICK for figure in with_and_without(name, runs[name, True], runs[name, False])]
    acting = [event for run in well for event in fired(run) if event["action"] != "warn"]
    figures.append(Figure(f"{len(well)} healthy runs: firings of rules that act", len(acting), 0.0, at_most=True))
    missed = show(figures)
    if not quick:
        write("guarded", figures, ("creditflow", "torch", "transformers", "numpy"), work.measured)
    return int(missed)


def runs_of(name: str, guarded: bool, folder: Path, seeds: int, short: tuple[str, ...] = ()) -> list[Run]:
    """The runs of a faulty scenario, with or without the guard."""
    scenario = SICK[name]
    options = (*ALWAYS, *scenario.overrides, f"guard.enable={str(guarded).lower()}", *short)
    below = folder / name / ("with" if guarded else "without")
    return [Run(RECIPE, options, below / f"seed{seed}", seed, scenario.prepare) for seed in range(seeds)]


def with_and_without(name: str, guarded: Sequence[Run], plain: Sequence[Run]) -> Iterable[Figure]:
    """Final pass@1 with and without the guard, the first firing, and the difference with its interval."""
    arms = [ArmResult(words, [], [run.result() for run in runs]) for words, runs in (("w", guarded), ("o", plain))]
    for words, arm in zip(("with the guard", "without it"), arms, strict=True):
        yield Figure.from_values(f"{name}: pass@1 {words}", arm.after("pass_at_1"))
    first = [min((event["step"] for event in fired(run)), default=0.0) for run in guarded]
    yield Figure.from_values(f"{name}: the step of the first firing (0: none)", first)
    difference = paired_difference(*(arm.counts("pass_at_1") for arm in arms))
    spread = (difference.low, difference.high)
    yield Figure(f"{name}: what the guard adds, mean and 95 % interval", difference.mean, -MARGIN, spread=spread)
    if SICK[name].saved:
        yield Figure(f"{name}: the lower end of that interval", difference.low, 0.0)
    else:
        yield Figure(f"{name}: the upper end of that interval", difference.high, 0.0)


def fired(run: Run) -> list[dict[str, Any]]:
    """The firing events of a run."""
    return [event for event in read_events(run.folder) if event["what"] == "fired"]


if __name__ == "__main__":
    exit_with(main)
