"""What a rollout asks of those who answer: a policy of the run, token by token, or a frozen model behind an endpoint.

`Generator` is what a team is played on. An engine brings one (`Scheduler` on one machine); plays know no more of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from creditflow.chat import Prompt
from creditflow.trajectory import Message

FinishReason = Literal["stop", "length"]


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
    finish_reason: FinishReason
    version: int | None = None
    """How many updates the policy had seen that answered, where only its server knows; None: the client's version."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What a model behind an endpoint answered."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int | None = None
    """As the server counts them; None where it does not say."""
    completion_tokens: int | None = None


class PolicyView(Protocol):
    """A policy of the run, as a play sees it: how text becomes its tokens, and how much fits."""

    @property
    def version(self) -> int:
        """How many updates the policy has seen."""
        ...

    @property
    def max_positions(self) -> int:
        """Prompt and response together may have so many tokens."""
        ...

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[int, ...]]:
        """The prompt as the model reads it: text (chat template applied, where there is one) and tokens.

        `prompt`: chat messages; a text stands as it is, and so do tokens. `tools`: JSON schemas of functions, as OpenAI
        has them.
        """
        ...

    def follow(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between a response and the next one of the same turn, for `messages` by others in between."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        ...


class ModelClient(PolicyView, Protocol):
    """A policy of this process: many prompts to many responses at once."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """One generation for each request, in order; called from a worker thread, one call at a time."""
        ...


class ChatClient(ABC):
    """A frozen model that takes messages and gives text: its tokens are not ours, so nothing of it can be trained.

    A base class rather than a protocol, for a play asks of each client which of the two kinds it is.
    """

    @abstractmethod
    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        """The reply to one conversation; many may be waited for at once.

        Raises PromptTooLong where the model has no room for the prompt (the message goes on from "the prompt"), and
        EndpointError where no reply came.
        """


class Generator(Protocol):
    """Who generates for the plays of one batch.

    What goes wrong with one call is raised to its caller and fails that play alone. What is nobody's play (a model that
    broke) is kept as `fault` besides, and whoever played raises it.
    """

    @property
    def clients(self) -> Mapping[str, PolicyView | ChatClient]:
        """The policies by name; those of an endpoint are called directly, the others through `generate`."""
        ...

    @property
    def fault(self) -> Exception | None:
        """The first error that is no play's own; None where there is none."""
        ...

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """The response of the policy named to `request`."""
        ...

    def expect(self, plays: int) -> None:
        """So many more plays (fewer, where negative) think outside of this event loop, and are about to call."""
        ...

    async def idle(self) -> None:
        """Returns when nothing is generated any more."""
        ...
