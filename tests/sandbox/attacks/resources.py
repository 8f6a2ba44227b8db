"""Attacks on the limits: memory, processes, files, output, time. Each program is itself bounded."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import tempfile
from pathlib import Path
from typing import ClassVar

from creditflow.sandbox.base import Limits
from creditflow.sandbox.process import call
from tests.sandbox.attacks.attack import (
    Attack,
    AttackFinding,
    CannotTry,
    Outcome,
    Scene,
    attack,
    megabytes,
    remove_files,
)

MB = 1_000_000
MIB = 1 << 20
LARGEST = Limits(
    wall_s=10.0,
    cpu_s=10.0,
    memory_mb=512,
    processes=64,
    open_files=1024,
    file_mb=16,
    disk_mb=64,
    files=4096,
    output_bytes=1_000_000,
)
"""Largest limits for a check. The bounds of the attacks are above these; larger limits could not be tested."""

CHECK_LIMITS = Limits(
    wall_s=4.0,
    cpu_s=3.0,
    memory_mb=256,
    processes=32,
    open_files=128,
    file_mb=8,
    disk_mb=32,
    files=500,
    output_bytes=1_000_000,
)
"""Small limits: a complete check takes seconds."""

SLACK_S = 3.0
"""Time allowed to a run on top of `wall_s`, in seconds: start and end of the box."""


def _expect_not_cut_short(outcome: Outcome) -> None:
    """Raise CannotTry if the wall clock ended the program below a limit: it did not test that limit."""
    if outcome.results[-1].limit == "wall" and not outcome.reports.get("done"):
        raise CannotTry("the clock ended it before it reached any limit; try with a larger wall_s")


class _Amount(Attack):
    """Base class: contained if the program's `amount` stays within a limit. It may also report a `detail`."""

    alone = True
    limit: ClassVar[str]
    """A field of `Limits`; one that ends with `_mb` bounds a number of bytes."""
    unit: ClassVar[str]
    """The unit of the amount, in words."""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        amount, most = outcome.number("amount"), getattr(scene.limits, self.limit)
        seen = f"{amount} {self.unit}, {most} allowed"
        if self.limit.endswith("_mb"):
            most *= MIB
            seen = f"{megabytes(amount)} {self.unit}, {megabytes(most)} allowed"
        if amount <= most:
            _expect_not_cut_short(outcome)
        detail = outcome.reports.get("detail")
        return outcome.finding(amount <= most, f"{seen} ({detail})" if detail else seen)


class _Memory(_Amount):
    limit, unit = "memory_mb", "held"


@attack
class ForkBomb(_Amount):
    """Start child processes until stopped (at most 150, which end after 3 s)."""

    limit, unit = "processes", "processes alive at a time"
    program = """
end, count = time.time() + 3, 0
for _ in range(150):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(max(0, end - time.time()))
        os._exit(0)
    count += 1
    report(amount=count + 1)
"""


@attack
class ThreadBomb(_Amount):
    """Start threads until stopped (at most 150, which end after 2 s)."""

    limit, unit = "processes", "threads alive at a time"
    program = """
import threading
end, count = time.time() + 2, 1
threading.stack_size(65536)
for _ in range(150):
    try:
        threading.Thread(target=lambda: time.sleep(max(0, end - time.time()))).start()
    except (RuntimeError, MemoryError):
        break
    count += 1
    report(amount=count)
"""


@attack
class MemoryBomb(_Memory):
    """Fill memory in one process, at most 700 MB."""

    program = """
held, total = [], 0
while total < 700_000_000:
    try:
        held.append(b"x" * 10_000_000)
    except MemoryError:
        break
    total += 10_000_000
    report(amount=total)
"""


@attack
class MemoryOverProcesses(_Memory):
    """Fill 110 MB in each of six processes, so that no single process is large.

    If the back end states a bound (`memory_bound() -> (bytes, how)`), the bound counts too: more than six processes may
    run, so a bound per process is sufficient only if its product with their number is within the limit.
    """

    program = """
def child(orders, answers):
    held = []
    while os.read(orders, 1):
        try:
            held.append(b"x" * 10_000_000)
        except MemoryError:
            os.write(answers, b"n")
            continue
        os.write(answers, b"y")
    os._exit(0)
workers = {}
for _ in range(6):
    orders, answers = os.pipe(), os.pipe()
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        os.close(orders[1]), os.close(answers[0])
        for theirs, _ in workers.values():
            os.close(theirs)
        child(orders[0], answers[1])
    os.close(orders[0]), os.close(answers[1])
    workers[pid] = (orders[1], answers[0])
held_by = dict.fromkeys(workers, 0)
def bury():
    for pid in list(held_by):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del held_by[pid]
def fill():
    best = 0
    for _ in range(11):
        for pid in list(held_by):
            if pid not in held_by:
                continue
            try:
                os.write(workers[pid][0], b"g")
                answer = os.read(workers[pid][1], 1)
            except OSError:
                answer = b""
            if answer == b"y":
                held_by[pid] += 10_000_000
            bury()
            if sum(held_by.values()) > FACTS["most"]:
                time.sleep(0.2)  # who was killed for memory may still be dying
                bury()
            if sum(held_by.values()) > best:
                best = sum(held_by.values())
                report(amount=best)
            if best > FACTS["most"]:
                return
fill()
for pid in held_by:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["most"] = scene.limits.memory_mb * MIB

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        finding = super().judge(scene, outcome)
        if scene.memory_bound is None:
            return finding
        bound, how = scene.memory_bound
        contained = finding.contained and bound <= scene.limits.memory_mb * MIB
        return AttackFinding(contained, f"{finding.seen}; bound {megabytes(bound)}, {how}")


@attack
class Memfd(_Memory):
    """Fill anonymous memory files (memfd_create), at most 600 MB."""

    program = """
total, block = 0, b"x" * 4_000_000
def fill():
    global total
    total += os.write(os.memfd_create("canary"), block)
while total < 600_000_000:
    error = attempt(fill) if hasattr(os, "memfd_create") else "no memfd_create"
    if error:
        report(detail=error)
        break
    report(amount=total)
"""


@attack
class SysvSharedMemory(_Memory):
    """Fill System V shared memory without staying attached to it, at most 600 MB.

    A segment visible on the host is a breach at any size: it is shared between boxes and outlives the program.
    """

    program = """
ctypes, c = libc()
c.shmat.restype = ctypes.c_void_p
c.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
c.shmdt.argtypes = [ctypes.c_void_p]
segments, total, size = [], 0, 6_000_000
while total < 600_000_000:
    try:
        segments.append(call(c.shmget, FACTS["key"] + len(segments), ctypes.c_size_t(size), 0o1600))
    except OSError as error:
        report(detail=errno.errorcode.get(error.errno))
        break
    at = c.shmat(segments[-1], None, 0)
    if at is None or at == ctypes.c_void_p(-1).value:
        break
    ctypes.memset(at, 1, size)
    c.shmdt(at)
    total += size
    report(amount=total)
time.sleep(0.1)
for segment in segments:
    c.shmctl(segment, 0, None)
"""

    def prepare(self, scene: Scene) -> None:
        key = scene.facts["key"] = 0x40000000 + secrets.randbelow(0x3FF00000)
        segments: set[int] = scene.state.setdefault("segments", set())
        scene.observers.append(lambda: segments.update(_segments(key)))
        scene.stack.callback(_remove_segments, key)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        finding = super().judge(scene, outcome)
        seen = len(scene.state["segments"])
        return AttackFinding(False, f"the host saw {seen} of its segments; {finding.seen}") if seen else finding


def _segments(key: int) -> set[int]:
    try:
        lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    except OSError:
        return set()
    rows = [line.split() for line in lines]
    return {int(row[1]) for row in rows if key <= int(row[0]) < key + 1000}


def _remove_segments(key: int) -> None:
    for segment in _segments(key):
        ctypes.CDLL(None).shmctl(segment, 0, None)


@attack
class HugeReturn(Attack):
    """Leave a kept file of 5 MB and a sparse one for the harness to read."""

    ends_by_clock = True
    keep = ("huge", "sparse")
    program = """
def fill():
    with open("huge", "wb") as file:
        for _ in range(50):
            file.write(b"x" * 100_000)
def stretch():
    with open("sparse", "wb") as file:
        for size in (100_000_000, 5_000_000):
            if not attempt(file.truncate, size):
                break
attempt(fill)
attempt(stretch)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        most = scene.limits.output_bytes
        contained = all(len(text) <= most for text in outcome.kept.values() if isinstance(text, bytes))
        return outcome.finding(contained, f"read gave {outcome.kept_sizes}; {most:,} bytes allowed")


class _Endless(Attack):
    """Base class: contained if the run ends in time, and not by the end of its program."""

    ends_by_clock = True

    def prepare(self, scene: Scene) -> None:
        scene.facts["seconds"] = scene.limits.wall_s + SLACK_S + 1

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        contained = outcome.seconds <= scene.limits.wall_s + SLACK_S and not outcome.reports.get("done")
        return outcome.finding(contained, f"ran for {outcome.seconds:.1f} s, {scene.limits.wall_s:g} allowed")


@attack
class DeafSleeper(_Endless):
    """Ignore every signal that can be ignored, close the output and sleep, at most a few seconds past the limit."""

    program = """
import signal
for number in range(1, 65):
    attempt(signal.signal, number, signal.SIG_IGN)
out = os.dup(1)
os.close(1), os.close(2)
time.sleep(FACTS["seconds"])
os.dup2(out, 1)
"""


class _LeftBehind(_Endless):
    """Base class: the run must return at its program's end. The check finds the children that are still alive."""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not (outcome.reports.get("left") or outcome.reports.get("refused")):
            raise CannotTry("the program did not come to leave a child")
        contained = outcome.seconds <= scene.limits.wall_s + SLACK_S
        return outcome.finding(contained, f"the run returned after {outcome.seconds:.1f} s")


_DAEMON = """
ready = os.pipe()
try:
    pid = os.fork()
except OSError:
    pid = -1
    report(refused=True)
if pid == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    {closing}
    os.write(ready[1], b"r")
    time.sleep(FACTS["seconds"])
    os._exit(0)
if pid > 0:
    os.waitpid(pid, 0)
    os.read(ready[0], 1)
    report(left=True)
"""


@attack
class LeftBehind(_LeftBehind):
    """Leave a sleeping child behind (double fork, setsid) with stdin, stdout and stderr closed."""

    program = _DAEMON.replace("{closing}", "[os.close(fd) for fd in (0, 1, 2)]")


@attack
class LeftBehindWithStdout(_LeftBehind):
    """Leave a sleeping child behind (double fork, setsid) that keeps stdout open, so that its reader waits."""

    program = _DAEMON.replace("{closing}", "pass")


@attack
class FillDisk(_Amount):
    """Fill every writable folder, at most 200 MB in total. The program removes the files, and the harness again."""

    limit, unit = "disk_mb", "written"
    program = """
def folders():
    tops = ["."] + sorted("/" + name for name in os.listdir("/"))
    for top in tops:
        yield top
        if top in ("/proc", "/sys"):
            continue
        try:
            yield from sorted(entry.path for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False))
        except OSError:
            pass
block, made, total, places, most = b"x" * 1_000_000, [], 0, {}, 200_000_000
for folder in folders():
    number = 0
    while total < most:
        name = os.path.join(folder, "creditflow-%s-%d" % (TOKEN, number))
        try:
            file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except OSError:
            break
        made.append(name)
        size = 0
        try:
            while size < FACTS["file"] and total < most:
                written = os.write(file, block)
                size, total = size + written, total + written
                if written < len(block):
                    break
        except OSError:
            pass
        finally:
            os.close(file)
        if not size:
            break
        number += 1
        places[folder] = places.get(folder, 0) + size // 1_000_000
        report(amount=total, detail=", ".join("%s %d MB" % place for place in places.items() if place[1]))
for name in made:
    attempt(os.unlink, name)
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["file"] = scene.limits.file_mb * MB - MB
        scene.stack.callback(_remove_from_folders, scene.token)


def _remove_from_folders(token: str) -> None:
    tops = [Path("/"), *Path("/").iterdir()]
    for top in tops:
        if top.name in ("proc", "sys") or not top.is_dir() or top.is_symlink():
            continue
        try:
            inner = [entry for entry in top.iterdir() if entry.is_dir() and not entry.is_symlink()]
        except OSError:
            continue
        for folder in (top, *inner):
            remove_files(list(folder.glob(f"creditflow-{token}-*")))


@attack
class FillDev(FillDisk):
    """Fill /dev and /dev/shm, at most 200 MB in total: file systems in memory that are easily left without a size."""

    program = FillDisk.program.replace('["."] + sorted("/" + name for name in os.listdir("/"))', '["/dev"]')


@attack
class ManyFiles(Attack):
    """Make empty files, at most 50,000.

    Contained if no more than `files` could be made. More files pass only if they cost the host no lasting or shared
    resource: they take no inodes of a disk (observed on the host during the run), they disappear with the box, and
    their memory is within a bound for all memory (a cgroup's, stated by `memory_bound`).
    """

    alone = True
    program = """
count, end = 0, time.monotonic() + FACTS["seconds"]
os.mkdir(TOKEN)
while count < 50_000 and time.monotonic() < end:
    if attempt(open_and_close, "%s/%d" % (TOKEN, count), os.O_CREAT | os.O_WRONLY):
        break
    count += 1
    if count % 500 == 0:
        report(files=count)
report(files=count, out_of_time=count < 50_000 and time.monotonic() >= end)
time.sleep(0.1)
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["seconds"] = max(1.0, scene.limits.wall_s - 1.5)
        before = _inodes_used()
        scene.state["taken"] = 0

        def observe() -> None:
            taken = [used - before[disk] for disk, used in _inodes_used().items() if disk in before]
            scene.state["taken"] = max(scene.state["taken"], *taken, 0)

        scene.observers.append(observe)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        count, most, taken = outcome.number("files"), scene.limits.files, scene.state["taken"]
        seen, bound = f"{count:,} files made, {most:,} allowed", scene.memory_bound
        if count <= most:
            _expect_not_cut_short(outcome)
            if outcome.reports.get("out_of_time"):
                raise CannotTry(f"only {count:,} files were made in the time that it had")
            return outcome.finding(True, seen)
        if taken > count // 2:
            return outcome.finding(False, f"{seen}; on a disk of the host")
        if bound is None or bound[0] > scene.limits.memory_mb * MIB:
            return outcome.finding(False, f"{seen}; in memory that nothing is known to bound")
        return outcome.finding(True, f"{seen}; none on a disk of the host, in memory bounded by {bound[1]}")


def _inodes_used() -> dict[int, int]:
    """Inodes in use by device, for the disks that may hold a back end's folders."""
    used = {}
    for place in {Path(tempfile.gettempdir()), Path("/"), Path("/var/tmp"), Path.home(), Path.cwd()}:
        if place.is_dir():
            figures = os.statvfs(place)
            used[place.stat().st_dev] = figures.f_files - figures.f_ffree
    return used


@attack
class DeepFolders(Attack):
    """Nest folders 1,200 deep, so that the clean-up may exceed its own limits."""

    program = """
os.mkdir(TOKEN)
os.chdir(TOKEN)
depth = 0
for _ in range(1_200):
    if attempt(os.mkdir, "dd") or attempt(os.chdir, "dd"):
        break
    depth += 1
report(depth=depth)
"""
    second = "report(again=True)"

    def prepare(self, scene: Scene) -> None:
        scene.stack.callback(remove_marked_folders, scene.token)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if left := marked_folders(scene.token):
            return AttackFinding(False, f"left on the host: {left[0]}")
        seen = f"{outcome.number('depth'):,} deep; nothing left in the host's temporary folders, the next run works"
        return AttackFinding(bool(outcome.reports.get("again")), seen)


def _tops() -> set[Path]:
    return {Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path("/run")}


def marked_folders(token: str) -> list[Path]:
    """Folders named by an attack in the host's temporary folders, at most three levels deep."""
    folders = []
    for top in _tops():
        for depth in ("", "*/", "*/*/"):
            try:
                folders += [path for path in top.glob(f"{depth}{token}") if path.is_dir()]
            except OSError as error:  # a folder of another user, or one that has disappeared
                if error.errno not in (errno.EACCES, errno.ENOENT):
                    raise
    return folders


def remove_marked_folders(token: str) -> None:
    """Remove marked folders, even those too deep for shutil or made unreadable by a program."""
    for folder in marked_folders(token):
        for line in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            call([*line, "--", str(folder)])
        for parent in folder.parents:
            if parent in _tops() or any(parent.iterdir()):
                break
            parent.rmdir()
