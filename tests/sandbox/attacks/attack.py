"""The attack interface: a bounded program, its preparation on the host, and the host's judgement. Runs no attack."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from creditflow.sandbox.base import Limits, Result, Sandbox
from creditflow.sandbox.process import Child

ENVIRONMENT_CANARY = "CREDITFLOW_CANARY"
"""The environment variable of the harness that holds a secret during a check."""

_PRELUDE = """
import errno, json, os, resource, sys, time
TOKEN, FACTS, allowed, errors = {token!r}, json.loads({facts!r}), [], dict()
def report(**facts):
    os.write(1, ("\\n%s %s\\n" % (TOKEN, json.dumps(facts))).encode())
def attempt(action, *args):
    try:
        action(*args)
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except (ValueError, OverflowError, MemoryError) as error:
        return type(error).__name__
    return ""
def attempt_in_child(action, *args):
    ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ends[1], attempt(action, *args).encode() or b"-")
        os._exit(0)
    os.close(ends[1])
    answer = os.read(ends[0], 100).decode() or "killed"
    os.waitpid(pid, 0)
    return "" if answer == "-" else answer
def record(way, error):
    errors[way] = error
    if not error:
        allowed.append(way)
        report(allowed=allowed)
def open_and_close(path, flags):
    os.close(os.open(path, flags))
def libc():
    import ctypes
    return ctypes, ctypes.CDLL(None, use_errno=True)
def call(function, *args):
    import ctypes
    ctypes.set_errno(0)
    value = function(*args)
    if value == -1:
        raise OSError(ctypes.get_errno(), "")
    return value
os.write(1, (TOKEN + "\\n").encode())
for limit in (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_DATA,
              resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_STACK):
    if limit != resource.RLIMIT_NOFILE and not attempt(resource.setrlimit, limit, (-1, -1)):
        continue
    hard = resource.getrlimit(limit)[1]
    attempt(resource.setrlimit, limit, (hard, hard))
"""
# The prelude first raises every limit that can be raised: a box with soft limits only has no limits. The number of open
# files is raised only to the existing hard limit, because the kernel's maximum makes some interpreters slow.

_CLOSING = "\nreport(allowed=allowed, errors=errors, done=True)\n"


class CannotTry(Exception):
    """An attack cannot be tried here or now; the message gives the reason. It does not count as contained."""


@dataclass(frozen=True, slots=True)
class AttackFinding:
    """The judgement of one attack."""

    contained: bool
    seen: str
    """One line: the observed events, with their numbers."""


@dataclass
class Scene:
    """The host's preparations for one attack. All of them are removed after the attack."""

    limits: Limits
    memory_bound: tuple[int, str] | None
    """The back end's memory bound in bytes, and its mechanism; None if the back end states none."""
    environment_secret: str
    """Value of `ENVIRONMENT_CANARY` in the harness's environment."""
    stack: ExitStack
    token: str = field(default_factory=lambda: "tk" + secrets.token_hex(12))
    """Printed first by the program, and part of its command line, so that the host can find its processes."""
    secret: str = field(default_factory=lambda: "sc" + secrets.token_hex(16))
    """Content of the canary files; present in no place that the program may read."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Data for the program, passed as JSON."""
    observers: list[Callable[[], None]] = field(default_factory=list)
    """Called every 20 ms while the program runs."""
    state: dict[str, Any] = field(default_factory=dict)
    """Data that `prepare` and the observers keep for `judge`."""

    def folder(self, inside: Path | None = None) -> Path:
        """Make a folder on the host that every user may read and write: only the box protects it."""
        folder = Path(tempfile.mkdtemp(prefix=f"creditflow-canary-{self.token}-", dir=inside))
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o777)
        return folder

    def canary(self, name: str = "canary", inside: Path | None = None) -> Path:
        """Make a file with the secret on the host, in a new folder."""
        file = self.folder(inside) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.secret)
        file.chmod(0o666)
        return file

    def intact(self, canary: str) -> bool:
        """Whether a canary file still has its content."""
        return Path(canary).is_file() and Path(canary).read_text() == self.secret

    def canaries(self, name: str = "canary") -> list[Path]:
        """Make one canary in each host folder that a careless box might expose."""
        return [self.canary(name, place) for place in host_folders()]

    def victim(self) -> subprocess.Popen[bytes]:
        """Start a sleeping process of the harness with the environment secret in its environment."""
        environment = {"PATH": os.defpath, ENVIRONMENT_CANARY: self.environment_secret}
        code = "import time; time.sleep(120)"
        null, victim = subprocess.DEVNULL, Child()
        self.stack.callback(victim.end)
        words = [sys.executable, "-I", "-S", "-c", code]
        return victim.start(
            lambda: subprocess.Popen(words, env=environment, stdin=null, stdout=null, stderr=null, process_group=0)
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Call the observers every 20 ms until the block ends."""
        if not self.observers:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                for observe in self.observers:
                    observe()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@dataclass
class Outcome:
    """Results, kept files and reports of an attack's programs, complete or partial."""

    results: list[Result] = field(default_factory=list)
    kept: dict[str, bytes | str] = field(default_factory=dict)
    """Kept files by name: their bytes, or the type of the error that `read` raised."""
    seconds: float = 0.0
    """Duration of all runs, by the clock of the harness."""
    reports: dict[str, Any] = field(default_factory=dict)
    """Values that the programs sent with `report`, the latest of each name."""

    @property
    def output(self) -> bytes:
        """All output of the programs, stdout and stderr."""
        return b"".join(result.stdout + result.stderr for result in self.results)

    @property
    def stopped(self) -> str:
        """The reason why the last program was ended, in words; empty if it ended by itself."""
        if not self.results or self.reports.get("done"):
            return ""
        last = self.results[-1]
        if last.limit:
            return f"stopped by the {last.limit} limit"
        if last.signal:
            return f"ended by {signal_name(last.signal)}"
        if last.exit_code is None or last.exit_code > 128:
            return f"ended with exit code {last.exit_code}"
        return "ended by MemoryError" if b"MemoryError" in last.stderr else ""

    def number(self, name: str) -> int:
        """A number that the programs reported; 0 if they were stopped before."""
        return int(self.reports.get(name, 0))

    @property
    def errors(self) -> str:
        """The ways that the programs tried and the error of each, in words."""
        return ", ".join(f"{way} {error or 'no error'}" for way, error in self.reports.get("errors", {}).items())

    @property
    def kept_sizes(self) -> str:
        """The size of each kept file, or its error, in words."""
        sizes = {name: f"{len(text):,} bytes" if isinstance(text, bytes) else text for name, text in self.kept.items()}
        return ", ".join(f"{name} {size}" for name, size in sizes.items())

    def holds(self, secret: str) -> bool:
        """Whether the output or a kept file contains the secret."""
        return any(secret.encode() in text for text in (self.output, *self.kept.values()) if isinstance(text, bytes))

    def finding(self, contained: bool, seen: str) -> AttackFinding:
        """A finding with the reason why the last program was ended, if there is one."""
        return AttackFinding(contained, f"{seen}; {self.stopped}" if self.stopped else seen)


class Attack:
    """One attack. Subclasses are stateless; the first paragraph of the docstring describes the attack.

    The program is bounded: it does no lasting harm even without containment, on a machine with other users or work.
    """

    name: ClassVar[str] = ""
    program: ClassVar[str] = ""
    """Python 3.8 or later, standard library only; the prelude defines `FACTS`, `report`, `attempt`, `record`, `call`
    and others."""
    prelude: ClassVar[str] = ""
    """Definitions in front of each program."""
    second: ClassVar[str] = ""
    """The program of a second run; empty: there is one run."""
    keep: ClassVar[tuple[str, ...]] = ()
    host_may_refuse: ClassVar[bool] = False
    """Whether a host without a box may refuse it: to all users but root, or by a kernel setting."""
    ends_by_clock: ClassVar[bool] = False
    """Whether the wall clock may end the program: a stopped program has tried all that matters."""
    alone: ClassVar[bool] = False
    """Whether it must run alone: it would disturb the judgement of other attacks, or they its judgement."""

    @property
    def about(self) -> str:
        """The description of the attack: the first paragraph of its docstring."""
        return " ".join((self.__doc__ or "").split("\n\n")[0].split())

    def prepare(self, scene: Scene) -> None:
        """Prepare the host for the attack."""

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        """Run the programs and read their kept files. Called in a separate thread."""
        outcome = Outcome()
        for body in filter(None, (self.program, self.second)):
            run_program(scene, box, outcome, self.prelude + body, self.keep)
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        """Judge the outcome by observations on the host; use the program's report only where the host shows nothing.

        Default: by the report. Contained if no way that the program recorded was allowed.
        """
        if allowed := outcome.reports.get("allowed"):
            return AttackFinding(False, f"allowed: {', '.join(allowed)}")
        if not (outcome.errors or outcome.stopped):
            raise CannotTry("the program did not report what it tried")
        return outcome.finding(True, outcome.errors)


class SecretAttack(Attack):
    """Base class: contained if no secret of the harness has left the box."""

    target: ClassVar[str] = ""
    """The holder of the secret, in words."""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        way, ways = outcome.reports.get("way"), outcome.reports.get("ways")
        if outcome.holds(scene.secret) or outcome.holds(scene.environment_secret):
            return AttackFinding(False, f"{self.target} was read{f' by {way}' if way else ''}")
        return outcome.finding(True, f"{self.target} was not read{f' in {ways} ways' if ways else ''}")


ATTACKS: dict[str, Attack] = {}
"""Every attack by name, in the order of the report."""

A = TypeVar("A", bound=type[Attack])


def attack(kind: A) -> A:
    """Register an attack under its class's name in snake_case."""
    kind.name = vars(kind).get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()
    if kind.name in ATTACKS:
        raise ValueError(f"there is already an attack named {kind.name!r}")
    ATTACKS[kind.name] = kind()
    return kind


def whole_program(scene: Scene, body: str) -> str:
    """A program's body between the common prelude and closing."""
    return _PRELUDE.format(token=scene.token, facts=json.dumps(scene.facts)) + body + _CLOSING


def run_program(
    scene: Scene, box: Sandbox, outcome: Outcome, body: str, keep: Sequence[str] = (), *, stdin: bytes = b""
) -> Result:
    """Run a body in the box, read the kept files, and add the results to the outcome."""
    result = box.run(["python", "-c", whole_program(scene, body)], stdin=stdin, keep=keep)
    outcome.results.append(result)
    outcome.reports.pop("done", None)
    outcome.reports.update(_reports(result.stdout, scene.token))
    for name in keep:
        try:
            outcome.kept[name] = box.read(name)
        except (FileNotFoundError, ValueError) as error:
            outcome.kept[name] = type(error).__name__
    return result


def _reports(stdout: bytes, token: str) -> dict[str, Any]:
    """Parse the values that a program sent with `report`; the latest of each name counts."""
    reports: dict[str, Any] = {}
    mark = token.encode() + b" "
    for line in stdout.split(b"\n"):
        if line.startswith(mark):
            with suppress(ValueError):  # a limit may cut the last line
                reports.update(json.loads(line[len(mark) :]))
    return reports


# Observations on the host


def host_folders() -> list[Path]:
    """Host folders for canaries: the temporary folders, the home and the current folder."""
    wanted = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path.home(), Path.cwd()]
    folders = dict.fromkeys(place.resolve() for place in wanted if place.is_dir() and os.access(place, os.W_OK))
    return list(folders)


def processes_with(marker: str) -> list[int]:
    """Live processes of this host with a marker in their command line; zombies have no command line."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or permission is missing
            if marker.encode() in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
    return pids


def still_alive(token: str) -> list[int]:
    """Processes still alive after a run; those that the kernel is still ending get 0.2 s."""
    end = time.monotonic() + 0.2
    while (alive := processes_with(token)) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


def process_status(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status by name; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def remove_files(paths: Sequence[Path]) -> None:
    """Remove the files that an attack left on the host; missing ones are skipped."""
    for path in paths:
        with suppress(OSError):  # it does not exist, or permission is missing
            path.unlink()


def kill_all(pids: Sequence[int]) -> None:
    """Kill processes that an attack left on the host."""
    for pid in pids:
        with suppress(OSError):  # it has ended, or permission is missing
            os.kill(pid, signal.SIGKILL)


def signal_name(number: int) -> str:
    """The name of a signal number: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def megabytes(amount: float) -> str:
    """Format a number of bytes as MB."""
    return f"{amount / 1e6:.0f} MB"
