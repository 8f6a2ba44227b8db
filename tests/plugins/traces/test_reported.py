"""Tests of kinds of traces that public bug reports describe: nothing guessed, nothing doubled, nothing lost."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from creditflow.plugins.traces import ConvertOptions, Span, convert, from_chat_log, from_json, read_spans
from creditflow.plugins.traces.files import LANGSMITH, MLFLOW
from tests.builders import examples
from tests.paths import TRACES
from tests.plugins.traces.test_messages import step

WEATHER, NEWS = ({"name": name, "arguments": {"city": "Bern"}} for name in ("weather", "news"))
BOTH = f"I look both up.\n{json.dumps(WEATHER)}\n{json.dumps(NEWS)}"
ASKED = "Weather and news of Bern?"
OTEL = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
LANGFUSE = {"langfuse.observation.type": "generation"}


def span(attributes: dict[str, Any], id: str = "a", trace: str = "t", at: int = 1, **more: Any) -> Span:
    return Span(trace, id, None, "chat", at, at + 1, attributes, **more)


def parts(role: str, *texts: str, **more: Any) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text} for text in texts], **more}])


def said(prompt: list[dict[str, Any]], response: list[dict[str, Any]]) -> dict[str, Any]:
    """Messages as attributes, in OpenInference's form."""
    flat: dict[str, Any] = {"openinference.span.kind": "LLM"}
    for side, messages in (("input", prompt), ("output", response)):
        for n, message in enumerate(messages):
            flat |= {f"llm.{side}_messages.{n}.message.{key}": value for key, value in message.items()}
    return flat


# ---- texts are not parsed ------------------------------------------------------------------------------------------


def in_mlflow(answer: str) -> list[Span]:
    attributes = {"mlflow.spanType": '"LLM"', "mlflow.spanInputs": '{"prompt": "Go."}'}
    attributes["mlflow.spanOutputs"] = json.dumps(answer)
    raw = {"span_id": "a" * 16, "start_time_unix_nano": 1, "end_time_unix_nano": 2, "attributes": attributes}
    return list(MLFLOW.read([{"info": {"trace_id": "t"}, "data": {"spans": [raw]}}]))


READERS = {
    "langfuse": lambda t: [span({**LANGFUSE, "langfuse.observation.input": "Go.", "langfuse.observation.output": t})],
    "attribute": lambda text: [span({**OTEL, "gen_ai.prompt": "Go.", "gen_ai.completion": text})],
    "mlflow": in_mlflow,
    "chat log": lambda text: from_chat_log([{"request": {"messages": [{"content": "Go."}]}, "response": text}]),
    "openllmetry": lambda t: [span({**OTEL, "gen_ai.prompt.0.content": "Go.", "gen_ai.completion.0.content": t})],
    "openinference": lambda text: [span(said([{"content": "Go."}], [{"content": text}]))],
}
TEXTS = ['{"route": "billing"}', '{"message": "The refund is on its way.", "route": "billing"}', '["Bern", "Rome"]',
         '{"role": "critic", "content": "too long", "score": 2}', '{"text": "hello", "lang": "en"}', '{"route": "bil',
         '[{"type": "circle", "r": 1}]', "[x] done", "data: none", "plain"]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", TEXTS)
def test_json_answer_stays_as_it_is(reader: str, text: str) -> None:
    found = step(convert(READERS[reader](text)))
    assert (found.prompt, found.response) == ("[user]\nGo.", text)


def test_blocks_of_text_as_json_are_the_answer() -> None:
    """OpenLLMetry records an answer of Cohere as its list of blocks."""
    blocks = json.dumps([{"type": "text", "text": text} for text in ("Dry ", "on Friday.")])
    assert step(convert(READERS["openllmetry"](blocks))).response == "Dry on Friday."
    (left,) = convert(READERS["openllmetry"](blocks[:-5])).left_out
    assert left.reason == "it was cut off by a limit of the recorder: content"


@pytest.mark.parametrize(
    "attributes",
    [
        {**OTEL, "gen_ai.input.messages": parts("system", "Be brief. " * 9),
         "gen_ai.output.messages": parts("assistant", "Yes.")},
        {**OTEL, "gen_ai.input.messages": "Go.", "gen_ai.output.messages": parts("assistant", "Take the 8:07. " * 9)},
        {"ai.operationId": "ai.generateText.doGenerate", "ai.response.text": "I look.",
         "ai.response.toolCalls": json.dumps([{"toolCallId": "1", "toolName": "look", "input": "x" * 99}])},
        {**LANGFUSE, "langfuse.observation.output": json.dumps({"role": "assistant", "content": "x" * 99})},
    ],
)  # fmt: skip
def test_messages_cut_off_are_left_out_and_name_no_task(attributes: dict[str, Any]) -> None:
    cut = {key: value[:60] for key, value in attributes.items()}
    made = convert([span(cut)])
    assert made.trajectories == []
    assert made.left_out[0].reason.startswith("it was cut off by a limit of the recorder: ")
    later = {**OTEL, "gen_ai.input.messages": "Check it.", "gen_ai.completion": "Right."}
    first, second = convert(
        [span(a, id, t, at) for t in "xy" for a, id, at in ((cut, "a", 1), (later, "b", 3))]
    ).trajectories
    assert ("gen_ai.input.messages" in cut and cut["gen_ai.input.messages"] == "Go.") == (first.uid == second.uid)


@pytest.mark.parametrize("count", ["droppedAttributesCount", "droppedEventsCount"])
def test_call_with_dropped_attributes_is_left_out(count: str) -> None:
    content = {"key": "llm.output_messages.0.message.content", "value": {"stringValue": "Noon."}}
    raw = {"traceId": "t", "spanId": "a", "attributes": [content], "events": [{"name": "gen_ai.choice"}], count: 4}
    made = convert(from_json([{"resourceSpans": [{"scopeSpans": [{"spans": [raw]}]}]}]))
    assert [left.reason.partition(":")[0] for left in made.left_out] == ["it was cut off by a limit of the recorder"]


@pytest.mark.parametrize(("kind", "agent"), [("agent", "chat"), ("span", "agent"), ("generation", "agent")])
def test_messages_of_another_kind_are_not_those_of_a_call(kind: str, agent: str) -> None:
    own = {"langfuse.observation.type": kind, "langfuse.observation.output": "returned by a function"}
    found = step(convert([span({**own, **said([{"content": "Go."}], [{"content": "Noon."}])})]))
    answer = "returned by a function" if kind == "generation" else "Noon."
    assert (found.agent, found.prompt, found.response) == (agent, "[user]\nGo.", answer)


# ---- messages ------------------------------------------------------------------------------------------------------


def test_litellm_calls_beside_the_text_are_one_response() -> None:
    calls = {"gen_ai.input.messages": "Go."}
    for n, call in enumerate((WEATHER, NEWS)):
        calls[f"gen_ai.completion.{n}.function_call.name"] = call["name"]
        calls[f"gen_ai.completion.{n}.function_call.arguments"] = json.dumps(call["arguments"])
    text = {"gen_ai.output.messages": parts("assistant", "I look both up.", finish_reason="tool_calls")}
    assert step(convert([span({**OTEL, **text, **calls})])).response == BOTH
    before = {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.finish_reason": "tool_calls"}
    assert step(convert([span({**OTEL, **before, **calls})])).response == BOTH.partition("\n")[2]


def of_langchain(name: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": "constructor", "lc": 1, "id": ["messages", name], "kwargs": {"type": kind, "content": text}}


@pytest.mark.parametrize(("name", "kind"), [("AIMessage", "ai"), ("AIMessageChunk", "AIMessageChunk")])
def test_streamed_message_of_langchain_is_the_assistants(name: str, kind: str) -> None:
    reply = of_langchain(name, kind, "Bern is the capital.")
    asked = of_langchain("HumanMessage", "human", "Capital?")
    run = {"id": "1", "run_type": "llm", "inputs": {"messages": [[asked, reply]]},
           "outputs": {"generations": [[{"text": "Bern is the capital.", "message": reply}]]}}  # fmt: skip
    (found,) = convert(list(LANGSMITH.read([run]))).trajectories[0].steps
    assert found.prompt == "[user]\nCapital?\n\n[assistant]\nBern is the capital."
    assert found.response == "Bern is the capital."


ITEMS = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Two are needed."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look both up."}]},
    *({"type": "function_call", "call_id": str(n), "name": call["name"], "arguments": json.dumps(call["arguments"])}
      for n, call in enumerate((WEATHER, NEWS))),
]  # fmt: skip


def test_items_of_one_response_are_one_message() -> None:
    asked = {"role": "user", "content": ASKED}
    results = [{"type": "function_call_output", "call_id": str(n), "output": "sun"} for n in range(2)]
    exchanges = [([asked], ITEMS), ("Else?", "Another."), ([asked, *ITEMS, *results], "Sun.")]
    log = [{"request": {"input": read}, "response": {"output": wrote}, "session_id": "s"} for read, wrote in exchanges]
    items = [{"role": "assistant", "content": "I look both up."}] + [
        {"role": "assistant", "tool_calls.0.tool_call.function.name": call["name"],
         "tool_calls.0.tool_call.function.arguments": json.dumps(call["arguments"])} for call in (WEATHER, NEWS)
    ]  # fmt: skip
    spans = [
        span(said(read, wrote), str(at), at=2 * at + 1)
        for at, (read, wrote) in enumerate([
            ([asked], items), ([asked], [{"content": "Another."}]),
            ([asked, *items, {"role": "tool", "content": "sun"}], [{"content": "Sun."}]),
        ])
    ]  # fmt: skip
    for records, thought in ((from_chat_log(log), "Two are needed.\n"), (spans, "")):
        (trajectory,) = convert(records).trajectories
        assert trajectory.steps[0].response == thought + BOTH
        assert f"[assistant]\n{thought}{BOTH}\n\n[tool]\nsun" in trajectory.steps[2].prompt
        assert (trajectory.steps[2].parents, trajectory.steps[2].info["parents_by"]) == ((0,), "text")


TEXT = {"type": "text", "content": "I look both up."}


@pytest.mark.parametrize("parts", [(TEXT, WEATHER), (WEATHER, NEWS), (WEATHER, WEATHER), (TEXT, TEXT)])
def test_items_that_each_have_an_end_are_one_response(parts: tuple[dict[str, Any], ...]) -> None:
    end = "completed" if WEATHER not in parts else "stop"
    items = [{"role": "assistant", "parts": [{"type": "tool_call", **part}], "finish_reason": end} for part in parts]
    made = convert([span({**OTEL, "gen_ai.input.messages": "Go.", "gen_ai.output.messages": json.dumps(items)})])
    assert step(made).response == "\n".join(part.get("content") or json.dumps(part) for part in parts)


@pytest.mark.parametrize("key", ["function_call", "functionResponse", "file_data", "executable_code", "toolUse", "x"])
def test_key_without_a_value_is_absent(key: str) -> None:
    asked, said = ({"role": role, "parts": [{"text": "So.", key: None}]} for role in ("user", "model"))
    response = {"candidates": [{"content": {**said, "function_call": {}}}]}
    found = step(convert(from_chat_log([{"request": {"contents": [asked]}, "response": response}])))
    assert (found.prompt, found.response) == ("[user]\nSo.", "So.")


@pytest.mark.parametrize("form", ["request", "messages"])
def test_langfuse_items_and_tool_definitions_are_read(form: str) -> None:
    definition = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    asked = [{"role": "user", "content": ASKED}, {"role": "tool", "content": definition}]
    prompt = {"input": asked[:1], "tools": [definition]} if form == "request" else asked
    attributes = {
        "langfuse.observation.input": json.dumps(prompt),
        "langfuse.observation.output": json.dumps(ITEMS[1:]),
    }
    found = step(convert([span({**LANGFUSE, **attributes})]))
    assert (found.prompt, found.response) == (f"[user]\n{ASKED}", BOTH)


def test_call_in_two_forms_counts_once_and_equal_results_stay() -> None:
    flat: dict[str, Any] = {"role": "assistant", "contents.0.message_content.type": "text",
                            "contents.0.message_content.text": "I look both up."}  # fmt: skip
    for n, call in enumerate((WEATHER, NEWS)):
        of_call = {"id": f"c{n}", "function.name": call["name"], "function.arguments": json.dumps(call["arguments"])}
        for at in (f"contents.{n + 1}", f"tool_calls.{n}"):
            flat |= {f"{at}.tool_call.{key}": value for key, value in of_call.items()}
        flat[f"contents.{n + 1}.message_content.type"] = "tool_use"
    assert step(convert([span(said([{"content": "?"}], [flat]))])).response == BOTH
    results = [{"type": "tool_result", "tool_use_id": str(n), "content": "ok"} for n in range(3)]
    log = [{"request": {"messages": [{"role": "user", "content": results}]}, "response": {"content": "Done."}}]
    assert step(convert(from_chat_log(log))).prompt == "[user]\nok\nok\nok"


# ---- spans ---------------------------------------------------------------------------------------------------------

PLAIN = {**OTEL, "gen_ai.input.messages": parts("user", ASKED), "gen_ai.output.messages": parts("assistant", "Sun.")}
OTHER = said([{"role": "user", "content": ASKED}], [{"content": "Sun. "}])


def test_call_of_two_integrations_side_by_side_is_one_step() -> None:
    fuller = {**OTHER, "response_token_ids": [1, 2]}
    made = convert([span(PLAIN, "a"), span(fuller, "b")])
    assert [step.response_ids for step in made.trajectories[0].steps] == [(1, 2)]
    assert [left.reason for left in made.left_out] == ["the same call as span b"]
    assert len(convert([span(PLAIN, "a"), span(PLAIN, "b")]).trajectories[0].steps) == 2  # sampled twice
    assert len(convert([span(PLAIN, "a"), span(OTHER, "b", at=5)]).trajectories[0].steps) == 2
    twice = convert([span({**PLAIN, "gen_ai.response.id": "r"}, trace=trace) for trace in "xy"])
    assert twice.mended == {"a call that is also in another trajectory": 1}


def test_attribute_of_some_spans_holds_for_the_others() -> None:
    some = [span({**PLAIN, "session": "s", "gen_ai.agent.name": "writer"}, "a"), span(PLAIN, "b", at=3)]
    (trajectory,) = convert(some, ConvertOptions(trajectory_by="session")).trajectories
    assert (trajectory.id, [step.agent for step in trajectory.steps]) == ("s", ["writer", "writer"])
    some.append(span({**PLAIN, "session": "z", "gen_ai.agent.name": "critic"}, "c", at=5))
    assert sorted(t.id for t in convert(some, ConvertOptions(trajectory_by="session")).trajectories) == ["s", "t", "z"]
    assert [step.agent for step in convert(some).trajectories[0].steps] == ["writer", "agent", "critic"]


MARKS = {"gen_ai.operation.name": "chat", "openinference.span.kind": "LLM", "langsmith.span.kind": "llm",
         "mlflow.spanType": "CHAT_MODEL", "langfuse.observation.type": "generation"}  # fmt: skip
RECORDED = {path.stem: read_spans(path) for path in sorted(TRACES.rglob("*.json"))}


@examples(150)
@given(st.sampled_from(sorted(RECORDED)), st.integers(30, 600), st.booleans())
@example("langgraph_twice", 119, False)  # only the second record of a call is whole
def test_steps_and_left_out_account_for_every_call(name: str, limit: int, twice: bool) -> None:
    """Under any limit on the length of values, and if spans are exported twice, no response becomes another one."""
    alone = [trajectory for span in RECORDED[name] for trajectory in convert([span]).trajectories]
    whole = {step.info["span_id"]: step.response for trajectory in alone for step in trajectory.steps}
    cut = [
        replace(span, attributes={key: v[:limit] if isinstance(v, str) else v for key, v in span.attributes.items()})
        for span in RECORDED[name]
    ]
    made = convert(cut * (1 + twice))
    steps = {step.info["span_id"]: step.response for trajectory in made.trajectories for step in trajectory.steps}
    accounted = [*steps, *(left.span for left in made.left_out if left.what == "model call")]
    called = {s.id for s in cut for key, mark in MARKS.items() if str(s.attributes.get(key)).strip('"') == mark}
    assert len(accounted) == len(set(accounted))
    assert called <= set(accounted)
    assert all(id in whole and whole[id].startswith(response) for id, response in steps.items())
