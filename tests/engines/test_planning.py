from pathlib import Path

import pytest

from creditflow.engines.local import planning
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.planning import MemoryPlan, bytes_of, bytes_per_token, problem
from tests.engines.architectures import small_model

GIB, MIB = 1 << 30, 1 << 20
LLM = MemoryPlan(weights=513 * MIB, trained=513 * MIB, per_token=2_200_000, logits_per_token=600_000,
                 logits_most=352 * MIB)  # fmt: skip
"""Numbers of a model of 135 million parameters with 30 layers."""


@pytest.mark.parametrize(
    ("limit", "size"), [(2 * GIB, 256), (6 * GIB, 1024), (8 * GIB, 2048), (24 * GIB, 8192), (1000 * GIB, 16384)]
)
def test_derived_size_fits_a_device_of_any_memory(limit, size) -> None:
    assert LLM.max_tokens(limit) == size
    if size > planning.LEAST:
        assert LLM.peak(size) <= limit
    if size < planning.MOST:
        assert LLM.peak(2 * size) > limit


def test_peak_adds_gradients_and_both_means_of_adamw() -> None:
    plan = MemoryPlan(weights=1000, trained=100, per_token=7, per_pass=50, sampling=0, base=10)
    assert plan.peak(3) == 10 + 1000 + 100 + 200 + 50 + 3 * 7
    assert MemoryPlan(1000, 100, 7, per_pass=50, sampling=5000, base=10).peak(3) == 10 + 1000 + 200 + 50 + 5000


def test_logits_in_chunks_have_a_limit() -> None:
    whole = MemoryPlan(0, 0, per_token=0, logits_per_token=100, base=0)
    chunked = MemoryPlan(0, 0, per_token=0, logits_per_token=100, logits_most=500, base=0)
    assert (whole.peak(3), whole.peak(1000)) == (300, 100_000)
    assert (chunked.peak(3), chunked.peak(1000)) == (300, 500)


def test_held_pieces_count_up_to_the_size_that_returns() -> None:
    plan = MemoryPlan(0, 0, per_token=10, held=1.5, held_tokens=100, base=0)
    assert [plan.peak(size) for size in (40, 100, 120, 1000)] == [600, 1500, 1500, 10_000]
    assert MemoryPlan(0, 0, per_token=10, held=1.5, base=0).peak(1000) == 15_000


def test_size_that_cannot_fit_is_refused_with_one_that_does() -> None:
    refused = "a.key: expected at most 2048, got 16384: 16384 tokens need about 36.5 GiB, and 8.0 GiB are available"
    assert problem(LLM, 16384, 8 * GIB, "a.key") == refused
    assert "independent of it. Train an adapter" in problem(LLM, 256, GIB, "a.key")
    assert problem(LLM, 2048, 8 * GIB, "a.key") == ""


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma2_softcap"])
def test_bytes_of_weights_and_tokens_can_be_repeated(name) -> None:
    forward = Forward(small_model(name))
    plain = bytes_per_token(forward)
    weights = list(forward.model.parameters())
    assert bytes_of([*weights, *weights]) == 4 * sum(weight.numel() for weight in weights)  # shared ones count once
    assert plain == bytes_per_token(Forward(small_model(name)))
    forward.recomputes = True
    assert bytes_per_token(forward) < plain


def test_bytes_per_token_match_a_count_by_hand() -> None:
    """Numbers that autograd keeps in a layer: both norms read, scale and return the hidden state (6 D). Attention reads
    queries, keys and values and returns as many numbers, which another layer reads (5 D). The gate, its activation, the
    product's other factor, and the product (4 I).
    """
    hidden, inner, layers = 32, 64, 2
    by_hand = 4 * (11 * hidden + 4 * inner)
    measured = bytes_per_token(Forward(small_model("qwen2"))) / (layers + 2)  # two more for the gradients of a layer
    assert 0.9 * by_hand < measured < 1.5 * by_hand  # rows of attention are longer where prompts are shared


def test_limits_of_all_enclosing_groups_are_read(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    inner = root / "a.slice" / "b.scope"
    inner.mkdir(parents=True)
    for folder, limit, used in ((inner.parent, 3 * GIB, 2 * GIB), (inner, "max", GIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    (inner.parent / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    own.write_text("0::/a.slice/b.scope\n")
    assert planning._groups(own, root) == [(3 * GIB, GIB)]

    first = root / "memory"
    first.mkdir()
    (first / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (first / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    own.write_text("9:name=systemd:/\n5:cpu,memory:/in/the/host\n")  # a container: the path is not there
    assert planning._groups(own, root) == [(4 * GIB, GIB)]
    (first / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert planning._groups(own, root) == []
