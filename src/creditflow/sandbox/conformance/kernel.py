"""Attacks on other processes, on privileges and on kernel interfaces that no sandboxed program needs."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from creditflow.sandbox.base import Sandbox
from creditflow.sandbox.conformance.attack import (
    Attack,
    AttackFinding,
    CannotTry,
    Outcome,
    Scene,
    attack,
    none_done,
    process_status,
    processes_with,
    run_program,
    with_end,
)

_HOLD = """
ctypes, c = libc()
c.prctl(15, TOKEN[:15].encode(), 0, 0, 0)
time.sleep(0.3)
"""
"""Names the process after the token for a moment, so that the host can find it."""


@attack
class SignalToParent(Attack):
    """Kill a process of the harness by its host pid."""

    why = "one process that the harness started for this; never -1, never the parent itself"
    program = """
import signal
errors = [attempt(os.kill, FACTS["pid"], number) for number in (signal.SIGTERM, signal.SIGKILL)]
tell(errors=errors)
time.sleep(0.1)
"""

    def prepare(self, scene: Scene) -> None:
        victim = scene.notes["victim"] = scene.victim()
        scene.facts["pid"] = victim.pid

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        ended = scene.notes["victim"].poll()
        if ended is not None:
            return AttackFinding(False, f"a process of the harness was killed (exit code {ended})")
        return AttackFinding(
            True, f"the process lives ({', '.join(set(outcome.told.get('errors', []))) or 'no answer'})"
        )


@attack
class Ptrace(Attack):
    """Attach to a process of the harness by its host pid (PTRACE_SEIZE)."""

    host_may_refuse = True
    why = "PTRACE_SEIZE does not stop who is traced, and ends with the tracer"
    program = """
ctypes, c = libc()
c.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
c.ptrace.restype = ctypes.c_long
tell(error=call(c.ptrace, 0x4206, FACTS["pid"], None, None)[1])
time.sleep(0.3)
"""

    def prepare(self, scene: Scene) -> None:
        victim = scene.victim().pid
        scene.facts["pid"] = victim
        scene.notes["tracers"] = set()

        def look() -> None:
            tracer = process_status(victim).get("TracerPid", "0")
            if tracer != "0":
                scene.notes["tracers"].add(tracer)

        scene.looks.append(look)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if scene.notes["tracers"]:
            return AttackFinding(False, "a process of the harness was being traced")
        return AttackFinding(True, with_end(f"nobody was traced ({outcome.told.get('error', '')})", outcome))


@attack
class Mount(Attack):
    """Mount a tmpfs, bind / to a new folder, and make read-only file systems writable."""

    host_may_refuse = True
    why = "in its own working folder, and undone at once; a read-only system is made read-only again"
    program = """
ctypes, c = libc()
os.mkdir("here")
here = os.path.abspath("here").encode()
RDONLY, REMOUNT, BIND, DETACH = 1, 32, 4096, 2
done, errors = [], {}
def mount(what, source, target, kind, flags):
    value, error = call(c.mount, source, target, kind, ctypes.c_ulong(flags), None)
    errors[what] = error
    if value == 0:
        done.append(what)
    return value == 0
if mount("tmpfs", b"none", here, b"tmpfs", 0):
    c.umount2(here, DETACH)
if mount("bind", b"/", here, None, BIND):
    c.umount2(here, DETACH)
for place in (b"/", b"/usr", b"/proc", b"/dev"):
    try:
        flags = os.statvfs(place).f_flag
    except OSError:
        continue
    if flags & os.ST_RDONLY and mount("remount " + place.decode(), b"none", place, None, REMOUNT | BIND):
        c.mount(b"none", place, None, ctypes.c_ulong(REMOUNT | BIND | RDONLY), None)
tell(done_=done, errors=errors)
os.rmdir("here")
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class UserNamespace(Attack):
    """Make new namespaces (unshare, clone, clone3): as root in one, a program can attack more of the kernel."""

    host_may_refuse = True
    program = """
ctypes, c = libc()
c.syscall.restype = ctypes.c_long
done, errors = [], {}
def clone(number, *args):
    value, error = call(c.syscall, ctypes.c_long(number), *args)
    if value == 0:
        os._exit(0)
    return value, error
USER, CHILD = 0x10000000, 17
ways = {}
if FACTS["clone"]:
    words = USER.to_bytes(8, "little") + bytes(24) + CHILD.to_bytes(8, "little") + bytes(24)
    nothing = [ctypes.c_long(0)] * 4
    ways["clone"] = lambda: clone(FACTS["clone"], ctypes.c_long(USER | CHILD), *nothing)
    ways["clone3"] = lambda: clone(435, ctypes.create_string_buffer(words, 64), ctypes.c_long(64))
kinds = {"user": 0x10000000, "user+mount": 0x10020000, "user+net": 0x50000000, "mount": 0x20000, "net": 0x40000000}
for name, flags in kinds.items():
    ways[name] = lambda flags=flags: call(c.unshare, flags)
for name, way in ways.items():
    ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ends[1], way()[1].encode() or b"-")
        os._exit(0)
    os.close(ends[1])
    answer = os.read(ends[0], 100).decode()
    os.waitpid(pid, 0)
    errors[name] = answer or "killed"
    if answer == "-":
        done.append(name)
tell(done_=done, errors=errors)
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["clone"] = {"x86_64": 56, "aarch64": 220}.get(platform.machine())

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class ProcSysWrite(Attack):
    """Open kernel settings for writing: core_pattern, modprobe, sysrq-trigger, cgroups. Nothing is written.

    Settings that exist per namespace are left out: a box may have its own.
    """

    host_may_refuse = True
    why = "files are opened without truncation and closed again; nothing is written"
    program = """
done, errors = [], {}
names = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
         "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/drop_caches", "/sys/kernel/uevent_helper",
         "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs", "/sys/power/state"]
for name in names:
    try:
        os.close(os.open(name, os.O_WRONLY))
    except OSError as error:
        errors[errno.errorcode.get(error.errno)] = errors.get(errno.errorcode.get(error.errno), 0) + 1
    else:
        done.append(name)
tell(done_=done, errors=errors)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class Devices(Attack):
    """Open /dev/mem, /dev/kmsg and disks, and make a new device file of a disk (mknod)."""

    host_may_refuse = True
    why = "devices are opened and closed again; nothing is read or written"
    program = """
import stat
done, errors = [], {}
names = ["/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse"]
numbers = []
for folder in ("/dev",):
    for entry in os.scandir(folder):
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISBLK(found.st_mode):
            names.append(entry.path)
disk = os.makedev(*FACTS["disk"])
if not attempt(os.mknod, "disk", 0o600 | stat.S_IFBLK, disk):
    names.append("disk")
for name in names[:30]:
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        errors[errno.errorcode.get(error.errno)] = errors.get(errno.errorcode.get(error.errno), 0) + 1
    else:
        done.append(name)
tell(done_=done, errors=errors)
"""

    def prepare(self, scene: Scene) -> None:
        device = Path("/").stat().st_dev
        scene.facts["disk"] = [os.major(device), os.minor(device)]

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class Clock(Attack):
    """Set the machine's clock: its rate, to the present rate; if that is refused, its time, to the present time."""

    host_may_refuse = True
    why = "the rate set is the present one, and the time, which would unsettle NTP, is tried only where that is refused"
    program = """
done, errors = [], {}
ctypes, c = libc()
class Time(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("fraction", ctypes.c_long)]
def expect(function, *args):
    value, error = call(function, *args)
    if value == -1:
        raise OSError(getattr(errno, error), error)
def rate():
    reading = ctypes.create_string_buffer(512)  # struct timex, whose first word says what to set
    c.adjtimex(reading)
    reading[0:4] = (0x4000).to_bytes(4, sys.byteorder)  # ADJ_TICK
    expect(c.adjtimex, reading)
def settimeofday():
    now = time.time_ns()
    expect(c.settimeofday, ctypes.byref(Time(now // 10**9, now % 10**9 // 1000)), None)
def clock_settime():
    time.clock_settime_ns(time.CLOCK_REALTIME, time.clock_gettime_ns(time.CLOCK_REALTIME))
for way in (rate, settimeofday, clock_settime):
    if not done:
        errors[way.__name__] = attempt(way)
        if not errors[way.__name__]:
            done.append(way.__name__)
tell(done_=done, errors=errors)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class Priority(Attack):
    """Take precedence over the host's processes: nice -10 and real-time scheduling."""

    host_may_refuse = True
    why = "for microseconds, of a process that does nothing"
    program = """
done, errors = [], {}
ways = {
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, 0, -10),
    "real-time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
}
for way, action in ways.items():
    errors[way] = attempt(action)
    if not errors[way]:
        done.append(way)
attempt(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
tell(done_=done, errors=errors)
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class SetuidBinaries(Attack):
    """Run su, sudo, mount and other setuid programs, and a copy of the interpreter made setuid.

    Judged on the host: no process started by them may be root there.
    """

    host_may_refuse = True
    why = "the programs are asked to run a sleeping child only, and get no input"
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
tell(ways=sorted(ways), started=len(started))
"""

    def prepare(self, scene: Scene) -> None:
        mark = scene.notes["mark"] = "st" + scene.token[2:]
        scene.facts["mark"] = mark[::-1]
        scene.notes["roots"] = set()

        def look() -> None:
            for pid in processes_with(mark):
                if "0" in process_status(pid).get("Uid", "").split():
                    scene.notes["roots"].add(pid)

        scene.looks.append(look)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        roots = len(scene.notes["roots"])
        if roots:
            return AttackFinding(False, f"{roots} of their processes were root on the host")
        ways = ", ".join(outcome.told.get("ways", [])) or "nothing to try in the box"
        return AttackFinding(True, with_end(f"none was root on the host ({ways})", outcome))


class _Seen(Attack):
    """Base class: the program sleeps for a moment, so that the host can read its status."""

    program = (
        """
status = {}
with open("/proc/self/status") as file:
    for line in file:
        name, _, value = line.partition(":")
        status[name] = value.strip()
with open("/proc/self/uid_map") as file:
    maps = [[int(part) for part in line.split()] for line in file]
tell(status=status, maps=maps, uid=os.getuid())
"""
        + _HOLD
    )

    def prepare(self, scene: Scene) -> None:
        def look() -> None:
            for pid in processes_with(scene.token):
                status = process_status(pid)
                if status.get("Name") == scene.token[:15]:
                    scene.notes["status"] = status

        scene.looks.append(look)


@attack
class HostUid(_Seen):
    """Check the process's uid on the host: it must not be root there, whatever it is in the box."""

    host_may_refuse = True

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        status = scene.notes.get("status")
        if status:
            uids = status["Uid"].split()
            return AttackFinding("0" not in uids, f"uid {uids[1]} on the host, {outcome.told.get('uid')} in the box")
        if "maps" not in outcome.told:
            raise CannotTry("the process was not seen on the host, and told nothing")
        outside = _mapped(int(outcome.told["uid"]), outcome.told["maps"])
        return AttackFinding(outside != 0, f"not seen on this host; by its own word uid {outside} outside the box")


def _mapped(uid: int, maps: list[list[int]]) -> int:
    for inside, outside, count in maps:
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


@attack
class NoNewPrivileges(_Seen):
    """Check the process's status: it must be unable to gain privileges (no_new_privs)."""

    host_may_refuse = True

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        status, whose = _status(scene, outcome)
        value = status.get("NoNewPrivs")
        return AttackFinding(value == "1", f"NoNewPrivs {value}, {whose}")


@attack
class Capabilities(_Seen):
    """Check the process's status: all its capability sets must be empty (effective to bounding set)."""

    host_may_refuse = True

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        status, whose = _status(scene, outcome)
        sets = {name: int(status.get(name, "1"), 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd")}
        held = [f"{name} {value:x}" for name, value in sets.items() if value]
        return AttackFinding(not held, f"{', '.join(held) or 'all five sets are empty'}, {whose}")


@attack
class SystemCallFilter(_Seen):
    """Check the process's status: a system call filter must be active (seccomp mode 2)."""

    host_may_refuse = True

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        status, whose = _status(scene, outcome)
        value = status.get("Seccomp")
        return AttackFinding(value == "2", f"Seccomp {value}, {whose}")


def _status(scene: Scene, outcome: Outcome) -> tuple[dict[str, str], str]:
    if scene.notes.get("status"):
        return scene.notes["status"], "seen on the host"
    if "status" not in outcome.told:
        raise CannotTry("the process was not seen on the host, and told nothing")
    return outcome.told["status"], "by its own word"


@attack
class CoreDump(Attack):
    """Crash with a core dump: dumps contain secrets, and the host decides their location."""

    host_may_refuse = True
    program = """
import resource
attempt(resource.setrlimit, resource.RLIMIT_CORE, (4096, resource.getrlimit(resource.RLIMIT_CORE)[1]))
pid = os.fork()
if pid == 0:
    os.abort()
tell(dumped=os.WCOREDUMP(os.waitpid(pid, 0)[1]), limit=resource.getrlimit(resource.RLIMIT_CORE)[0])
"""
    why = "a dump of 4 KB at most, in its own working folder or where the host collects them"

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if "dumped" not in outcome.told:
            raise CannotTry("the program did not tell whether a dump was made")
        dumped = bool(outcome.told["dumped"])
        seen = f"{'a core was' if dumped else 'no core was'} dumped, limit {outcome.told['limit']}"
        return AttackFinding(not dumped, seen)


@attack
class Terminal(Attack):
    """Open the terminal of the check's user, through which a program could simulate key presses."""

    host_may_refuse = True
    why = "the terminal is opened and closed; nothing is written to it"
    program = """
def look(name):
    os.close(os.open(name, os.O_RDWR | os.O_NOCTTY))
done = [name for name in ("/dev/tty", "/dev/console") if not attempt(look, name)]
done += ["descriptor %d" % number for number in range(3) if os.isatty(number)]
tell(done_=done, errors={"/dev/tty": "not opened"})
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


# Kernel interfaces that no scored program needs; each has had faults that allowed a container escape

_NUMBERS = {
    "x86_64": {
        "bpf": 321,
        "perf_event_open": 298,
        "add_key": 248,
        "io_uring_setup": 425,
        "userfaultfd": 323,
        "syslog": 103,
    },
    "aarch64": {
        "bpf": 280,
        "perf_event_open": 241,
        "add_key": 217,
        "io_uring_setup": 425,
        "userfaultfd": 282,
        "syslog": 116,
    },
}

_CALL = """
ctypes, c = libc()
c.syscall.restype = ctypes.c_long
def block(*words):
    buffer = ctypes.create_string_buffer(256)
    for at, size, value in words:
        buffer[at:at + size] = value.to_bytes(size, "little")
    return buffer
done, errors = [], {}
def door(name, *args):
    ways = {name: FACTS["number"]}
    if FACTS["machine"] == "x86_64":
        ways[name + " (x32)"] = FACTS["number"] | 0x40000000
    for way, number in ways.items():
        ends = os.pipe()
        pid = os.fork()
        if pid == 0:
            value, error = call(c.syscall, ctypes.c_long(number), *args)
            os.write(ends[1], (error or "-").encode())
            os._exit(0)
        os.close(ends[1])
        answer = os.read(ends[0], 100).decode() or "killed"
        os.waitpid(pid, 0)
        errors[way] = answer
        if answer == "-":
            done.append(way)
"""


class _Door(Attack):
    host_may_refuse = True
    why = "the object that it asks for is closed with the process"
    call: str = ""

    def prepare(self, scene: Scene) -> None:
        machine = platform.machine()
        if machine not in _NUMBERS:
            raise CannotTry(f"the number of this system call is not known here for {machine}")
        scene.facts.update(machine=machine, number=_NUMBERS[machine][self.call or self.name])

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class Bpf(_Door):
    """Make an eBPF map."""

    program = (
        _CALL
        + 'door("bpf", 0, block((0, 4, 2), (4, 4, 4), (8, 4, 8), (12, 4, 1)), 72)\ntell(done_=done, errors=errors)\n'
    )


@attack
class PerfEventOpen(_Door):
    """Measure the own process with perf_event_open (a software clock)."""

    program = (
        _CALL
        + 'door("perf_event_open", block((0, 4, 1), (4, 4, 112), (40, 8, 0x61)), 0, -1, -1, 0)\n'
        + "tell(done_=done, errors=errors)\n"
    )


@attack
class Keyring(_Door):
    """Add a key to the process's kernel keyring."""

    call = "add_key"
    program = (
        _CALL
        + 'door("add_key", b"user", b"creditflow", b"x", ctypes.c_size_t(1), ctypes.c_long(-2))\n'
        + "tell(done_=done, errors=errors)\n"
    )


@attack
class IoUring(_Door):
    """Set up an io_uring, which reaches files and sockets past a system call filter."""

    call = "io_uring_setup"
    program = _CALL + 'door("io_uring_setup", 1, block())\ntell(done_=done, errors=errors)\n'


@attack
class Userfaultfd(_Door):
    """Make a userfaultfd, which exploits use to pause the kernel."""

    program = _CALL + 'door("userfaultfd", 1)\ntell(done_=done, errors=errors)\n'


@attack
class KernelLog(_Door):
    """Read the last bytes of the kernel log with syslog(2)."""

    call = "syslog"
    why = "what is read is not printed"
    program = _CALL + 'door("syslog", 3, block(), 16)\ntell(done_=done, errors=errors)\n'


@attack
class CompatSystemCalls(Attack):
    """Make a system call through the 32-bit interface (int 0x80), which filters of 64-bit calls may miss."""

    host_may_refuse = True
    why = "it asks for the number of its own session keyring"
    program = """
import ctypes, mmap
done, errors = [], {}
if FACTS["machine"] == "x86_64":
    ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        except OSError as error:
            os.write(ends[1], errno.errorcode[error.errno].encode())
            os._exit(0)
        # push rbx; mov eax, 288 (keyctl); xor ebx, ebx; mov ecx, -3; mov edx, 1; int 0x80; pop rbx; ret
        page.write(bytes.fromhex("53b82001000031dbb9fdffffffba01000000cd805bc3"))
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        value = function()
        os.write(ends[1], errno.errorcode.get(-value, "?").encode() if value < 0 else b"-")
        os._exit(0)
    os.close(ends[1])
    answer = os.read(ends[0], 100).decode() or "killed"
    os.waitpid(pid, 0)
    errors["keyctl"] = answer
    if answer == "-":
        done.append("keyctl by int 0x80")
else:
    errors["int 0x80"] = "is no door of this processor"
tell(done_=done, errors=errors)
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["machine"] = platform.machine()

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return none_done(outcome)


@attack
class EarlierRun(Attack):
    """Search for a System V message queue of an earlier run: an object made in one run must not exist in the next."""

    why = "one message queue of a random key, which the harness removes"
    program = """
ctypes, c = libc()
tell(found=call(c.msgget, FACTS["key"], 0)[0] >= 0, made=call(c.msgget, FACTS["key"], 0o1666)[0])
"""

    def prepare(self, scene: Scene) -> None:
        key = scene.facts["key"] = 0x50000000 + int(scene.token[2:8], 16)
        scene.stack.callback(_remove_queue, key)

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        run_program(scene, box, outcome, self.program)
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if "found" not in outcome.told:
            raise CannotTry("the program did not tell what it found")
        seen = "a message queue of an earlier run was found" if outcome.told["found"] else "nothing of an earlier run"
        return AttackFinding(not outcome.told["found"], seen)


def _remove_queue(key: int) -> None:
    import ctypes

    c = ctypes.CDLL(None)
    queue = c.msgget(key, 0)
    if queue >= 0:
        c.msgctl(queue, 0, None)
