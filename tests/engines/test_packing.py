"""Compare packed steps with the same steps one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import TrajectoryBatch
from creditflow.engines.local.attention import Layout, VisibleKeys, packed_attention
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.packing import PackedSteps, micro_batches, micro_batches_by_prefix, shared_prefixes
from tests.engines.architectures import small_model
from tests.engines.batches import batch_of, prompt_of, response_of

TOKENS = st.lists(st.integers(0, 49), min_size=1, max_size=9)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=4)


@st.composite
def batches(draw) -> TrajectoryBatch:
    prompts = draw(PROMPTS)
    return batch_of([(draw(st.sampled_from(prompts)), draw(TOKENS)) for _ in range(draw(st.integers(1, 12)))])


def expect_packed(batch: TrajectoryBatch, parts: list[PackedSteps]) -> None:
    """Each part stores whole rows, and each response token is predicted once, from the tokens before it."""
    assert sorted(np.concatenate([part.token_at for part in parts]).tolist()) == list(range(len(batch.response_ids)))
    for part in parts:
        rows = []
        for group in part.groups:
            for at, inside in zip(group.at, group.inside, strict=True):
                assert part.position_ids[at[inside]].tolist() == list(range(inside.sum()))
                rows.append(part.input_ids[at[inside]].tolist())
        assert sorted(rows) == sorted([*prompt_of(batch, s), *response_of(batch, s)[:-1]] for s in part.steps)
        for s, at, predicting in zip(part.steps[part.row_of_token], part.token_at, part.predicting, strict=True):
            nth = int(at - batch.token_offsets[s])
            seen = [*prompt_of(batch, s), *response_of(batch, s)[:nth]]
            assert part.input_ids[predicting] == seen[-1]
            assert part.position_ids[predicting] == len(seen) - 1


@given(batches(), st.integers(1, 80))
def test_each_response_token_is_predicted_once(batch: TrajectoryBatch, budget: int) -> None:
    parts = list(micro_batches(batch, np.arange(batch.n_steps), budget))
    assert sorted(np.concatenate([part.steps for part in parts]).tolist()) == list(range(batch.n_steps))
    expect_packed(batch, parts)
    for part in parts:
        of_rows = sum(len(prompt_of(batch, s)) + len(response_of(batch, s)) - 1 for s in part.steps)
        assert len(part.steps) == 1 or (len(part.input_ids) <= budget and of_rows <= 4 * budget)
        prompts = {tuple(prompt_of(batch, s)) for s in part.steps}
        fed = sum(len(response_of(batch, s)) - 1 for s in part.steps)
        assert len(part.input_ids) == sum(map(len, prompts)) + fed  # a shared prompt is stored once
        flat_at = np.concatenate([group.at.reshape(-1) for group in part.groups])
        assert (flat_at[part.source] == np.arange(len(part.input_ids))).all()


@st.composite
def batches_of_long_prompts(draw) -> TrajectoryBatch:
    prompts = draw(st.lists(st.lists(st.integers(0, 49), min_size=6, max_size=30), min_size=1, max_size=3))
    return batch_of([(draw(st.sampled_from(prompts)), draw(TOKENS)) for _ in range(draw(st.integers(4, 12)))])


@given(batches_of_long_prompts(), st.integers(60, 300))
def test_attention_layout_is_causal_within_each_step(batch, budget) -> None:
    for part in micro_batches(batch, np.arange(batch.n_steps), budget):
        may_see: dict[int, set[int]] = {}
        for group in part.groups:
            for at, inside in zip(group.at, group.inside, strict=True):
                row = at[inside].tolist()
                for n, token in enumerate(row):
                    may_see[token] = set(row[: n + 1])
        layout = Layout.from_packed(part, torch.device("cpu"))
        asked, sees = [], []
        for rows in layout.rows:
            q, k = rows.query_at.shape[1], rows.key_at.shape[1]
            mask = torch.ones(q, k, dtype=torch.bool).tril() if rows.mask is None else rows.mask[:, 0]
            mask = mask.expand(len(rows.key_at), q, k)
            asked += rows.query_at.flatten().tolist()
            sees += [set(keys[seen].tolist()) for keys, of in zip(rows.key_at, mask, strict=True) for seen in of]
        for token, at in enumerate(layout.source.tolist()):
            assert asked[at] == token
            assert sees[at] == may_see[token]


@given(batches_of_long_prompts(), st.integers(1, 80), st.integers(0, 29))
def test_shared_beginnings_predict_each_token_once(batch: TrajectoryBatch, budget: int, cut: int) -> None:
    rows = [
        ([*prompt_of(batch, s)[:cut], s % 5, *prompt_of(batch, s)[cut:]], response_of(batch, s))
        for s in range(batch.n_steps)
    ]
    batch = batch_of(rows)
    steps = np.arange(batch.n_steps)[::-1]
    expect_packed(batch, list(micro_batches_by_prefix(batch, steps, budget)))


def test_shared_prefixes_save_most_tokens() -> None:
    one, two = [1] * 10, [1] * 4 + [2] * 20

    def prefixes(*rows: list[int]) -> list[int] | None:
        found = shared_prefixes([np.array(row, dtype=np.int32) for row in rows])
        return None if found is None else found.tolist()

    assert prefixes([*one, 5], [*one, 6], [*two, 5, 5], [*two, 6], [7]) == [10, 10, 24, 24, 1]
    assert prefixes([*one, 5], [*one, 6], [1, 1, 1, 8]) == [10, 10, 4]
    assert prefixes([1, 2], [3, 4]) is None
    assert prefixes([*one], [*one]) is None  # equal prompts are stored once in any case


def test_prompts_with_many_short_responses_are_split_off() -> None:
    long = [(list(range(40)), [1] * 5)] * 8
    assert next(micro_batches(batch_of(long), np.arange(8), 1000)).split is not None
    assert next(micro_batches(batch_of([([k], [1] * 40) for k in range(8)]), np.arange(8), 1000)).split is None


def test_short_rows_are_not_padded_to_a_long_one() -> None:
    rows = [([k], [1] * 30) for k in range(40)] + [([1], [1] * 4000)] * 2
    part = next(micro_batches(batch_of(rows), np.arange(len(rows)), 100_000))
    assert sum(group.at.size for group in part.groups) < 1.3 * sum(group.inside.sum() for group in part.groups)


def test_micro_batches_have_similar_sizes() -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 50, rng.integers(1, 60)).tolist(), [1] * int(rng.integers(1, 200))) for _ in range(300)]
    sizes = [len(part.input_ids) for part in micro_batches(batch_of(rows), np.arange(300), 10_000)]
    assert max(sizes) <= 10_000
    assert min(sizes) > 0.9 * max(sizes)


@pytest.mark.parametrize(
    ("name", "packs"),
    [("qwen2", True), ("qwen2_values", True), ("qwen3", True), ("gpt2", True), ("mistral_window", True),
     ("llama4_window_in_masks", True), ("llama4_scaled_by_place", False), ("gemma2_softcap", False),
     ("mamba", False)],
)  # fmt: skip
def test_packed_steps_give_the_logits_of_single_rows(name: str, packs: bool) -> None:
    model = small_model(name)
    forward = Forward(model)
    assert forward.packs == packs
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 50, n).tolist() for n in (1, 4, 7)]
    long = [rng.integers(2, 50, n).tolist() for n in (30, 26)] if "window" not in name else prompts
    rows = [(prompts[k % 3], rng.integers(2, 50, 1 + k % 5).tolist()) for k in range(14)]
    rows += [(long[k % 2], rng.integers(2, 50, 1 + k % 5).tolist()) for k in range(14)]
    batch = batch_of(rows)
    parts = [*micro_batches(batch, np.arange(14), 40), *micro_batches(batch, np.arange(14, 28), 200)]
    assert "window" in name or not packs or parts[-1].split is not None
    if packs and "window" not in name:
        rows = [(long[k % 2] + row[0], row[1]) for k, row in enumerate(rows)]  # different prompts that begin equally
        batch = batch_of(rows)
        parts = [
            *micro_batches_by_prefix(batch, np.arange(14), 60),
            *micro_batches_by_prefix(batch, np.arange(28), 900),
        ]
        assert len(parts[-1].input_ids) < 0.7 * sum(len(prompt) + len(response) for prompt, response in rows)
    for part in parts:
        with torch.no_grad():
            logits = forward(part)
            for b, s in enumerate(part.steps):
                prompt, response = prompt_of(batch, s), response_of(batch, s)
                alone = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
                torch.testing.assert_close(logits[part.row_of_token == b], alone, atol=2e-5, rtol=1e-4)
    assert model.config._attn_implementation != "creditflow_packed"


def test_padded_rows_fit_the_micro_batch_limit() -> None:
    batch = batch_of([(list(range(20)), [1] * 10)] * 40)
    for name in ("mistral_window", "gemma2_softcap"):
        for part in Forward(small_model(name)).micro_batches(batch, np.arange(40), 100):
            assert sum(group.at.size for group in part.groups) <= 100


def test_unpackable_attention_raises() -> None:
    states = torch.zeros(1, 2, 3, 4)
    at = torch.zeros(1, 3, dtype=torch.long)
    layout = Layout((VisibleKeys(at, at, None),), torch.arange(3))
    for others in ({"packed_layout": None}, {"softcap": 5.0}, {"sliding_window": 2}, {"dropout": 0.1}):
        with pytest.raises(NotImplementedError):
            packed_attention(None, states, states, states, None, **{"packed_layout": layout, **others})
