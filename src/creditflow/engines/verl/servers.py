"""verl's rollout servers as the generator of rollouts.

Independent of workflows and trajectories.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from creditflow.errors import ConfigError, CreditflowError, first_line
from creditflow.rollout import Generation, GenerationRequest
from creditflow.rollout.chat import ChatModel, ChatTokenizer
from creditflow.rollout.client import ChatClient, FinishReason, PolicyView

SPANS = "version_spans"
"""The key in `extra_fields` of a response with `Step.version_spans` (see `versions`)."""
ATTEMPTS = 3
"""The number of attempts of a call if its server dies. All go to the same server, which Ray may restart."""
_PAUSE_S = 0.5


class LostServerError(CreditflowError):
    """A rollout server died or aborted a call, or was restarted and holds other weights than the current ones."""


class ServerClient(Protocol):
    """The used part of `verl.workers.rollout.llm_server.LLMServerClient`."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:  # TokenOutput
        """Generate one response."""
        ...


class IdleClock:
    """Measures the seconds in which no call was in flight."""

    def __init__(self) -> None:
        self._calls, self._idle_s, self._since = 0, 0.0, time.monotonic()

    def __enter__(self) -> None:
        if self._calls == 0:
            self._idle_s += time.monotonic() - self._since
        self._calls += 1

    def __exit__(self, *_: object) -> None:
        self._calls -= 1
        self._since = time.monotonic()

    def take(self) -> float:
        """The idle seconds since the last reading."""
        now = time.monotonic()
        if self._calls == 0:
            self._idle_s += now - self._since
            self._since = now
        taken, self._idle_s = self._idle_s, 0.0
        return taken


@dataclass(slots=True)
class ServedPolicy(ChatModel):
    """A trained policy on verl's servers."""

    client: ServerClient
    chat_tokenizer: ChatTokenizer
    max_positions: int
    version: int = 0
    """Constant. The servers return the version with each response (`Generation.version`)."""


@dataclass(frozen=True, slots=True)
class Servers:
    """The generator of one rollout.

    All its calls go to the same server, which has its prompt prefixes cached.
    """

    clients: Mapping[str, PolicyView | ChatClient]
    sampling_params: Mapping[str, Any]
    """verl's sampling parameters of the whole batch; temperature and length come from the request."""
    versions: range
    """The versions of weights from which the rollout may sample."""
    request_id: str
    idle_clock: IdleClock = field(default_factory=IdleClock)
    """Shared by the rollouts of a worker."""
    fault: Exception | None = None
    """Always None: an error fails only its own rollout."""

    def expect(self, rollouts: int) -> None:
        """Do nothing: the servers batch requests without waiting."""

    async def idle(self) -> None:
        """Do nothing: a rollout has no work besides its calls."""

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """Generate one response. Raises LostServerError if no server with the right weights answered."""
        served = self.clients[policy]
        assert isinstance(served, ServedPolicy)
        output = await self._ask(served, request)
        if output.stop_reason in ("aborted", "abort"):  # vLLM's and SGLang's values
            raise LostServerError(f"policy {policy}: the server aborted the call")
        spans = output.extra_fields.get(SPANS) or [(0, output.extra_fields.get("global_steps"))]
        if wrong := [version for _, version in spans if version is None or version not in self.versions]:
            first, last = self.versions[0], self.versions[-1]
            expected = f"{first}" if first == last else f"at least {first}"
            raise LostServerError(
                f"policy {policy}: the server holds weights of version {wrong[0]}, expected {expected}: the "
                "server restarted; the next update replaces its weights"
            )
        ids = tuple(output.token_ids)
        if output.log_probs is None or len(output.log_probs) != len(ids):
            got = "none" if output.log_probs is None else str(len(output.log_probs))
            raise CreditflowError(f"policy {policy}: expected {len(ids)} log-probabilities, one a token, got {got}")
        cut_off = len(ids) >= request.max_tokens and not (ids and ids[-1] in served.chat_tokenizer.end_ids)
        reason: FinishReason = "length" if cut_off else "stop"
        return Generation(ids, tuple(output.log_probs), reason, spans[0][1], tuple(spans) if len(spans) > 1 else ())

    async def _ask(self, served: ServedPolicy, request: GenerationRequest) -> Any:
        from ray.exceptions import RayActorError

        client = served.client
        params = dict(self.sampling_params, temperature=request.temperature, max_tokens=request.max_tokens)
        # Servers stop only at the generation configuration's end tokens, which may lack the chat template's.
        params["stop_token_ids"] = sorted(served.chat_tokenizer.end_ids)
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
                with self.idle_clock:
                    return await client.generate(
                        self.request_id, prompt_ids=list(request.prompt_ids), sampling_params=dict(params)
                    )
            except RayActorError as error:
                if attempt == ATTEMPTS:
                    raise LostServerError(f"the server died, {ATTEMPTS} times: {first_line(error)}") from error
                await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")
