"""Tests of the recipe tool_chain: its tools, and rollouts of teams with right, wrong or absurd responses."""

import random

import pytest

from creditflow.config import load_recipe
from tests.recipes.team import loader, run_recipe

SYSTEMS = {name: agent.system for name, agent in load_recipe("tool_chain").config.team.agents.items()}
of_recipe = loader("tool_chain")


def a_task(facts=3, operations=6, seed=0):
    return of_recipe("make_task")(random.Random(seed), facts, operations, 0, "test")


def run_workflow(answer, task):
    """The scored trajectory of agents that respond with `answer(agent, prompt)`."""
    names = {system: name for name, system in SYSTEMS.items()}

    def say(prompt):
        system, _, asked = prompt.partition("\n")
        return answer(names[system], asked).encode()

    return run_recipe("tool_chain", task, SYSTEMS, say)[0]


def right(agent, prompt):
    if agent == "calculator":
        a, b, verb, c, d = prompt.split()
        sign = next(sign for sign, verbs in of_recipe("VERBS").items() if verb in verbs)
        return f"calc {a} {b} {sign} {c} {d}"
    return f"{ {'searcher': 'search', 'reader': 'get', 'clerk': 'put'}[agent] } {prompt}"


@pytest.mark.parametrize(("facts", "operations", "steps"), [(3, 6, 30), (2, 24, 100), (1, 1, 6)])
@pytest.mark.parametrize("seed", range(3))
def test_right_steps_lead_to_a_right_outcome(facts, operations, steps, seed):
    trajectory = run_workflow(right, a_task(facts, operations, seed))

    assert len(trajectory.steps) == steps
    assert trajectory.outcome.value == 1.0
    assert [step.scores["call_right"].value for step in trajectory.steps] == [1.0] * steps


def test_parents_are_the_steps_that_wrote_the_values_read():
    trajectory = run_workflow(right, a_task())
    writers = {}
    for step in trajectory.steps:
        if step.agent == "reader":
            assert step.parents == (writers[step.prompt.split()[-1]],)
        elif step.agent == "calculator":
            assert step.parents == (step.index - 2, step.index - 1)
        elif step.agent == "clerk":
            assert step.parents == (step.index - 1,)
            writers[step.response.split()[1]] = step.index
        else:
            assert step.parents == ()


def test_wrong_call_lowers_its_own_score_and_the_outcome():
    slips = iter([True])

    def once(agent, prompt):
        return "calc 0 0 + 0 1" if agent == "calculator" and next(slips, False) else right(agent, prompt)

    trajectory = run_workflow(once, a_task())

    wrong = [step.index for step in trajectory.steps if step.scores["call_right"].value < 1]
    assert wrong == [next(step.index for step in trajectory.steps if step.agent == "calculator")]
    assert trajectory.outcome.value == 0.0


@pytest.mark.parametrize("said", ["", "calc", "put", "put zz 1 2", "search void", "🙂 " * 30])
def test_invalid_call_returns_zero_and_the_rollout_continues(said):
    trajectory = run_workflow(lambda agent, prompt: said, a_task())

    assert (len(trajectory.steps), trajectory.status) == (30, "ok")
    assert trajectory.answer == "0 0"


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("search price ruby", "3 4"),
        ("search the", "0 0"),
        ("put a 1 2", "1 2"),
        ("get a", "0 0"),
        ("calc 9 9 + 0 3", "0 2"),
        ("calc 0 1 - 0 3", "9 8"),
        ("calc 1 2 * 1 2", "4 4"),
        ("calc 1 2 + x 2", "0 0"),
    ],
)
def test_tool_returns_its_result(call, result):
    tools = of_recipe("Tools")(["the price pearl is 1 1", "the price ruby is 3 4", "the weight ruby is 5 6"])

    assert tools.call(call) == result


def test_get_returns_the_last_value_put():
    tools = of_recipe("Tools")([])
    tools.call("put a 1 2")
    tools.call("put a 3 4")

    assert tools.call("get a") == "3 4"
