"""Start Ray's worker processes by forking a process that has already imported nearly everything.

Each of verl's eight or so actors is a process that spends 4 to 9 seconds on imports, most of the time of a short run.
Ray launches its workers with `fork_worker.py` (`py_executable` of its runtime environment), which requests a fork from
the process here. The forked process takes over the arguments, environment and standard streams of the launched one.
`python -m verl_cpu.forks FD` is the fork server; FD is its listening socket.
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
"""The imports of verl's processes, without Ray, which reads its job and raylet when it is imported."""

_ENVIRONMENT = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a thread would not survive the fork
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # nor would CUDA
}


@contextmanager
def forking() -> Iterator[dict[str, str]]:
    """Run a fork server; yields the runtime environment for `ray.init`. Shut Ray down inside the context."""
    with tempfile.TemporaryDirectory(prefix="verl_cpu") as folder:
        path = Path(folder) / "forks"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(128)  # requests wait in the queue until the imports are done
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
            server.wait(timeout=300)


def serve(listening: socket.socket) -> None:
    """Fork a worker per connection, until standard input ends, at the latest with the parent process."""
    for module in MODULES:
        importlib.import_module(module)
    n_threads = len(list(Path("/proc/self/task").iterdir()))
    if n_threads > 1 or "ray" in sys.modules:
        raise RuntimeError(f"this process cannot be forked: {n_threads} threads, Ray imported: {'ray' in sys.modules}")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children are not waited for
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
    connection.sendall(b"f")  # confirms the fork, so the launched process does not become the worker itself
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.argv = asked["argv"]
    np.random.seed()  # Python reseeds its own generator after a fork, and torch has a fixed seed
    # The connection stays open while this process lives; the launched process waits for its end.
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
