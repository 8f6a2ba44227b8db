"""Equal requests of all dialects make equal steps: the same code records them, and trains on the sampled tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.rollout import AgentSpec
from creditflow.rollout.http.dialects import DIALECTS
from creditflow.rollout.http.requests import parsed
from tests.rollout.http.dialects.clients import (
    CHAT_TOOL,
    MESSAGE_TOOL,
    RESPONSE_TOOL,
    anthropic_messages,
    anthropic_of,
    chat_messages,
    response_items,
)
from tests.rollout.http.test_server import CALL, HELLO, Templated, client_of, once

SYSTEM = "You add."
TURNS = [
    ("user", "What is 1 + 2?"),
    ("assistant", "Let me see.", [("c1", "add", {"a": 1, "b": "é"}), ("c2", "add", {})]),
    ("tool", "c1", "3"),
    ("tool", "c2", "0"),
    ("assistant", "It is 3."),
    ("user", "And 3 + 4?"),
]


async def parts_of(answer, stream) -> list:
    return [part async for part in answer] if stream else [answer]


async def chat(client, stream):
    fields = {"messages": chat_messages(SYSTEM, TURNS), "tools": [CHAT_TOOL], "max_tokens": 24, "stop": ["zz"]}
    return await parts_of(await client.chat.completions.create(model="writer", stream=stream, **fields), stream)


async def response(client, stream):
    fields = {"instructions": SYSTEM, "input": response_items(TURNS), "tools": [RESPONSE_TOOL]}
    fields |= {"max_output_tokens": 24, "extra_body": {"stop": ["zz"]}}
    return await parts_of(await client.responses.create(model="writer", stream=stream, **fields), stream)


async def message(client, stream):
    fields = {"system": SYSTEM, "messages": anthropic_messages(TURNS), "tools": [MESSAGE_TOOL]}
    fields |= {"max_tokens": 24, "stop_sequences": ["zz"]}
    return await parts_of(await client.messages.create(model="writer", stream=stream, **fields), stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("ask", "clients"), [(response, client_of), (message, anthropic_of)])
def test_step_has_the_same_tokens_in_every_dialect(ask, clients, stream):
    policy = Policy.load(tiny_byte_model(), pick_device("cpu"))
    here, there = (
        once(lambda client, ask=ask: ask(client, stream), of, model=policy, agents={"writer": AgentSpec("Unused.")})
        for ask, of in ((chat, client_of), (ask, clients))
    )
    (one,), (other,) = here.steps, there.steps
    assert one == other
    assert (one.prompt_ids, one.response_ids, one.logprobs) == (other.prompt_ids, other.response_ids, other.logprobs)
    assert one.response_ids
    assert sum(one.response_mask) == len(one.logprobs) == len(one.response_ids)


async def loop_of_chat(client):
    messages = list(HELLO)
    for result in ("3", "4", None):
        answer = await client.chat.completions.create(model="writer", messages=messages, tools=[CHAT_TOOL])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def loop_of_responses(client):
    items = [{"role": "user", "content": "hello"}]
    for result in ("3", "4", None):
        answer = await client.responses.create(model="writer", input=items, tools=[RESPONSE_TOOL])
        items += [item.model_dump() for item in answer.output]
        calls = [item.call_id for item in answer.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": id, "output": result} for id in calls]


async def loop_of_messages(client):
    messages = list(HELLO)
    for result in ("3", "4", None):
        answer = await client.messages.create(model="writer", max_tokens=500, messages=messages, tools=[MESSAGE_TOOL])
        calls = [block.id for block in answer.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": id, "content": result} for id in calls]
        messages.append({"role": "user", "content": results})


def calls_twice(prompt: str) -> str:
    return "done" if "\n4\n" in prompt else f"Let me see. {CALL}{CALL}"


@pytest.mark.parametrize(("loop", "clients"), [(loop_of_responses, client_of), (loop_of_messages, anthropic_of)])
def test_tool_loop_makes_the_same_steps_in_every_dialect(loop, clients):
    here, there = once(loop_of_chat, model=Templated(calls_twice)), once(loop, clients, model=Templated(calls_twice))
    assert here.steps == there.steps
    assert [step.parents for step in there.steps] == [(), (0,), (0, 1)]
    assert [step.response for step in there.steps[:2]] == [calls_twice("")] * 2
    assert there.steps[2].response == "done"


NAMES = st.sampled_from(["add", "look_up"])
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=2)


@st.composite
def conversations(draw) -> tuple[str | None, list]:
    turns = [("user", draw(st.text(max_size=20)))]
    for k in range(draw(st.integers(0, 3))):
        names = draw(st.lists(NAMES, max_size=2))
        calls = [(f"c{k}{i}", name, draw(ARGUMENTS)) for i, name in enumerate(names)]
        turns.append(("assistant", draw(st.text(max_size=20)), calls))
        turns += [("tool", id, draw(st.text(max_size=20))) for id, *_ in calls]
        turns.append(("user", draw(st.text(max_size=20))))
    return draw(st.none() | st.text(max_size=20)), turns


MODEL = Templated()


def encoded(dialect: str, **body):
    request = parsed(DIALECTS[dialect].request, json.dumps({"model": "m", **body}).encode())
    return MODEL.encode(request.asked().messages, request.schemas or ())


TALK = [*HELLO, {"role": "assistant", "content": "hi"}, *HELLO]
REASONING = {"type": "reasoning", "id": "r", "summary": []}
THOUGHT = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "hi"}]
PARTS = [{"type": "text", "text": text} for text in ("You ", "add.")]
FORMS = [
    ("openai_chat", {"messages": [{"role": "developer", "content": SYSTEM}, *TALK]}),
    ("openai_responses", {"input": [{"role": "developer", "content": SYSTEM}, TALK[0], REASONING, *TALK[1:]]}),
    ("anthropic_messages", {"messages": [{"role": "system", "content": SYSTEM}, *TALK]}),
    (
        "anthropic_messages",
        {"messages": [TALK[0], {"role": "assistant", "content": THOUGHT}, TALK[2]], "system": PARTS},
    ),
]


@pytest.mark.parametrize(("dialect", "body"), FORMS)
def test_prompt_is_equal_in_every_form(dialect, body):
    assert encoded(dialect, **body) == encoded("openai_chat", messages=[{"role": "system", "content": SYSTEM}, *TALK])


@given(conversations(), st.booleans())
def test_conversation_is_the_same_prompt_in_every_dialect(conversation, tools):
    system, turns = conversation
    chats = encoded("openai_chat", messages=chat_messages(system, turns), **({"tools": [CHAT_TOOL]} if tools else {}))
    responses = encoded(
        "openai_responses",
        input=response_items(turns),
        **({} if system is None else {"instructions": system}),
        **({"tools": [RESPONSE_TOOL]} if tools else {}),
    )
    messages = encoded(
        "anthropic_messages",
        messages=anthropic_messages(turns),
        **({} if system is None else {"system": system}),
        **({"tools": [MESSAGE_TOOL]} if tools else {}),
    )
    assert chats == responses == messages
