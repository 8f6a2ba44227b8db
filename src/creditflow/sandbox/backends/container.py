"""Sandbox by docker or podman, with a new container per run. Independent of rewards and other back ends.

No folder of this machine is mounted: files enter as a tar archive on the container's input. The exit code and the kept
files follow a random word on its output, new in each run. Without that word the program's end is unknown, and the run
failed: a program may also end with docker's own exit codes (125 to 127, 137).
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
from typing import Literal

from creditflow.sandbox.base import Limits, Result, SandboxBackend, SandboxError, SandboxUnavailable, expect_option
from creditflow.sandbox.common import (
    END_ALL,
    MB,
    Box,
    KeptFile,
    by_signal,
    hand_out,
    handed_out,
    handed_out_bytes,
)
from creditflow.sandbox.process import Child, ProcessOutput, attend_pipes, call, start

ENGINES = ("docker", "podman")
_ANSWER_S = 20.0
_START_S = 5.0
"""Time allowed for starting a container on top of the program's time, in seconds."""
_SHELL_PROCESSES = 4
_TRAILER_BYTES = 200

_SCRIPT = """
mkdir -p /tmp/work && cd /tmp && tar -xf - || exit 125
word=$1; shift
cd /tmp/work
(exec "$@" 0</tmp/stdin)
code=$?
{end_all}
printf '\\n%s %s\\n' "$word" "$code"
{hand_out}
exit 0
"""
"""Pid 1 of the container. The program's remaining processes are killed before anything is printed or read."""


class Container(Box):
    """Run each program in a new container of `image`, which needs python, a shell, tar and coreutils.

    No network, a read-only root, one tmpfs, no capabilities, no new privileges, uid 65534. `engine`: docker or podman;
    default: the first that responds. `cpus`: cores for all its processes together. A run never pulls the image.
    Cost: 0.3 to 1 s a run, so this back end is for machines without a working bubblewrap.
    """

    def __init__(self, limits: Limits | None = None, *, image: str, engine: str = "", cpus: float = 1.0) -> None:
        super().__init__(limits or Limits())
        key, number = "sandbox back end container", isinstance(cpus, int | float) and not isinstance(cpus, bool)
        fits = isinstance(image, str) and image and not image.startswith("-")
        expect_option(fits, f"{key}: image", "a name", image)
        expect_option(engine in ("", *ENGINES), f"{key}: engine", f"one of {', '.join(ENGINES)}", engine)
        expect_option(number and 0 < cpus < math.inf, f"{key}: cpus", "a number above 0", cpus)
        self._image, self._cpus = image, cpus
        self._engine = _answering([engine] if engine else ENGINES)
        try:
            result = self._run(["python", "-c", "print(6 * 7)"], b"", (), {})[0]
        except SandboxError as error:
            raise SandboxUnavailable(
                f"sandbox back end container: {error}; is the image there? It is not pulled"
            ) from error
        if result.stdout != b"42\n":
            raise SandboxUnavailable(
                f"sandbox back end container: {image} does not run Python: {result.stderr[-200:]!r}"
            )

    def arguments(self, name: str) -> list[str]:
        """The engine's command line, up to and including the image."""
        limits = self._limits
        tmpfs = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk_mb}m,nr_inodes={limits.files}"
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

    def _run(
        self, command: list[str], stdin: bytes, keep: tuple[str, ...], files: Mapping[str, bytes]
    ) -> tuple[Result, dict[str, KeptFile]]:
        words = ["python", "-I", *command[1:]] if command[0] == "python" else command
        name = f"creditflow-{os.getpid()}-{secrets.token_hex(8)}"
        word = secrets.token_hex(16)
        script = _SCRIPT.format(
            end_all=END_ALL, hand_out=hand_out(keep, self._limits.output_bytes, "base64 | tr -d '\\n'")
        )
        args = [*self.arguments(name), "-c", script, "sh", word, *words]
        out, err, end = self._attend(args, name, _archive(files, stdin), len(keep))
        return self._result(out, err, end, word, keep)

    def _attend(self, args: list[str], name: str, archive: bytes, keep: int) -> tuple[bytes, bytes, ProcessOutput]:
        child = Child()

        def kill(pid: int) -> None:
            self._remove(name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            # Once more: the engine may have been about to create the container.
            self._remove(name)

        limits = self._limits
        most = limits.output_bytes + _TRAILER_BYTES + handed_out_bytes(keep, limits.output_bytes)
        try:
            try:
                process = start(child, [self._engine, *args], archive, process_group=0)
            except OSError as error:
                raise SandboxError(f"{self._engine} could not be started: {error}") from error
            return attend_pipes(process, most, limits.wall_s + _START_S, lambda: kill(process.pid))
        finally:
            child.end(kill)

    def _remove(self, name: str) -> None:
        """Kill and remove the container of this name, if it exists."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            call([self._engine, "rm", "--force", name], timeout=_ANSWER_S)

    def _result(
        self, out: bytes, err: bytes, end: ProcessOutput, word: str, keep: tuple[str, ...]
    ) -> tuple[Result, dict[str, KeptFile]]:
        most = self._limits.output_bytes
        output, separator, trailer = out.rpartition(b"\n" + word.encode() + b" ")
        if end.limit is not None or not separator:
            if end.limit is None:
                problem = err.decode(errors="replace").strip()[-300:] or f"it ended with {end.returncode}"
                raise SandboxError(f"{self._engine}: {problem}")
            return Result(None, out[:most], err[: max(0, most - len(out))], end.seconds, end.limit), {}
        code, *lines = trailer.split(b"\n")
        status = int(code) if code.isdigit() else -1
        number = by_signal(status)
        limit: Literal["output", "file_size", "cpu"] | None = None
        if len(output) + len(err) > most:
            limit = "output"
        elif number == signal.SIGXFSZ:
            limit = "file_size"
        elif number == signal.SIGXCPU:
            limit = "cpu"
        result = Result(
            exit_code=None if number is not None or limit is not None else status,
            stdout=output[:most],
            stderr=err[: max(0, most - len(output))],
            seconds=end.seconds,
            limit=limit,
            signal=number,
        )
        return result, handed_out(keep, lines, most)


def _answering(engines: tuple[str, ...] | list[str]) -> str:
    """The path of the first engine that responds. Raises SandboxUnavailable, with the message of each engine."""
    messages = []
    for engine in engines:
        path = shutil.which(engine)
        if path is None:
            messages.append(f"{engine} not found")
            continue
        try:
            answer = subprocess.run([path, "info"], capture_output=True, timeout=_ANSWER_S, check=False)
        except (subprocess.TimeoutExpired, OSError) as error:
            messages.append(f"{engine}: {error}")
            continue
        if answer.returncode == 0:
            return path
        lines = (answer.stderr or answer.stdout).decode(errors="replace").strip().splitlines()
        messages.append(f"{engine}: {lines[-1] if lines else f'exit code {answer.returncode}'}")
    raise SandboxUnavailable(
        f"sandbox back end container: {'; '.join(messages)}. Install docker or podman, and let this user use it"
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
