"""Interfaces between rollouts and models: a policy of the run, token by token, or a frozen model behind an endpoint.

Rollouts use a `Generator`, which the engine provides (`Scheduler` on one machine).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from creditflow.data import Message

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call of one agent."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0: greedy."""
    seed: tuple[int, ...]
    """Key of this call's random numbers: its samples do not depend on the rest of the batch."""
    rollout: tuple[int, ...] = ()
    """Key of the rollout's random numbers; it differs from those of its group in the last number alone."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A model's response to one request."""

    response_ids: tuple[int, ...]
    """Includes the end-of-sequence token, if the model wrote one."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token at the request's temperature (at 1 if that is 0)."""
    finish_reason: FinishReason
    version: int | None = None
    """Number of updates of the policy that answered, if only its server has it; None: the client's version."""
    version_spans: tuple[tuple[int, int], ...] = ()
    """As `Step.version_spans`, if the policy was updated during the response; `version` is then that of the first."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The reply of a model behind an endpoint."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int | None = None
    """As the server counts them; None if it gives no count."""
    completion_tokens: int | None = None


class PolicyView(Protocol):
    """A policy of the run, from a rollout's side: its tokens, and how many fit."""

    @property
    def version(self) -> int:
        """Number of updates of the policy."""
        ...

    @property
    def max_positions(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        ...

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[int, ...]]:
        """Return the prompt as the model reads it: text (with the chat template, if there is one) and tokens.

        `tools`: JSON schemas of functions in OpenAI's format.
        """
        ...

    def follow(self, messages: Sequence[Message], prompt: str = "") -> tuple[int, ...]:
        """Return the tokens between two responses to `prompt`, for the `messages` by others between them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without tokens that end it or stand around turns."""
        ...


class ModelClient(PolicyView, Protocol):
    """A policy of this process, with batched generation."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation for each request, in order. Called from a worker thread, one call at a time."""
        ...


class ChatClient(ABC):
    """A frozen model that takes messages and returns text. Its tokens are unknown, so its steps cannot be trained.

    A base class rather than a protocol: a rollout tests each client for its kind.
    """

    @abstractmethod
    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        """Return the reply to one conversation. Supports concurrent calls.

        Raises PromptTooLong if the model has no room for the prompt (the message continues after "the prompt"), and
        EndpointError if no reply came.
        """


class Generator(Protocol):
    """The source of generations for the rollouts of one batch.

    An error of one call is raised to its caller and fails that rollout alone. An error of the model itself is also kept
    as `fault`, which the function that runs the rollouts raises.
    """

    @property
    def clients(self) -> Mapping[str, PolicyView | ChatClient]:
        """The policies by name. Those behind an endpoint are called directly, the others through `generate`."""
        ...

    @property
    def fault(self) -> Exception | None:
        """The first error that is not a rollout's fault, or None."""
        ...

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """Return the response of the named policy to `request`."""
        ...

    def expect(self, rollouts: int) -> None:
        """Add to the number of rollouts that run outside this event loop and are about to call (negative: subtract)."""
        ...

    async def idle(self) -> None:
        """Return when no generation is running."""
        ...
