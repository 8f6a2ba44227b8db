"""Tests of model calls in the form of each convention."""

import json
from typing import Any

import pytest

from creditflow.data import Step
from creditflow.plugins.traces import Converted, Span, convert
from creditflow.plugins.traces.spans import SpanEvent


def made(attributes: dict[str, Any], *events: SpanEvent) -> Converted:
    return convert([Span("t", "a", None, "a call", 1, 2, attributes, list(events))])


def step(attributes: dict[str, Any], *events: SpanEvent) -> Step:
    (trajectory,) = made(attributes, *events).trajectories
    (only,) = trajectory.steps
    return only


def said(*parts: dict[str, Any], **more: Any) -> str:
    return json.dumps([{"role": "assistant", "parts": list(parts), **more}])


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def openinference(*outputs: dict[str, str], **more: Any) -> dict[str, Any]:
    attributes = {"openinference.span.kind": "LLM", "llm.input_messages.0.message.content": "What now?", **more}
    for number, output in enumerate(outputs):
        attributes |= {f"llm.output_messages.{number}.message.{key}": value for key, value in output.items()}
    return attributes


@pytest.mark.parametrize(
    "attributes",
    [
        *(openinference({"content": "one"}, {"content": "two"}, **{"llm.invocation_parameters": f'{{"{n}": 2}}'})
          for n in ("n", "candidate_count")),
        {"gen_ai.operation.name": "chat", "gen_ai.output.messages": json.dumps(
            [{"parts": [text(word)], "finish_reason": "stop"} for word in ("one", "two")])},
        {f"gen_ai.completion.{number}.{key}": value for number, word in enumerate(("one", "two"))
         for key, value in (("content", word), ("finish_reason", "stop"))},
    ],
)  # fmt: skip
def test_first_choice_is_the_step_and_the_rest_are_listed(attributes: dict[str, Any]) -> None:
    found = made(attributes)
    assert [step.response for step in found.trajectories[0].steps] == ["one"]
    assert [(left.what, left.name) for left in found.left_out] == [("choice", "two")]


def test_tool_result_in_two_forms_is_read_once() -> None:
    read = [{"role": "tool", "content": "sunny", "parts": [{"type": "tool_call_response", "response": "sunny"}]}]
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(read),
                  "gen_ai.output.messages": said(text("fine"))}  # fmt: skip
    assert step(attributes).prompt == "[tool]\nsunny"


def test_duplicate_conventions_are_read_once() -> None:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[{"role": "user", "content": "Hello"}]'}
    events = SpanEvent("gen_ai.user.message", {"content": "Hello"}), SpanEvent("gen_ai.choice", {"content": "Hi"})
    found = step(attributes, *events)
    assert (found.prompt, found.response) == ("[user]\nHello", "Hi")
    twice = {"gen_ai.prompt.0.content": "Hello", "gen_ai.completion.0.content": "Hi",
             **openinference({"content": "Hi"}, **{"llm.input_messages.0.message.content": "Hello"})}  # fmt: skip
    assert (step(twice).prompt, step(twice).response) == ("[user]\nHello", "Hi")


def test_event_body_may_be_a_json_text() -> None:
    body = json.dumps({"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"})
    assert step({"gen_ai.operation.name": "chat"}, SpanEvent("gen_ai.choice", {}, body)).response == "Hi"


def test_semantic_kernel_calls_are_steps() -> None:
    events = [
        SpanEvent("gen_ai.content.prompt", {"gen_ai.prompt": '[{"role": "user", "content": "Hello"}]'}),
        SpanEvent("gen_ai.content.completion", {"gen_ai.completion": '[{"role": "assistant", "content": "Hi"}]'}),
    ]
    assert step({"gen_ai.operation.name": "chat.completions"}, *events).response == "Hi"


def test_vercel_calls_are_steps() -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}]
    calls = [{"toolCallId": "1", "toolName": "weather", "input": {"in": "Rome"}}]
    own = {"operationId": "ai.generateText.doGenerate", "prompt.messages": json.dumps(asked),
           "response.text": "I look.", "response.toolCalls": json.dumps(calls)}  # fmt: skip
    found = step({"gen_ai.request.model": "m", **{f"ai.{key}": value for key, value in own.items()}})
    assert (found.prompt, found.policy) == ("[user]\nWeather?", "m")
    assert found.response == 'I look.\n{"name": "weather", "arguments": {"in": "Rome"}}'


def test_call_of_unknown_convention_is_left_out() -> None:
    found = made({"gen_ai.system": "gcp.vertex.agent", "gen_ai.request.model": "m", "llm_request": "{}"})
    assert [(left.what, left.reason) for left in found.left_out] == [
        ("model call", "neither messages nor a response were recorded in a form that is known: it has llm_request")
    ]
    for other in ({"gen_ai.operation.name": "embeddings"}, {"openinference.span.kind": "CHAIN"}):
        assert made({"gen_ai.request.model": "m", **other}).left_out == []


@pytest.mark.parametrize("kind", [("openinference.span.kind", "AGENT"), ("agentops.span.kind", "agent")])
def test_agent_span_with_messages_is_not_a_call(kind: tuple[str, str]) -> None:
    noted = openinference({"content": "Done."}, **{"agent.name": "writer"})
    del noted["openinference.span.kind"]
    spans = [
        Span("t", "agent", None, "run", 1, 9, {**noted, kind[0]: kind[1]}),
        Span("t", "first", "agent", "llm", 2, 3, openinference({"content": "I look it up."})),
        Span("t", "last", "agent", "llm", 4, 5, openinference({"content": "Done."})),
    ]
    found = convert(spans)
    steps = found.trajectories[0].steps
    assert [(step.agent, step.info["span_id"]) for step in steps] == [("writer", "first"), ("writer", "last")]
    assert found.left_out == []


@pytest.mark.parametrize("reasons", [["MAX_TOKENS"], "length", '["length"]', ("max_output_tokens",)])
def test_length_finish_reason_truncates_in_any_spelling(reasons: Any) -> None:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": said(text("cut o")),
                  "gen_ai.response.finish_reasons": reasons}  # fmt: skip
    (trajectory,) = made(attributes).trajectories
    assert trajectory.status == "truncated"


def test_too_large_logprobs_become_nan() -> None:
    logprobs = [{"logprob": 10**400}]
    attributes = {"gen_ai.completion.0.content": "Hi", "response_token_ids": [1], "logprobs.content": logprobs}
    assert str(step(attributes).logprobs) == "(nan,)"
    assert step({**attributes, "response_token_ids": "[1,"}).response_ids == ()


def test_team_id_is_removed_from_the_agent_name() -> None:
    name = "writer_01234567-89ab-cdef-0123-456789abcdef"
    assert step({"gen_ai.completion.0.content": "Hi", "gen_ai.agent.name": name}).agent == "writer"
