"""Tests of the recipe sums_team, run with a client that answers by rule.

One sum was worked out by hand: 7 + 2 + 9 + 4 = 9 + 13 = 22.
"""

from collections.abc import Mapping

import pytest

from creditflow.data import Step, Task, Trajectory
from tests.recipes.team import agents_of, loader, run_recipe, scores_of

recipe = loader("sums_team")
TASK = Task("reasoning-gym/chain_sum", ({"role": "user", "content": "State: 7 + 2 + 9 + 4 ="},), "22")
SYSTEMS = dict.fromkeys(("planner", "solver", "checker", "single"), "?")
ANSWERS = {
    "7 + 2 + 9 + 4": "7 + 2, 9 + 4",
    "7 + 2": "7 + 2 = 9",
    "7 + 2 = 9": "7 + 2 = 9",
    "9 + 4": "9 + 4 = 13",
    "9 + 4 = 13": "9 + 4 = 13",
    "9 + 13": "9 + 13 = 22",
    "9 + 13 = 22": "9 + 13 = 22",
}


def run_team(changes: Mapping[str, str | list[str]] = {}, workflow: str = "solve"):
    """The scored trajectory of a team that answers by ANSWERS; a list is answered in order."""
    table = {**ANSWERS, **changes}

    def answer(prompt: str) -> bytes:
        reply = table[prompt.splitlines()[-1]]
        return (reply.pop(0) if isinstance(reply, list) else reply).encode()

    return run_recipe("sums_team", TASK, SYSTEMS, answer, workflow)[0]


def score(function: str, agent: str, response: str, **info) -> float:
    step = Step("s", "t", 0, agent, 0, (), "", response, info=info)
    return recipe(function)(step, Trajectory("t", "u", TASK, steps=[step]))


def test_right_team_adds_in_seven_turns():
    trajectory = run_team()
    assert agents_of(trajectory) == "pscscsc"
    assert (trajectory.answer, trajectory.outcome.value) == ("22", 1.0)
    assert scores_of(trajectory) == [1.0] * 7


def test_returned_sum_is_computed_again():
    trajectory = run_team({"7 + 2": ["7 + 2 = 8", "7 + 2 = 9"], "7 + 2 = 8": "7 + 2 = 9"})
    assert agents_of(trajectory) == "pscsscsc"
    assert trajectory.answer == "22"
    assert scores_of(trajectory)[:4] == [1.0, 0.0, 1.0, 1.0]


def test_checker_that_accepts_everything_scores_0_on_a_wrong_sum():
    trajectory = run_team(
        {"7 + 2": "7 + 2 = 8", "7 + 2 = 8": "7 + 2 = 8", "8 + 13": "8 + 13 = 21", "8 + 13 = 21": "8 + 13 = 21"}
    )
    assert agents_of(trajectory) == "pscscsc"
    assert scores_of(trajectory) == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert (trajectory.answer, trajectory.outcome.value) == ("21", 0.0)


def test_unreadable_plan_ends_the_rollout():
    for plan in ("", "7 + 2", "7 + 2, ", "7 - 2, 9 + 4", "7 + 2, 9 + 4.", "7 + \u0662, 9 + 4", "1" * 99_999):
        trajectory = run_team({"7 + 2 + 9 + 4": plan})
        assert agents_of(trajectory) == "p"
        assert trajectory.outcome.value == 0.0
        assert scores_of(trajectory) == [0.0]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("7 + 2, 9 + 4", 1.0),
        ("4, 9 + 2 + 7", 1.0),
        ("7 + 2, 9", 0.0),
        ("7 + 2, 9 + 4 + 4", 0.0),
        ("9, 9 + 4", 0.0),
        ("", 0.0),
    ],
)
def test_plan_holds_each_term_once(plan, expected):
    assert score("split_right", "planner", plan, terms=[7, 2, 9, 4]) == expected


@pytest.mark.parametrize(("function", "agent"), [("sum_right", "solver"), ("check_right", "checker")])
@pytest.mark.parametrize(
    "response",
    [
        "",
        "The sum is 9 + 4 = 13",
        "9 + 4 = 130",
        "4 + 9 = 13",
        "9 + 4 = \u0661\u0663",
        "9 + 4 = " + "9" * 100_000,
        "9 + 4 = 13\n9 + 4 = 14",
        "\ud800",
    ],
)
def test_only_the_exact_equation_scores(function, agent, response):
    assert score(function, agent, "9 + 4 = 13", terms=[9, 4], candidate=13) == 1.0
    assert score(function, agent, response, terms=[9, 4], candidate=13) == 0.0


def test_candidates_are_strata_of_the_checker():
    step = Step("s", "t", 0, "checker", 0, (), "", "", info={"terms": [9, 4], "candidate": 13})
    assert recipe("candidate_kind")(step) == "right"
    step.info["candidate"] = 12
    assert recipe("candidate_kind")(step) == "wrong"
    step.agent = "solver"
    assert recipe("candidate_kind")(step) is None


def test_flip_inverts_a_fixed_share_by_content():
    flipped = recipe("flipped")
    trajectory = Trajectory("t", "u", TASK)
    steps = [Step("s", "t", 0, "solver", 0, (), f"prompt {i}", "9 + 4 = 13") for i in range(1000)]
    first = [flipped(True, step, trajectory, 0.2) for step in steps]
    assert 0.75 < sum(first) / len(first) < 0.85
    assert first == [1.0 - flipped(False, step, trajectory, 0.2) for step in steps]
    assert all(flipped(True, step, trajectory, 0.0) == 1.0 for step in steps)


def test_splits_of_the_problems_are_disjoint():
    make_tasks, settings = recipe("make_tasks"), {"train_tasks": 300, "val_tasks": 60}
    train = {task.text for task in make_tasks("train", settings)}
    val = {task.text for task in make_tasks("val", settings)}
    tune = {task.text for task in make_tasks("val", {**settings, "val_split": "tune"})}
    assert (len(train), len(val), len(tune)) == (300, 60, 60)
    assert not train & val
    assert not (train | val) & tune


def test_single_agent_answers_in_one_turn():
    trajectory = run_team({"7 + 2 + 9 + 4": "7 + 2 + 9 + 4 = 22"}, workflow="solve_alone")
    assert (agents_of(trajectory), trajectory.answer, trajectory.outcome.value) == ("s", "22", 1.0)
    wrong = run_team({"7 + 2 + 9 + 4": "22"}, workflow="solve_alone")
    assert (wrong.answer, wrong.outcome.value) == ("", 0.0)
