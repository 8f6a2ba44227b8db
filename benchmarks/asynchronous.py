"""verl's asynchronous mode against the synchronous one: `python -m benchmarks.asynchronous [--minutes M] [--quick]`.

`arithmetic_chain` on verl (on a CPU, by `tests/verl_cpu`).

* Learning curves: `sync`, and `separate_async` with 1, 2 and 4 batches sampled ahead, which is also the limit of
  staleness. Three seeds each. Draws `docs/results/asynchronous.png`.
* Throughput: every rollout waits as for a tool, a tenth of them five times as long. `separate_async` has one logical
  device for training and one for rollouts, so `sync` is measured with one device and with two. The tail of the measured
  durations of rollouts is a separate figure.
* Credit: the trainers of all modes process the recorded trajectories of the asynchronous runs. The advantages of steps
  and tokens, and the columns that the engine writes to verl's rows, must be the same bytes.

Finished runs are kept in `runs/asynchronous/`; an unfinished one starts again. Two to three hours on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import verl_cpu

from benchmarks.__main__ import exit_on_sigterm
from benchmarks.processes import Progress, collecting, start, wait
from benchmarks.record import RESULTS, Figure, exit_with, show, write
from benchmarks.slow_tool import SECONDS_FILE
from benchmarks.sources import TRAINING, Work
from creditflow._utils.files import write_whole
from creditflow.config import load_recipe
from creditflow.reports.comparison_plot import COLOURS, STYLES
from creditflow.runs import Ledger
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.comparison.results import RunResult

RECIPE = "src/creditflow/recipes/arithmetic_chain.yaml"
MEASURES = (
    *TRAINING,
    "src/creditflow/engines/verl",
    "benchmarks/asynchronous.py",
    "benchmarks/cases.py",
    "benchmarks/processes.py",
    "benchmarks/slow_tool.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    RECIPE,
)
LAGS = (1, 2, 4)
SEEDS, STEPS, LATE = 3, 24, 6
VAL_TASKS = 256
REPEATS, SLOW_LAG, BURSTS = 3, 2, 3
"""Repeats of the comparison of throughput, its limit of staleness, and the counted bursts of training steps.

Batches sampled ahead end together with the first one, so asynchronous steps come in bursts of SLOW_LAG + 1, of which
the first step waits. Whole bursts are counted, and the first one, which also starts processes, is not.
"""
_BURST = SLOW_LAG + 1
_FASTER = 1.5
"""The target: training steps of `separate_async` per one of `sync`."""
_RUN_S = 2700.0
"""The time limit of one run."""
_SMOOTHING = 5
"""Training steps averaged in a point of the plot."""
_DONE = "done"
_SERIES = (
    "train/pass_at_1",
    "reward/answer_right/mean",
    "reward/step_error_rate",
    "timing/step_s",
    "rollout/staleness",
    "rollout/staleness_max",
)
"""Metrics of training steps in the result file."""
_COMMON = (
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=4.0e-4",
    "trainer.val_before_train=false",
)


@dataclass(frozen=True)
class Mode:
    """A trainer mode with its limit of staleness, which is also the number of batches sampled ahead."""

    name: str
    lag: int = 0
    ranks: int = 1
    """Devices for training; those of `sync` are also for rollouts."""

    @property
    def key(self) -> str:
        """The mode's part of a folder's name."""
        return f"{self.name}-{self.lag or self.ranks}"

    @property
    def label(self) -> str:
        """The mode's name in figures."""
        if self.lag:
            return f"{self.name}, staleness up to {self.lag}"
        return f"{self.name}, {self.ranks} device{'s' if self.ranks > 1 else ''}"

    @property
    def options(self) -> list[str]:
        """verl's options."""
        options = [option for option in verl_cpu.options(self.ranks) if not option.startswith("trainer.v1.sampler")]
        options += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", f"trainer.v1.trainer_mode={self.name}"]
        if self.lag:
            options += [
                f"trainer.v1.{self.name}.num_warmup_batches={self.lag}",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
            ]
        return [*options, "++ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=16"]


SYNC, SYNC_ON_TWO = Mode("sync"), Mode("sync", ranks=2)
ASYNC = tuple(Mode("separate_async", lag) for lag in LAGS)
SLOW_ASYNC = Mode("separate_async", SLOW_LAG)


@dataclass(frozen=True)
class Training:
    """One run."""

    mode: Mode
    folder: Path
    steps: int
    overrides: tuple[str, ...]

    @property
    def done(self) -> bool:
        """True if the run is finished."""
        return (self.folder / _DONE).exists()

    @property
    def seconds_file(self) -> Path:
        """The durations of the rollouts, written by `slow_tool.solve_timed`."""
        return self.folder.with_name(f"{self.folder.name}.seconds.txt")

    def run(self) -> str:
        """Train; returns how the run ended. An unfinished folder is removed, because a run begins in an empty one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.seconds_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "creditflow", "train", RECIPE, *_COMMON, *self.overrides]
        command += [f"algorithm.max_version_lag={self.mode.lag}", f"trainer.total_training_steps={self.steps}"]
        command += [f"trainer.default_local_dir={self.folder}", "--engine", "verl", "--", *self.mode.options]
        environment = {**verl_cpu.environment(), SECONDS_FILE: str(self.seconds_file)}
        log = self.folder.with_name(f"{self.folder.name}.log")
        with collecting() as started:
            code = wait(start(command, log, environment), _RUN_S)
            if code is not None:
                started.left(30.0)  # the next run would share the cores
        if code != 0:
            return f"killed after {_RUN_S:g} s, see {log}" if code is None else f"exit code {code}, see {log}"
        write_whole(self.folder / _DONE, lambda path: path.write_text("\n"))
        return "finished"


def step_seconds(folder: Path) -> float:
    """The mean duration of a training step in whole bursts. A median would hide that steps are uneven."""
    return fmean(row["timing/step_s"] for row in read_metrics(folder) if row["step"] > _BURST)


def tail(seconds: Sequence[float]) -> float:
    """The mean of the slowest tenth, in multiples of the median."""
    slowest = sorted(seconds)[-max(1, len(seconds) // 10) :]
    return fmean(slowest) / median(seconds)


def throughput(slow: Sequence[Training], hold: float | None) -> list[Figure]:
    """Ratios of the durations of training steps, by repeat, and the tail of the rollouts' durations."""
    figures = []
    asynchronous = {one.folder.name.rpartition("-")[2]: one for one in slow if one.mode == SLOW_ASYNC and one.done}
    for mode in (SYNC, SYNC_ON_TWO):
        ratios = [
            step_seconds(one.folder) / step_seconds(asynchronous[repeat].folder)
            for one in slow
            if one.mode == mode and one.done and (repeat := one.folder.name.rpartition("-")[2]) in asynchronous
        ]
        if ratios:
            what = f"slow tools: training steps of {SLOW_ASYNC.name} (1 device for training, 1 for rollouts)"
            figures.append(Figure.from_values(f"{what} per step of {mode.label}", ratios, hold))
    for mode in (SYNC, SYNC_ON_TWO, SLOW_ASYNC):
        done = [one for one in slow if one.mode == mode and one.done]
        if not done:
            continue
        figures.append(
            Figure.from_values(
                f"slow tools: {mode.label}, training step", [step_seconds(one.folder) for one in done], unit="s"
            )
        )
        tails = [tail([float(line) for line in one.seconds_file.read_text().split()]) for one in done]
        figures.append(
            Figure.from_values(f"slow tools: {mode.label}, slowest tenth of rollouts / median, measured", tails)
        )
    return figures


def series(trainings: Sequence[Training]) -> dict[str, Any]:
    """For each mode: the metrics of every training step, and pass@1 on validation tasks at the end, by seed."""
    found: dict[str, Any] = {}
    for one in trainings:
        rows = [row for row in read_metrics(one.folder) if row["step"] > 0]
        of_mode = found.setdefault(one.mode.label, {"val/pass_at_1": [], "val/pass_at_1_greedy": []})
        for name in _SERIES:
            if any(name in row for row in rows):
                of_mode.setdefault(name, []).append([row.get(name) for row in rows])
        after = RunResult.read(one.folder).after.metrics
        for name in ("pass_at_1", "pass_at_1_greedy"):
            of_mode[f"val/{name}"].append(after[name])
    return found


def curves(trainings: Sequence[Training]) -> list[Figure]:
    """pass@1, staleness and truncated weights of each mode, over seeds."""
    figures = []
    for mode in dict.fromkeys(one.mode for one in trainings):
        folders = [one.folder for one in trainings if one.mode == mode]
        rows = [[row for row in read_metrics(folder) if row["step"] > 0] for folder in folders]
        late = [100 * fmean(row["train/pass_at_1"] for row in of_seed[-LATE:]) for of_seed in rows]
        figures.append(Figure.from_values(f"{mode.label}: pass@1 in training, last {LATE} steps, %", late))
        after = [100 * RunResult.read(folder).after.metrics["pass_at_1"] for folder in folders]
        figures.append(Figure.from_values(f"{mode.label}: pass@1 on validation tasks, %", after))
        if mode.lag:
            stale = [fmean(row["rollout/staleness"] for row in of_seed) for of_seed in rows]
            most = [max(row["rollout/staleness_max"] for row in of_seed) for of_seed in rows]
            clipped = [100 * fmean(row["rollout_corr/rollout_is_ratio_fraction_high"] for row in of) for of in rows]
            figures.append(Figure.from_values(f"{mode.label}: staleness, mean, versions", stale))
            figures.append(
                Figure.from_values(f"{mode.label}: staleness, largest, versions", most, float(mode.lag), at_most=True)
            )
            figures.append(Figure.from_values(f"{mode.label}: truncated weights, % of tokens", clipped))
    return figures


def same_credit(trainings: Sequence[Training]) -> list[Figure]:
    """The share of recorded training steps with the same bytes from the trainers of all modes, and in the record."""
    os.environ.update(verl_cpu.environment())
    from creditflow.engines.verl.configuration import MODES  # loads verl
    from tests.engines.verl.replayed import recorded_parts, replay

    config = load_recipe(Path(RECIPE), _COMMON).config
    equal = []
    for one in trainings:
        for recorded in Ledger.open(one.folder):
            with tempfile.TemporaryDirectory() as folder:
                parts = [replay(recorded, config, mode, Path(folder) / mode).parts() for mode in MODES]
            expected = recorded_parts(recorded)
            same = all(part == parts[0] for part in parts) and parts[0].items() >= expected.items()
            equal.append(100.0 * same)
    what = f"credit: {len(equal)} asynchronous training steps with the same bytes in {', '.join(MODES)}, %"
    return [Figure(what, fmean(equal), 100.0)] if equal else []


def draw(path: Path, of_modes: dict[str, Any]) -> None:
    """Draw the learning curve of every mode: the mean and the range of seeds."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import MaxNLocator

    picture = Picture(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    window = np.ones(_SMOOTHING) / _SMOOTHING
    for i, (label, found) in enumerate(of_modes.items()):
        curves_RT = np.array([np.convolve(one, window, "valid") for one in found["train/pass_at_1"]])
        steps_T, colour = np.arange(_SMOOTHING, _SMOOTHING + curves_RT.shape[1]), COLOURS[i % len(COLOURS)]
        axes.plot(steps_T, curves_RT.mean(axis=0), STYLES[i % len(STYLES)], color=colour, label=label, linewidth=2)
        axes.fill_between(steps_T, curves_RT.min(axis=0), curves_RT.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    axes.set_title(f"arithmetic_chain on verl, {SEEDS} seeds (line: mean, band: all seeds)")
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"pass@1 in training, mean of {_SMOOTHING} steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    picture.savefig(path, dpi=120, format="png")


def main() -> int:
    """Do the missing runs and print the figures; 1 if one falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--quick", action="store_true", help="four short runs: shows that it runs, proves nothing")
    given = parser.parse_args()
    exit_on_sigterm()
    quick, until = given.quick, time.monotonic() + 60 * (given.minutes if given.minutes is not None else float("inf"))
    work = Work.begin("asynchronous", MEASURES, quick=quick)
    modes, n_val = ((SYNC, ASYNC[0]), 8) if quick else ((SYNC, *ASYNC), VAL_TASKS)
    slow = [
        Training(
            mode, work.folder / f"slow-{mode.key}-{repeat}", _BURST + (1 if quick else BURSTS * _BURST),
            ("team.workflow='benchmarks/slow_tool.py:solve_timed'", "data.val_max_samples=1", f"data.seed={repeat}"),
        )
        for repeat in range(1 if quick else REPEATS)
        for mode in ((SYNC_ON_TWO, SLOW_ASYNC) if quick else (SYNC, SYNC_ON_TWO, SLOW_ASYNC))
    ]  # fmt: skip
    learning = [
        Training(
            mode, work.folder / f"curve-{mode.key}-{seed}", _SMOOTHING + 1 if quick else STEPS,
            (f"data.val_max_samples={n_val}", f"data.seed={seed}"),
        )
        for seed in range(1 if quick else SEEDS)
        for mode in modes
    ]  # fmt: skip
    missing = [one for one in (*slow, *learning) if not one.done]
    progress, failures = Progress(len(missing)), []
    for one in missing:
        if time.monotonic() > until:
            break
        begun = time.monotonic()
        ended = one.run()
        progress.report(one.folder.name, ended, time.monotonic() - begun)
        failures += [] if one.done else [f"{one.folder.name}: {ended}"]
    done = [one for one in learning if one.done]
    figures = throughput(slow, None if quick else _FASTER) + curves(done)
    figures += same_credit([one for one in done if one.mode.lag])
    missed = show(figures)
    found = series(done)
    if found:
        draw(work.folder / "asynchronous.png", found)
    if failures:
        raise SystemExit("error: " + "; ".join(failures))
    if not quick and all(one.done for one in (*slow, *learning)):
        shutil.copy(work.folder / "asynchronous.png", RESULTS)
        packages = ("creditflow", "verl", "ray", "torch", "transformers")
        write("asynchronous", figures, packages, work.measured, {"training": found})
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
