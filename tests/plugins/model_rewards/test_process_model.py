import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from creditflow.data import Score, Step
from creditflow.engines.local.policy import Policy
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import RewardError
from creditflow.plugins.model_rewards.process_model import ProcessModel
from tests.plugins.model_rewards.tiny_models import a_step, bpe_tokenizer, save_causal, save_classifier, trajectory_of
from tests.rewards.trajectories import load, score

PROMPT = "what is the sum of 4 and 4?"
RESPONSE = "the sum of four and four is eight\n\nso the answer is eight €\n#### 8"
BPE = bpe_tokenizer()


@pytest.fixture(scope="module")
def prm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a vocabulary other than the policy's."""
    return save_classifier(tmp_path_factory.mktemp("prm"), bpe_tokenizer(290), bos="<s>")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp("policy"), BPE)


def score_all(function: ProcessModel, steps: Sequence[Step]) -> list[Score]:
    async def main() -> list[Score]:
        return await asyncio.gather(*(function(step, trajectory_of(step)) for step in steps))

    return asyncio.run(main())


@functools.cache
def model_in(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForTokenClassification.from_pretrained(folder).eval()
    return model


def right_at(folder: Path, ids: Sequence[int], position: int, label: int = 1) -> float:
    """The probability of class `label` at one position of one row, alone in its batch."""
    with torch.no_grad():
        logits = model_in(folder)(input_ids=torch.tensor([list(ids)])).logits[0, position].tolist()
    exponentials = [np.exp(logit) for logit in logits]
    return exponentials[label] / sum(exponentials)


def line_oracle(folder: Path, prompt: str, response: str) -> list[tuple[str, float]]:
    """Each line that is not blank, with its score, in TRL's layout of a row: bos, prompt, then line and separator."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    scores = []
    for line in response.split("\n"):
        if line.strip():
            ids += tokenizer(line, add_special_tokens=False)["input_ids"]
            ids += tokenizer("\n", add_special_tokens=False)["input_ids"]
            scores.append((line, right_at(folder, ids, -1)))
    return scores


def ends_of(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    return [len(tokenizer.decode(list(ids[: k + 1]))) for k in range(len(ids))]


def token_oracle(folder: Path, step: Step) -> list[float]:
    """Each response token's score: at the model's token that first reaches its last character, found by prefixes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = [tokenizer.bos_token_id, *tokenizer(step.prompt, add_special_tokens=False)["input_ids"]]
    response = tokenizer(step.response, add_special_tokens=False)["input_ids"]
    reached = ends_of(tokenizer, response)
    scores = [right_at(folder, [*prompt, *response], len(prompt) + k) for k in range(len(response))]
    return [
        next(score for score, there in zip(scores, reached, strict=True) if there >= end)
        for end in ends_of(BPE, step.response_ids)
    ]


def test_tokens_of_a_line_get_the_score_at_its_end(prm: Path, policy: Path) -> None:
    step = a_step(BPE, PROMPT, RESPONSE)
    [score] = score_all(ProcessModel(str(prm), tokenizer=str(policy)), [step])
    first, second, third = (score for _, score in line_oracle(prm, PROMPT, RESPONSE))
    rows = (first, first, second, third)  # the second row is blank
    expected = [rows[RESPONSE.count("\n", 0, end - 1)] for end in ends_of(BPE, step.response_ids)]
    assert isinstance(score.value, tuple)
    np.testing.assert_allclose(score.value, expected, atol=1e-5)
    assert len(set(score.value)) == 3
    assert score.reason == ""


@pytest.mark.parametrize(
    ("reduce", "combine"), [("min", min), ("product", np.prod), ("last", lambda s: s[-1]), ("mean", np.mean)]
)
def test_step_gets_the_reduced_scores_of_its_lines(prm: Path, reduce: str, combine) -> None:  # type: ignore[no-untyped-def]
    step = a_step(BPE, PROMPT, RESPONSE)
    [score] = score_all(ProcessModel(str(prm), per="step", reduce=reduce), [step])
    assert score.value == pytest.approx(combine([value for _, value in line_oracle(prm, PROMPT, RESPONSE)]), abs=1e-5)


def test_batched_token_scores_equal_those_of_single_steps(prm: Path, policy: Path) -> None:
    words = RESPONSE.split()
    steps = [a_step(BPE, PROMPT[:k], " ".join(words[: k % 13 + 1])) for k in range(1, 28)]
    function = ProcessModel(str(prm), per="token", batch_size=4, tokenizer=str(policy))
    for step, scored in zip(steps, score_all(function, steps), strict=True):
        np.testing.assert_allclose(scored.value, token_oracle(prm, step), atol=1e-5)


def test_tokens_are_decoded_by_the_runs_policy(prm: Path) -> None:
    client = Policy.load(tiny_byte_model(), torch.device("cpu"))
    ids = client.tokenizer("so 5 €\nis it", add_special_tokens=False)["input_ids"]
    step = a_step(BPE, PROMPT, "so 5 €\nis it")
    step.response_ids, step.response_mask = (*ids, 0), (1,) * (len(ids) + 1)
    function = ProcessModel(str(prm))
    function.connect({"default": client})
    [score] = score_all(function, [step])
    (_, first), (_, second) = line_oracle(prm, PROMPT, step.response)
    np.testing.assert_allclose(score.value, [first] * len("so 5 €\n".encode()) + [second] * 6, atol=1e-5)


def test_unsampled_tokens_get_the_mean_of_the_sampled(prm: Path, policy: Path) -> None:
    step = a_step(BPE, PROMPT, RESPONSE)
    function = ProcessModel(str(prm), per="token", tokenizer=str(policy))
    [score] = score_all(function, [step])
    whole = np.array(score.value)
    step.response_mask = (1, 0) * (len(whole) // 2) + (1,) * (len(whole) % 2)
    [masked] = score_all(function, [step])
    sampled = np.array(step.response_mask) == 1
    np.testing.assert_allclose(np.array(masked.value)[sampled], whole[sampled])
    np.testing.assert_allclose(np.array(masked.value)[~sampled], whole[sampled].mean())


def test_single_logit_and_named_classes_are_read(tmp_path: Path) -> None:
    one = save_classifier(tmp_path / "one", BPE, labels=("right",))
    three = save_classifier(tmp_path / "three", BPE, labels=("good", "neutral", "bad"))
    step = a_step(BPE, PROMPT, "the sum")
    ids = [*BPE.encode(PROMPT).ids, *BPE.encode("the sum").ids, *BPE.encode("\n").ids]
    with torch.no_grad():
        logit = AutoModelForTokenClassification.from_pretrained(one)(torch.tensor([ids])).logits[0, -1, 0]
    [score] = score_all(ProcessModel(str(one), per="step"), [step])
    assert score.value == pytest.approx(1 / (1 + np.exp(-float(logit))), abs=1e-5)
    with pytest.raises(ValueError, match=r"has 3 classes, say which is the right one: 0 \(good\)"):
        ProcessModel(str(three))
    for label, index in (("good", 0), (2, 2)):
        [score] = score_all(ProcessModel(str(three), per="step", label=label), [step])
        assert score.value == pytest.approx(right_at(three, ids, -1, index), abs=1e-5)


def test_long_prompt_is_cut_from_the_left_with_a_reason(prm: Path, policy: Path) -> None:
    step = a_step(BPE, "x" * 400 + PROMPT, "the sum\nis eight")
    tokenizer = AutoTokenizer.from_pretrained(prm)
    prompt = tokenizer(step.prompt, add_special_tokens=False)["input_ids"]
    lines = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in ("the sum", "\n", "is eight", "\n")]
    response = [token for line in lines for token in line]
    function = ProcessModel(str(prm), max_length=40, tokenizer=str(policy))
    [score] = score_all(function, [step])
    row = [tokenizer.bos_token_id, *prompt[-(40 - 1 - len(response)) :], *response]
    assert len(row) == 40
    assert score.reason == f"the model saw {40 - len(response)} of the prompt's {len(prompt) + 1} tokens"
    assert isinstance(score.value, tuple)
    assert score.value[-1] == pytest.approx(right_at(prm, row, -1), abs=1e-5)
    [other] = score_all(function, [a_step(BPE, "so", "eight")])
    assert [each.numbers for each in (score, other)] == [(("cut_prompts", 1.0),), (("cut_prompts", 0.0),)]


def test_input_is_bounded_by_the_models_positions(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, BPE, positions=24)
    [score] = score_all(ProcessModel(str(folder), per="step"), [a_step(BPE, "x" * 100, "the sum is eight")])
    assert score.reason.startswith("the model saw ")


def test_unscorable_steps_fail_alone_with_a_reason(prm: Path, policy: Path) -> None:
    fine, blank, long = (a_step(BPE, PROMPT, text) for text in ("the sum", " \n\n", "漢" * 300))
    other = a_step(BPE, PROMPT, "the sum")
    other.response = "the end"
    trajectories = [trajectory_of(step) for step in (fine, blank, long, other)]
    for i, trajectory in enumerate(trajectories):
        trajectory.id = trajectory.steps[0].trajectory_id = str(i)
    score([load("process_model", args={"path": str(prm), "tokenizer": str(policy)})], trajectories)
    scores = [trajectory.steps[0].scores["process_model"] for trajectory in trajectories]
    assert [score.status for score in scores] == ["ok", "failed", "failed", "failed"]
    assert "nothing that could be scored" in scores[1].reason
    assert "tokens for the model, which takes" in scores[2].reason
    assert "decode to another text than the response: 'sum' at character 4" in scores[3].reason


def test_missing_policy_fails_with_a_hint(prm: Path) -> None:
    with pytest.raises(Exception, match="no policy 'default' is connected; name its folder in the argument"):
        score_all(ProcessModel(str(prm)), [a_step(BPE, PROMPT, "the sum")])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "nowhere"}, "path: expected a Hugging Face folder, 'nowhere' is none"),
        ({"per": "word"}, "per: expected token, line or step, got 'word'"),
        ({"reduce": "max"}, "reduce: expected one of min, product, last, mean, got 'max'"),
        ({"label": "good"}, r"label: expected one of 0 \(LABEL_0\), 1 \(LABEL_1\), got 'good'"),
        ({"separator": ""}, "separator: expected a text"),
        ({"batch_size": 0}, "batch_size: expected 1 or more, got 0"),
        ({"max_length": 1}, "max_length: expected 2 or more tokens, got 1"),
        ({"device": "tpu"}, "device: expected auto, cpu, cuda, got 'tpu'"),
        ({"tokenizer": "nowhere"}, "tokenizer: expected a Hugging Face folder"),
        ({"prompt": "task"}, "unknown argument 'prompt'"),
    ],
)
def test_wrong_arguments_are_refused_at_load(prm: Path, args: dict[str, object], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load("process_model", args={"path": str(prm), **args})


def test_cache_key_holds_all_inputs_of_the_score(prm: Path) -> None:
    function = ProcessModel(str(prm))
    step = a_step(BPE, PROMPT, RESPONSE)
    key = function.cache_key(step, trajectory_of(step))
    for name, value in (("prompt", "x"), ("response", "y"), ("response_ids", (1,)), ("response_mask", (0,))):
        changed = a_step(BPE, PROMPT, RESPONSE)
        setattr(changed, name, value)
        assert function.cache_key(changed, trajectory_of(changed)) != key, name
    same = a_step(BPE, PROMPT, RESPONSE, policy_version=3)
    same.id = "other"
    assert function.cache_key(same, trajectory_of(same)) == key
