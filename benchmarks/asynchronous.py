"""verl's asynchronous mode against the synchronous one: `python -m benchmarks.asynchronous [--minutes M] [--quick]`.

`arithmetic_chain` on verl (on a CPU, by `tests/verl_cpu`).

* Throughput: every rollout waits as for a tool, a tenth of them five times as long. `separate_async` has one logical
  device for training and one for rollouts, so `sync` is measured with one device and with two. The tail of the measured
  durations of rollouts is a separate figure.
* Credit: the advantages that the asynchronous runs recorded must have the same bytes as those assigned to their
  trajectories without an engine.

Finished runs are kept in `runs/asynchronous/`; an unfinished one starts again. An hour on two cores.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
import verl_cpu

from benchmarks.__main__ import exit_on_sigterm
from benchmarks.processes import Progress, collecting, start, wait
from benchmarks.record import Figure, exit_with, quick_parser, show, write
from benchmarks.slow_tool import SECONDS_FILE
from benchmarks.sources import TRAINING, Work
from creditflow._utils.files import write_whole
from creditflow.runs import Ledger
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.reassignment import reassigned

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
        options = verl_cpu.options(self.ranks)
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


def same_credit(trainings: Sequence[Training]) -> list[Figure]:
    """The share of recorded training steps whose credit has the bytes of credit assigned without an engine."""
    equal = [
        100.0 * np.array_equal(assignment.token_advantages(), recorded.assignment.token_advantages())
        for one in trainings
        for recorded, assignment in reassigned(Ledger.open(one.folder), {})
        if assignment is not None and recorded.assignment is not None
    ]
    what = f"credit: {len(equal)} asynchronous training steps with the same bytes without an engine, %"
    return [Figure(what, fmean(equal), 100.0)] if equal else []


def main() -> int:
    """Do the missing runs and print the figures; 1 if one falls short."""
    parser = quick_parser(__doc__, "two short runs: shows that it runs, proves nothing")
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    given = parser.parse_args()
    exit_on_sigterm()
    quick, until = given.quick, time.monotonic() + 60 * (given.minutes if given.minutes is not None else float("inf"))
    work = Work.begin("asynchronous", MEASURES, quick=quick)
    slow = [
        Training(
            mode, work.folder / f"slow-{mode.key}-{repeat}", _BURST + (1 if quick else BURSTS * _BURST),
            ("team.workflow='benchmarks/slow_tool.py:solve_timed'", "data.val_max_samples=1", f"data.seed={repeat}"),
        )
        for repeat in range(1 if quick else REPEATS)
        for mode in ((SYNC_ON_TWO, SLOW_ASYNC) if quick else (SYNC, SYNC_ON_TWO, SLOW_ASYNC))
    ]  # fmt: skip
    missing = [one for one in slow if not one.done]
    progress, failures = Progress(len(missing)), []
    for one in missing:
        if time.monotonic() > until:
            break
        begun = time.monotonic()
        ended = one.run()
        progress.report(one.folder.name, ended, time.monotonic() - begun)
        failures += [] if one.done else [f"{one.folder.name}: {ended}"]
    figures = throughput(slow, None if quick else _FASTER)
    figures += same_credit([one for one in slow if one.mode.lag and one.done])
    missed = show(figures)
    if failures:
        raise SystemExit("error: " + "; ".join(failures))
    if not quick and all(one.done for one in slow):
        write("asynchronous", figures, ("creditflow", "verl", "ray", "torch", "transformers"), work.measured)
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
