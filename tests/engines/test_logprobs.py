import numpy as np
import pytest
import torch

from creditflow.data import TrajectoryBatch
from creditflow.engines.local import actor, logprobs
from creditflow.engines.local.actor import token_logprobs
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.logprobs import logprobs_from_hidden
from creditflow.engines.local.packing import micro_batches
from tests.engines.architectures import small_model
from tests.engines.batches import batch_of
from tests.oracle.logprobs import token_logprobs_one_by_one

R, D, V = 23, 8, 41


def inputs(dtype: torch.dtype, *, bias: bool, warm: bool) -> tuple[torch.Tensor | None, ...]:
    """Hidden states, weight, bias, temperature and tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    temperature = torch.rand(R, generator=generator, dtype=torch.float64).to(dtype) + 0.5 if warm else None
    ids = torch.randint(V, (R,), generator=generator)
    return normal(R, D), normal(V, D), normal(V) if bias else None, temperature, ids


@pytest.mark.parametrize(("chunk", "kept"), [(5 * V, 0), (5 * V, 11 * V), (1, 10**6), (10**6, 10**6)])
@pytest.mark.parametrize(("bias", "warm", "entropy"), [(False, False, False), (True, True, False), (True, True, True)])
def test_logprobs_and_gradients_match_definition(chunk, kept, bias, warm, entropy, monkeypatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    monkeypatch.setattr(logprobs, "KEPT", kept)
    hidden, weight, offset, temperature, ids = inputs(torch.float64, bias=bias, warm=warm)
    leaves = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    factor = torch.linspace(-1, 2, R, dtype=torch.float64)

    def gradients(result: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        loss = (result[0] * factor).sum() + (0.3 * (result[1] * factor.flip(0)).sum() if entropy else 0.0)
        return list(torch.autograd.grad(loss, leaves))

    result = logprobs_from_hidden(hidden, weight, offset, temperature, ids, entropy_grad=entropy)
    plain = torch.ones(R, dtype=torch.float64) if temperature is None else temperature
    expected = token_logprobs_one_by_one(hidden, weight, offset, plain, ids)
    torch.testing.assert_close(result[0], expected[0])
    torch.testing.assert_close(result[1], expected[1])
    torch.testing.assert_close(gradients(result), gradients(expected))


def test_entropy_alone_has_a_gradient() -> None:
    hidden, weight, _, _, ids = inputs(torch.float64, bias=False, warm=False)
    result = logprobs_from_hidden(hidden, weight, None, None, ids, entropy_grad=True)[1].sum()
    expected = token_logprobs_one_by_one(hidden, weight, None, torch.ones(R), ids)[1].sum()
    torch.testing.assert_close(torch.autograd.grad(result, hidden), torch.autograd.grad(expected, hidden))


def test_frozen_output_layer_has_no_gradient() -> None:
    hidden, weight, _, _, ids = inputs(torch.float32, bias=False, warm=False)
    logprobs_from_hidden(hidden, weight.detach(), None, None, ids)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def long_batch(vocabulary: int) -> TrajectoryBatch:
    rng = np.random.default_rng(0)
    return batch_of([(rng.integers(vocabulary, size=5).tolist(), rng.integers(vocabulary, size=9).tolist())] * 7)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_both_paths_agree_in_float32(name, packs, monkeypatch) -> None:
    model = small_model(name)
    forward, batch = Forward(model, packs), long_batch(50)
    [packed] = micro_batches(batch, np.arange(batch.n_steps), 1000)

    def run(at_once: int) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(actor, "_LOGITS", at_once)
        model.zero_grad()
        result, entropy = token_logprobs(forward, packed, batch)
        (result * torch.linspace(-1, 2, len(result))).sum().backward()
        return torch.stack([result, entropy]), torch.cat([w.grad.flatten() for w in model.parameters()])

    whole, chunked = run(1 << 25), run(10)
    assert forward.head is not None
    torch.testing.assert_close(chunked[0], whole[0], atol=1e-5, rtol=0)
    assert float((chunked[1] - whole[1]).norm() / whole[1].norm()) < 1e-4


def test_capped_or_adapted_output_layer_keeps_the_whole_pass() -> None:
    from peft import LoraConfig, get_peft_model

    assert Forward(small_model("gemma2_softcap")).head is None
    model = small_model("qwen2")
    forward = Forward(model)
    assert forward.head is not None
    get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    assert forward.head is None
