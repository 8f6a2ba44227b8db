"""Find the programs and interpreters for bubblewrap, and the system's restrictions on it. Runs no box."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from pathlib import Path

from creditflow.errors import ConfigError
from creditflow.sandbox.base import Limits, SandboxError, SandboxUnavailable
from creditflow.sandbox.common import MB

NOBODY = 65534
_INSTALL = "install bubblewrap (apt-get install bubblewrap; dnf install bubblewrap)"


def restrictions(proc_sys: Path = Path("/proc/sys")) -> list[str]:
    """Restrictions of this system on user namespaces, each with its remedy; an empty list without any."""
    settings = {
        "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "an AppArmor profile for /usr/bin/bwrap with `userns,`, "
            "or sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
    }
    remedies = []
    for name, (restricting, remedy) in settings.items():
        with contextlib.suppress(OSError):
            if (proc_sys / name).read_text().strip() == restricting:
                remedies.append(f"This system restricts user namespaces ({name}={restricting}); it takes {remedy}.")
    return remedies


def find_bwrap() -> str:
    """The path of bwrap. Raises SandboxUnavailable, with installation advice."""
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"sandbox back end bubblewrap: needs Linux, this is {sys.platform}; use container")
    if not hasattr(os, "pidfd_open"):
        raise SandboxUnavailable("sandbox back end bubblewrap: needs Linux 5.4 or newer")
    path = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")
    if path is None:
        raise SandboxUnavailable(f"sandbox back end bubblewrap: bwrap not found; {_INSTALL}")
    return path


def folder(path: str) -> str:
    """The path, if it is absolute and exists. Raises ConfigError."""
    if not (path.startswith("/") and Path(path).exists()):
        raise ConfigError(f"bubblewrap.ro_bind: expected an existing absolute path, got {path!r}")
    return path


def interpreters() -> list[str]:
    """Candidate Python interpreters for a box, the likeliest first. Raises SandboxUnavailable if none exists."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    candidates = [path for path in (base, "/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()]
    if not candidates:
        raise SandboxUnavailable("sandbox back end bubblewrap: no Python found; name one by the option `python`")
    return list(dict.fromkeys(candidates))


def prefix_of(python: str) -> list[str]:
    """Folders outside /usr that an interpreter needs: its own installation."""
    path = Path(python)
    if not path.is_absolute():
        raise ConfigError(f"bubblewrap.python: expected an absolute path, got {python!r}")
    prefixes = {path.parent.parent, path.resolve().parent.parent}
    home = Path.home()
    for prefix in prefixes:
        if prefix in (Path("/"), home, *home.parents):
            raise SandboxError(f"its installation folder would be {prefix}, which no box may see")
    return sorted(str(prefix) for prefix in prefixes if not prefix.is_relative_to("/usr"))


def as_nobody() -> list[str]:
    """Command prefix that drops root before bwrap starts: the kernel's process limit does not count root's processes.

    `Popen(user=...)` would also work, but it copies this process's page tables (3 ms at 40 MB, and more with a model in
    memory), while plain Popen uses vfork; chroot to / costs half a millisecond. Empty for an ordinary user.
    """
    if os.geteuid() != 0:
        return []
    path = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise SandboxUnavailable("sandbox back end bubblewrap: chroot not found, to give up root; install coreutils")
    return [path, f"--userspec=+{NOBODY}:+{NOBODY}", "--groups=", "/"]


def prlimit(limits: Limits) -> str:
    """The command of a shell that sets the rlimits of pid 1, which its children inherit.

    Each applies to one process, except nproc. It counts a user's processes in its user namespace, so those of this box
    only (before Linux 5.14: of all boxes).
    """
    import resource

    rlimits = {
        "as": (resource.RLIMIT_AS, limits.memory_mb * MB),
        "nproc": (resource.RLIMIT_NPROC, limits.processes + 1),  # and pid 1
        "cpu": (resource.RLIMIT_CPU, math.ceil(limits.cpu_s)),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_mb * MB),
        "nofile": (resource.RLIMIT_NOFILE, limits.open_files),
        "core": (resource.RLIMIT_CORE, 0),
        "msgqueue": (resource.RLIMIT_MSGQUEUE, 0),
        "memlock": (resource.RLIMIT_MEMLOCK, 65536),
    }
    if not Path("/usr/bin/prlimit").exists():
        raise SandboxUnavailable("sandbox back end bubblewrap: /usr/bin/prlimit not found; install util-linux")
    words = ["/usr/bin/prlimit", "--pid", "1"]
    for name, (kind, most) in rlimits.items():
        hard = resource.getrlimit(kind)[1]
        words.append(f"--{name}={most if hard == resource.RLIM_INFINITY else min(most, hard)}")
    return " ".join(words)
