"""Anthropic's Messages API with the official client: answers, streams, tools, counts, errors."""

import os

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from tests.rollout.http.dialects.clients import MESSAGE_TOOL, anthropic_of, events_of, extras, texts_of
from tests.rollout.http.test_server import AGENTS, CALL, HELLO, Answers, Templated, exchange, run_workflow, user

SAID = f"Let me see. {CALL}{CALL}"


def created(model=None, agents=AGENTS, **fields):
    """Return the message that answers one request, and the trajectory."""
    request = {"model": "writer", "max_tokens": 500, "messages": HELLO, **fields}
    return exchange(lambda client: client.messages.create(**request), anthropic_of, model=model, agents=agents)


def test_message_has_text_calls_and_usage():
    answer, made = created(Templated(lambda prompt: SAID), tools=[MESSAGE_TOOL], metadata={"user_id": "me"})
    (step,) = made.steps
    text, *calls = answer.content
    assert (answer.id, answer.stop_reason, text.text) == (step.id, "tool_use", "Let me see.")
    assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "add", {"a": 1})] * 2
    assert len({call.id for call in calls}) == 2
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(step.prompt_ids), len(step.response_ids))
    assert step.info == {"user_id": "me"}


def test_empty_or_cut_off_response_has_its_block_and_reason():
    answer, _ = created(Answers(lambda prompt: ""))
    assert [(block.type, block.text) for block in answer.content] == [("text", "")]
    answer, trajectory = created(Answers(reason="length"), max_tokens=3)
    assert (answer.stop_reason, trajectory.status) == ("max_tokens", "truncated")


def test_stop_sequence_is_named_and_its_tokens_are_trained():
    answer, made = created(Answers(lambda prompt: "so it is##more END"), stop_sequences=["END", "##", "###"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "##", "so it is")
    assert made.steps[0].response_ids == tuple(map(ord, "so it is##"))


def test_disabled_parallel_tool_use_returns_one_call():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer, made = created(Templated(lambda prompt: SAID), tools=[MESSAGE_TOOL], tool_choice=choice)
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert made.steps[0].info == {"ignored": ["tool_choice.disable_parallel_tool_use"]}
    assert made.steps[0].response == SAID


def test_tool_choice_none_hides_the_tools():
    answer, made = created(Templated(lambda prompt: CALL), tools=[MESSAGE_TOOL], tool_choice={"type": "none"})
    assert (answer.stop_reason, answer.content[0].text) == ("end_turn", CALL)
    assert '"add"' not in made.steps[0].prompt


def test_results_and_texts_of_one_message_keep_their_order():
    blocks = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]},
        {"type": "text", "text": "after"},
    ]
    _, made = created(messages=[{"role": "user", "content": blocks}])
    assert made.steps[0].prompt == "You write.\nbefore\n3\nafter"


CASES = [
    (lambda prompt: "yes", "stop", {}),
    (lambda prompt: "", "stop", {}),
    (lambda prompt: SAID, "stop", {"tools": [MESSAGE_TOOL]}),
    (lambda prompt: CALL, "stop", {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "auto"}}),
    (lambda prompt: "yes##", "stop", {"stop_sequences": ["##"]}),
    (lambda prompt: "yes", "length", {}),
]
IDS = ["text", "nothing", "text and calls", "call", "stop text", "cut off"]


@pytest.mark.parametrize(("answer", "reason", "fields"), CASES, ids=IDS)
def test_answer_and_events_fit_the_official_types(answer, reason, fields):
    async def ask(client):
        request = {"model": "writer", "max_tokens": 500, "messages": HELLO, **fields}
        return await texts_of(client.messages.with_streaming_response.create, **request)

    whole, stream = exchange(ask, anthropic_of, model=Templated(answer, reason))[0]
    assert extras(Message.model_validate_json(whole, strict=True)) == set()
    for name, data in events_of(stream):
        event = TypeAdapter(RawMessageStreamEvent).validate_python(data, strict=True)
        assert (extras(event), event.type) == (set(), name)


BLOCK_EVENTS = ["content_block_start", "content_block_delta", "content_block_stop"]


def test_stream_has_the_official_order_and_joins_to_the_message():
    async def ask(client):
        request = {"model": "writer", "max_tokens": 500, "messages": HELLO, "tools": [MESSAGE_TOOL]}
        events = [event.type async for event in await client.messages.create(stream=True, **request)]
        async with client.messages.stream(**request) as stream:
            return events, [await stream.get_final_message(), await client.messages.create(**request)]

    events, messages = exchange(ask, anthropic_of, model=Templated(lambda prompt: SAID))[0]
    assert events == ["message_start", *BLOCK_EVENTS * 3, "message_delta", "message_stop"]
    streamed, whole = (
        [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content] for message in messages
    )
    assert streamed == whole
    assert (messages[0].stop_reason, messages[0].usage.output_tokens) == ("tool_use", len(SAID))


# Errors, access and addresses


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": user([{"type": "image", "source": {}}])}, "messages.0.content.0: .*'image'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "The answer is ("}]}, "expected a user's message last"),
        (
            {"messages": user([{"type": "tool_use", "id": "c", "name": "f", "input": {}}])},
            "expected no tool_use in a message of the user",
        ),
        ({"messages": []}, "messages: "),
        ({"tools": [MESSAGE_TOOL], "tool_choice": {"type": "any"}}, 'tool_choice: expected {"type": "auto"} or'),
        ({"messages": user("x" * 2000)}, "prompt is too long: "),
        ({"max_tokens": 0}, "max_tokens: "),
    ],
)
def test_unsupported_request_is_refused_by_name(fields, said):
    with pytest.raises(anthropic.BadRequestError, match=said) as raised:
        created(**fields)
    body = ErrorResponse.model_validate(raised.value.body, strict=True)
    assert (extras(body), body.error.type) == (set(), "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "key", "status", "kind"),
    [
        ("/messages", "wrong", 401, "authentication_error"),
        ("/messages/batches", None, 404, "not_found_error"),
        ("/models", "wrong", 401, "authentication_error"),
    ],
)
def test_errors_have_the_format_of_the_client(path, key, status, kind):
    async def solve(task, team):
        headers = {"x-api-key": key or team.api_key, "anthropic-version": "2023-06-01"}
        async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
            answer = await client.request("GET" if path == "/models" else "POST", f"{team.base_url}{path}")
        body = ErrorResponse.model_validate(answer.json(), strict=True)
        return f"{answer.status_code} {body.error.type}"

    assert run_workflow(solve)[0].answer == f"{status} {kind}"


def test_models_are_listed_under_the_base_url_of_others():
    def solve(task, team):
        with anthropic.Anthropic(base_url=team.base_url, api_key=team.api_key) as client:
            names = [f"{model.type} {model.id}" for model in client.models.list()]
            return ", ".join(names)

    (made,) = run_workflow(solve)
    assert (made.status, made.answer) == ("ok", "model default:writer, model default:editor"), made.info


def test_client_reads_its_address_from_the_environment(monkeypatch):
    def solve(task, team):
        for name, value in team.client_environment.items():
            monkeypatch.setenv(name, value)
        assert "/v1" not in os.environ["ANTHROPIC_BASE_URL"]
        with anthropic.Anthropic() as client:
            answer = client.messages.create(model="writer", max_tokens=9, messages=HELLO)
        return answer.content[0].text

    (made,) = run_workflow(solve)
    assert (made.status, made.answer) == ("ok", "yes"), made.info
