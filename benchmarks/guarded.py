"""Runs that are made to fail, with the guard and without it: `python -m benchmarks.guarded [--quick]`.

`arithmetic_chain`, 30 training steps of 16 tasks and 8 plays, a validation every fifth, 3 seeds of each:

* `failing`: from step 10 on 15 % of the verdicts fail;
* `contradictory`: from step 10 on every verdict is turned round;
* `huge_lr`: ten times the learning rate, under which entropy collapses;

and five healthy runs of 50 steps. Into `runs/guarded/`, where finished runs are found again. About an hour, two cores.

Held: with the guard, pass@1 on 512 unseen tasks ends no lower than without it (the 95 % bootstrap interval over seeds
and tasks of the difference reaches 0), and in no healthy run does a rule fire that acts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.record import ROOT, Figure, compare, show, write
from creditflow.ledger.run_folder import read_events

SEEDS, HEALTHY = 3, 5
FUNCTIONS = ("plan_right", "digits_right", "verdict_right")


def main() -> int:
    """Run, print, write `docs/results/guarded.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two training steps: shows that it runs, proves nothing")
    quick = parser.parse_args().quick
    folder = ROOT / "runs" / ("guarded-quick" if quick else "guarded")
    short = ["trainer.total_training_steps=2", "data.val_max_samples=32"] if quick else []
    figures = []
    for name, options in SICK.items():
        figures += with_and_without(name, options, folder / name, 1 if quick else SEEDS, short)
    figures.append(healthy(folder / "healthy", 1 if quick else HEALTHY, short))
    missed = show(figures)
    if not quick:
        write("guarded", figures, ("creditflow", "torch", "transformers", "numpy"))
    return int(missed and not quick)


def rewards(sick: str) -> str:
    """The recipe's reward functions, those of steps as `benchmarks.sick` has them."""
    of_steps = [f"{{fn: 'benchmarks/sick.py:{name}', args: {{sick: {sick}}}}}" for name in FUNCTIONS]
    return f"reward.functions=[{{fn: 'arithmetic_chain.py:answer_right'}}, {', '.join(of_steps)}]"


SICK = {
    "failing": [rewards("failing")],
    "contradictory": [rewards("contradictory")],
    "huge_lr": ["actor_rollout_ref.actor.optim.lr=6.0e-3"],
}


def with_and_without(name: str, options: list[str], folder: Path, seeds: int, short: list[str]) -> Iterable[Figure]:
    """pass@1 at the end, with the guard and without, and the difference with what it is sure of."""
    more = ["--no-arms", "trainer.test_freq=5", *options, *short]
    compared = compare("arithmetic_chain", "guard.enable", ("true", "false"), seeds, folder, *more)
    for value, words in (("true", "with the guard"), ("false", "without it")):
        after = compared["values"][value]["pass_at_1"]["after"]["seeds"]
        yield Figure.of(f"{name}: pass@1 {words}", after)
    (pair,) = compared["differences"]
    low, high = (-bound for bound in reversed(pair["pass_at_1"]["interval"]))
    yield Figure(f"{name}: what the guard adds, mean", -pair["pass_at_1"]["mean"], spread=(low, high))
    yield Figure(f"{name}: what the guard adds, upper end of its 95 % interval", high, 0.0)


def healthy(folder: Path, seeds: int, short: list[str]) -> Figure:
    """How many acting rules fired in healthy runs."""
    more = ["--no-arms", "trainer.test_freq=5", "trainer.total_training_steps=50", *short]
    compare("arithmetic_chain", "guard.enable", ("true",), seeds, folder, *more)
    events = [event for run in folder.glob("true/seed*/run.json") for event in read_events(run.parent)]
    acting = sum(event["what"] == "fired" and event["action"] != "warn" for event in events)
    return Figure(f"{seeds} healthy runs: firings of rules that act", acting, 0.0, at_most=True)


if __name__ == "__main__":
    sys.exit(main())
