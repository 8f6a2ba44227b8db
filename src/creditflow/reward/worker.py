"""A worker process: receives reward functions once and then batches of calls, and answers each call as it is done.

Started by the pool as `python -m creditflow.reward.worker CONNECTION PARENT`. It must not outlive the pool: it ends at
the end of the connection and, should it hang in a function just then, with the thread that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from creditflow.reward.calls import describe, run_sync
from creditflow.reward.wire import pack_returned, unpack_calls, unpack_functions

READY = b"ready"
CANNOT_START = b"cannot start: "
_PR_SET_PDEATHSIG = 1


def serve(connection: Connection) -> None:
    """Answer calls until the connection ends."""
    try:
        functions = unpack_functions(connection.recv_bytes())
    except EOFError:
        return
    except BaseException as error:  # told to the pool, which cannot see in here
        connection.send_bytes(CANNOT_START + describe(error).encode())
        return
    connection.send_bytes(READY)
    while True:
        try:
            batch = connection.recv_bytes()
        except EOFError:
            return
        for call in unpack_calls(batch, functions):
            returned = run_sync(call.function.call, call.arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function left behind would hit the next one
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            connection.send_bytes(pack_returned(returned).encode())


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends, however it ends (Linux; elsewhere nothing happens)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def main() -> None:
    """Serve the connection whose file descriptor is named on the command line."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:3])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the pool's to answer
    try:
        serve(Connection(descriptor))
    except (BrokenPipeError, ConnectionResetError):  # nobody waits for the answer any more
        return


if __name__ == "__main__":
    main()
