"""Branches of a recorded trajectory: an exact prefix, new later steps, refusal of a changed environment."""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Step, Task, Trajectory
from creditflow.rollout import AgentSpec, ChatClient, ChatReply, Rollout, Scheduler, Team, Workflow, run_rollout
from creditflow.rollout.branching import REFUSED, in_order_of_calls, run_branch
from creditflow.rollout.client import Generation
from creditflow.rollout.recorder import Sampling
from creditflow.rollout.tools import Tool
from tests.builders import Letters, examples, make_trajectory, step

TASK = Task("test", ({"role": "user", "content": "7"},), None)
COMPARED = ("agent", "turn", "parents", "prompt", "prompt_ids", "response", "response_ids", "response_mask", "logprobs")


class Sampled(Letters):
    """A model whose responses depend on the prompt and the call's random key; one in three calls a tool."""

    version, max_positions = 0, 100_000

    def encode(self, messages, tools=()):
        return super().encode(messages)

    def generate(self, requests):
        made = []
        for request in requests:
            key = repr((request.prompt_ids, request.seed)).encode()
            drawn = hashlib.sha256(key).hexdigest()
            text = f"{drawn[:4]}"
            if request.prompt_ids.count(ord("[")) < 2 and b"toolsmith" in bytes(request.prompt_ids) and drawn[4] < "6":
                text = f"<tool_call>{json.dumps({'name': 'count', 'arguments': {'text': drawn[:3]}})}</tool_call>"
            ids = tuple(text.encode())
            made.append(Generation(ids, (-0.5 - len(ids) / 100,) * len(ids), "stop"))
        return made


def count(text: str) -> str:
    """Count the characters of a text."""
    return str(len(text))


AGENTS = {
    "a": AgentSpec("a"),
    "b": AgentSpec("b"),
    "toolsmith": AgentSpec("toolsmith", tools=(Tool.from_function(count),)),
}

Plan = Any
"""A random workflow: `("call", agent)`, `("all" or "chain", parts)`, `("retry", part)` or `("try", part)`."""
plans: st.SearchStrategy[Plan] = st.recursive(
    st.sampled_from(sorted(AGENTS)).map(lambda agent: ("call", agent)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(("all", "chain")), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("retry"), inner),
        st.tuples(st.just("try"), inner),
    ),
    max_leaves=7,
)


def workflow_of(plan: Plan) -> Workflow:
    """The workflow that carries out a plan; later prompts contain earlier responses."""

    async def run(plan: Plan, text: str, team: Team) -> str:
        match plan:
            case ("call", agent):
                return await team[agent](f"{agent}: {text}")
            case ("all", parts):
                return " ".join(await asyncio.gather(*(run(part, f"{text}.{i}", team) for i, part in enumerate(parts))))
            case ("chain", parts):
                for part in parts:
                    text = await run(part, text[-30:], team)
                return text
            case ("retry", part):
                for attempt in range(3):
                    text = await run(part, f"{text[-30:]} {attempt}", team)
                    if text[-1] > "7":
                        break
                return text
            case ("try", part):
                try:
                    text = await run(part, text, team)
                    if text[-1] > "a":
                        raise ValueError(text)
                except ValueError as error:
                    return f"failed {error}"
                return text
        raise AssertionError(plan)

    async def solve(task: Task, team: Team) -> str:
        return await run(plan, task.text, team)

    return solve


def recorded(workflow: Workflow, agents: Mapping[str, AgentSpec] = AGENTS, client: Any = None) -> Trajectory:
    scheduler = Scheduler({"default": client or Sampled()})
    return asyncio.run(run_rollout(Rollout(TASK, "u", "t", (1,)), workflow, agents, scheduler, Sampling()))


def branch(
    before: Trajectory,
    at: int,
    workflow: Workflow,
    seed: int = 2,
    agents: Mapping[str, AgentSpec] = AGENTS,
    client: Any = None,
    **limits: Any,
) -> Trajectory:
    rollout = Rollout(TASK, "u", f"t~{at}", (seed,))
    scheduler = Scheduler({"default": client or Sampled()})
    return asyncio.run(run_branch(before, at, rollout, workflow, agents, scheduler, Sampling(**limits)))


def compared(step: Step) -> list[object]:
    return [*(getattr(step, name) for name in COMPARED), step.info]


# ---- random workflows ------------------------------------------------------------------------------------------------


@examples(1000)
@given(plans, st.randoms(use_true_random=False))
def test_prefix_equals_the_record_in_random_workflows(plan: Plan, drawn: random.Random) -> None:
    workflow = workflow_of(plan)
    before = recorded(workflow)
    at = drawn.randint(0, len(before.steps))
    after = branch(before, at, workflow)
    assert REFUSED not in after.info, after.info["error"]
    assert [compared(step) for step in after.steps[:at]] == [compared(step) for step in before.steps[:at]]
    if at == len(before.steps):
        assert after.answer == before.answer
        assert len(after.steps) == at
    else:
        assert (after.steps[at].agent, after.steps[at].prompt) == (before.steps[at].agent, before.steps[at].prompt)
        again = branch(before, at, workflow)
        assert [compared(step) for step in again.steps] == [compared(step) for step in after.steps]


# ---- single cases ----------------------------------------------------------------------------------------------------


async def chain(task: Task, team: Team) -> str:
    text = task.text
    for agent in ("a", "b", "toolsmith", "a"):
        text = await team[agent](text)
    return text


def test_equal_parallel_calls_keep_their_places():
    """The first call of three ends last, and is therefore the last step."""

    class FirstIsSlow(ChatClient):
        calls = 0

        async def chat(self, messages, *, max_tokens, temperature, seed):
            self.calls += 1
            for _ in range(50 if self.calls == 1 else 5):
                await asyncio.sleep(0)
            return ChatReply(f"reply {seed}", "stop")

    async def solve(task: Task, team: Team) -> str:
        replies = await asyncio.gather(team.a("same"), team.a("same"), team.a("same"))
        return " | ".join([*replies, await team.b("last")])

    agents = {"a": AgentSpec("a"), "b": AgentSpec("b")}
    before = recorded(solve, agents, FirstIsSlow())
    assert [step.info.get("call_number") for step in before.steps] == [2, 3, 1, None]
    for at in range(5):
        after = branch(before, at, solve, agents=agents, client=FirstIsSlow())
        assert REFUSED not in after.info
        same = [one == other for one, other in zip(before.answer.split(" | "), after.answer.split(" | "), strict=True)]
        assert same == [at > 2, at > 0, at > 1, at > 3]


def test_branch_outside_the_record_is_an_error():
    before = recorded(chain)
    with pytest.raises(ValueError, match="expected to branch at 0 to 4, got 5"):
        branch(before, 5, chain)


# ---- refusals --------------------------------------------------------------------------------------------------------


def in_world(world: SimpleNamespace, do: Callable[[Team, SimpleNamespace], Any]) -> Workflow:
    async def solve(task: Task, team: Team) -> str:
        return await do(team, world)

    return solve


async def reads_the_world(team: Team, world: SimpleNamespace) -> str:
    first = await team.a("start")
    return await team.b(f"{first} {world.fact}")


async def ends_early(team: Team, world: SimpleNamespace) -> str:
    first = await team.a("start")
    return await team.b(first) if world.fact == "old" else first


async def hides_the_error(team: Team, world: SimpleNamespace) -> str:
    await team.a("start")
    try:
        return await team.b(str(world.fact))
    except Exception:  # as a careless workflow
        return "nothing"


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (reads_the_world, "at step t/1: b was called with another prompt"),
        (ends_early, "at step t/1: the workflow ended before it"),
        (hides_the_error, "at step t/1: b was called with another prompt"),
    ],
)
def test_changed_environment_is_refused_by_name(do: Callable[..., Any], message: str):
    world = SimpleNamespace(fact="old")
    before = recorded(in_world(world, do))
    world.fact = "new"
    after = branch(before, 2, in_world(world, do))
    assert (after.status, after.info[REFUSED]) == ("failed", "t/1")
    assert message in after.info["error"]
    assert branch(before, 1, in_world(world, do)).info[REFUSED] == "t/1"  # the context of the new step
    assert REFUSED not in branch(before, 0, in_world(world, do)).info


def test_call_numbers_of_another_system_change_no_order():
    steps = make_trajectory("t", [step("a", info={"call_number": value}) for value in ("2", None, {})]).steps
    assert in_order_of_calls(steps) == list(steps)


def test_refusal_ends_a_workflow_that_retries_without_limit():
    world = SimpleNamespace(fact="old", attempts=0)

    async def retries(team: Team, world: SimpleNamespace) -> str:
        await team.a("start")
        for _ in range(100_000):
            world.attempts += 1
            try:
                return await team.b(str(world.fact))
            except Exception:  # as a careless workflow
                continue
        return "nothing"

    before = recorded(in_world(world, retries))
    world.fact, world.attempts = "new", 0
    after = branch(before, 2, in_world(world, retries))
    assert after.info[REFUSED] == "t/1"
    assert "b was called with another prompt" in after.info["error"]
    assert world.attempts < 1000


def test_changed_result_of_a_tool_is_refused():
    world = SimpleNamespace(fact="1")

    def look() -> str:
        """Look at the world."""
        return world.fact

    class Looks(Sampled):
        def generate(self, requests):
            asked = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
            texts = ["done" if b"[" in bytes(request.prompt_ids) else asked for request in requests]
            return [Generation(tuple(text.encode()), (-1.0,) * len(text), "stop") for text in texts]

    agents = {"a": AgentSpec("a", tools=(Tool.from_function(look),))}

    async def solve(task: Task, team: Team) -> str:
        return await team.a("go")

    before = recorded(solve, agents, Looks())
    assert before.steps[0].response.endswith("[1]done")
    assert branch(before, 1, solve, agents=agents, client=Looks()).steps[0].response == before.steps[0].response
    world.fact = "2"
    after = branch(before, 1, solve, agents=agents, client=Looks())
    assert after.info[REFUSED] == "t/0"


def test_wait_for_a_later_step_is_refused_after_the_limit():
    world = SimpleNamespace(fact="old")

    async def do(team: Team, world: SimpleNamespace) -> str:
        if world.fact == "old":
            await team.a("first")
        return await team.b("second")

    before = recorded(in_world(world, do))
    world.fact = "new"
    after = branch(before, 1, in_world(world, do), timeout_s=0.2)
    assert after.info[REFUSED] == "t/0"
    assert "a was not called for 0.2 s" in after.info["error"]
