"""Tests of reward functions that were written for verl, TRL or verifiers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from creditflow.credit.rewards import read_rewards
from creditflow.data import Score, Task, TrajectoryBatch
from creditflow.errors import ConfigError, RewardError
from creditflow.monitoring.catalog import Names, described
from creditflow.rewards import RewardManager, load_reward_functions
from creditflow.rewards.entries import entry_of
from creditflow.rewards.execution.backends import BackendOptions, make_backend
from creditflow.testing import ConformanceError, check_reward_function
from tests.builders import credit_options
from tests.rewards import borrowed
from tests.rewards.trajectories import a_trajectory

MODULE = "tests.rewards.borrowed"
TASK = Task(
    "test", ({"role": "user", "content": "How many?"},), "72", {"nested": {}, "level": "easy", "info": {"weight": 0.25}}
)


def load(*entries):
    configs = [entry_of(of_module(entry), "reward.functions[0]") for entry in entries]
    return load_reward_functions(configs, Path(), ("p", "e", "v"))


def of_module(value):
    """The entry, and the parts in it, with references to the functions of `borrowed`."""
    if isinstance(value, list):
        return [of_module(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {key: of_module(one) for key, one in value.items()}
    return {**made, "fn": f"{MODULE}:{made['fn']}"} if hasattr(borrowed, made.get("fn", "")) else made


def trajectory_of(task=TASK, **kwargs):
    trajectory = a_trajectory(**kwargs)
    trajectory.task = task
    return trajectory


def scored(*entries, trajectories=None, max_failed_frac=1.0):
    """Score one trajectory, or those given; return the first, and the report."""
    trajectories = trajectories or [trajectory_of()]
    manager = RewardManager(load(*entries), max_failed_frac)
    return trajectories[0], asyncio.run(manager.score(trajectories))


def outcome_of(entry, **kwargs):
    return scored(entry, trajectories=[trajectory_of(**kwargs)])[0].outcome


# ---- recognition


@pytest.mark.parametrize(
    ("fn", "signature"),
    [
        ("compute_score", "verl"),
        ("compute_scores", "verl_batch"),
        ("think_format_reward", "trl"),
        ("judged", "trl"),
        ("exact_answer", "verifiers"),
        ("by_state", "verifiers"),
        ("exact_match", ""),
    ],
)
def test_parameters_tell_the_library(fn, signature):
    (function,) = load({"fn": fn})
    assert (function.signature, function.level) == (signature, "outcome")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"fn": "ambiguous"}, r"ambiguous parameters: set signature: trl or verifiers; it takes \(completions, state"),
        ({"fn": "half_native"}, r"ambiguous parameters: set signature: verifiers, or decorate it with @reward"),
        ({"fn": "of_group"}, r"'states' is a parameter of group functions of verifiers"),
        ({"fn": "only_by_position"}, r"by name and its args, but that does not fit it: .*positional[- ]only"),
        (
            {"fn": "with_router"},
            r"as \(data_source.* by name and its args.*: missing a required argument: 'reward_router_address'",
        ),
        (
            {"fn": "compute_score", "signature": "trI"},
            r"signature: expected one of verl, verl_batch, trl, verifiers, got 'trI'",
        ),
        (
            {"fn": "half_native", "signature": "verl"},
            r"called as \(data_source, solution_str.*: missing a required argument: ",
        ),
        ({"fn": "compute_score", "args": {"x": 1}}, r"unknown argument 'x'"),
        ({"fn": "compute_score", "level": "trajectory"}, "its level is outcome or step, not trajectory"),
        ({"fn": "compute_score", "agent_match": "p"}, r"set level: step"),
        ({"fn": "compute_score", "format": "text"}, r"format: expected it of functions with signature trl, verifiers"),
        ({"fn": "judged", "format": "txt"}, r"format: expected one of text, messages, got 'txt' .did you mean 'text'"),
        ({"fn": "judged", "range": [1.0]}, r"expected a range .low, high."),
        (
            {"fn": "exact_match", "range": [0.0, 2.0]},
            r"range: expected none, got \[0.0, 2.0\]: the function has a deco",
        ),
        ({"fn": "exact_match", "signature": "verl"}, r"signature: expected none, got 'verl'"),
        ({"fn": "sum", "range": [0.0, 2.0], "args": {"parts": []}}, r"range: expected none.*: a sum has none"),
    ],
)
def test_wrong_signature_is_refused_with_a_hint(entry, message):
    with pytest.raises(RewardError, match=message) as error:
        load(entry)
    assert "\n" not in str(error.value)


def test_native_function_may_have_an_option_of_any_name():
    (function,) = load({"fn": "native_with_option"})
    assert (function.signature, function.level) == ("", "step")


def test_explicit_signature_decides():
    (function,) = load({"fn": "ambiguous", "signature": "trl", "args": {"state": 1}})
    assert function.call(trajectory_of()).value == 0.0
    with pytest.raises(ConfigError, match=r"args\.parser"):
        load({"fn": "exact_answer", "args": {"parser": f"{MODULE}:nothing"}})


# ---- verl


def test_verl_function_scores_outcome_and_steps():
    trajectory, report = scored(
        {"fn": "compute_score"},
        {"fn": "compute_score_later", "level": "step", "agent_match": "e", "args": {"bonus": 0.5}},
    )
    assert (trajectory.outcome.value, trajectory.outcome.reason) == (1.0, "acc: True; pred: 72; turns: 6")
    assert [step.scores.get("compute_score_later") is not None for step in trajectory.steps] == [False, True, False]
    assert trajectory.steps[1].scores["compute_score_later"].value == 0.5
    assert trajectory.task.extra_info == TASK.extra_info
    metrics = report.metrics()
    assert metrics["reward/compute_score/extra/acc"] == 1.0
    assert metrics["reward/compute_score/extra/turns"] == 6.0
    assert "reward/compute_score/extra/pred" not in metrics
    names = Names(functions=["compute_score", "compute_score_later"])
    assert described("reward/compute_score/extra/acc", names).name == "reward/<function>/extra/<name>"


def test_verl_batch_function_gets_lists():
    assert outcome_of({"fn": "compute_scores"}).value == 1.0
    assert outcome_of({"fn": "compute_scores"}, answer="7").value == 0.0


def test_missing_answer_scores_the_worst_of_the_range():
    score = outcome_of({"fn": "math_style", "range": [-1.0, 1.0]}, answer=None)
    assert (score.value, score.range, score.reason) == (-1.0, (-1.0, 1.0), "the workflow returned no answer")


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        ("without_score", "RewardError: expected a number, or a dict with `score`, got a dict with acc"),
        ("two_rewards", "RewardError: expected a list with one reward, or None, for one completion, got 2 values"),
        (
            "math_style",
            "expected a value in [0, 1], got -1; if the function has another range, set the entry's `range`",
        ),
        (
            "of_level",
            "RewardError: expected a column 'level' of the data set (extra_info), or an entry in `args` "
            "(did you mean 'levels'?); the columns are data_source, ground_truth, levels, nested",
        ),
    ],
)
def test_invalid_call_fails_with_its_reason(fn, reason):
    score = outcome_of({"fn": fn}, task=replace(TASK, extra_info={"levels": "hard", "nested": {}}), answer="7")
    assert (score.status, score.reason) == ("failed", reason)


def test_equal_texts_call_a_verl_function_once():
    borrowed.CALLS.clear()
    trajectories = [trajectory_of(name=name, info={"rollout": name}) for name in "abc"]
    _, report = scored({"fn": "compute_score"}, trajectories=trajectories)
    assert borrowed.CALLS == ["72"]
    assert report.metrics()["reward/compute_score/cached"] == 2
    assert report.functions[0].extra["acc"] == (3.0, 3)


def test_functions_of_verl_score_as_in_verl():
    reward_score = pytest.importorskip("verl.utils.reward_score")
    texts = ["48 + 24 = 72\n#### 72", "#### 71", "72", ""]
    prefix, task = "verl.utils.reward_score", replace(TASK, data_source="openai/gsm8k")
    trajectories = [trajectory_of(task, name=text, answer=text) for text in texts]
    for step, text in zip(trajectories[0].steps, texts, strict=False):
        step.response = text
    scored(
        {"fn": f"{prefix}:default_compute_score"},
        {"fn": f"{prefix}.gsm8k:compute_score", "level": "step", "name": "loose", "args": {"method": "flexible"}},
        {"fn": f"{prefix}.math_dapo:compute_score", "level": "step", "name": "dapo", "range": [-1.0, 1.0]},
        trajectories=trajectories,
    )
    expected = [reward_score.default_compute_score("openai/gsm8k", text, "72") for text in texts]
    assert [trajectory.outcome.value for trajectory in trajectories] == expected == [1.0, 0.0, 0.0, 0.0]
    from verl.utils.reward_score import gsm8k, math_dapo

    for step, text in zip(trajectories[0].steps, texts, strict=False):
        assert step.scores["loose"].value == gsm8k.compute_score(text, "72", method="flexible")
        assert step.scores["dapo"].value == math_dapo.compute_score(text, "72")["score"]


# ---- TRL


def test_trl_function_scores_outcome_and_steps():
    trajectory = trajectory_of()
    trajectory.steps[0].response = "<think>48 + 24</think> 72"
    entries = [{"fn": "accuracy_reward"}, {"fn": "think_format_reward", "level": "step", "agent_match": "p|e"}]
    _, report = scored(*entries, trajectories=[trajectory])
    assert (trajectory.outcome.value, trajectory.outcome.reason) == (1.0, "solution: 72")
    assert [step.scores["think_format_reward"].value for step in trajectory.steps[:2]] == [1.0, 0.0]
    assert trajectory.steps[2].scores == {}
    assert report.metrics()["reward/accuracy_reward/extra/characters"] == 2.0


def test_partial_of_a_trl_function_binds_columns():
    assert outcome_of({"fn": "bound_tag_reward"}, answer="72").value == 0.5


def test_trl_arguments_hold_prompt_tokens_and_step():
    trajectory = trajectory_of()
    trajectory.steps[1].policy_version = 3
    scored({"fn": "judged", "level": "step"}, trajectories=[trajectory])
    assert [step.scores["judged"].value for step in trajectory.steps] == [0.2, 0.5, 0.2]


def test_format_follows_the_data_set_or_the_entry():
    as_text = replace(TASK, extra_info={"prompt": "How many?"})
    assert outcome_of({"fn": "unique_letters"}, task=as_text, answer="abcab").value == 0.3
    assert outcome_of({"fn": "unique_letters", "format": "text"}, answer="abcab").value == 0.3
    assert outcome_of({"fn": "unique_letters"}, answer="abcab").status == "failed"  # its `completion` is a list


def test_none_leaves_a_step_without_a_score():
    hard = replace(TASK, extra_info={"level": "hard"})
    trajectories = [trajectory_of(), trajectory_of(hard, name="u")]
    _, report = scored({"fn": "of_level", "level": "step", "agent_match": "e"}, trajectories=trajectories)
    assert [trajectory.steps[1].scores.get("of_level", Score(-9.0)).value for trajectory in trajectories] == [-9.0, 1.0]
    metrics = report.metrics()
    assert (metrics["reward/of_level/not_applicable"], metrics["reward/of_level/scores"]) == (1, 1)
    assert metrics["reward/failed_frac"] == 0.0


def test_none_as_outcome_masks_the_trajectory():
    hard = replace(TASK, extra_info={"level": "hard"})
    trajectories = [trajectory_of(status="truncated"), trajectory_of(hard, name="u")]
    first, report = scored({"fn": "of_level"}, trajectories=trajectories, max_failed_frac=0.0)
    assert (first.outcome.status, first.outcome.reason) == ("failed", "does not apply: the function returned None")
    assert (report.functions[0].matched, report.functions[0].not_applicable) == (1, 1)
    batch = TrajectoryBatch.from_trajectories(trajectories)
    assert read_rewards(batch, credit_options()).masked_N.tolist() == [True, False]


def test_functions_of_trl_score_as_in_trl():
    rewards = pytest.importorskip("trl.rewards")
    texts = [r"<think>48 + 24</think> \boxed{72}", r"\boxed{71}", "no answer"]
    trajectories = [trajectory_of(name=text, answer=text) for text in texts]
    trajectories.append(trajectory_of(replace(TASK, ground_truth="no truth"), name="none"))
    for trajectory in trajectories:
        trajectory.steps[0].response = trajectory.answer
    scored(
        {"fn": "trl.rewards:accuracy_reward"},
        {"fn": "trl.rewards:think_format_reward", "level": "step", "agent_match": "p"},
        trajectories=trajectories,
    )
    completions = [[{"role": "assistant", "content": trajectory.answer}] for trajectory in trajectories]
    truths = [trajectory.task.ground_truth for trajectory in trajectories]
    found = [t.outcome.value if t.outcome.status == "ok" else None for t in trajectories]
    assert found == rewards.accuracy_reward(completions, truths) == [1.0, 0.0, 0.0, None]
    steps = [trajectory.steps[0].scores["think_format_reward"].value for trajectory in trajectories]
    assert steps == rewards.think_format_reward(completions)


# ---- verifiers


def test_verifiers_function_scores_outcome_and_steps():
    trajectory, _ = scored({"fn": "exact_answer"}, {"fn": "by_state", "level": "step", "agent_match": "v"})
    assert trajectory.outcome.value == 1.0
    assert [step.scores["by_state"].value for step in trajectory.steps if step.scores] == [0.25]


def test_parser_of_the_entry_is_an_object():
    entry = {"fn": "exact_answer", "args": {"parser": f"{MODULE}:upper"}}
    assert outcome_of(entry, task=replace(TASK, ground_truth="YES"), answer="yes").value == 1.0


# ---- with the rest


EACH = [
    {"fn": "compute_score"},
    *(
        {"fn": fn, "level": "step"}
        for fn in ("think_format_reward", "of_level", "judged", "exact_answer", "math_style")
    ),
    {"fn": "accuracy_reward", "level": "step"},
    {"fn": "values_and_notes"},
]


def test_worker_processes_give_the_same_scores():
    functions = load(*EACH)
    expect_the_same_scores(functions, make_backend("process", functions, BackendOptions(num_workers=1)))


def expect_the_same_scores(functions, backend):
    """Compare scores and numbers of a backend with those of this process; close the backend."""
    here, there = trajectory_of(), trajectory_of()
    expected = asyncio.run(RewardManager(functions, 1.0).score([here]))
    manager = RewardManager(functions, 1.0, backend=backend)
    try:
        report = asyncio.run(manager.score([there]))
    finally:
        manager.close()
    assert there.outcome.status == "ok"
    assert there == here
    for result, other in zip(report.functions, expected.functions, strict=True):
        assert (result.extra, result.not_applicable) == (other.extra, other.not_applicable)


def test_sum_leaves_out_parts_that_do_not_apply():
    no, yes = {"fn": "of_level"}, {"fn": "accuracy_reward"}
    text = {"fn": "unique_letters", "args": {}, "format": "text"}

    def outcome(fn, **args):
        return outcome_of({"fn": fn, "level": "outcome", "args": args}, answer="7272")

    total = outcome("sum", parts=[{**no, "weight": 3.0}, {**yes, "weight": 1.0}, {**text, "weight": 1.0}])
    assert total.value == pytest.approx(5.0 * 0.1)  # 0 and 0.2, stretched to the range [0, 5]
    assert total.reason == "of_level does not apply, accuracy_reward 0, unique_letters 0.2"
    for parts in ([no, {**yes, "weight": 0.0}], [no]):
        assert outcome("sum", parts=parts).reason == "does not apply: the function returned None"


def test_numbers_of_parts_carry_the_name_of_the_part():
    parts = [{"fn": "compute_score"}, {"fn": "accuracy_reward"}]
    _, report = scored({"fn": "sum", "level": "outcome", "args": {"parts": parts}})
    assert set(report.functions[0].extra) == {"compute_score.acc", "compute_score.turns", "accuracy_reward.characters"}


def test_conformance_checks_a_borrowed_function():
    check_reward_function(borrowed.accuracy_reward, [trajectory_of()])
    check_reward_function(borrowed.math_style, range=(-1.0, 1.0))
    check_reward_function(borrowed.by_state, [trajectory_of()])
    with pytest.raises(ConformanceError, match="set the entry's `range`"):
        check_reward_function(borrowed.math_style)
