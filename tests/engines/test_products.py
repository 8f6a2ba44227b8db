import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from creditflow.config import OptimConfig
from creditflow.engines.local import learner, products
from creditflow.engines.local.products import Linear, cast_bytes, forget_casts, linear, use_fast_products

HALF = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute large and small products with oneDNN, on any processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "_SMALLEST", 1)


def tensors(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, wide, narrow = shape
    return [torch.randn(size, generator=generator) for size in ((2, rows, wide), (narrow, wide), (narrow,))]


def layer_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None))
    use_fast_products(model)
    with torch.no_grad():
        model[0].weight.copy_(weight)
        if bias is not None:
            model[0].bias.copy_(bias)
    assert type(model[0]) is Linear
    return model[0]


@pytest.mark.parametrize("biased", [True, False])
def test_product_and_gradients_match_float64(onednn: None, biased: bool) -> None:
    inputs = tensors(33, 70, 45)[: 2 + biased]
    narrow = [part.clone().requires_grad_() for part in inputs]
    wide = [part.double().requires_grad_() for part in inputs]
    linear(*narrow).square().sum().backward()
    functional.linear(*wide).square().sum().backward()
    torch.testing.assert_close(linear(*narrow).double(), functional.linear(*wide), rtol=1e-5, atol=1e-5)
    for part, expected in zip(narrow, wide, strict=True):
        assert part.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(part.grad.double(), expected.grad, rtol=1e-5, atol=1e-3)
    frozen = narrow[1].detach()
    linear(narrow[0], frozen).sum().backward()
    assert frozen.grad is None


def test_bits_do_not_depend_on_alignment(onednn: None) -> None:
    x, weight, _ = tensors(33, 70, 45)
    expected = linear(x, weight)
    for shift in range(1, 16):
        moved = torch.empty(x.numel() + shift)[shift:].view_as(x).copy_(x)
        assert torch.equal(linear(moved, weight), expected)


def test_cast_weight_follows_updates() -> None:
    x, weight, bias = tensors(3, 8, 4)
    layer = layer_of(weight, bias)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)

    def expected() -> Tensor:
        return functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())

    for _ in range(3):
        with torch.no_grad(), torch.autocast(**HALF):
            output = layer(x)
        assert torch.equal(output, expected())
        layer(x).square().sum().backward()
        optimizer.step()
    layer.load_state_dict({"weight": weight, "bias": bias})
    with torch.inference_mode(), torch.autocast(**HALF):
        assert torch.equal(layer(x), expected())


def test_cast_weight_is_reused_until_forgotten() -> None:
    x, weight, _ = tensors(3, 8, 4)
    layer = layer_of(weight)
    assert cast_bytes(layer) == weight.bfloat16().nbytes
    with torch.no_grad(), torch.autocast(**HALF):
        before = layer(x)
        layer.weight.data.mul_(2)  # torch does not count changes of .data
        assert torch.equal(layer(x), before)
        forget_casts(layer)
        assert torch.equal(layer(x), 2 * before)


def test_copied_layer_computes_with_its_own_weight() -> None:
    x, weight, _ = tensors(3, 8, 4)
    layer = layer_of(weight)
    with torch.no_grad(), torch.autocast(**HALF):
        before = layer(x)
        other = copy.deepcopy(layer)
        other.weight.zero_()
        assert not other(x).any()
        assert torch.equal(layer(x), before)


@pytest.mark.parametrize("large", [0, 10**9])
def test_update_discards_cast_weights(large, monkeypatch) -> None:
    monkeypatch.setattr(learner, "LARGE", large)  # with one pass over the weights, and with several
    layer = torch.nn.Linear(8, 8)
    use_fast_products(layer)
    inputs = torch.ones(1, 8)

    def run() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return layer(inputs)

    before = run()
    updates = learner.Learner(layer.parameters(), OptimConfig(lr=1.0), grad_clip=1.0)
    layer(inputs).sum().backward()
    updates.step()
    assert (run() - before).abs().min() > 0.1
