"""Many short training runs in separate processes, one per core at a time; finished runs are kept.

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
from functools import cache
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


def finish(
    runs: Sequence[Run], title: str, until: float | None = None, done_with: Callable[[Run], None] = lambda _: None
) -> bool:
    """Do the unfinished runs in order; False if the time `until` passed before the last one began.

    `until`: in `time.monotonic()`. `done_with`: called with each run as it ends.

    Raises RuntimeError, with the end of the log, if a run fails, or if another process is doing runs below the same
    folder.
    """
    waiting = [run for run in dict.fromkeys(runs) if not run.finished]
    print(f"{title}: {len(waiting)} of {len(set(runs))} runs are to be done", flush=True)
    if not waiting:
        return True
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    import creditflow.engines.local.trainer  # noqa: F401  (loaded once, before the processes part)

    running: dict[ForkProcess, Run] = {}
    fork, parent = multiprocessing.get_context("fork"), os.getpid()
    began, said, done, out_of_time = time.monotonic(), time.monotonic(), 0, False
    common = Path(os.path.commonpath([run.folder.parent for run in waiting]))
    common.mkdir(parents=True, exist_ok=True)
    # Two processes would remove each other's folders.
    with alone_in(common, RuntimeError(f"{common}: another process is doing runs there")):
        try:
            while waiting or running:
                out_of_time = until is not None and time.monotonic() > until
                while waiting and not out_of_time and len(running) < len(os.sched_getaffinity(0)):
                    run = waiting.pop(0)
                    process = fork.Process(target=_do, args=(run, parent), daemon=True)
                    process.start()
                    running[process] = run
                if out_of_time and not running:
                    break
                time.sleep(_POLL_SECONDS)
                for process, run in [(p, r) for p, r in running.items() if not p.is_alive()]:
                    del running[process]
                    done += 1
                    if process.exitcode != 0 or not run.finished:
                        raise RuntimeError(_failure(run, process.exitcode))
                    done_with(run)
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    left = (said - began) / max(done, 1) * len(waiting) / 60
                    print(f"{title}: {done} done, {len(waiting)} waiting, about {left:.0f} min left", flush=True)
        finally:
            for process in running:
                process.kill()
                process.join()
    return not waiting


def _failure(run: Run, code: int | None) -> str:
    log = run.folder.with_suffix(".log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"{run.folder} failed (exit code {code}):", *lines[-15:]])


def _do(run: Run, parent: int) -> None:
    """Do the run in its own process, which ends with `parent`."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(run.folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    try:
        from creditflow._utils.progress import Reporter
        from creditflow.config import load_recipe
        from creditflow.engines.local.trainer import train
        from creditflow.rewards.execution.worker import die_with

        die_with(parent)
        shutil.rmtree(run.folder, ignore_errors=True)  # an interrupted run
        if run.prepare is not None:
            run.prepare()
        train(load_recipe(run.recipe, [*run.settings, f"trainer.default_local_dir={run.folder}"]), Reporter())
        for path in run.folder.iterdir():
            if path.name not in _KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_whole(run.folder / _MADE_BY, lambda path: path.write_text(json.dumps(run.made_by)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
