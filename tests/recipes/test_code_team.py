"""Tests of the recipe code_team: tasks, rollouts and sub-rewards; expected values were computed by hand."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import TrajectoryBatch
from creditflow.data.datasets import load_tasks
from creditflow.rewards import RewardManager
from creditflow.rewards.support.test_cases import CaseCall, alike
from tests.paths import RECIPES
from tests.recipes.team import functions_of, loader, run_recipe, spoken
from tests.sandbox import boxes

recipe = loader("code_team")
TASKS = load_tasks(str(RECIPES / "code_tasks.jsonl"), RECIPES, {}, "train")
CLAMP = TASKS[1]  # clamp(value, low, high)
TEAM = {"c": "coder", "t": "tester", "r": "reviewer"}
FENCE = "```"

RIGHT = f"{FENCE}python\ndef clamp(value, low, high):\n    return max(low, min(value, high))\n{FENCE}"
WRONG = f"{FENCE}python\ndef clamp(value, low, high):\n    return max(low, value)\n{FENCE}"  # fails one test of seven


@pytest.fixture(scope="module")
def box():
    """Skip without bubblewrap."""
    return boxes.bubblewrap(wall_s=8.0)


def last_score(function: str, *said: tuple[str, str]) -> tuple[float, str]:
    trajectory = spoken(CLAMP, TEAM, *said)
    score = recipe(function)(trajectory.steps[-1], trajectory)
    return pytest.approx(score.value), score.reason


# The tasks


def test_eight_of_forty_tasks_are_held_out():
    train, val = recipe("tasks")("train", {}), recipe("tasks")("val", {})
    assert (len(train), len(val)) == (32, 8)
    names = [task.extra_info["name"] for task in (*train, *val)]
    assert sorted(names) == sorted({task.extra_info["name"] for task in TASKS})
    assert not {task.extra_info["name"] for task in train} & {task.extra_info["name"] for task in val}


def value_of(program, call):
    names = {}
    exec(program, names)
    try:
        return eval(call, names)
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.extra_info["name"])
def test_task_hides_its_reference_which_alone_passes(task):
    name = task.extra_info["name"]
    tests = json.loads(task.ground_truth)
    assert len(tests) >= 6
    assert 2 <= len(task.extra_info["mutants"]) <= 3
    assert task.text.startswith(f"def {name}(")
    assert all(name in test["call"] for test in tests)
    for program in (task.extra_info["reference"], *task.extra_info["mutants"]):
        assert recipe("defines")(program, name)
        assert program.split("\n", 1)[1] not in task.text
        right = [alike(value_of(program, test["call"]), test["expect"]) for test in tests]
        assert all(right) == (program == task.extra_info["reference"])
    for test in tests:  # a tester could write it
        assert recipe("check_in")(f"assert {test['call']} == {test['expect']!r}", name) is not None


# Reading


@pytest.mark.parametrize(
    ("line", "is_check"),
    [
        ("assert clamp(5, 0, 10) == 5", True),
        ("assert clamp(5, low=0, high=10) == 5, 'inside'", True),
        ("assert clamp([1], {'a': 2}, set()) == (1, None)", True),
        ("assert clamp(1, 0, 2) == clamp(1, 0, 2)", False),
        ("assert clamp(1, 0, 2)", False),
        ("assert abs(clamp(1, 0, 2)) == 1", False),
        ("assert clamp(*[1, 0, 2]) == 1", False),
        ("assert clamp(1, 0, open('solution.py').read()) == 1", False),
        ("assert clip(1, 0, 2) == 1", False),
        ("assert clamp(1, 0, 2) == 1; exit()", False),
        ("assert clamp(1, 0, 2) == 10 ** 10 ** 10", False),
        ("assert clamp(1, 0, 2", False),
        ("assert clamp(" + "-" * 180 + "1) == 1", False),
        ("assert clamp('\x00') == 1", False),
    ],
)
def test_check_is_a_call_with_literals_and_a_literal_result(line, is_check):
    check = recipe("check_in")(line, "clamp")
    assert (check is not None) == is_check
    assert check is None or isinstance(check, CaseCall)  # text by a model is never judged inside of a box


@given(st.text("assert clmp(1,2)='[]{}-*:;#\\\n`rejcodf", max_size=120))
def test_any_reply_is_read(text):
    for check in recipe("checks_in")("assert clamp(" + text, "clamp"):
        assert check is None or isinstance(check, CaseCall)
    assert recipe("said")(text) in (None, "accept", "reject")


@pytest.mark.parametrize("piece", ["assert ", "assert clamp(1, 0, 2) == 1\n", "(", "reject", "\n", "* " * 9, "`"])
def test_hostile_replies_are_clipped(piece):
    text = piece * 100_000
    assert len(recipe("check_lines")(text)) <= 8
    assert all(len(line) <= 200 for line in recipe("check_lines")(text))
    recipe("said")(text)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("accept", "accept"),
        ("assert clamp(1, 0, 2) == 1\nAccept.", "accept"),
        ("**Reject**: it is wrong", "reject"),
        ("I would not accept this", None),
        ("", None),
    ],
)
def test_verdict_begins_the_last_verdict_line(text, verdict):
    assert recipe("said")(text) == verdict


# Sub-rewards

LOW, HIGH, INSIDE, FALSE = (
    "assert clamp(-1, 0, 9) == 0",
    "assert clamp(12, 0, 9) == 9",
    "assert clamp(5, 0, 9) == 5",
    "assert clamp(5, 0, 9) == 4",
)
# The mutants of clamp: low and high exchanged; no upper bound; high if value is below low. LOW detects the third, HIGH
# the first two, INSIDE the first.


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([LOW, HIGH, INSIDE], (1.0, "right 3/3, mutants found out 3/3")),
        ([LOW, FALSE], (0.5 * (0.5 + 0.5 / 3), "right 1/2, mutants found out 1/3")),
        (["assert True", INSIDE, INSIDE], (0.5 * (0.5 + 0.5 / 3), "right 1/2, mutants found out 1/3")),
        (["import os; os._exit(0)", "passed"], (0.0, "no line with assert")),
        (
            [*(f"assert clamp({i}, 0, 9) == {i}" for i in range(1, 9)), FALSE],  # the ninth is not read
            (0.5 + 0.5 / 3, "right 8/8, mutants found out 1/3"),
        ),
    ],
)
def test_checks_bite(box, lines, expected):
    value, reason = last_score("checks_bite", ("c", RIGHT), ("t", "\n".join(lines)))
    assert (value, reason) == expected


@pytest.mark.parametrize(
    ("code", "review", "expected"),
    [
        (RIGHT, f"{LOW}\naccept", 1.0),
        (RIGHT, "accept", 0.6),
        (RIGHT, f"{FALSE}\naccept", 0.6),
        (RIGHT, f"{LOW}\nreject: no", 0.4),
        (WRONG, f"{HIGH}\nreject: no upper bound", 1.0),
        (WRONG, f"{LOW}\nreject: no upper bound", 0.8),
        (WRONG, f"{HIGH}\naccept", 0.4),
        (WRONG, "assert True\naccept", 0.0),
        (f"{FENCE}python\nimport os; os._exit(0)\n{FENCE}", f"{LOW}\nreject", 1.0),
    ],
)
def test_review_right(box, code, review, expected):
    assert last_score("review_right", ("c", code), ("t", LOW), ("r", review))[0] == expected


def test_review_of_nothing_is_unscored():
    trajectory = spoken(CLAMP, TEAM, ("t", LOW), ("r", "accept"))
    with pytest.raises(ValueError, match="expected a coder's step"):
        recipe("review_right")(trajectory.steps[1], trajectory)


@pytest.mark.parametrize(
    ("code", "passed", "outcome"),
    [
        (RIGHT, 1.0, 1.0),
        (WRONG, 6 / 7, 0.0),
        (f"{FENCE}python\nimport sys; print('passed'); sys.exit(0)\n{FENCE}", 0.0, 0.0),
    ],
)
def test_coder_earns_a_share_and_the_team_all_or_nothing(box, code, passed, outcome):
    trajectory = spoken(CLAMP, TEAM, ("c", code))
    asyncio.run(RewardManager(functions_of("code_team"), 0.0).score([trajectory]))
    assert trajectory.steps[0].scores["tests_passed"].value == pytest.approx(passed)
    assert trajectory.outcome.value == outcome


# The trajectory


def run_team(answer):
    return run_recipe("code_team", CLAMP, {name: name.upper() for name in TEAM.values()}, answer)


def a_good_team(prompt: str) -> bytes:
    if prompt.startswith("CODER"):
        return (RIGHT if "rejects" in prompt else WRONG).encode()
    if prompt.startswith("TESTER"):
        return f"{LOW}\n{HIGH}\n{FALSE}".encode()
    return f"{HIGH}\nreject: there is no upper bound".encode()


def test_rollout_runs_from_draft_to_rewritten_code(box):
    trajectory, model = run_team(a_good_team)
    by_agent = {(step.agent, step.turn): step for step in trajectory.steps}
    coder, tester, reviewer = (by_agent[agent, 0] for agent in ("coder", "tester", "reviewer"))
    again = by_agent["coder", 1]
    assert (coder.parents, tester.parents) == ((), ())
    assert reviewer.parents == (0, 1)
    assert again.parents == (coder.index, reviewer.index) == (coder.index, 2)
    assert trajectory.answer_steps == (3,)
    assert trajectory.answer == RIGHT
    scores = [next(iter(step.scores.values())).value for step in (coder, reviewer, tester, again)]
    assert scores == pytest.approx([6 / 7, 1.0, 2 / 3, 1.0])
    assert trajectory.outcome.value == 1.0
    assert [recipe("code_kind")(step) for step in trajectory.steps[2:]] == ["defined", None]
    # An agent sees the responses of its parents, and nothing of the solution.
    assert "return" not in tester.prompt
    assert "assert" not in coder.prompt
    assert "max(low, value)" in reviewer.prompt
    assert HIGH in reviewer.prompt
    assert "no upper bound" in again.prompt
    assert not any("min(value, high)" in prompt for prompt in model.prompts)
    TrajectoryBatch.from_trajectories([trajectory])


def test_accepted_code_is_not_rewritten(box):
    trajectory, _ = run_team(lambda prompt: f"{RIGHT}\n{LOW}\naccept".encode())
    assert sorted(step.agent for step in trajectory.steps) == ["coder", "reviewer", "tester"]
    assert trajectory.answer_steps == (next(step.index for step in trajectory.steps if step.agent == "coder"),)
    assert trajectory.outcome.value == 1.0
