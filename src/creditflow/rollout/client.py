"""What a rollout asks of a model: text to tokens, many prompts to many responses at once, tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from creditflow.trajectory import Message


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call of one agent."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0: greedy."""
    seed: tuple[int, ...]
    """Key of this call's own random numbers: what is sampled does not depend on what it is batched with."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the model answered to one request."""

    response_ids: tuple[int, ...]
    """The end-of-sequence token included, where the model wrote one."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token at the request's temperature (at 1 where that is 0)."""
    finish_reason: Literal["stop", "length"]


class ModelClient(Protocol):
    """A policy, as the rollout sees it."""

    @property
    def version(self) -> int:
        """How many updates the policy has seen."""
        ...

    @property
    def max_positions(self) -> int:
        """Prompt and response together may have so many tokens."""
        ...

    def encode(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """The prompt as the model reads it: text (chat template applied, where there is one) and tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """One generation for each request, in order; called from a worker thread, one call at a time."""
        ...
