"""Many short training runs, each in a process of its own, as many at a time as there are cores; what is done is kept.

The processes are forked from one that has loaded everything, which saves a short run a sixth of its time. Knows how
runs are made and found again; not what is compared.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from creditflow.report.comparison import RunResult

_KEPT = ("evaluation.json", "metrics.jsonl", "events.jsonl", "run.json")
"""What is left of a finished run; checkpoints and step files of a thousand runs would fill the disk."""
_POLL_SECONDS = 0.2
_SAY_SECONDS = 60.0


@dataclass(frozen=True)
class Run:
    """One run of a recipe."""

    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    seed: int
    before: Callable[[], None] | None = None
    """Called in the run's own process before it begins."""

    @property
    def settings(self) -> list[str]:
        """All overrides. Seeds make plays, data order and dropout; the evaluation's plays are the same in every run."""
        own = [f"data.seed={self.seed}", f"trainer.default_local_dir={self.folder}", "trainer.val_before_train=false"]
        return [*self.overrides, *own]

    @property
    def finished(self) -> bool:
        """Whether it is there. Raises ValueError where another run has its folder."""
        asked = self.folder / "asked.json"
        if not (self.folder / "evaluation.json").exists() or not asked.exists():
            return False
        if (was := json.loads(asked.read_text())) != self.settings:
            raise ValueError(f"{self.folder} holds a run of other settings: {sorted(set(was) ^ set(self.settings))}")
        return True

    def result(self) -> RunResult:
        """What came of it."""
        return RunResult.read(self.folder)


def finish(runs: Sequence[Run], title: str, until: float | None = None) -> bool:
    """Do those of `runs` that are not done, in order; False if it was `until` before the last was begun.

    `until`: by `time.monotonic()`. Raises RuntimeError, with the end of its log, where a run failed.
    """
    waiting = [run for run in runs if not run.finished]
    print(f"{title}: {len(runs) - len(waiting)} of {len(runs)} runs are there", flush=True)
    if not waiting:
        return True
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    import creditflow.engines.local.trainer  # noqa: F401  (loaded once, before the processes part)

    running: dict[ForkProcess, Run] = {}
    fork = multiprocessing.get_context("fork")
    began, said, done, out_of_time = time.monotonic(), time.monotonic(), 0, False
    try:
        while waiting or running:
            out_of_time = until is not None and time.monotonic() > until
            while waiting and not out_of_time and len(running) < len(os.sched_getaffinity(0)):
                run = waiting.pop(0)
                process = fork.Process(target=_do, args=(run,), daemon=True)
                process.start()
                running[process] = run
            if out_of_time and not running:
                break
            time.sleep(_POLL_SECONDS)
            for process, run in [(p, r) for p, r in running.items() if not p.is_alive()]:
                del running[process]
                done += 1
                if process.exitcode != 0:
                    log = run.folder.with_suffix(".log").read_text(errors="replace").splitlines()
                    raise RuntimeError("\n".join([f"{run.folder} failed:", *log[-15:]]))
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                left = (said - began) / max(done, 1) * len(waiting) / 60
                print(f"{title}: {done} done, {len(waiting)} waiting, about {left:.0f} min left", flush=True)
    finally:
        for process in running:
            process.kill()
            process.join()
    return not waiting


def _do(run: Run) -> None:
    """In the run's process."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(run.folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    try:
        from creditflow.config import load_recipe
        from creditflow.engines.local.trainer import train
        from creditflow.progress import Reporter

        shutil.rmtree(run.folder, ignore_errors=True)  # one that was broken off
        if run.before is not None:
            run.before()
        train(load_recipe(run.recipe, run.settings), Reporter())
        for path in run.folder.iterdir():
            if path.name not in _KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (run.folder / "asked.json").write_text(json.dumps(run.settings))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
