"""Tests of the booking recipe: scores of right, wrong and absurd dialogues of desk and customer."""

import random

import pytest

from creditflow.config import load_recipe
from creditflow.rollout import AgentSpec
from tests.builders import Scripted
from tests.paths import RECIPES
from tests.recipes.team import functions_of, loader, scored_rollout

RECIPE = load_recipe(RECIPES / "booking.yaml")
of_recipe = loader("booking")

TASK = of_recipe("make_task")(random.Random(0), 0, "test")
TRIP = dict(zip(TASK.ground_truth.split()[::2], TASK.ground_truth.split()[1::2], strict=True))


def wishes(prompt):
    """The message of a customer that wants the trip and answers the last question."""
    asked = prompt.splitlines()[1:]
    return "hello" if not asked else "thanks" if asked[-1].startswith("book") else TRIP.get(asked[-1], "unknown")


def run_workflow(desk, customer=wishes):
    """The scored trajectory of a scripted desk and customer; each maps its prompt, one message per line, to a reply."""
    agents = {name: AgentSpec(policy=agent.policy) for name, agent in RECIPE.config.team.agents.items()}
    models = {"desk": Scripted(lambda prompt: desk(prompt).encode())}
    models["people"] = Scripted(lambda prompt: customer(prompt).encode())
    return scored_rollout(of_recipe("solve"), TASK, agents, models, functions_of("booking"))


def asks(*questions):
    """A desk that asks these questions, then books with the customer's answers."""

    def say(prompt):
        _, *said = prompt.splitlines()
        if len(said) < 2 * len(questions):
            return questions[len(said) // 2]
        told = dict(zip(said[::2], said[1::2], strict=True))
        return "book " + " ".join(f"{part} {told.get(part, 'unknown')}" for part in TRIP)

    return say


def scores(trajectory, name):
    return [step.scores[name].value for step in trajectory.steps if name in step.scores]


def test_desk_that_asks_everything_books_the_trip():
    trajectory = run_workflow(asks(*TRIP))

    assert trajectory.outcome.value == 1.0
    assert trajectory.answer == f"book {TASK.ground_truth}"
    assert [step.agent for step in trajectory.steps] == ["customer", "desk"] * 11 + ["customer"]
    assert trajectory.steps[-1].response == "thanks"
    assert scores(trajectory, "asked_or_booked") == [1.0] * 11
    assert scores(trajectory, "truthful") == [1.0] * 12
    # Only the customer reads the goal.
    assert [step.parents for step in trajectory.steps] == [tuple(range(k)) for k in range(23)]
    assert all(TASK.ground_truth not in step.prompt for step in trajectory.steps if step.agent == "desk")
    assert all(step.prompt.startswith(TASK.ground_truth) for step in trajectory.steps if step.agent == "customer")
    assert trajectory.answer_steps == (21,)


@pytest.mark.parametrize(("known", "right"), [(9, 0.8), (8, 0.6), (0, 0.0)])
def test_early_booking_scores_lower(known, right):
    trajectory = run_workflow(asks(*list(TRIP)[:known]))

    assert scores(trajectory, "asked_or_booked") == [1.0] * known + [pytest.approx(right)]
    assert trajectory.outcome.value == 0.0


def test_dialogue_without_a_booking_ends():
    trajectory = run_workflow(lambda prompt: "day")

    assert len(trajectory.steps) == 40
    assert scores(trajectory, "asked_or_booked") == [1.0] + [0.0] * 19
    assert trajectory.outcome.value == 0.0


@pytest.mark.parametrize("said", ["", "book day", "book " + "day friday " * 10, "🙂"])
def test_other_messages_of_the_desk_score_zero(said):
    trajectory = run_workflow(lambda prompt: said)

    assert set(scores(trajectory, "asked_or_booked")) == {0.0}
    assert (trajectory.status, trajectory.outcome.value) == ("ok", 0.0)


def test_untruthful_customer_is_reported_without_credit():
    def fickle(prompt):
        return "sunday" if prompt.splitlines()[-1] == "day" else wishes(prompt)

    trajectory = run_workflow(asks(*TRIP), fickle)

    assert scores(trajectory, "truthful").count(0.0) == 1
    (weight,) = [one.weight for one in RECIPE.config.reward.functions if one.fn.endswith("truthful")]
    assert weight == 0
    assert scores(trajectory, "asked_or_booked")[-1] == pytest.approx(0.8)  # the desk booked the untrue answer
    assert trajectory.outcome.value == 0.0


def test_repeated_booking_scores_zero():
    def deaf(prompt):
        return "and then?" if prompt.splitlines()[-1].startswith("book") else wishes(prompt)

    trajectory = run_workflow(asks(*TRIP), deaf)

    assert scores(trajectory, "asked_or_booked") == [1.0] * 11 + [0.0] * 9


def test_warm_up_messages_match_the_dialogue():
    heard = {"desk": [], "customer": []}

    class Hears(Scripted):
        def __init__(self, agent, say):
            super().__init__(lambda prompt: say(prompt).encode())
            self.agent = agent

        def encode(self, messages):
            heard[self.agent].append(list(messages))
            return super().encode(messages)

    agents = {"desk": AgentSpec(policy="desk"), "customer": AgentSpec(policy="people")}
    models = {"desk": Hears("desk", asks("day", "hour", "seat")), "people": Hears("customer", wishes)}
    scored_rollout(of_recipe("solve"), TASK, agents, models, ())

    said, questions = of_recipe("_said"), ["day", "hour", "seat"]
    briefed = {"role": "user", "content": TASK.ground_truth}
    assert heard["desk"] == [said(TRIP, questions[:k], "assistant") for k in range(4)]
    asked = [[*said(TRIP, questions[:k], "user"), {"role": "user", "content": questions[k]}] for k in range(3)]
    assert heard["customer"][:4] == [[briefed], *([briefed, *one] for one in asked)]
