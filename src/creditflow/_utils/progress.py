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
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.console import OverflowMethod
    from rich.progress import Progress, TaskID

LINE_SECONDS = 25.0
"""Seconds without a line after which one is printed, without a terminal. The documented limit is 30 s."""

_MOST_EXPECTED = 0.95
"""The largest share of work that the tokens of another phase can suggest, before a part is finished."""


class Bar:
    """An amount of work: how much of it is done, how fast it goes, and how long it will take."""

    def __init__(
        self,
        title: str,
        total: int | None = None,
        unit: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        tokens_each: float = 0.0,
        changed: Callable[[], None] = lambda: None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`unit`: the parts that are counted, in the plural.

        `tokens_each`: the expected number of sampled tokens of a part, until parts are finished. `changed`: called
        after every change. `say`: prints a result as a line; None if the bar itself shows it.
        """
        self.title, self.total, self.unit = title, total, unit
        self.status = ""
        self._done = self._skipped = 0
        self._tokens, self._tokens_of_finished, self._tokens_each = 0, 0, tokens_each
        self._clock, self._changed, self._say = clock, changed, say
        self._begun = self._moved = clock()
        self._lock = threading.RLock()

    def advance(self, amount: int = 1, status: str = "", *, tokens: int = 0) -> None:
        """Advance by `amount` finished parts.

        A `status` replaces the one shown in a terminal; elsewhere it is printed as a line. `tokens`: the sampled tokens
        of the finished parts.
        """
        with self._lock:
            self._done += amount
            self._tokens_of_finished += tokens
            self._moved = self._clock()
            if self._say is None:
                self.status = status or self.status
        self._changed()
        if status and self._say is not None:
            self._say(f"{self.title} {self._done}/{self.total} {status}")

    def reach(self, done: int, total: int) -> None:
        """Set the finished and the whole number of parts."""
        with self._lock:
            self.total = total
            amount = done - self._done
        self.advance(amount)

    def skip(self, amount: int) -> None:
        """Advance by parts that cost no time here: those of a resumed run. Negative after a rollback."""
        with self._lock:
            self._done += amount
            self._skipped += amount
        self._changed()

    def spend(self, tokens: int) -> None:
        """Count sampled tokens of parts that need not be finished."""
        with self._lock:
            self._tokens += tokens
            self._moved = self._clock()
        self._changed()

    def note(self, status: str) -> None:
        """Show the current activity: in a terminal at once, elsewhere in the next line."""
        self.status = status
        self._changed()

    @property
    def share(self) -> float:
        """The share of the work that is done, in [0, 1]; 0 if the amount of work is unknown.

        Rollouts run side by side. The share of finished ones is too low, because most finish late. The share of
        tokens, at the mean of the finished ones, is too high, because short ones finish first. The result is the mean.
        """
        with self._lock:
            worked, total = self._done - self._skipped, (self.total or 0) - self._skipped
            if total <= 0:
                return 0.0
            finished = min(1.0, worked / total)
            if not self._tokens or not self.tokens_each or finished == 1.0:
                return finished
            of_tokens = min(1.0, self._tokens / (self.tokens_each * total))
            return (finished + of_tokens) / 2 if worked > 0 else min(_MOST_EXPECTED, of_tokens)

    @property
    def tokens_each(self) -> float:
        """The mean number of sampled tokens of the finished parts, or the expected number; 0 if unknown."""
        worked = self._done - self._skipped
        return self._tokens_of_finished / worked if worked > 0 else self._tokens_each

    def amount(self) -> str:
        """The finished amount in words."""
        parts = [f"{self._done:,}/{self.total:,}{f' {self.unit}' if self.unit else ''}"] if self.total else []
        if self._tokens:
            parts.append(f"{self._tokens:,} tokens")
        return ", ".join(parts)

    def pace(self) -> str:
        """The rate and the time left in words, as far as they are known."""
        with self._lock:
            now, spent = self._clock(), self._moved - self._begun
            worked, share = self._done - self._skipped, self.share
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
        elif spent > 0 and share > 0:
            parts.append(f"about {duration(max(0.0, spent * (1 - share) / share - (now - self._moved)))} left")
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
        self._progress: Progress | None = None
        self._rows: dict[Bar, TaskID] = {}
        self._printed = clock()
        self._tokens_each: dict[str, float] = {}
        """Mean sampled tokens of a part, by the title of the last finished bar."""
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        """Print one line."""
        with self._lock:
            self._printed = self._clock()
            self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def bar(
        self, title: str, total: int | None = None, unit: str = "", *, announce: bool = False, keep: bool = True
    ) -> Iterator[Bar]:
        """Open a bar of `total` parts, inside the bars that are open; the functions of this module find it.

        Without a terminal, a line is printed for each part with a status, and one when nothing was printed for a while.
        `announce`: also print the title as a line at the start. `keep`: leave the bar in the terminal after its end.
        """
        live = self.console.is_terminal
        if announce and not live:
            self.say(f"{title} ...")
        with self._in_terminal(keep=keep) if live else self._in_lines():
            each = self._tokens_each.get(title, 0.0)
            if self._progress is None:
                bar = Bar(title, total, unit, clock=self._clock, tokens_each=each, say=self.say)
            else:
                bar = self._row(self._progress, title, total, unit, each)
            self.bars.append(bar)
            token = _CURRENT.set(self)
            try:
                yield bar
            finally:
                _CURRENT.reset(token)
                self.bars.remove(bar)
                self._tokens_each[title] = bar.tokens_each
                if self._progress is not None and not keep:
                    self._progress.remove_task(self._rows.pop(bar))

    def show_overdue(self) -> None:
        """Print the state of the open bars if nothing was printed for `LINE_SECONDS`."""
        with self._lock:
            if self.bars and self._clock() - self._printed >= LINE_SECONDS:
                self.say(": ".join(bar.describe() for bar in self.bars))
                self._printed = self._clock()

    @contextmanager
    def _in_lines(self) -> Iterator[None]:
        """Print overdue lines from a thread while the outermost bar is open."""
        if self.bars:
            yield
            return
        self._printed = self._clock()

        def watch(over: threading.Event) -> None:
            while not over.wait(max(0.0, self._printed + LINE_SECONDS - self._clock())):
                self.show_overdue()

        with beside(watch, "creditflow-lines"):
            yield

    @contextmanager
    def _in_terminal(self, *, keep: bool) -> Iterator[None]:
        """Show the open bars while the outermost one is open."""
        if self._progress is not None:
            yield
            return
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
        from rich.table import Column
        from rich.text import Text

        class BarText(ProgressColumn):
            """A text that is read from the bar at every refresh."""

            def __init__(self, text: Callable[[Bar], str], overflow: OverflowMethod = "fold") -> None:
                self._text = text
                super().__init__(Column(no_wrap=True, overflow=overflow))

            def render(self, task: Task) -> Text:
                return Text(self._text(task.fields["bar"]))

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            BarText(Bar.amount),
            TimeElapsedColumn(),
            BarText(Bar.pace),
            BarText(lambda bar: bar.status, "ellipsis"),
        )
        try:
            with Progress(*columns, console=self.console, transient=not keep) as self._progress:
                yield
        finally:
            self._progress = None
            self._rows.clear()

    def _row(self, progress: Progress, title: str, total: int | None, unit: str, tokens_each: float) -> Bar:
        """Add a bar to the terminal."""

        def show() -> None:
            if (row := self._rows.get(bar)) is not None:  # a late thread may report to a closed bar
                has_total = bar.total is not None
                progress.update(row, total=100 if has_total else None, completed=bar.share * 100 if has_total else 0)

        bar = Bar(title, total, unit, clock=self._clock, tokens_each=tokens_each, changed=show)
        self._rows[bar] = progress.add_task(title, total=100 if total else None, bar=bar)
        return bar


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
