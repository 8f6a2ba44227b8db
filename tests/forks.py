"""A Python that starts in milliseconds: its processes are forks of one that has imported torch and transformers.

    subprocess.run([fast_python(), "-m", "creditflow", "train", recipe])

`fast_python()` is the path of a launcher. It sends its arguments, environment, working folder and open files to a
fork server, waits for the forked process, passes signals on, and exits with its code. All processes of a test run share
one server, which ends after the last of them. Tests of imports, sessions, process trees, uncaught interrupts, and of
variables that a library reads when it is imported, need `sys.executable`.

`python -m tests.forks FD` is the server; FD is its listening socket.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.paths import ROOT

MODULES = (
    *("creditflow.cli.train", "creditflow.engines.local.trainer", "creditflow.engines.models.tiny"),
    *("accelerate", "pandas", "peft", "pyarrow.parquet", "sympy", "transformers.models.llama.modeling_llama"),
    # Imports of verl. Ray reads its job and raylet when it is imported, so it is left out.
    *("cachetools", "codetiming", "datasets", "fastapi", "hydra", "msgspec", "tensordict", "uvicorn", "zmq.asyncio"),
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchdata.stateful_dataloader"),
    *("transformers.image_processing_utils", "transformers.models.auto.modeling_auto", "transformers.processing_utils"),
)
"""The imports of most tests' processes. Libraries that are not installed are skipped."""

_LAUNCHER = """#!{python} -IS
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
files.remove(connection.fileno())
request = json.dumps(
    dict(argv=sys.argv[1:], environ=dict(os.environ), cwd=os.getcwd(), files=files, parent=os.getppid())
).encode()
socket.send_fds(connection, [{fork!r}], files)
connection.sendall(len(request).to_bytes(8, "big") + request)
child = int.from_bytes(connection.recv(8), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(child, number))
status = connection.recv(8) if child else b""
if not status:
    sys.exit("the fork server has ended")
code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_WITHOUT_THREADS = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The environment of the server: neither threads of libraries nor CUDA would survive a fork."""
_LEASE, _FORK = b"l", b"f"
"""First byte of a connection: a test process that keeps the server alive, or a launcher."""


@cache
def fast_python() -> str:
    """The path of the launcher. Starts the server if no other process of this test run has."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    address = f"\0creditflow-forks-{run}"  # abstract: no file is left behind
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(address)
        except OSError:  # another process starts it
            pass
        else:
            listening.listen(128)  # requests wait in the queue until the imports are done
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "tests.forks", str(listening.fileno())],
                cwd=ROOT,
                env={**os.environ, **_WITHOUT_THREADS},
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the terminal must not end it before the tests
                check=True,
            )
    lease = socket.socket(socket.AF_UNIX)
    lease.connect(address)
    lease.sendall(_LEASE)
    folder = tempfile.TemporaryDirectory(prefix="creditflow-forks-")
    _KEPT.extend((lease, folder))
    launcher = Path(folder.name) / "python"
    launcher.write_text(_LAUNCHER.format(python=sys.executable, address=address, fork=_FORK))
    launcher.chmod(0o755)
    return str(launcher)


_KEPT: list[Any] = []
"""The lease and the launcher's folder, which end with this process."""


_EXIT = {"code": 0}


@atexit.register  # before all imports of `serve`, so that it runs last
def _skip_finalization() -> None:
    """Exit without deleting every module, which takes longer than most programs here."""
    if __name__ == "__main__":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT["code"])


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int
    launcher: socket.socket


def serve(listening: socket.socket) -> None:
    """Fork a process per launcher until the last test process has ended."""
    for module in MODULES:
        if find_spec(module.partition(".")[0]):
            importlib.import_module(module)
    n_threads = len(list(Path("/proc/self/task").iterdir()))
    if n_threads > 1:
        raise RuntimeError(f"this process cannot be forked: it has {n_threads} threads")
    gc.freeze()
    leases, running = set[Any](), set[_Child]()
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                connection, _ = listening.accept()
                child = _accept(connection)
                selector.register(connection, selectors.EVENT_READ, child)
                if child:
                    running.add(child)
                    selector.register(child.pidfd, selectors.EVENT_READ, child)
                else:
                    leases.add(connection)
            elif key.fileobj in leases:
                leases.discard(key.fileobj)
                selector.unregister(key.fileobj)
            elif key.data in running:
                running.discard(key.data)
                _finish(key.data, selector)
        if not leases:
            return


def _accept(connection: socket.socket) -> _Child | None:
    """Fork a process for a launcher; None for a lease."""
    kind, files, _, _ = socket.recv_fds(connection, 1, 100)
    if kind != _FORK:
        return None
    request = _read(connection)
    pid = os.fork()
    if pid == 0:
        _become_program(request, files)
    for number in files:
        os.close(number)
    with suppress(OSError):  # `_finish` ends the program of a launcher that was killed meanwhile
        connection.sendall(pid.to_bytes(8, "big"))
    return _Child(pid, os.pidfd_open(pid), connection)


def _read(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as stream:
        length = int.from_bytes(stream.read(8), "big")
        request: dict[str, Any] = json.loads(stream.read(length))
    return request


def _finish(child: _Child, selector: selectors.BaseSelector) -> None:
    """Report the exit of a child to its launcher; if the launcher was killed, kill the child."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    with suppress(OSError):
        child.launcher.sendall(status.to_bytes(8, "big"))
    for fileobj in (child.launcher, child.pidfd):
        selector.unregister(fileobj)
    child.launcher.close()
    os.close(child.pidfd)


def _become_program(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Take over the launcher's open files, folder and environment, and run its program as a new Python would."""
    os.setpgid(0, 0)  # Ray kills the process groups of its workers
    _EXIT["code"] = 1  # an uncaught exception's
    above = 1 + max(*files, *request["files"])
    files = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in files]
    for number, target in zip(files, request["files"], strict=True):
        os.dup2(number, target)
    for before, after in pairwise(sorted({*request["files"], 2, os.sysconf("SC_OPEN_MAX")})):
        if 2 <= before < after - 1:
            os.closerange(before + 1, after)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # the old one has facts about the old file
    os.getppid = lambda: request["parent"]  # type: ignore[method-assign]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python reseeds its own generator after a fork, and torch has a fixed seed
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *added, *(path for path in sys.path[1:] if path not in added)]
    try:
        _run(*request["argv"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _EXIT["code"] = end.code if isinstance(end.code, int) else int(end.code is not None)
    else:
        _EXIT["code"] = 0
    sys.exit()


def _run(kind: str, *arguments: str) -> None:
    """Run `-m MODULE`, `-c CODE` or a script. The flags for isolation have no effect."""
    if kind in ("-I", "-P"):
        _run(*arguments)
    elif kind == "-m":
        sys.path[0], sys.argv = os.getcwd(), [*arguments]  # noqa: PTH109
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.path[0], sys.argv = str(Path(kind).resolve().parent), [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__" and os.fork() == 0:  # no child of a test process, since tests list their children
    serve(socket.socket(fileno=int(sys.argv[1])))
