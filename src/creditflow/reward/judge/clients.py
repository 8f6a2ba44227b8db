"""Puts a question to a judge: over HTTP to an OpenAI-compatible endpoint, or to a model of this process.

It must not know what is judged, nor how the reply is read. The openai client and tenacity are imported at the first
call.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import groupby
from typing import Any, Literal, Protocol

from creditflow.reward.judge.bounded import AnswerRefused, bounded_to
from creditflow.rollout.client import GenerationRequest, ModelClient
from creditflow.rollout.scheduler import Scheduler
from creditflow.trajectory import Message

INSTALL = "the judge of an endpoint needs openai and tenacity: pip install creditflow[judge]"

_CALLS_PER_CLIENT = 16
"""The connection pool under the openai client looks at each of its connections twice per request, and asks the system
about the idle ones: at 256 in flight, one pool made 417 calls/s where eight made 625. (Its aiohttp transport is faster
still, but takes a connection that was refused for one that timed out.)"""
_NO_KEY = "none"
"""Sent where no key is named: the client insists on one."""
MAX_ANSWER_BYTES = 2_000_000
"""A longer answer is not read to its end. The longest reply that is read for a verdict takes at most 600,000 (six for
each of 100,000 characters, as JSON may write them)."""
_SHOWN_CHARACTERS = 80
"""Of what a server says where it refuses."""
_SECRET_CHARACTERS = 8
"""So many of a key, one after the other, are not shown."""
_UNUSABLE_ENDS = {
    "length": "the reply was cut off at max_tokens, and so may be its verdict",
    "content_filter": "the reply was withheld by a content filter",
}


class JudgeError(Exception):
    """The judge gave no usable reply; the message says who, what and after how many tries."""

    def __init__(self, message: str, status: Literal["failed", "timeout"] = "failed") -> None:
        super().__init__(message)
        self.status: Literal["failed", "timeout"] = status


@dataclass(slots=True)
class Counts:
    """What a judge cost since it was last asked."""

    requests: int = 0
    """Sent, each try of a retried call included."""
    retries: int = 0
    answered: int = 0
    without_usage: int = 0
    """Replies that did not say how many tokens they took."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Sum over the answered requests, each from sending to reply; waiting for a slot and back-off are not in it."""
    longest: float = 0.0

    def answer(self, seconds: float, usage: tuple[int, int] | None) -> None:
        """One more reply."""
        self.answered += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        if usage is None:
            self.without_usage += 1
        else:
            self.prompt_tokens += usage[0]
            self.completion_tokens += usage[1]

    def metrics(self, prices: Mapping[str, float] | None) -> dict[str, float]:
        """Numbers by name: counts and sums, which those of other processes can be added to, and a maximum.

        `prices` per million prompt and completion tokens; without, no cost is reported.
        """
        found: dict[str, float] = {"requests": self.requests, "retries": self.retries, "answered": self.answered}
        if self.answered:
            found |= {"latency_sum_s": self.seconds, "latency_max_s": self.longest}
        if self.without_usage:
            found["replies_without_usage"] = self.without_usage
        if self.answered > self.without_usage:
            found |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
            if prices is not None:
                spent = self.prompt_tokens * prices["prompt"] + self.completion_tokens * prices["completion"]
                found["cost"] = spent / 1e6
        return found


class Client(Protocol):
    """Whom a judge asks."""

    counts: Counts

    async def ask(self, messages: Sequence[Message]) -> str:
        """The reply, whole. Raises JudgeError where there is none."""
        ...

    def identity(self) -> str:
        """All that the reply depends on but the messages."""
        ...

    async def aclose(self) -> None:
        """Close connections of this event loop."""
        ...


# ---- endpoints


class _TryError(Exception):
    """One request that brought no reply."""

    def __init__(
        self,
        message: str,
        *,
        again: bool = False,
        retry_after: float = 0.0,
        status: Literal["failed", "timeout"] = "failed",
    ) -> None:
        super().__init__(message)
        self.again = again
        self.retry_after = retry_after
        self.status: Literal["failed", "timeout"] = status


@dataclass
class _Line:
    """The connections of one event loop, at most `size` requests at a time."""

    slots: asyncio.Semaphore
    make_client: Callable[[], Any]
    retrying: Any
    clients: list[Any] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)

    @contextmanager
    def client(self) -> Iterator[Any]:
        """The first client with a connection to spare."""
        place = next((i for i, n in enumerate(self.busy) if n < _CALLS_PER_CLIENT), len(self.busy))
        if place == len(self.clients):
            self.clients.append(self.make_client())
            self.busy.append(0)
        self.busy[place] += 1
        try:
            yield self.clients[place]
        finally:
            self.busy[place] -= 1


@dataclass
class Endpoint:
    """An OpenAI-compatible endpoint. Travels between processes without its connections."""

    url: str
    model: str
    api_key_env: str | None
    body: Mapping[str, Any]
    """Fields of the request beside the messages."""
    max_concurrency: int
    request_timeout: float
    retries: int
    backoff: float
    """Seconds; the n-th wait before a retry is drawn from 0 to backoff x 2^(n-1), at most `MAX_BACKOFF`, and comes on
    top of what the server asked for (Retry-After)."""
    give_up_after: float
    """Seconds since the first try after which no other is begun."""
    counts: Counts = field(default_factory=Counts)
    _lines: dict[asyncio.AbstractEventLoop, _Line] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lines": {}, "counts": Counts()}

    def identity(self) -> str:
        """Address and request; the key's name is no part of it."""
        return json.dumps([self.url, self.model, dict(self.body)], sort_keys=True)

    async def ask(self, messages: Sequence[Message]) -> str:
        """The reply; retried on 429, 5xx, broken connections and time-outs, not on a redirect or any other 4xx."""
        line = self._line()
        tries = 0

        async def once() -> str:
            nonlocal tries
            tries += 1
            self.counts.retries += tries > 1
            return await self._try(line, messages)

        try:
            # A copy: tenacity keeps the state of a call in the object that is called.
            reply: str = await line.retrying.copy()(once)
        except _TryError as error:
            count = f"{tries} {'try' if tries == 1 else 'tries'}"
            raise JudgeError(f"{self.url[:80]}: {error} ({count})", error.status) from error
        return reply

    async def aclose(self) -> None:
        """Closes the connections of this event loop; the next call makes new ones."""
        if line := self._lines.pop(asyncio.get_running_loop(), None):
            for client in line.clients:
                await client.close()

    def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            self._lines = {other: line for other, line in self._lines.items() if not other.is_closed()}
            retrying = retries_of(self.retries, self.backoff, self.give_up_after)
            self._lines[loop] = _Line(asyncio.Semaphore(self.max_concurrency), self._make_client, retrying)
        return self._lines[loop]

    def _make_client(self) -> Any:
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Omit
        except ImportError as error:
            raise JudgeError(INSTALL) from error
        key = self._key()
        # All that the client would else take from OPENAI_* variables is said outright: another's endpoint must not be
        # sent a key, an organization or a project that was meant for OpenAI.
        headers: dict[str, Any] = {"OpenAI-Organization": Omit(), "OpenAI-Project": Omit()}
        headers |= {"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"}
        # httpx2 since openai 3, httpx before.
        library = importlib.import_module(DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
        http = DefaultAsyncHttpxClient(
            # What is judged goes to the address of the recipe, and the verdict comes from there.
            follow_redirects=False,
            timeout=self.request_timeout,
            event_hooks={"response": [bounded_to(MAX_ANSWER_BYTES, library)]},
        )
        return AsyncOpenAI(
            api_key=key,
            base_url=self.url,
            max_retries=0,
            timeout=self.request_timeout,
            default_headers=headers,
            http_client=http,
        )

    def _key(self) -> str:
        if self.api_key_env is None:
            return _NO_KEY
        if not (key := os.environ.get(self.api_key_env, "")):
            raise JudgeError(f"the environment variable {self.api_key_env} is not set where the judge is called")
        return key

    async def _try(self, line: _Line, messages: Sequence[Message]) -> str:
        async with line.slots:
            with line.client() as client:
                self.counts.requests += 1
                start = time.perf_counter()
                answer = await self._post(client, {**self.body, "model": self.model, "messages": list(messages)})
                self.counts.answer(time.perf_counter() - start, _usage(answer))
        return _reply(answer)

    async def _post(self, client: Any, body: dict[str, Any]) -> Any:
        import openai

        try:
            # The client's own limit is on the silence between two bytes: an answer that drips would never end.
            async with asyncio.timeout(self.request_timeout):
                # Plain JSON: the typed call takes another 1 ms, and lets through what is no completion.
                return await client.post("/chat/completions", cast_to=object, body=body)
        except (TimeoutError, openai.APITimeoutError) as error:
            raise _TryError(f"no answer within {self.request_timeout:g} s", again=True, status="timeout") from error
        except AnswerRefused as error:
            raise _TryError(str(error)) from error
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, AnswerRefused):  # openai 2 wraps all that it does not know
                raise _TryError(str(error.__cause__)) from error
            cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
            raise _TryError(f"the connection failed{cause}", again=True) from error
        except openai.APIStatusError as error:
            raise self._refused(error) from error
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            raise _TryError(f"answered with something that is no JSON ({type(error).__name__})") from error

    def _refused(self, error: Any) -> _TryError:
        status = int(error.status_code)
        if status == 429 or status >= 500:
            return _TryError(f"status {status}", again=True, retry_after=retry_after(error.response.headers))
        if 300 <= status < 400:
            where = self._without_key(str(error.response.headers.get("location", "nowhere")).partition("?")[0])
            return _TryError(f"status {status}, a redirect, which is not followed, to {where[:_SHOWN_CHARACTERS]}")
        said = self._without_key(str(getattr(error, "message", "")))
        return _TryError(f"status {status}, {said[:_SHOWN_CHARACTERS]}")

    def _without_key(self, text: str) -> str:
        """The beginning of a text in one line, without any part of the key that is long enough to be of use."""
        plain = " ".join(text[: 8 * _SHOWN_CHARACTERS].split())
        if self.api_key_env is None:
            return plain
        key = self._key()
        size = min(_SECRET_CHARACTERS, len(key))
        secret = {at + i for at in range(len(plain) - size + 1) if plain[at : at + size] in key for i in range(size)}
        runs = groupby(enumerate(plain), lambda pair: pair[0] in secret)
        return "".join("***" if hidden else "".join(char for _, char in run) for hidden, run in runs)


MAX_BACKOFF = 20.0
"""Seconds; see `Endpoint.backoff`."""


def retries_of(
    retries: int,
    backoff: float,
    give_up_after: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Any:
    """The schedule of tries, as tenacity's AsyncRetrying.

    The n-th wait: what the server asked for, and drawn from 0 to backoff x 2^(n-1) seconds (at most MAX_BACKOFF) on top
    of it, so that calls that were refused together do not come back together ("full jitter", Brooker, Exponential
    Backoff and Jitter, AWS 2015). Where the next try would begin after `give_up_after` seconds, there is none.
    """
    try:
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, stop_before_delay
    except ImportError as error:
        raise JudgeError(INSTALL) from error

    # Its own random numbers: drawn from the shared ones, a slow judge would change what else a run draws.
    draw = random.Random()

    def wait(state: Any) -> float:
        error = state.outcome.exception()
        most = min(MAX_BACKOFF, backoff * 2 ** min(state.attempt_number - 1, 30))
        return float(error.retry_after) + draw.uniform(0.0, most)

    return AsyncRetrying(
        sleep=sleep,
        stop=stop_after_attempt(retries + 1) | stop_before_delay(give_up_after),
        wait=wait,
        retry=retry_if_exception(lambda error: isinstance(error, _TryError) and error.again),
        reraise=True,
    )


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait: Retry-After, as a number or a date, or retry-after-ms; 0 without."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _usage(answer: Any) -> tuple[int, int] | None:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    found = [n for n in (usage.get("prompt_tokens"), usage.get("completion_tokens")) if type(n) is int]
    return (found[0], found[1]) if len(found) == 2 and all(0 <= n < 1 << 40 for n in found) else None


def _reply(answer: Any) -> str:
    try:
        choice = answer["choices"][0]
        text, end = choice["message"]["content"], choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise _TryError("answered with something that is no chat completion") from error
    if end in _UNUSABLE_ENDS:
        raise _TryError(_UNUSABLE_ENDS[end])
    if not isinstance(text, str):
        raise _TryError("answered with a chat completion without text")
    return text


# ---- models of this process


_SCHEDULERS: dict[tuple[asyncio.AbstractEventLoop, int], Scheduler] = {}
"""By event loop and model: all judges that ask one model share its batches, since it takes one call at a time."""
_JUDGE = "judge"


@dataclass
class Model:
    """A model of this process: a policy of the run, or one from a folder."""

    name: str
    get: Callable[[], Awaitable[ModelClient]]
    max_tokens: int
    temperature: float
    seed: int
    max_concurrency: int
    """At most so many questions are answered in one batch; where judges share a model, the least of theirs counts."""
    known: ModelClient | None = None
    counts: Counts = field(default_factory=Counts)

    def identity(self) -> str:
        """Name and version of the model, and how it is sampled."""
        version = self.known.version if self.known is not None else 0
        return json.dumps([self.name, version, self.max_tokens, self.temperature, self.seed])

    async def ask(self, messages: Sequence[Message]) -> str:
        """The reply; generated together with all other questions that wait."""
        self.known = client = await self.get()
        _, prompt_ids = client.encode(messages)
        if len(prompt_ids) + self.max_tokens > client.max_positions:
            raise JudgeError(
                f"{self.name}: a question of {len(prompt_ids)} tokens and a reply of {self.max_tokens} (max_tokens) do "
                f"not fit into the model's {client.max_positions}"
            )
        request = GenerationRequest(prompt_ids, self.max_tokens, self.temperature, self._seed_of(prompt_ids))
        self.counts.requests += 1
        start = time.perf_counter()
        generation = await self._scheduler(client).generate(_JUDGE, request)
        self.counts.answer(time.perf_counter() - start, (len(prompt_ids), len(generation.response_ids)))
        if generation.finish_reason in _UNUSABLE_ENDS:
            raise JudgeError(f"{self.name}: {_UNUSABLE_ENDS[generation.finish_reason]}")
        return client.decode(generation.response_ids)

    def _seed_of(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Of the question itself, so that neither its order nor its company changes the reply."""
        digest = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).digest()
        return (self.seed, int.from_bytes(digest[:8]))

    def _scheduler(self, client: ModelClient) -> Scheduler:
        loop = asyncio.get_running_loop()
        for other in [key for key in _SCHEDULERS if key[0].is_closed()]:
            del _SCHEDULERS[other]
        scheduler = _SCHEDULERS.setdefault((loop, id(client)), Scheduler({_JUDGE: client}, self.max_concurrency))
        scheduler.max_num_seqs = min(scheduler.max_num_seqs, self.max_concurrency)
        return scheduler

    async def aclose(self) -> None:
        """Lets go of the model's batches in this event loop."""
        if self.known is not None:
            _SCHEDULERS.pop((asyncio.get_running_loop(), id(self.known)), None)
