"""Tests of messages in each provider's form: texts, media, reasoning, tool calls."""

import base64
import hashlib
import json
from typing import Any

import pytest

from creditflow.data import Step, TrajectoryBatch
from creditflow.plugins.traces import Converted, Span, convert, from_chat_log
from creditflow.plugins.traces.spans import SpanEvent

PNG = base64.b64encode(bytes(range(256)) * 879).decode()
URL = f"data:image/png;base64,{PNG}"
MARKER = f"[image {hashlib.sha256(PNG.encode()).hexdigest()[:12]}]"
IMAGES = {
    "openai": {"type": "image_url", "image_url": {"url": URL}},
    "responses": {"type": "input_image", "image_url": URL},
    "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    "bedrock": {"image": {"format": "png", "source": {"bytes": PNG}}},
    "gemini": {"inlineData": {"mimeType": "image/png", "data": PNG}},
    "vercel": {"type": "image", "image": PNG, "mediaType": "image/png"},
    "mcp": {"type": "image", "data": PNG, "mimeType": "image/png"},
    "opentelemetry": {"type": "blob", "mime_type": "image/png", "modality": "image", "content": PNG},
}


def call(read: Any, wrote: Any) -> Converted:
    """Convert one call in OpenTelemetry's conventions."""
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps(read),
        "gen_ai.output.messages": json.dumps(wrote),
    }
    return convert([Span("t", "a", None, "chat", 1, 2, attributes)])


def spread(prompt: dict[str, Any], response: dict[str, Any], read: str, wrote: str, **more: Any) -> Converted:
    """Convert one call with messages spread over attributes."""
    attributes = {f"{read}.0.{key}": value for key, value in prompt.items()}
    attributes |= {f"{wrote}.0.{key}": value for key, value in response.items()}
    return convert([Span("t", "a", None, "chat", 1, 2, attributes | more)])


def logged(request: dict[str, Any], response: Any, **more: Any) -> Converted:
    return convert(from_chat_log([{"request": request, "response": response, **more}]))


def step(made: Converted) -> Step:
    (trajectory,) = made.trajectories
    (only,) = trajectory.steps
    assert made.left_out == []
    assert not made.mended
    TrajectoryBatch.from_trajectories([trajectory])
    return only


ANSWER = {"role": "assistant", "content": "A cat is on the mat."}


@pytest.mark.parametrize("form", IMAGES)
@pytest.mark.parametrize("reader", ["attributes", "openllmetry", "chat log", "event", "vercel", "tool result"])
def test_image_part_becomes_a_marker(form: str, reader: str) -> None:
    content = [{"type": "text", "text": "See this:"}, IMAGES[form]]
    if form in ("bedrock", "gemini"):
        content[0] = {"text": "See this:"}
    user = {"role": "user", "content": content}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}]}
    chat = {"gen_ai.operation.name": "chat"}
    events = [SpanEvent("gen_ai.user.message", {"content": json.dumps(content)}), SpanEvent("gen_ai.choice", ANSWER)]
    vercel = {"ai.operationId": "ai.generateText.doGenerate", "ai.response.text": ANSWER["content"]}
    found = step(
        {
            "attributes": lambda: call([user], [ANSWER]),
            "openllmetry": lambda: spread(
                {"role": "user", "content": json.dumps(content)}, ANSWER, "gen_ai.prompt", "gen_ai.completion"
            ),
            "chat log": lambda: logged({"messages": [user]}, {"choices": [{"message": ANSWER}]}),
            "event": lambda: convert([Span("t", "a", None, "chat", 1, 2, chat, events)]),
            "vercel": lambda: convert(
                [Span("t", "a", None, "x", 1, 2, {**vercel, "ai.prompt.messages": json.dumps([user])})]
            ),
            "tool result": lambda: call([result], [ANSWER]),
        }[reader]()
    )
    assert found.prompt == f"[user]\nSee this:\n{MARKER}"
    assert found.info["media"] == {MARKER: IMAGES[form]}


@pytest.mark.parametrize(
    ("part", "kind", "text"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA" * 500, "format": "wav"}}, "audio", "AAAA" * 500),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD"}}, "file", "QUJD"),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QUIxMjM="}},
         "file", "QUIxMjM="),
        ({"type": "uri", "modality": "image", "uri": "https://e.x/a.png"}, "image", "https://e.x/a.png"),
        ({"type": "file", "modality": "video", "file_id": "f1"}, "video", "f1"),
        ({"video": {"format": "mp4", "source": {"bytes": "QUJD"}}}, "video", "QUJD"),
        (URL, "image", PNG),
    ],
)  # fmt: skip
def test_other_media_become_markers(part: Any, kind: str, text: str) -> None:
    found = step(call([{"role": "user", "content": [part]}], [ANSWER]))
    marker = f"[{kind} {hashlib.sha256(text.encode()).hexdigest()[:12]}]"
    assert (found.prompt, found.info["media"]) == (f"[user]\n{marker}", {marker: part})


def test_openinference_image_becomes_a_marker() -> None:
    prompt = {
        "message.role": "user",
        "message.contents.0.message_content.type": "text",
        "message.contents.0.message_content.text": "See this:",
        "message.contents.1.message_content.type": "image",
        "message.contents.1.message_content.image.image.url": URL,
    }
    answer = {"message.content": ANSWER["content"]}
    found = step(spread(prompt, answer, "llm.input_messages", "llm.output_messages"))
    assert found.prompt == f"[user]\nSee this:\n{MARKER}"
    assert found.info["media"][MARKER]["image"]["image"]["url"] == URL


def test_original_of_a_repeated_image_is_kept_once() -> None:
    user = {"role": "user", "content": [IMAGES["openai"]]}
    again = [user, ANSWER, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "It sleeps."}]
    (trajectory,) = convert(from_chat_log([{"messages": again}])).trajectories
    assert [step.info["media"] for step in trajectory.steps] == [{MARKER: IMAGES["openai"]}, {MARKER: None}]


USER = {"role": "user", "content": "How many?"}
THOUGHT, SAID = "3 + 4 makes 7.", "There are seven of them."
THINKING = [
    {"reasoning_content": THOUGHT, "content": SAID},
    {"reasoning": THOUGHT, "content": SAID},
    {"thinking": THOUGHT, "content": SAID},
    {"reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}], "content": SAID},
    {"content": [{"type": "thinking", "thinking": THOUGHT, "signature": "x"}, {"type": "text", "text": SAID}]},
    {"content": [{"reasoningContent": {"reasoningText": {"text": THOUGHT, "signature": "x"}}}, {"text": SAID}]},
    {"content": [{"text": THOUGHT, "thought": True}, {"text": SAID}]},
    {"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": THOUGHT}]},
                 {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID}]}]},
    {"parts": [{"type": "reasoning", "content": THOUGHT}, {"type": "text", "content": SAID}]},
]  # fmt: skip


@pytest.mark.parametrize("message", THINKING, ids=lambda message: ",".join(map(str, message)))
@pytest.mark.parametrize("form", ["conversation", "call", "attributes"])
def test_reasoning_is_part_of_the_response(message: dict[str, Any], form: str) -> None:
    message = {"role": "assistant", **message}
    reader = {"role": "user", "content": f"Check: {SAID}"}
    checked = {"role": "assistant", "content": "Yes, right."}
    lines: dict[str, list[dict[str, Any]]] = {
        "conversation": [{"messages": [USER, message], "session_id": "s"}],
        "call": [{"request": {"messages": [USER]}, "response": {"choices": [{"message": message}]}, "session_id": "s"}],
        "attributes": [],
    }
    spans = from_chat_log([*lines[form], {"messages": [reader, checked], "session_id": "s"}])
    if form == "attributes":
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": json.dumps([message])}
        spans = [Span("s", "a", None, "chat", 1, 2, attributes), *spans]
    (trajectory,) = convert(spans).trajectories
    assert [one.response for one in trajectory.steps] == [f"{THOUGHT}\n{SAID}", "Yes, right."]
    assert (trajectory.steps[1].parents, trajectory.steps[1].info["parents_by"]) == ((0,), "text")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_call_cut_off_in_its_reasoning_is_kept(key: str) -> None:
    message = {"role": "assistant", "content": None, key: "3 + 4 ="}
    for response in (
        {"id": "r", "choices": [{"message": message, "finish_reason": "length"}]},
        {"id": "r", "type": "message", **message, "stop_reason": "max_tokens"},
    ):
        made = logged({"messages": [USER]}, response)
        assert (step(made).response, made.trajectories[0].status) == ("3 + 4 =", "truncated")


def test_thinking_of_openllmetry_is_part_of_the_response() -> None:
    attributes = {"gen_ai.prompt.0.content": "How many?", "gen_ai.completion.0.finish_reason": "end_turn"}
    for n, (role, text) in enumerate((("thinking", THOUGHT), ("assistant", SAID))):
        attributes |= {f"gen_ai.completion.{n}.role": role, f"gen_ai.completion.{n}.content": text}
    found = step(convert([Span("t", "a", None, "anthropic.chat", 1, 2, attributes)]))
    assert (found.response, found.info["finish_reason"]) == (f"{THOUGHT}\n{SAID}", "end_turn")


@pytest.mark.parametrize("scope", ["", "opentelemetry.instrumentation.openai_agents"])
def test_ascii_texts_are_read_as_any_others(scope: str) -> None:
    called = "{'content': None, 'tool_calls': [{'function': {'name': 'f', 'arguments': '{}'}}]}"
    attributes = {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": called}
    said = (("assistant" if scope else "thinking", called), ("assistant", "So."), ("user", "On."))
    for n, (role, text) in enumerate(said):
        attributes |= {f"gen_ai.prompt.{n}.role": role, f"gen_ai.prompt.{n}.content": text}
    spans = [Span("t", "a", None, "", 1, 2, attributes | {"gen_ai.prompt.2.content": x}, scope=scope) for x in "eé"]
    ascii_, other = (step(convert([span])) for span in spans)
    assert (ascii_.prompt, ascii_.response) == (other.prompt.replace("é", "e"), other.response)


def test_chunks_in_the_history_of_gemini_are_one_message() -> None:
    texts = [("user", "Go."), ("model", "It is mild "), ("model", "in Bern.")]
    contents = [{"role": role, "parts": [{"text": text}]} for role, text in texts]
    keys = (f"gen_ai.prompt.{n}.{key}" for n in range(3) for key in ("role", "content"))
    flat = dict(zip(keys, (value for pair in texts for value in pair), strict=True))
    spans = [Span("t", "a", None, "chat", 1, 2, {**flat, "gen_ai.completion.0.content": "Sure."})]
    for made in (convert(spans), logged({"contents": contents}, {"candidates": [{"content": {"text": "Sure."}}]})):
        assert step(made).prompt == "[user]\nGo.\n\n[model]\nIt is mild in Bern."


CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
LOOKED = f"Let me look.\n{CALL}"
ROUNDS = {
    "bedrock": ([{"text": "Let me look."},
                 {"toolUse": {"toolUseId": "1", "name": "weather", "input": {"city": "Bern"}}}],
                [{"toolResult": {"toolUseId": "1", "status": "success", "content": [{"text": "21 degrees"}]}}]),
    "anthropic": ([{"type": "text", "text": "Let me look."},
                   {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bern"}}],
                  [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "21 degrees"}]}]),
    "gemini": ([{"text": "Let me look."}, {"functionCall": {"name": "weather", "args": {"city": "Bern"}}}],
               [{"functionResponse": {"name": "weather", "response": "21 degrees"}}]),
    "vercel": ([{"type": "text", "text": "Let me look."},
                {"type": "tool-call", "toolCallId": "1", "toolName": "weather", "input": {"city": "Bern"}}],
               [{"type": "tool-result", "toolCallId": "1", "toolName": "weather",
                 "output": {"type": "text", "value": "21 degrees"}}]),
    "responses": ([{"type": "message", "role": "assistant",
                    "content": [{"type": "output_text", "text": "Let me look."}]},
                   {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Bern"}'}],
                  [{"type": "function_call_output", "call_id": "1", "output": "21 degrees"}]),
}  # fmt: skip


@pytest.mark.parametrize("form", ROUNDS)
def test_tool_calls_and_results_are_read_in_each_form(form: str) -> None:
    looked, result = ROUNDS[form]
    user = {"role": "user", "content": "Weather?"}
    events = [
        SpanEvent("gen_ai.user.message", {"content": "Weather?"}),
        SpanEvent("gen_ai.assistant.message", {"content": json.dumps(looked)}),
        SpanEvent("gen_ai.tool.message", {"content": json.dumps(result)}),
        # On Bedrock, botocore records a result twice. Gemini's have no ids.
        *[SpanEvent("gen_ai.tool.message", {"id": "1", "content": "21 degrees"})] * (form != "gemini"),
        SpanEvent("gen_ai.choice", {"message": json.dumps(looked), "finish_reason": "tool_use"}),
    ]
    messages = [user, {"role": "assistant", "content": looked}, {"role": "tool", "content": result}]
    for made in (
        call(messages, [{"role": "assistant", "content": looked}]),
        convert([Span("t", "a", None, "chat", 1, 2, {"gen_ai.operation.name": "chat"}, events)]),
    ):
        found = step(made)
        assert found.response == LOOKED
        assert found.prompt == f"[user]\nWeather?\n\n[assistant]\n{LOOKED}\n\n[tool]\n21 degrees"


COHERE = {"type": "document", "document": {"data": "21 degrees"}}


@pytest.mark.parametrize(("part", "text"), [({"json": {"degrees": 21}}, '{"degrees": 21}'), (COHERE, "21 degrees")])
def test_tool_result_of_json_or_a_document_is_its_value(part: dict[str, Any], text: str) -> None:
    result = [{"toolResult": {"toolUseId": "1", "content": [part]}}]
    found = step(call([USER, {"role": "tool", "content": result}], [{"role": "assistant", "content": SAID}]))
    assert found.prompt == f"[user]\nHow many?\n\n[tool]\n{text}"


@pytest.mark.parametrize(
    ("request_", "response"),
    [
        ({"system": "Be brief.", "messages": [USER]},
         {"id": "1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": SAID}],
          "stop_reason": "end_turn", "usage": {"input_tokens": 3, "output_tokens": 2}}),
        ({"system": [{"text": "Be brief."}], "messages": [{"role": "user", "content": [{"text": "How many?"}]}]},
         {"output": {"message": {"role": "assistant", "content": [{"text": SAID}]}}, "stopReason": "end_turn",
          "usage": {"inputTokens": 3, "outputTokens": 2}}),
        ({"systemInstruction": {"parts": [{"text": "Be brief."}]},
          "contents": [{"role": "user", "parts": [{"text": "How many?"}]}]},
         {"candidates": [{"content": {"role": "model", "parts": [{"text": SAID}]}, "finishReason": "STOP"}],
          "usageMetadata": {"promptTokenCount": 3, "candidatesTokenCount": 2}}),
        ({"config": {"system_instruction": "Be brief."}, "contents": "How many?", "system": None},
         {"candidates": [{"content": {"role": "model", "parts": [{"text": SAID}]}}],
          "usage_metadata": {"prompt_token_count": 3, "candidates_token_count": 2}}),
        ({"instructions": "Be brief.", "input": "How many?"},
         {"id": "1", "output": [{"type": "message", "role": "assistant",
                                 "content": [{"type": "output_text", "text": SAID}]}],
          "usage": {"input_tokens": 3, "output_tokens": 2}}),
        ({"messages": [{"role": "system", "content": "Be brief."}, USER]},
         {"message": {"role": "assistant", "content": SAID}, "done_reason": "stop",
          "usage": {"prompt_tokens": 3, "completion_tokens": 2}}),
    ],
    ids=["anthropic", "bedrock", "gemini", "gemini's client", "responses", "ollama"],
)  # fmt: skip
def test_call_log_of_each_provider_is_read(request_: dict[str, Any], response: dict[str, Any]) -> None:
    found = step(logged(request_, response))
    assert (found.prompt, found.response) == ("[system]\nBe brief.\n\n[user]\nHow many?", SAID)


def test_blocks_of_one_text_are_joined_unchanged() -> None:
    parts = [{"type": "text", "text": "There are "}, {"type": "text", "text": "seven of them."}]
    assert step(call([USER], [{"role": "assistant", "content": parts}])).response == SAID


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({"gen_ai.operation.name": "chat",
          "gen_ai.output.messages": '[{"role": "assistant", "content": [{"type": "hologram"}]}]'},
         "its response is in a form that is not known: hologram"),
        ({"gen_ai.operation.name": "chat", "gen_ai.output.messages": '[{"utterance": "hi"}]'},
         "its response is in a form that is not known: utterance"),
        ({"langsmith.span.kind": "llm", "gen_ai.prompt": '{"messages": []}', "gen_ai.completion": '{"utterances": []}'},
         "its response is in a form that is not known: utterances"),
        *(({"mlflow.spanType": '"LLM"', "mlflow.spanOutputs": json.dumps({key: "Rome", "answer": 1})},
           "its response is in a form that is not known: answer") for key in ("reasoning", "output", "text")),
        ({"openinference.span.kind": "LLM", "input.value": "hi", "output.value": "ho"},
         "it has output.value"),
        ({"mlflow.spanType": '"LLM"', "mlflow.spanInputs": "{}", "mlflow.spanOutputs": "{}"},
         "it has mlflow.spanOutputs"),
    ],
)  # fmt: skip
def test_call_in_an_unknown_form_is_left_out_by_name(attributes: dict[str, Any], names: str) -> None:
    (left,) = convert([Span("t", "a", None, "chat", 1, 2, attributes)]).left_out
    assert left.what == "model call"
    assert names in left.reason


def test_unknown_part_beside_a_text_is_marked_and_counted() -> None:
    content = [{"type": "text", "text": "See:"}, {"type": "hologram", "x": 1}]
    made = call([{"role": "user", "content": content}], [ANSWER])
    assert made.trajectories[0].steps[0].prompt == "[user]\nSee:\n[hologram]"
    assert made.mended == {"messages not read in full: hologram": 1}


def test_gap_in_the_numbers_of_messages_is_counted() -> None:
    """OpenInference skips a message of mistralai's client."""
    prompt = {f"llm.input_messages.{n}.message.{k}": v for n in (0, 1, 3) for k, v in USER.items()}
    made = convert([Span("t", "a", None, "chat", 1, 2, {**prompt, "llm.output_messages.0.message.content": SAID})])
    assert len(made.trajectories[0].steps) == 1
    assert made.mended == {"messages not read in full: a gap in their numbers": 1}
