"""Connections of the server: how many there may be, for how long one may stay without a request, and how they end.

Whoever can reach the port can open connections, whether a key is theirs or not, and each holds a file descriptor of the
process that trains. It knows uvicorn's protocol and nothing of what is asked. Imports uvicorn.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_BASE: Any = AutoHTTPProtocol


def bounded_connections(most: int, seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, for `Config(http=...)` of one server.

    A connection on which no whole request head comes within `seconds` is ended, and so is one whose client does not
    read what it was answered. Of more than `most`, that one is which has been without a request for longest: who comes
    with a request finds room. (Between two requests, and behind one that was sent ahead, uvicorn's keep-alive ends it.)
    When the server stops, a request that is under way ends as if its client had gone away.
    """
    opened: dict[Connection, None] = {}

    class Connection(_BASE):  # type: ignore[misc]
        _deadline: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.access_log = False  # its logger is the whole process's: Config's option would take its handlers away
            opened[self] = None
            self._expect_head()
            if len(opened) > most:
                next((one for one in opened if not one.busy), self).end()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.busy:
                self._stop_waiting()
            elif self._deadline is None:
                self._expect_head()

        def connection_lost(self, error: Exception | None) -> None:
            opened.pop(self, None)
            self._stop_waiting()
            self._was_read()
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
            self._unread = asyncio.get_running_loop().call_later(seconds, self.end)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._was_read()

        @property
        def busy(self) -> bool:
            """Whether a request is being read or answered."""
            return self.cycle is not None and not self.cycle.response_complete

        def end(self) -> None:
            opened.pop(self, None)
            self.transport.abort()

        def _expect_head(self) -> None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.end)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _was_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

    return Connection


def make_room(connections: int) -> int:
    """How many connections there may be: `connections`, or half of the file descriptors that this process may have.

    Where both ends are in this process, one takes two. The soft limit is raised for them, as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):  # a container may forbid it: there are fewer connections then
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft // 2)
