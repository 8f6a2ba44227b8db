"""Work on an accelerator runs ahead of Python until Python reads a number back. Decoding must seldom do so."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from creditflow.engines.local import sampler
from creditflow.engines.local.decoding import rows_of
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.products import use_fast_products
from creditflow.engines.local.sampler import Temperatures, sample
from creditflow.rollout import GenerationRequest
from tests.engines.architectures import small_model

HALF = {"device_type": "cpu", "dtype": torch.bfloat16}
WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal", "item"}


class Recorder(TorchDispatchMode):
    """Records operations that read numbers back from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        masked = name in ("index", "index_put_") and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        if name in WAITS or masked:
            self.waits.append(name)
        return func(*args, **kwargs)


def requests_of(n_tokens: int) -> list[GenerationRequest]:
    return [GenerationRequest((2, 3, k // 3), n_tokens, [1.0, 0.0, 0.5][k % 3], (k,)) for k in range(9)]


def counted(name: str, n_tokens: int) -> int:
    model = small_model(name)
    with Recorder() as recorder:
        sampler.generate(model, requests_of(n_tokens), frozenset(), pad_id=0, shared=Forward(model).shares)
    return len(recorder.waits)


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
        with Recorder() as recorder, rows_of(model, prompts, 0, 3, shared=True) as rows:
            logits = rows.logits
            for _ in range(3):
                token, logprob = sample(logits, how, uniform)
                assert {part.fake_mode for part in (logits, token, logprob)} == {fake}
                logits = rows.feed(token)
        with pytest.raises(DataDependentOutputException):
            int(token[0])
    assert recorder.waits == []


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_bf16_samples_agree_with_the_update(name: str) -> None:
    """The sampler and a packed pass compute alike in bf16, and each casts its weights by itself."""
    model = small_model(name)
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
