"""How a long command shows that it lives: a bar in a terminal, plain lines elsewhere. Knows no training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar(Protocol):
    """Something long that advances."""

    def advance(self, amount: int = 1, status: str = "") -> None:
        """So much further; `status` says how it stands."""
        ...

    def note(self, status: str) -> None:
        """What is being done just now; shown where it can be shown in passing, in a terminal."""
        ...


class Reporter:
    """Says what happens, on standard error, so that standard output stays for results."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, markup=False, emoji=False)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """A bar of `total` parts; without a terminal, one plain line per part where parts carry a status."""
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
        """A line for each would drown the others."""
