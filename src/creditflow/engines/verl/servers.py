"""verl's rollout servers as the generator of rollouts.

Independent of workflows and trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from creditflow.errors import ConfigError, CreditflowError, first_line
from creditflow.rollout import Generation, GenerationRequest
from creditflow.rollout.chat import ChatModel, ChatTokenizer
from creditflow.rollout.client import ChatClient, FinishReason, PolicyView

SPANS = "version_spans"
"""The key in `extra_fields` of a response with `Step.version_spans` (see `versions`)."""
DEAD_SERVER = "a rollout server died or stopped responding: {cause}; run the same command again to resume"


@dataclass(slots=True)
class ServedPolicy(ChatModel):
    """A trained policy on verl's servers."""

    client: Any
    """verl's `LLMServerClient`."""
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
    fault: Exception | None = None
    """Always None: an error fails only its own rollout."""

    def expect(self, rollouts: int) -> None:
        """Do nothing: the servers batch requests without waiting."""

    async def idle(self) -> None:
        """Do nothing: a rollout has no work besides its calls."""

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """Generate one response. Raises CreditflowError if no server with the right weights answered."""
        served = self.clients[policy]
        assert isinstance(served, ServedPolicy)
        params = self._sampling_params(served, request)
        try:
            prompt = list(request.prompt_ids)
            output = await served.client.generate(self.request_id, prompt_ids=prompt, sampling_params=params)
        except RayActorError as error:
            raise CreditflowError(f"policy {policy}: {DEAD_SERVER.format(cause=first_line(error))}") from error
        if output.stop_reason in ("aborted", "abort"):  # vLLM's and SGLang's values
            raise CreditflowError(f"policy {policy}: the server aborted the call")
        spans = output.extra_fields.get(SPANS) or [(0, output.extra_fields.get("global_steps"))]
        if wrong := [version for _, version in spans if version is None or version not in self.versions]:
            first, last = self.versions[0], self.versions[-1]
            expected = f"{first}" if first == last else f"at least {first}"
            restarted = "the server restarted; the next update replaces its weights"
            got = f"the server holds weights of version {wrong[0]}, expected {expected}"
            raise CreditflowError(f"policy {policy}: {got}: {restarted}")
        ids = tuple(output.token_ids)
        if output.log_probs is None or len(output.log_probs) != len(ids):
            got = "none" if output.log_probs is None else str(len(output.log_probs))
            raise CreditflowError(f"policy {policy}: expected {len(ids)} log-probabilities, one a token, got {got}")
        cut_off = len(ids) >= request.max_tokens and not (ids and ids[-1] in served.chat_tokenizer.end_ids)
        reason: FinishReason = "length" if cut_off else "stop"
        return Generation(ids, tuple(output.log_probs), reason, spans[0][1], tuple(spans) if len(spans) > 1 else ())

    def _sampling_params(self, served: ServedPolicy, request: GenerationRequest) -> dict[str, Any]:
        """verl's sampling parameters of one call."""
        params = dict(self.sampling_params, temperature=request.temperature, max_tokens=request.max_tokens)
        # Servers stop only at the generation configuration's end tokens, which may lack the chat template's.
        params["stop_token_ids"] = sorted(served.chat_tokenizer.end_ids)
        if request.temperature == 0:
            return params | {"top_p": 1.0, "top_k": -1}
        if request.temperature != self.sampling_params["temperature"]:
            raise ConfigError(
                f"a workflow asks for temperature {request.temperature:g}; verl's trainer computes log-probs at one "
                f"temperature: expected {self.sampling_params['temperature']:g}, as in "
                "actor_rollout_ref.rollout.temperature, or 0 for a step that is not trained on"
            )
        return params
