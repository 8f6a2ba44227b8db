from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from creditflow.engines.local.forward import Forward
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.sampler import generate
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.rollout import GenerationRequest
from tests.builders import mostly_slow
from tests.engines.architectures import small_model

PROMPTS = ["a", "what is 2 + 2?", "tell me a long story about a short word", "ü", "x" * 40]


def request(policy: Policy, prompt: str, seed: int) -> GenerationRequest:
    _, ids = policy.encode([{"role": "user", "content": prompt}])
    return GenerationRequest(ids, 24, 1.0, (seed,))


MODELS = ("qwen2", "qwen3", "gpt2", "mistral_window", "gemma2_softcap", "llama4_window_in_masks",
          "deepseek_values_narrower_than_keys")  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(MODELS, {"qwen3", "gpt2", "gemma2_softcap", MODELS[-1]}))
def test_many_rows_match_single_greedy_generation(name: str) -> None:
    model = small_model(name)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, 50, n).tolist()) for n in rng.integers(1, 40, 100)]
    common = max(prompts[1::2], key=len)
    prompts[::2] = [common + prompt for prompt in prompts[::2]]  # every second one has the same beginning
    requests = [
        GenerationRequest(prompts[k * k % 100], int(rng.integers(1, 20)), 0.0, (0,)) for k in rng.permutation(150)
    ]

    generations = generate(model, requests, frozenset({1}), pad_id=0, shared=Forward(model).shares)

    expected: dict[tuple[int, ...], list[int]] = {}
    for asked, generation in zip(requests, generations, strict=True):
        if asked.prompt_ids not in expected:
            out = model.generate(torch.tensor([asked.prompt_ids]), max_new_tokens=20, do_sample=False)
            expected[asked.prompt_ids] = out[0, len(asked.prompt_ids) :].tolist()
        assert list(generation.response_ids) == expected[asked.prompt_ids][: asked.max_tokens]


def test_failing_shared_decoding_falls_back_to_padded_rows(
    byte_policy: Policy, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("of other shapes")

    monkeypatch.setattr("creditflow.engines.local.attention.Decoding.attend", fails)
    byte_policy.save(tmp_path)
    policy = Policy.load(tmp_path, torch.device("cpu"))
    _, ids = policy.encode([{"role": "user", "content": "a"}])
    expected = policy.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    assert list(policy.generate([GenerationRequest(ids, 24, 0.0, (0,))])[0].response_ids) == expected.tolist()


def test_one_policy_generates_in_two_threads(byte_policy: Policy) -> None:
    requests = [request(byte_policy, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    alone, attends = byte_policy.generate(requests), byte_policy.model.config._attn_implementation
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(byte_policy.generate, [requests] * 8))
    assert all(generations == alone for generations in together)
    assert byte_policy.model.config._attn_implementation == attends


def test_shared_prompt_is_read_once(byte_policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    forward = byte_policy.model.forward

    def counting(**inputs):
        fed.append(inputs["input_ids"].numel())
        return forward(**inputs)

    monkeypatch.setattr(byte_policy.model, "forward", counting)
    one = request(byte_policy, "what is 2 + 2?", 0)
    byte_policy.generate([request(byte_policy, "what is 2 + 2?", seed) for seed in range(8)])

    assert fed[0] == len(one.prompt_ids)


def test_samples_depend_on_the_seed_but_not_on_the_batch(byte_policy: Policy) -> None:
    requests = [request(byte_policy, prompt, seed) for prompt in PROMPTS for seed in (0, 1)]
    together = byte_policy.generate(requests)
    alone = [byte_policy.generate([asked])[0] for asked in requests]
    assert [g.response_ids for g in together] == [g.response_ids for g in alone]
    assert all(a.response_ids != b.response_ids for a, b in zip(together[::2], together[1::2], strict=True))


def test_sampling_follows_the_model_distribution(word_model_folder: object) -> None:
    policy = Policy.load(str(word_model_folder), torch.device("cpu"))
    ids = (1, 2, 3)
    with torch.no_grad():
        expected = torch.softmax(policy.model(torch.tensor([ids])).logits[0, -1] / 0.7, -1).numpy()
    n = 4000
    generations = policy.generate([GenerationRequest(ids, 1, 0.7, (seed,)) for seed in range(n)])
    counts = np.bincount([g.response_ids[0] for g in generations], minlength=len(expected))
    standard_error = np.sqrt(expected * (1 - expected) / n)
    assert np.all(np.abs(counts / n - expected) < 5 * standard_error + 1e-9)


def test_end_token_ends_a_response_and_is_included(word_model_folder: object) -> None:
    policy = Policy.load(str(word_model_folder), torch.device("cpu"))
    generations = policy.generate([GenerationRequest((1, 2), 40, 1.5, (seed,)) for seed in range(64)])
    finished = [g for g in generations if g.finish_reason == "stop"]
    assert finished
    for generation in finished:
        assert generation.response_ids[-1] in policy.eos_ids
        assert not set(generation.response_ids[:-1]) & policy.eos_ids
    for generation in generations:
        if generation.finish_reason == "length":
            assert len(generation.response_ids) == 40


def test_empty_prompt_generates(word_model_folder: object) -> None:
    policy = Policy.load(str(word_model_folder), torch.device("cpu"))
    _, ids = policy.encode([{"role": "user", "content": ""}])
    (generation,) = policy.generate([GenerationRequest(ids, 3, 1.0, (0,))])
    assert 1 <= len(generation.response_ids) <= 3


@pytest.mark.parametrize("shared", [True, False])
def test_finished_rows_stay_within_the_last_position(shared: bool) -> None:
    model = small_model("gpt2")
    model.config.n_positions = 32
    model.transformer.wpe = torch.nn.Embedding(32, 32)
    requests = [GenerationRequest((2,) * 30, 2, 1.0, (0,))]
    requests += [GenerationRequest((3, k), 20, 1.0, (k,)) for k in range(2, 11)]

    generations = generate(model, requests, frozenset(), pad_id=0, shared=shared)

    assert [len(generation.response_ids) for generation in generations] == [2, *[20] * 9]


def test_weights_are_aligned_to_64_bytes(byte_policy: Policy, tmp_path: Path) -> None:
    """Two processes must compute the same bits, wherever a file's tensors are loaded in memory."""
    byte_policy.save(tmp_path)
    for folder in (tmp_path, tiny_byte_model()):
        model = Policy.load(folder, torch.device("cpu")).model
        assert {weight.data_ptr() % 64 for weight in (*model.parameters(), *model.buffers())} == {0}
