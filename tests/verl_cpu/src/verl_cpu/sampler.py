"""verl's replay buffer with a shorter polling interval than two seconds, because a step here takes half a second."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickReplayBuffer(ReplayBuffer):
    """A replay buffer for the synchronous trainer, set by `trainer.v1.sampler.custom_sampler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"poll_interval": 0.05, **kwargs})
