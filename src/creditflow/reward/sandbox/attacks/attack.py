"""What an attack is: a bounded program, what the host prepares for it, and how the host judges it. Runs none."""

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

from creditflow.reward.sandbox.base import Limits, Result, Sandbox
from creditflow.reward.sandbox.process import Child

ENVIRONMENT_CANARY = "CREDITFLOW_CANARY"
"""The variable of the harness that holds a secret while a check runs."""

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
# Every limit that may be raised is raised first: a box whose limits are soft has none. Numbers of open files are left
# at the hard limit that is found, for the kernel's own maximum makes some interpreters slow.

_CLOSING = "\ntell(done=True)\n"


class CannotTry(Exception):
    """An attack cannot be tried here or now; the message says why. It does not count as contained."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the judge found."""

    contained: bool
    seen: str
    """One line: what happened, with its numbers."""


@dataclass
class Scene:
    """What the host has made for one attack. All of it is gone when the attack is over."""

    limits: Limits
    memory_bound: tuple[int, str] | None
    """Bytes and how they are bounded, as the back end says; None where it says nothing."""
    environment_secret: str
    """What `ENVIRONMENT_CANARY` holds in the harness's environment."""
    stack: ExitStack
    token: str = field(default_factory=lambda: "tk" + secrets.token_hex(12))
    """Printed first by the program, and part of its command line: so the host finds its processes."""
    secret: str = field(default_factory=lambda: "sc" + secrets.token_hex(16))
    """Stands in canary files, and nowhere that the program may look."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the program is told, as JSON."""
    looks: list[Callable[[], None]] = field(default_factory=list)
    """Called every 20 ms while the program runs."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What `prepare` and the looks keep for the judge."""

    def folder(self, inside: Path | None = None) -> Path:
        """A folder on the host that anyone may read and write: only the box is to protect it."""
        folder = Path(tempfile.mkdtemp(prefix=f"creditflow-canary-{self.token}-", dir=inside))
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o777)
        return folder

    def canary(self, name: str = "canary", inside: Path | None = None) -> Path:
        """A file on the host, in a folder of its own, that holds the secret."""
        file = self.folder(inside) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.secret)
        file.chmod(0o666)
        return file

    def canaries(self, name: str = "canary") -> list[Path]:
        """One canary in each folder of the host where a careless box might let a program look."""
        return [self.canary(name, place) for place in host_folders()]

    def victim(self) -> subprocess.Popen[bytes]:
        """A process of the harness that waits, with the environment's secret in its environment."""
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
        """Look at the host every 20 ms until the block is left."""
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
    """What came back from the box, as far as it came."""

    results: list[Result] = field(default_factory=list)
    kept: dict[str, bytes | str] = field(default_factory=dict)
    """By name: the bytes of a kept file, or the type of the error that `read` raised."""
    seconds: float = 0.0
    """Of all runs, by the clock of the harness."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the programs told by `tell`, the latest word of each."""

    @property
    def output(self) -> bytes:
        """Everything that the programs printed."""
        return b"".join(result.stdout + result.stderr for result in self.results)

    @property
    def stopped(self) -> str:
        """What ended the last program, in words; empty where it ended by itself."""
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
        """A number that the programs told; 0 where they were stopped before."""
        return int(self.told.get(name, 0))

    def holds(self, secret: str) -> bool:
        """Whether a secret came out of the box."""
        wanted = secret.encode()
        files = (content for content in self.kept.values() if isinstance(content, bytes))
        return wanted in self.output or any(wanted in content for content in files)


class Attack:
    """One thing that a program may try. Subclasses are stateless; the first sentence of the docstring says what."""

    name: ClassVar[str] = ""
    program: ClassVar[str] = ""
    """Python, 3.8 or later, standard library only. Knows `FACTS`, `tell`, `attempt`, `libc`, `call`; see the prelude.

    It is bounded, so that it does no harm even where nothing contains it.
    """
    keep: ClassVar[tuple[str, ...]] = ()
    harmless: ClassVar[bool] = True
    """Whether it may run without any box on a machine that is used for other things."""
    why: ClassVar[str] = ""
    """Why it is harmless, or not, where that is not plain from its bounds."""
    host_may_refuse: ClassVar[bool] = False
    """Whether a host may refuse it without any box: to all but root, or by a switch of its kernel."""
    alone: ClassVar[bool] = False
    """Whether it disturbs the judging of others, or they its own."""

    @property
    def about(self) -> str:
        """What it tries, in a sentence."""
        return " ".join((self.__doc__ or "").split("\n\n")[0].split())

    def prepare(self, scene: Scene) -> None:
        """Make on the host what the attack needs."""

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        """Run the program and read what it left. Called in a thread of its own."""
        outcome = Outcome()
        run_program(scene, box, outcome, self.program, self.keep)
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> Finding:
        """Decide by what the host shows, and by the program's word only where nothing else can know."""
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
    """A body with what comes before and after every program."""
    return _PRELUDE.format(token=scene.token, facts=json.dumps(scene.facts)) + body + _CLOSING


def run_program(
    scene: Scene, box: Sandbox, outcome: Outcome, body: str, keep: Sequence[str] = (), *, stdin: bytes = b""
) -> Result:
    """Run a body in the box, read the kept files, and add all of it to the outcome."""
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
    """What a program told, the latest word of each name."""
    told: dict[str, Any] = {}
    mark = token.encode() + b" "
    for line in stdout.split(b"\n"):
        if line.startswith(mark):
            try:
                told.update(json.loads(line[len(mark) :]))
            except ValueError:  # the last line may be cut by a limit
                continue
    return told


# What the host shows


def host_folders() -> list[Path]:
    """The folders of the host where canaries are laid: temporary ones, the home and the current folder."""
    wanted = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path.home(), Path.cwd()]
    folders = dict.fromkeys(place.resolve() for place in wanted if place.is_dir() and os.access(place, os.W_OK))
    return list(folders)


def processes_with(marker: str) -> list[int]:
    """Living processes of this host with a marker in their command line; zombies have none."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                line = Path(entry.path, "cmdline").read_bytes()
            except OSError:  # it ended meanwhile, or is not ours to look at
                continue
            if marker.encode() in line:
                found.append(int(entry.name))
    return found


def still_alive(token: str) -> list[int]:
    """Who is alive when a run has returned: those that the kernel is still ending get 0.2 s."""
    end = time.monotonic() + 0.2
    while (alive := processes_with(token)) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


def process_status(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status by name; empty where the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def remove_files(paths: Sequence[Path]) -> None:
    """Remove what an attack left on the host, as far as it is there."""
    for path in paths:
        try:
            path.unlink()
        except OSError:  # it is not there, or lies where this user may do nothing
            continue


def kill_all(pids: Sequence[int]) -> None:
    """End processes that an attack left on the host."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:  # it ended meanwhile, or is not ours to end
            continue


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def megabytes(amount: float) -> str:
    """Bytes as MB."""
    return f"{amount / 1e6:.0f} MB"


def with_end(seen: str, outcome: Outcome) -> str:
    """What was seen, and what ended the program where something did."""
    return f"{seen}; {outcome.stopped}" if outcome.stopped else seen


def no_secret(scene: Scene, outcome: Outcome, what: str, secret: str | None = None) -> Finding:
    """Contained where the secret did not come out; `what` the program told of its ways is added."""
    if outcome.holds(secret or scene.secret):
        return Finding(False, f"{what} was read{_by(outcome)}")
    return Finding(True, with_end(f"{what} was not read{_ways(outcome)}", outcome))


def _by(outcome: Outcome) -> str:
    return f" by {outcome.told['way']}" if outcome.told.get("way") else ""


def _ways(outcome: Outcome) -> str:
    return f" in {outcome.told['ways']} ways" if outcome.told.get("ways") else ""


def none_done(outcome: Outcome) -> Finding:
    """Contained where the program could do nothing of what it tried: `done_`, with `errors` by what was tried."""
    done, errors = outcome.told.get("done_"), outcome.told.get("errors", {})
    if done:
        return Finding(False, f"allowed: {', '.join(done)}")
    if done is None and not outcome.stopped:
        raise CannotTry("the program did not tell what it tried")
    return Finding(True, with_end(", ".join(f"{what} {error}" for what, error in errors.items()), outcome))
