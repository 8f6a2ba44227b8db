"""Progress of long commands: bars in a terminal, lines elsewhere.

A command opens a bar for its work, and shorter bars (phases) inside it. Without a terminal, a thread prints the state
of all open bars when nothing else was printed for `LINE_SECONDS`. So a fast command prints only its results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from creditflow.errors import printable

LINE_SECONDS = 25.0
"""Seconds without a line after which one is printed, without a terminal. The documented limit is 30 s."""


class Bar:
    """An amount of work: how much of it is done, how fast it goes, and how long it will take."""

    def __init__(
        self,
        title: str,
        total: int | None = None,
        unit: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`unit`: the parts that are counted, in the plural.

        `say`: prints a result as a line; None if the bar itself shows it.
        """
        self.title, self.total, self.unit = title, total, unit
        self.status, self.done = "", 0
        self._skipped = self._tokens = 0
        self._clock, self._say = clock, say
        self._begun = self._moved = clock()
        self._lock = threading.RLock()

    def advance(self, amount: int = 1, status: str = "") -> None:
        """Advance by `amount` finished parts.

        A `status` replaces the one shown in a terminal; elsewhere it is printed as a line.
        """
        with self._lock:
            self.done += amount
            self._moved = self._clock()
        if self._say is None:
            self.status = status or self.status
        elif status:
            self._say(f"{self.title} {self.done}/{self.total} {status}")

    def reach(self, done: int, total: int) -> None:
        """Set the finished and the whole number of parts."""
        with self._lock:
            self.total = total
            self.advance(done - self.done)

    def skip(self, amount: int) -> None:
        """Advance by parts that cost no time here: those of a resumed run. Negative after a rollback."""
        with self._lock:
            self.done += amount
            self._skipped += amount

    def spend(self, tokens: int) -> None:
        """Count sampled tokens of parts that need not be finished."""
        with self._lock:
            self._tokens += tokens
            self._moved = self._clock()

    def note(self, status: str) -> None:
        """Show the current activity: in a terminal at once, elsewhere in the next line."""
        self.status = status

    def amount(self) -> str:
        """The finished amount in words."""
        parts = [f"{self.done:,}/{self.total:,}{f' {self.unit}' if self.unit else ''}"] if self.total else []
        if self._tokens:
            parts.append(f"{self._tokens:,} tokens")
        return ", ".join(parts)

    def pace(self) -> str:
        """The rate and the time left in words, as far as they are known."""
        with self._lock:
            now, spent, worked = self._clock(), self._moved - self._begun, self.done - self._skipped
        parts = []
        if spent > 0 and self._tokens:
            parts.append(f"{self._tokens / spent:,.0f} tokens/s")
        elif spent > 0 and worked > 0 and self.unit:
            rate = worked / spent
            parts.append(
                f"{rate:,.{0 if rate >= 10 else 1}f} {self.unit}/s" if rate >= 1 else f"{1 / rate:,.0f} s each"
            )
        if self.total is None:
            parts.append(f"{duration(now - self._begun)} so far")
        elif spent > 0 and worked > 0:
            left = spent * (self.total - self.done) / worked - (now - self._moved)
            parts.append(f"about {duration(max(0.0, left))} left")
        return ", ".join(parts)

    def describe(self) -> str:
        """The state as one line."""
        words = (f"{self.title} {self.amount()}".rstrip(), self.pace(), self.status)
        return ", ".join(filter(None, words))


class Reporter:
    """Prints progress to standard error; standard output is for results."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(stderr=True, markup=False, emoji=False)
        self._clock = clock
        self.bars: list[Bar] = []
        """The open bars, each inside the one before."""
        self._printed = clock()
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        """Print one line."""
        with self._lock:
            self._printed = self._clock()
            self.console.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def bar(
        self, title: str, total: int | None = None, unit: str = "", *, announce: bool = False, keep: bool = True
    ) -> Iterator[Bar]:
        """Open a bar of `total` parts, inside the bars that are open; the functions of this module find it.

        Without a terminal, a line is printed for each part with a status, and one when nothing was printed for a while.
        `announce`: also print the title as a line at the start. `keep`: leave an outermost bar in the terminal after
        its end.
        """
        live = self.console.is_terminal
        if announce and not live:
            self.say(f"{title} ...")
        bar = Bar(title, total, unit, clock=self._clock, say=None if live else self.say)
        is_outermost = not self.bars
        self.bars.append(bar)
        token = _CURRENT.set(self)
        try:
            if not is_outermost:
                yield bar
            elif live:
                with Live(get_renderable=self.table, console=self.console, transient=not keep):
                    yield bar
            else:
                self._printed = self._clock()
                with beside(self._print_overdue, "creditflow-lines"):
                    yield bar
        finally:
            _CURRENT.reset(token)
            self.bars.remove(bar)

    def table(self) -> Table:
        """The open bars as they are shown in a terminal, one a row."""
        table = Table.grid(*(Column(no_wrap=True) for _ in range(5)), padding=(0, 1))
        for bar in self.bars:
            drawn = ProgressBar(bar.total, bar.done, width=24, pulse=bar.total is None)
            table.add_row(bar.title, drawn, bar.amount(), bar.pace(), bar.status)
        return table

    def show_overdue(self) -> None:
        """Print the state of the open bars if nothing was printed for `LINE_SECONDS`."""
        with self._lock:
            if self.bars and self._clock() - self._printed >= LINE_SECONDS:
                self.say(": ".join(bar.describe() for bar in self.bars))

    def _print_overdue(self, over: threading.Event) -> None:
        while not over.wait(max(0.0, self._printed + LINE_SECONDS - self._clock())):
            self.show_overdue()


@contextmanager
def beside(watch: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run `watch` in a thread called `name` until the block has ended, when the event that it gets is set."""
    over = threading.Event()
    thread = threading.Thread(target=watch, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


_CURRENT: ContextVar[Reporter | None] = ContextVar("creditflow_reporter", default=None)
"""The reporter with an open bar. Deep functions find it here, so that their callers need no parameter for it."""


def phase(title: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Bar]:
    """Open a bar for a phase inside the caller's bars. Without an open bar, it counts and shows nothing."""
    reporter = _CURRENT.get()
    return nullcontext(Bar(title, total, unit)) if reporter is None else reporter.bar(title, total, unit, keep=False)


def advance(amount: int) -> None:
    """Advance the innermost open bar, if there is one."""
    for bar in _innermost():
        bar.advance(amount)


def spend(tokens: int) -> None:
    """Count sampled tokens in the innermost open bar, if there is one."""
    for bar in _innermost():
        bar.spend(tokens)


def _innermost() -> list[Bar]:
    """The bar that was opened last; empty without an open one."""
    reporter = _CURRENT.get()
    return [] if reporter is None else reporter.bars[-1:]


def duration(seconds: float) -> str:
    """A duration in words, in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
