"""Helpers of functions that give a value to each response token."""

from __future__ import annotations

from collections.abc import Sequence


def neutral_where_not_sampled(values: Sequence[float], response_mask: Sequence[int]) -> list[float]:
    """Give tokens that were not sampled, and are not trained on, the mean of the sampled ones.

    The plain mean over all tokens then equals the mean over the sampled ones. Unchanged if no token was sampled.
    """
    sampled = [value for value, mask in zip(values, response_mask, strict=True) if mask]
    if not sampled:
        return list(values)
    mean = sum(sampled) / len(sampled)
    return [value if mask else mean for value, mask in zip(values, response_mask, strict=True)]
