"""Calls of one rollout: their random numbers, their parents, and prompts without room."""

import asyncio
import threading

import openai
import pytest

from creditflow.rollout import AgentSpec, FrozenModel
from creditflow.rollout.recorder import Sampling
from tests.rewards.processes import HANG_S
from tests.rollout.http.test_server import Answers, Frozen, answered, chat, once, run_workflow, user

PROMPTS = ("Tell me about rain.", "Sum: 4+5", "zzzz")


def test_shared_seed_gives_each_prompt_separate_random_numbers():
    async def ask(client):
        for text in PROMPTS:
            for agent in ("writer", "editor"):
                await chat(client, agent, user(text), seed=42)
        await chat(client, messages=user(PROMPTS[0]), seed=42)

    model = Answers()
    once(ask, model=model, agents={"writer": AgentSpec(), "editor": AgentSpec()})
    keys = [request.seed for request in model.requests]
    assert len(set(keys)) == 6
    assert keys[-1] == keys[0]


def test_very_long_prompt_does_not_block_the_event_loop():
    others_turn = threading.Event()

    class Slow(Answers):
        def encode(self, prompt, tools=()):
            if "x" * 1000 in str(prompt):
                assert others_turn.wait(HANG_S), "nothing ran while it was read"
            return super().encode(prompt, tools)

    async def ask(client):
        async def short():
            await chat(client, "editor", user("short"))
            others_turn.set()

        long = chat(client, messages=user("x" * 1_000_000))
        refused, _ = await asyncio.gather(long, short(), return_exceptions=True)
        assert isinstance(refused, openai.BadRequestError)
        assert "has 1000011 tokens, at most 999 fit" in str(refused)

    assert [step.agent for step in once(ask, model=Slow()).steps] == ["editor"]


def test_fitting_prompts_are_encoded_in_call_order():
    here = threading.get_ident()

    class Watched(Answers):
        max_positions = 100_000

        def encode(self, prompt, tools=()):
            assert threading.get_ident() == here
            return super().encode(prompt, tools)

    async def solve(task, team):
        await asyncio.gather(*(team.writer("x" * length) for length in (90_000, 10, 64_000)))

    (made,) = run_workflow(solve, Watched(), sampling=Sampling(max_prompt_tokens=90_100))
    assert [len(step.prompt_ids) for step in made.steps] == [90_011, 21, 64_011]


PARTS = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
ADDED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK = [
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": None, "tool_calls": [ADDED]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
]


def test_frozen_prompt_spells_out_its_messages():
    _, trajectory = answered(Frozen(), {"writer": AgentSpec()}, messages=TALK)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert trajectory.steps[0].prompt == f"[user]\nhi there\n\n[assistant]\n{call}\n\n[tool]\n3"


def test_malformed_tool_call_is_refused_before_a_frozen_call():
    with pytest.raises(openai.BadRequestError, match="tool_calls: expected a list"):
        answered(FrozenModel(None), messages=[{"role": "assistant", "content": "x", "tool_calls": 5}])


def told(text: str) -> dict:
    return {"role": "assistant", "content": text}


def short_answer(prompt: str) -> str:
    return "B" if prompt.endswith("A or B?") else "because so"


def test_own_answer_in_history_is_a_parent():
    question, why = user("A or B?"), user("Why?")
    history = [*question, told("B"), *why]

    async def ask(client):
        await chat(client, messages=question)
        await chat(client, "editor", question)
        await chat(client, "editor", user("something else altogether"))
        await chat(client, messages=history)
        await chat(client, "editor", history)

    trajectory = once(ask, model=Answers(short_answer))
    assert [step.parents for step in trajectory.steps] == [(), (0,), (1,), (0,), (1,)]


def test_example_in_every_prompt_is_not_a_parent():
    example = [*user("A or C?"), told("B"), *user("A or B?")]

    async def ask(client):
        for _ in range(3):
            await chat(client, messages=example)
        await chat(client, "editor", user("something else"))
        await chat(client, messages=[*example, told("B"), *user("Why?")])

    made = once(ask, model=Answers(short_answer))
    assert [step.parents for step in made.steps] == [(), (0,), (1,), (2,), (2,)]
