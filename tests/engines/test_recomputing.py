import numpy as np
import pytest
import torch

from creditflow.engines.local.actor import token_logprobs
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.packing import micro_batches
from creditflow.engines.local.recomputing import expect_recomputable
from creditflow.errors import ConfigError
from tests.engines.architectures import small_model
from tests.engines.batches import batch_of


class Saved:
    """Counts the bytes of the tensors that a pass saves for its gradient."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_recomputed_gradients_are_equal(name, packs) -> None:
    model = small_model(name)
    for part in model.modules():  # dropout must stay off
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    rng = np.random.default_rng(0)
    batch = batch_of([(rng.integers(50, size=5).tolist(), rng.integers(50, size=4 + k).tolist()) for k in range(6)])
    [packed] = micro_batches(batch, np.arange(batch.n_steps), 1000)

    def run(*, recomputes: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
        saved = Saved()
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            logprobs, _ = token_logprobs(Forward(model, packs, recomputes=recomputes), packed, batch)
        (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
        assert not any(part.training for part in model.modules())
        return logprobs, torch.cat([w.grad.flatten() for w in model.parameters()]), saved.bytes

    plain, again = run(recomputes=False), run(recomputes=True)
    torch.testing.assert_close(again[0], plain[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(again[1], plain[1], atol=1e-6, rtol=1e-6)
    assert again[2] < 0.5 * plain[2]


def test_model_without_checkpointed_layers_is_refused() -> None:
    model = small_model("qwen2")
    expect_recomputable(model)
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"enable_gradient_checkpointing: expected false for a model of type qwen2"):
        expect_recomputable(model)
