"""The ready-made penalty for responses near the length limit, as in DAPO. It only counts tokens."""

from __future__ import annotations

from creditflow.data import Step, Trajectory
from creditflow.rewards.registry import builtin, reward


@builtin
@reward(name="overlong", range=(-1.0, 0.0))
class Overlong:
    """0 for a response of up to `max_length - cache_length` tokens, -1 from `max_length` on, linear in between.

    Only tokens that the policy sampled count, not text that a tool or the environment wrote into the response.

    `max_length`: Tokens, at least 1: the limit at which sampling is cut off, or less. A higher limit is never reached.
    `cache_length`: Tokens before `max_length` over which the value falls, from 0 to `max_length`.

    Range: -1 to 0; credit sees it as 0 to 1. Cost: none. Source: DAPO (arXiv 2503.14476), equation 13, where max_length
    is L_max = 20480 and cache_length L_cache = 4096. Raises ValueError unless 0 <= cache_length <= max_length and
    max_length >= 1.
    """

    def __init__(self, max_length: int, cache_length: int) -> None:
        if not max_length >= 1:
            raise ValueError(f"expected a max_length of 1 token or more, got {max_length}")
        if not 0 <= cache_length <= max_length:
            raise ValueError(f"expected a cache_length of 0 to max_length={max_length} tokens, got {cache_length}")
        self.max_length = max_length
        self.cache_length = cache_length

    def __call__(self, step: Step, trajectory: Trajectory) -> float:
        excess = sum(step.response_mask) - (self.max_length - self.cache_length)
        if excess <= 0:
            return 0.0
        return max(-1.0, -excess / self.cache_length) if self.cache_length else -1.0
