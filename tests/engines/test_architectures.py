"""Compare log-probs of many architectures with transformers, one row at a time and without a cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from creditflow.data import Floats, TrajectoryBatch
from creditflow.engines.local.actor import token_logprobs
from creditflow.engines.local.policy import Policy
from creditflow.errors import ModelError
from creditflow.rollout import GenerationRequest
from tests.builders import mostly_slow
from tests.engines.architectures import ARCHITECTURES, REFUSED, SWITCH, VOCABULARY, WINDOW, save_tiny
from tests.engines.batches import batch_of

AGREE = 1e-4
LONGEST = 40
CPU = torch.device("cpu")
FAST = {"llama_llama3_rope", "phi3_longrope", "gemma3n_unshared", "gpt_oss_window_sink", "gpt2"}
FAST_REFUSED = {"mamba", "lfm2_convolutions", "qwen3_next", "bart_positions_by_order"}


def requests_up_to(limit: int) -> list[GenerationRequest]:
    """Requests shorter and longer than the window and the switch, up to `limit` tokens; some share a prompt."""
    rng = np.random.default_rng(0)
    prompts = [1, WINDOW - 1, WINDOW + 1, SWITCH - 1, SWITCH + 1]
    shared = {n: tuple(rng.integers(1, VOCABULARY, n).tolist()) for n in prompts if n < limit}
    ends = [WINDOW, WINDOW + 1, SWITCH, SWITCH + 1, LONGEST]
    rows = [(ids, end - n) for n, ids in shared.items() for end in ends if n < end <= limit]
    return [GenerationRequest(ids, left, (1.0, 0.7)[k % 2], (k,)) for k, (ids, left) in enumerate(rows)]


def batch_of_requests(rows: list[tuple[GenerationRequest, tuple[int, ...]]]) -> TrajectoryBatch:
    """One trajectory per request and response."""
    return batch_of([(asked.prompt_ids, ids) for asked, ids in rows], (), [asked.temperature for asked, _ in rows])


@torch.no_grad()
def trained(policy: Policy, batch: TrajectoryBatch, steps: list[int], max_tokens: int) -> Floats:
    """Log-probs [T] of a training pass over `steps`; NaN at the tokens of other steps."""
    logprobs_T = np.full(len(batch.response_ids), np.nan)
    for packed in policy.forward.micro_batches(batch, np.array(steps), max_tokens):
        logprobs_T[packed.token_at] = token_logprobs(policy.forward, packed, batch)[0].numpy()
    return logprobs_T


@torch.no_grad()
def expected(model: Any, asked: GenerationRequest, response: tuple[int, ...]) -> Floats:
    """Log-probs of a single row from transformers' forward pass."""
    ids = torch.tensor([[*asked.prompt_ids, *response]])
    logits = model(ids, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1].double() / asked.temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(asked.prompt_ids) :, None])[:, 0].numpy()


@pytest.mark.parametrize("name", mostly_slow(ARCHITECTURES, FAST))
def test_sampled_and_trained_logprobs_agree(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    architecture = ARCHITECTURES[name]
    save_tiny(architecture, tmp_path)
    policy = Policy.load(tmp_path, CPU)
    limit = architecture.limit or 64
    if architecture.limit is not None:
        assert policy.max_positions == limit
    requests = requests_up_to(limit)
    generations = policy.generate(requests)
    rows = [(asked, generation.response_ids) for asked, generation in zip(requests, generations, strict=True)]
    # transformers' eager attention of Falcon rounds ALiBi's biases to bfloat16 elsewhere than its default attention.
    attention = "sdpa" if name == "falcon_alibi" else "eager"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    right = [expected(model, *row) for row in rows]
    # Rows must reach the tested lengths.
    assert max(len(asked.prompt_ids) + len(response) for asked, response in rows) == min(limit, LONGEST)

    for generation, row in zip(generations, right, strict=True):
        np.testing.assert_allclose(generation.logprobs, row, atol=AGREE, rtol=0)
    few = range(0, len(rows), 4)
    for k in few:
        (alone,) = policy.generate([requests[k]])
        assert alone.response_ids == rows[k][1]
        np.testing.assert_allclose(alone.logprobs, right[k], atol=AGREE, rtol=0)

    batch, every = batch_of_requests(rows), list(range(len(rows)))
    for max_tokens in (150, 10_000):
        logprobs_T = trained(policy, batch, every, max_tokens)
        np.testing.assert_allclose(logprobs_T, np.concatenate(right), atol=AGREE, rtol=0)
    for k in few:
        logprobs_T = trained(policy, batch, [k], 150)
        np.testing.assert_allclose(logprobs_T[~np.isnan(logprobs_T)], right[k], atol=AGREE, rtol=0)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if ARCHITECTURES[name].limit is not None])
def test_rows_beyond_a_rotary_switch_are_rejected(name: str, tmp_path: Path) -> None:
    save_tiny(ARCHITECTURES[name], tmp_path)
    policy = Policy.load(tmp_path, CPU)
    long, short = GenerationRequest((5,) * 30, 3, 1.0, (0,)), GenerationRequest((5, 6), 3, 1.0, (1,))
    with pytest.raises(ModelError, match=r"expected at most 32 tokens, got 33: the model's rotary frequencies"):
        policy.generate([short, long])
    batch = batch_of_requests([(short, (7, 8, 9)), (long, (7, 8, 9))])
    with pytest.raises(ModelError, match=r"a step: expected at most 32 tokens, got 33: the model's rotary"):
        trained(policy, batch, [0, 1], 150)


@pytest.mark.parametrize("name", mostly_slow(REFUSED, FAST_REFUSED))
def test_unsupported_architecture_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    save_tiny(REFUSED[name], tmp_path)
    with pytest.raises(ModelError, match=r"model\.path: .* cannot be decoded in batches here: \S+ is not supported"):
        Policy.load(tmp_path, CPU)
