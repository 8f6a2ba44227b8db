"""Messages over a socket between the pool and its workers: four bytes of length, then the message."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 20


def write_frame(connection: socket.socket, message: bytes) -> None:
    """Send one message and wait until it is sent."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def read_frame(connection: socket.socket) -> bytes:
    """Wait for the next message and return it. Raises EOFError at the end of the connection."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        if not (chunk := connection.recv(min(_CHUNK, length - len(parts)))):
            raise EOFError
        parts += chunk
    return bytes(parts)


class TooLong(Exception):
    """A message exceeds the length limit."""


class Channel:
    """The pool's end of a connection; no method blocks."""

    def __init__(self, connection: socket.socket, longest: int) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.longest = longest
        self.ended = False
        self._incoming = bytearray()
        self._outgoing = memoryview(b"")

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self.connection.fileno()

    @property
    def sending(self) -> bool:
        """Whether data waits to be sent."""
        return len(self._outgoing) > 0

    def send(self, message: bytes) -> None:
        """Queue a message, and send as much as possible without blocking."""
        self._outgoing = memoryview(bytes(self._outgoing) + _LENGTH.pack(len(message)) + message)
        self.flush()

    def flush(self) -> None:
        """Send as much as possible without blocking."""
        try:
            while self.sending:
                self._outgoing = self._outgoing[self.connection.send(self._outgoing[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the other side has closed; the next read reports it
            self._outgoing = memoryview(b"")

    def messages(self) -> Iterator[bytes]:
        """Yield the messages that have arrived. Raises TooLong; `ended` is true if no more can come."""
        with suppress(BlockingIOError):
            while not self.ended and len(self._incoming) <= self.longest + _LENGTH.size:
                try:
                    chunk = self.connection.recv(_CHUNK)
                except ConnectionResetError:
                    chunk = b""
                self.ended = not chunk
                self._incoming += chunk
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > self.longest:
                raise TooLong
            if len(self._incoming) < _LENGTH.size + length:
                return
            message = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
            del self._incoming[: _LENGTH.size + length]
            yield message

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
