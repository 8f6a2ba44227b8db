"""Tests with mutated spans: only the documented error is raised, and each call and reward is used or listed."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import TrajectoryBatch
from creditflow.data.table import table_of
from creditflow.errors import DataError
from creditflow.plugins.traces import Span, convert, from_chat_log, from_json, from_otlp_json
from creditflow.plugins.traces.conventions.base import ModelCall
from creditflow.plugins.traces.events import with_calls_apart
from creditflow.plugins.traces.span_reading import read_span
from tests.builders import examples
from tests.paths import TRACES

RECORDED = [json.loads(path.read_text()) for path in sorted((TRACES).glob("*.json"))]
ODD: list[Any] = [
    *[None, "", "x", 0, -1, 1 << 70, 10**400, float("nan"), float("inf"), True, [], {}, [[]], [None], {"a": None}],
    *["[", '[{"role": 1}]', "\ud800", "\x00", {"stringValue": None}, {"kvlistValue": {"values": [{}]}}, b"\xff"],
    *["9" * 5000, "[" * 3000, '{"parts": 7}', {"intValue": "x"}],
]


def odd(draw: random.Random) -> Any:
    """A copy of a random odd value, so that later mutations do not change `ODD`."""
    return deepcopy(draw.choice(ODD))


Mutation = Callable[[random.Random, list[dict[str, Any]]], None]


def all_of(messages: list[Any]) -> list[dict[str, Any]]:
    return [s for m in messages for r in m["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]]


def logs_of(messages: list[Any]) -> list[dict[str, Any]]:
    return [log for m in messages for r in m.get("resourceLogs", ()) for s in r["scopeLogs"] for log in s["logRecords"]]


def _drop_a_field(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    span = draw.choice(spans)
    if span:
        span.pop(draw.choice(list(span)))


def _odd_field(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    span = draw.choice(spans)
    span[draw.choice([*span, "attributes", "links", "events", "status", "unknown"])] = odd(draw)


def _odd_attribute(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    attributes = draw.choice(spans).get("attributes")
    if isinstance(attributes, list) and attributes and isinstance(pair := draw.choice(attributes), dict):
        pair[draw.choice(["key", "value"])] = draw.choice([odd(draw), {"stringValue": odd(draw)}])


def _odd_time(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    span, key = draw.choice(spans), draw.choice(["startTimeUnixNano", "endTimeUnixNano"])
    try:
        span[key] = str(int(span[key]) + draw.randrange(-(10**9), 10**9))
    except (KeyError, TypeError, ValueError, OverflowError):
        span[key] = odd(draw)


def _other_parent(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    draw.choice(spans)["parentSpanId"] = draw.choice(spans).get("spanId")  # cycles, overlapping siblings, a second root


def _same_id(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    draw.choice(spans)["spanId"] = draw.choice(spans).get("spanId")


def _twice(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    draw.choice(spans).update(deepcopy(draw.choice(spans)))


def _attribute_of_another(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    one, other = draw.choice(spans).get("attributes"), draw.choice(spans).get("attributes")
    if isinstance(one, list) and isinstance(other, list) and other:
        one.append(deepcopy(draw.choice(other)))


def _other_trace(draw: random.Random, spans: list[dict[str, Any]]) -> None:
    draw.choice(spans)["traceId"] = draw.choice(["a" * 32, "b" * 32, None, 7])


MUTATIONS: list[Mutation] = [_drop_a_field, _odd_field, _odd_attribute, _odd_time, _other_parent, _same_id, _twice,
                             _attribute_of_another, _other_trace]  # fmt: skip


def mutated(seed: int) -> list[Any]:
    draw = random.Random(seed)
    messages = deepcopy(draw.choices(RECORDED, k=draw.choice([1, 1, 2])))
    spans, logs = all_of(messages), logs_of(messages)
    if draw.random() < 0.3:
        draw.shuffle(spans)
        draw.shuffle(logs)
        messages = [{"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}]}]
        messages.append({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    for _ in range(draw.choice([1, 2, 4, 16, 64])):
        draw.choice(MUTATIONS)(draw, spans + logs)
    return messages


SAYS_CALL = [("gen_ai.operation.name", "chat"), ("openinference.span.kind", "LLM"), ("llm.request.type", "chat")]
GIVES = ("agentlightning.", "reward", "agentops.", "openinference.span.kind")


def calls_by_their_word(spans: list[Span]) -> list[str]:
    """Ids of the spans marked as calls by `SAYS_CALL`, without possible reward spans, which take precedence."""
    return [
        span.id
        for span in spans
        if any(span.attributes.get(key) == value for key, value in SAYS_CALL)
        and span.attributes.get("gen_ai.operation.name", "chat") == "chat"
        and not any(key.startswith(GIVES) and value != "LLM" for key, value in span.attributes.items())
    ]


def expect_nothing_lost(read: Callable[[list[Any]], list[Span]], records: list[Any]) -> None:
    """Convert records that are read without a DataError, and check the result against counts made from the spans."""
    try:
        spans = read(records)
    except DataError:
        return
    converted = convert(spans)
    steps = [step for trajectory in converted.trajectories for step in trajectory.steps]
    ids = Counter(step.info["span_id"] for step in steps)
    ids += Counter(left.span for left in converted.left_out if left.what == "model call")
    assert Counter(calls_by_their_word(spans)) <= ids
    meanings = [read_span(span) for span in with_calls_apart(spans)]
    calls = sum(isinstance(meaning, ModelCall) for meaning, _ in meanings)
    assert calls == len(steps) + sum(left.what == "model call" for left in converted.left_out)
    numbers = [value for _, rewards in meanings for reward in rewards for value in reward.values]
    used = sum(len(step.scores) for step in steps)
    used += sum((t.outcome is not None) + len(t.info.get("rewards", {})) for t in converted.trajectories)
    assert len(numbers) == used + sum(left.what == "reward" for left in converted.left_out)
    assert all(left.reason for left in converted.left_out)
    assert table_of(TrajectoryBatch.from_trajectories(converted.trajectories)).num_rows >= 0  # it can be written


@examples(200)
@given(st.integers(0, 2**40))
def test_mutated_spans_lose_nothing(seed: int) -> None:
    expect_nothing_lost(from_json, mutated(seed))


LOG: list[Any] = [
    {"session_id": "s", "model": "m", "reward": {"right": 1.0}, "messages": [
        {"role": "system", "content": "You are a writer."}, {"role": "user", "content": "Plan it."},
        {"role": "assistant", "content": "First add, then halve.", "name": "writer", "reward": 0.5},
        {"role": "tool", "tool_call_id": "x", "content": "7"}, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}]},
    {"trajectory_id": "s", "agent": "b", "request": {"model": "m", "temperature": 0.5, "messages": [
        {"role": "user", "content": "First add, then halve."}]}, "response": {"id": "1", "choices": [
        {"message": {"content": "Done it all."}, "finish_reason": "stop", "token_ids": [1, 2],
         "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}, {"message": {"content": "Other"}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, "reward": 0.25},
]  # fmt: skip
LIGHTNING: list[Any] = [
    {"rollout_id": "r", "attempt_id": "a", "trace_id": "0" * 31 + "1", "span_id": f"s{at}", "parent_id": parent,
     "name": name, "status": {"status_code": "OK"}, "events": [], "links": [], "start_time": 1e9 + at,
     "end_time": 1e9 + at + 0.5, "attributes": attributes, "resource": {"attributes": {}}}
    for at, (name, parent, attributes) in enumerate([
        ("agent", None, {"agent.name": "writer"}),
        ("call", "s0", {"gen_ai.prompt.0.content": "Go", "gen_ai.completion.0.content": "I went there",
                        "gen_ai.response.id": "1", "response_token_ids": [1, 2]}),
        ("agentlightning.annotation", "s0", {
            "agentlightning.reward.0.name": "right", "agentlightning.reward.0.value": 1,
            "agentlightning.link.0.key_match": "gen_ai.response.id", "agentlightning.link.0.value_match": "1"}),
        ("call", None, {"gen_ai.prompt.0.content": "I went there", "gen_ai.completion.0.content": "So"}),
    ])
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value, as its container and key."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@examples(200)
@given(st.sampled_from([LOG, LIGHTNING]), st.integers(0, 2**40))
def test_mutated_chat_logs_and_lightning_spans_convert(written: list[Any], seed: int) -> None:
    draw = random.Random(seed)
    lines = deepcopy(written)
    for _ in range(draw.choice([1, 2, 4, 16])):
        holder, key = draw.choice(list(places(lines)))
        other, at = draw.choice(list(places(lines)))
        holder[key] = draw.choice([odd(draw), deepcopy(other[at])])
    expect_nothing_lost(from_chat_log if written is LOG else from_json, lines)


def test_trace_of_depth_10_000_converts() -> None:
    spans = [
        Span("t", str(at), str(at - 1) if at else None, "x", at, 10**9 - at,
             {"gen_ai.operation.name": "chat", "gen_ai.completion.0.content": f"response {at}"})
        for at in range(10_000)
    ]  # fmt: skip
    assert len(convert(spans).trajectories[0].steps) == 10_000


def test_too_deeply_nested_values_are_ignored() -> None:
    value: Any = {"stringValue": "x"}
    for _ in range(5000):
        value = {"arrayValue": {"values": [value]}}
    attributes = [{"key": "deep", "value": value}, {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}]
    spans = from_otlp_json(
        [{"resourceSpans": [{"scopeSpans": [{"spans": [{"spanId": "1", "attributes": attributes}]}]}]}]
    )
    assert spans[0].attributes["gen_ai.operation.name"] == "chat"
    assert [left.what for left in convert(spans).left_out] == ["model call"]
