"""Run processes, a limited number at a time, and show their progress."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from creditflow._utils.processes import PARENT
from creditflow._utils.progress import Reporter, duration

_POLL_SECONDS = 0.3
_GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_END_POLL_SECONDS = 0.05
_TAIL_LINES = 15


@dataclass(slots=True, eq=False)
class Job:
    """One process to run."""

    name: str
    command: Sequence[str]
    log: Path
    """File for the standard output and error."""
    parts: int
    """Amount of work in training steps; 0 for an evaluation."""
    progress: Callable[[], int]
    """Returns the number of finished parts."""
    done: int = field(default=0, init=False)
    started: float = field(default=0.0, init=False)
    """Start time on the monotonic clock."""

    def advance(self, *, ended: bool) -> int:
        """Update `done` and return its increase; an ended job counts as fully done."""
        before, self.done = self.done, self.parts if ended else min(self.progress(), self.parts)
        return self.done - before


def run_jobs(jobs: Sequence[Job], at_once: int, reporter: Reporter, title: str) -> list[Job]:
    """Run all jobs in order, `at_once` at a time, and return those that ended with a nonzero exit code.

    A failed job does not stop the others. On exit, no process is left running, nor any process that a job has started,
    even after Ctrl-C, SIGTERM or a closed terminal: these raise KeyboardInterrupt between two polls.
    """
    waiting, running, failures = list(jobs), dict[Job, "subprocess.Popen[bytes]"](), list[Job]()
    with _interruptions() as interrupted, reporter.bar(title, sum(job.parts for job in jobs), "training steps") as bar:
        bar.skip(sum(job.advance(ended=False) for job in jobs))  # steps of interrupted runs took no time here
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running[job] = _start(job)
                if interrupted.wait(_POLL_SECONDS):
                    raise KeyboardInterrupt
                for job, process in list(running.items()):
                    ended = _has_ended(process)
                    if ended:
                        _kill(running.pop(job))  # also the processes that the job started
                    if ended and process.returncode != 0:
                        failures.append(job)
                        reporter.say(_failure(job, process.returncode))
                    if parts := job.advance(ended=ended):
                        bar.advance(parts)
                    if ended and process.returncode == 0:
                        reporter.say(f"{job.name}: done after {duration(time.monotonic() - job.started)}")
                bar.note(
                    ", ".join(f"{job.name} {job.done}/{job.parts}" if job.parts else job.name for job in running)
                    or "done"
                )
        finally:
            _end(list(running.values()))
    return failures


def _failure(job: Job, code: int) -> str:
    """The failure in words, with the end of the log."""
    lines = job.log.read_text(errors="replace").splitlines()
    return "\n".join([f"{job.name} failed (exit code {code}); {job.log} ends with:", *lines[-_TAIL_LINES:]])


def _start(job: Job) -> subprocess.Popen[bytes]:
    job.started = time.monotonic()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    # One thread per process: parallel runs fill the cores, and waiting threads that spin would take cores from them.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    environment[PARENT] = str(os.getpid())  # a job that outlived a killed comparison would write beside the next one
    with job.log.open("wb") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the jobs and their children
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and not all(map(_has_ended, processes)):
        time.sleep(_END_POLL_SECONDS)
    for process in processes:
        _kill(process)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the job has ended; it is not reaped, so that its group's number is not given to another process."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a job's group and reap the job."""
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a job and the processes that it has started, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP (a closed terminal) set, unless they are already ignored (`nohup`).

    An exception of a signal handler could fall between the start of a job and its entry in the list of running ones.
    """
    interrupted = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
