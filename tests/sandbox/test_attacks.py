"""Attacks beyond the probes of `self_check` and the tests of bubblewrap: each succeeds without a box, and fails in one.

Every program is bounded: it does no lasting harm without a box.
"""

import builtins
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from creditflow.sandbox import Result, Sandbox, UnsafeSandboxWarning, open_sandbox
from tests.sandbox import boxes

LIMITS = {"wall_s": 60.0, "cpu_s": 5.0, "processes": 32, "file_mb": 8, "disk_mb": 16}

PRELUDE = """
import ctypes, json, mmap, os, resource, socket, stat, sys, threading, time
FACTS = json.loads({facts!r})
PID, TOKEN, libc = FACTS["pid"], FACTS["token"], ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def expect(condition):
    if not condition:
        raise OSError
def call(function, *words):
    if function(*[ctypes.c_long(word) for word in words]) < 0:
        raise OSError(ctypes.get_errno(), "")
def read(path):
    with open(path, "rb") as file:
        return file.read()
def connect(address):
    socket.socket(socket.AF_UNIX).connect(address)
"""

PERMITTED = {
    "signal_to_a_process": "os.kill(PID, 0)",
    "environment_of_a_process": "expect(TOKEN.encode() in read('/proc/%d/environ' % PID))",
    "root_of_a_process": "read('/proc/%d/root%s' % (PID, FACTS['canary']))",
    "abstract_socket": "connect(chr(0) + TOKEN)",
    "path_socket": "connect(FACTS['socket'])",
    "threads": """
threading.stack_size(65536)
try:
    for _ in range(60):
        threading.Thread(target=time.sleep, args=(1,)).start()
except RuntimeError as error:
    raise OSError(str(error))
""",
    "disk": """
written, names = 0, ["%s/creditflow-%s-%d" % (folder, TOKEN, number) for number in range(3)
                     for folder in (".", "/tmp", "/var/tmp", "/dev", "/dev/shm", os.path.expanduser("~"))]
for name in names:
    try:
        with open(name, "xb", buffering=0) as file:
            for _ in range(7):
                written += file.write(b"x" * 1_000_000)
    except OSError:
        pass
for name in filter(os.path.exists, names):
    os.unlink(name)
expect(written > FACTS["disk_mb"] << 20)
""",
    "left_files": """
names = ["%s/%s" % (folder, TOKEN) for folder in ("/tmp", "/var/tmp", "/dev/shm")]
earlier = list(filter(os.path.exists, names))
for name in names:
    try:
        os.unlink(name) if earlier else open(name, "x").close()
    except OSError:
        pass
expect(earlier)
""",
}
"""Programs that succeed on any host; `left_files` in its second run."""

PRIVILEGED = {
    "ptrace": "call(libc.ptrace, 0x4206, PID, 0, 0)  # PTRACE_SEIZE does not stop the process",
    "message_queue": "call(libc.msgget, FACTS['key'], 0o1600)\ncall(libc.msgctl, libc.msgget(FACTS['key'], 0), 0, 0)",
    "core_pattern": "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",
    "cgroup": """
version_1 = os.path.exists("/sys/fs/cgroup/memory")
os.open("/sys/fs/cgroup/%scgroup.procs" % ("memory/" if version_1 else ""), os.O_WRONLY)
""",
    "kernel_log": "os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK)",
    "disk_device": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(7, 0))",
    "nice": "os.setpriority(os.PRIO_PROCESS, 0, -10)",
    "real_time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "host_root": """
for line in open("/proc/self/uid_map"):
    inside, outside, count = map(int, line.split())
    if inside <= os.getuid() < inside + count:
        expect(outside + os.getuid() - inside == 0)
""",
    "core_dump": """
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard if 0 <= hard < 4096 else 4096, hard))
pid = os.fork()
if pid == 0:
    os.abort()
expect(os.WCOREDUMP(os.waitpid(pid, 0)[1]))
""",
    "keyctl_by_x32_number": "call(libc.syscall, 250 | 0x40000000, 0, -3, 1)",
    "keyctl_by_int_0x80": """
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
# push rbx; mov eax, 288 (keyctl); xor ebx, ebx; mov ecx, -3; mov edx, 1; int 0x80; pop rbx; ret
page.write(bytes.fromhex("53b82001000031dbb9fdffffffba01000000cd805bc3"))
expect(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() >= 0)
""",
}
"""Programs that a host may refuse by itself: to all users but root, or by a setting of its kernel."""


@pytest.fixture(scope="module")
def facts():
    """A process of the harness with a secret in its environment, a file and two sockets, for the programs to reach."""
    token = f"creditflow-{os.getpid()}-{time.monotonic_ns()}"
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as path,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"SECRET": token}) as victim,
    ):
        canary, address = Path(folder, "canary"), Path(folder, "socket")
        canary.write_text(token)
        for listener, name in ((abstract, f"\0{token}"), (path, str(address))):
            listener.bind(name)
            listener.listen(9)
        for shared in (Path(folder), canary, address):
            shared.chmod(0o777)
        yield {
            "pid": victim.pid,
            "token": token,
            "canary": str(canary),
            "socket": str(address),
            "key": 0x50000000 + victim.pid,
            "disk_mb": LIMITS["disk_mb"],
        }
        victim.kill()


def attack(box: Sandbox, name: str, facts: dict[str, object]) -> Result:
    """Run an attack; its result, whose program has succeeded, or was refused by an OSError or a signal."""
    program = PRELUDE.format(facts=json.dumps(facts)) + {**PERMITTED, **PRIVILEGED}[name]
    for _ in range(2 if name == "left_files" else 1):
        result = box.run(["python", "-c", program])
    last = result.stderr.decode().strip().rpartition("\n")[2].partition(":")[0]
    refused = result.signal in (signal.SIGSYS, signal.SIGSEGV) or issubclass(getattr(builtins, last, int), OSError)
    assert result.ok or refused, result
    return result


@pytest.mark.parametrize("name", [*PERMITTED, *PRIVILEGED])
def test_attack_succeeds_without_a_box_and_fails_in_one(name, facts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeSandboxWarning)
        result = attack(open_sandbox("unsafe_subprocess", **LIMITS), name, facts)
    if name in PRIVILEGED and not result.ok:
        pytest.skip(f"this machine refuses it by itself: {result.stderr[-200:]!r}")
    assert result.ok, result
    assert not attack(boxes.bubblewrap(**LIMITS), name, facts).ok
