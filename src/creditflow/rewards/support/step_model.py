"""The base of reward functions that score steps with a model: concurrent steps are computed together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creditflow.data import Score, Step, Trajectory
from creditflow.rewards.support.alignment import PolicyTokens
from creditflow.rewards.support.models import Batcher, model_folder


class StepModel:
    """Base class of a function with a model; subclasses implement `_score_all`.

    `tokenizer`: a folder with the policy's tokenizer, for use without a connected policy.
    """

    inline = True

    def __init__(self, tokenizer: str | None) -> None:
        self._tokens = PolicyTokens(None if tokenizer is None else model_folder(tokenizer, "tokenizer"))
        self._batcher: Batcher[Step, Score | Exception] = Batcher(self._score_all)

    def connect(self, clients: Mapping[str, Any]) -> None:
        """Set the run's policies, which decode their tokens."""
        self._tokens.connect(clients)

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """One value per response token, or one for the step."""
        scored = await self._batcher(step)
        if isinstance(scored, Exception):
            raise scored
        return scored

    def _score_all(self, steps: list[Step]) -> list[Score | Exception]:
        """A score or an error for each step; an error of one step does not affect the others."""
        raise NotImplementedError
