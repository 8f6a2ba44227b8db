"""Back ends for the tests: the local ones, and stubs for the services of the others."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from creditflow.sandbox import Sandbox, SandboxUnavailable, UnsafeSandboxWarning, open_sandbox
from tests.rewards.judge_server import Answer, JudgeServer, Request

HOW = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"


def bubblewrap(**options: Any) -> Sandbox:
    """Open a bubblewrap box; skip the test if this machine allows none, but fail it for faults of our code."""
    if shutil.which("bwrap") is None:
        pytest.skip(f"bwrap is not installed: {HOW}")
    try:
        return open_sandbox("bubblewrap", **options)
    except SandboxUnavailable as error:
        if os.geteuid() == 0:
            raise
        pytest.skip(str(error))


@contextlib.contextmanager
def opened(backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Sandbox]:
    """Open a box of a back end, with a stub for its service if it needs one."""
    if backend == "bubblewrap":
        yield bubblewrap(**options)
    elif backend == "unsafe_subprocess":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeSandboxWarning)
            yield open_sandbox(backend, **options)
    elif backend == "sandbox_fusion":
        with fusion_service(run_python) as url:
            yield open_sandbox(backend, url=url, **options)
    else:
        bubblewrap()
        fake_docker(folder)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield open_sandbox(backend, image="python:3.11-slim", engine="docker", **options)


@contextlib.contextmanager
def fusion_service(answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> Iterator[str]:
    """Serve a Sandbox Fusion service with the function's answers (status and body); yield its address."""

    def reply(request: Request) -> Answer:
        status, body = answer(request.body) if request.path == "/run_code" else (404, b"")
        return Answer(status=status, body=body)

    with JudgeServer(reply) as server:
        yield server.address


def run_python(request: dict[str, Any]) -> tuple[int, bytes]:
    """Answer a request like a Sandbox Fusion service: see RunCodeRequest and RunCodeResponse of its API."""
    with tempfile.TemporaryDirectory() as name:
        for path, content in request["files"].items():
            (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / path).write_bytes(base64.b64decode(content))
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-c", request["code"]],
                input=request["stdin"].encode(),
                capture_output=True,
                cwd=name,
                env={},
                timeout=request["run_timeout"],
                check=False,
            )
            result = {
                "status": "Finished" if run.returncode == 0 else "Error",
                "return_code": run.returncode,
                "execution_time": 0.01,
                "stdout": run.stdout.decode(errors="replace"),
                "stderr": run.stderr.decode(errors="replace"),
            }
        except subprocess.TimeoutExpired as error:
            out = (error.stdout or b"").decode()
            result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": out, "stderr": ""}
        fetched = {
            path: base64.b64encode((Path(name) / path).read_bytes()).decode()
            for path in request["fetch_files"]
            if (Path(name) / path).is_file() and not (Path(name) / path).is_symlink()
        }
    status = "Success" if result["return_code"] == 0 else "Failed"
    answer = {"status": status, "message": "", "compile_result": None, "run_result": result, "files": fetched}
    return 200, json.dumps(answer).encode()


_DOCKER = """#!{python} -I
import os, signal, sys
args = sys.argv[1:]
open({log!r}, "a").write(repr(args) + chr(10))
name = args[args.index("--name") + 1] if "--name" in args else args[-1]
pid_file = os.path.join({folder!r}, name + ".pid")
if args[0] == "info":
    sys.exit(0)
if args[0] == "rm":
    if os.path.exists(pid_file):
        # The box inherits the process group of this pid, so one signal reaches all of it, even a process just forked.
        try:
            os.killpg(int(open(pid_file).read()), signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.unlink(pid_file)
    sys.exit(0)
open(pid_file + ".new", "w").write(str(os.getpid()))
os.rename(pid_file + ".new", pid_file)
words = args[args.index("--entrypoint") + 3:]
# In namespaces of its own, whatever else: the script kills all processes that it can see.
box = ["bwrap", "--unshare-all", "--hostname", name, "--die-with-parent", "--as-pid-1", "--clearenv",
       "--ro-bind", "/usr", "/usr",
       "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin",
       "--proc", "/proc", "--tmpfs", "/tmp", "--dev-bind", "/dev/null", "/dev/null", "--symlink", "/usr/bin/python3",
       "/image/python", "--setenv", "PATH", "/image:/usr/bin:/bin", "--", "/bin/sh", *words]
os.execvp("bwrap", box)
"""


def fake_docker(folder: Path) -> Path:
    """Make a `docker` in the folder that runs containers by bwrap; return the file with its command lines."""
    log = folder / "docker.log"
    log.touch()
    program = folder / "docker"
    program.write_text(_DOCKER.format(python=sys.executable, log=str(log), folder=str(folder)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return log
