"""verl's rollout servers as the generator that teams are played on. Knows the servers' calls, and of plays nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from creditflow.chat import ChatTokenizer, Prompt
from creditflow.errors import ConfigError, CreditflowError, first_line
from creditflow.rollout import Generation, GenerationRequest
from creditflow.rollout.client import ChatClient, PolicyView
from creditflow.trajectory import Message

ATTEMPTS = 3
"""Of a call whose server died under it: they go to the same one, which Ray may bring back."""
_PAUSE_S = 0.5


class LostServer(CreditflowError):
    """A rollout server died, or came back with other weights than those that are being played."""


class Client(Protocol):
    """`verl.workers.rollout.llm_server.LLMServerClient`, as far as it is used."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:  # TokenOutput
        """One response."""
        ...


@dataclass(slots=True)
class ServedPolicy:
    """A trained policy behind verl's servers, as a play sees it."""

    client: Client
    chat: ChatTokenizer
    eos_ids: frozenset[int]
    max_positions: int
    version: int = 0
    """Never moves: which version gave a response, the servers say with each (`Generation.version`)."""

    @property
    def tokenizer(self) -> Any:
        """As transformers has it."""
        return self.chat.tokenizer

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[int, ...]]:
        """See `ChatTokenizer.encode`."""
        return self.chat.encode(prompt, tools)

    def follow(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """See `ChatTokenizer.follow`."""
        return self.chat.follow(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self.chat.decode(ids)


@dataclass(frozen=True, slots=True)
class Servers:
    """The generator of one play: all its calls go to the same server, which knows the beginning of its prompts."""

    clients: Mapping[str, PolicyView | ChatClient]
    sampling_params: Mapping[str, Any]
    """verl's, for the whole batch; temperature and length come from the request."""
    version: int
    """Of the weights that the servers must hold."""
    request_id: str
    fault: Exception | None = None
    """Never set: what goes wrong fails the play that it happens to."""

    def expect(self, plays: int) -> None:
        """The servers batch what comes, and wait for nobody."""

    async def idle(self) -> None:
        """A play has ended when its calls have: there is nothing else."""

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """One response. Raises LostServer where no server gave one that holds the right weights."""
        served = self.clients[policy]
        assert isinstance(served, ServedPolicy)
        output = await self._ask(served, request)
        if output.stop_reason in ("aborted", "abort"):  # vLLM's word, and SGLang's
            raise LostServer(f"policy {policy}: the server aborted the call")
        version = output.extra_fields.get("global_steps")
        if version != self.version:
            raise LostServer(
                f"policy {policy}: the server holds weights of version {version}, expected {self.version}: it was "
                "restarted, and gets the right ones with the next update"
            )
        ids = tuple(output.token_ids)
        if output.log_probs is None or len(output.log_probs) != len(ids):
            got = "none" if output.log_probs is None else str(len(output.log_probs))
            raise CreditflowError(f"policy {policy}: expected {len(ids)} log-probabilities, one a token, got {got}")
        cut_off = len(ids) >= request.max_tokens and not (ids and ids[-1] in served.eos_ids)
        return Generation(ids, tuple(output.log_probs), "length" if cut_off else "stop", version)

    async def _ask(self, served: ServedPolicy, request: GenerationRequest) -> Any:
        from ray.exceptions import RayActorError

        client = served.client
        params = dict(self.sampling_params, temperature=request.temperature, max_tokens=request.max_tokens)
        # A server ends at the tokens of the generation configuration alone; the chat template's may not be among them.
        params["stop_token_ids"] = sorted(served.eos_ids)
        if request.temperature == 0:
            params |= {"top_p": 1.0, "top_k": -1}
        elif request.temperature != self.sampling_params["temperature"]:
            raise ConfigError(
                f"a workflow asks for temperature {request.temperature:g}; verl's trainer computes log-probs at one "
                f"temperature: expected {self.sampling_params['temperature']:g}, as in "
                "actor_rollout_ref.rollout.temperature, or 0 for a step that is not trained on"
            )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await client.generate(
                    self.request_id, prompt_ids=list(request.prompt_ids), sampling_params=dict(params)
                )
            except RayActorError as error:
                if attempt == ATTEMPTS:
                    raise LostServer(f"the server died, {ATTEMPTS} times: {first_line(error)}") from error
                await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")
