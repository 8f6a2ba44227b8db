"""Starts Ray's worker processes by forking one that has imported nearly everything already.

Each of verl's eight or so actors is a process that imports for 4 to 9 seconds before it does anything: most of the
time of a short run. Ray is told to launch its workers with `fork_worker.py` (`py_executable` of its runtime
environment), which has the process here fork; what Ray gave the launched process (arguments, environment, standard
streams), the forked one gets. `python -m verl_cpu.forks FD` is that process; FD is the socket that it listens on.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

MODULES = [
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("tensordict", "torchdata.stateful_dataloader", "accelerate", "peft", "sympy"),
    *("transformers", "transformers.image_processing_utils", "transformers.modeling_utils"),
    *("transformers.processing_utils", "transformers.models.auto.modeling_auto"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"),
    *("datasets", "pandas", "pyarrow.parquet", "pydantic", "hydra", "omegaconf", "codetiming", "cachetools"),
    *("aiohttp", "httpx", "fastapi", "uvicorn", "zmq.asyncio", "msgspec", "rich", "PIL.Image"),
    "creditflow.engines.local.policy",
]
"""What verl's processes import, but for Ray: as soon as that is imported, it reads which job and raylet it is for."""

_ENVIRONMENT = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a thread would not survive the fork
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # nor would CUDA
}


@contextmanager
def forking() -> Iterator[dict[str, str]]:
    """The runtime environment for `ray.init` with which workers are forked. Shut Ray down before it ends."""
    with tempfile.TemporaryDirectory(prefix="verl_cpu") as folder:
        path = Path(folder) / "forks"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(128)  # who comes before the imports are done waits in the queue
            server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "verl_cpu.forks", str(listening.fileno())],
                stdin=subprocess.PIPE,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=[listening.fileno()],
            )
        assert server.stdin is not None
        try:
            launcher = Path(__file__).with_name("fork_worker.py")
            yield {"py_executable": f"{sys.executable} -I -S {launcher} {path}"}
        finally:
            server.stdin.close()
            server.wait(timeout=60)


def serve(listening: socket.socket) -> None:
    """Fork a worker for everyone who asks, until standard input ends: with the process that holds it, at the latest."""
    for module in MODULES:
        importlib.import_module(module)
    n_threads = len(list(Path("/proc/self/task").iterdir()))
    if n_threads > 1 or "ray" in sys.modules:
        raise RuntimeError(f"this process cannot be forked: {n_threads} threads, Ray imported: {'ray' in sys.modules}")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _become_worker(connection)
        connection.close()


def _become_worker(connection: socket.socket) -> NoReturn:
    import numpy as np

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    asked = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    connection.sendall(b"f")  # the launched process knows now that it need not become the worker itself
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.argv = asked["argv"]
    np.random.seed()  # Python's own generator is seeded anew in a fork, torch's never was random
    # The connection stays open as long as this process lives: that is what the launched process waits for.
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
