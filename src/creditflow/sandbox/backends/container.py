"""Sandbox by docker or podman, with a new container per run. Independent of rewards and other back ends.

No folder of this machine is mounted: files enter as a tar archive on the container's input. The exit code follows a
random word on its output, new in each run. Without that word the program's end is unknown, and the run failed: a
program may also end with docker's own exit codes (125 to 127, 137).
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from creditflow._utils.sections import expected
from creditflow.sandbox.base import Limit, Limits, Result, SandboxBackend, SandboxError, SandboxUnavailable
from creditflow.sandbox.common import MB, Box, by_signal
from creditflow.sandbox.process import Child, ProcessOutput, attend_pipes, call, start

_ANSWER_S = 20.0
_START_S = 5.0
"""Time allowed for starting a container on top of the program's time, in seconds."""
_SHELL_PROCESSES = 5
_OWN_INODES = 3
"""Inodes of the tmpfs before a program or its files take one: /tmp, the working folder and the program's input."""
_TRAILER_BYTES = 200

_SCRIPT = """
mkdir -p /tmp/work && cd /tmp && tar -xf - || exit 125
word=$1 wall_s=$2; shift 2
cd /tmp/work
(exec timeout -s KILL "$wall_s" "$@" 0</tmp/stdin)
code=$?
kill -KILL -1 2>/dev/null
while kill -0 -1 2>/dev/null && command eval '(:)' 2>/dev/null; do :; done
printf '\\n%s %s\\n' "$word" "$code"
exit 0
"""
"""Pid 1 of the container. Before it prints, it kills all other processes and waits until they are dead: a killed
process still completes its current system call. Waiting for a child process, `(:)`, also reaps the orphans; if the
process limit leaves no room for that child, the loop ends (`command eval` keeps the shell alive)."""


class Container(Box):
    """Run each program in a new container of `image`, which needs python, a shell, tar and coreutils.

    No network, a read-only root, one tmpfs, no capabilities, no new privileges, uid 65534. `engine`: docker or podman;
    default: the first that is installed. `cpus`: cores for all its processes together. A run never pulls the image.
    Cost: 0.3 to 1 s a run, so this back end is for machines without a working bubblewrap.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        image: Annotated[str, Field(pattern="^[^-]"), expected("a name")],
        engine: Literal["docker", "podman"] | None = None,
        cpus: Annotated[float, Field(gt=0)] = 1.0,
    ) -> None:
        super().__init__(limits or Limits())
        self._image, self._cpus = image, cpus
        engines = [engine] if engine else ["docker", "podman"]
        if (path := next(filter(None, map(shutil.which, engines)), None)) is None:
            raise SandboxUnavailable(f"sandbox back end container: {' and '.join(engines)} not found; install one")
        self._engine = path
        self._wall_s = self._limits.wall_s + _START_S  # a short limit is for other programs than the first
        try:
            result = self._run(["python", "-c", "print(6 * 7)"], b"", {})
        except SandboxError as error:
            raise SandboxUnavailable(
                f"sandbox back end container: {error}; is the image there (it is not pulled), and may you use {path}?"
            ) from error
        if result.stdout != b"42\n":
            raise SandboxUnavailable(
                f"sandbox back end container: {image} does not run Python: {result.stderr[-200:]!r}"
            )
        self._wall_s = self._limits.wall_s

    def arguments(self, name: str) -> list[str]:
        """The engine's command line, up to and including the image."""
        limits = self._limits
        tmpfs = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk_mb}m,nr_inodes={limits.files + _OWN_INODES}"
        ulimits = {
            "cpu": math.ceil(limits.cpu_s),
            "fsize": limits.file_mb * MB,
            "nofile": limits.open_files,
            "core": 0,
            "msgqueue": 0,
        }
        return [
            *("run", "--rm", "--interactive", "--pull", "never", "--name", name),
            *("--network", "none", "--ipc", "none", "--hostname", "box", "--log-driver", "none"),
            *("--read-only", "--tmpfs", f"/tmp:{tmpfs}", "--workdir", "/tmp"),
            *("--user", "65534:65534", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--pids-limit", str(limits.processes + _SHELL_PROCESSES), "--cpus", str(self._cpus)),
            *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
            *(word for kind, most in ulimits.items() for word in ("--ulimit", f"{kind}={most}:{most}")),
            *("--env", "HOME=/tmp/work", "--env", "TMPDIR=/tmp", "--env", "LANG=C.UTF-8"),
            *("--entrypoint", "/bin/sh", self._image),
        ]

    def _run(self, command: list[str], stdin: bytes, files: Mapping[str, bytes]) -> Result:
        words = ["python", "-I", *command[1:]] if command[0] == "python" else command
        name = f"creditflow-{os.getpid()}-{secrets.token_hex(8)}"
        word = secrets.token_hex(16)
        args = [*self.arguments(name), "-c", _SCRIPT, "sh", word, str(self._wall_s), *words]
        return self._result(self._attend(args, name, _archive(files, stdin)), word)

    def _attend(self, args: list[str], name: str, archive: bytes) -> ProcessOutput:
        child = Child()

        def kill(pid: int) -> None:
            self._remove(name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            # Once more: the engine may have been about to create the container.
            self._remove(name)

        most, wall_s = self._limits.output_bytes + _TRAILER_BYTES, self._wall_s + _START_S
        try:
            try:
                process = start(child, [self._engine, *args], archive, process_group=0)
            except OSError as error:
                raise SandboxError(f"{self._engine} could not be started: {error}") from error
            return attend_pipes(process, most, wall_s, lambda: kill(process.pid))
        finally:
            child.end(kill)

    def _remove(self, name: str) -> None:
        """Kill and remove the container of this name, if it exists."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            call([self._engine, "rm", "--force", name], timeout=_ANSWER_S)

    def _result(self, end: ProcessOutput, word: str) -> Result:
        most = self._limits.output_bytes
        output, separator, trailer = end.stdout.rpartition(b"\n" + word.encode() + b" ")
        if not separator and end.limit is None:
            problem = end.stderr.decode(errors="replace").strip()[-300:] or f"it ended with {end.returncode}"
            raise SandboxError(f"{self._engine}: {problem}")
        output = output if separator else end.stdout
        code = trailer.partition(b"\n")[0]
        status = int(code) if code.isdigit() else -1
        number = None if end.limit is not None else by_signal(status)
        late: Limit | None = "wall" if end.seconds >= self._wall_s else None
        by: dict[int | None, Limit | None] = {signal.SIGKILL: late, signal.SIGXFSZ: "file_size", signal.SIGXCPU: "cpu"}
        limit: Limit | None = end.limit or ("output" if len(output) + len(end.stderr) > most else by.get(number))
        return Result(
            exit_code=None if number is not None or limit is not None else status,
            stdout=output[:most],
            stderr=end.stderr[: max(0, most - len(output))],
            seconds=end.seconds,
            limit=limit,
            signal=number,
        )


def _archive(files: Mapping[str, bytes], stdin: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in {**{f"work/{path}": content for path, content in files.items()}, "stdin": stdin}.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.mtime = len(content), 0o644, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


BACKEND = SandboxBackend("container", Container)
