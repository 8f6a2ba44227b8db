"""Tests with mutated spans: only the documented error is raised, and each call and reward is used or listed."""

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import TrajectoryBatch
from creditflow.data.table import table_of
from creditflow.errors import DataError
from creditflow.plugins.traces import Converted, Span, convert, from_chat_log, from_json, from_otlp_json
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


def nothing_is_lost(spans: list[Span], made: Converted) -> None:
    """Check the result against counts made from the spans alone."""
    told = Counter(step.info["span_id"] for trajectory in made.trajectories for step in trajectory.steps)
    told += Counter(left.span for left in made.left_out if left.what == "model call")
    assert Counter(calls_by_their_word(spans)) <= told
    read = [read_span(span) for span in with_calls_apart(spans)]
    steps = [step for trajectory in made.trajectories for step in trajectory.steps]
    calls = sum(isinstance(meaning, ModelCall) for meaning, _ in read)
    assert calls == len(steps) + sum(left.what == "model call" for left in made.left_out)
    numbers = [value for _, rewards in read for reward in rewards for value in reward.values]
    used = sum(len(step.scores) for step in steps)
    used += sum((t.outcome is not None) + len(t.info.get("rewards", {})) for t in made.trajectories)
    assert len(numbers) == used + sum(left.what == "reward" for left in made.left_out)
    assert all(left.reason for left in made.left_out)


def survives(seed: int) -> None:
    try:
        spans = from_json(mutated(seed))
    except DataError:
        return
    made = convert(spans)
    nothing_is_lost(spans, made)
    assert table_of(TrajectoryBatch.from_trajectories(made.trajectories)).num_rows >= 0  # it can be written


@examples(200)
@given(st.integers(0, 2**40))
def test_mutated_spans_lose_nothing(seed: int) -> None:
    survives(seed)


@pytest.mark.slow
def test_many_mutated_span_sets_lose_nothing() -> None:
    first = int(os.environ.get("FUZZ_FROM", "0"))
    for seed in range(first, first + 100_000):
        try:
            survives(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


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


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as its container and key."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(inner, dict | list):
            _places(inner, found)
    return found


@examples(200)
@given(st.sampled_from([LOG, LIGHTNING]), st.integers(0, 2**40))
def test_mutated_chat_logs_and_lightning_spans_convert(written: list[Any], seed: int) -> None:
    draw = random.Random(seed)
    lines = deepcopy(written)
    for _ in range(draw.choice([1, 2, 4, 16])):
        holder, key = draw.choice(_places(lines, []))
        other, at = draw.choice(_places(lines, []))
        holder[key] = draw.choice([odd(draw), deepcopy(other[at])])
    try:
        spans = from_chat_log(lines) if written is LOG else from_json(lines)
    except DataError:
        return
    made = convert(spans)
    nothing_is_lost(spans, made)
    assert table_of(TrajectoryBatch.from_trajectories(made.trajectories)).num_rows >= 0


def chain(depth: int) -> list[Span]:
    return [
        Span("t", str(at), str(at - 1) if at else None, "x", at, 10**9 - at,
             {"gen_ai.operation.name": "chat", "gen_ai.completion.0.content": f"response {at}"})
        for at in range(depth)
    ]  # fmt: skip


def test_trace_of_depth_10_000_converts() -> None:
    made = convert(chain(10_000))
    assert len(made.trajectories[0].steps) == 10_000
    nothing_is_lost(chain(10_000), made)


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
