"""A limit of processor time, which does not depend on the load of the machine."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Iterator


class _TimeIsUpError(BaseException):
    """The time limit is exceeded. Not an Exception, because sympy swallows those."""


@contextlib.contextmanager
def processor_time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this, the main, thread after `seconds` seconds of the process's processor time.

    The signal repeats every 50 ms until it takes effect: raised inside a destructor, the exception would be lost. The
    garbage collector is disabled meanwhile, because its callbacks swallow exceptions, too.
    """
    running = True

    def ring(*_: object) -> None:
        if running:
            raise _TimeIsUpError

    old_handler = signal.signal(signal.SIGPROF, ring)
    restore_collector = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    left, interval = signal.setitimer(signal.ITIMER_PROF, seconds, 0.05)
    try:
        yield
    except _TimeIsUpError:
        running = False
        raise TimeoutError(f"more than {seconds:g} s of processor time") from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_PROF, left, interval)
        signal.signal(signal.SIGPROF, old_handler)
        restore_collector()
