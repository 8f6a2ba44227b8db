"""Numbers and texts for people to read in a terminal. Knows nothing of what they are about."""

from __future__ import annotations

import math


def number(value: float, digits: int = 3, *, signed: bool = False) -> str:
    """Fixed digits; a dash for what is not there."""
    return format(value, f"{'+' if signed else ''}.{digits}f") if math.isfinite(value) else "-"


def plain(text: str, limit: int | None = None) -> str:
    """On one line, control characters spelled out; cut off after `limit` characters, with how many there were."""
    cut = text if limit is None or len(text) <= limit else text[:limit]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in cut)
    return shown if cut is text else f"{shown}... ({len(text):,} characters)"
