"""Sandbox on a Sandbox Fusion service, over HTTP as in verl. Trusts the service, not the program.

The protocol: POST {url}/run_code with the code and its files; the response has the service's status and the result of
the run. Any other response is a failure of the service, never a wrong answer of the program.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from creditflow.sandbox.base import (
    Limits,
    Result,
    SandboxBackend,
    SandboxError,
    SandboxOptionError,
    SandboxUnavailable,
    expect_option,
)
from creditflow.sandbox.common import Box, KeptFile

if TYPE_CHECKING:
    import httpx

_COMPILE_S = 10
_ANSWER_S = 10.0
"""Time allowed to the service on top of the program's time, in seconds."""
_BACKOFF_S = 0.25
_DOUBLINGS = 7
"""Largest number of doublings of the pause between two calls: up to half a minute."""
_CODES = range(-64, 256)
"""Possible return codes of the service's processes: -N for signal N."""
_MOST_S = 1e9
_ENVELOPE_BYTES = 1_000_000


class SandboxFusion(Box):
    """Run Python programs on the Sandbox Fusion service at `url`; the service provides the isolation.

    A command is `["python", "-c", code]` or `["python", file]` with a written file; anything else is a ValueError,
    because the service takes a program's text, without arguments. The service receives the limits `wall_s` (whole
    seconds, rounded up) and `memory_mb`; `output_bytes` is enforced here; the service's configuration sets the others.
    `retries`: number of retries after no response, 429 or 5xx. Cost: one HTTP request a run.
    """

    def __init__(self, limits: Limits | None = None, *, url: str, retries: int = 2) -> None:
        super().__init__(limits or Limits())
        key, whole = "sandbox back end sandbox_fusion", isinstance(retries, int) and not isinstance(retries, bool)
        expect_option(
            isinstance(url, str) and url.startswith(("http://", "https://")), f"{key}: url", "http(s)://...", url
        )
        expect_option(whole and retries >= 0, f"{key}: retries", "0 or more", retries)
        _check_url(url)
        self._url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._retries = retries
        self._client: httpx.Client | None = None
        self._client_lock = threading.Lock()
        try:
            result = self._run(["python", "-c", "print(6 * 7)"], b"", (), {})[0]
        except SandboxError as error:
            raise SandboxUnavailable(f"{error}; is the service running, and the option `url` right?") from error
        if result.stdout.strip() != b"42":
            raise SandboxUnavailable(f"sandbox_fusion at {self._url} does not run Python: {result.stderr[-200:]!r}")

    def _run(
        self, command: list[str], stdin: bytes, keep: tuple[str, ...], files: Mapping[str, bytes]
    ) -> tuple[Result, dict[str, KeptFile]]:
        started = time.monotonic()
        body = self._ask(
            {
                "code": _text("code", _code(command, files)),
                "stdin": _text("stdin", stdin),
                "language": "python",
                "compile_timeout": _COMPILE_S,
                "run_timeout": math.ceil(self._limits.wall_s),
                "memory_limit_MB": self._limits.memory_mb,
                "files": {path: base64.b64encode(content).decode() for path, content in files.items()},
                "fetch_files": list(keep),
            },
            # At most six characters of JSON per byte of text, and four of base64 per three bytes of a file.
            most=_ENVELOPE_BYTES + (6 + 2 * len(keep)) * self._limits.output_bytes,
        )
        seconds = time.monotonic() - started
        if body is None:
            return Result(None, seconds=seconds, limit="output"), {}
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SandboxError(f"sandbox_fusion at {self._url}: the answer is not JSON: {body[:80]!r}") from error
        result = self._result(answer, seconds)
        return result, self._kept(answer, keep)

    def _ask(self, request: dict[str, Any], most: int) -> bytes | None:
        """The response body; None if it is longer than `most` bytes, which only a program's output can cause."""
        import httpx

        content = json.dumps(request).encode()
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(_BACKOFF_S * 2 ** min(attempt - 1, _DOUBLINGS))
            try:
                # Not compressed: a small compressed response could expand without bound in memory.
                headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
                with self._http().stream("POST", self._url, content=content, headers=headers) as response:
                    if response.status_code == 200:
                        return self._body(response, most)
                    problem = f"status {response.status_code}"
                    if response.status_code != 429 and response.status_code < 500:
                        break
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
        raise SandboxError(f"sandbox_fusion at {self._url}: {problem}")

    def _body(self, response: httpx.Response, most: int) -> bytes | None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise SandboxError(f"sandbox_fusion at {self._url}: the answer is compressed, which was not asked for")
        deadline = time.monotonic() + self._timeout()
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > most:
                return None
            if time.monotonic() > deadline:
                raise SandboxError(f"sandbox_fusion at {self._url}: the answer took more than {self._timeout():.0f} s")
        return bytes(body)

    def _http(self) -> httpx.Client:
        import httpx

        with self._client_lock:
            if self._client is None:
                self._client = httpx.Client(timeout=self._timeout(), follow_redirects=False)
            return self._client

    def _timeout(self) -> float:
        return math.ceil(self._limits.wall_s) + _COMPILE_S + _ANSWER_S

    def _result(self, answer: object, seconds: float) -> Result:
        """Parse a response. Raises SandboxError if the service failed or the response is malformed."""
        status = _field(answer, "status", str)
        if status not in ("Success", "Failed"):
            message = _field(answer, "message", str, optional=True)
            raise SandboxError(f"sandbox_fusion at {self._url}: {status[:40]}: {str(message)[:200]}")
        run = _field(answer, "run_result", dict)
        run_status = _field(run, "status", str)
        code = _field(run, "return_code", int, optional=True)
        taken = _field(run, "execution_time", (int, float), optional=True)
        out, err = (
            (_field(run, name, str, optional=True) or "").encode("utf-8", "surrogatepass")
            for name in ("stdout", "stderr")
        )
        if (code is not None and code not in _CODES) or (taken is not None and taken > _MOST_S):
            raise SandboxError(
                f"sandbox_fusion at {self._url}: the answer is malformed: return code or time out of range"
            )
        limit = None
        if run_status == "TimeLimitExceeded":
            code, limit = None, "wall"
        elif run_status not in ("Finished", "Error") or code is None or (status == "Success") != (code == 0):
            raise SandboxError(
                f"sandbox_fusion: a contradictory answer: status {status}, run {run_status[:40]}, return code {code}"
            )
        if len(out) + len(err) > self._limits.output_bytes:
            code, limit = None, limit or "output"
            out = out[: self._limits.output_bytes]
            err = err[: self._limits.output_bytes - len(out)]
        by_signal = code is not None and code < 0
        return Result(
            exit_code=None if by_signal else code,
            stdout=out,
            stderr=err,
            seconds=float(taken) if taken is not None and math.isfinite(taken) and taken >= 0 else seconds,
            limit=limit,  # type: ignore[arg-type]
            signal=-code if code is not None and by_signal else None,
        )

    def _kept(self, answer: object, keep: tuple[str, ...]) -> dict[str, KeptFile]:
        files = _field(answer, "files", dict, optional=True) or {}
        kept_files = {}
        for path in keep:
            encoded = _field(files, path, str, optional=True)
            if encoded is not None:
                try:
                    content = base64.b64decode(encoded, validate=True)
                except (binascii.Error, ValueError) as error:
                    raise SandboxError(f"sandbox_fusion: expected base64 of file {path!r}, got other text") from error
                too_large = len(content) > self._limits.output_bytes
                kept_files[path] = KeptFile(too_large=True) if too_large else KeptFile(content)
        return kept_files


def _code(command: list[str], files: Mapping[str, bytes]) -> bytes:
    if command[0] == "python" and len(command) == 3 and command[1] == "-c":
        return command[2].encode()
    if command[0] == "python" and len(command) == 2 and command[1] in files:
        return files[command[1]]
    shown = [word[:40] for word in command[:4]]
    raise ValueError(f"sandbox_fusion runs ['python', '-c', code] and ['python', a written file], not {shown}")


def _check_url(url: str) -> None:
    import httpx

    try:
        host = httpx.URL(url).host
    except (httpx.InvalidURL, ValueError) as error:
        raise SandboxOptionError(f"sandbox back end sandbox_fusion: url: {url!r}: {error}") from error
    if not host:
        raise SandboxOptionError(f"sandbox back end sandbox_fusion: url: {url!r} has no host")


def _text(what: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"sandbox_fusion takes text only, and the {what} is not UTF-8") from error


def _field(holder: object, name: str, kind: type | tuple[type, ...], *, optional: bool = False) -> Any:
    """A field of the right type; None if it is optional and missing. Raises SandboxError."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if value is None and optional and isinstance(holder, dict):
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise SandboxError(f"sandbox_fusion: the answer has no valid {name!r}: {str(value)[:80]}")
    return value


BACKEND = SandboxBackend("sandbox_fusion", SandboxFusion)
