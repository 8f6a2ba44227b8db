import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from creditflow.data import Task, Trajectory
from creditflow.data.datasets import load_tasks
from creditflow.errors import DataError
from creditflow.plugins.gym.answers import EVALUATED, FULL_MARKS, refusal
from creditflow.plugins.gym.score import reasoning_gym
from creditflow.plugins.gym.tasks import gym_data_set, gym_entry

OTHER_DIGITS = tuple({48 + i: zero + i for i in range(10)} for zero in (0x660, 0xFF10))
"""Arabic-Indic and full-width digits, which Python's int and float read, for `str.translate`."""
WITHOUT_SOLUTION = {"boxnet", "rush_hour"}
SOLUTIONS = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""Solutions of families without a single true answer."""
QUICK = {"knight_swap": "&max_nodes=6", "futoshiki": "&max_board_size=4"}
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


def test_strict_gives_full_marks_only():
    task = task_of("gcd?size=1")
    assert score(task, None).value == 0.0
    for form in ("{}", "I think: <answer>{}</answer>", "so\n#### {}"):
        assert score(task, form.format(task.ground_truth)).value == 1.0
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


@pytest.mark.parametrize("strict", [True, False])
def test_right_number_in_other_digits_scores_0(strict):
    answers = [
        (family, task, answer.translate(digits))
        for family, task, answer in solved_tasks()
        for digits in OTHER_DIGITS
        if answer.translate(digits) != answer
    ]
    assert len({family for family, _, _ in answers}) > 50
    assert not {(family, text) for family, task, text in answers if score(task, text, strict=strict).value}


def test_numbers_that_are_not_finite_score_0():
    paid = set()
    for family, task, answer in solved_tasks():
        for word in ("nan", "NaN", "-inf", "Infinity"):
            texts = {word, *(re.sub(r"-?\d+(\.\d+)?", word, answer, count=count) for count in (0, 1))}
            paid |= {(family, text) for text in texts - {answer} if score(task, text, strict=True).value}
    assert not paid


def test_nonsense_scores_0():
    texts = ("", "zzz", "-1", "[[[[", "{}", "[]", "null", "None", "[NaN]", "()", "- zzz", "1e999", ", ,", "1/0")
    assert not {
        (family, text)
        for family, task in family_tasks()
        for text in texts
        if text != task.ground_truth and score(task, text, strict=True).value
    }


# Single families


def plan_that_moves_targets(state: dict[str, list[str]]) -> str:
    """A plan for boxnet in which every target is moved to its box."""
    places = {item: [float(number) for number in key.split("_")] for key, items in state.items() for item in items}
    plan = []
    for box in (item for item in places if item.startswith("box_")):
        target = box.replace("box", "target")
        place, goal = places[target], places[box]
        for axis in (0, 1):
            while place[axis] != goal[axis]:
                before = list(place)
                place[axis] += math.copysign(1, goal[axis] - place[axis])
                plan.append({f"Agent{before}": f"move({target}, square{place})"})
        plan.append({f"Agent{goal}": f"move({box}, {target})"})
    return json.dumps(plan)


WRONG_WITH_FULL_MARKS = [
    ("boxnet", lambda truth, metadata: plan_that_moves_targets(metadata["initial_state"])),
    ("coin_flip?match=at least", lambda truth, metadata: "0"),
    ("complex_arithmetic", lambda truth, metadata: "nan"),
    ("complex_arithmetic", lambda truth, metadata: "NaN + 2i"),
    ("countdown", lambda truth, metadata: f"{metadata['target']}e0 + (E - E)*({truth})"),
    ("figlet_font?min_word_len=11&max_word_len=14", lambda truth, metadata: f"{truth[:10]}zzzz"),
    ("game_of_life_halting", lambda truth, metadata: "[[[["),
    ("game_of_life_halting", lambda truth, metadata: "False" if truth == "True" else "True"),
    ("gsm_symbolic", lambda truth, metadata: f"-{truth}"),
    ("letter_jumble?min_words=4&max_words=4", lambda truth, metadata: f"{truth} zzz"),
    ("number_sorting", lambda truth, metadata: str(["NaN"] * (truth.count(",") + 1))),
    ("number_sorting", lambda truth, metadata: re.sub("[0-9]", lambda digit: rf"\u066{digit[0]}", truth)),
    ("puzzle24", lambda truth, metadata: "1*1*4*6"),
    ("puzzle24", lambda truth, metadata: "(24e0 + 1 - 1)*9/9"),
    ("spell_backward?min_word_len=9&max_word_len=9", lambda truth, metadata: f"{truth}zzz"),
    ("word_sorting", lambda truth, metadata: f"{truth}, zzz"),
]
"""Addresses, with wrong answers to which the family's scorer gives full marks."""


@pytest.mark.parametrize(
    ("address", "wrong"), WRONG_WITH_FULL_MARKS, ids=[address.partition("?")[0] for address, _ in WRONG_WITH_FULL_MARKS]
)
def test_wrong_answer_with_full_marks_scores_0(address: str, wrong: Callable[..., str]):
    task = task_of(f"{address}{'&' if '?' in address else '?'}size=1")
    entry = gym_entry(task)
    text = wrong(task.ground_truth, entry["metadata"])
    assert gym_data_set(task).score_answer(text, entry) >= 1.0
    for strict in (True, False):
        assert score(task, text, strict=strict).value == 0.0


def test_families_with_full_marks_for_wrong_answers_are_tested():
    assert set(FULL_MARKS) <= {address.partition("?")[0] for address, _ in WRONG_WITH_FULL_MARKS}


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
        ("rush_hour", "A+99999999"),
        ("simple_integration", "(x+a)**59"),
    ],
)
def test_answer_that_stalls_a_scorer_is_refused_before(family: str, text: str):
    task = task_of(f"{family}?size=1")
    assert refusal(family, text, gym_entry(task))
    assert score(task, text, strict=True).value == 0.0


# Which scorers evaluate


def functions_of_scorer(data_set: type) -> Iterator[tuple[Callable[..., object], str]]:
    """The scorer and its functions within reasoning_gym, each with its source."""
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
    with_escapes = {"number_sorting"}
    assert found | with_escapes == set(EVALUATED)


def test_entry_of_a_task_is_the_familys_entry():
    entry = gym_entry(task_of("chain_sum?size=1&min_terms=2&max_terms=2"))
    assert entry["question"].endswith(entry["metadata"]["expression"] + " =")
