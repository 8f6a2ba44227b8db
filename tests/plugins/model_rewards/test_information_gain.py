import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.data import Score, Step, Task, Trajectory, read_parquet
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.trainer import train
from creditflow.engines.models.folders import model_folder
from creditflow.errors import RewardError
from creditflow.plugins.model_rewards.information_gain import InformationGain
from creditflow.testing import check_reward_function
from tests.builders import make_trajectory
from tests.builders import step as built
from tests.paths import RECIPES
from tests.plugins.model_rewards.tiny_models import bpe_tokenizer, save_causal
from tests.rewards.trajectories import load, score

FN = "creditflow.plugins.model_rewards.information_gain:InformationGain"
CUE = "\nso the answer is "
PROMPT = "what is the sum of 4 and 4?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp("reference"), bpe_tokenizer())


@functools.cache
def loaded(folder: Path):  # type: ignore[no-untyped-def]
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def mean_logprob(folder: Path, context: Sequence[str], truth: str, cue: str = CUE, keep: int | None = None) -> float:
    """The mean log-prob of the truth's tokens after the texts and the cue, token by token in one row.

    A token that begins in the cue and ends in the truth is one of the truth's. `keep`: tokens of the first text.
    """
    model, tokenizer = loaded(folder)
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in context]
    texts[0] = texts[0] if keep is None else texts[0][-keep:]
    tail = tokenizer(cue + truth, add_special_tokens=False)["input_ids"]
    in_cue = next(k for k in range(len(tail)) if len(tokenizer.decode(tail[: k + 1])) > len(cue))
    ids = [*(token for text in texts for token in text), *tail]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    first, logprobs = len(ids) - len(tail) + in_cue, []
    for at in range(first, len(ids)):
        logprobs.append(float(logits[at - 1, ids[at]] - torch.logsumexp(logits[at - 1], dim=0)))
    return sum(logprobs) / len(logprobs)


def gain_of(folder: Path, step: Step, truth: str, cue: str = CUE) -> float:
    after = mean_logprob(folder, [step.prompt, step.response], truth, cue)
    return after - mean_logprob(folder, [step.prompt], truth, cue)


def a_trajectory(*texts: tuple[str, str], truth: object = "eight", id: str = "t") -> Trajectory:
    """Steps of three agents in turn, with these prompts and responses."""
    steps = [built("pev"[i % 3], prompt=prompt, response=response) for i, (prompt, response) in enumerate(texts)]
    return replace(make_trajectory(id, steps), task=Task("test", (), truth))


def scores_of(function: InformationGain, *trajectories: Trajectory) -> list[Score]:
    async def main() -> list[Score]:
        return await asyncio.gather(*(function(step, t) for t in trajectories for step in t.steps))

    return asyncio.run(main())


WORDS = "first add the apples then the pears so the sum is eight and that is the whole of it"


def a_team(truth: object = "eight") -> Trajectory:
    responses = [WORDS[: 5 * k] for k in range(1, 18)]
    return a_trajectory(*((PROMPT[k % 4 :], response) for k, response in enumerate(responses)), truth=truth)


@pytest.mark.parametrize("truth", ["eight", "8", "the price is 5 €"])
def test_gain_is_the_change_of_the_truths_logprob(folder: Path, truth: str) -> None:
    team = a_team(truth)
    scores = scores_of(InformationGain(path=str(folder), cue=CUE, limit=50.0), team)
    expected = [gain_of(folder, step, truth) for step in team.steps]
    np.testing.assert_allclose([score.value for score in scores], expected, atol=1e-5)
    assert np.ptp(expected) > 0.01
    first = team.steps[0]
    before, after = (mean_logprob(folder, texts, truth) for texts in ([first.prompt], [first.prompt, first.response]))
    assert scores[0].reason == f"log-probability of the truth per token: {before:.3f} before, {after:.3f} after"


def test_token_across_the_border_belongs_to_the_truth(folder: Path) -> None:
    _, tokenizer = loaded(folder)
    assert tokenizer.tokenize(CUE + "eight")[-1] == "\u0120eight"  # the space is the cue's
    trajectory = a_trajectory((PROMPT, "it is eight"))
    [spaced] = scores_of(InformationGain(path=str(folder), cue=CUE, limit=50.0), trajectory)
    spelled = replace(trajectory, task=Task("test", (), " eight"))
    [plain] = scores_of(InformationGain(path=str(folder), cue=CUE[:-1], limit=50.0), spelled)
    assert spaced.value == plain.value == pytest.approx(gain_of(folder, trajectory.steps[0], "eight"), abs=1e-5)


def test_large_gain_is_clipped_to_the_limit(folder: Path) -> None:
    team = a_team()
    gains = [gain_of(folder, step, "eight") for step in team.steps]
    low, high = sorted(map(abs, gains))[len(gains) // 2 :][:2]
    limit = (low + high) / 2
    scores = scores_of(InformationGain(path=str(folder), cue=CUE, limit=limit), team)
    np.testing.assert_allclose([score.value for score in scores], np.clip(gains, -limit, limit), atol=1e-5)
    clipped = [dict(score.numbers)["clipped"] for score in scores]  # type: ignore[attr-defined]
    assert clipped == [float(abs(gain) > limit) for gain in gains]


def test_step_without_a_response_is_neutral(folder: Path) -> None:
    [empty] = scores_of(InformationGain(path=str(folder)), a_trajectory((PROMPT, "")))
    assert (empty.value, empty.rescaled) == (0.0, 0.5)
    [blank] = scores_of(InformationGain(path=str(folder)), a_trajectory(("", "")))
    assert blank.value == 0.0


@pytest.mark.parametrize(("truth", "text"), [(["8", "eight"], "8"), (8, "8"), (np.array(["8"]), "8"), (7.5, "7.5")])
def test_truth_is_read_as_text(folder: Path, truth: object, text: str) -> None:
    trajectory = a_trajectory((PROMPT, "it is 8"), truth=truth)
    [score] = scores_of(InformationGain(path=str(folder), cue=CUE, limit=50.0), trajectory)
    assert score.value == pytest.approx(gain_of(folder, trajectory.steps[0], text), abs=1e-5)


@pytest.mark.parametrize(
    ("truth", "reason"),
    [
        (True, "ground_truth: expected a text or a number, got bool"),
        (None, "ground_truth: expected a value to compare with, got None: the task has none"),
        ("  ", "the task has none"),
        ({"tests": []}, "ground_truth: expected a text, a number or a list of them"),
        ("eight " * 600, "tokens with the cue, for a model of 512"),
    ],
)
def test_step_without_a_usable_truth_fails_alone(folder: Path, truth: object, reason: str) -> None:
    good, bad = a_trajectory((PROMPT, "8"), id="good"), a_trajectory((PROMPT, "8"), truth=truth, id="bad")
    score([load(FN, args={"path": str(folder)})], [good, bad])
    [(fine,), (failed,)] = ([*t.steps[0].scores.values()] for t in (good, bad))
    assert (fine.status, failed.status) == ("ok", "failed")
    assert reason in failed.reason


def test_long_prompt_is_cut_for_each_term_alone(folder: Path) -> None:
    trajectory = a_trajectory(("x" * 600, "it is eight"))
    [score] = scores_of(InformationGain(path=str(folder), cue=CUE, limit=50.0), trajectory)
    _, tokenizer = loaded(folder)
    response = len(tokenizer("it is eight")["input_ids"])
    n = 512 - response - len(tokenizer(CUE + "eight")["input_ids"])
    after = mean_logprob(folder, ["x" * 600, "it is eight"], "eight", keep=n)
    assert score.value == pytest.approx(after - mean_logprob(folder, ["x" * 600], "eight", keep=n + response), abs=1e-5)
    assert score.reason.endswith(f"; the model saw {n + response} of {600 + response} tokens of prompt and response")
    assert dict(score.numbers)["cut"] == 1.0  # type: ignore[attr-defined]


def test_hostile_responses_are_scored(folder: Path) -> None:
    check_reward_function(FN, args={"path": str(folder)})
    texts = ("\ud800 eight", "<|end|> eight", "漢" * 300, "eight")
    trajectory = a_trajectory(*((PROMPT, text) for text in texts))
    score([load(FN, args={"path": str(folder), "cue": CUE})], [trajectory])
    statuses = [next(iter(step.scores.values())).status for step in trajectory.steps]
    assert statuses == ["ok"] * 4


def test_special_tokens_in_a_response_are_text(folder: Path) -> None:
    [spelled] = scores_of(InformationGain(path=str(folder), cue=CUE), a_trajectory((PROMPT, "<|end|>")))
    model, tokenizer = loaded(folder)
    text = tokenizer("<|end|>", split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert len(text) > 1
    prompt = tokenizer(PROMPT)["input_ids"]
    tail = tokenizer(CUE + "eight")["input_ids"]
    with torch.no_grad():
        before, after = (
            float(torch.log_softmax(model(input_ids=torch.tensor([[*ids, *tail]])).logits[0, -2], -1)[tail[-1]])
            for ids in (prompt, [*prompt, *text])
        )
    assert spelled.value == pytest.approx(after - before, abs=1e-5)


def test_reference_is_the_policy_before_training(folder: Path) -> None:
    policy = Policy.load(folder, torch.device("cpu"))
    with torch.no_grad():
        for weight in policy.parameters:
            weight.mul_(1.5)
    function = InformationGain(cue=CUE, limit=50.0)
    function.connect({"other": None, "default": policy})
    team = a_team()
    expected = [gain_of(folder, step, "eight") for step in team.steps]
    np.testing.assert_allclose([score.value for score in scores_of(function, team)], expected, atol=1e-5)


def test_missing_policy_is_named() -> None:
    with pytest.raises(ValueError, match="policy: expected one of a, b, got 'default'; or name a folder in `path`"):
        InformationGain().connect({"a": None, "b": None})
    with pytest.raises(ValueError, match="policy: no policies are connected"):
        scores_of(InformationGain(), a_trajectory((PROMPT, "8")))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "nowhere"}, "path: expected a Hugging Face folder, 'nowhere' is none"),
        ({"limit": 0}, "limit: expected a number above 0 and of at most 1000, got 0"),
        ({"limit": 1e308}, "limit: expected a number above 0 and of at most 1000, got 1e.308"),
        ({"cue": 3}, "cue: expected a text, got 3"),
        ({"device": "tpu"}, "device: expected auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_wrong_arguments_are_refused_at_load(args: dict[str, object], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load(FN, args=args)


SMALL = (
    *("recipe.hidden=16", "recipe.layers=1", "recipe.warmup_planner=0.0", "recipe.warmup_executor=0.0"),
    *("recipe.operations=1", "recipe.train_tasks=8", "recipe.val_tasks=4", "trainer.total_training_steps=2"),
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("algorithm.propagation=own", "algorithm.strata=null", "trainer.val_before_train=false", "trainer.device=cpu"),
    f"reward.functions=[{{fn: 'arithmetic_chain.py:answer_right'}}, {{fn: '{FN}', args: {{cue: ' =', limit: 50}}}}]",
)


def test_training_scores_steps_by_the_initial_weights(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "arithmetic_chain.yaml", [*SMALL, f"trainer.default_local_dir={tmp_path / 'run'}"])
    train(recipe, Reporter())
    folder = model_folder(recipe, "default")
    trajectories = read_parquet(tmp_path / "run/steps/000002.parquet").to_trajectories()
    assert len(trajectories) == 8
    for trajectory in trajectories:
        for step in trajectory.steps:
            expected = gain_of(folder, step, trajectory.task.ground_truth, " =")
            assert step.scores["information_gain"].value == pytest.approx(expected, abs=1e-4)
