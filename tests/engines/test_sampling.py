import numpy as np
import torch
from torch import Tensor

from creditflow.engines.local.sampler import Temperatures, sample

CPU = torch.device("cpu")


def by_counting(logits: Tensor, temperature: float, uniform: float) -> tuple[int, float]:
    """Inverse CDF in float64, one row and one token at a time."""
    if temperature == 0:
        wide = torch.log_softmax(logits.double(), -1)
        return int(wide.argmax()), float(wide.max())
    wide = torch.log_softmax(logits.double() / temperature, -1)
    below = 0.0
    for token, logprob in enumerate(wide.tolist()):
        below += float(np.exp(logprob))
        if below > uniform:
            return token, logprob
    raise AssertionError("the uniform number is below 1")


def test_sampled_tokens_match_a_float64_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    for words in (2, 255, 256, 257, 3000):
        logits = 3 * torch.randn(40, words, generator=generator)
        uniform = torch.rand(40, generator=generator)
        temperatures = [0.0, 0.5, 1.0, 2.0] * 10
        token, logprob = sample(logits, Temperatures.from_list(temperatures, CPU), uniform)
        for row, temperature in enumerate(temperatures):
            expected = by_counting(logits[row], temperature, float(uniform[row]))
            assert int(token[row]) == expected[0]
            assert abs(float(logprob[row]) - expected[1]) < 1e-5


def test_impossible_tokens_are_never_sampled() -> None:
    """At both ends of the uniform range, with impossible tokens at both ends of the vocabulary and of each block."""
    logits = torch.full((1, 1030), -torch.inf)
    possible = torch.tensor([1, 300, 301, 511, 700])
    logits[0, possible] = torch.tensor([0.0, -20.0, 3.0, -80.0, 1.0])
    uniforms = [0.0, *np.linspace(0, 1, 5000, endpoint=False), np.nextafter(np.float32(1), np.float32(0))]
    uniform = torch.tensor(np.array(uniforms, dtype=np.float32))
    token, logprob = sample(
        logits.expand(len(uniforms), -1), Temperatures.from_list([1.0] * len(uniforms), CPU), uniform
    )
    assert torch.isin(token, possible).all()
    assert logprob.isfinite().all()


def test_row_does_not_depend_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(50, 40_000, generator=generator), torch.rand(50, generator=generator)
    together = sample(logits, Temperatures.from_list([0.7, 0.0] * 25, CPU), uniform)
    for row in range(50):
        alone = sample(
            logits[row : row + 1], Temperatures.from_list([[0.7, 0.0][row % 2]], CPU), uniform[row : row + 1]
        )
        assert [part.item() for part in alone] == [part[row].item() for part in together]
