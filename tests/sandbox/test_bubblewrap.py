"""Tests of the bubblewrap back end: its isolation, its limits, and its own failures."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from creditflow.errors import ConfigError
from creditflow.sandbox import SandboxError, SandboxUnavailable, host, open_sandbox
from creditflow.sandbox.backends import bubblewrap
from tests.rewards.processes import HANG_S
from tests.sandbox import boxes

MB = 1024 * 1024


@pytest.fixture(scope="module")
def box():
    limits = {"wall_s": 8.0, "cpu_s": 1, "memory_mb": 256, "processes": 12, "file_mb": 1, "disk_mb": 4, "files": 50}
    return boxes.bubblewrap(**limits, open_files=32)


@pytest.fixture
def public():
    """A folder that other users can enter, unlike pytest's temporary folders."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def python(box, code, **options):
    return box.run(["python", "-c", code], **options)


def lines(box, code):
    result = python(box, code)
    assert result.ok, result
    return result.stdout.decode().splitlines()


def test_bubblewrap_is_installed_by_make_test():
    if os.geteuid() == 0 and shutil.which("apt-get"):
        assert shutil.which("bwrap"), f"root on Debian without bwrap: make test installs it ({boxes.HOW})"


def test_auto_opens_bubblewrap(box):
    assert type(open_sandbox()) is type(box)


def test_program_sees_only_the_system_and_its_folder(box):
    code = (
        "import os; print(*sorted(os.listdir('/'))); print(os.getcwd());"
        "print(os.path.exists('/etc'), os.path.exists('/sys'))"
    )
    names, where, none = lines(box, code)
    assert set(names.split()) <= {"bin", "dev", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp", "usr"}
    assert (where, none) == ("/tmp/work", "False False")


@pytest.mark.parametrize("path", ["/x", "/usr/x", "/dev/x", "/proc/x", "/usr/bin/python3"])
def test_only_tmp_is_writable(box, path):
    error = python(box, f"open({path!r}, 'w')").stderr.splitlines()[-1].split(b":")[0]
    assert error in (b"OSError", b"PermissionError", b"FileNotFoundError")


def test_program_runs_as_an_unprivileged_user(box):
    code = (
        "import os\nprint(os.getppid(), os.getuid(), os.getgid(), os.getgroups())\n"
        "print(*[l.split()[1] for l in open('/proc/self/status') if l[:3] == 'Cap' or l[:10] == 'NoNewPrivs'])\n"
        "print(*[l.split()[1] for l in open('/proc/self/status') if l[:8] == 'Seccomp:'], os.uname().nodename)"
    )
    who, rights, filtered = lines(box, code)
    assert who.startswith("1 65534 65534")
    assert set(rights.split()) == {"0" * 16, "1"}
    assert filtered == "2 box"


def test_network_and_loopback_are_refused(box):
    code = (
        "import socket\nfor family in 'INET', 'INET6', 'NETLINK', 'PACKET', 'VSOCK', 'TIPC':\n"
        "    for make in socket.socket, socket.socketpair:\n"
        "        try: make(getattr(socket, 'AF_' + family), socket.SOCK_STREAM)\n"
        "        except PermissionError: print('refused')\n"
        "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))\n"
        "try: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)\n"
        "except PermissionError: print('refused')"
    )
    assert lines(box, code) == ["refused"] * 12 + ["b'x'", "refused"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGABRT])
def test_signals_end_a_program_as_outside_a_box(box, number):
    code = f"import os, signal; signal.signal({number}, signal.SIG_DFL); os.kill(os.getpid(), {number}); print('alive')"
    result = python(box, code)
    assert (result.exit_code, result.signal, result.stdout, result.stderr) == (None, number, b"", b"")


def test_orphans_are_reaped(box):
    code = "import subprocess\nfor _ in range(40): subprocess.run(['sh', '-c', 'true & exit'], check=True)"
    assert python(box, code).ok


def test_dangerous_system_calls_are_refused(box):
    # Numbers of x86_64 from <asm/unistd_64.h>; from 424 on they are the same on all architectures.
    calls = {"memfd_create": 319, "unshare": 272, "ptrace": 101, "bpf": 321, "keyctl": 250, "userfaultfd": 323,
             "perf_event_open": 298, "process_vm_readv": 310, "mount": 165, "setns": 308, "shmget": 29,
             "io_uring_setup": 425, "io_setup": 206, "clock_settime": 227, "settimeofday": 164, "adjtimex": 159,
             "syslog": 103, "kexec_load": 246, "open_tree": 428}  # fmt: skip
    if os.uname().machine != "x86_64":
        calls = {name: number for name, number in calls.items() if number >= 424}
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {calls!r}.items():\n"
        "    print(name, libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())\n"
        "print('clone3', libc.syscall(435, 0, 0), ctypes.get_errno())\n"
        "print('newest', libc.syscall(460, 0, 0), ctypes.get_errno())"
    )
    assert lines(box, code) == [f"{name} -1 1" for name in calls] + ["clone3 -1 38", "newest -1 38"]


def test_clone_of_a_user_namespace_is_refused(box):
    assert box.run(["unshare", "--user", "true"]).exit_code not in (0, None)
    if os.uname().machine == "x86_64":
        code = (
            "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
            "print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())"
        )
        assert lines(box, code) == ["-1 1"]


def test_threads_subprocesses_and_pools_work(box):
    code = (
        "import subprocess, threading, multiprocessing\n"
        "t = threading.Thread(target=print, args=('thread',), kwargs={'flush': True}); t.start(); t.join()\n"
        "print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout.strip())\n"
        "with multiprocessing.Pool(2) as p: print(p.map(abs, [-1, -2]))"
    )
    assert lines(box, code) == ["thread", "child", "[1, 2]"]


def test_processes_are_bounded(box):
    code = (
        "import os, time\nn = 1\ntry:\n    while n < 100:\n        if os.fork() == 0: time.sleep(9)\n        n += 1\n"
        "except BlockingIOError: print(n)"
    )
    assert lines(box, code) == ["12"]


def test_processes_are_counted_per_box(box):
    code = "import os, time\nfor _ in range(8):\n    if os.fork() == 0: time.sleep(9)\ntime.sleep(0.3); print('all')"
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        assert [result.stdout for result in pool.map(lambda _: python(box, code), range(3))] == [b"all\n"] * 3


def test_cpu_time_is_bounded_and_reported():
    box = boxes.bubblewrap(wall_s=60, cpu_s=1)  # on a busy machine one CPU second takes long
    result = python(box, "while True: pass")
    assert (result.limit, result.exit_code, result.signal) == ("cpu", None, signal.SIGKILL)


def test_memory_of_one_process_is_bounded(box):
    assert python(box, "b'x' * (300 << 20)").stderr.splitlines()[-1] == b"MemoryError"
    assert python(box, "len(b'x' * (150 << 20))").ok


def test_cgroup_bounds_the_memory_of_all_processes(box):
    if not box.memory_bound()[1].startswith("cgroup"):
        pytest.skip(box.memory_bound()[1])
    code = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(120 << 20); time.sleep(9)\n"
        "for _ in range(4): os.wait()"
    )
    result = python(box, code)
    assert (result.limit, result.exit_code, result.ok) == ("memory", None, False)
    assert box.memory_bound()[0] == 256 * MB


def test_without_a_cgroup_no_memory_bound_is_stated():
    box = boxes.bubblewrap(cgroup="none", memory_mb=100)
    assert box.memory_bound()[0] is None
    assert "no cgroup" in box.memory_bound()[1]
    assert python(box, "b'x' * (110 << 20)").stderr.splitlines()[-1] == b"MemoryError"


def test_file_size_disk_and_open_files_are_bounded(box):
    code = (
        "import os\n"
        "def attempt(f):\n    try: f()\n    except OSError as e: print(e.errno)\n"
        "attempt(lambda: open('a', 'wb').write(b'x' * (2 << 20)))\n"
        "def fill():\n    for i in range(9): open(f'f{i}', 'wb').write(b'x' * (900 << 10))\n"
        "attempt(fill)\nprint(sum(os.stat(f).st_size for f in os.listdir('.')) <= 4 << 20)\n"
        "attempt(lambda: [os.open('/dev/null', 0) for _ in range(40)])"
    )
    assert lines(box, code) == ["27", "28", "True", "24"]  # EFBIG, ENOSPC, EMFILE


def test_number_of_files_is_bounded_if_possible(box):
    if box.files_bound()[0] is None:
        pytest.skip(box.files_bound()[1])
    code = "n = 0\ntry:\n    while True: open(str(n), 'w'); n += 1\nexcept OSError as e: print(n, e.errno)"
    assert lines(box, code) == ["50 28"]
    for number in range(5):
        box.write(f"folder{number}/x", b"")
    assert lines(box, code) == ["40 28"]
    assert lines(boxes.bubblewrap(files=1), code) == ["1 28"]


def test_only_failures_of_bwrap_itself_raise(box, tmp_path, monkeypatch):
    code = 'import sys; print("bwrap: Can\'t mount proc: Operation not permitted", file=sys.stderr); sys.exit(1)'
    assert python(box, code).exit_code == 1
    with monkeypatch.context() as patch:
        patch.setattr(box, "_filter", b"no filter")
        with pytest.raises(SandboxError, match=r"bwrap failed: bwrap: .*seccomp"):
            python(box, "pass")
    with monkeypatch.context() as patch:
        patch.setattr(box, "_arguments", [*box._arguments, "--ro-bind", "/no/such/folder", "/x"])
        with pytest.raises(SandboxError, match="no/such/folder"):
            python(box, "pass")
    with monkeypatch.context() as patch:
        patch.setattr(box, "_bwrap", "/no/such/bwrap")
        with pytest.raises(SandboxError, match="no/such/bwrap"):
            python(box, "pass")
    assert python(box, "pass").ok


@pytest.mark.parametrize("said", ["echo '{ \"exit-code\": 0 }'", "kill -9 $$", "true"])
def test_broken_bwrap_raises_when_the_box_is_opened(said, public, monkeypatch):
    boxes.bubblewrap()
    fake = public / "bwrap"
    fake.write_text(f"#!/bin/sh\n{said}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(public))
    with pytest.raises(SandboxUnavailable, match=r"no Python runs in a box here.*bwrap failed: it ended"):
        open_sandbox("bubblewrap")


def test_missing_bwrap_error_names_the_package(monkeypatch):
    monkeypatch.setattr(host.shutil, "which", lambda *args, **options: None)
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        open_sandbox()


def test_error_on_other_systems_names_the_alternative(monkeypatch):
    monkeypatch.setattr(host.sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="needs Linux"):
        open_sandbox()


def test_namespace_restrictions_are_found_with_remedies(tmp_path):
    assert host.restrictions(tmp_path) == []
    for name, value in (("apparmor_restrict_unprivileged_userns", "1"), ("unprivileged_userns_clone", "1")):
        (tmp_path / "kernel").mkdir(exist_ok=True)
        (tmp_path / "kernel" / name).write_text(f"{value}\n")
    (said,) = host.restrictions(tmp_path)
    assert "AppArmor profile" in said
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    assert len(host.restrictions(tmp_path)) == 2


@pytest.mark.parametrize("limit", [{"memory_mb": 4}, {"open_files": 3}, {"output_bytes": 2}])
def test_limits_too_small_for_python_are_refused_on_opening(limit):
    boxes.bubblewrap()
    with pytest.raises(SandboxUnavailable, match=f"python3.*see .*{next(iter(limit))}"):
        open_sandbox("bubblewrap", **limit)


def test_options_set_the_interpreter_and_more_folders(public):
    (public / "data.txt").write_text("read me")
    box = boxes.bubblewrap(python="/usr/bin/python3", ro_bind=[str(public)])
    assert lines(box, f"import sys; print(open({str(public / 'data.txt')!r}).read(), sys.executable)") == [
        "read me /usr/bin/python3"
    ]
    assert python(box, f"open({str(public / 'new')!r}, 'w')").exit_code == 1


def test_site_packages_need_the_option_but_exit_does_not(box):
    code = "import os, site; print(sum(len(os.listdir(p)) for p in site.getsitepackages() if os.path.isdir(p))); exit()"
    assert lines(box, code) == ["0"]
    outside = subprocess.run([box.python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert lines(boxes.bubblewrap(site=True), code) == outside.split()
    code = "import os, site; open(next(p for p in site.getsitepackages() if os.path.isdir(p)) + '/x', 'w')"
    assert b"Read-only" in python(box, code).stderr


@pytest.mark.parametrize("options", [{"ro_bind": ["relative"]}, {"ro_bind": ["/no/such"]}, {"python": "python3"}])
def test_relative_paths_in_options_are_refused(options):
    boxes.bubblewrap()
    with pytest.raises(ConfigError, match="absolute path"):
        open_sandbox("bubblewrap", **options)


def test_ordinary_user_can_open_a_box():
    if os.geteuid() != 0:
        pytest.skip("the other tests are run by one")
    boxes.bubblewrap()
    import pyseccomp

    code = (
        "from creditflow.sandbox import open_sandbox\nbox = open_sandbox(processes=8, wall_s=8)\n"
        "r = box.run(['python', '-c', 'import os; print(os.getuid())'])\nprint(r.stdout, box.memory_bound()[0])\n"
        "r = box.run(['python', '-c', 'import os, time\\ntry:\\n  while True:\\n    if os.fork() == 0: time.sleep(9)\\n"
        "except BlockingIOError: print(1)'])\nprint(r.stdout)\n"
    )
    source = Path(bubblewrap.__file__).parents[3]
    # This interpreter may be in a home that other users cannot enter; load the modules from readable folders.
    paths = f"{source}:{Path(pyseccomp.__file__).parent}"
    for path in (source, Path(pyseccomp.__file__)):
        if any(not parent.stat().st_mode & 0o001 for parent in path.parents):
            pytest.skip(f"{path} is not open to others")
    if int(Path("/usr/bin/python3").resolve().name.removeprefix("python3.") or 0) < 11:
        pytest.skip("/usr/bin/python3 is older than 3.11")
    ran = subprocess.run(
        ["/usr/sbin/chroot", "--userspec=+65533:+65533", "--groups=", "/", "/usr/bin/python3", "-c", code],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["b'65534\\n' None", "b'1\\n'"], ran.stderr
