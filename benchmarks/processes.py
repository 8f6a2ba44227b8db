"""The processes that a benchmark starts: their time limit, those that outlive it, their memory, and the live view.

Some of Ray's processes overwrite their environment, and its workers begin new process groups, so neither a
variable nor a process group finds all of them. The processes of a run are the descendants of this process, collected
while the run lives.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import ROOT

_COLLECT_S = 0.2
"""The interval between two collections. A process that lives for a shorter time may be missed."""
_POLL_S = 0.5


@dataclass(frozen=True)
class Process:
    """One process. The start time tells it from a later one with the same id."""

    pid: int
    started: int
    """Clock ticks since the start of the machine."""

    @property
    def alive(self) -> bool:
        """True while the process exists and is not a zombie."""
        found = _stat(self.pid)
        return found is not None and found.state != "Z" and found.started == self.started


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _Stat(fields[0], int(fields[1]), int(fields[19]))


def descendants(pid: int) -> set[Process]:
    """The children of a process, their children, and so on."""
    stats = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    children: dict[int, list[int]] = {}
    for child, stat in stats.items():
        if stat is not None:
            children.setdefault(stat.parent, []).append(child)
    found, waiting = set[Process](), [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            stat = stats[child]
            assert stat is not None
            found.add(Process(child, stat.started))
            waiting.append(child)
    return found


@dataclass
class Started:
    """All processes that descended from this one while they were collected."""

    found: set[Process] = field(default_factory=set)

    def left(self, seconds: float) -> int:
        """Wait at most `seconds` for the end of all processes; returns the number of those that are still alive."""
        limit = time.monotonic() + seconds
        while (alive := sum(process.alive for process in tuple(self.found))) and time.monotonic() < limit:
            time.sleep(_POLL_S)
        return alive

    def kill(self) -> None:
        """Kill every process that is still alive."""
        for process in tuple(self.found):
            if process.alive:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


@contextmanager
def collecting() -> Iterator[Started]:
    """Collect the descendants of this process that begin inside the context, and kill them at its end."""
    before, started, over = descendants(os.getpid()), Started(), threading.Event()

    def collect() -> None:
        last = False
        while not last:
            last = over.wait(_COLLECT_S)
            started.found = started.found | descendants(os.getpid()) - before

    thread = threading.Thread(target=collect, name="benchmark-processes", daemon=True)
    thread.start()
    try:
        yield started
    finally:
        over.set()
        thread.join()
        started.kill()


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command` in the root of the repository, with its output in the file `log`."""
    variables = {**os.environ, **environment}
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code of `process`; None, after it is killed, if it takes more than `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


class Progress:
    """Prints one line a run, with the expected remaining time."""

    def __init__(self, runs: int) -> None:
        self.left, self.done, self.seconds = runs, 0, 0.0
        print(f"{runs} runs to do", flush=True)

    def report(self, name: str, result: str, seconds: float) -> None:
        """Print the line of a run that took `seconds`."""
        self.left, self.done, self.seconds = self.left - 1, self.done + 1, self.seconds + seconds
        rest = self.left * self.seconds / self.done / 60
        print(f"{name}: {result}, {seconds:.0f} s; {self.left} runs left, about {rest:.0f} min", flush=True)


# ---- the live view, and the memory of a process ----------------------------------------------------------------------


@contextmanager
def live_view(run: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process of `creditflow view RUN`, once it answers; ended with the context."""
    command = [sys.executable, "-m", "creditflow", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stderr is not None
        address = re.search(r"http://\S+/", server.stderr.readline())
        assert address is not None, "the view did not start"
        try:
            yield address[0], server
        finally:
            server.terminate()


def content_of(url: str) -> bytes:
    """The content at an address of the view."""
    with urllib.request.urlopen(url) as answer:
        content: bytes = answer.read()
        return content


def memory_of(what: str, pid: int | str = "self") -> int:
    """The line `what` of the process's status (`VmRSS`: resident memory, `VmHWM`: its peak), in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])
