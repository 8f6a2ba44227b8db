"""The seccomp filter of a box: the refused system calls, as a BPF program for bubblewrap. Independent of boxes.

Three kinds of calls are refused: calls that widen the kernel's attack surface (namespaces, BPF, keys, io_uring,
AIO, userfaultfd, modules), calls that reach outside the box (ptrace, other processes' memory, the clock, mounts, the
parent-death signal that ends the box with the harness), and memory that no limit counts without a cgroup (memfd, System
V segments and queues, larger socket buffers). Refused calls fail with EPERM, or with ENOSYS if their callers have a
fallback.
"""

from __future__ import annotations

import errno
import functools
import socket
import tempfile

from creditflow._utils.install import install_command
from creditflow.sandbox.base import SandboxUnavailable

_DENIED = """
memfd_create memfd_secret
shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget semop semtimedop semctl mq_open
unshare setns mount umount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
swapon swapoff quotactl quotactl_fd
ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd
bpf perf_event_open lookup_dcookie fanotify_init
add_key request_key keyctl
io_uring_setup io_uring_enter io_uring_register io_setup io_submit io_getevents io_pgetevents io_cancel io_destroy
userfaultfd
clock_settime clock_settime64 clock_adjtime clock_adjtime64 settimeofday adjtimex stime
sethostname setdomainname
kexec_load kexec_file_load reboot init_module finit_module delete_module create_module
open_by_handle_at name_to_handle_at
acct syslog uselib ustat sysfs vhangup nfsservctl personality
iopl ioperm modify_ldt vm86 vm86old
mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages
landlock_create_ruleset map_shadow_stack
"""
"""Refused calls by name; names unknown to the architecture are left out of the program."""

_CLONE_NEW = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of clone for new namespaces: mount, cgroup, uts, ipc, user, pid, net."""
_PR_SET_PDEATHSIG = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_NEWEST = range(457, 512)
"""Calls newer than futex_requeue (456, Linux 6.7), with the same numbers on every architecture: unreviewed, so refused
with ENOSYS."""


@functools.cache
def program() -> bytes:
    """The BPF program; built once per process, 3 ms. Raises SandboxUnavailable without pyseccomp or libseccomp."""
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise SandboxUnavailable(
            f"sandbox back end bubblewrap: no seccomp filter can be made ({error}); "
            f"install libseccomp2 (Debian, Ubuntu) or libseccomp (Fedora), and {install_command('sandbox')}"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refused, missing = pyseccomp.ERRNO(errno.EPERM), pyseccomp.ERRNO(errno.ENOSYS)
    for name in _DENIED.split():
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0:
            rules.add_rule(refused, name)
    # glibc falls back to clone. A filter can read the flags of clone; those of clone3 are in memory.
    rules.add_rule(missing, "clone3")
    for flag in _CLONE_NEW:
        rules.add_rule(refused, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    # The box dies with the harness by a property of its pid 1. A program that gains control of pid 1 could reset it.
    rules.add_rule(refused, "prctl", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, _PR_SET_PDEATHSIG))
    # Refuse the sockets themselves, because bubblewrap brings loopback up.
    for call in ("socket", "socketpair"):
        rules.add_rule(refused, call, pyseccomp.Arg(0, pyseccomp.NE, int(socket.AF_UNIX)))
    rules.add_rule(refused, "setsockopt", pyseccomp.Arg(2, pyseccomp.MASKED_EQ, 0xFFFFFFFF, socket.SO_SNDBUF))
    for request in (_TIOCSTI, _TIOCLINUX):
        rules.add_rule(refused, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    for number in _NEWEST:
        rules.add_rule(missing, number)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
