"""Ready topologies: the prompts of each agent, and their parents."""

import pytest

from creditflow.data import Trajectory
from creditflow.errors import ConfigError
from creditflow.rollout import AgentSpec, Scheduler, Workflow, topologies
from tests.builders import Replies, run_team

NAMES = ("ann", "bob", "carl", "judge", "lead", "planner", "executor", "verifier")


def run_workflow(workflow: Workflow, *rules: tuple[str, str]) -> Trajectory:
    """Run a workflow with a model that answers by the first rule whose text is in the prompt."""
    agents = {name: AgentSpec(system=f"I am {name}.") for name in NAMES}
    rules = (*rules, *((f"I am {name}.", f"{name} says") for name in NAMES))
    model = Replies(lambda prompt: next(answer for part, answer in rules if part in prompt))
    return run_team(workflow, agents, Scheduler({"default": model}), text="What is it?")[0]


def graph(trajectory: Trajectory) -> list[tuple[str, tuple[int, ...]]]:
    assert trajectory.status == "ok", trajectory.info
    for step in trajectory.steps:  # the prompt contains each parent's response
        assert all(trajectory.steps[parent].response in step.prompt for parent in step.parents)
    return [(step.agent, step.parents) for step in trajectory.steps]


def test_chain_passes_each_reply_to_the_next() -> None:
    trajectory = run_workflow(topologies.chain("ann", "bob", "carl"))
    assert graph(trajectory) == [("ann", ()), ("bob", (0,)), ("carl", (1,))]
    assert trajectory.answer == "carl says"
    assert trajectory.steps[1].prompt.endswith("What is it?\n\nann:\nann says")


def test_debate_judge_reads_the_last_round() -> None:
    trajectory = run_workflow(topologies.debate("ann", "bob", rounds=1, judge="judge"))
    assert graph(trajectory) == [("ann", ()), ("bob", ()), ("ann", (0, 1)), ("bob", (0, 1)), ("judge", (2, 3))]
    assert trajectory.answer_steps == (4,)


def test_debate_without_judge_answers_by_majority() -> None:
    trajectory = run_workflow(topologies.debate("ann", "bob", "carl", rounds=0), ("I am ann", "3"), ("I am", " 4"))
    assert (trajectory.answer, trajectory.answer_steps) == (" 4", (1, 2))
    tied = run_workflow(topologies.debate("ann", "bob", rounds=0), ("I am ann", "3"), ("I am", "4"))
    assert (tied.answer, tied.answer_steps) == ("3", (0,))


def test_plan_parts_are_retried_after_a_rejection() -> None:
    rules = (
        ("I am planner", "1. add\n2. halve"),
        ("No: yes would be 8", "8"),
        ("Now: add", "7"),
        ("Now: halve", "4"),
        ("Written:\n7", "No: yes would be 8"),
        ("I am verifier", "**Correct**: no doubt"),
    )
    trajectory = run_workflow(topologies.planner_executor_verifier(), *rules)
    assert graph(trajectory) == [
        ("planner", ()),
        ("executor", (0,)),
        ("verifier", (1,)),
        ("executor", (0, 1, 2)),
        ("verifier", (3,)),
        ("executor", (0, 3)),
        ("verifier", (5,)),
    ]
    assert (trajectory.answer, trajectory.answer_steps) == ("4", (5,))


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ("Well:\n- add\n* halve\n 3) round", ["add", "halve", "round"]),
        ("add\n\nhalve", ["add", "halve"]),
        (" ", ["What is it?"]),  # an empty plan: the task itself
    ],
)
def test_plan_without_verifier_tries_each_part_once(plan: str, parts: list[str]) -> None:
    trajectory = run_workflow(topologies.planner_executor_verifier(verifier=None), ("I am planner", plan))
    assert graph(trajectory) == [("planner", ()), *(("executor", (0, k)[: k + 1]) for k in range(len(parts)))]
    for step, part in zip(trajectory.steps[1:], parts, strict=True):
        assert step.prompt.endswith(f"\n\nNow: {part}")


@pytest.mark.parametrize(
    ("make", "arguments", "options", "message"),
    [
        (topologies.chain, (), {}, "chain.*: Missing required"),
        (topologies.chain, (["ann", "bob"],), {}, r"chain.0: .* valid string, got \['ann', 'bob'\]"),
        (topologies.chain, ("ann", ""), {}, "chain.1: String should have at least 1 character, got ''"),
        (topologies.debate, ("ann",), {"rounds": 1.5}, "debate.rounds: .* valid integer, got 1.5"),
        (topologies.debate, ("ann",), {"rounds": -1}, "debate.rounds: .* greater than or equal to 0, got -1"),
        (topologies.debate, ("ann",), {"judge": 5}, "debate.judge: .* valid string, got 5"),
        (topologies.debate, ("ann",), {"key": 5}, "debate.key: .* callable, got 5"),
        (topologies.planner_executor_verifier, (), {"tries": True}, "verifier.tries: .* valid integer, got True"),
        (topologies.dialogue, ("ann", "bob"), {"turns": 0}, "dialogue.turns: .* or equal to 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused_when_the_team_is_made(make, arguments, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make(*arguments, **options)


def test_functions_with_compatible_signatures_are_accepted() -> None:
    assert run_workflow(topologies.debate("ann", "bob", rounds=0, key=int), ("I am", "4")).answer == "4"
    assert run_workflow(topologies.chain("ann", prompt=lambda *told: told[1])).steps[0].prompt == "I am ann.\nann"


def test_prompt_is_a_text_or_messages() -> None:
    made = run_workflow(
        topologies.chain("ann", prompt=lambda task, agent, read: [{"role": "user", "content": "hello"}])
    )
    assert made.steps[0].prompt == "I am ann.\nhello"
    with pytest.raises(ConfigError, match="prompt: expected a function that returns a text or messages, got None"):
        run_workflow(topologies.chain("ann", prompt=lambda task, agent, read: None))


def test_dialogue_agents_read_it_from_their_sides() -> None:
    made = run_workflow(topologies.dialogue("ann", "bob", turns=2))
    assert graph(made) == [("bob", ()), ("ann", (0,)), ("bob", (0, 1)), ("ann", (0, 1, 2))]
    assert (made.answer, made.answer_steps) == ("ann says", (3,))
    goal = "You are a user. Ask for this, and answer what you are asked: What is it?"
    assert made.steps[0].prompt == f"I am bob.\n{goal}"
    assert made.steps[1].prompt == "I am ann.\nbob says"  # the agent reads only the user's replies
    assert made.steps[2].prompt == f"I am bob.\n{goal}\nbob says\nann says"


def test_dialogue_ends_at_the_until_text() -> None:
    made = run_workflow(topologies.dialogue("ann", "bob", until="THANKS"), ("ann says", "THANKS"))
    assert [step.agent for step in made.steps] == ["bob", "ann", "bob"]
    assert (made.answer, made.answer_steps) == ("ann says", (1,))


def test_dialogue_roles_depend_on_the_reader() -> None:
    class Roles(Replies):
        def encode(self, messages, tools=()):
            text = "|".join(message["role"] for message in messages)
            return text, tuple(map(ord, text))

    agents = {"ann": AgentSpec(), "bob": AgentSpec()}
    scheduler = Scheduler({"default": Roles(lambda prompt: "nothing")})
    (trajectory,) = run_team(topologies.dialogue("ann", "bob", turns=2), agents, scheduler)
    assert [step.prompt for step in trajectory.steps] == ["user", "user", "user|assistant|user", "user|assistant|user"]
