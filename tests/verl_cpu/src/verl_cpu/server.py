"""The Ray actor behind a rollout replica, which batches concurrent requests and samples with creditflow's sampler.

It must not import verl, which takes seconds. Its answers become verl's `TokenOutput` in the receiving process.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from creditflow.engines.local import sampler
from creditflow.engines.local.policy import Policy
from creditflow.rollout.client import Generation, GenerationRequest

_ARRIVAL_S = 0.005
"""A batch closes after this time without new requests. Requests of one step arrive within milliseconds."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server, reused when it restarts."""

    folder: str
    """A Hugging Face folder: the weights of version 0."""
    prompt_length: int
    response_length: int
    max_model_len: int | None
    """The limit of prompt and response tokens; default: the model's positions."""
    max_num_seqs: int
    """The largest batch."""
    seed: tuple[int, ...]


@dataclass(slots=True)
class Answer:
    """The answer to one request, which unpickles as verl's `TokenOutput`."""

    fields: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _token_output, (self.fields,)


def _token_output(fields: dict[str, Any]) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(**fields)


@dataclass(slots=True)
class _Waiting:
    request_id: str
    request: GenerationRequest
    answer: asyncio.Future[Generation | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The result; None if the request was aborted."""


class Server:
    """Samples with the latest weights."""

    def __init__(self, options: ServerOptions) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.options = options
        self.policy = Policy.load(options.folder, torch.device("cpu"))
        self.max_model_len = min(options.max_model_len or self.policy.max_positions, self.policy.max_positions)
        self.global_steps = 0
        """The version of the weights: the trainer's step, or 0 for the folder's weights."""
        self._parameters = self.policy.model.state_dict()
        self._n_requests = 0
        self._queue: deque[_Waiting] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._at_the_model = asyncio.Lock()
        self._paused = self._rejects = False

    def pid(self) -> int:
        """The id of this process. It answers only after the model is loaded."""
        return os.getpid()

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> Answer:
        """Generate tokens after `prompt_ids`. Raises ValueError if the prompt is too long or an option is unknown."""
        seed = (*self.options.seed, self._n_requests)
        self._n_requests += 1
        request = self._request(tuple(map(int, prompt_ids)), dict(sampling_params), seed)
        if self._paused and self._rejects:
            return self._answer(None)
        waiting = _Waiting(request_id, request)
        self._queue.append(waiting)
        self._serve_on()
        return self._answer(await waiting.answer)

    def _request(self, prompt: tuple[int, ...], params: dict[str, Any], seed: tuple[int, ...]) -> GenerationRequest:
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in {self.max_model_len} positions")
        # Same order and bounds as in verl's vLLM server.
        response, total = self.options.response_length, self.options.prompt_length + self.options.response_length
        max_tokens = int(params.pop("max_tokens", min(response, total - len(prompt))))
        if other := {*params.pop("stop_token_ids", ())} - self.policy.eos_ids:
            raise ValueError(f"this rollout server ends at its model's own tokens alone, not at {sorted(other)}")
        temperature = float(params.pop("temperature", 1.0))
        params.pop("logprobs", None)  # always returned
        neutral = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        if unknown := {name: value for name, value in params.items() if value != neutral.get(name)}:
            raise ValueError(f"sampling parameters that this rollout server does not know: {unknown}")
        return GenerationRequest(prompt, max(1, min(max_tokens, room)), temperature, seed)

    def _answer(self, generation: Generation | None) -> Answer:
        extra = {"global_steps": self.global_steps}
        if generation is None:
            return Answer({"token_ids": [], "log_probs": None, "stop_reason": "aborted", "extra_fields": extra})
        return Answer(
            {
                "token_ids": list(generation.response_ids),
                "log_probs": list(generation.logprobs),
                "stop_reason": "completed",  # also at the token limit, as in verl's vLLM server
                "extra_fields": extra,
            }
        )

    def _serve_on(self) -> None:
        if not self._paused and (self._serving is None or self._serving.done()):
            self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while self._queue and not self._paused:
            n_seen = 0
            while n_seen < len(self._queue):
                n_seen = len(self._queue)
                await asyncio.sleep(_ARRIVAL_S)
            async with self._at_the_model:
                self._queue = deque(waiting for waiting in self._queue if not waiting.answer.done())
                n_rows = min(len(self._queue), self.options.max_num_seqs)
                if n_rows == 0:
                    continue
                batch = [self._queue.popleft() for _ in range(n_rows)]
                try:
                    generations = await asyncio.to_thread(self._generate, batch)
                except Exception as error:  # passed on to the callers
                    for waiting in batch:
                        waiting.answer.set_exception(error)
                    continue
            for waiting, generation in zip(batch, generations, strict=True):
                waiting.answer.set_result(generation)

    def _generate(self, batch: Sequence[_Waiting]) -> list[Generation]:
        requests = [waiting.request for waiting in batch]
        return sampler.generate(self.policy.model, requests, self.policy.eos_ids, self.policy.pad_id)

    async def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights between two batches. Raises KeyError for an unknown weight."""
        async with self._at_the_model:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    self._parameters[name].copy_(tensor)

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Answer waiting requests as aborted, and hold (or reject) new ones until `resume_generation`."""
        self._paused, self._rejects = True, reject_request
        aborted = [waiting for waiting in self._queue if not waiting.answer.done()]
        self._queue.clear()
        for waiting in aborted:
            waiting.answer.set_result(None)
        async with self._at_the_model:  # the current batch finishes normally
            return {"aborted_count": len(aborted), "request_ids": [waiting.request_id for waiting in aborted]}

    async def resume_generation(self) -> None:
        self._paused = self._rejects = False
        if self._queue:
            self._serve_on()

    async def wake_up(self, *_: Any, **__: Any) -> None:
        """Do nothing: weights and cache are never released, and nothing is profiled."""

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = wake_up
