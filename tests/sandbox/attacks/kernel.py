"""Attacks on other processes, on privileges and on kernel interfaces that no sandboxed program needs."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path
from typing import ClassVar

from tests.sandbox.attacks.attack import (
    Attack,
    AttackFinding,
    CannotTry,
    Outcome,
    Scene,
    attack,
    process_status,
    processes_with,
)


@attack
class SignalToParent(Attack):
    """Kill a process of the harness by its host pid.

    The harness started it for this; the signals never go to -1 or to the parent itself.
    """

    program = """
import signal
for number in (signal.SIGTERM, signal.SIGKILL):
    record(number.name, attempt(os.kill, FACTS["pid"], number))
time.sleep(0.1)
"""

    def prepare(self, scene: Scene) -> None:
        victim = scene.state["victim"] = scene.victim()
        scene.facts["pid"] = victim.pid

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        code = scene.state["victim"].poll()
        if code is not None:
            return AttackFinding(False, f"a process of the harness was killed (exit code {code})")
        return AttackFinding(True, f"the process lives ({outcome.errors or 'no answer'})")


@attack
class Ptrace(Attack):
    """Attach to a process of the harness by its host pid (PTRACE_SEIZE).

    PTRACE_SEIZE does not stop the traced process, and ends with the tracer.
    """

    host_may_refuse = True
    program = """
ctypes, c = libc()
c.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
c.ptrace.restype = ctypes.c_long
record("PTRACE_SEIZE", attempt(call, c.ptrace, 0x4206, FACTS["pid"], None, None))
time.sleep(0.3)
"""

    def prepare(self, scene: Scene) -> None:
        victim = scene.facts["pid"] = scene.victim().pid
        tracers: set[str] = scene.state.setdefault("tracers", set())
        scene.observers.append(lambda: tracers.add(process_status(victim).get("TracerPid", "0")))

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if scene.state["tracers"] - {"0"}:
            return AttackFinding(False, "a process of the harness was being traced")
        return outcome.finding(True, f"nobody was traced ({outcome.errors})")


@attack
class Mount(Attack):
    """Mount a tmpfs, bind / to a new folder, and make read-only file systems writable.

    In its own working folder, and undone at once; a read-only system is made read-only again.
    """

    host_may_refuse = True
    program = """
ctypes, c = libc()
os.mkdir("here")
here = os.path.abspath("here").encode()
RDONLY, REMOUNT, BIND, DETACH = 1, 32, 4096, 2
def mount(source, target, kind, flags):
    call(c.mount, source, target, kind, ctypes.c_ulong(flags), None)
record("tmpfs", attempt(mount, b"none", here, b"tmpfs", 0))
c.umount2(here, DETACH)
record("bind", attempt(mount, b"/", here, None, BIND))
c.umount2(here, DETACH)
for place in (b"/", b"/usr", b"/proc", b"/dev"):
    try:
        read_only = os.statvfs(place).f_flag & os.ST_RDONLY
    except OSError:
        continue
    if read_only:
        error = attempt(mount, b"none", place, None, REMOUNT | BIND)
        record("remount " + place.decode(), error)
        if not error:
            attempt(mount, b"none", place, None, REMOUNT | BIND | RDONLY)
os.rmdir("here")
"""


@attack
class UserNamespace(Attack):
    """Make new namespaces (unshare, clone, clone3): as root in one, a program can attack more of the kernel."""

    host_may_refuse = True
    program = """
ctypes, c = libc()
c.syscall.restype = ctypes.c_long
def clone(number, *args):
    if call(c.syscall, ctypes.c_long(number), *args) == 0:
        os._exit(0)
USER, CHILD = 0x10000000, 17
if FACTS["clone"]:
    words = USER.to_bytes(8, "little") + bytes(24) + CHILD.to_bytes(8, "little") + bytes(24)
    nothing = [ctypes.c_long(0)] * 4
    record("clone", attempt_in_child(clone, FACTS["clone"], ctypes.c_long(USER | CHILD), *nothing))
    buffer = ctypes.create_string_buffer(words, 64)
    record("clone3", attempt_in_child(clone, 435, buffer, ctypes.c_long(64)))
kinds = {"user": 0x10000000, "user+mount": 0x10020000, "user+net": 0x50000000, "mount": 0x20000, "net": 0x40000000}
for name, flags in kinds.items():
    record(name, attempt_in_child(call, c.unshare, flags))
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["clone"] = {"x86_64": 56, "aarch64": 220}.get(platform.machine())


class _OpenFiles(Attack):
    """Base class: the program records which of many files it could open, and counts the errors of the others."""

    host_may_refuse = True
    prelude = """
def record_opened(names, flags):
    for name in names:
        error = attempt(open_and_close, name, flags)
        if error:
            errors[error] = errors.get(error, 0) + 1
        else:
            record(name, error)
"""


@attack
class ProcSysWrite(_OpenFiles):
    """Open kernel settings for writing: core_pattern, modprobe, sysrq-trigger, cgroups. Nothing is written.

    Settings that exist per namespace are left out: a box may have its own.
    """

    program = """
names = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
         "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/drop_caches", "/sys/kernel/uevent_helper",
         "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs", "/sys/power/state"]
record_opened(names, os.O_WRONLY)
"""


@attack
class Devices(_OpenFiles):
    """Open /dev/mem, /dev/kmsg and disks, and make a new device file of a disk (mknod). Nothing is read or written."""

    program = """
import stat
names = ["/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse"]
names += [entry.path for entry in os.scandir("/dev") if stat.S_ISBLK(entry.stat(follow_symlinks=False).st_mode)]
if not attempt(os.mknod, "disk", 0o600 | stat.S_IFBLK, os.makedev(*FACTS["disk"])):
    names.insert(0, "disk")
record_opened(names[:30], os.O_RDONLY | os.O_NONBLOCK)
"""

    def prepare(self, scene: Scene) -> None:
        device = Path("/").stat().st_dev
        scene.facts["disk"] = [os.major(device), os.minor(device)]


@attack
class Clock(Attack):
    """Set the machine's clock: its rate, to the present rate; if that is refused, its time, to the present time.

    A set time would unsettle NTP, so it is tried only if the rate is refused.
    """

    host_may_refuse = True
    program = """
ctypes, c = libc()
class Time(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("fraction", ctypes.c_long)]
def rate():
    reading = ctypes.create_string_buffer(512)  # struct timex, whose first word says what to set
    c.adjtimex(reading)
    reading[0:4] = (0x4000).to_bytes(4, sys.byteorder)  # ADJ_TICK
    call(c.adjtimex, reading)
def settimeofday():
    now = time.time_ns()
    call(c.settimeofday, ctypes.byref(Time(now // 10**9, now % 10**9 // 1000)), None)
def clock_settime():
    time.clock_settime_ns(time.CLOCK_REALTIME, time.clock_gettime_ns(time.CLOCK_REALTIME))
for way in (rate, settimeofday, clock_settime):
    if not allowed:
        record(way.__name__, attempt(way))
"""


@attack
class Priority(Attack):
    """Take precedence over the host's processes, for microseconds: nice -10 and real-time scheduling."""

    host_may_refuse = True
    program = """
record("nice", attempt(os.setpriority, os.PRIO_PROCESS, 0, -10))
record("real-time", attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)))
attempt(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
"""


@attack
class SetuidBinaries(Attack):
    """Run su, sudo, mount and other setuid programs, and a copy of the interpreter made setuid.

    Judged on the host: no process started by them may be root there. The programs get no input, and are asked to run
    a sleeping child only.
    """

    host_may_refuse = True
    program = """
import shutil, stat, subprocess
mark = "".join(reversed(FACTS["mark"]))
child = "import time; time.sleep(0.4) #" + mark
ways = {}
if shutil.which("su"):
    ways["su"] = ["su", "-c", "exec '%s' -c '%s'" % (sys.executable, child)]
if shutil.which("sudo"):
    ways["sudo"] = ["sudo", "-n", sys.executable, "-c", child]
copy = os.path.abspath("copy")
def make():
    shutil.copyfile(os.path.realpath(sys.executable), copy)
    os.chmod(copy, 0o4755)
if not attempt(make):
    ways["copy"] = [copy, "-I", "-S", "-c", child]
for name in ("mount", "umount", "passwd", "chsh", "newgrp", "pkexec"):
    path = shutil.which(name)
    if path and os.stat(path).st_mode & stat.S_ISUID:
        ways[name] = [path, "--" + mark]
started = []
for name, line in ways.items():
    try:
        started.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL))
    except OSError:
        continue
end = time.monotonic() + 1.2
while time.monotonic() < end and any(process.poll() is None for process in started):
    time.sleep(0.02)
for process in started:
    attempt(process.kill)
report(ways=sorted(ways), started=len(started))
"""

    def prepare(self, scene: Scene) -> None:
        mark = "st" + scene.token[2:]
        scene.facts["mark"] = mark[::-1]
        roots: set[int] = scene.state.setdefault("roots", set())

        def observe() -> None:
            roots.update(pid for pid in processes_with(mark) if "0" in process_status(pid).get("Uid", "").split())

        scene.observers.append(observe)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if roots := scene.state["roots"]:
            return AttackFinding(False, f"{len(roots)} of their processes were root on the host")
        ways = ", ".join(outcome.reports.get("ways", [])) or "nothing to try in the box"
        return outcome.finding(True, f"none was root on the host ({ways})")


class _StatusAttack(Attack):
    """Base class: the process takes the token's name for a moment, so that the host can find it and read its status."""

    host_may_refuse = True
    program = """
def fields(line):
    name, _, value = line.partition(":")
    return name, value.strip()
with open("/proc/self/status") as file:
    status = dict(fields(line) for line in file)
with open("/proc/self/uid_map") as file:
    maps = [[int(part) for part in line.split()] for line in file]
report(status=status, maps=maps, uid=os.getuid())
ctypes, c = libc()
c.prctl(15, TOKEN[:15].encode(), 0, 0, 0)
time.sleep(0.3)
"""

    def prepare(self, scene: Scene) -> None:
        def observe() -> None:
            for pid in processes_with(scene.token):
                status = process_status(pid)
                if status.get("Name") == scene.token[:15]:
                    scene.state["status"] = status

        scene.observers.append(observe)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if scene.state.get("status"):
            status, source = scene.state["status"], "seen on the host"
        elif "status" in outcome.reports:
            status, source = outcome.reports["status"], "by its own word"
        else:
            raise CannotTry("the process was not seen on the host, and reported nothing")
        finding = self.judge_status(status)
        return AttackFinding(finding.contained, f"{finding.seen}, {source}")

    def judge_status(self, status: dict[str, str]) -> AttackFinding:
        """Judge the fields of the process's status."""
        raise NotImplementedError


@attack
class HostUid(_StatusAttack):
    """Check the process's uid on the host: it must not be root there, whatever it is in the box."""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if status := scene.state.get("status"):
            uids, uid = status["Uid"].split(), outcome.reports.get("uid")
            return AttackFinding("0" not in uids, f"uid {uids[1]} on the host, {uid} in the box")
        if "maps" not in outcome.reports:
            raise CannotTry("the process was not seen on the host, and reported nothing")
        outside = _mapped(int(outcome.reports["uid"]), outcome.reports["maps"])
        return AttackFinding(outside != 0, f"not seen on this host; by its own word uid {outside} outside the box")


def _mapped(uid: int, maps: list[list[int]]) -> int:
    for inside, outside, count in maps:
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


@attack
class NoNewPrivileges(_StatusAttack):
    """Check the process's status: it must be unable to gain privileges (no_new_privs)."""

    def judge_status(self, status: dict[str, str]) -> AttackFinding:
        value = status.get("NoNewPrivs")
        return AttackFinding(value == "1", f"NoNewPrivs {value}")


@attack
class Capabilities(_StatusAttack):
    """Check the process's status: all its capability sets must be empty (effective to bounding set)."""

    def judge_status(self, status: dict[str, str]) -> AttackFinding:
        sets = {name: int(status.get(name, "1"), 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd")}
        held = [f"{name} {value:x}" for name, value in sets.items() if value]
        return AttackFinding(not held, ", ".join(held) or "all five sets are empty")


@attack
class SystemCallFilter(_StatusAttack):
    """Check the process's status: a system call filter must be active (seccomp mode 2)."""

    def judge_status(self, status: dict[str, str]) -> AttackFinding:
        value = status.get("Seccomp")
        return AttackFinding(value == "2", f"Seccomp {value}")


@attack
class CoreDump(Attack):
    """Crash with a core dump: dumps contain secrets, and the host decides their location.

    The dump has 4 KB at most, in its own working folder or where the host collects them.
    """

    host_may_refuse = True
    program = """
import resource
attempt(resource.setrlimit, resource.RLIMIT_CORE, (4096, resource.getrlimit(resource.RLIMIT_CORE)[1]))
pid = os.fork()
if pid == 0:
    os.abort()
dumped = os.WCOREDUMP(os.waitpid(pid, 0)[1])
record("a core dump", "" if dumped else "none, limit %d" % resource.getrlimit(resource.RLIMIT_CORE)[0])
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if "errors" not in outcome.reports:
            raise CannotTry("the program did not report whether a dump was made")
        return super().judge(scene, outcome)


@attack
class Terminal(_OpenFiles):
    """Open the terminal of the check's user, through which a program could simulate key presses. Nothing is written."""

    program = """
record_opened(["/dev/tty", "/dev/console"], os.O_RDWR | os.O_NOCTTY)
for number in range(3):
    if os.isatty(number):
        record("descriptor %d" % number, "")
"""


# Kernel interfaces that no scored program needs; each has had faults that allowed a container escape

_MACHINES = ("x86_64", "aarch64")
_NUMBERS = {
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "syslog": (103, 116),
}
"""Numbers of system calls, by machine."""


class _SystemCall(Attack):
    """Base class: makes one system call, also by its x32 number. The object that it asks for ends with the process."""

    host_may_refuse = True
    call: ClassVar[str] = ""
    arguments: ClassVar[tuple[int | bytes, ...]] = ()
    """Numbers, and the contents of buffers of 256 bytes."""
    program = """
ctypes, c = libc()
c.syscall.restype = ctypes.c_long
def argument(word):
    return ctypes.c_long(word) if isinstance(word, int) else ctypes.create_string_buffer(bytes.fromhex(word), 256)
for name, number in FACTS["numbers"].items():
    words = [argument(word) for word in FACTS["arguments"]]
    record(name, attempt_in_child(call, c.syscall, ctypes.c_long(number), *words))
"""

    def prepare(self, scene: Scene) -> None:
        machine = platform.machine()
        if machine not in _MACHINES:
            raise CannotTry(f"the number of this system call is not known here for {machine}")
        numbers = {self.call: _NUMBERS[self.call][_MACHINES.index(machine)]}
        if machine == "x86_64":
            numbers[f"{self.call} (x32)"] = numbers[self.call] | 0x40000000
        words = [word.hex() if isinstance(word, bytes) else word for word in self.arguments]
        scene.facts.update(numbers=numbers, arguments=words)


@attack
class Bpf(_SystemCall):
    """Make an eBPF map."""

    call, arguments = "bpf", (0, struct.pack("=4I", 2, 4, 8, 1), 72)


@attack
class PerfEventOpen(_SystemCall):
    """Measure the own process with perf_event_open (a software clock)."""

    call, arguments = "perf_event_open", (struct.pack("=2I32xQ", 1, 112, 0x61), 0, -1, -1, 0)


@attack
class Keyring(_SystemCall):
    """Add a key to the process's kernel keyring."""

    call, arguments = "add_key", (b"user", b"creditflow", b"x", 1, -2)


@attack
class IoUring(_SystemCall):
    """Set up an io_uring, which reaches files and sockets past a system call filter."""

    call, arguments = "io_uring_setup", (1, b"")


@attack
class Userfaultfd(_SystemCall):
    """Make a userfaultfd, which exploits use to pause the kernel."""

    call, arguments = "userfaultfd", (1,)


@attack
class KernelLog(_SystemCall):
    """Read the last bytes of the kernel log with syslog(2). They are not printed."""

    call, arguments = "syslog", (3, b"", 16)


@attack
class CompatSystemCalls(Attack):
    """Make a system call through the 32-bit interface (int 0x80), which filters of 64-bit calls may miss.

    It asks for the number of its own session keyring.
    """

    host_may_refuse = True
    program = """
import ctypes, mmap
def keyctl():
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # push rbx; mov eax, 288 (keyctl); xor ebx, ebx; mov ecx, -3; mov edx, 1; int 0x80; pop rbx; ret
    page.write(bytes.fromhex("53b82001000031dbb9fdffffffba01000000cd805bc3"))
    value = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if value < 0:
        raise OSError(-value, "")
x86 = FACTS["machine"] == "x86_64"
record("keyctl by int 0x80", attempt_in_child(keyctl) if x86 else "does not exist on this processor")
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["machine"] = platform.machine()


@attack
class EarlierRun(Attack):
    """Search for a System V message queue of an earlier run: an object made in one run must not exist in the next.

    The queue has a random key, and the harness removes it.
    """

    program = """
ctypes, c = libc()
report(earlier=not attempt(call, c.msgget, FACTS["key"], 0))
attempt(call, c.msgget, FACTS["key"], 0o1666)
"""
    second = program

    def prepare(self, scene: Scene) -> None:
        key = scene.facts["key"] = 0x50000000 + int(scene.token[2:8], 16)
        scene.stack.callback(_remove_queue, key)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not outcome.reports.get("done"):
            raise CannotTry("the second program did not run to its end")
        seen = outcome.reports["earlier"]
        return AttackFinding(not seen, "a message queue of an earlier run" if seen else "nothing of an earlier run")


def _remove_queue(key: int) -> None:
    c = ctypes.CDLL(None)
    queue = c.msgget(key, 0)
    if queue >= 0:
        c.msgctl(queue, 0, None)
