"""A worker process in another environment: start, messages, errors and end."""

from __future__ import annotations

import json
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from creditflow.errors import CreditflowError

_LOOK_S = 0.5
"""Seconds between two checks that the worker is alive."""
_SAY_EVERY_S = 30.0
"""Seconds between two lines while a worker starts."""
_TAIL = 20
"""Lines of the log in an error message."""


class SamplerError(CreditflowError):
    """The worker process of a sampler failed, or could not be started."""


class Worker:
    """A process that answers JSON messages (`vllm_worker`); its output goes to the file `log`.

    It ends with this object, and with this process however that ends.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._connection, theirs = Pipe()
        try:
            with log.open("ab") as output:
                # Its own session: Ctrl-C reaches this process alone, which then ends the worker.
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
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

    def start(self, options: Mapping[str, Any], timeout_s: float, say: Callable[[str], None]) -> None:
        """Send `start` and wait for its reply; `say` receives a line every half minute.

        Raises SamplerError after `timeout_s` seconds, or if the worker fails.
        """
        began = said = time.monotonic()
        self._send({"kind": "start", "options": options})
        while not self._answered():
            now = time.monotonic()
            if now - began > timeout_s:
                self.end()
                raise SamplerError(f"{self.name}: not ready after {timeout_s:g} s{self._tail()}")
            if now - said > _SAY_EVERY_S:
                said = now
                say(f"{self.name}: still starting after {now - began:.0f} s")
        self._receive()
        say(f"{self.name}: ready after {time.monotonic() - began:.0f} s")

    def call(self, kind: str, **message: Any) -> dict[str, Any]:
        """Send a message and return the reply. Raises SamplerError if the worker fails or ends."""
        self._send({"kind": kind, **message})
        while not self._answered():
            pass
        return self._receive()

    def end(self) -> None:
        """End the worker."""
        self._end()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._ended() from error

    def _answered(self) -> bool:
        """Wait for a reply for a moment; whether one can be read."""
        try:
            return self._connection.poll(_LOOK_S)
        except OSError as error:
            raise self._ended() from error

    def _receive(self) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if "error" in reply:
            raise SamplerError(f"{self.name}: {reply['error']}{self._tail()}")
        return reply

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
