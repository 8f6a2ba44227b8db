"""Bound the total memory and processes of a box with a cgroup, if this system permits one. Independent of back ends.

Version 1 (root): a group under our own in the memory and pids hierarchies. Version 2: a group under a folder that was
delegated to us (`systemd-run --user --scope -p Delegate=yes`) or under the root of the tree.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from creditflow.errors import CreditflowError
from creditflow.sandbox.base import Limits, SandboxError
from creditflow.sandbox.common import MB
from creditflow.sandbox.process import call

_PREFIX = "creditflow"
_SELF = "creditflow-self"
"""Version 2: the subgroup for the processes of a delegated folder. Only a folder without processes can have groups."""
_LINGER_S = 2.0
"""Time allowed to a killed process to leave its group, in seconds."""
_SWEEP_S = 0.5
"""The same, for a group left by another process."""


class NoCgroupError(CreditflowError):
    """No group can be made here; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Parents:
    """Folders in which groups can be made."""

    version: int
    memory: Path
    pids: Path | None
    """None: version 2, with both controllers in one folder; or version 1 without the pids hierarchy."""

    def group(self) -> Group:
        """A new group, whose folders are not made yet."""
        # Random: a dead process with our number may have left its groups.
        name = f"{_owner()}-{os.getpid()}-{secrets.token_hex(8)}"
        return Group(self.version, [parent / name for parent in (self.memory, self.pids) if parent is not None])

    def sweep(self) -> None:
        """Remove the groups left by dead processes, and kill the processes in them."""
        for parent in (self.memory, self.pids):
            for folder in parent.glob(f"{_owner()}-*-*") if parent is not None else ():
                owner = folder.name.split("-")[2]
                if owner.isdigit() and not _alive(int(owner)):
                    _removed(folder, linger_s=_SWEEP_S)


@dataclass(frozen=True, slots=True)
class Group:
    """The group of one run."""

    version: int
    folders: list[Path]
    """The first folder has the memory controller, the last the pids controller if any."""

    def make(self, limits: Limits) -> None:
        """Make the folders and set the limits. Arrange for `close` first. Raises SandboxError."""
        try:
            for folder in self.folders:
                folder.mkdir()
            self._limit(limits)
        except OSError as error:
            raise SandboxError(f"the cgroup of a run could not be made: {error}") from error

    def _limit(self, limits: Limits) -> None:
        memory = str(limits.memory_mb * MB)
        first, last = self.folders[0], self.folders[-1]
        if self.version == 1:
            _set(first / "memory.limit_in_bytes", memory)
            # Absent if the kernel does not count swap.
            _set(first / "memory.memsw.limit_in_bytes", memory, optional=True)
        else:
            _set(first / "memory.max", memory)
            _set(first / "memory.swap.max", "0", optional=True)
            _set(first / "memory.oom.group", "1", optional=True)
        if self.version == 2 or len(self.folders) > 1:
            _set(last / "pids.max", str(limits.processes))

    def joined(self, command: Sequence[str]) -> list[str]:
        """The command, executed by a shell that has entered the group: every process of the run begins in it.

        Moving another process would wait for the kernel to synchronize all processors: 10 ms and more while they are
        busy.
        """
        file = "tasks" if self.version == 1 else "cgroup.procs"
        moves = [f"echo 0 > {shlex.quote(str(folder / file))}" for folder in self.folders]
        return ["/bin/sh", "-c", " && ".join([*moves, 'exec "$@"']), "sh", *command]

    def oom_kills(self) -> int:
        """Number of processes killed because the group's memory was exhausted."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        with contextlib.suppress(OSError):
            counts = dict(line.split(" ", 1) for line in (self.folders[0] / name).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
        return 0

    def close(self) -> None:
        """Remove the folders, and kill the processes still in them. Raises SandboxError if one stays."""
        problems = [problem for folder in self.folders if (problem := _removed(folder, _LINGER_S)) is not None]
        if problems:
            raise SandboxError(f"a cgroup could not be removed: {problems[0]}") from problems[0]


def find(choice: str = "auto") -> Parents:
    """Find the folders for groups: `auto`, or a version 2 folder with the memory and pids controllers in its subtree.

    Makes and removes a test group. Raises NoCgroupError.
    """
    if choice == "auto":
        parents = locate(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    else:
        parents = _version_2(Path(choice))
    parents.sweep()
    try:
        with contextlib.closing(parents.group()) as group:
            group.make(Limits())
            if call(group.joined(["true"])) != 0:
                raise SandboxError("no process can be moved to a new cgroup")
    except SandboxError as error:
        raise NoCgroupError(str(error)) from error
    return parents


def locate(mountinfo: str, membership: str) -> Parents:
    """Folders for groups of a process with these /proc/self/mountinfo and /proc/self/cgroup. Raises NoCgroupError."""
    ours = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        ours.update(dict.fromkeys(controllers.split(","), path))
    mounts = _mounts(mountinfo)
    if "memory" in mounts and "memory" in ours:
        memory = _folder(*mounts["memory"], ours["memory"])
        pids = _folder(*mounts["pids"], ours["pids"]) if "pids" in mounts and "pids" in ours else None
        return Parents(1, memory, pids)
    if "" in mounts and "" in ours:
        return _version_2(_folder(*mounts[""], ours[""]))
    raise NoCgroupError("no cgroup with a memory controller is mounted")


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """The mounted part of the tree and the mount point, by controller (version 2: by the empty name)."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, *_, options = after.split()  # the source between them may be empty
        names = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        mounts.update(dict.fromkeys(names, (root, point)))
    return mounts


def _folder(root: str, point: str, path: str) -> Path:
    try:
        return Path(point) / PurePosixPath(path).relative_to(root)
    except ValueError as error:
        raise NoCgroupError(f"our own cgroup, {path}, is not in what is mounted at {point}") from error


def _version_2(folder: Path) -> Parents:
    if folder.name == _SELF:
        folder = folder.parent
    try:
        if not {"memory", "pids"} <= set((folder / "cgroup.controllers").read_text().split()):
            raise NoCgroupError(f"{folder} has not the controllers memory and pids")
        if not {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
            _enable(folder)
    except OSError as error:
        raise NoCgroupError(
            f"{folder} is not delegated to us ({error.strerror}); try systemd-run --user --scope"
        ) from error
    return Parents(2, folder, None)


def _enable(folder: Path) -> None:
    """Enable the controllers for the folder's groups. If needed and permitted, first move its processes to a group."""
    control = folder / "cgroup.subtree_control"
    try:
        _set(control, "+memory +pids")
        return
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    pids = (folder / "cgroup.procs").read_text().split()
    if pids != [str(os.getpid())] and not _is_delegated(folder):
        raise NoCgroupError(f"{folder} has other processes; run under systemd-run --user --scope -p Delegate=yes")
    own = folder / _SELF
    own.mkdir(exist_ok=True)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _set(own / "cgroup.procs", pid)
    _set(control, "+memory +pids")


def _is_delegated(folder: Path) -> bool:
    """Whether systemd has marked the folder as delegated to its processes."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            return os.getxattr(folder, name) == b"1"
    return False


def _removed(folder: Path, linger_s: float) -> OSError | None:
    """Remove a group, and kill the processes in it; return the error if it is still there.

    A process that has just died stays in its group for a moment.
    """
    deadline = time.monotonic() + linger_s
    while True:
        try:
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()
            return None
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return error
        _empty(folder)
        time.sleep(0.001)


def _empty(folder: Path) -> None:
    """Kill the processes in a group."""
    with contextlib.suppress(OSError):
        for pid in map(int, (folder / "cgroup.procs").read_text().split()):
            # 0 denotes a process in a pid namespace that is hidden from us; kill(0) would hit our process group.
            if pid > 0:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _set(file: Path, value: str, *, optional: bool = False) -> None:
    try:
        fd = os.open(file, os.O_WRONLY)
    except FileNotFoundError:
        if optional:
            return
        raise
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _owner() -> str:
    """Prefix of group names, with the pid namespace: pids belong to one namespace, but several may share a folder."""
    return f"{_PREFIX}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
