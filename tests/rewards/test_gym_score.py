import inspect
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from creditflow.data import Task, Trajectory
from creditflow.data.datasets import load_tasks
from creditflow.data.gym_tasks import gym_entry
from creditflow.errors import DataError
from creditflow.rewards.builtin.gym_score import reasoning_gym
from creditflow.rewards.support.gym_answers import EVALUATED

WITHOUT_SOLUTION = {"boxnet", "rush_hour"}
SOLUTIONS = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""Solutions of families without a single true answer."""
QUICK = {"knight_swap": "&max_nodes=6"}
"""Options for families that take seconds to make a problem."""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """codeio runs programs to make its problems, and some write files into the working directory."""
    monkeypatch.chdir(tmp_path)


@cache
def tasks_of(address: str) -> list[Task]:
    return load_tasks(f"reasoning-gym://{address}", Path(), {}, "train")


def task_of(address: str) -> Task:
    return tasks_of(address)[0]


def score(task, answer, **more):
    return reasoning_gym(Trajectory(id="t", uid="u", task=task, answer=answer), **more)


def family_tasks() -> Iterator[tuple[str, Task]]:
    """Two tasks of every family."""
    from reasoning_gym import factory

    for family in sorted(set(factory.DATASETS) - {"composite"}):
        yield from ((family, task) for task in tasks_of(f"{family}?size=2{QUICK.get(family, '')}"))


def solved_tasks() -> Iterator[tuple[str, Task, str]]:
    """The same tasks with their true answers, where a family gives one."""
    for family, task in family_tasks():
        if family not in WITHOUT_SOLUTION:
            entry = gym_entry(task)
            yield family, task, SOLUTIONS[family](entry["metadata"]) if family in SOLUTIONS else entry["answer"]


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
    for text in ("9" * 100_000, "9" * 3900, "NaN", "1e999999999", "\x00", "((((((((", "\ud800"):
        assert score(task, text).value == 0.0


def test_task_from_elsewhere_is_refused():
    with pytest.raises(DataError, match="expected a task of a reasoning-gym:// address"):
        score(Task("mine", ({"role": "user", "content": "1 + 2"},), "3"), "3")


# All families


def test_true_answer_of_every_family_scores_1():
    assert not {(family, text) for family, task, text in solved_tasks() if score(task, text, strict=True).value != 1.0}


# Single families


def test_right_answers_in_other_forms_keep_their_full_marks():
    forms = {
        "coin_flip?size=1": lambda truth: f"{truth}0",
        "game_of_life_halting?size=1": str.lower,
        "gsm_symbolic?size=1": "It is {} in all.".format,
        "figlet_font?size=1": str.lower,
        "number_sorting?size=1": lambda truth: truth.replace("'", '"'),
        "word_sorting?size=1": lambda truth: truth.replace(", ", ","),
        "countdown?size=1": lambda truth: f"( {truth} )",
        "complex_arithmetic?size=1": lambda truth: truth.replace(" ", ""),
        "simple_integration?size=1": lambda truth: f"7 + {truth}".removesuffix(" + C"),
        "chain_sum?size=1": lambda truth: f"{truth}.00",
    }
    for address, form in forms.items():
        task = task_of(address)
        assert score(task, form(task.ground_truth), strict=True).value == 1.0, address


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("chain_sum", "1e3000000"),
        ("codeio", json.dumps({"a": [1] * 1250})),
        ("coin_flip", "1e3000000"),
        ("coin_flip", "1e99999999"),
        ("coin_flip", "1e-999999999"),
        ("coin_flip", "1e,99999999"),
        ("countdown", "9**9**9**9"),
        ("intermediate_integration", "(x+a+b+c+d+e+f)**59"),
        ("intermediate_integration", "sin(" * 40 + "x" + ")" * 40),
        ("intermediate_integration", "*".join(f"sin({i}*x)" for i in range(1, 9))),
        ("intermediate_integration", "+".join(f"1/(x + {c})" for c in "abcdefghij")),
        ("intermediate_integration", "acos((6 - x)*log(x)**7)**(1/2)"),
        ("polynomial_multiplication", "(x+a+b+c+d+e+f)**59"),
        ("polynomial_multiplication", "1e-3000000"),
        ("power_function", "1e99999999"),
        ("propositional_logic", "\u2228".join("abcdefghijklmnopqrstuvwxyz")),
        ("propositional_logic", "\u00ac" * 3900 + "P"),
        ("rubiks_cube", "U99999999"),
        ("rubiks_cube", "U9 " * 1300),
        ("rush_hour", "A+99999999"),
        ("simple_integration", "(x+a)**59"),
    ],
)
def test_answer_that_stalls_a_scorer_scores_0_quickly(family: str, text: str):
    task = task_of(f"{family}?size=1")
    start = time.process_time()
    assert score(task, text, strict=True).value == 0.0
    assert time.process_time() - start < 1.0


# Which scorers evaluate


def functions_of_scorer(data_set: type) -> Iterator[tuple[Callable[..., object], str]]:
    """The scorer and what it calls within reasoning_gym, each with its source."""
    found: set[object] = set()
    open_ends: list[Callable[..., object]] = [data_set.score_answer]
    while open_ends:
        function = open_ends.pop()
        if function in found:
            continue
        found.add(function)
        source = inspect.getsource(function)
        yield function, source
        names = vars(inspect.getmodule(function))
        for owner, name in re.findall(r"(?:\b(\w+)\.)?\b(\w+)\(", source):
            holder = data_set if owner in ("self", "cls") else names.get(owner)
            called = getattr(holder, name, None) if owner else names.get(name)
            called = getattr(called, "__func__", called)  # of a class method
            own = getattr(called, "__module__", "").startswith("reasoning_gym.")
            if own and (inspect.isfunction(called) or inspect.isclass(called)):
                open_ends.append(called)


def test_every_evaluating_family_has_a_check():
    from reasoning_gym import factory

    evaluates = re.compile(
        r"(?<![\w.])(eval|exec)\((?!entry|problem)|literal_eval\(|(?<!def )\bparse_expr\(|sympify\(|\bzss\."
        r"|\b(Fraction|Decimal|complex)\((?!\*)|\* int\(|range\(abs\("
    )
    found = {
        family
        for family, (data_set, _) in factory.DATASETS.items()
        if any(evaluates.search(source) for _, source in functions_of_scorer(data_set))
    }
    assert found == set(EVALUATED)


def test_entry_of_a_task_is_the_familys_entry():
    entry = gym_entry(task_of("chain_sum?size=1&min_terms=2&max_terms=2"))
    assert entry["question"].endswith(entry["metadata"]["expression"] + " =")
