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
    chat_messages,
    once,
    response_items,
)
from tests.rollout.http.test_server import CALL, HELLO, Templated

SYSTEM = "You add."
TURNS = [
    ("user", "What is 1 + 2?"),
    ("assistant", "Let me see.", [("c1", "add", {"a": 1, "b": "é"}), ("c2", "add", {})]),
    ("tool", "c1", "3"),
    ("tool", "c2", "0"),
    ("assistant", "It is 3."),
    ("user", "And 3 + 4?"),
]


async def chat(openais, anthropics, stream):
    more = {"tools": [CHAT_TOOL], "max_tokens": 24, "stop": ["zz"]}
    made = await openais.chat.completions.create(
        model="writer", messages=chat_messages(SYSTEM, TURNS), stream=stream, **more
    )
    return "".join([part.choices[0].delta.content or "" async for part in made]) if stream else made.choices[0].message


async def response(openais, anthropics, stream):
    more = {"tools": [RESPONSE_TOOL], "max_output_tokens": 24, "extra_body": {"stop": ["zz"]}}
    made = await openais.responses.create(
        model="writer", instructions=SYSTEM, input=response_items(TURNS), stream=stream, **more
    )
    return [part async for part in made] if stream else made


async def message(openais, anthropics, stream):
    more = {"tools": [MESSAGE_TOOL], "max_tokens": 24, "stop_sequences": ["zz"]}
    made = await anthropics.messages.create(
        model="writer", system=SYSTEM, messages=anthropic_messages(TURNS), stream=stream, **more
    )
    return [part async for part in made] if stream else made


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", [response, message])
def test_step_has_the_same_tokens_in_every_dialect(way, stream):
    policy = Policy.load(tiny_byte_model(), pick_device("cpu"))
    here, there = (
        once(lambda *both, ask=ask: ask(*both, stream), model=policy, agents={"writer": AgentSpec("Unused.")})
        for ask in (chat, way)
    )
    (one,), (other,) = here.steps, there.steps
    assert one == other
    assert (one.prompt_ids, one.response_ids, one.logprobs) == (other.prompt_ids, other.response_ids, other.logprobs)
    assert one.response_ids
    assert sum(one.response_mask) == len(one.logprobs) == len(one.response_ids)


async def loop_of_chat(openais, anthropics):
    messages = list(HELLO)
    for result in ("3", "4", None):
        answer = await openais.chat.completions.create(model="writer", messages=messages, tools=[CHAT_TOOL])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def loop_of_responses(openais, anthropics):
    items = [{"role": "user", "content": "hello"}]
    for result in ("3", "4", None):
        answer = await openais.responses.create(model="writer", input=items, tools=[RESPONSE_TOOL])
        items += [item.model_dump() for item in answer.output]
        calls = [item.call_id for item in answer.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": id, "output": result} for id in calls]


async def loop_of_stored_responses(openais, anthropics):
    more = {"input": "hello"}
    for result in ("3", "4", None):
        answer = await openais.responses.create(model="writer", tools=[RESPONSE_TOOL], **more)
        calls = [item.call_id for item in answer.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": id, "output": result} for id in calls]
        more = {"input": results, "previous_response_id": answer.id}


async def loop_of_messages(openais, anthropics):
    messages = list(HELLO)
    for result in ("3", "4", None):
        answer = await anthropics.messages.create(
            model="writer", max_tokens=500, messages=messages, tools=[MESSAGE_TOOL]
        )
        calls = [block.id for block in answer.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": id, "content": result} for id in calls]
        messages.append({"role": "user", "content": results})


def calls_twice(prompt: str) -> str:
    return "done" if "\n4\n" in prompt else f"Let me see. {CALL}{CALL}"


@pytest.mark.parametrize("loop", [loop_of_responses, loop_of_stored_responses, loop_of_messages])
def test_tool_loop_makes_the_same_steps_in_every_dialect(loop):
    here, there = (once(ask, model=Templated(calls_twice)) for ask in (loop_of_chat, loop))
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
    (prompt,) = request.prompts()
    return MODEL.encode(prompt, request.schemas or ())


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
