"""A pytest plugin that shifts the clock by a year, so that a test id that holds the time shows itself."""

import time

SHIFT_S = 366 * 24 * 3600


def pytest_configure() -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + SHIFT_S
    time.time_ns = lambda: now_ns() + SHIFT_S * 10**9
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, _shifted(getattr(time, name)))


def _shifted(function):
    return lambda seconds=None: function(time.time() if seconds is None else seconds)
