"""No sandbox: a plain subprocess in a temporary folder, for trusted programs only. No protection.

Only the wall clock and the output size are limited; the program has the user's files, network and rights.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from creditflow.sandbox.base import Limits, Result, SandboxBackend, SandboxError
from creditflow.sandbox.common import Box
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

    def _run(self, command: list[str], stdin: bytes, files: Mapping[str, bytes]) -> Result:
        folder = tempfile.mkdtemp(prefix="creditflow-unsafe-")
        try:
            for path, content in files.items():
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            return self._process(command, stdin, folder)
        finally:
            call(["rm", "-rf", "--", folder])  # not by shutil, which recurses; a program may nest folders deeply

    def _process(self, command: list[str], stdin: bytes, folder: str) -> Result:
        words = [sys.executable, "-I", *command[1:]] if command[0] == "python" else command
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        child = Child()
        try:
            try:
                process = start(child, words, stdin, cwd=folder, env=env, start_new_session=True)
            except (FileNotFoundError, PermissionError) as error:
                code, reason = (127, "not found") if isinstance(error, FileNotFoundError) else (126, "not allowed")
                return Result(code, stderr=f"{words[0]}: {reason}\n".encode())
            except OSError as error:
                raise SandboxError(f"unsafe_subprocess: the program could not be started: {error}") from error

            def kill() -> None:
                kill_group(process.pid)

            try:
                end = attend_pipes(process, self._limits.output_bytes, self._limits.wall_s, kill)
            finally:
                kill()  # the rest of the process group
        finally:
            child.end()
        by_signal = end.returncode < 0
        return Result(
            exit_code=None if by_signal or end.limit else end.returncode,
            stdout=end.stdout,
            stderr=end.stderr,
            seconds=end.seconds,
            limit=end.limit,
            signal=-end.returncode if by_signal and not end.limit else None,
        )


BACKEND = SandboxBackend("unsafe_subprocess", UnsafeSubprocess)
