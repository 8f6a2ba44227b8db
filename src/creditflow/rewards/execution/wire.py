"""Send reward functions, calls and results to another process of the same user.

Functions and calls are pickled (functions and trajectories are the user's own). Results come back as JSON of numbers,
lists and scores: a worker may have touched text by a model, and its answer must not be able to run code here. Over a
socket each message is four bytes of length, then the message.
"""

from __future__ import annotations

import json
import math
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from creditflow._utils.loading import USER_FILES
from creditflow._utils.tracebacks import TRACEBACK_CHARACTERS
from creditflow.data import Trajectory
from creditflow.errors import CreditflowError, RewardError, first_line
from creditflow.rewards.execution.calls import Returned, RewardCall
from creditflow.rewards.registry import RewardFunction
from creditflow.rewards.values import REASON_CHARACTERS, of_json, to_json

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 20


class TransferError(CreditflowError):
    """Calls cannot be sent, or cannot be read on arrival; the message gives the reason."""


class UnreadableAnswerError(CreditflowError):
    """An answer in none of our formats."""


def pack_functions(functions: Sequence[RewardFunction]) -> bytes:
    """Pack the functions, with the user's own files that hold them. Raises RewardError if one cannot be sent.

    A function in an importable module, or in a `file.py` of a recipe, is packed by name (together with the texts of the
    folder's files, so that another machine needs no copy); one typed at a prompt or made in a function, by value.
    """
    import cloudpickle

    functions = [replace(function, when=None) for function in functions]  # the manager selects the steps
    for function in functions:
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # pickling runs the user's own code, which may raise anything
            raise RewardError(
                f"reward function {function.name}: cannot be sent to another process ({first_line(error)}); give "
                "it what can be pickled, or call it in this process: reward.backend=inline"
            ) from error
    return bytes(cloudpickle.dumps((sys.path, USER_FILES, cloudpickle.dumps(tuple(functions)))))


def unpack_functions(data: bytes, *, same_machine: bool) -> tuple[RewardFunction, ...]:
    """Unpack the functions, and import their modules from the sender's search path."""
    path, files, packed = pickle.loads(data)
    sys.path[:] = path if same_machine else [*sys.path, *(folder for folder in path if folder not in sys.path)]
    USER_FILES.update(files)
    return tuple(pickle.loads(packed))


@dataclass(frozen=True, slots=True)
class PackedCalls:
    """Calls that are sent together; a trajectory that several of them use is sent once."""

    trajectories: list[Trajectory]
    items: list[tuple[int, int, int]]
    """Indices of each call's function, trajectory and step (-1: no step)."""


def pack_calls(calls: Sequence[RewardCall], index_of_function: dict[int, int]) -> bytes:
    """Pack calls for a process that holds the functions: `index_of_function` maps `id(function)` to their index there.

    Raises TransferError if a trajectory cannot be pickled.
    """
    place: dict[int, int] = {}
    trajectories: list[Trajectory] = []
    items = []
    for call in calls:
        if id(call.trajectory) not in place:
            place[id(call.trajectory)] = len(trajectories)
            trajectories.append(call.trajectory)
        step = -1 if call.step is None else call.step.index
        items.append((index_of_function[id(call.function)], place[id(call.trajectory)], step))
    try:
        return pickle.dumps(PackedCalls(trajectories, items), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects in `info` may raise anything
        raise TransferError(f"the trajectory cannot be sent to another process: {first_line(error)}") from error


def unpack_calls(data: bytes, functions: Sequence[RewardFunction]) -> list[RewardCall]:
    """Unpack the calls. Raises TransferError if they cannot be read here."""
    try:
        packed: PackedCalls = pickle.loads(data)
    except Exception as error:  # as above
        raise TransferError(f"the trajectory cannot be read in another process: {first_line(error)}") from error
    calls = []
    for f, t, s in packed.items:
        trajectory = packed.trajectories[t]
        calls.append(RewardCall(functions[f], trajectory, None if s < 0 else trajectory.steps[s]))
    return calls


def pack_returned(returned: Returned) -> str:
    """Pack a result as JSON."""
    fields = {"value": to_json(returned.value), "error": returned.error, "seconds": returned.seconds}
    return json.dumps({**fields, "timed_out": returned.timed_out, "traceback": returned.traceback})


def unpack_returned(data: str | bytes) -> Returned:
    """Unpack a result. Raises Unreadable for anything that `pack_returned` did not write."""
    try:
        fields = json.loads(data)
        seconds = float(fields["seconds"])
        if not math.isfinite(seconds):
            raise ValueError("seconds without end")
        reason = str(fields["error"])[:REASON_CHARACTERS]
        traceback = str(fields["traceback"])[:TRACEBACK_CHARACTERS]
        return Returned(of_json(fields["value"]), reason, seconds, bool(fields["timed_out"]), traceback)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UnreadableAnswerError(f"its answer could not be read ({type(error).__name__})") from error


def write_frame(connection: socket.socket, message: bytes) -> None:
    """Send one message and wait until it is sent."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


class TooLongError(CreditflowError):
    """A message exceeds the length limit."""


class FrameReader:
    """Reads messages from one end of a connection."""

    def __init__(self, connection: socket.socket, longest: int = (1 << 32) - 1) -> None:
        self.connection = connection
        self.longest = longest
        self._incoming = bytearray()

    def read(self) -> bytes:
        """Wait for the next message. Raises EOFError at the end of the connection, TooLongError."""
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
            raise TooLongError
        return _LENGTH.size + int(length)
