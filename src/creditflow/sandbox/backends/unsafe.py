"""No sandbox: a plain subprocess in a temporary folder, for trusted programs only. No protection.

Only the wall clock and the output size are limited; the program has the user's files, network and rights.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from creditflow.sandbox.base import Limits, Result, SandboxBackend, SandboxError
from creditflow.sandbox.common import Box, KeptFile
from creditflow.sandbox.process import Child, attend_pipes, call, kill_group, start


class UnsafeSandboxWarning(UserWarning):
    """Warning: programs run unprotected."""


class UnsafeSubprocess(Box):
    """Run a program with all the rights of the user. Only the limits `wall_s` and `output_bytes` apply.

    `python` is the current interpreter, isolated (`-I`). The environment has only PATH, HOME, LANG and TMPDIR, as in
    the other back ends. After the program its process group is killed; a child that leaves the group, and files written
    outside the folder, stay. Cost: 1 ms above a plain subprocess.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())
        warnings.warn(
            "sandbox back end unsafe_subprocess: programs written by a model run with all your rights; use bubblewrap",
            UnsafeSandboxWarning,
            stacklevel=2,
        )

    def _run(
        self, command: list[str], stdin: bytes, keep: tuple[str, ...], files: Mapping[str, bytes]
    ) -> tuple[Result, dict[str, KeptFile]]:
        name = tempfile.mkdtemp(prefix="creditflow-unsafe-")
        with _gone_afterwards(name):
            folder = Path(name)
            for path, content in files.items():
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            result = self._process(command, stdin, name)
            return result, {path: self._kept(folder / path) for path in keep}

    def _process(self, command: list[str], stdin: bytes, folder: str) -> Result:
        words = [sys.executable, "-I", *command[1:]] if command[0] == "python" else command
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        started, child, limits = time.monotonic(), Child(), self._limits
        try:
            try:
                process = start(child, words, stdin, cwd=folder, env=env, start_new_session=True)
            except (FileNotFoundError, PermissionError) as error:
                code, reason = (127, "not found") if isinstance(error, FileNotFoundError) else (126, "not allowed")
                return Result(code, stderr=f"{words[0]}: {reason}\n".encode(), seconds=time.monotonic() - started)
            except OSError as error:
                raise SandboxError(f"unsafe_subprocess: the program could not be started: {error}") from error

            def kill() -> None:
                kill_group(process.pid)

            try:
                out, err, end = attend_pipes(process, limits.output_bytes, limits.wall_s, kill, started=started)
            finally:
                kill()  # the rest of the process group
        finally:
            child.end()
        by_signal = end.returncode < 0
        return Result(
            exit_code=None if by_signal or end.limit else end.returncode,
            stdout=out,
            stderr=err,
            seconds=end.seconds,
            limit=end.limit,
            signal=-end.returncode if by_signal and not end.limit else None,
        )

    def _kept(self, path: Path) -> KeptFile:
        """Read a plain file without following a link or waiting for a pipe."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return KeptFile()
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return KeptFile()
            with os.fdopen(fd, "rb", closefd=False) as file:
                content = file.read(self._limits.output_bytes + 1)
        finally:
            os.close(fd)
        return KeptFile(too_large=True) if len(content) > self._limits.output_bytes else KeptFile(content)


@contextlib.contextmanager
def _gone_afterwards(folder: str) -> Iterator[None]:
    """Remove the folder on exit, even if the program moved it or nested it deeply.

    Not by shutil or tempfile, which recurse.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            now = str(Path(f"/proc/self/fd/{fd}").readlink())
        except OSError:  # a system without /proc
            now = folder
        os.close(fd)
        remove = ["rm", "-rf", "--", now]
        if call(remove) != 0:
            # The program may have made folders unreadable; chmod -R does not follow links.
            call(["chmod", "-R", "u+rwx", "--", now])
            call(remove)


BACKEND = SandboxBackend("unsafe_subprocess", UnsafeSubprocess)
