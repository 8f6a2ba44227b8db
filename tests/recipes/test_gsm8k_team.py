"""Tests of the recipe gsm8k_team on rows of the real file; expected values were computed by hand."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Task, Trajectory, TrajectoryBatch
from creditflow.data.datasets import load_tasks
from creditflow.rewards import RewardManager
from tests.paths import GSM8K
from tests.recipes.team import agents_of, functions_of, loader, run_recipe, scores_of, spoken

recipe = loader("gsm8k_team")
TASKS = load_tasks(str(GSM8K), GSM8K.parent, {}, "train")
NATALIA = TASKS[0]  # 48/2=24, 48+24=72
BETTY = TASKS[2]  # 100/2=50, 15*2=30, 100-50-30-15=5
TEAM = {"p": "planner", "e": "executor", "v": "verifier"}


def last_score(function: str, trajectory: Trajectory) -> float:
    return recipe(function)(trajectory.steps[-1], trajectory)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1. 48 / 2 = 24 clips, <<48/2=24>>24", [("48/2=24", 24.0), ("48/2=24", 24.0)]),
        ("$12 x 3 = $36", [("12*3=36", 36.0)]),
        ("50% * 10 = 5", [("(50/100)*10=5", 5.0)]),
        ("(3 + 4) \u00d7 2 = 15", [("(3+4)*2=15", 14.0)]),
        ("1,000*2=2,000", [("1000*2=2,000", 2000.0)]),
        ("1/0=3", [("1/0=3", None)]),
        ("2**9=512 and 7//2=3 and x+1=2 and 5=5", []),
        ("__import__('os').system('true')=0", []),
    ],
)
def test_calculations_are_evaluated_without_running_code(text, expected):
    found = recipe("calculations_in")(text)
    assert [(calculation.text, calculation.computed) for calculation in found] == expected


def test_published_calculations_hold():
    shown = [c for task in TASKS for text in task.extra_info["calculations"] for c in recipe("calculations_in")(text)]
    assert len(shown) > 150
    assert all(calculation.holds for calculation in shown)


@given(st.text("0123456789.,+-*/()$%x= \n#<>e", max_size=80))
def test_any_response_is_read(text):
    trajectory = spoken(NATALIA, TEAM, ("p", "1. " + text), ("e", text), ("v", text + " ok"))
    for name, step in zip(("plan_covers", "value_matches", "verdict_right"), trajectory.steps, strict=True):
        assert 0.0 <= recipe(name)(step, trajectory) <= 1.0


@pytest.mark.parametrize("piece", ["1 ", "(", "-", "=", "1+", "=1", "9" * 119 + "*9=1", "1+" * 58 + "1=59 ", "\n1. "])
def test_hostile_responses_are_read_quickly(piece):
    text = piece * 100_000
    trajectory = spoken(NATALIA, TEAM, ("p", text), ("e", text), ("v", text))
    for name, step in zip(("plan_covers", "value_matches", "verdict_right"), trajectory.steps, strict=True):
        assert 0.0 <= recipe(name)(step, trajectory) <= 1.0


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("1. Divide 48 by 2.\n2. Add 48 and the result.", 1.0),
        ("1. Take half of 48.\n2) 48 + 24", 1.0),  # the value 24 may be named, and need not be
        ("1. Take half of 48.", 1 / 2),
        ("1. Subtract 48 from 100.\n2. Add 48.", (1 / 5 + 1) / 2),  # 48 of 48, 2, /, -, 100
        ("1. 48 2 / + - * 7", 3 / 14),  # 48, 2, / of seven things, and no line left for the second
        ("Divide 48 by 2, then add 48.", 0.0),  # not numbered: the executor got none of it
        ("", 0.0),
    ],
)
def test_plan_covers(plan, expected):
    assert last_score("plan_covers", spoken(NATALIA, TEAM, ("p", plan))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "expected"),
    [("48/2=24", 1.0), ("She sold 24", 0.75), ("48*2=96", 0.5), ("3*5=24", 0.25), ("48/2=25", 0.0)],
)
def test_value_matches(response, expected):
    assert last_score("value_matches", spoken(NATALIA, TEAM, ("p", "1. half"), ("e", response))) == expected


def test_value_is_found_once():
    first = [("p", "1. half"), ("e", "48/2=24"), ("v", "48/2=24 ok")]
    assert last_score("value_matches", spoken(NATALIA, TEAM, *first, ("e", "48+24=72"))) == 1.0
    assert last_score("value_matches", spoken(NATALIA, TEAM, *first, ("e", "48/2=24"))) == 0.5


def test_retry_may_find_the_value_of_the_replaced_step():
    said = [("p", "1. half"), ("e", "48/2=24"), ("v", "bad"), ("e", "48/2=24")]
    assert last_score("value_matches", spoken(NATALIA, TEAM, *said, retries={3: 1})) == 1.0
    trajectory = spoken(NATALIA, TEAM, *said, ("v", "ok"), ("e", "48+24=72"), retries={3: 1})
    assert last_score("value_matches", trajectory) == 1.0


def test_step_finer_than_the_solution_is_half_right():
    said = [("p", "1. half"), ("e", "100/2=50"), ("v", "ok"), ("e", "15*2=30"), ("v", "ok")]
    assert last_score("value_matches", spoken(BETTY, TEAM, *said, ("e", "100-50=50"))) == 0.5
    assert last_score("value_matches", spoken(BETTY, TEAM, *said, ("e", "100-50-30-15=5"))) == 1.0


@pytest.mark.parametrize(
    ("executor", "verifier", "expected"),
    [
        ("48/2=24", "48/2=24 ok", 1.0),
        ("48/2=24", "ok", 0.6),
        ("48/2=24", "48/2=24 bad", 0.4),
        ("48/2=24", "48/2=23 bad", 0.0),
        ("48/2=25", "48/2=24 bad", 1.0),
        ("48/2=25", "48/2=24, not ok. Bad!", 1.0),
        ("48/2=25", "48/2=25 ok", 0.0),
    ],
)
def test_verdict_right(executor, verifier, expected):
    trajectory = spoken(NATALIA, TEAM, ("p", "1. half"), ("e", executor), ("v", verifier))
    assert last_score("verdict_right", trajectory) == pytest.approx(expected)


def test_solution_without_calculations_scores_only_the_outcome():
    task = Task(NATALIA.data_source, NATALIA.prompt, "72", {"calculations": []})
    trajectory = spoken(task, TEAM, ("p", "1. half"), ("e", "48/2=24"), ("v", "ok"))
    trajectory.answer = "#### 72"
    asyncio.run(RewardManager(functions_of("gsm8k_team"), max_failed_frac=1.0).score([trajectory]))
    assert [score.status for step in trajectory.steps for score in step.scores.values()] == ["failed"] * 3
    assert "no <<calculation>>" in trajectory.steps[0].scores["plan_covers"].reason
    assert trajectory.outcome.value == 1.0


def run_team(answer):
    return run_recipe("gsm8k_team", NATALIA, {name: name.upper() for name in TEAM.values()}, answer)


def a_good_team(prompt: str) -> bytes:
    if prompt.startswith("PLANNER"):
        return b"1. Take half of 48.\n2. Add that to 48."
    if prompt.startswith("VERIFIER"):
        return b"48/2=24 ok" if "wrote: 48/2=24" in prompt else b"48+24=72 " + (b"ok" if "=72" in prompt else b"bad")
    if "half" in prompt.rpartition("Now:")[2]:
        return b"48/2=24"
    return b"48+24=72\n#### 72" if "objects" in prompt else b"48+24=71\n#### 71"


def test_rollout_runs_from_plan_to_answer_with_a_retry():
    trajectory, model = run_team(a_good_team)
    assert agents_of(trajectory) == "peveve"
    assert [step.parents for step in trajectory.steps] == [(), (0,), (1,), (0, 2), (3,), (3, 4)]
    assert trajectory.answer == "#### 72"
    assert scores_of(trajectory) == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert trajectory.outcome.value == 1.0
    assert "24" in model.prompts[3]  # the first result reaches the second turn
    assert not any("<<" in prompt for prompt in model.prompts)
    kinds = [recipe("candidate_kind")(step) for step in trajectory.steps]
    assert kinds == [None, None, "holds", None, "wrong", None]
    TrajectoryBatch.from_trajectories([trajectory])


def test_executor_has_a_bounded_number_of_turns():
    plan = "\n".join(f"{i}. Add {i}." for i in range(1, 30)).encode()
    trajectory, model = run_team(lambda prompt: plan if prompt.startswith("PLANNER") else b"1+1=2 bad")
    assert model.prompts[-1].startswith("EXECUTOR")
    assert "write the final answer" in model.prompts[-1]
    assert sum(step.agent == "executor" for step in trajectory.steps) == recipe("MAX_EXECUTOR_TURNS")
