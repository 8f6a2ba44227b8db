"""Replays of a recorded trajectory: recorded responses and new ones."""

import asyncio
from collections.abc import Mapping

import pytest

from creditflow.data import Task, Trajectory
from creditflow.rollout import (
    Agent,
    AgentSpec,
    ChatClient,
    ChatReply,
    Rollout,
    Scheduler,
    Team,
    Workflow,
    replay_rollout,
    run_rollout,
)
from creditflow.rollout.recorder import Sampling
from tests.builders import Scripted

TASK = Task("test", ({"role": "user", "content": "7"},), None)
AGENTS = {"plan": AgentSpec("plan"), "do": AgentSpec("do"), "check": AgentSpec("check")}
BASELINES = {"default": "baseline"}


async def chain(task: Task, team: Team) -> str:
    planned = await team.plan(task.text)
    done = await team.do(planned)
    checked = await team.check(done)
    return await team.do(checked) if checked == "again" else done


def model(plan: str, do: str, check: str = "fine") -> Scripted:
    said = {"plan": plan, "do": do, "check": check}
    return Scripted(lambda prompt: said[prompt.split("\n")[0]].encode())


def recorded(clients: Mapping, workflow: Workflow = chain, agents: Mapping[str, AgentSpec] = AGENTS) -> Trajectory:
    return asyncio.run(run_rollout(Rollout(TASK, "u", "t", (1,)), workflow, agents, Scheduler(clients), Sampling()))


def again(
    before: Trajectory, replaced: set[str], clients: Mapping, agents: Mapping[str, AgentSpec] = AGENTS
) -> Trajectory:
    rollout = Rollout(TASK, "u", "t~0", (2,))
    return asyncio.run(
        replay_rollout(before, rollout, replaced, BASELINES, chain, agents, Scheduler(clients), Sampling())
    )


def said(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(step.agent, step.response) for step in trajectory.steps]


def test_replay_without_replacement_equals_the_record():
    before = recorded({"default": model("a", "b")})
    now, other = model("other", "other"), model("base", "base")
    after = again(before, set(), {"default": now, "baseline": other})
    assert said(after) == said(before) == [("plan", "a"), ("do", "b"), ("check", "fine")]
    assert after.answer == "b"
    assert [step.policy for step in after.steps] == ["default"] * 3
    assert now.prompts == other.prompts == []


def test_replay_samples_only_steps_that_depend_on_the_change():
    before = recorded({"default": model("a", "b", "again")})
    now, other = model("new", "new", "fine"), model("base", "base", "base")
    after = again(before, {"do"}, {"default": now, "baseline": other})
    assert said(after) == [("plan", "a"), ("do", "base"), ("check", "fine")]
    assert other.prompts == ["do\na"]
    assert now.prompts == ["check\nbase"]  # a new prompt for this agent
    assert [step.policy for step in after.steps] == ["default", "baseline", "default"]


def test_replay_equals_the_record_after_the_same_response():
    before = recorded({"default": model("a", "b", "again")})
    now = model("new", "new", "new")
    after = again(before, {"plan"}, {"default": now, "baseline": model("a", "base")})
    assert said(after) == said(before)
    assert now.prompts == []


def test_repeated_prompt_replays_responses_in_order_then_samples():
    async def thrice(task: Task, team: Team) -> str:
        return "".join([await team.do("x") for _ in range(3)])

    count = iter("12")
    before = recorded({"default": Scripted(lambda prompt: next(count, "3").encode())}, thrice)
    before.steps.pop()  # a shorter record
    rollout = Rollout(TASK, "u", "t~0", (2,))
    clients = {"default": model("", "new"), "baseline": model("", "")}
    after = asyncio.run(
        replay_rollout(before, rollout, set(), BASELINES, thrice, AGENTS, Scheduler(clients), Sampling())
    )
    assert after.answer == "12new"


def test_agents_of_one_policy_keep_separate_responses():
    same = {name: AgentSpec("") for name in AGENTS}

    async def both(task: Task, team: Team) -> str:
        return await team.plan("x") + await team.do("x")

    count = iter("12")
    before = recorded({"default": Scripted(lambda prompt: next(count).encode())}, both, same)
    rollout = Rollout(TASK, "u", "t~0", (2,))
    clients = {"default": Scripted(lambda prompt: b"new"), "baseline": Scripted(lambda prompt: b"base")}
    after = asyncio.run(
        replay_rollout(before, rollout, {"plan"}, BASELINES, both, same, Scheduler(clients), Sampling())
    )
    assert after.answer == "base2"


def test_endpoint_is_called_only_for_unrecorded_prompts():
    class Chat(ChatClient):
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def chat(self, messages, *, max_tokens, temperature, seed):
            self.asked.append(messages[-1]["content"])
            return ChatReply(f"to {messages[-1]['content']}", "stop")

    agents = {**AGENTS, "do": AgentSpec("do", "remote")}
    chat = Chat()
    before = recorded({"default": model("a", ""), "remote": chat}, chain, agents)
    clients = {"default": model("new", ""), "baseline": model("c", ""), "remote": chat}
    assert said(again(before, set(), clients, agents)) == said(before)
    assert chat.asked == ["a"]
    after = again(before, {"plan"}, clients, agents)
    assert said(after)[:2] == [("plan", "c"), ("do", "to c")]
    assert chat.asked == ["a", "c"]


@pytest.mark.parametrize("replaced", [set(), {"check"}])
def test_parallel_branches_keep_their_recorded_order(replaced: set[str]) -> None:
    async def branches(task: Task, team: Team) -> str:
        async def branch(agent: Agent, name: str) -> list[str]:
            said = [await agent(f"{name}{turn}") for turn in range(3)]
            return [f"{reply.step.parents}" for reply in said]

        found = await asyncio.gather(branch(team.plan, "a"), branch(team.do, "b"), branch(team.check, "c"))
        return str(found)

    answers = Scripted(lambda prompt: prompt.split("\n")[1].encode())
    before = recorded({"default": answers}, branches)
    assert [step.agent for step in before.steps] == ["plan", "do", "check"] * 3  # the branches alternate
    rollout = Rollout(TASK, "u", "t~0", (2,))
    clients = {"default": answers, "baseline": answers}
    after = asyncio.run(
        replay_rollout(before, rollout, replaced, BASELINES, branches, AGENTS, Scheduler(clients), Sampling())
    )
    kept = [step.response for step in after.steps if step.agent not in replaced]
    assert kept == [step.response for step in before.steps if step.agent not in replaced]
    if not replaced:
        assert after.answer == before.answer


def test_replay_does_not_wait_for_unused_responses() -> None:
    async def two(task: Task, team: Team) -> str:
        return await team.do("first") + await team.do("second")

    async def second_alone(task: Task, team: Team) -> str:
        return await team.do("second")

    before = recorded({"default": Scripted(lambda prompt: prompt.encode()[-1:])}, two)
    rollout = Rollout(TASK, "u", "t~0", (2,))
    clients = {"default": Scripted(lambda prompt: b"new"), "baseline": Scripted(lambda prompt: b"base")}
    replaying = replay_rollout(before, rollout, set(), BASELINES, second_alone, AGENTS, Scheduler(clients), Sampling())
    assert asyncio.run(asyncio.wait_for(replaying, 20)).answer == "d"


def test_replay_goes_on_after_a_cancelled_call() -> None:
    async def both(task: Task, team: Team) -> str:
        return "".join(await asyncio.gather(team.plan("x"), team.do("y")))

    async def second_alone(task: Task, team: Team) -> str:
        first, second = asyncio.ensure_future(team.plan("x")), asyncio.ensure_future(team.do("y"))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    before = recorded({"default": model("a", "b")}, both)
    rollout = Rollout(TASK, "u", "t~0", (2,))
    clients = {"default": model("new", "new"), "baseline": model("base", "base")}
    replaying = replay_rollout(before, rollout, set(), BASELINES, second_alone, AGENTS, Scheduler(clients), Sampling())
    assert asyncio.run(asyncio.wait_for(replaying, 20)).answer == "b"
