"""Progress of long commands: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress


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
            yield Bar(self, title, total)
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        with Progress(*columns, console=self.console, transient=False) as progress:
            yield Bar(self, title, total, progress)


class Bar:
    """A progress bar in a terminal; elsewhere lines."""

    def __init__(self, reporter: Reporter, title: str, total: int, progress: Progress | None = None) -> None:
        self._reporter, self._title, self._total, self._done = reporter, title, total, 0
        self._progress = progress
        if progress is not None:
            self._task = progress.add_task(title, total=total, status="")

    def advance(self, amount: int = 1, status: str = "") -> None:
        """Advance by `amount` and show `status` if it is not empty."""
        self._done += amount
        if self._progress is not None:
            self._progress.advance(self._task, amount)
            if status:
                self.note(status)
        elif status:
            self._reporter.say(f"{self._title} {self._done}/{self._total} {status}")

    def note(self, status: str) -> None:
        """Show the current activity, in a terminal only: elsewhere notes would flood the log."""
        if self._progress is not None:
            self._progress.update(self._task, status=status)
