"""Progress of long commands: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar(Protocol):
    """A progress bar."""

    def advance(self, amount: int = 1, status: str = "") -> None:
        """Advance by `amount` and show `status` if it is not empty."""
        ...

    def note(self, status: str) -> None:
        """Show the current activity, in a terminal only."""
        ...


class Reporter:
    """Prints progress to standard error; standard output is for results."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, markup=False, emoji=False)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """Open a bar of `total` parts; without a terminal, print one line for each part with a status."""
        if not self.console.is_terminal:
            yield _PlainBar(self, title, total)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        with Progress(*columns, console=self.console, transient=False) as progress:
            task = progress.add_task(title, total=total, status="")

            class _RichBar:
                def advance(self, amount: int = 1, status: str = "") -> None:
                    progress.advance(task, amount)
                    if status:
                        progress.update(task, status=status)

                def note(self, status: str) -> None:
                    progress.update(task, status=status)

            yield _RichBar()


class _PlainBar:
    def __init__(self, reporter: Reporter, title: str, total: int) -> None:
        self.reporter, self.title, self.total, self.done = reporter, title, total, 0

    def advance(self, amount: int = 1, status: str = "") -> None:
        self.done += amount
        if status:
            self.reporter.say(f"{self.title} {self.done}/{self.total} {status}")

    def note(self, status: str) -> None:
        """Print nothing: notes would flood the log."""
