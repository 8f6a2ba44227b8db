"""Tests of the recipe logic_team, run with a client that answers by rule.

One circuit was worked out by hand: (1 nand 1) or (1 and 0) = 0 or 0 = 0.
"""

import json
from functools import cache
from pathlib import Path

import pytest

from creditflow.config import load_recipe
from creditflow.data import Step, Task
from creditflow.data.datasets import load_tasks
from creditflow.plugins.gym.tasks import gym_entry
from tests.recipes.team import loader, run_recipe, scores_of

recipe = loader("logic_team")
ENTRY = {
    "question": "?",
    "answer": "0",
    "metadata": {"term_strings": ["A\u2191B", "A&C"], "final_gate": "OR", "assignments": {"A": 1, "B": 1, "C": 0}},
}
TASK = Task(
    "reasoning-gym/circuit_logic",
    ({"role": "user", "content": "?"},),
    "0",
    {"family": "circuit_logic", "options": "{}", "entry": json.dumps(ENTRY)},
)


def run_team(answer):
    """The scored trajectory of one rollout."""
    systems = {"gate": "Compute.", "judge": "Compute."}
    return run_recipe("logic_team", TASK, systems, lambda prompt: answer(prompt.splitlines()[-1]).encode())[0]


def right(gate: str) -> str:
    return f"{gate} = {recipe('true_bit')(gate)}"


@cache
def right_trajectory():
    return run_team(right)


def bit_score(response: str, gate: str = "1 nand 0", **more) -> float:
    step = Step("s", "t", 0, "gate", 0, (), "", response, info={"gate": gate})
    return recipe("bit_right")(step, right_trajectory(), **more)


def test_right_team_solves_the_circuit():
    trajectory = right_trajectory()
    assert [step.response for step in trajectory.steps] == ["1 nand 1 = 0", "1 and 0 = 0", "0 or 0 = 0"]
    assert trajectory.steps[2].parents == (0, 1)
    assert (trajectory.answer, trajectory.outcome.value) == ("0", 1.0)
    assert scores_of(trajectory) == [1.0, 1.0, 1.0]


def test_wrong_gate_loses_its_own_score_and_the_outcome():
    trajectory = run_team(lambda gate: "1 nand 1 = 1" if gate == "1 nand 1" else right(gate))
    assert scores_of(trajectory) == [0.0, 1.0, 1.0]
    assert (trajectory.answer, trajectory.outcome.value) == ("1", 0.0)


def test_unreadable_response_is_returned_once():
    trajectory = run_team(lambda gate: "hello")
    assert [step.agent for step in trajectory.steps] == ["gate", "gate"]
    assert "agent_error" in trajectory.info
    assert trajectory.outcome.value == 0.0


def test_true_bit_is_the_truth_table():
    table = {"and": "0001", "or": "0111", "xor": "0110", "nand": "1110", "nor": "1000"}
    for name, bits in table.items():
        assert "".join(recipe("true_bit")(f"{a} {name} {b}") for a in (0, 1) for b in (0, 1)) == bits


@pytest.mark.parametrize(
    "response",
    [
        "",
        "1 nand 0 = 0",
        "1 nand 0 = 1 = 0",
        "The result is 1 nand 0 = 1.",
        "1 nand 0 = \u0661",
        "1 nand 0 = " + "1" * 100_000,
        "0 nand 1 = 1",
        "\ud800",
    ],
)
def test_only_the_exact_equation_scores(response):
    assert bit_score("1 nand 0 = 1\n") == 1.0
    assert bit_score(response) == 0.0


@cache
def loaded() -> tuple[list[Task], list[Task]]:
    """The training and the validation tasks."""
    data = load_recipe("logic_team").config.data
    return load_tasks(data.train_files, Path(), {}, "train"), load_tasks(data.val_files, Path(), {}, "val")


def test_circuit_agrees_with_the_familys_answer():
    for task in loaded()[0]:
        (first, second), last = recipe("circuit_of")(task)
        bits = [recipe("true_bit")(gate) for gate in (first, second)]
        assert recipe("true_bit")(f"{bits[0]} {last} {bits[1]}") == gym_entry(task)["answer"]


def test_training_and_validation_problems_are_disjoint():
    train, val = loaded()
    assert (len(train), len(val)) == (200, 56)
    assert not {task.text for task in train} & {task.text for task in val}
    problems = [{task.extra_info["problem"] for task in tasks} for tasks in (train, val)]
    assert [len(each) for each in problems] == [200, 56]
    assert not problems[0] & problems[1]
