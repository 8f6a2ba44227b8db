"""OpenAI's Responses API with the official client: answers, streams, tools, continued responses, refusals."""

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.rollout.http.dialects.clients import RESPONSE_TOOL, events_of, extras, texts_of
from tests.rollout.http.test_server import AGENTS, CALL, Answers, Templated, exchange

SAID = f"Let me see. {CALL}{CALL}"


def created(model=None, agents=AGENTS, **fields):
    """Return the response to one request, and the trajectory."""
    request = {"model": "writer", "input": "hello", **fields}
    return exchange(lambda client: client.responses.create(**request), model=model, agents=agents)


def test_response_has_text_calls_and_usage():
    answer, made = created(Templated(lambda prompt: SAID), tools=[RESPONSE_TOOL], metadata={"mine": "1"})
    (step,) = made.steps
    assert (answer.id, answer.status, answer.output_text) == (step.id, "completed", "Let me see.")
    message, *calls = answer.output
    assert message.type == "message"
    assert [(call.type, call.name, call.arguments) for call in calls] == [("function_call", "add", '{"a": 1}')] * 2
    assert len({item.id for item in answer.output} | {call.call_id for call in calls}) == 5
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(step.prompt_ids), len(step.response_ids))
    assert (step.info, answer.metadata) == ({"mine": "1"}, {"mine": "1"})


def test_empty_or_cut_off_response_has_a_message():
    answer, _ = created(Answers(lambda prompt: ""))
    assert ([item.type for item in answer.output], answer.output_text) == (["message"], "")
    answer, made = created(Answers(reason="length"), max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.status == "truncated"


def test_disabled_parallel_calls_return_one_call():
    answer, made = created(Templated(lambda prompt: SAID), tools=[RESPONSE_TOOL], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert (made.steps[0].response, made.steps[0].info) == (SAID, {"ignored": ["parallel_tool_calls"]})


CASES = [
    (lambda prompt: "yes", "stop", {}),
    (lambda prompt: "", "stop", {}),
    (lambda prompt: SAID, "stop", {"tools": [RESPONSE_TOOL], "metadata": {"mine": "1"}}),
    (lambda prompt: CALL, "stop", {"tools": [RESPONSE_TOOL], "tool_choice": "auto"}),
    (lambda prompt: "yes", "length", {"max_output_tokens": 3}),
]
IDS = ["text", "nothing", "text and calls", "call", "cut off"]


@pytest.mark.parametrize(("answer", "reason", "fields"), CASES, ids=IDS)
def test_answer_and_events_fit_the_official_types(answer, reason, fields):
    async def ask(client):
        request = {"model": "writer", "input": "hello", **fields}
        return await texts_of(client.responses.with_streaming_response.create, **request)

    answer, stream = exchange(ask, model=Templated(answer, reason))[0]
    whole = Response.model_validate_json(answer, strict=True)
    assert extras(whole) == set()
    events = events_of(stream)
    for number, (name, data) in enumerate(events):
        event = TypeAdapter(ResponseStreamEvent).validate_python(data, strict=True)
        assert (extras(event), event.type, event.sequence_number) == (set(), name, number)
    last = Response.model_validate(events[-1][1]["response"])
    assert [item.model_dump(exclude={"id", "call_id"}) for item in last.output] == [
        item.model_dump(exclude={"id", "call_id"}) for item in whole.output
    ]


MESSAGE_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def test_stream_has_the_official_order_and_joins_to_the_response():
    async def ask(client):
        more = {"model": "writer", "input": "hello", "tools": [{**RESPONSE_TOOL, "strict": True}]}
        async with client.responses.stream(**more) as stream:
            return [event async for event in stream], await stream.get_final_response()

    seen, final = exchange(ask, model=Templated(lambda prompt: SAID))[0]
    types = [event.type for event in seen]
    begin = ["response.created", "response.in_progress"]
    assert types == [*begin, *MESSAGE_EVENTS, *CALL_EVENTS, *CALL_EVENTS, "response.completed"]
    assert final.output_text == "Let me see."
    assert [item.parsed_arguments for item in final.output[1:]] == [{"a": 1}] * 2
    assert seen[0].response.output == []
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "Let me see."


# Refused requests


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": []}, "input: expected at least one message"),
        ({"input": 5}, "input: "),
        ({"input": [{"type": "computer_call"}]}, "'computer_call'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: .* got 'web_search'"),
        ({"text": {"format": {"type": "json_object"}}}, r"text.format: .* \[text.format\] in the recipe"),
        ({"tool_choice": "required", "tools": [RESPONSE_TOOL]}, "tool_choice"),
        ({"background": True}, "background: expected false"),
        ({"previous_response_id": "x"}, "previous_response_id: expected nothing"),
    ],
)
def test_unsupported_request_is_refused_by_name(fields, said):
    with pytest.raises(openai.BadRequestError, match=said):
        created(**fields)
