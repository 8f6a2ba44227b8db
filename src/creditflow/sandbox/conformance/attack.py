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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from creditflow.sandbox.base import Limits, Result, Sandbox
from creditflow.sandbox.process import Child

ENVIRONMENT_CANARY = "CREDITFLOW_CANARY"
"""The environment variable of the harness that holds a secret during a check."""

_PRELUDE = """
import errno, json, os, resource, sys, time
TOKEN, FACTS = {token!r}, json.loads({facts!r})
def tell(**facts):
    os.write(1, ("\\n%s %s\\n" % (TOKEN, json.dumps(facts))).encode())
def attempt(action, *args):
    try:
        action(*args)
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except (ValueError, OverflowError, MemoryError) as error:
        return type(error).__name__
    return ""
def libc():
    import ctypes
    return ctypes, ctypes.CDLL(None, use_errno=True)
def call(function, *args):
    import ctypes
    ctypes.set_errno(0)
    value = function(*args)
    return (value, errno.errorcode.get(ctypes.get_errno(), "?") if value == -1 else "")
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

_CLOSING = "\ntell(done=True)\n"


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
    looks: list[Callable[[], None]] = field(default_factory=list)
    """Observers, called every 20 ms while the program runs."""
    notes: dict[str, Any] = field(default_factory=dict)
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
        if not self.looks:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                for look in self.looks:
                    look()

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
    told: dict[str, Any] = field(default_factory=dict)
    """Values that the programs reported with `tell`, the latest of each name."""

    @property
    def output(self) -> bytes:
        """All output of the programs, stdout and stderr."""
        return b"".join(result.stdout + result.stderr for result in self.results)

    @property
    def stopped(self) -> str:
        """The reason why the last program was ended, in words; empty if it ended by itself."""
        if not self.results or self.told.get("done"):
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
        return int(self.told.get(name, 0))

    def holds(self, secret: str) -> bool:
        """Whether the output or a kept file contains the secret."""
        wanted = secret.encode()
        files = (content for content in self.kept.values() if isinstance(content, bytes))
        return wanted in self.output or any(wanted in content for content in files)


class Attack:
    """One attack. Subclasses are stateless; the first paragraph of the docstring describes the attack."""

    name: ClassVar[str] = ""
    program: ClassVar[str] = ""
    """Python 3.8 or later, standard library only. `FACTS`, `tell`, `attempt`, `libc` and `call` are defined; see the
    prelude.

    The program is bounded: it does no harm even without containment.
    """
    keep: ClassVar[tuple[str, ...]] = ()
    harmless: ClassVar[bool] = True
    """Whether it may run without a box on a machine with other users or work."""
    why: ClassVar[str] = ""
    """The reason why it is harmless, or not, if its bounds do not show it."""
    host_may_refuse: ClassVar[bool] = False
    """Whether a host without a box may refuse it: to all users but root, or by a kernel setting."""
    alone: ClassVar[bool] = False
    """Whether it must run alone: it would disturb the judgement of other attacks, or they its judgement."""

    @property
    def about(self) -> str:
        """The description of the attack: the first paragraph of its docstring."""
        return " ".join((self.__doc__ or "").split("\n\n")[0].split())

    def prepare(self, scene: Scene) -> None:
        """Prepare the host for the attack."""

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        """Run the program and read its kept files. Called in a separate thread."""
        outcome = Outcome()
        run_program(scene, box, outcome, self.program, self.keep)
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        """Judge the outcome by observations on the host; use the program's report only where the host shows nothing."""
        raise NotImplementedError


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
    outcome.told.pop("done", None)
    outcome.told.update(told_in(result.stdout, scene.token))
    for name in keep:
        try:
            outcome.kept[name] = box.read(name)
        except (FileNotFoundError, ValueError) as error:
            outcome.kept[name] = type(error).__name__
    return result


def told_in(stdout: bytes, token: str) -> dict[str, Any]:
    """Parse the values that a program reported with `tell`; the latest of each name counts."""
    told: dict[str, Any] = {}
    mark = token.encode() + b" "
    for line in stdout.split(b"\n"):
        if line.startswith(mark):
            try:
                told.update(json.loads(line[len(mark) :]))
            except ValueError:  # a limit may cut the last line
                continue
    return told


# Observations on the host


def host_folders() -> list[Path]:
    """Host folders for canaries: the temporary folders, the home and the current folder."""
    wanted = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path.home(), Path.cwd()]
    folders = dict.fromkeys(place.resolve() for place in wanted if place.is_dir() and os.access(place, os.W_OK))
    return list(folders)


def processes_with(marker: str) -> list[int]:
    """Live processes of this host with a marker in their command line; zombies have no command line."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                line = Path(entry.path, "cmdline").read_bytes()
            except OSError:  # it has ended, or permission is missing
                continue
            if marker.encode() in line:
                found.append(int(entry.name))
    return found


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
        try:
            path.unlink()
        except OSError:  # it does not exist, or permission is missing
            continue


def kill_all(pids: Sequence[int]) -> None:
    """Kill processes that an attack left on the host."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended, or permission is missing
            continue


def signal_name(number: int) -> str:
    """The name of a signal number: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def megabytes(amount: float) -> str:
    """Format a number of bytes as MB."""
    return f"{amount / 1e6:.0f} MB"


def with_end(seen: str, outcome: Outcome) -> str:
    """Append the reason why the program was ended, if there is one, to an observation."""
    return f"{seen}; {outcome.stopped}" if outcome.stopped else seen


def no_secret(scene: Scene, outcome: Outcome, what: str, secret: str | None = None) -> AttackFinding:
    """Judge by the secret: contained if it did not leave the box. The finding names it (`what`) and the ways tried."""
    if outcome.holds(secret or scene.secret):
        return AttackFinding(False, f"{what} was read{_by(outcome)}")
    return AttackFinding(True, with_end(f"{what} was not read{_ways(outcome)}", outcome))


def _by(outcome: Outcome) -> str:
    return f" by {outcome.told['way']}" if outcome.told.get("way") else ""


def _ways(outcome: Outcome) -> str:
    return f" in {outcome.told['ways']} ways" if outcome.told.get("ways") else ""


def none_done(outcome: Outcome) -> AttackFinding:
    """Judge by the program's report: contained if `done_`, its successful attempts, is empty; `errors` has the rest."""
    done, errors = outcome.told.get("done_"), outcome.told.get("errors", {})
    if done:
        return AttackFinding(False, f"allowed: {', '.join(done)}")
    if done is None and not outcome.stopped:
        raise CannotTry("the program did not tell what it tried")
    return AttackFinding(True, with_end(", ".join(f"{what} {error}" for what, error in errors.items()), outcome))
