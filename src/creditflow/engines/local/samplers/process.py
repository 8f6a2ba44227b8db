"""A worker process in another environment: start, messages, errors and end."""

from __future__ import annotations

import json
import os
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from creditflow.errors import CreditflowError

_TAIL = 20
"""Lines of the log in an error message."""


class SamplerError(CreditflowError):
    """The worker process of a sampler failed, or could not be started."""


class Worker:
    """A process that answers JSON messages (`vllm_worker`); its output goes to a log in `folder`.

    It ends with this object, and with this process however that ends. If this process is killed, it removes `folder`.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, folder / "worker.log"
        self._connection, theirs = Pipe()
        try:
            with self.log.open("ab") as output:
                # Its own session: Ctrl-C reaches this process alone, which then ends the worker.
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid()), str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    env=dict(environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise SamplerError(f"{name}: {command[0]} cannot be started: {error}") from error
        finally:
            theirs.close()
        self._end = weakref.finalize(self, _end, self.process)

    def call(self, kind: str, timeout_s: float | None = None, **message: Any) -> dict[str, Any]:
        """Send a message and return the reply. Raises SamplerError if the worker fails, ends or takes too long."""
        try:
            self._connection.send_bytes(json.dumps({"kind": kind, **message}).encode())
            if not self._connection.poll(timeout_s):
                self.end()
                raise SamplerError(f"{self.name}: not ready after {timeout_s:g} s{self._tail()}")
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if "error" in reply:
            raise SamplerError(f"{self.name}: {reply['error']}{self._tail()}")
        return reply

    def end(self) -> None:
        """End the worker."""
        self._end()

    def _ended(self) -> SamplerError:
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return SamplerError(f"{self.name}: closed its connection{self._tail()}")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        advice = (
            "; the system kills a process that needs too much memory: lower actor_rollout_ref.rollout.max_num_seqs or "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"
            if code == -9
            else ""
        )
        return SamplerError(
            f"{self.name}: its process {how}{advice}. Repeat the command with the same trainer.default_local_dir to go "
            f"on from the newest checkpoint, or sample with actor_rollout_ref.rollout.name=local{self._tail()}"
        )

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "".join(f"\n  | {line}" for line in lines[-_TAIL:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker, which has nothing to save."""
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
