"""Attacks on the limits: memory, processes, files, output, time. Each program is itself bounded."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import tempfile
from pathlib import Path

from creditflow.sandbox.base import Limits, Sandbox
from creditflow.sandbox.conformance.attack import (
    Attack,
    AttackFinding,
    CannotTry,
    Outcome,
    Scene,
    attack,
    kill_all,
    megabytes,
    remove_files,
    run_program,
    still_alive,
    with_end,
)
from creditflow.sandbox.process import call

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
    if outcome.results[-1].limit == "wall" and not outcome.told.get("done"):
        raise CannotTry("the clock ended it before it reached any limit; try with a larger wall_s")


def _amount(outcome: Outcome, name: str, most: float, unit: str) -> AttackFinding:
    reached = outcome.number(name)
    if reached <= most:
        _expect_not_cut_short(outcome)
    return AttackFinding(reached <= most, with_end(f"{reached} {unit}, {most:.0f} allowed", outcome))


def _memory(scene: Scene, outcome: Outcome) -> AttackFinding:
    reached, most = outcome.number("bytes"), scene.limits.memory_mb * MIB
    if reached <= most:
        _expect_not_cut_short(outcome)
    error = f", then {outcome.told['error']}" if outcome.told.get("error") else ""
    return AttackFinding(
        reached <= most, with_end(f"{megabytes(reached)} held{error}, {megabytes(most)} allowed", outcome)
    )


class _Memory(Attack):
    alone = True

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return _memory(scene, outcome)


@attack
class ForkBomb(Attack):
    """Start child processes until stopped (at most 150, which end after 3 s)."""

    alone = True
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
    tell(processes=count + 1)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return _amount(outcome, "processes", scene.limits.processes, "processes alive at a time")


@attack
class ThreadBomb(Attack):
    """Start threads until stopped (at most 150, which end after 2 s)."""

    alone = True
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
    tell(threads=count)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return _amount(outcome, "threads", scene.limits.processes, "threads alive at a time")


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
    tell(bytes=total)
"""


@attack
class MemoryOverProcesses(_Memory):
    """Fill 110 MB in each of six processes, so that no single process is large.

    If the back end states a bound (`memory_bound() -> (bytes, how)`), the bound counts too: more than six processes may
    run, so a bound per process is sufficient only if its product with their number is within the limit.
    """

    program = """
held_by = {}
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
        for _, (theirs, _a) in workers.items():
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
                tell(bytes=best)
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
        finding = _memory(scene, outcome)
        if scene.memory_bound is None:
            return finding
        bound, how = scene.memory_bound
        said = f"{finding.seen}; bound {megabytes(bound)}, {how}"
        return AttackFinding(finding.contained and bound <= scene.limits.memory_mb * MIB, said)


@attack
class Memfd(_Memory):
    """Fill anonymous memory files (memfd_create), at most 600 MB."""

    program = """
files, total, block = [], 0, b"x" * 4_000_000
tell(bytes=0)
while total < 600_000_000:
    try:
        files.append(os.memfd_create("canary"))
        total += os.write(files[-1], block)
    except OSError as error:
        tell(error=errno.errorcode.get(error.errno))
        break
    except (MemoryError, AttributeError) as error:
        tell(error=type(error).__name__)
        break
    tell(bytes=total)
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
    segment, error = call(c.shmget, FACTS["key"] + len(segments), ctypes.c_size_t(size), 0o1600)
    if segment < 0:
        tell(error=error)
        break
    segments.append(segment)
    at = c.shmat(segment, None, 0)
    if at is None or at == ctypes.c_void_p(-1).value:
        break
    ctypes.memset(at, 1, size)
    c.shmdt(at)
    total += size
    tell(bytes=total)
time.sleep(0.1)
for segment in segments:
    c.shmctl(segment, 0, None)
"""

    def prepare(self, scene: Scene) -> None:
        key = 0x40000000 + secrets.randbelow(0x3FF00000)
        scene.facts["key"] = key
        scene.notes["seen"] = set()
        scene.looks.append(lambda: scene.notes["seen"].update(_segments(key)))
        scene.stack.callback(_remove_segments, key)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        finding = _memory(scene, outcome)
        seen = len(scene.notes["seen"])
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
class EndlessOutput(Attack):
    """Print on stdout and stderr in turn, without a line end, at most 5 MB."""

    program = """
block = b"x" * 50_000
for i in range(100):
    os.write(1 + i % 2, block)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        # only the bytes received by the harness count, whichever side cut the output
        received = sum(len(result.stdout) + len(result.stderr) for result in outcome.results)
        most = scene.limits.output_bytes
        return AttackFinding(received <= most, with_end(f"{received:,} bytes received, {most:,} allowed", outcome))


@attack
class HugeReturn(Attack):
    """Leave a kept file of 5 MB and a sparse one for the harness to read."""

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
        sizes = {name: content if isinstance(content, str) else len(content) for name, content in outcome.kept.items()}
        most = scene.limits.output_bytes
        contained = all(isinstance(size, str) or size <= most for size in sizes.values())
        seen = ", ".join(
            f"{name}: {size if isinstance(size, str) else f'{size:,} bytes'}" for name, size in sizes.items()
        )
        return AttackFinding(contained, with_end(f"read gave {seen}; {most:,} allowed", outcome))


class _Endless(Attack):
    def prepare(self, scene: Scene) -> None:
        scene.facts["seconds"] = scene.limits.wall_s + SLACK_S + 1

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        most = scene.limits.wall_s + SLACK_S
        seen = with_end(f"ran for {outcome.seconds:.1f} s, {scene.limits.wall_s:g} allowed", outcome)
        return AttackFinding(outcome.seconds <= most and not outcome.told.get("done"), seen)


@attack
class EndlessLoop(_Endless):
    """Compute until stopped, at most a few seconds past the limit."""

    program = """
end = time.monotonic() + FACTS["seconds"]
while time.monotonic() < end:
    pass
"""


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


class _LeftBehind(Attack):
    why = "the child ends by itself, and is ended by the harness"

    def prepare(self, scene: Scene) -> None:
        scene.facts["seconds"] = scene.limits.wall_s + SLACK_S + 1

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        scene.notes["alive"] = still_alive(scene.token)
        kill_all(scene.notes["alive"])
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        alive, most = len(scene.notes["alive"]), scene.limits.wall_s + SLACK_S
        if not (outcome.told.get("left") or outcome.told.get("refused")):
            raise CannotTry("the program did not come to leave a child")
        seen = f"processes alive on the host after the run: {alive}; it returned after {outcome.seconds:.1f} s"
        return AttackFinding(alive == 0 and outcome.seconds <= most, with_end(seen, outcome))


_DAEMON = """
ready = os.pipe()
try:
    pid = os.fork()
except OSError:
    pid = -1
    tell(refused=True)
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
    tell(left=True)
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
class FillDisk(Attack):
    """Fill every writable folder, at most 200 MB in total."""

    alone = True
    why = "200 MB in all, removed by the program and again by the harness"
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
        places[folder] = places.get(folder, 0) + size
        tell(bytes=total, places=places)
for name in made:
    attempt(os.unlink, name)
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["file"] = scene.limits.file_mb * MB - MB
        scene.stack.callback(_remove_from_folders, scene.token)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        reached, most = outcome.number("bytes"), scene.limits.disk_mb * MIB
        if reached <= most:
            _expect_not_cut_short(outcome)
        places = outcome.told.get("places", {})
        where = ", ".join(f"{name} {megabytes(size)}" for name, size in places.items() if size >= MB)
        seen = f"{megabytes(reached)} written, {megabytes(most)} allowed" + (f" ({where})" if where else "")
        return AttackFinding(reached <= most, with_end(seen, outcome))


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
class HugeFile(Attack):
    """Make a single file larger than allowed: 40 MB written, 1 GB sparse."""

    alone = True
    program = """
size = 0
with open("single", "wb", buffering=0) as file:
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for _ in range(40):
        try:
            size += file.write(b"x" * 1_000_000)
        except OSError:
            break
        tell(size=size)
    if not attempt(file.truncate, 1_000_000_000):
        tell(size=1_000_000_000)
os.unlink("single")
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        reached, most = outcome.number("size"), scene.limits.file_mb * MIB
        return AttackFinding(reached <= most, with_end(f"{megabytes(reached)}, {megabytes(most)} allowed", outcome))


@attack
class ManyFiles(Attack):
    """Make empty files, at most 50,000.

    Contained if no more than `files` could be made. More files pass only if they cost the host no lasting or shared
    resource: they take no inodes of a disk (observed on the host during the run), they disappear with the box, and
    their memory is within a bound for all memory (a cgroup's, stated by `memory_bound`).
    """

    alone = True
    why = "empty files in the working folder, removed with it"
    program = """
count, end = 0, time.monotonic() + FACTS["seconds"]
os.mkdir(TOKEN)
while count < 50_000 and time.monotonic() < end:
    try:
        os.close(os.open("%s/%d" % (TOKEN, count), os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        tell(error=errno.errorcode.get(error.errno))
        break
    count += 1
    if count % 500 == 0:
        tell(files=count)
tell(files=count, out_of_time=count < 50_000 and time.monotonic() >= end)
time.sleep(0.1)
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["seconds"] = max(1.0, scene.limits.wall_s - 1.5)
        before = scene.notes["before"] = _inodes_used()
        scene.notes["taken"] = 0

        def look() -> None:
            taken = [used - before[disk] for disk, used in _inodes_used().items() if disk in before]
            scene.notes["taken"] = max(scene.notes["taken"], *taken, 0)

        scene.looks.append(look)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        made, most, taken = outcome.number("files"), scene.limits.files, scene.notes["taken"]
        seen = f"{made:,} files made, {most:,} allowed"
        if made <= most:
            _expect_not_cut_short(outcome)
            if outcome.told.get("out_of_time"):
                raise CannotTry(f"only {made:,} files were made in the time that it had")
            return AttackFinding(True, with_end(seen, outcome))
        if taken > made // 2:
            return AttackFinding(False, with_end(f"{seen}; on a disk of the host", outcome))
        bound = scene.memory_bound
        if bound is None or bound[0] > scene.limits.memory_mb * MIB:
            return AttackFinding(False, with_end(f"{seen}; in memory that nothing is known to bound", outcome))
        return AttackFinding(
            True, with_end(f"{seen}; none on a disk of the host, in memory bounded by {bound[1]}", outcome)
        )


def _inodes_used() -> dict[int, int]:
    """Inodes in use by device, for the disks that may hold a back end's folders."""
    used = {}
    for place in {Path(tempfile.gettempdir()), Path("/"), Path("/var/tmp"), Path.home(), Path.cwd()}:
        if place.is_dir():
            figures = os.statvfs(place)
            used[place.stat().st_dev] = figures.f_files - figures.f_ffree
    return used


@attack
class OpenFiles(Attack):
    """Open files, at most 3,000."""

    program = """
count = 3
while count < 3_000:
    try:
        os.open("/dev/null", os.O_RDONLY)
    except OSError:
        break
    count += 1
tell(open=count)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return _amount(outcome, "open", scene.limits.open_files, "files open at a time")


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
tell(depth=depth)
"""

    def prepare(self, scene: Scene) -> None:
        scene.stack.callback(remove_marked_folders, scene.token)

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        run_program(scene, box, outcome, "tell(again=True)")
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        left = marked_folders(scene.token)
        if left:
            return AttackFinding(False, f"left on the host: {left[0]}")
        seen = f"{outcome.number('depth'):,} deep; nothing left in the host's temporary folders, the next run works"
        return AttackFinding(bool(outcome.told.get("again")), seen)


def _tops() -> set[Path]:
    return {Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path("/run")}


def marked_folders(token: str) -> list[Path]:
    """Folders named by an attack in the host's temporary folders, at most three levels deep."""
    found = []
    for top in _tops():
        for depth in ("", "*/", "*/*/"):
            try:
                found += [path for path in top.glob(f"{depth}{token}") if path.is_dir()]
            except OSError as error:  # a folder of another user, or one that has disappeared
                if error.errno not in (errno.EACCES, errno.ENOENT):
                    raise
    return found


def remove_marked_folders(token: str) -> None:
    """Remove marked folders, even those too deep for shutil or made unreadable by a program."""
    for folder in marked_folders(token):
        for line in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            call([*line, "--", str(folder)])
        for parent in folder.parents:
            if parent in _tops() or any(parent.iterdir()):
                break
            parent.rmdir()
