"""Decoding on tensors of fixed shape and address, which CUDA graphs need. A recorder stands in for them on the CPU."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from creditflow.config import ActorModelConfig
from creditflow.engines.local import decoding
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.lora import Adapter
from creditflow.engines.local.planning import cache_numbers, sampling_bytes
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.products import use_fast_products
from creditflow.engines.local.sampler import generate
from creditflow.rollout import GenerationRequest
from tests.builders import mostly_slow
from tests.engines.architectures import small_model
from tests.engines.test_waits import expect_bf16_samples_of_the_update

MODELS = ("qwen2", "qwen3", "gpt2", "llama_tied", "deepseek_values_narrower_than_keys")


class Recording(TorchDispatchMode):
    """The operations of a step, with the tensors and numbers that they got."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run the operations again, with results where they were."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            inputs = {part.untyped_storage().data_ptr() for part in tensors([args, kwargs])}
            for old, new in zip(*map(tensors, (out, again)), strict=True):
                if old.untyped_storage().data_ptr() not in inputs:  # neither a view nor changed in place
                    old.copy_(new)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Captures:
    """Captures steps as CUDA graphs do: shapes, addresses and Python's numbers stay those of the captured step."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captured += 1
        recording = Recording()
        with recording:
            logits = step()
        fresh = [True]  # unlike a capture, the recording has run the step

        def replay() -> Tensor:
            if not fresh or not fresh.pop():
                recording.replay()
            self.replayed += 1
            return logits.clone()

        return replay


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Steps on the CPU are captured, even for a few replays, and caches of fixed shape are soon full."""
    captures = Captures()
    monkeypatch.setitem(decoding._CAPTURE, "cpu", captures)
    monkeypatch.setitem(decoding._ROOM, "cpu", 8)
    monkeypatch.setattr(decoding, "_LEAST_REPLAYS", 1)
    return captures


def requests_of(n: int) -> list[GenerationRequest]:
    """Prompts of 1 to 30 tokens, some of them shared, with 1 to 40 tokens to sample."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, 50, length).tolist()) for length in rng.integers(1, 31, n // 2)]
    return [
        GenerationRequest(prompts[k * k % len(prompts)], int(rng.integers(1, 41)), [1.0, 0.0, 0.7][k % 3], (k,))
        for k in range(n)
    ]


def expect_equal(found: list[Any], expected: list[Any]) -> None:
    """Equal tokens; log-probs within rounding in float32."""
    assert [one.response_ids for one in found] == [one.response_ids for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", mostly_slow(MODELS, {"qwen2", "gpt2"}))
def test_captured_steps_sample_the_same_tokens(name: str, request: pytest.FixtureRequest) -> None:
    model = small_model(name)
    shared = Forward(model).shares
    assert shared
    requests = requests_of(60)
    expected = generate(model, requests, frozenset({1, 2, 3}), pad_id=0, shared=True)
    captures = request.getfixturevalue("captures")
    found = generate(model, requests, frozenset({1, 2, 3}), pad_id=0, shared=True)
    expect_equal(found, expected)
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    assert captures.captured > 3  # a full cache and dropped rows change the shape
    assert captures.replayed > captures.captured


def test_captured_steps_apply_adapters(word_model_folder: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("peft")
    base = Policy.load(word_model_folder, torch.device("cpu"))
    adapted, policies = base.model, []
    for seed, name in enumerate(("first", "second")):
        adapter = Adapter.add(adapted, name, 4, ActorModelConfig(), seed)
        with torch.no_grad():
            for weight in adapter.parameters:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
        adapted = adapter.model
        policies.append(base.with_adapter(adapter))
    requests = [GenerationRequest((1 + k % 4,) * (1 + k % 5), 5 + k, 1.0, (k,)) for k in range(12)]
    expected = [policy.generate(requests) for policy in policies]
    assert expected[0] != expected[1]
    captures = request.getfixturevalue("captures")
    for policy, generations in zip(policies, expected, strict=True):
        expect_equal(policy.generate(requests), generations)
    assert captures.replayed


def test_failed_capture_warns_and_is_not_repeated(byte_policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        tried.append(step)
        raise RuntimeError("operation not permitted\nmore")

    expected = byte_policy.generate(requests_of(12))
    monkeypatch.setitem(decoding._CAPTURE, "cpu", fails)
    monkeypatch.setattr(decoding, "_capturable", weakref.WeakKeyDictionary())
    with pytest.warns(UserWarning, match="without a CUDA graph, which is slow: operation not permitted$"):
        expect_equal(byte_policy.generate(requests_of(12)), expected)
    expect_equal(byte_policy.generate(requests_of(12)), expected)
    assert len(tried) == 1


@pytest.mark.parametrize("name", ["llama_dynamic_ntk", "phi3_longrope", "qwen2_moe"])
def test_step_that_waits_is_not_captured(name: str, request: pytest.FixtureRequest) -> None:
    model = small_model(name)
    assert Forward(model).shares
    requests = [GenerationRequest((2, 3, 4 + k % 3), 20, 1.0, (k,)) for k in range(9)]
    expected = generate(model, requests, frozenset({1}), pad_id=0, shared=True)
    captures = request.getfixturevalue("captures")
    with pytest.warns(UserWarning, match="a step waits for the device"):
        found = generate(model, requests, frozenset({1}), pad_id=0, shared=True)
    expect_equal(found, expected)
    found = generate(model, requests, frozenset({1}), pad_id=0, shared=True)  # a second warning would be an error
    expect_equal(found, expected)
    assert captures.captured == 0


def test_trial_of_decoding_replays_steps(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_LEAST_REPLAYS", 16)
    assert decoding.decoding_error(small_model("qwen2"), 0, shared=True) < 1e-4
    assert captures.replayed == 2


@pytest.mark.parametrize("name", mostly_slow(MODELS, {"qwen2", "gpt2"}))
def test_captured_step_creates_no_tensor_of_numbers(name: str, captures: Captures) -> None:
    """It would be copied to the device, which a capture refuses. On the CPU, `Waits` does not record it."""
    model = small_model(name)
    use_fast_products(model)
    token = torch.zeros(4, dtype=torch.long)
    with torch.inference_mode(), decoding.rows_of(model, [(2, 3), (2, 3), (5,), (7,)], 0, 9, shared=True) as rows:
        rows.feed(token)
        with Recording() as recording:
            rows._step()
    assert "lift_fresh" not in {func.overloadpacket.__name__ for func, *_ in recording.calls}


def test_few_steps_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("qwen2")
    for n_tokens, n_captured, n_replayed in ((17, 0, 0), (18, 1, 16), (40, 1, 38)):
        captures = Captures()
        monkeypatch.setitem(decoding._CAPTURE, "cpu", captures)
        monkeypatch.setitem(decoding._ROOM, "cpu", 64)
        generate(model, [GenerationRequest((2, 3), n_tokens, 1.0, (0,))], frozenset(), pad_id=0, shared=True)
        assert (captures.captured, captures.replayed) == (n_captured, n_replayed)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_captured_bf16_samples_agree_with_the_update(name: str, captures: Captures) -> None:
    expect_bf16_samples_of_the_update(small_model(name))
    assert captures.replayed


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("most", [1, 7, 33, 100])
def test_cache_stays_within_the_memory_plan(fixed: bool, most: int, request: pytest.FixtureRequest) -> None:
    if fixed:
        request.getfixturevalue("captures")
    model, prompts = small_model("qwen2"), [(2, 3), (4, 5), (6, 7)]
    plan = sampling_bytes(model, 3, 2 + most)
    token = torch.zeros(3, dtype=torch.long)
    with torch.inference_mode(), decoding.rows_of(model, prompts, 0, most, shared=True) as rows:
        before = 0
        for _ in range(most):
            rows.feed(token)
            held = sum(room.untyped_storage().nbytes() for layer in rows._cache.layers for room in layer._rooms)
            assert before + held <= plan  # a cache that grows is held twice for a moment
            before = held
        assert held == 3 * 4 * most * cache_numbers(model)


@pytest.mark.parametrize("fixed", [False, True])
def test_more_tokens_than_announced_are_decoded(fixed: bool, request: pytest.FixtureRequest) -> None:
    if fixed:
        request.getfixturevalue("captures")
    model, found = small_model("qwen2"), []
    for most in (0, 3, 20):
        with torch.inference_mode(), decoding.rows_of(model, [(2, 3), (4,)], 0, most, shared=True) as rows:
            found.append(torch.stack([rows.feed(torch.tensor([k, k])) for k in range(2, 10)]))
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


def test_captured_rows_are_freed_at_once(captures: Captures) -> None:
    """A cycle would keep gigabytes of keys and values until the garbage collector runs."""
    model = small_model("qwen2")
    with torch.inference_mode(), decoding.rows_of(model, [(2, 3), (4,)], 0, 9, shared=True) as rows:
        for _ in range(3):
            rows.feed(torch.zeros(2, dtype=torch.long))
        freed = weakref.ref(rows)
    del rows
    assert freed() is None


def test_layer_without_keys_grows_and_drops_rows() -> None:
    layer = decoding.GrowingLayer(8)
    layer.grow(16)
    layer.keep(torch.tensor([0]))
    assert layer.get_seq_length() == 0
