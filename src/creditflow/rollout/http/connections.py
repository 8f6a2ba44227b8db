"""Limits on the server's connections: their number, their time without a request, and their end.

Any client that can reach the port can open connections, with or without a key, and each holds a file descriptor of the
training process. This module uses uvicorn's protocol and does not interpret requests. Imports uvicorn.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_BASE: Any = AutoHTTPProtocol


def bounded_connections(most: int, seconds: float) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's HTTP protocol, for `Config(http=...)` of one server.

    A connection is closed if no complete request head arrives within `seconds`, or if its client does not read the
    response. Beyond `most` connections, the one that has been without a request for longest is closed, so that a client
    with a request finds room. (Between two requests, and after a pipelined one, uvicorn's keep-alive closes it.) When
    the server stops, a running request ends as if its client had disconnected.
    """
    opened: dict[Connection, None] = {}

    class Connection(_BASE):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.timers: dict[str, asyncio.TimerHandle] = {}
            self.access_log = False  # the logger is the whole process's: Config's option would remove its handlers
            opened[self] = None
            self._start_timer("head")
            if len(opened) > most:
                next((connection for connection in opened if not connection.busy), self).end()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.busy:
                self._stop_timer("head")
            elif "head" not in self.timers:
                self._start_timer("head")

        def connection_lost(self, error: Exception | None) -> None:
            opened.pop(self, None)
            self._stop_timer("head")
            self._stop_timer("unread")
            super().connection_lost(error)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self in opened:
                opened[self] = opened.pop(self)

        def shutdown(self) -> None:
            if self.busy:
                self.end()
            else:
                super().shutdown()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_timer("unread")

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_timer("unread")

        @property
        def busy(self) -> bool:
            """Whether a request is being read or answered."""
            return self.cycle is not None and not self.cycle.response_complete

        def end(self) -> None:
            opened.pop(self, None)
            self.transport.abort()

        def _start_timer(self, name: str) -> None:
            self.timers[name] = asyncio.get_running_loop().call_later(seconds, self.end)

        def _stop_timer(self, name: str) -> None:
            if timer := self.timers.pop(name, None):
                timer.cancel()

    return Connection


def make_room(connections: int) -> int:
    """Return the allowed number of connections: `connections`, or half of this process's limit of file descriptors.

    If both ends are in this process, one connection takes two descriptors. The soft limit is raised as far as the
    system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        most = descriptors if hard == resource.RLIM_INFINITY else min(descriptors, hard)
        with suppress(ValueError, OSError):  # a container may forbid it; then there are fewer connections
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft // 2)
