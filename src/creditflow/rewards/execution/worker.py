"""A worker process: receives reward functions once, then batches of calls, and answers each call when it is done.

The pool starts it as `python -P -m creditflow.rewards.execution.worker CONNECTION PARENT`. It does not outlive the
pool: it exits at the end of the connection or, while a function hangs, with the thread that started it.

Requests are pickled bytes: the functions, then one batch after another. Each answer is a line, a packed `Returned`: one
when the functions are loaded, one when a batch is read, and one for each call in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys

from creditflow._utils.processes import end_with
from creditflow.rewards.calls import Returned
from creditflow.rewards.execution.inline import run_plain
from creditflow.rewards.execution.wire import TransferError, pack_returned, unpack_calls, unpack_functions

_PR_SET_CHILD_SUBREAPER = 36


def serve(connection: socket.socket) -> None:
    """Answer calls until the connection ends."""
    home, streams, requests = os.getpid(), (sys.stdout, sys.stderr), connection.makefile("rb")

    def answer(returned: Returned) -> None:
        connection.sendall(pack_returned(returned) + b"\n")

    try:
        functions = unpack_functions(pickle.load(requests), same_machine=True)
    except BaseException as error:  # reported to the pool, which cannot see it otherwise
        answer(Returned.raised(error))
        return
    answer(Returned())
    while requests.peek(1):
        try:
            calls = unpack_calls(pickle.load(requests), functions)
        except TransferError as error:
            answer(Returned(error=str(error)))
            continue
        answer(Returned())
        for call in calls:
            returned = run_plain(call)
            if os.getpid() != home:  # the child of a function that forked
                os._exit(1)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would hit the next call
            sys.stdout, sys.stderr = streams
            with contextlib.suppress(Exception):  # the function may have closed them
                sys.stdout.flush()
                sys.stderr.flush()
            answer(returned)


def die_with(parent: int) -> None:
    """Die when the thread that started this process ends, and adopt orphans below this process.

    The pool then finds everything that a function has started. Linux only; nothing happens elsewhere.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    end_with(parent)


def main() -> None:
    """Serve the connection given on the command line by its file descriptor."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:3])
    os.set_inheritable(descriptor, False)  # processes that a function starts must not keep it open
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles interrupts
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the pool no longer waits for the answer
        serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
