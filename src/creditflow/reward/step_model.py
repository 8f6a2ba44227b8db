"""What functions share that score steps by a model of their own: steps are gathered and computed together.

It must not know what the model says of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creditflow.reward.alignment import PolicyTokens
from creditflow.reward.models import Batcher, model_folder
from creditflow.trajectory import Score, Step, Trajectory


class StepModel:
    """The base of such a function; it says in `_score_all` what the model makes of some steps.

    `tokenizer`: a folder that says how the policy's tokens are spelled, where no policy of the run does.
    """

    here = True

    def __init__(self, tokenizer: str | None) -> None:
        self._tokens = PolicyTokens(None if tokenizer is None else model_folder(tokenizer, "tokenizer"))
        self._batcher: Batcher[Step, Score | Exception] = Batcher(self._score_all)

    def connect(self, clients: Mapping[str, Any]) -> None:
        """The run's policies, which know how they spell their tokens."""
        self._tokens.connect(clients)

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """One value per response token, or one for the step."""
        scored = await self._batcher(step)
        if isinstance(scored, Exception):
            raise scored
        return scored

    def _score_all(self, steps: list[Step]) -> list[Score | Exception]:
        """A score, or what went wrong with it, for each step; one step's fault is not the others'."""
        raise NotImplementedError
