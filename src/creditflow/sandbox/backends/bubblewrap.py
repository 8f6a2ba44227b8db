"""Sandbox by bubblewrap: namespaces, a read-only file system, a seccomp filter, rlimits, a cgroup if available.

Independent of rewards and other back ends. The sequence of a run: bwrap starts in the run's cgroup, sets up the box and
starts a shell in it. The shell waits (see `launch`) while this process sets the limits that are set from outside. Then
`prlimit` sets the rlimits inside the box, because processes must be counted there, and the shell starts the program.
The shell is pid 1 of the namespace and ends with the program: then all processes end. `--json-status-fd` distinguishes
the program's end from a failure of bwrap.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from creditflow.sandbox import cgroup as cgroups
from creditflow.sandbox import host, launch, seccomp
from creditflow.sandbox.base import Limit, Limits, Result, SandboxBackend, SandboxError, SandboxUnavailable
from creditflow.sandbox.common import MB, Box, by_signal
from creditflow.sandbox.process import ProcessOutput
from creditflow.sandbox.tmpfs import bound_inodes

_WORK = "/tmp/work"
_STDIN = "/dev/.stdin"
"""Path in the root file system, which is read-only when the program starts."""
_OWN_INODES = 2
"""Inodes of the tmpfs before a program or its files take one: /tmp and the working folder."""
_PROBE_S = 60.0
"""Least timeout of the programs that find out whether a Python runs here, in seconds. They take milliseconds; a short
`wall_s` is for other programs, and must not make a busy machine look unable."""
_CPU_USED = 0.5
"""Share of the CPU limit above which SIGKILL is attributed to that limit. The kernel samples CPU time at clock ticks,
so on a busy machine the exact CPU time may be much lower than the limit."""
_FILES = 200
"""Most files of `write` in one box: each takes a descriptor, and a process may have 1024."""
_SITE_PACKAGES = """
import os, site
for folder in site.getsitepackages():
    if os.path.isdir(folder): print(os.path.realpath(folder))
"""


class Bubblewrap(Box):
    """Run each program in new namespaces: no network, and only /usr of the machine's files, read-only.

    `python`: the interpreter; default: the first of this process's base interpreter, /usr/bin/python3 and
    /usr/local/bin/python3 that works in the box. It runs isolated (`-I`: a script's own folder is not on sys.path).
    `site`: whether site packages are available; without them Python starts 1 ms faster. `ro_bind`: further folders,
    readable in the box at the same path. `cgroup`: `auto`, `none`, or a version 2 folder that was delegated with the
    controllers memory and pids. Cost: about 7 ms a run.
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
        self._bwrap = host.find_bwrap()
        self._filter = seccomp.program()
        self._ro_bind = [host.folder(path) for path in ro_bind]
        self._site = site
        self._parents, self._why_no_cgroup = _parents(cgroup)
        self._prlimit = host.prlimit(self._limits)
        self._as_nobody = host.as_nobody()
        self.python = ""
        """Path of the interpreter in the box."""
        self._arguments: list[str] = []
        self._final: list[str] = []
        self._why_not_files = ""
        self._probing = True
        self._probe([python] if python else host.interpreters())
        self._probing = False

    def memory_bound(self) -> tuple[int | None, str]:
        """The memory bound of all processes of a run together, in bytes (None: no cgroup), and the reason."""
        if self._parents is None:
            return None, f"each has memory_mb, without its socket buffers; no cgroup: {self._why_no_cgroup}"
        return self._limits.memory_mb * MB, f"cgroup version {self._parents.version} at {self._parents.memory}"

    def _probe(self, candidates: Sequence[str]) -> None:
        """Take the first interpreter that runs in a box with these limits."""
        reasons: list[str] = []
        for candidate in candidates:
            try:
                self.python = candidate
                result = self._try(host.prefix_of(candidate))
            except SandboxError as error:
                reasons.append(f"{candidate}: {error}")
                continue
            if result.ok and result.stdout == b"42\n":
                return
            message = result.stderr.decode(errors="replace").strip().splitlines()
            reasons.append(
                f"{candidate}: exit code {result.exit_code}, limit {result.limit}: {message[-1] if message else ''}"
            )
        raise SandboxUnavailable(
            "sandbox back end bubblewrap: no Python runs in a box here. "
            + " ".join([*reasons, *host.restrictions()])
            + " (see python, ro_bind, memory_mb, open_files, output_bytes; before Linux 5.14 also processes)"
        )

    def _try(self, prefix: list[str]) -> Result:
        """Run a test program with this interpreter, which sees site packages only if that is wanted."""
        self._arguments, self._final = _arguments(self._limits, prefix, [], self._ro_bind)
        if not self._site:
            result = self._run(["python", "-c", _SITE_PACKAGES], b"", {})
            if not result.ok:
                return result
            hidden = result.stdout.decode(errors="replace").splitlines()
            self._arguments, self._final = _arguments(self._limits, prefix, hidden, self._ro_bind)
        return self._run(["python", "-c", "print(6 * 7)"], b"", {})

    def files_bound(self) -> tuple[int | None, str]:
        """The largest number of files and folders of a run (None: limited by time and memory only), and the reason."""
        if self._why_not_files:
            return None, f"the tmpfs has no number of inodes: {self._why_not_files}"
        return self._limits.files, "number of inodes of the tmpfs"

    def _run(self, command: list[str], stdin: bytes, files: Mapping[str, bytes]) -> Result:
        if len(files) > _FILES:
            raise SandboxError(f"bubblewrap takes {_FILES} files, {len(files)} were written")
        words = [self.python, "-I", *command[1:]] if command[0] == "python" else command
        with contextlib.ExitStack() as stack:
            try:
                box, start = self._prepared(launch.Descriptors(stack), stdin, files)
            except OSError as error:  # no descriptors, no memory
                raise SandboxError(f"a run could not be prepared: {error}") from error
            group = None if self._parents is None else self._parents.group()
            if group is not None:
                stack.callback(group.close)
                group.make(replace(self._limits, processes=self._limits.processes + 2))  # and bwrap, pid 1
            # Pushed last, so that it runs first: a group cannot be removed before its processes are dead.
            stack.callback(box.end)
            whole = [*start, *words]
            box.start(whole if group is None else group.joined(whole))
            wall_s = max(self._limits.wall_s, _PROBE_S) if self._probing else self._limits.wall_s
            end = box.run(self._bound_files, wall_s, self._limits.output_bytes)
            oom = group is not None and group.oom_kills() > 0
            return self._result(end, box.exit_code(), oom, box.started)

    def _prepared(
        self, fds: launch.Descriptors, stdin: bytes, files: Mapping[str, bytes]
    ) -> tuple[launch.Launch, list[str]]:
        """A launch, and the command line that starts its shell."""
        filter_fd = fds.sealed(self._filter)
        status, status_in = fds.pipe()
        out, out_in = fds.pipe()
        err, err_in = fds.pipe()
        channel, box_end = fds.sockets()
        passed = [filter_fd, status_in]
        words = [*self._as_nobody, self._bwrap, *self._arguments]
        for path, content in files.items():
            passed.append(fds.sealed(content))
            words += ["--perms", "0644", "--file", str(passed[-1]), f"{_WORK}/{path}"]
        if stdin:
            passed.append(fds.sealed(stdin))
            words += ["--perms", "0444", "--file", str(passed[-1]), _STDIN]
        words += ["--json-status-fd", str(status_in), "--seccomp", str(filter_fd), *self._final, "--", "/bin/sh", "-c"]
        words += [launch.SCRIPT.format(stdin=_STDIN if stdin else "/dev/null", prlimit=self._prlimit), "sh"]
        return launch.Launch(fds, status, out, err, channel, (box_end, out_in, err_in, *passed)), words

    def _bound_files(self, pid: int) -> None:
        """Bound the number of files of a box. If that is not possible here, the first run records the reason."""
        if self._why_not_files:
            return
        try:
            bound_inodes(pid, self._limits.files + _OWN_INODES)
        except ProcessLookupError:
            raise
        except OSError as error:
            if not self._probing:
                raise SandboxError(f"the number of files in a box could not be bounded: {error}") from error
            self._why_not_files = str(error)

    def _result(self, end: ProcessOutput, status: int | None, oom: bool, started: bool) -> Result:
        """The result of a run. Raises SandboxError if the program was never started."""
        out, err = end.stdout, end.stderr
        if status is None and oom:  # the kernel killed bwrap, too
            return Result(None, out, err, end.seconds, "memory")
        if not started or (status is None and end.limit is None):
            message = err.decode(errors="replace").strip()[:500] or f"it ended with {end.returncode}"
            raise SandboxError(f"bwrap failed: {message}")
        # Bubblewrap and the shell both return 128 + N if signal N ended the program.
        number = by_signal(status)
        cpu: Limit | None = "cpu" if end.cpu_s >= math.ceil(self._limits.cpu_s) * _CPU_USED else None
        by: dict[int | None, Limit | None] = {signal.SIGXCPU: cpu, signal.SIGKILL: cpu, signal.SIGXFSZ: "file_size"}
        limit = end.limit or ("memory" if oom else by.get(number))
        return Result(
            exit_code=status if limit is None and number is None else None,
            stdout=out,
            stderr=err,
            seconds=end.seconds,
            limit=limit,
            signal=number if end.limit is None else None,
        )


def _parents(choice: str) -> tuple[cgroups.Parents | None, str]:
    if choice == "none":
        return None, "not wanted"
    try:
        return cgroups.find(choice), ""
    except cgroups.NoCgroupError as error:
        if choice != "auto":
            raise SandboxUnavailable(f"sandbox back end bubblewrap: cgroup {choice}: {error}") from error
        return None, str(error)


def _arguments(
    limits: Limits, prefix: Sequence[str], hidden: Sequence[str], ro_bind: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The arguments of bwrap for every box, and those that come last; `hidden`: folders that appear empty."""
    args = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    args += ["--uid", str(host.NOBODY), "--gid", str(host.NOBODY), "--hostname", "box"]
    args += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    args += ["--proc", "/proc"]
    # Not --dev: it adds a terminal and an unlimited tmpfs, and takes 2 ms.
    for name in ("null", "zero", "random", "urandom"):
        args += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        args += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    args += ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]
    args += ["--size", str(limits.disk_mb * MB), "--tmpfs", "/tmp", "--dir", _WORK, "--chdir", _WORK]
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
    # These have no size limit, so they become read-only; until then bwrap can mount on them.
    return args, [word for folder in [*hidden, "/"] for word in ("--remount-ro", folder)]


BACKEND = SandboxBackend("bubblewrap", Bubblewrap)
