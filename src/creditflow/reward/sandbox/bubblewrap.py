"""Boxes by bubblewrap: namespaces, a read-only file system, a seccomp filter, rlimits, a cgroup where one can be had.

It knows no reward and no other back end. How a run goes: bwrap, started in the run's cgroup, sets up the box and
waits on `--block-fd`, while this process sets what can be set from outside. Then `prlimit` sets the rlimits, in the
box, since that is where processes must be counted, and becomes the program: pid 1 of its namespace, so that all ends
with it. `--json-status-fd` tells its end from a failure of bwrap: an exit code comes only if something was started.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from creditflow.reward.sandbox import cgroup as cgroups
from creditflow.reward.sandbox import seccomp
from creditflow.reward.sandbox.base import Limit, Limits, Result, SandboxError, SandboxOptionError, SandboxUnavailable
from creditflow.reward.sandbox.common import Box, Kept
from creditflow.reward.sandbox.process import Attended, attend, sealed
from creditflow.reward.sandbox.tmpfs import bound_files

_MB = 1024 * 1024
_NOBODY = 65534
_WORK = "/tmp/work"
_STDIN = "/.stdin"
_START_S = 10.0
"""How long bwrap may take to set up a box, before it is a failure; 3 ms is usual."""
_CPU_SLACK_S = 0.1
"""By how much what was used can be less than the limit for which the kernel ended a program: it counts otherwise."""
_FILES = 200
"""Files of `write` in one box: each is a descriptor, of which a process may have 1024."""
_SITE_PACKAGES = """
import os, site
for folder in site.getsitepackages():
    if os.path.isdir(folder): print(os.path.realpath(folder))
"""
_INSTALL = "install bubblewrap (apt-get install bubblewrap; dnf install bubblewrap)"

_KEEP = """
exec 8>&2 9>&0 0<{stdin} 2>/dev/null
(exec "$@" 2>&8 8>&- 9>&-)
code=$?
kill -KILL -1
for name in {names}; do
  if [ -f "$name" ] && [ ! -L "$name" ]
  then printf + >&9; head -c {bytes} "$name" | base64 -w 0 >&9; echo >&9
  else echo - >&9
  fi
done
exit $code
"""
"""Pid 1 where files are kept. Bubblewrap hands descriptors on under their numbers here, and a plain shell knows only
those up to 9: so the files leave through what was its input, and the program's input is a file. What the program left
running is killed before a file is looked at; it could otherwise put a pipe in its place."""
_KEEP_PROCESSES = 4
"""What the shell may have above the program's processes, which may all be there still, as zombies."""


class Bubblewrap(Box):
    """Runs each program in namespaces of its own: no network, nothing of the machine but a read-only /usr.

    `python`: the interpreter; default: the first of this process's base interpreter, /usr/bin/python3 and
    /usr/local/bin/python3 that works in the box. It runs isolated (`-I`: a script's own folder is not on sys.path).
    `site`: whether it has its site packages; without them it starts 1 ms sooner. `ro_bind`: further folders, readable
    in the box at the same place. `cgroup`: `auto`, `none`, or a version 2 folder that was delegated with the
    controllers memory and pids. Cost: about 6 ms a run, and 2 ms more where files are kept.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        python: str = "",
        ro_bind: Sequence[str] = (),
        cgroup: str = "auto",
        site: bool = False,
    ) -> None:
        super().__init__(limits or Limits())
        self._bwrap = _find_bwrap()
        self._filter = seccomp.program()
        self._ro_bind = [_folder(path) for path in ([ro_bind] if isinstance(ro_bind, str) else ro_bind)]
        self._site = site
        self._parents, self._why_no_cgroup = _parents(cgroup)
        self._prlimit = _prlimit(self._limits)
        self._as_nobody = _as_nobody()
        self.python = ""
        """The interpreter, as the box sees it."""
        self._arguments: list[str] = []
        self._final: list[str] = []
        self._why_not_files = ""
        self._probe([python] if python else _interpreters())

    def memory_bound(self) -> tuple[int, str]:
        """What all processes of a run can use at most, in bytes, and what sees to it."""
        total = self._limits.memory_mb * _MB
        if self._parents is not None:
            return total, f"cgroup version {self._parents.version} at {self._parents.memory}"
        bound = total * self._limits.processes + self._limits.disk_mb * _MB
        return bound, f"memory_mb of each process, times processes, and disk_mb; no cgroup: {self._why_no_cgroup}"

    def _probe(self, candidates: Sequence[str]) -> None:
        """Take the first interpreter that runs in a box with these limits."""
        reasons: list[str] = []
        for candidate in candidates:
            try:
                self.python = candidate
                result = self._try(_prefix(candidate))
            except SandboxError as error:
                reasons.append(f"{candidate}: {error}")
                continue
            if result.ok and result.stdout == b"42\n":
                return
            said = result.stderr.decode(errors="replace").strip().splitlines()
            reasons.append(
                f"{candidate}: exit code {result.exit_code}, limit {result.limit}: {said[-1] if said else ''}"
            )
        raise SandboxUnavailable(
            "sandbox back end bubblewrap: no Python runs in a box here. "
            + " ".join([*reasons, *restrictions(), "(options: python, ro_bind)"])
        )

    def _try(self, prefix: list[str]) -> Result:
        """What this interpreter says in a box; and whether the number of files can be bounded here, too."""
        self._arguments, self._final = _arguments(self._limits, prefix, [], self._ro_bind)
        try:
            result = self._python(_SITE_PACKAGES)
        except _FilesUnbounded as error:
            self._why_not_files = str(error)
            result = self._python(_SITE_PACKAGES)
        if self._site or not result.ok:
            return result if not result.ok else self._python("print(6 * 7)")
        hidden = result.stdout.decode(errors="replace").splitlines()
        self._arguments, self._final = _arguments(self._limits, prefix, hidden, self._ro_bind)
        return self._python("print(6 * 7)")

    def _python(self, code: str) -> Result:
        return self._run(["python", "-c", code], b"", (), {})[0]

    def files_bound(self) -> tuple[int | None, str]:
        """How many files and folders a run can make at most (None: as many as time and memory allow), and why so."""
        if self._why_not_files:
            return None, f"the tmpfs has no number of inodes: {self._why_not_files}"
        return self._limits.files, "number of inodes of the tmpfs"

    def _run(
        self, command: list[str], stdin: bytes, keep: tuple[str, ...], files: Mapping[str, bytes]
    ) -> tuple[Result, dict[str, Kept]]:
        if len(files) > _FILES:
            raise SandboxError(f"bubblewrap takes {_FILES} files, {len(files)} were written")
        words = command
        if command[0] == "python":
            words = [self.python, "-I", *command[1:]]
        words = [*self._prlimit, *words]
        with contextlib.ExitStack() as stack:
            fds = _Descriptors(stack)
            group = None
            if self._parents is not None:
                group = self._parents.open()
                stack.callback(group.close)
            with group.joined() if group is not None else contextlib.nullcontext():
                launch = self._launch(fds, words, stdin, keep, files)
            # Pushed last, so that it comes first: a group cannot be removed before its processes are dead.
            stack.callback(launch.end)
            end = launch.run(self._limits, group, len(keep), count_files=not self._why_not_files)
            status = launch.exit_code()
            oom = group is not None and group.oom_kills() > 0
        if status is None and oom:  # not even bwrap itself was spared
            return Result(None, end.output[launch.out], end.output[launch.err], end.seconds, "memory"), {}
        result = self._result(end, status, oom, launch)
        return result, _kept(keep, end.output[launch.kept], self._limits.output_bytes) if keep else {}

    def _launch(
        self, fds: _Descriptors, words: list[str], stdin: bytes, keep: tuple[str, ...], files: Mapping[str, bytes]
    ) -> _Launch:
        """Start bwrap, which then waits for a word from us."""
        filter_fd = fds.sealed(self._filter)
        status, status_in = fds.pipe()
        block_out, block = fds.pipe()
        out, out_in = fds.pipe()
        err, err_in = fds.pipe()
        passed = [filter_fd, status_in, block_out]
        args = [*self._as_nobody, self._bwrap, *self._arguments]
        for path, content in files.items():
            passed.append(fds.sealed(content))
            args += ["--perms", "0644", "--file", str(passed[-1]), f"{_WORK}/{path}"]
        kept = -1
        stdin_fd = fds.sealed(stdin)
        if keep:
            passed.append(stdin_fd)
            args += ["--perms", "0444", "--ro-bind-data", str(stdin_fd), _STDIN]
            kept, stdin_fd = fds.pipe()
            words = ["/bin/sh", "-c", self._keeper(keep), "sh", *words]
        for name, fd in (("--json-status-fd", status_in), ("--block-fd", block_out), ("--seccomp", filter_fd)):
            args += [name, str(fd)]
        try:
            process = subprocess.Popen(
                [*args, *self._final, "--", *words],
                stdin=stdin_fd,
                stdout=out_in,
                stderr=err_in,
                env={},  # the parent's would be readable at /proc/1/environ until the program starts
                cwd="/",
                pass_fds=passed,
                process_group=0,  # Ctrl-C at a terminal is ours to handle
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"bwrap could not be started: {error}") from error
        fds.close(stdin_fd, out_in, err_in, *passed)
        return _Launch(process, fds, status, block, out, err, kept)

    def _keeper(self, keep: tuple[str, ...]) -> str:
        # Paths are printable and relative (`inside`); the quotes are the only thing that could end one.
        names = " ".join("'./" + path.replace("'", "'\\''") + "'" for path in keep)
        return _KEEP.format(stdin=_STDIN, names=names, bytes=self._limits.output_bytes + 1)

    def _result(self, end: Attended, status: int | None, oom: bool, launch: _Launch) -> Result:
        """What a run's end means. Raises SandboxError where the program was never started."""
        out, err = end.output[launch.out], end.output[launch.err]
        limit = end.limit
        if status is None and limit is None:
            said = err.decode(errors="replace").strip()[:500] or f"it ended with {end.returncode}"
            raise SandboxError(f"bwrap failed: {said}")
        # Bubblewrap and the shell both give 128 + N where signal N ended the program.
        number = status - 128 if status is not None and 128 < status <= 128 + signal.SIGRTMAX else None
        if limit is None:
            limit = _limit_of(number, oom, end.cpu_s >= math.ceil(self._limits.cpu_s) - _CPU_SLACK_S)
        ended_by_itself = end.limit is None and number is None
        return Result(
            exit_code=status if ended_by_itself else None,
            stdout=out,
            stderr=err,
            seconds=end.seconds,
            limit=limit,
            signal=number if end.limit is None else None,
        )


class _FilesUnbounded(SandboxError):
    """The number of files in a box could not be bounded."""


class _Descriptors:
    """The descriptors of a launch; all are closed when the stack is, some before."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._open: set[int] = set()
        stack.callback(lambda: self.close(*self._open))

    def sealed(self, content: bytes) -> int:
        fd = sealed(content)
        self._open.add(fd)
        return fd

    def pipe(self) -> tuple[int, int]:
        """Its end to read from, and its end to write to."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def add(self, fd: int) -> int:
        self._open.add(fd)
        return fd

    def close(self, *fds: int) -> None:
        for fd in fds:
            if fd in self._open:
                self._open.discard(fd)
                os.close(fd)


@dataclass(slots=True)
class _Launch:
    """A bwrap that was started: it and this process's ends of what they share."""

    process: subprocess.Popen[bytes]
    fds: _Descriptors
    status: int
    block: int
    out: int
    err: int
    kept: int
    """-1 where nothing is kept."""
    program: int = -1
    """A pidfd of pid 1 of the box."""

    def run(self, limits: Limits, group: cgroups.Group | None, keep: int, *, count_files: bool) -> Attended:
        """Confine pid 1 of the box, let it go, and wait for its end; `keep`: how many files are to come out."""
        if group is not None:
            group.limit(_with_room(limits, keep))
        pid = self._program_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # dead already: the status says so
                self._confine(pid, limits, group, count_files)
        started = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            os.write(self.block, b"x")
        outputs = {self.out: "output", self.err: "output"}
        caps = {"output": limits.output_bytes}
        if keep:
            outputs[self.kept] = "kept"
            caps["kept"] = keep * (4 * (limits.output_bytes + 3) // 3 + 8)
        return attend(self.process, outputs, caps, limits.wall_s, self._kill, started=started)

    def _program_pid(self) -> int | None:
        """The box's pid 1, as the host counts; None where bwrap ended before it had one."""
        said = b""
        deadline = time.monotonic() + _START_S
        # Only one line comes before the program has ended.
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([self.status], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SandboxError(f"bwrap did not set up a box within {_START_S:.0f} s")
            chunk = os.read(self.status, 4096)
            if not chunk:
                return None
            said += chunk
        try:
            return int(json.loads(said)["child-pid"])
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"bwrap reports no child: {said[:200]!r}") from error

    def _confine(self, pid: int, limits: Limits, group: cgroups.Group | None, count_files: bool) -> None:
        # bwrap waits for us, and so its child is alive and the number still its own.
        self.program = self.fds.add(os.pidfd_open(pid))
        if group is not None:
            group.add(pid)
        if count_files:
            try:
                bound_files(pid, "/tmp", limits.disk_mb * _MB, limits.files, _START_S)
            except ProcessLookupError:
                raise
            except OSError as error:
                raise _FilesUnbounded(str(error)) from error

    def _kill(self) -> None:
        """Kill pid 1 of the box, and so all that is in it; bwrap sees that and ends."""
        if self.program < 0:
            self.process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.program, signal.SIGKILL)

    def end(self) -> None:
        """Whatever happened, leave no process."""
        if self.process.returncode is None:
            self._kill()
            self.process.kill()
            self.process.wait()
        if self.program >= 0:
            select.select([self.program], [], [], _START_S)

    def exit_code(self) -> int | None:
        """The program's, which bwrap reports only if it was started. After the end."""
        os.set_blocking(self.status, False)
        with contextlib.suppress(BlockingIOError):
            match = re.search(rb'"exit-code": (\d+)', os.read(self.status, 65536))
            if match:
                return int(match[1])
        return None


def restrictions(proc_sys: Path = Path("/proc/sys")) -> list[str]:
    """What this system does to keep ordinary users from making namespaces, and how to allow it; none: empty."""
    known = {
        "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "an AppArmor profile for /usr/bin/bwrap with `userns,`, "
            "or sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
    }
    found = []
    for name, (restricting, remedy) in known.items():
        with contextlib.suppress(OSError):
            if (proc_sys / name).read_text().strip() == restricting:
                found.append(f"This system restricts user namespaces ({name}={restricting}); it takes {remedy}.")
    return found


def _find_bwrap() -> str:
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"sandbox back end bubblewrap: needs Linux, this is {sys.platform}; use container")
    if not hasattr(os, "pidfd_open"):
        raise SandboxUnavailable("sandbox back end bubblewrap: needs Linux 5.4 or newer")
    path = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")
    if path is None:
        raise SandboxUnavailable(f"sandbox back end bubblewrap: bwrap not found; {_INSTALL}")
    return path


def _parents(choice: str) -> tuple[cgroups.Parents | None, str]:
    if choice == "none":
        return None, "not wanted"
    try:
        return cgroups.find(choice), ""
    except cgroups.NoCgroup as error:
        if choice != "auto":
            raise SandboxUnavailable(f"sandbox back end bubblewrap: cgroup {choice}: {error}") from error
        return None, str(error)


def _folder(path: str) -> str:
    if not isinstance(path, str) or not path.startswith("/") or not Path(path).exists():
        raise SandboxOptionError(
            f"sandbox back end bubblewrap: ro_bind: an existing absolute path expected, {path!r} came"
        )
    return path


def _interpreters() -> list[str]:
    base = getattr(sys, "_base_executable", None) or sys.executable
    found = [path for path in (base, "/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()]
    if not found:
        raise SandboxUnavailable("sandbox back end bubblewrap: no Python found; name one by the option `python`")
    return list(dict.fromkeys(found))


def _prefix(python: str) -> list[str]:
    """Folders beside /usr that an interpreter needs: its own installation."""
    path = Path(python)
    if not path.is_absolute():
        raise SandboxOptionError(f"sandbox back end bubblewrap: python: an absolute path expected, {python!r} came")
    prefixes = {path.parent.parent, path.resolve().parent.parent}
    home = Path.home()
    for prefix in prefixes:
        if prefix in (Path("/"), home, *home.parents):
            raise SandboxError(f"its installation folder would be {prefix}, which no box may see")
    return sorted(str(prefix) for prefix in prefixes if not prefix.is_relative_to("/usr"))


def _arguments(
    limits: Limits, prefix: Sequence[str], hidden: Sequence[str], ro_bind: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What every box has, and what comes last; `hidden`: folders that are to be empty."""
    args = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    args += ["--uid", str(_NOBODY), "--gid", str(_NOBODY), "--hostname", "box"]
    args += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    args += ["--proc", "/proc"]
    # Not --dev: it has a terminal and an unlimited tmpfs, and takes 2 ms.
    for name in ("null", "zero", "random", "urandom"):
        args += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        args += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    args += ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]
    args += ["--size", str(limits.disk_mb * _MB), "--tmpfs", "/tmp", "--dir", _WORK, "--chdir", _WORK]
    for folder in prefix:
        args += ["--ro-bind", folder, folder]
    for folder in hidden:
        args += ["--tmpfs", folder]
    for folder in ro_bind:
        args += ["--ro-bind", folder, folder]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": _WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    args += ["--clearenv"]
    for name, value in environment.items():
        args += ["--setenv", name, value]
    # These have no limits, so nothing may be written there; they can take mounts until then.
    return args, [word for folder in [*hidden, "/"] for word in ("--remount-ro", folder)]


def _with_room(limits: Limits, keep: int) -> Limits:
    """The limits of a group that also has bwrap, and the shell that hands out what is kept."""
    return replace(limits, processes=limits.processes + 1 + (_KEEP_PROCESSES if keep else 0))


def _as_nobody() -> list[str]:
    """What gives up root before bwrap starts: the kernel counts the processes of every user but root.

    `Popen(user=...)` would do it, but copies this process's page tables (3 ms at 40 MB, and more with a model in
    memory) where Popen alone uses vfork; chroot to where we are costs half a millisecond.
    """
    if os.geteuid() != 0:
        return []
    path = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise SandboxUnavailable("sandbox back end bubblewrap: chroot not found, to give up root; install coreutils")
    return [path, f"--userspec=+{_NOBODY}:+{_NOBODY}", "--groups=", "/"]


def _prlimit(limits: Limits) -> list[str]:
    """The command that sets the rlimits and becomes another. Each is of one process, but nproc.

    That counts the processes of a user in its user namespace, so of this box only (before Linux 5.14: in all boxes).
    """
    import resource

    wanted = {
        "as": (resource.RLIMIT_AS, limits.memory_mb * _MB),
        "nproc": (resource.RLIMIT_NPROC, limits.processes),
        "cpu": (resource.RLIMIT_CPU, math.ceil(limits.cpu_s)),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_mb * _MB),
        "nofile": (resource.RLIMIT_NOFILE, limits.open_files),
        "core": (resource.RLIMIT_CORE, 0),
        "msgqueue": (resource.RLIMIT_MSGQUEUE, 0),
        "memlock": (resource.RLIMIT_MEMLOCK, 65536),
    }
    if not Path("/usr/bin/prlimit").exists():
        raise SandboxUnavailable("sandbox back end bubblewrap: /usr/bin/prlimit not found; install util-linux")
    words = ["/usr/bin/prlimit"]
    for name, (kind, most) in wanted.items():
        hard = resource.getrlimit(kind)[1]
        words.append(f"--{name}={most if hard == resource.RLIM_INFINITY else min(most, hard)}")
    return words


def _limit_of(number: int | None, oom: bool, cpu_used_up: bool) -> Limit | None:
    """The limit that a signal speaks of."""
    if oom:
        return "memory"
    if number in (signal.SIGXCPU, signal.SIGKILL) and cpu_used_up:
        return "cpu"
    return "file_size" if number == signal.SIGXFSZ else None


def _kept(keep: tuple[str, ...], sent: bytes, cap: int) -> dict[str, Kept]:
    """What the shell sent: a line for each path, `-` or `+` and base64. What is no such thing was not left."""
    lines = sent.split(b"\n")
    found = {}
    for path, line in zip(keep, lines[:-1], strict=False):
        if line.startswith(b"+"):
            with contextlib.suppress(ValueError):
                content = base64.b64decode(line[1:], validate=True)
                found[path] = Kept(too_large=True) if len(content) > cap else Kept(content)
    return found
