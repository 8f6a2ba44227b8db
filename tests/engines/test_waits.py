"""Work on an accelerator runs ahead of Python until Python reads a number back. Decoding must seldom do so."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from creditflow.engines.local import decoding, sampler
from creditflow.engines.local.decoding import rows_of
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.products import use_fast_products
from creditflow.engines.local.sampler import Temperatures, sample
from creditflow.engines.local.waits import Waits
from creditflow.rollout import GenerationRequest
from tests.builders import mostly_slow
from tests.engines.architectures import small_model

HALF = {"device_type": "cpu", "dtype": torch.bfloat16}


def requests_of(n_tokens: int) -> list[GenerationRequest]:
    return [GenerationRequest((2, 3, k // 3), n_tokens, [1.0, 0.0, 0.5][k % 3], (k,)) for k in range(9)]


def counted(name: str, n_tokens: int) -> int:
    model = small_model(name)
    with Waits() as waits:
        sampler.generate(model, requests_of(n_tokens), frozenset(), pad_id=0, shared=Forward(model).shares)
    return len(waits.names)


@torch.library.custom_op("creditflow_tests::first", mutates_args=())
def first(x: Tensor) -> Tensor:
    """An operation outside torch, which may read numbers."""
    return x[:1] * x[0].item()


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "_local_scalar_dense": lambda x: bool(x[0] > 0),
    "nonzero": lambda x: torch.where(x > 0),
    "index": lambda x: x[x > 0],
    "index_put_": lambda x: x.index_put_([x > 0], x[0]),
    "equal": lambda x: torch.equal(x, x),
    "_to_copy": lambda x: x.to("meta"),
    "copy_": lambda x: torch.empty(3, device="meta").copy_(x),
    "lift_fresh": lambda x: torch.ops.aten.lift_fresh(x.to("meta")),
    "first": first,
}


@pytest.mark.parametrize("name", WAITING)
@pytest.mark.parametrize("inference", [False, True])
def test_operation_that_waits_is_recorded(name: str, inference: bool) -> None:
    """In inference mode, torch hands composed operations over whole."""
    with torch.inference_mode(inference), Waits() as waits:
        WAITING[name](torch.ones(3))
    assert waits.names[-1] == name


def test_lists_are_recorded_as_copies_from_a_device() -> None:
    with pytest.raises(NotImplementedError, match="no data"), Waits() as waits:
        torch.empty(3, device="meta").tolist()
    assert waits.names == ["_to_copy"]


def test_other_operations_are_not_recorded() -> None:
    x = torch.ones(3)
    with Waits() as waits:
        x[torch.tensor([0, 1])] = x.double()[:2].float()
        torch.where(x > 0, x, 0.0).masked_fill_(x > 0, 2.0).sort()
    assert waits.names == []


DENSE = ("llama", "qwen2", "qwen3", "gpt2", "phi3", "olmo2", "gemma", "gptneox", "smollm3", "granite", "llama_yarn")


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device without numbers, from which reading or copying raises. It has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    monkeypatch.setitem(decoding._ROOM, "meta", 8)
    monkeypatch.setitem(decoding._AT_ONCE, "meta", 2048)
    monkeypatch.setitem(decoding._CAPTURE, "meta", lambda step: step)
    return "meta"


@pytest.mark.parametrize("name", mostly_slow(DENSE, {"llama", "qwen2", "gpt2"}))
def test_step_copies_nothing_from_or_to_a_device(name: str, meta: str) -> None:
    model = small_model(name).to(meta)
    use_fast_products(model)
    token = torch.zeros(3, dtype=torch.long, device=meta)
    with torch.inference_mode(), rows_of(model, [(2, 3), (2, 3), (4,)], 0, 40, shared=True) as rows:
        assert rows.feed(token).device.type == "meta"
        with Waits() as waits:
            rows.feed(token)
    assert waits.names == []


def step_waits(model: Any) -> set[str]:
    """The operations of a decoding step that wait."""
    use_fast_products(model)
    token = torch.zeros(3, dtype=torch.long)
    with torch.inference_mode(), rows_of(model, [(2, 3), (2, 3), (4,)], 0, 2, shared=True) as rows:
        rows.feed(token)
        with Waits() as waits:
            rows.feed(token)
    return set(waits.names)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("llama", set()),
        ("qwen2", set()),
        ("llama_yarn", set()),
        ("llama_dynamic_ntk", {"_local_scalar_dense"}),
        ("phi3_longrope", {"_local_scalar_dense"}),
        ("mixtral", {"_grouped_mm"}),
        ("qwen3_moe", {"_grouped_mm"}),
    ],
)
def test_step_waits_for_dynamic_rope_and_experts(name: str, names: set[str]) -> None:
    """transformers compares the longest position with a limit; torch's grouped product reads the groups' sizes."""
    assert step_waits(small_model(name)) == names


def test_step_waits_by_the_implementation_of_experts() -> None:
    model = small_model("qwen3_moe")
    model.set_experts_implementation("eager")
    assert "nonzero" in step_waits(model)
    model.set_experts_implementation("batched_mm")
    assert step_waits(model) == set()


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_decoding_waits_once_in_eight_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sampler._CHECK_EVERY, "cpu", sampler._CHECK_EVERY["cuda"])
    assert counted(name, 64) - counted(name, 32) == 4


def test_late_checks_change_no_token(byte_policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [GenerationRequest((5, 6, k), 1 + k, 1.5, (k,)) for k in range(40)]
    before = byte_policy.generate(requests)
    monkeypatch.setitem(sampler._CHECK_EVERY, "cpu", 8)
    after = byte_policy.generate(requests)
    assert {generation.finish_reason for generation in before} == {"stop", "length"}
    for generation, other in zip(before, after, strict=True):
        assert generation.response_ids == other.response_ids
        assert generation.finish_reason == other.finish_reason
        np.testing.assert_allclose(generation.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3"])
def test_prompts_and_tokens_are_not_read_back(name: str) -> None:
    """Fake tensors have no numbers, so reading one back raises."""
    prompts = [(2, 3, 4), (2, 3, 4), (5, 6), (7,)]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.inference_mode():
        model = small_model(name)
        use_fast_products(model)
        how, uniform = Temperatures.from_list([0.0, 1.0, 0.5, 1.0], torch.device("cpu")), torch.rand(4)
        with Waits() as waits, rows_of(model, prompts, 0, 3, shared=True) as rows:
            logits = rows.logits
            for _ in range(3):
                token, logprob = sample(logits, how, uniform)
                assert {part.fake_mode for part in (logits, token, logprob)} == {fake}
                logits = rows.feed(token)
        with pytest.raises(DataDependentOutputException):
            int(token[0])
    assert waits.names == []


def expect_bf16_samples_of_the_update(model: Any) -> None:
    """Expect log-probs sampled in bf16 to be those of a pass over the whole row."""
    requests = [GenerationRequest((2 + k % 3, 3, 4), 12, 1.0, (k,)) for k in range(12)]
    with torch.autocast(**HALF):
        generations = sampler.generate(model, requests, frozenset(), pad_id=0, shared=Forward(model).shares)
        differences = []
        for request, generation in zip(requests, generations, strict=True):
            ids = torch.tensor([request.prompt_ids + generation.response_ids])
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
            expected = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(generation.response_ids)[:, None])
            differences.append((expected[:, 0] - torch.tensor(generation.logprobs)).abs())
    assert all(part.dtype == torch.float32 for part in model.parameters())
    assert torch.cat(differences).mean() < 0.01
    assert torch.cat(differences).max() < 0.1


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_bf16_samples_agree_with_the_update(name: str) -> None:
    """The sampler and a packed pass compute alike in bf16, and each casts its weights by itself."""
    expect_bf16_samples_of_the_update(small_model(name))


def test_precision_applies_to_sampler_and_reference(byte_policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_policy.forward, "half", False)
    (exact,) = byte_policy.generate([GenerationRequest((5, 6, 7), 8, 0.0, (0,))])
    byte_policy.forward.set_precision("bfloat16")
    (rounded,) = byte_policy.generate([GenerationRequest((5, 6, 7), 8, 0.0, (0,))])
    assert exact.logprobs != rounded.logprobs
    np.testing.assert_allclose(exact.logprobs[0], rounded.logprobs[0], atol=0.1)  # later tokens may differ
    assert byte_policy.reference().forward.half
    with byte_policy.forward.running():
        assert torch.is_autocast_enabled("cpu")
    byte_policy.forward.set_precision("auto")
    assert byte_policy.forward.half == (byte_policy.device.type == "cuda")
