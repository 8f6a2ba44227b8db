"""Training runs in separate processes, one per core at a time.

The processes are forked from one that has loaded everything, which saves a short run a sixth of its time. This module
starts and finds runs; the benchmarks compare them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.context import ForkProcess
from pathlib import Path

from benchmarks.sources import hashes
from creditflow._utils.files import alone_in, write_whole
from creditflow.studies.comparison.results import RunResult

_KEPT = ("evaluation.json", "metrics.jsonl", "events.jsonl", "run.json")
"""The files kept of a finished run; checkpoints and step files of a thousand runs would fill the disk."""
_MADE_BY = "made_by.json"
"""Settings and sources of a complete run; written last."""
_SOURCES = ("src/creditflow", "benchmarks/cases.py", "benchmarks/guard.py")
_POLL_SECONDS = 0.2
_SAY_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """Work for one process."""

    log: Path
    work: Callable[[], None]


@dataclass(frozen=True)
class Run:
    """One run of a recipe."""

    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    seed: int
    prepare: Callable[[], None] | None = None
    """Called in the run's process before training."""

    @property
    def settings(self) -> list[str]:
        """All overrides but the folder.

        `data.seed` fixes all randomness, including the evaluation's: runs of one seed share their random numbers.
        """
        return [*self.overrides, f"data.seed={self.seed}", "trainer.val_before_train=false"]

    @property
    def made_by(self) -> dict[str, object]:
        """Everything that determines the run's result."""
        prepare = None if self.prepare is None else self.prepare.__qualname__
        return {"recipe": self.recipe.name, "settings": self.settings, "prepare": prepare, "sources": sources()}

    @property
    def finished(self) -> bool:
        """Whether the run exists. Raises ValueError if its folder holds a run of other settings or sources."""
        file = self.folder / _MADE_BY
        if not file.exists():
            return False
        was, wanted = json.loads(file.read_text()), self.made_by
        if other := [key for key in wanted if was.get(key) != wanted[key]]:
            raise ValueError(
                f"{self.folder} holds a run of another {', '.join(other)}: {[was.get(key) for key in other]} where "
                f"{[wanted[key] for key in other]} is wanted; take it away, or go back to the sources that made it"
            )
        return True

    def result(self) -> RunResult:
        """The run's result."""
        return RunResult.read(self.folder)


@cache
def sources() -> str:
    """A hash of the code that determines a run's result."""
    return hashlib.sha256(json.dumps(hashes(_SOURCES)).encode()).hexdigest()[:12]


def finish(runs: Sequence[Run], title: str) -> None:
    """Do the unfinished runs in order.

    Raises RuntimeError if a run fails, or if another process is doing runs below the same folder.
    """
    waiting = [run for run in dict.fromkeys(runs) if not run.finished]
    print(f"{title}: {len(waiting)} of {len(set(runs))} runs are to be done", flush=True)
    if waiting:
        common = Path(os.path.commonpath([run.folder.parent for run in waiting]))
        in_parallel([Job(run.folder.with_suffix(".log"), partial(_do, run)) for run in waiting], title, common)


def in_parallel(jobs: Sequence[Job], title: str, folder: Path) -> None:
    """Do the jobs in order, as many at a time as there are cores. `folder` is theirs alone.

    Raises RuntimeError, with the end of the log, if a job fails, or if another process works in `folder`.
    """
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    import creditflow.engines.local.trainer  # noqa: F401  (loaded once, before the processes part)

    waiting, running = list(jobs), dict[ForkProcess, Job]()
    fork, parent = multiprocessing.get_context("fork"), os.getpid()
    began = said = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    # Two processes would remove each other's folders.
    with alone_in(folder, RuntimeError(f"{folder}: another process is doing runs there")):
        try:
            while waiting or running:
                while waiting and len(running) < len(os.sched_getaffinity(0)):
                    job = waiting.pop(0)
                    process = fork.Process(target=_work, args=(job, parent), daemon=True)
                    process.start()
                    running[process] = job
                time.sleep(_POLL_SECONDS)
                for process, job in [(p, j) for p, j in running.items() if not p.is_alive()]:
                    del running[process]
                    if process.exitcode != 0:
                        raise RuntimeError("\n".join([f"{job.log}: exit code {process.exitcode}:", *_lines(job)[-15:]]))
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    done, minutes = len(jobs) - len(waiting) - len(running), (said - began) / 60
                    print(f"{title}: {done} of {len(jobs)} done after {minutes:.0f} min", flush=True)
                    for job in running.values():
                        print(f"  {job.log.stem}: {' '.join(_lines(job)[-1:])[:100]}", flush=True)
        finally:
            for process in running:
                process.kill()
                process.join()


def _lines(job: Job) -> list[str]:
    return job.log.read_text(errors="replace").splitlines() if job.log.exists() else []


def _work(job: Job, parent: int) -> None:
    """Do the job in its own process, which ends with `parent`."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    try:
        from creditflow.rewards.execution.worker import die_with

        die_with(parent)
        job.work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _do(run: Run) -> None:
    from creditflow._utils.progress import Reporter
    from creditflow.config import load_recipe
    from creditflow.engines.local.trainer import train

    shutil.rmtree(run.folder, ignore_errors=True)  # an interrupted run
    if run.prepare is not None:
        run.prepare()
    train(load_recipe(run.recipe, [*run.settings, f"trainer.default_local_dir={run.folder}"]), Reporter())
    for path in run.folder.iterdir():
        if path.name not in _KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_whole(run.folder / _MADE_BY, lambda path: path.write_text(json.dumps(run.made_by)))
