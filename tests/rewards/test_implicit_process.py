import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from creditflow.data import Score, Step
from creditflow.engines.local.policy import Policy
from creditflow.errors import RewardError
from creditflow.rewards import RewardManager
from creditflow.rewards.builtin.implicit_process import ImplicitProcess
from creditflow.rewards.entries import RewardFunctionConfig, load_reward_functions
from tests.rewards.tiny_models import a_step, bpe_tokenizer, save_causal, trajectory_of

PROMPT = "what is the sum of 4 and 4?"
RESPONSE = "the sum of four and four is eight €\n#### 8"
BPE, OTHER = bpe_tokenizer(), bpe_tokenizer(290)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        "policy": (BPE, 0),
        "phi": (BPE, 1),
        "ref": (BPE, 2),
        "other_phi": (OTHER, 3),
        "other_ref": (OTHER, 4),
    }
    folder = tmp_path_factory.mktemp("models")
    return {name: save_causal(folder / name, tokenizer, seed) for name, (tokenizer, seed) in made.items()}


def score_all(function: ImplicitProcess, steps: Sequence[Step]) -> list[Score]:
    async def main() -> list[Score]:
        return await asyncio.gather(*(function(step, trajectory_of(step)) for step in steps))

    return asyncio.run(main())


@functools.cache
def model_in(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model


def slow_logprobs(folder: Path, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probs of one row, without padding, position by position."""
    with torch.no_grad():
        logits = model_in(folder)(torch.tensor([[*prompt, *response]])).logits[0].double() / temperature
    at = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return np.array([float(logits[i][t] - torch.logsumexp(logits[i], 0)) for i, t in zip(at, response, strict=True)])


def steps_of_many_lengths() -> list[Step]:
    words = RESPONSE.split(" ")
    return [a_step(BPE, PROMPT[: k + 1], " ".join(words[: k % 9 + 1])) for k in range(20)]


def test_values_are_log_ratios_for_every_batch_size(folders: dict[str, Path]) -> None:
    steps = steps_of_many_lengths()
    for batch_size in (1, 3, 100):
        function = ImplicitProcess(
            str(folders["phi"]), str(folders["ref"]), tokenizer=str(folders["policy"]), batch_size=batch_size
        )
        for step, score in zip(steps, score_all(function, steps), strict=True):
            own, other = (slow_logprobs(folders[name], step.prompt_ids, step.response_ids) for name in ("phi", "ref"))
            np.testing.assert_allclose(score.value, 0.05 * (own - other), atol=1e-5)
            assert score.range == (-1.0, 1.0)


def test_model_against_itself_rewards_nothing(folders: dict[str, Path]) -> None:
    function = ImplicitProcess(str(folders["phi"]), str(folders["phi"]), tokenizer=str(folders["policy"]))
    for score in score_all(function, steps_of_many_lengths()):
        np.testing.assert_allclose(score.value, 0.0, atol=1e-7)


def test_vocabulary_comes_from_the_runs_policy(folders: dict[str, Path]) -> None:
    step = a_step(BPE, PROMPT, RESPONSE)
    function = ImplicitProcess(str(folders["phi"]), str(folders["ref"]))
    function.connect({"default": Policy.load(folders["policy"], torch.device("cpu"))})
    [score] = score_all(function, [step])
    own, other = (slow_logprobs(folders[name], step.prompt_ids, step.response_ids) for name in ("phi", "ref"))
    np.testing.assert_allclose(score.value, 0.05 * (own - other), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_run_reference_is_at_the_steps_temperature(folders: dict[str, Path], temperature: float) -> None:
    step = a_step(BPE, PROMPT, RESPONSE, temperature=temperature)
    reference = slow_logprobs(folders["ref"], step.prompt_ids, step.response_ids, temperature)
    step.ref_logprobs = tuple(reference.tolist())
    function = ImplicitProcess(str(folders["phi"]), "run", tokenizer=str(folders["policy"]))
    assert function.needs_reference
    [score] = score_all(function, [step])
    own = slow_logprobs(folders["phi"], step.prompt_ids, step.response_ids, temperature)
    np.testing.assert_allclose(score.value, 0.05 * (own - reference), atol=1e-5)


def test_other_vocabulary_is_aligned_and_keeps_the_sum(folders: dict[str, Path]) -> None:
    step = a_step(BPE, PROMPT, RESPONSE)
    function = ImplicitProcess(
        str(folders["other_phi"]), str(folders["other_ref"]), beta=0.5, limit=1000.0, tokenizer=str(folders["policy"])
    )
    [score] = score_all(function, [step])
    tokenizer = AutoTokenizer.from_pretrained(folders["other_phi"])
    prompt, response = tokenizer(PROMPT)["input_ids"], tokenizer(RESPONSE)["input_ids"]
    assert len(response) > len(step.response_ids)
    own, other = (slow_logprobs(folders[name], prompt, response) for name in ("other_phi", "other_ref"))
    expected = np.zeros(len(step.response_ids))
    mine = [len(BPE.decode(list(step.response_ids[: k + 1]))) for k in range(len(step.response_ids))]
    for k, ratio in enumerate(0.5 * (own - other)):
        end = len(tokenizer.decode(response[: k + 1]))
        expected[next(j for j, there in enumerate(mine) if there >= end)] += ratio
    np.testing.assert_allclose(score.value, expected, atol=1e-5)
    assert np.sum(score.value) == pytest.approx(0.5 * (own - other).sum(), abs=1e-4)
    assert isinstance(score.value, tuple)
    assert score.value[-1] == 0.0


def test_values_beyond_the_limit_are_clipped_and_counted(folders: dict[str, Path]) -> None:
    step = a_step(BPE, PROMPT, RESPONSE)
    own, other = (slow_logprobs(folders[name], step.prompt_ids, step.response_ids) for name in ("phi", "ref"))
    ratio = own - other
    limit = float(np.median(np.abs(ratio)))
    function = ImplicitProcess(
        str(folders["phi"]), str(folders["ref"]), beta=1.0, limit=limit, tokenizer=str(folders["policy"])
    )
    [score] = score_all(function, [step])
    np.testing.assert_allclose(score.value, np.clip(ratio, -limit, limit), atol=1e-5)
    n, beyond = len(ratio), int((np.abs(ratio) > limit + 1e-5).sum())
    assert score.range == (-limit, limit)
    assert score.reason in (f"{k} of {n} tokens clipped to +-{limit:g}" for k in (beyond, beyond + 1))
    assert function.metrics()["clipped"] == pytest.approx(beyond / n, abs=1.01 / n)


def test_long_prompt_is_cut_from_the_left_with_a_reason(folders: dict[str, Path]) -> None:
    step = a_step(BPE, "x" * 100, "the sum")
    function = ImplicitProcess(
        str(folders["phi"]), str(folders["ref"]), max_length=20, tokenizer=str(folders["policy"])
    )
    [score] = score_all(function, [step])
    kept = step.prompt_ids[-(20 - len(step.response_ids)) :]
    own, other = (slow_logprobs(folders[name], kept, step.response_ids) for name in ("phi", "ref"))
    np.testing.assert_allclose(score.value, 0.05 * (own - other), atol=1e-5)
    assert score.reason == f"the models saw {len(kept)} of the prompt's {len(step.prompt_ids)} tokens"


def test_unsampled_tokens_get_the_mean_of_the_sampled(folders: dict[str, Path]) -> None:
    step = a_step(BPE, PROMPT, RESPONSE)
    function = ImplicitProcess(str(folders["phi"]), str(folders["ref"]), tokenizer=str(folders["policy"]))
    whole = np.array(score_all(function, [step])[0].value)
    step.response_mask = (0, *step.response_mask[1:])
    masked = np.array(score_all(function, [step])[0].value)
    np.testing.assert_allclose(masked[1:], whole[1:])
    assert masked[0] == pytest.approx(whole[1:].mean())


def manager(args: dict[str, object]) -> RewardManager:
    entry = RewardFunctionConfig(fn="creditflow.rewards.builtin.implicit_process:ImplicitProcess", args=args)
    return RewardManager(load_reward_functions([entry], Path(), ["a"]), max_failed_frac=1.0)


def test_unscorable_steps_fail_alone_with_a_reason(folders: dict[str, Path]) -> None:
    def reason(step: Step, phi: str, ref: str, tokenizer: str | None = "policy") -> str:
        given, fine = trajectory_of(step), trajectory_of(a_step(BPE, PROMPT, "the sum", ref_logprobs=(-1.0,) * 3))
        given.id = given.steps[0].trajectory_id = "u"
        named = {"tokenizer": str(folders[tokenizer])} if tokenizer else {}
        reference = ref if ref == "run" else str(folders[ref])
        asyncio.run(manager({"path": str(folders[phi]), "reference": reference, **named}).score([given, fine]))
        made = given.steps[0].scores["implicit_process"]
        assert made.status == "failed"
        return made.reason

    step = a_step(BPE, PROMPT, "the sum")
    assert "the engine hands over no reference log-probabilities" in reason(step, "phi", "run")
    assert "must have the same vocabulary" in reason(step, "phi", "other_ref")
    assert "no policy 'default' is connected" in reason(step, "phi", "ref", None)
    assert "tokens for the model, which takes" in reason(a_step(BPE, PROMPT, "漢" * 300), "phi", "ref")
    handed = a_step(BPE, PROMPT, "the sum", ref_logprobs=(-1.0,) * len(step.response_ids))
    assert "needs a model of the policy's vocabulary" in reason(handed, "other_phi", "run")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "nowhere"}, "path: expected a Hugging Face folder"),
        ({"reference": "nowhere"}, r"reference \(or `run`\): expected a Hugging Face folder"),
        ({"beta": 0.0}, "beta: expected a number above 0, got 0"),
        ({"limit": -1.0}, "limit: expected a number above 0, got -1"),
        ({"batch_size": 0}, "batch_size: expected 1 or more"),
    ],
)
def test_wrong_arguments_are_refused_at_load(folders: dict[str, Path], args: dict[str, object], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        manager({"path": str(folders["phi"]), "reference": str(folders["ref"]), **args})


def test_cache_key_holds_the_reference_only_if_used(folders: dict[str, Path]) -> None:
    step, other = a_step(BPE, PROMPT, RESPONSE), a_step(BPE, PROMPT, RESPONSE, temperature=0.5)
    by_folder = ImplicitProcess(str(folders["phi"]), str(folders["ref"]))
    by_run = ImplicitProcess(str(folders["phi"]), "run")
    assert by_folder.cache_key(step, trajectory_of(step)) == by_folder.cache_key(other, trajectory_of(other))
    assert by_run.cache_key(step, trajectory_of(step)) != by_run.cache_key(other, trajectory_of(other))
