"""Limits on a server's answers, against a few bytes that decompress to gigabytes and against endless bodies.

It works on the responses of an async client of httpx or httpx2, for any caller and any content.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any


class AnswerRefused(Exception):
    """An answer that was not read, or not to its end; the message gives the reason."""


def bounded_to(most: int, library: Any) -> Callable[[Any], Awaitable[None]]:
    """Return a hook for responses (`event_hooks={"response": [...]}`), which runs before the body is read.

    Reading a response then raises AnswerRefused if it is compressed (so send `Accept-Encoding: identity`), or as soon
    as it exceeds `most` bytes. `library`: the module httpx or httpx2. A hook rather than a transport: a client with a
    custom transport ignores the proxies of the environment.
    """
    stream_class = type("BoundedStream", (_Bounded, library.AsyncByteStream), {})

    async def bound(response: Any) -> None:
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise AnswerRefused("answered with a compressed body, which was not asked for")
        response.encoding = "utf-8"  # JSON's encoding; the server may name one that decodes no text
        response.stream = stream_class(response.stream, most)

    return bound


class _Bounded:
    def __init__(self, stream: Any, most: int) -> None:
        self.stream = stream
        self.most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        length = 0
        async with aclosing(aiter(self.stream)) as parts:
            async for part in parts:
                length += len(part)
                if length > self.most:
                    raise AnswerRefused(f"answered with more than {self.most} bytes")
                yield part

    async def aclose(self) -> None:
        await self.stream.aclose()
