"""Sandbox on a Sandbox Fusion service, over HTTP as in verl. Trusts the service, not the program.

The protocol: POST {url}/run_code with the code and its files; the response has the service's status and the result of
the run. Any other response is a failure of the service, never a wrong answer of the program.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, HttpUrl

from creditflow._utils.sections import expected
from creditflow.sandbox.base import Limit, Limits, Result, SandboxBackend, SandboxError, SandboxUnavailable
from creditflow.sandbox.common import Box

if TYPE_CHECKING:
    import httpx

_COMPILE_S = 10
_ANSWER_S = 10.0
"""Time allowed to the service on top of the program's time, in seconds."""
_BACKOFF_S = 0.25
_DOUBLINGS = 7
"""Largest number of doublings of the pause between two calls: up to half a minute."""
_ENVELOPE_BYTES = 1_000_000


class _Run(BaseModel):
    """The result of a program."""

    model_config = ConfigDict(strict=True)

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: Annotated[int, Field(ge=-64, le=255)] | None = None
    """-N for signal N."""
    execution_time: Annotated[float, Field(ge=0, le=1e9)] | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Answer(BaseModel):
    """The answer to a request whose program was run."""

    status: Literal["Success", "Failed"]
    run_result: _Run


class SandboxFusion(Box):
    """Run Python programs on the Sandbox Fusion service at `url`; the service provides the isolation.

    A command is `["python", "-c", code]`, `["python", "-"]` with the code as standard input, or `["python", file]` with
    a written file; anything else is a ValueError, because the service takes a program's text, without arguments. The
    service receives the limits `wall_s` (whole seconds, rounded up) and `memory_mb`; `output_bytes` is enforced here;
    the service's configuration sets the others. `retries`: number of retries after no response, 429 or 5xx. Cost: one
    HTTP request a run.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        url: Annotated[str, AfterValidator(lambda url: str(HttpUrl(url))), expected("http(s)://...")],
        retries: Annotated[int, Field(ge=0)] = 2,
    ) -> None:
        import httpx

        super().__init__(limits or Limits())
        self._url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._retries = retries
        self._client = httpx.Client(follow_redirects=False)
        try:
            result = self._run(["python", "-c", "print(6 * 7)"], b"", {})
        except SandboxError as error:
            raise SandboxUnavailable(f"{error}; is the service running, and the option `url` right?") from error
        if result.stdout.strip() != b"42":
            raise SandboxUnavailable(f"sandbox_fusion at {self._url} does not run Python: {result.stderr[-200:]!r}")

    def _run(self, command: list[str], stdin: bytes, files: Mapping[str, bytes]) -> Result:
        code, stdin = (stdin, b"") if command == ["python", "-"] else (_code(command, files), stdin)
        started = time.monotonic()
        body = self._ask(
            {
                "code": _text("code", code),
                "stdin": _text("stdin", stdin),
                "language": "python",
                "compile_timeout": _COMPILE_S,
                "run_timeout": math.ceil(self._limits.wall_s),
                "memory_limit_MB": self._limits.memory_mb,
                "files": {path: base64.b64encode(content).decode() for path, content in files.items()},
                "fetch_files": [],
            },
            most=_ENVELOPE_BYTES + 6 * self._limits.output_bytes,  # six characters of JSON per byte of text
        )
        seconds = time.monotonic() - started
        return Result(None, seconds=seconds, limit="output") if body is None else self._result(body, seconds)

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
                with self._client.stream(
                    "POST", self._url, content=content, headers=headers, timeout=self._timeout()
                ) as response:
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

    def _timeout(self) -> float:
        return math.ceil(self._limits.wall_s) + _COMPILE_S + _ANSWER_S

    def _result(self, body: bytes, seconds: float) -> Result:
        """Parse a response. Raises SandboxError if the service failed or the response is malformed."""
        try:
            answer = _Answer.model_validate(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise SandboxError(f"sandbox_fusion at {self._url}: a malformed answer: {body[:200]!r}") from error
        run = answer.run_result
        code = run.return_code
        limit: Limit | None = None
        out, err = ((text or "").encode("utf-8", "surrogatepass") for text in (run.stdout, run.stderr))
        if run.status == "TimeLimitExceeded":
            code, limit = None, "wall"
        elif code is None or (answer.status == "Success") != (code == 0):
            raise SandboxError(f"sandbox_fusion at {self._url}: a contradictory answer: {body[:200]!r}")
        if len(out) + len(err) > self._limits.output_bytes:
            code, limit = None, limit or "output"
            out = out[: self._limits.output_bytes]
            err = err[: self._limits.output_bytes - len(out)]
        by_signal = code is not None and code < 0
        return Result(
            exit_code=None if by_signal else code,
            stdout=out,
            stderr=err,
            seconds=seconds if run.execution_time is None else run.execution_time,
            limit=limit,
            signal=-code if code is not None and by_signal else None,
        )


def _code(command: list[str], files: Mapping[str, bytes]) -> bytes:
    if command[0] == "python" and len(command) == 3 and command[1] == "-c":
        return command[2].encode()
    if command[0] == "python" and len(command) == 2 and command[1] in files:
        return files[command[1]]
    shown = [word[:40] for word in command[:4]]
    raise ValueError(f"sandbox_fusion runs python with ['-c', code], ['-'] or [a written file], not {shown}")


def _text(what: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"sandbox_fusion takes text only, and the {what} is not UTF-8") from error


BACKEND = SandboxBackend("sandbox_fusion", SandboxFusion)
