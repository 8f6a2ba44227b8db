"""The guard's rules on healthy and faulty runs, and the guard's cost: `python -m benchmarks.guard [--quick]`.

1,000 simulated healthy runs of 100 training steps (20 validations), each with its own curves, noise and numbers of
rollouts, and 200 runs of each kind of fault, from step 20 on. Targets: no acting rule fires in more than 1 % of the
healthy runs, and each default rule fires in at least 95 % of the runs with its fault. Then ten training steps of
`arithmetic_chain`: metrics and guard take at most 2 % of a step.

Then runs with injected faults, with and without the guard: 30 training steps of 16 tasks and 8 rollouts, a validation
on 256 tasks every fifth, 5 seeds of each scenario. From step 10 on

* `failing`: 15 % of the verdicts fail;
* `contradictory`: every verdict is inverted;
* `misleading`: the executor's verdicts are inverted, validations run every third step, and the rule on accuracy is the
  only acting rule;
* `not_finite`: three steps' losses are NaN, once;
* `shut_out`: only the executor is scored, its scores never pass the threshold, and the outcome starts at the answer:
  the planner receives no credit;

or, from the start, `huge_lr`: ten times the learning rate, which destroys the policy within two steps. Also five
healthy runs of 50 steps. Writes to `runs/guard/` and reuses finished runs there. Takes about five quarters of an hour
on two cores. Targets: with the guard, pass@1 on the 256 tasks ends no lower than without it (the mean difference is at
least -3 points, and its 95 % interval over seeds reaches 0); with inverted verdicts it ends higher;
and no acting rule fires in a healthy run.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import ROOT, Figure, exit_with, quick_parser, show, write
from benchmarks.runs import Run, finish
from benchmarks.sources import TRAINING, Work
from creditflow._utils.intervals import LEAST_SEEDS, paired_difference
from creditflow.config import default_rules, load_recipe
from creditflow.config.loading import find_recipe
from creditflow.engines.common.components import build_components
from creditflow.engines.common.guard import build_guard
from creditflow.monitoring.guard import WARN, Guard, specs
from creditflow.runs.run_folder import read_events, read_metrics
from tests.monitoring.scenarios import SCENARIOS, Setting, series

MEASURES = (
    *TRAINING,
    "benchmarks/cases.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
    "src/creditflow/monitoring/guard.py",
    "src/creditflow/monitoring/metrics.py",
    "src/creditflow/monitoring/guard_rules",
    "tests/monitoring/scenarios.py",
)
SETTING = Setting(steps=100, test_freq=5, onset=20)
FEW = 32
"""Rollouts a training step that are too few to tell 15 % from 10 % soon."""
FALSE_ALARMS, FOUND, COST = 0.01, 0.95, 0.02
SEEDS, HEALTHY, MARGIN = LEAST_SEEDS, 5, 0.03
FIRST, SPOILT = 10, 3
FUNCTIONS = ("plan_right", "digits_right", "verdict_right")
RECIPE = find_recipe("arithmetic_chain")
ALWAYS = (
    "trainer.test_freq=5",
    "trainer.save_freq=5",
    "data.val_max_samples=256",
    "reward.backend=inline",
)


def main() -> int:
    """Run, print, write `docs/results/guard.json` and `guarded.json`; 1 if a number falls short."""
    quick = quick_parser(__doc__, "fewer runs, fewer training steps").parse_args().quick
    work = Work.begin("guard", MEASURES, quick=quick)
    healthy, sick, steps = (100, 20, 3) if quick else (1000, 200, 10)
    figures = [*false_alarms(healthy), *delays(sick), *cost(steps)]
    trained = list(faulty_runs(work.folder, quick=quick))
    missed = show([*figures, *trained])
    if not quick:
        write("guard", figures, ("creditflow", "numpy"), work.measured)
        write("guarded", trained, ("creditflow", "torch", "transformers", "numpy"), work.measured)
    return int(missed)


def false_alarms(runs: int) -> Iterable[Figure]:
    """The share of healthy runs in which each rule fires."""
    fired = Counter(rule for seed in range(runs) for rule in first_firings("healthy", seed, SETTING))
    for rule in specs(default_rules()):
        hold = None if rule.action == WARN else FALSE_ALARMS
        share = fired[rule.name] / runs
        yield Figure(f"healthy runs in which {rule.name} fires ({rule.action})", share, hold, at_most=True)


def delays(runs: int) -> Iterable[Figure]:
    """The share of faulty runs in which the scenario's rule fires, and the number of training steps until then."""
    for name, scenario in SCENARIOS.items():
        if scenario.rule is None:
            continue
        for of, setting, hold in _settings(name):
            firsts = [first_firings(name, seed, setting).get(scenario.rule, 0) for seed in range(runs)]
            after = sorted(first - setting.onset + 1 for first in firsts if first >= setting.onset)
            yield Figure(f"{of}: runs in which {scenario.rule} fires", len(after) / runs, hold)
            if after:
                spread = (after[len(after) // 20], after[-1 - len(after) // 20])
                yield Figure(f"{of}: training steps until it does (5 % .. 95 %)", median(after), spread=spread)


def _settings(name: str) -> Iterable[tuple[str, Setting, float | None]]:
    """Settings and target shares for a scenario; the power of rules on shares depends on the number of rollouts."""
    if name == "accuracy_drop":
        for trajectories in (128, 512, 2048):
            yield (
                f"{name}, {trajectories} trajectories a validation",
                replace(SETTING, n_val=trajectories),
                FOUND,
            )
    elif name == "failing_rewards":
        for judged in (32, 128, 512):
            hold = FOUND if judged > FEW else None
            yield f"{name}, {judged} trajectories a step", replace(SETTING, judged=judged), hold
    else:
        yield name, SETTING, FOUND


def first_firings(name: str, seed: int, setting: Setting) -> dict[str, int]:
    """The training step of each default rule's first firing."""
    guard, first = Guard(specs(default_rules())), dict[str, int]()
    for row in series(name, setting, seed):
        for event in guard.look(int(row["step"]), row):
            if event.what == "fired":
                first.setdefault(event.rule, event.step)
    return first


def cost(steps: int) -> Iterable[Figure]:
    """Metrics and guard, as shares of a training step of `arithmetic_chain`, without the first step (compilation)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "creditflow", "train", "arithmetic_chain"]
        command += [f"trainer.default_local_dir={folder}/run"]
        more = [f"trainer.total_training_steps={steps}", "data.val_max_samples=16", "trainer.val_before_train=false"]
        subprocess.run([*command, *more], cwd=ROOT, check=True)
        rows = read_metrics(Path(folder) / "run")[1:]
    loaded = load_recipe("arithmetic_chain")
    guard = build_guard(loaded.config, loaded.folder, build_components(loaded, tasks=False).rewards.functions, "local")
    shares, looks = [], []
    for row in rows:
        numbers = {key: value for key, value in row.items() if value is not None}
        start = time.perf_counter()
        guard.look(row["step"], numbers)
        looks.append((time.perf_counter() - start) / row["timing/step_s"])
        shares.append(row["timing/metrics_s"] / row["timing/step_s"] + looks[-1])
    yield Figure.from_values("metrics and guard, share of a training step", shares, COST, at_most=True)
    yield Figure.from_values("the guard alone", looks)


# ---- runs with injected faults ---------------------------------------------------------------------------------------


def rewards(wrong: str, paid: Sequence[str] = FUNCTIONS) -> str:
    """The recipe's reward functions, with step functions from `benchmarks.cases`."""
    args = f"args: {{wrong: {wrong}, first: {FIRST}}}"
    of_steps = [
        f"{{fn: 'benchmarks/cases.py:{name}', {args}{'' if name in paid else ', weight: 0'}}}" for name in FUNCTIONS
    ]
    return f"reward.functions=[{{fn: 'arithmetic_chain.py:answer_right'}}, {', '.join(of_steps)}]"


def spoil_losses() -> None:
    """Make the losses of three training steps NaN, like a hardware fault: repeated steps have finite losses."""
    learner: Any = importlib.import_module("creditflow.engines.local.learner")
    made, updates = learner.token_weights, 0

    def token_weights(*args: Any) -> Any:
        nonlocal updates
        updates += 1  # two a training step
        return made(*args) * (math.nan if 0 < updates - 2 * (FIRST - 1) <= 2 * SPOILT else 1.0)

    learner.token_weights = token_weights


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
    "shut_out": Scenario(
        (rewards("never_enough", ["digits_right"]), "algorithm.propagation=threshold", "algorithm.outcome_to=answer")
    ),
    "huge_lr": Scenario(("actor_rollout_ref.actor.optim.lr=6.0e-3",)),
}


def faulty_runs(folder: Path, *, quick: bool) -> Iterable[Figure]:
    """Train the faulty runs with and without the guard, and the healthy ones."""
    short = ("trainer.total_training_steps=2", "data.val_max_samples=32") if quick else ()
    seeds = 1 if quick else SEEDS
    runs = {(name, guarded): runs_of(name, guarded, folder, seeds, short) for name in SICK for guarded in (True, False)}
    well = [
        Run(RECIPE, (*ALWAYS, "trainer.total_training_steps=50", *short), folder / "healthy" / f"seed{seed}", seed)
        for seed in range(1 if quick else HEALTHY)
    ]
    finish([run for group in runs.values() for run in group] + well, "guard")
    for name in SICK:
        yield from with_and_without(name, runs[name, True], runs[name, False])
    acting = [event for run in well for event in fired(run) if event["action"] != "warn"]
    yield Figure(f"{len(well)} healthy runs: firings of rules that act", len(acting), 0.0, at_most=True)


def runs_of(name: str, guarded: bool, folder: Path, seeds: int, short: tuple[str, ...]) -> list[Run]:
    """The runs of a faulty scenario, with or without the guard."""
    scenario = SICK[name]
    options = (*ALWAYS, *scenario.overrides, f"guard.enable={str(guarded).lower()}", *short)
    below = folder / name / ("with" if guarded else "without")
    return [Run(RECIPE, options, below / f"seed{seed}", seed, scenario.prepare) for seed in range(seeds)]


def with_and_without(name: str, guarded: Sequence[Run], plain: Sequence[Run]) -> Iterable[Figure]:
    """Final pass@1 with and without the guard, the first firing, and the difference with its interval."""
    sides = [[run.result().after.metrics["pass_at_1"] for run in runs] for runs in (guarded, plain)]
    for words, values in zip(("with the guard", "without it"), sides, strict=True):
        yield Figure.from_values(f"{name}: pass@1 {words}", values)
    first = [min((event["step"] for event in fired(run)), default=0.0) for run in guarded]
    yield Figure.from_values(f"{name}: the step of the first firing (0: none)", first)
    difference = paired_difference(*sides)
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
