"""Format numbers and texts for a terminal, and cut texts for the page."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

SHOWN = 20_000
"""Maximum characters of a text in the page; longer ones are cut and marked."""


def cut(text: str, limit: int = SHOWN) -> str:
    """At most `limit` characters; a cut text ends with its full length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def number(value: float, digits: int = 3, *, signed: bool = False) -> str:
    """Format with fixed digits; a dash for a non-finite value."""
    return format(value, f"{'+' if signed else ''}.{digits}f") if math.isfinite(value) else "-"


def plain(text: str, limit: int | None = None) -> str:
    """Text on one line with control characters escaped; a text over `limit` is cut and ends with its full length."""
    cut = text if limit is None or len(text) <= limit else text[:limit]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in cut)
    return shown if cut is text else f"{shown}... ({len(text):,} characters)"


def in_yaml(value: Any) -> str:
    """A value of a recipe as YAML in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {in_yaml(part)}' for key, part in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def counted(n: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 task`, `2 tasks`."""
    return f"{n} {noun if n == 1 else plural or f'{noun}s'}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Rows as lines with columns of equal width, to the right except for the columns `left`; the last is not padded."""
    *columns, last = zip(*rows, strict=True)
    padded = []
    for c, column in enumerate(columns):
        width = max(map(len, column))
        padded.append([cell.ljust(width) if c in left else cell.rjust(width) for cell in column])
    return ["  ".join(cells) for cells in zip(*padded, last, strict=True)]


def steps_words(steps: Sequence[int]) -> str:
    """Training steps in words: the first ten by number, the others as a count."""
    shown = ", ".join(map(str, steps[:10])) + (f" and {len(steps) - 10:,} more" if len(steps) > 10 else "")
    return f"training step{'' if len(steps) == 1 else 's'} {shown}"
