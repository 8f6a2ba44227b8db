"""Tests of the launch: no program starts unconfined or outlives its harness, and no process or group is left."""

import contextlib
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from creditflow.sandbox import SandboxError, launch
from creditflow.sandbox import cgroup as cgroups
from tests.rewards.processes import HANG_S, children
from tests.sandbox import boxes

SLEEP = "import time; time.sleep(7777)"


def processes(token: str) -> dict[int, str]:
    """Processes with the token in their command lines: the name of the program by pid."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if token in words:
            pids[int(folder.name)] = Path(words[0]).name
    return pids


def programs(token: str) -> dict[int, str]:
    return {pid: name for pid, name in processes(token).items() if name.startswith("python")}


def groups(box, pids) -> list[Path]:
    if box._parents is None:
        return []
    folders = [folder for folder in (box._parents.memory, box._parents.pids) if folder is not None]
    return [group for folder in folders for pid in pids for group in folder.glob(f"creditflow-*-{pid}-*")]


def eventually(empty: Callable[[], object], wait_s: float = HANG_S) -> object:
    """Call `empty` until its result is empty or the time is over; return the last result."""
    deadline = time.monotonic() + wait_s
    while (left := empty()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def token():
    """A word for command lines; the fixture kills remaining processes with it, even if the test fails."""
    word = f"token-{os.getpid()}-{time.monotonic_ns()}"
    yield word
    for pid in processes(word):
        os.kill(pid, signal.SIGKILL)


def harness_killed(box, token: str, after_s: float, code: str = SLEEP, **options) -> int:
    """Start a harness that runs a program, kill it after `after_s` seconds, and return its pid."""
    begun, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(tell, b"x")
            box.run(["python", "-c", code, token], **options)
        finally:
            os._exit(0)
    os.read(begun, 1)
    os.close(begun)
    os.close(tell)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize("cgroup", ["auto", "none"])
def test_killed_harness_leaves_no_program_at_any_moment(cgroup, token):
    box = boxes.bubblewrap(wall_s=3600, cgroup=cgroup)
    moments = random.Random(cgroup)
    dead = [harness_killed(box, token, moments.uniform(0, 0.012)) for _ in range(20)]
    assert eventually(lambda: programs(token)) == {}
    if box._parents is not None:

        def left() -> list[object]:
            # A bwrap whose harness died during its start can wait forever, without a program. The next box removes it.
            boxes.bubblewrap(cgroup=cgroup)
            return [*processes(token).items(), *groups(box, dead)]

        assert eventually(left) == []


@pytest.mark.parametrize("cgroup", ["auto", "none"])
def test_program_cannot_reset_its_parent_death_signal(cgroup, token):
    box = boxes.bubblewrap(wall_s=3600, cgroup=cgroup)
    give_up = "import ctypes; print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))"
    assert box.run(["python", "-c", give_up]).stdout == b"-1\n"
    dead = harness_killed(box, token, 0.5, f"{give_up}; import os; os.fork(); {SLEEP}")
    assert eventually(lambda: processes(token)) == {}
    boxes.bubblewrap(cgroup=cgroup)  # a new box removes the groups of dead harnesses
    assert groups(box, [dead]) == []


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("cgroup", ["auto", "none"])
def test_exception_leaves_no_process_or_group_at_any_moment(cgroup, token):
    box = boxes.bubblewrap(wall_s=600, cgroup=cgroup)
    where, others = Path("/proc/thread-self/cgroup").read_text(), children()

    def interrupt(*_):
        raise Interrupted

    def run(interrupted_after_s):
        signal.setitimer(signal.ITIMER_REAL, interrupted_after_s)
        box.run(["python", "-c", SLEEP, token])

    before = signal.signal(signal.SIGALRM, interrupt)
    moments = random.Random(5)
    try:
        for _ in range(40):
            started = time.monotonic()
            with pytest.raises(Interrupted):
                run(moments.uniform(0.0005, 0.02))
            assert time.monotonic() - started < HANG_S  # half of wall_s
            assert groups(box, [os.getpid()]) == []
            assert Path("/proc/thread-self/cgroup").read_text() == where
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert eventually(lambda: processes(token)) == {}
    assert children().keys() <= others.keys()


def interrupted_at(event, name):
    """A profile function that raises when the C or Python function `name` returns."""

    def profile(frame, what, argument):
        if what == event and name == (argument.__name__ if event == "c_return" else frame.f_code.co_name):
            sys.setprofile(None)
            raise Interrupted

    return profile


@pytest.mark.parametrize("moment", [("c_return", "fork_exec"), ("return", "_execute_child")])
@pytest.mark.parametrize("backend", ["bubblewrap", "unsafe_subprocess", "container"])
def test_interrupted_start_leaves_no_child(backend, moment, token, tmp_path, monkeypatch):
    with boxes.opened(backend, tmp_path, monkeypatch, wall_s=3600) as box:
        before = children()
        sys.setprofile(interrupted_at(*moment))
        try:
            with pytest.raises(Interrupted):
                box.run(["python", "-c", SLEEP, token])
        finally:
            sys.setprofile(None)
        assert children().keys() <= before.keys()  # others may end meanwhile
        assert eventually(lambda: processes(token)) == {}


def test_failure_to_set_limits_starts_no_program(token, monkeypatch):
    box = boxes.bubblewrap(wall_s=600)

    def refused(self, *_):
        raise SandboxError("EBUSY")

    for place, name in ((cgroups.Group, "_limit"), (type(box), "_bound_files")) * 2:
        if place is cgroups.Group and box._parents is None:
            continue
        monkeypatch.undo()
        monkeypatch.setattr(place, name, refused)
        started = time.monotonic()
        with pytest.raises(SandboxError, match="EBUSY"):
            box.run(["python", "-c", SLEEP, token])
        assert time.monotonic() - started < HANG_S
    assert processes(token) == {}


def test_input_above_the_box_memory_is_refused_before_start(token):
    box = boxes.bubblewrap(memory_mb=64, wall_s=2)
    for _ in range(3):
        with pytest.raises(ValueError, match="100000000 bytes in all"):
            box.run(["sh", "-c", "exec sleep 66", token], stdin=b"x" * 100_000_000)
    assert processes(token) == {}
    most = 32 * 1024 * 1024
    assert box.run(["wc", "-c"], stdin=b"x" * most).stdout.strip() == str(most).encode()


@contextlib.contextmanager
def open_files(limit, number):
    """Hold up to `number` descriptors open under a limit; yield them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < limit:
        pytest.skip(f"the system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):  # the descriptor table is full
            held.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(number))
        yield held
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_box_works_with_more_than_1024_open_files():
    box = boxes.bubblewrap(wall_s=20)
    with open_files(limit=2048, number=1100) as held:
        assert len(held) == 1100
        box.write("f", b"file")
        assert box.run(["sh", "-c", "cat f -"], stdin=b" input").stdout == b"file input"


def test_descriptor_exhaustion_raises_sandbox_error():
    box = boxes.bubblewrap()
    with open_files(limit=512, number=512) as held:
        for _ in range(4):
            os.close(held.pop())
        with pytest.raises(SandboxError, match="Too many open files"):
            box.run(["true"])
    assert box.run(["true"]).ok


def test_memory_of_input_is_not_charged_to_the_group(monkeypatch):
    box = boxes.bubblewrap()
    if box._parents is None:
        pytest.skip("no cgroup can be had here")
    places, real = [], launch.sealed

    def sealed(content):
        places.append(Path("/proc/thread-self/cgroup").read_text())
        return real(content)

    monkeypatch.setattr(launch, "sealed", sealed)
    box.write("f", b"x")
    assert box.run(["true"], stdin=b"x").ok
    assert places == [Path("/proc/thread-self/cgroup").read_text()] * 3


def test_runs_leave_no_cgroup_and_no_thread_in_one(monkeypatch):
    def places() -> set[str]:
        return {(task / "cgroup").read_text() for task in Path("/proc/self/task").iterdir()}

    box, ours = boxes.bubblewrap(wall_s=20), places()
    box.run(["true"])
    box.run(["yes"])
    monkeypatch.setattr(box, "_as_nobody", ["/no/such/program"])
    with pytest.raises(SandboxError, match=r"could not be started|not found"):
        box.run(["true"])
    assert (groups(box, [os.getpid()]), places()) == ([], ours)


@pytest.mark.parametrize("stdin", [b"", b"x"])
def test_program_has_three_descriptors_and_read_only_input(stdin):
    box = boxes.bubblewrap()
    code = (
        "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])\n"
        "try: os.write(os.open('/dev/stdin', os.O_WRONLY), b'y')\nexcept OSError: pass\n"
        "os.lseek(0, 0, 0); print(os.read(0, 9), *sorted(os.environ))"
    )
    with Path(__file__).open() as leaked:
        os.set_inheritable(leaked.fileno(), True)
        result = box.run(["python", "-c", code], stdin=stdin)
    fds, rest = result.stdout.decode().splitlines()
    assert (fds, rest.split()[0]) == ("[0, 1, 2]", repr(stdin))
    # The shell adds no variables, except `_`, which some shells set for every command.
    assert set(rest.split()[1:]) - {"_"} == {"HOME", "LANG", "PATH", "TMPDIR"}
    assert box.run(["cat"], stdin=stdin).stdout == stdin
