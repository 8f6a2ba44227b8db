import inspect
import re
from pathlib import Path

import pytest

from creditflow.data import Task, Trajectory
from creditflow.data.datasets import load_tasks
from creditflow.data.gym_tasks import gym_entry
from creditflow.errors import DataError
from creditflow.rewards.builtin.gym_score import _EVALUATED, is_formula, is_literal, reasoning_gym


def task_of(address: str):
    return load_tasks(f"reasoning-gym://{address}", Path(), {}, "train")[0]


def score(task, answer, **more):
    return reasoning_gym(Trajectory(id="t", uid="u", task=task, answer=answer), **more)


@pytest.mark.parametrize(
    "family",
    ["chain_sum", "gcd", "syllogism", "products", "complex_arithmetic", "countdown", "simple_integration", "n_queens"],
)
def test_familys_own_scorer_decides(family):
    task = task_of(f"{family}?size=1")
    right = str(task.ground_truth)
    assert score(task, right).value == 1.0
    assert score(task, f"I think: <answer>{right}</answer>").value == 1.0
    assert score(task, f"so\n#### {right}").value == 1.0
    assert score(task, "", strict=True).value == 0.0
    assert score(task, "zzz", strict=True).value == 0.0
    assert score(task, None).value == 0.0


def test_strict_gives_full_marks_only():
    task = task_of("gcd?size=1")
    assert 0 < score(task, f"it is {task.ground_truth}").value < 1
    assert score(task, f"it is {task.ground_truth}", strict=True).value == 0.0


def test_answers_that_break_a_scorer_score_0():
    task = task_of("chain_sum?size=1")
    for text in ("9" * 100_000, "9" * 3900, "\u0663", "NaN", "1e999999999", "\x00", "((((((((", "\ud800"):
        assert score(task, text).value == 0.0


def test_task_from_elsewhere_is_refused():
    with pytest.raises(DataError, match="expected a task of a reasoning-gym:// address"):
        score(Task("mine", ({"role": "user", "content": "1 + 2"},), "3"), "3")


def test_formulas_that_could_run_code_or_forever_are_refused():
    for text in ("-4*(-2*x - 8)**(3/2)/3 + C", "94*4 - 61 - 6", "-896*x**4 + 2240*x**3", "sin(x)*exp(-x)/2"):
        assert is_formula(text)
    hostile = (
        "__import__('os').system('true')",
        "x.__class__",
        "().__class__",
        "open('a')",
        "9**9**9",
        "(9**60)**60",
        "9**999999",
        "x**y",
        "factorial(9)",
        "lambda: 0",
        "[x for x in y]",
        "'a'",
        "x" * 400,
        "(" * 250 + ")" * 250,
        "1e999",
        "10**-99",
    )
    for text in hostile:
        assert not is_formula(text), text
    task = task_of("countdown?size=1")
    assert score(task, "9**9**9**9").reason.startswith("the answer is no literal or formula")


def test_literals_that_could_run_code_are_refused():
    assert is_literal("[[1, -2], ['a']]")
    assert is_literal("1 2 3\n4 5 6")
    for text in (
        "[0]*10**9",
        "print(1)",
        "[].append",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "f'{1}'",
        "-" * 3999 + "1",
    ):
        assert not is_literal(text), text


def test_every_evaluating_family_has_a_check():
    from reasoning_gym import factory

    evaluates = re.compile(r"(?<![\w.])eval\((?!entry)|(?<!def )\bparse_expr\(|sympify\(")
    own_parser = {"propositional_logic"}
    found = {
        name
        for name, (data_set, _) in factory.DATASETS.items()
        if evaluates.search(inspect.getsource(data_set.score_answer))
    }
    assert found - own_parser == set(_EVALUATED)


def test_entry_of_a_task_is_the_familys_entry():
    entry = gym_entry(task_of("chain_sum?size=1&min_terms=2&max_terms=2"))
    assert entry["question"].endswith(entry["metadata"]["expression"] + " =")
