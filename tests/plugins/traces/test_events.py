"""Tests of model calls recorded only in events, in any place and under any span id."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Step
from creditflow.plugins.traces import Converted, convert, from_json
from creditflow.plugins.traces.spans import Span, SpanEvent

DETAILS = "gen_ai.client.inference.operation.details"
CHAT, HANDLER, AGENT = "c" * 16, "d" * 16, "e" * 16


def value(raw: Any) -> dict[str, Any]:
    if isinstance(raw, str):
        return {"stringValue": raw}
    if isinstance(raw, float):
        return {"doubleValue": raw}
    if isinstance(raw, list):
        return {"arrayValue": {"values": [value(one) for one in raw]}}
    return {"kvlistValue": {"values": attributes(raw)}}


def attributes(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value(one)} for key, one in raw.items()]


def span(id: str, parent: str = "", **said: str) -> dict[str, Any]:
    named = attributes({key.replace("_kind", ".span.kind").replace("__", "."): one for key, one in said.items()})
    return {"traceId": "a" * 32, "spanId": id, "parentSpanId": parent, "name": f"span {id[0]}", "attributes": named,
            "startTimeUnixNano": "1", "endTimeUnixNano": "1000000"}  # fmt: skip


SPANS = [
    span(AGENT, openinference_kind="AGENT", agent__name="writer"),
    span(HANDLER, AGENT),
    span(CHAT, AGENT, gen_ai__operation__name="chat"),
]


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def whole(number: int, span_id: str, trace: str = "a" * 32) -> list[dict[str, Any]]:
    """A call in one log record, by the current conventions."""
    said = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": f"id {number}",
        "gen_ai.input.messages": [message("user", f"question {number}")],
        "gen_ai.output.messages": [message("assistant", f"answer {number}")],
    }
    place = {"traceId": trace, "spanId": span_id, "timeUnixNano": str(10 + 10 * number)}
    return [{**place, "eventName": DETAILS, "attributes": attributes(said)}]


def spoken(number: int, span_id: str, trace: str = "a" * 32) -> list[dict[str, Any]]:
    """A call with one log record per message, by the previous conventions."""
    said = {"gen_ai.user.message": {"content": f"question {number}"},
            "gen_ai.choice": {"message": {"content": f"answer {number}"}}}  # fmt: skip
    return [
        {"traceId": trace, "spanId": span_id, "timeUnixNano": str(10 + 10 * number + place), "eventName": name,
         "body": value(body)}
        for place, (name, body) in enumerate(said.items())
    ]  # fmt: skip


def read(logs: list[dict[str, Any]], spans: list[dict[str, Any]] = SPANS) -> Converted:
    records = {"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}]}
    return convert(from_json([records, {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}]))


def steps(made: Converted) -> list[Step]:
    return [step for trajectory in made.trajectories for step in trajectory.steps]


@given(
    st.lists(st.sampled_from([CHAT, HANDLER, AGENT, "f" * 16, "0" * 16, ""]), min_size=1, max_size=8),
    st.sampled_from(["a" * 32, "b" * 32, "0" * 32]),
    st.integers(0, 99),
)
def test_each_recorded_call_is_a_step_with_its_prompt(places: list[str], trace: str, seed: int) -> None:
    logs = [log for number, place in enumerate(places) for log in whole(number, place, trace)]
    logs += random.Random(seed).sample(logs, 1)  # written twice
    random.Random(seed).shuffle(logs)
    made = read(logs)
    assert sorted((step.response, step.prompt) for step in steps(made)) == [
        (f"answer {number}", f"[user]\nquestion {number}") for number in range(len(places))
    ]
    known = ("neither messages nor a response were recorded in a form that is known", "the same call as span")
    assert all(left.reason.startswith(known) for left in made.left_out)


SYSTEM = {"gen_ai.system_instructions": [{"type": "text", "content": "Look."}]}
IN = {"gen_ai.input.messages": [message("user", "why?")]}
OUT = {"gen_ai.output.messages": [message("assistant", "So.")]}
MODEL = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
CUT = {"gen_ai.output.messages": '[{"role"'}


def recorded(own: dict[str, Any], *parts: dict[str, Any]) -> Converted:
    return convert([Span("t", "a", None, "x", 1, 9, own, [SpanEvent(DETAILS, part) for part in parts])])


@pytest.mark.parametrize(
    ("own", "parts"),
    [(MODEL, [SYSTEM, IN, OUT]), (MODEL | SYSTEM, [IN, OUT]), (MODEL | SYSTEM | IN | CUT, [OUT]),
     ({}, [SYSTEM, IN, OUT, MODEL])],
)  # fmt: skip
def test_records_of_one_span_are_parts_of_a_call(own: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Strands writes system instructions, prompt and response in one record each."""
    made = recorded(own, *parts)
    (step,) = steps(made)
    assert (step.policy, step.prompt, step.response) == ("m", "[system]\nLook.\n\n[user]\nwhy?", "So.")
    assert (made.left_out, dict(made.mended)) == ([], {})


@pytest.mark.parametrize("kind", ["invoke_agent", "execute_tool", "execute_event_loop_cycle"])
def test_records_of_an_agent_or_a_tool_are_not_calls(kind: str) -> None:
    made = recorded({"gen_ai.operation.name": kind, **IN}, SYSTEM, IN, OUT, IN | OUT)
    assert (steps(made), made.left_out) == ([], [])
    assert made.passed_over[f"{DETAILS} on a span of no call"] == 4


@pytest.mark.parametrize("kind", [MODEL, {}])
def test_parts_of_several_calls_are_listed(kind: dict[str, Any]) -> None:
    made = recorded(kind, IN, OUT, IN, OUT)
    reasons = [left.reason for left in made.left_out if left.what == "record"]
    assert (steps(made), reasons) == ([], ["which call of its span it belongs to was not recorded"] * 4)


@given(st.lists(st.sampled_from([HANDLER, "f" * 16, "9" * 16]), min_size=1, max_size=6), st.integers(0, 99))
def test_messages_of_several_calls_in_a_span_are_listed(places: list[str], seed: int) -> None:
    logs = [log for number, place in enumerate(places) for log in spoken(number, place)]
    random.Random(seed).shuffle(logs)
    made = read(logs)
    assert sorted((step.response, step.prompt) for step in steps(made)) == [
        (f"answer {n}", f"[user]\nquestion {n}") for n, place in enumerate(places) if places.count(place) == 1
    ]
    lost = [left for left in made.left_out if left.reason == "which call of its span it belongs to was not recorded"]
    assert len(lost) == 2 * sum(places.count(place) > 1 for place in places)


@pytest.mark.parametrize("call", [whole, spoken])
def test_calls_inside_an_agent_span_belong_to_it(call: Any) -> None:
    made = read([*call(0, CHAT), *call(1, HANDLER), *spoken(2, AGENT)])  # the last one only repeats
    assert [(step.agent, step.response) for step in steps(made)] == [("writer", "answer 0"), ("writer", "answer 1")]
    assert made.left_out == []


def test_failed_call_with_only_a_prompt_is_listed() -> None:
    (left,) = read(spoken(0, "f" * 16)[:1], []).left_out
    assert (left.what, left.reason) == ("model call", "no response was recorded")


def test_span_with_several_calls_keeps_its_rewards() -> None:
    events = [
        SpanEvent(DETAILS, IN | {"gen_ai.output.messages": [message("assistant", f"answer {k}")]}) for k in (0, 1)
    ]
    score = {"gen_ai.evaluation.name": "good", "gen_ai.evaluation.score.value": 0.5}
    events.insert(1, SpanEvent("gen_ai.evaluation.result", score))
    (trajectory,) = convert([Span("t", "s", None, "handler", 1, 9, {}, events)]).trajectories
    assert [step.response for step in trajectory.steps] == ["answer 0", "answer 1"]
    assert trajectory.outcome is not None
    assert trajectory.outcome.value == 0.5


def test_records_attach_to_agent_lightning_spans_by_id() -> None:
    span = {"span_id": CHAT, "trace_id": "a" * 32, "rollout_id": "r", "attempt_id": "1", "name": "chat",
            "attributes": {"gen_ai.operation.name": "chat"}}  # fmt: skip
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": whole(0, CHAT)}]}]}
    (trajectory,) = convert(from_json([span, logs])).trajectories
    assert (trajectory.id, trajectory.answer) == ("r/1", "answer 0")


def test_record_of_another_trace_with_one_id_is_separate() -> None:
    made = read([*whole(0, CHAT), *whole(1, CHAT, "b" * 32)])
    assert sorted((t.id[0], t.answer) for t in made.trajectories) == [("a", "answer 0"), ("b", "answer 1")]
