"""Messages over a socket between the pool and its workers: four bytes of length, then the message."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 20


def write_frame(connection: socket.socket, message: bytes) -> None:
    """Send one message and wait until it is sent."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


class TooLong(Exception):
    """A message exceeds the length limit."""


class FrameReader:
    """Reads messages from one end of a connection."""

    def __init__(self, connection: socket.socket, longest: int = (1 << 32) - 1) -> None:
        self.connection = connection
        self.longest = longest
        self._incoming = bytearray()

    def read(self) -> bytes:
        """Wait for the next message. Raises EOFError at the end of the connection, TooLong."""
        message = self._next(0)
        assert message is not None
        return message

    def arrived(self) -> bytes | None:
        """Return the next message, or None if it has not arrived completely. Raises as `read` does."""
        return self._next(socket.MSG_DONTWAIT)

    def _next(self, flags: int) -> bytes | None:
        while (end := self._end()) > len(self._incoming):
            try:
                chunk = self.connection.recv(_CHUNK, flags)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError
            self._incoming += chunk
        message = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        return message

    def _end(self) -> int:
        """The position at which the first message ends, as far as its length is known."""
        if len(self._incoming) < _LENGTH.size:
            return _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._incoming)
        if length > self.longest:
            raise TooLong
        return _LENGTH.size + int(length)
