"""Client for an OpenAI-compatible endpoint, with retries, time limits and bounded answers.

Redirects are refused, and keys come from environment variables alone. The client serves any caller (an agent that acts
through a frozen model, a judge) and any use of a reply. httpx is imported at the first call.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar
from urllib.parse import urlsplit

from creditflow._utils.install import needs
from creditflow.data import Message
from creditflow.errors import EndpointError, first_line
from creditflow.rollout.clock import stopped_clock

_CALLS_PER_CLIENT = 16
"""httpx checks every connection of a client's pool twice per request, with a system call for idle ones. At 256 requests
in flight, a single client takes four times the processor time of one client for every 16."""
_MOST_CONNECTIONS = 1 << 16
"""Upper limit of `max_concurrency`: a host has 65,536 ports."""
_NO_KEY = "none"
"""Sent if no key is configured: some servers require one."""
_KEY, _NO_SUCH_KEY = re.compile(r"[\x21-\x7e]+"), "holds what no key has: a space, a line's end or another alphabet"
MAX_ANSWER_BYTES = 2_000_000
"""Longer answers are not read to their end. The longest reply that a judge reads for a verdict takes at most 600,000
bytes (100,000 characters, up to six bytes each in JSON)."""
MAX_BACKOFF = 20.0
"""Seconds; see `Endpoint.backoff`."""
_SHOWN_CHARACTERS = 80
"""The part of a server's error message that our error shows."""
_READ_CHARACTERS = 4000
"""The part of a server's error message that is searched for known phrases."""
_SECRET_CHARACTERS = 8
"""Sequences of this many characters of a key are masked."""
_DRAW = random.SystemRandom()
"""For waits. With the shared random numbers, a slow endpoint would change the run's other random draws; and processes
that were forked together must draw different waits."""
_TOO_LONG_CODES = ("context_length_exceeded", "exceed_context_size_error")
_TOO_LONG = re.compile(
    r"(?i)context (?:length|size|window|limit)|prompt is too long|input is too long|too many (?:input )?tokens"
    r"|must have less than \d+ tokens|exceeds? the maximum number of tokens|input tokens? exceeds?"
)
"""Messages of servers (OpenAI, vLLM, SGLang, llama.cpp, TGI and those behind gateways) for a prompt that has no room:
some send a code, all send a text."""
_OUR_FIELDS = ("messages", "model", "stream", "n")
"""Request fields that cannot be configured; a reply is read from one complete answer."""
_OUR_HEADERS = ("accept-encoding", "content-length", "content-type", "host")
_SECRET_HEADERS = ("auth", "key", "token", "secret", "cookie")
_HEADER, _HEADER_VALUE = re.compile(r"[-A-Za-z0-9_]{1,64}"), re.compile(r"[\x20-\x7e]{0,1000}")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_SECRET = re.compile(r"\b(?:sk-[-_A-Za-z0-9]{20}|AIza[-_A-Za-z0-9]{30}|(?:hf_|gsk_|xai-|gh[pousr]_)[A-Za-z0-9]{30})")

Read = TypeVar("Read")


@dataclass(eq=False)
class AttemptError(Exception):
    """One request without a usable reply."""

    message: str
    again: bool = False
    """Whether a retry may succeed."""
    rate_limited: bool = False
    """Whether the server only limits the rate."""
    retry_after: float = 0.0
    timed_out: bool = False
    prompt_too_long: bool = False

    def __str__(self) -> str:
        return self.message


@dataclass(slots=True)
class EndpointUsage:
    """Requests, tokens and seconds of an endpoint since the last report."""

    requests: int = 0
    """Sent requests, including each try of a retried call."""
    retries: int = 0
    answered: int = 0
    without_usage: int = 0
    """Replies without token counts."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Sum over the answered requests, each from sending to reply, without waits for a slot and back-off."""
    longest: float = 0.0

    def answer(self, seconds: float, usage: tuple[int, int] | None) -> None:
        """Count one reply."""
        self.answered += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        if usage is None:
            self.without_usage += 1
        else:
            self.prompt_tokens += usage[0]
            self.completion_tokens += usage[1]

    def metrics(self, prices: Mapping[str, float] | None) -> dict[str, float]:
        """Return numbers by name: counts and sums, which add up over processes, and a maximum.

        `prices` per million prompt and completion tokens; without them, no cost is reported.
        """
        numbers: dict[str, float] = {"requests": self.requests, "retries": self.retries, "answered": self.answered}
        if self.answered:
            numbers |= {"latency_sum_s": self.seconds, "latency_max_s": self.longest}
        if self.without_usage:
            numbers["replies_without_usage"] = self.without_usage
        if self.answered > self.without_usage:
            numbers |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
            if prices is not None:
                spent = self.prompt_tokens * prices["prompt"] + self.completion_tokens * prices["completion"]
                numbers["cost"] = spent / 1e6
        return numbers


class _Connections:
    """The connections of one event loop."""

    def __init__(self, most: int) -> None:
        self.free = asyncio.Semaphore(min(most, _MOST_CONNECTIONS))
        """Grants slots in the order of the calls, unlike a queue, in which a call may pass waiting ones."""
        self.clients: dict[Any, int] = {}
        """The number of requests that each client is making, at most `_CALLS_PER_CLIENT`."""


@dataclass
class Endpoint:
    """An OpenAI-compatible endpoint. Pickles without its connections."""

    url: str
    model: str
    api_key_env: str | None
    body: Mapping[str, Any]
    """Fields of every request besides model and messages; None removes a field of the call."""
    max_concurrency: int
    """Concurrent requests in each process."""
    request_timeout: float
    """Seconds for one try."""
    retries: int
    backoff: float
    """Seconds. The n-th wait before a retry is drawn from 0 to backoff x 2^(n-1), at most `MAX_BACKOFF`, and added to
    the server's Retry-After."""
    give_up_after: float
    """Seconds since the call, after which no try begins."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request; never contains a key."""
    patient: bool = False
    """Whether rate limits (429) do not count as retries: they are waited out until `give_up_after`."""
    counts: EndpointUsage = field(default_factory=EndpointUsage)
    _connections: dict[asyncio.AbstractEventLoop, _Connections] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connections": {}, "counts": EndpointUsage()}

    async def complete(
        self, messages: Sequence[Message], read: Callable[[Any], Read], fields: Mapping[str, Any] | None = None
    ) -> Read:
        """Send messages and return the result of `read` on the answer.

        `read` takes decoded JSON and raises AttemptError if it is not a reply. Retries on 429, 5xx, broken connections
        and time-outs, not on a redirect or any other 4xx. `fields`: of this request; those of `body` take precedence.
        Raises EndpointError, with the reason and the number of tries, if no try brought a reply.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections = {other: own for other, own in self._connections.items() if not other.is_closed()}
            self._connections[loop] = _Connections(self.max_concurrency)
        connections = self._connections[loop]
        options = {name: value for name, value in {**(fields or {}), **self.body}.items() if value is not None}
        request = {**options, "model": self.model, "messages": list(messages)}
        body = json.dumps(request, ensure_ascii=False).encode("utf-8", "replace")
        tries = 0

        async def attempt() -> Read:
            nonlocal tries
            tries += 1
            self.counts.retries += tries > 1
            return await self._try(connections, body, read)

        try:
            return await retried(attempt, self.retries, self.backoff, self.give_up_after, patient=self.patient)
        except AttemptError as error:
            count = f"{tries} {'try' if tries == 1 else 'tries'}"
            raise EndpointError(
                f"{self.url[:80]}: {error} ({count})", timed_out=error.timed_out, prompt_too_long=error.prompt_too_long
            ) from error

    async def aclose(self) -> None:
        """Close the connections of this event loop; the next call opens new ones."""
        if connections := self._connections.pop(asyncio.get_running_loop(), None):
            for client in connections.clients:
                await client.aclose()

    def _make_client(self) -> Any:
        import httpx

        headers = {
            **self.headers,
            "Authorization": f"Bearer {self._key()}",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        # Requests go only to the recipe's address, and the reply must come from there: no redirects.
        return httpx.AsyncClient(headers=headers, timeout=self.request_timeout, follow_redirects=False)

    def _key(self) -> str:
        if self.api_key_env is None:
            return _NO_KEY
        if not (key := os.environ.get(self.api_key_env, "")):
            raise EndpointError(
                f"the environment variable {self.api_key_env} is not set where {self.url[:80]} is called"
            )
        if not _KEY.fullmatch(key):  # the key is never shown, not even in the error of a library that would reject it
            raise EndpointError(f"the environment variable {self.api_key_env} {_NO_SUCH_KEY}")
        return key

    async def _try(self, connections: _Connections, body: bytes, read: Callable[[Any], Read]) -> Read:
        with stopped_clock():  # of a rollout: the wait for a slot is ours, not the endpoint's
            await connections.free.acquire()
        clients = connections.clients
        try:
            client = next((free for free, n in clients.items() if n < _CALLS_PER_CLIENT), None) or self._make_client()
            clients[client] = clients.get(client, 0) + 1
            try:
                self.counts.requests += 1
                start = time.perf_counter()
                answer = await self._post(client, body)
                self.counts.answer(time.perf_counter() - start, usage_of(answer))
            finally:
                clients[client] -= 1
        finally:
            connections.free.release()
        return read(answer)

    async def _post(self, client: Any, body: bytes) -> Any:
        import httpx

        try:
            # The client's limit covers only the silence between two bytes: a slowly dripping answer would never end.
            async with (
                asyncio.timeout(self.request_timeout),
                client.stream("POST", f"{self.url}/chat/completions", content=body) as response,
            ):
                content = await _content(response)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise AttemptError(f"no answer within {self.request_timeout:g} s", again=True, timed_out=True) from error
        except httpx.TransportError as error:
            raise AttemptError(f"the connection failed ({type(error).__name__})", again=True) from error
        if not response.is_success:
            raise self._refused(response.status_code, response.headers, content)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise AttemptError(f"answered with something that is no JSON ({type(error).__name__})") from error

    def _refused(self, status: int, headers: Mapping[str, str], content: bytes) -> AttemptError:
        if status == 429 or status >= 500:
            wait = retry_after(headers)
            return AttemptError(f"status {status}", again=True, rate_limited=status == 429, retry_after=wait)
        if 300 <= status < 400:
            target = self._without_key(headers.get("location", "nowhere").partition("?")[0])
            return AttemptError(f"status {status}, a redirect, which is not followed, to {target[:_SHOWN_CHARACTERS]}")
        message = content.decode("utf-8", "replace")
        shown = self._without_key(message)[:_SHOWN_CHARACTERS]
        return AttemptError(f"status {status}, {shown}", prompt_too_long=_is_too_long(message))

    def _without_key(self, text: str) -> str:
        """Return the beginning of a text in one line, with every usable part of the key masked."""
        plain = " ".join(text[: 8 * _SHOWN_CHARACTERS].split())
        plain = "".join(char if char.isprintable() else "?" for char in plain)  # the text may reach a terminal
        if self.api_key_env is None:
            return plain
        key = self._key()
        size = min(_SECRET_CHARACTERS, len(key))
        secret = {at + i for at in range(len(plain) - size + 1) if plain[at : at + size] in key for i in range(size)}
        runs = groupby(enumerate(plain), lambda pair: pair[0] in secret)
        return "".join("***" if hidden else "".join(char for _, char in run) for hidden, run in runs)


async def _content(response: Any) -> bytes:
    """Return the body of an answer. Raises AttemptError if it is compressed, or as soon as it is too long.

    A few compressed bytes may decompress to gigabytes, and a body may be endless.
    """
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise AttemptError("answered with a compressed body, which was not asked for")
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise AttemptError(f"answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


async def retried(
    attempt: Callable[[], Awaitable[Read]],
    retries: int,
    backoff: float,
    give_up_after: float,
    *,
    patient: bool = False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Read:
    """Return the result of the first attempt that succeeds. Raises the last AttemptError if none does.

    The n-th wait is the server's Retry-After, plus a draw from 0 to backoff x 2^(n-1) seconds (at most MAX_BACKOFF), so
    that calls that were refused together do not return together ("full jitter", Brooker, Exponential Backoff and
    Jitter, AWS 2015). No try begins after `give_up_after` seconds. `patient`: rate limits do not count as `retries`.
    """
    end = time.monotonic() + give_up_after
    tries = failures = 0
    while True:
        try:
            return await attempt()
        except AttemptError as error:
            failures += not (patient and error.rate_limited)
            wait = error.retry_after + _DRAW.uniform(0.0, min(MAX_BACKOFF, backoff * 2 ** min(tries, 30)))
            if not error.again or failures > retries or time.monotonic() + wait >= end:
                raise
        tries += 1
        await sleep(wait)


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a server's retry-after-ms or Retry-After; 0 without either, and for a date."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
    return 0.0


def choice_of(answer: Any) -> tuple[Any, Any]:
    """Return the text of an answer and its finish reason. Raises AttemptError for another kind of response."""
    try:
        choice = answer["choices"][0]
        return choice["message"]["content"], choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise AttemptError("answered with something that is no chat completion") from error


def usage_of(answer: Any) -> tuple[int, int] | None:
    """Return the prompt and completion tokens of an answer; None if they are missing or invalid."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    counts = [n for n in (usage.get("prompt_tokens"), usage.get("completion_tokens")) if type(n) is int]
    return (counts[0], counts[1]) if len(counts) == 2 and all(0 <= n < 1 << 40 for n in counts) else None


def _is_too_long(message: str) -> bool:
    """Whether a server's error reports that the prompt has no room."""
    try:
        body = json.loads(message)
    except (ValueError, RecursionError):
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict) and any(error.get(name) in _TOO_LONG_CODES for name in ("code", "type")):
        return True
    return _TOO_LONG.search(message[:_READ_CHARACTERS]) is not None


# ---- validation of a recipe's endpoint options; each raises ValueError that names the option


def address_of(endpoint: object, key: str = "endpoint") -> str:
    """Return the address. It appears in reasons and metrics, so it may hold no credentials."""
    try:
        parts = urlsplit(endpoint if isinstance(endpoint, str) and endpoint.isprintable() else "")
        _ = parts.port  # raises ValueError for text and for a number that is too large
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{key}: expected an address such as http://127.0.0.1:8000/v1")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(f"{key}: expected an address without user, password, query or fragment; keys: api_key_env")
    return str(endpoint).rstrip("/")


def expect_packages() -> None:
    """Raise ConfigError if the package that calls import is missing."""
    with needs("an OpenAI-compatible endpoint", "judge"):
        import httpx  # noqa: F401


def variable_name(name: object) -> str | None:
    """Return the name of an environment variable. Errors do not repeat it: it may be the key itself."""
    if name is None:
        return None
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise ValueError("api_key_env: expected the name of an environment variable, in capitals, never the key itself")
    return name


def expect_set(name: str | None) -> None:
    """Raise ValueError if the variable is not set, or holds no valid key."""
    if name is not None and not os.environ.get(name):
        raise ValueError(f"api_key_env: the environment variable {name} is not set")
    if name is not None and not _KEY.fullmatch(os.environ[name]):
        raise ValueError(f"api_key_env: the environment variable {name} {_NO_SUCH_KEY}")


def check_headers(headers: Mapping[str, str]) -> None:
    """Check the headers of every request: none may hold a key, or be one that the client sets."""
    refuse_secrets({f"headers.{name}": value for name, value in headers.items()})
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"headers: {name!r} cannot be sent, or not with that value")
        if name.lower() in _OUR_HEADERS or any(word in name.lower() for word in _SECRET_HEADERS):
            raise ValueError(f"headers.{name}: is not to be set here; a key goes into a variable, see api_key_env")


def check_body(body: Mapping[str, Any]) -> None:
    """Check the fields of every request: none may hold a secret, or be one that the client sets; all must fit JSON."""
    refuse_secrets({f"extra_body.{name}": value for name, value in body.items()})
    check_fields("extra_body", body)


def check_fields(key: str, fields: Mapping[str, Any]) -> None:
    """Raise ValueError, with the field's name under `key`, for a reserved field or one that does not fit JSON."""
    for name, value in fields.items():
        if name in _OUR_FIELDS:
            raise ValueError(f"{key}.{name}: is not to be changed here")
        try:
            json.dumps(value, allow_nan=False, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{key}.{name}: cannot be sent as JSON: {first_line(error)}") from error


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise ValueError for values that look like keys.

    A recipe is copied into the folder of every run, and a key in it would be, too. The message does not repeat it.
    """
    for name, value in values.items():
        if _SECRET.search(str(value)):
            raise ValueError(
                f"{name}: this looks like a key; put it into an environment variable, named by api_key_env"
            )
