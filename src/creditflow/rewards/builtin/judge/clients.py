"""Clients that send a question to a judge: an OpenAI-compatible endpoint over HTTP, or a policy of the run.

`rollout.endpoint` implements the requests to an endpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from creditflow.data import Message
from creditflow.errors import CreditflowError, EndpointError
from creditflow.rollout import endpoint
from creditflow.rollout.client import GenerationRequest, ModelClient
from creditflow.rollout.endpoint import AttemptError, EndpointUsage
from creditflow.rollout.scheduler import Scheduler

_UNUSABLE_ENDS = {
    "length": "the reply was cut off at max_tokens, and so may be its verdict",
    "content_filter": "the reply was withheld by a content filter",
}


class JudgeError(CreditflowError):
    """The judge gave no usable reply; the message names the judge, the fault and the number of tries."""

    def __init__(self, message: str, status: Literal["failed", "timeout"] = "failed") -> None:
        super().__init__(message)
        self.status: Literal["failed", "timeout"] = status


# ---- endpoints


class EndpointJudge(endpoint.Endpoint):
    """A judge behind an OpenAI-compatible endpoint."""

    def identity(self) -> str:
        """Address and request, without the name of the key."""
        return json.dumps([self.url, self.model, dict(self.body)], sort_keys=True)

    async def ask(self, messages: Sequence[Message]) -> str:
        """Return the whole reply. Raises JudgeError without one."""
        try:
            return await self.complete(messages, _reply)
        except EndpointError as error:
            raise JudgeError(str(error), "timeout" if error.timed_out else "failed") from error


def _reply(answer: Any) -> str:
    text, end = endpoint.choice_of(answer)
    if end in _UNUSABLE_ENDS:
        raise AttemptError(_UNUSABLE_ENDS[end])
    if not isinstance(text, str):
        raise AttemptError("answered with a chat completion without text")
    return text


# ---- policies of the run


_SCHEDULERS: dict[tuple[asyncio.AbstractEventLoop, int], Scheduler] = {}
"""Schedulers by event loop and model. Judges that share a model share its batches: it takes one call at a time."""
_JUDGE = "judge"


@dataclass
class ModelJudge:
    """A policy of the run."""

    name: str
    max_tokens: int
    temperature: float
    seed: int
    max_concurrency: int
    """Maximum number of questions in one batch; judges that share a model use the smallest of their limits."""
    model: ModelClient | None = None
    """Set before the first call."""
    counts: EndpointUsage = field(default_factory=EndpointUsage)

    def identity(self) -> str:
        """Name and version of the model, and its sampling parameters."""
        version = self.model.version if self.model is not None else 0
        return json.dumps([self.name, version, self.max_tokens, self.temperature, self.seed])

    async def ask(self, messages: Sequence[Message]) -> str:
        """Generate the reply, in one batch with all other waiting questions. Raises JudgeError without one."""
        if (client := self.model) is None:
            raise JudgeError(f"policy {self.name}: the run handed over no policies")
        _, prompt_ids = client.encode(messages)
        if len(prompt_ids) + self.max_tokens > client.max_positions:
            raise JudgeError(
                f"{self.name}: a question of {len(prompt_ids)} tokens and a reply of {self.max_tokens} (max_tokens) do "
                f"not fit into the model's {client.max_positions}"
            )
        request = GenerationRequest(prompt_ids, self.max_tokens, self.temperature, self._seed_of(prompt_ids))
        self.counts.requests += 1
        start = time.perf_counter()
        generation = await self._scheduler(client).generate(_JUDGE, request)
        self.counts.answer(time.perf_counter() - start, (len(prompt_ids), len(generation.response_ids)))
        if generation.finish_reason in _UNUSABLE_ENDS:
            raise JudgeError(f"{self.name}: {_UNUSABLE_ENDS[generation.finish_reason]}")
        return client.decode(generation.response_ids)

    def _seed_of(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """A seed derived from the question, so that neither the order nor the batch changes the reply."""
        digest = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).digest()
        return (self.seed, int.from_bytes(digest[:8]))

    def _scheduler(self, client: ModelClient) -> Scheduler:
        loop = asyncio.get_running_loop()
        for other in [key for key in _SCHEDULERS if key[0].is_closed()]:
            del _SCHEDULERS[other]
        scheduler = _SCHEDULERS.setdefault((loop, id(client)), Scheduler({_JUDGE: client}, self.max_concurrency))
        scheduler.max_num_seqs = min(scheduler.max_num_seqs, self.max_concurrency)
        return scheduler

    async def aclose(self) -> None:
        """Release the model's scheduler in this event loop."""
        if self.model is not None:
            _SCHEDULERS.pop((asyncio.get_running_loop(), id(self.model)), None)


JudgeClient = EndpointJudge | ModelJudge
