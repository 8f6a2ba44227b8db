"""The guard's rules on healthy and faulty runs, and the guard's cost: `python -m benchmarks.guard [--quick]`.

1,000 simulated healthy runs of 100 training steps (20 validations), each with its own curves, noise and numbers of
rollouts, and 200 runs of each kind of fault, from step 20 on. Targets: no acting rule fires in more than 1 % of the
healthy runs, and each default rule fires in at least 95 % of the runs with its fault. Then ten training steps of
`arithmetic_chain`: metrics and guard take at most 2 % of a step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.record import ROOT, Figure, exit_with, show, write
from benchmarks.sources import hashes
from creditflow.config import default_rules, load_recipe
from creditflow.engines.common.components import build_components
from creditflow.engines.common.guard import build_guard
from creditflow.monitoring.guard import WARN, Guard, specs
from creditflow.runs.run_folder import read_metrics
from tests.monitoring.scenarios import SCENARIOS, Setting, series

MEASURES = (
    "src/creditflow/monitoring/guard.py",
    "src/creditflow/monitoring/metrics.py",
    "src/creditflow/monitoring/guard_rules",
    "tests/monitoring/scenarios.py",
)
SETTING = Setting(steps=100, test_freq=5, onset=20)
FEW = 32
"""Rollouts a training step that are too few to tell 15 % from 10 % soon."""
FALSE_ALARMS, FOUND, COST = 0.01, 0.95, 0.02


def main() -> int:
    """Run, print, write `docs/results/guard.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, fewer training steps")
    quick = parser.parse_args().quick
    measured = hashes(MEASURES)
    healthy, sick, steps = (100, 20, 3) if quick else (1000, 200, 10)
    figures = [*false_alarms(healthy), *delays(sick), *cost(steps)]
    missed = show(figures)
    if not quick:
        write("guard", figures, ("creditflow", "numpy"), measured)
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
        command = [
            sys.executable,
            "-m",
            "creditflow",
            "train",
            "arithmetic_chain",
            f"trainer.default_local_dir={folder}/run",
        ]
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


if __name__ == "__main__":
    exit_with(main)
