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
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.rollout.client import Generation, GenerationRequest

_ARRIVAL_S = 0.005
"""A batch closes after this time without new requests. Requests of one step arrive within milliseconds."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server, reused when it restarts."""

    folder: str
    """A Hugging Face folder: the weights of version 0."""
    dtype: str
    """torch's name of the dtype of computation; weights are float32."""
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


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Sampling parameters under verl's names."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """Below 1: no limit."""
    logprobs: bool
    seed: tuple[int, ...] | None

    @property
    def filters(self) -> tuple[float, float, int] | None:
        """The filter that all rows of a batch must share; None: no filter, at any temperature."""
        return (self.temperature, self.top_p, self.top_k) if self.top_p < 1 or self.top_k > 0 else None


@dataclass(slots=True)
class _Waiting:
    request_id: str
    request: GenerationRequest
    sampling: _Sampling
    answer: asyncio.Future[Generation | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The result; None if the request was aborted."""


class Server:
    """Samples with the latest weights."""

    def __init__(self, options: ServerOptions) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.options = options
        self.policy = Policy.load(options.folder, pick_device("auto"))
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
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **_: Any,
    ) -> Answer:
        """Generate tokens after `prompt_ids`. Raises ValueError if the prompt is too long or an option is unknown."""
        if image_data is not None or video_data is not None:
            raise ValueError("this rollout server takes text alone: image_data and video_data must be None")
        prompt = tuple(int(token) for token in prompt_ids)
        sampling = self._sampling(dict(sampling_params), len(prompt))
        seed = sampling.seed or (*self.options.seed, self._n_requests)
        self._n_requests += 1
        if self._paused and self._rejects:
            return self._answer(None, sampling)
        waiting = _Waiting(
            request_id, GenerationRequest(prompt, sampling.max_tokens, sampling.temperature, seed), sampling
        )
        self._queue.append(waiting)
        self._serve_on()
        return self._answer(await waiting.answer, sampling)

    def _sampling(self, given: dict[str, Any], n_prompt: int) -> _Sampling:
        room = self.max_model_len - n_prompt
        if room < 1:
            raise ValueError(f"a prompt of {n_prompt} tokens leaves no room in {self.max_model_len} positions")
        # Same order and bounds as in verl's vLLM server.
        response, total = self.options.response_length, self.options.prompt_length + self.options.response_length
        limits = [given.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        limit = next((limit for limit in limits if limit is not None), min(response, total - n_prompt))
        seed = given.pop("seed", None)
        if other := {*given.pop("stop_token_ids", ())} - self.policy.eos_ids:
            raise ValueError(f"this rollout server ends at its model's own tokens alone, not at {sorted(other)}")
        if given.pop("repetition_penalty", 1.0) != 1.0:
            raise ValueError("this rollout server knows no repetition_penalty")
        sampling = _Sampling(
            max_tokens=max(1, min(int(limit), room)),
            temperature=float(given.pop("temperature", 1.0)),
            top_p=float(given.pop("top_p", 1.0)),
            top_k=int(given.pop("top_k", -1)),
            logprobs=bool(given.pop("logprobs", False)),
            seed=None if seed is None else tuple(seed) if isinstance(seed, Sequence) else (int(seed),),
        )
        if given:
            raise ValueError(f"sampling parameters that this rollout server does not know: {', '.join(sorted(given))}")
        return sampling

    def _answer(self, generation: Generation | None, sampling: _Sampling) -> Answer:
        extra = {"global_steps": self.global_steps}
        if generation is None:
            return Answer({"token_ids": [], "log_probs": None, "stop_reason": "aborted", "extra_fields": extra})
        return Answer(
            {
                "token_ids": list(generation.response_ids),
                "log_probs": list(generation.logprobs) if sampling.logprobs else None,
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
                batch = self._next_batch()
                if not batch:
                    continue
                try:
                    generations = await asyncio.to_thread(self._generate, batch)
                except Exception as error:  # passed on to the callers
                    for waiting in batch:
                        waiting.answer.set_exception(error)
                    continue
            for waiting, generation in zip(batch, generations, strict=True):
                waiting.answer.set_result(generation)

    def _next_batch(self) -> list[_Waiting]:
        self._queue = deque(waiting for waiting in self._queue if not waiting.answer.done())
        if not self._queue:
            return []
        filters = self._queue[0].sampling.filters
        batch = [waiting for waiting in self._queue if waiting.sampling.filters == filters]
        batch = batch[: self.options.max_num_seqs]
        taken = {id(waiting) for waiting in batch}
        self._queue = deque(waiting for waiting in self._queue if id(waiting) not in taken)
        return batch

    def _generate(self, batch: Sequence[_Waiting]) -> list[Generation]:
        filters = batch[0].sampling.filters
        model = self.policy.model if filters is None else _Filtered(self.policy.model, *filters)
        dtype = getattr(torch, self.options.dtype)
        with torch.autocast(self.policy.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return sampler.generate(
                model, [waiting.request for waiting in batch], self.policy.eos_ids, self.policy.pad_id
            )

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

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing, as in the methods below: weights and cache are never released."""

    async def sleep(self) -> None:
        pass

    async def clear_kv_cache(self) -> None:
        pass

    async def release_kv_cache(self) -> None:
        pass

    async def resume_kv_cache(self) -> None:
        pass

    async def start_profile(self, **_: Any) -> None:
        pass

    async def stop_profile(self) -> None:
        pass


class _Filtered:
    """A model with top-k and top-p applied to its logits, so that log-probs match the sampling distribution."""

    def __init__(self, model: Any, temperature: float, top_p: float, top_k: int) -> None:
        self.model, self.config = model, model.config
        self.temperature = temperature or 1.0
        self.top_p = top_p
        self.top_k = top_k

    def parameters(self) -> Any:
        return self.model.parameters()

    def __call__(self, **inputs: Any) -> Any:
        out = self.model(**inputs)
        out.logits = keep_top(out.logits.float(), self.temperature, self.top_p, self.top_k)
        return out


def keep_top(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Keep the `top_k` likeliest of logits [..., V], then the fewest with a share of `top_p`; set others to -inf."""
    ordered, order = logits.sort(dim=-1, descending=True)
    if top_k > 0:
        ordered[..., top_k:] = -torch.inf
    probability = torch.softmax(ordered / temperature, dim=-1)
    ordered[probability.cumsum(-1) - probability >= top_p] = -torch.inf
    return torch.empty_like(logits).scatter_(-1, order, ordered)
