"""Bounds what a server may answer: a few bytes that unfold into gigabytes, or a body without end, must fill no memory.

It must not know who asks, nor what an answer says. It works on the responses of an async client of httpx or httpx2.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any


class AnswerRefused(Exception):
    """An answer that was not read, or not to its end; the message says why."""


def bounded_to(most: int, library: Any) -> Callable[[Any], Awaitable[None]]:
    """A hook on responses (`event_hooks={"response": [...]}`), called before anything of the body is read.

    Reading a response then raises AnswerRefused where it is compressed (so send `Accept-Encoding: identity`), and as
    soon as more than `most` bytes of it have come. `library`: the module httpx or httpx2. A hook rather than a
    transport: a client that is given a transport no longer heeds the proxies of the environment.
    """
    stream_class = type("BoundedStream", (_Bounded, library.AsyncByteStream), {})

    async def bound(response: Any) -> None:
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise AnswerRefused("answered with a compressed body, which was not asked for")
        response.encoding = "utf-8"  # JSON's own; the server's word for it may be none that decodes text
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
