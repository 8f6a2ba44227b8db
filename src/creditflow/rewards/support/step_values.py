"""Helpers of functions that give a value to each response token."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class CountedShare:
    """A share that several threads may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._part = self._whole = 0

    def add(self, part: int, whole: int) -> None:
        """Count `part` of `whole` more things."""
        with self._lock:
            self._part += part
            self._whole += whole

    def take(self) -> float:
        """The share since the previous call; 0 if nothing was counted."""
        with self._lock:
            share = self._part / self._whole if self._whole else 0.0
            self._part = self._whole = 0
        return share


def neutral_where_not_sampled(values: Sequence[float], response_mask: Sequence[int]) -> list[float]:
    """Give tokens that were not sampled, and are not trained on, the mean of the sampled ones.

    The plain mean over all tokens then equals the mean over the sampled ones. Unchanged if no token was sampled.
    """
    sampled = [value for value, mask in zip(values, response_mask, strict=True) if mask]
    if not sampled:
        return list(values)
    mean = sum(sampled) / len(sampled)
    return [value if mask else mean for value, mask in zip(values, response_mask, strict=True)]
