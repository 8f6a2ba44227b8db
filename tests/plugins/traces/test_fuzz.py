"""Tests with damaged records: only the documented error is raised, and each call and reward is used or listed."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from creditflow.data import TrajectoryBatch
from creditflow.data.table import table_of
from creditflow.errors import DataError
from creditflow.plugins.traces import Span, convert, from_json, read_spans
from creditflow.plugins.traces.conventions.base import ModelCall
from creditflow.plugins.traces.events import with_calls_apart
from creditflow.plugins.traces.span_reading import read_span
from creditflow.plugins.traces.spans import distinct
from tests.builders import examples
from tests.paths import TRACES

ODD: list[Any] = [
    *[None, "", "x", 0, -1, 1 << 70, 10**400, float("nan"), float("inf"), True, [], {}, [[]], [None], {"a": None}],
    *["[", '[{"role": 1}]', "\ud800", "\x00", {"stringValue": None}, {"kvlistValue": {"values": [{}]}}],
    *["9" * 5000, "[" * 3000, '{"parts": 7}', {"intValue": "x"}],
]
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


SOURCES = {path.stem: json.loads(path.read_text()) for path in sorted(TRACES.rglob("*.json"))}
SOURCES |= {"chat log": LOG, "agent lightning": LIGHTNING}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value, as its container and key."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def damaged(name: str, draw: random.Random) -> Any:
    """A copy of a source with odd values, renamed keys, and values of other places, mostly those of the same key."""
    records = deepcopy(SOURCES[name])
    everywhere = list(places(records))
    for _ in range(draw.choice([1, 2, 4, 16])):
        holder, key = draw.choice(everywhere)
        others = [place for place in everywhere if place[1] == key] if draw.random() < 0.7 else everywhere
        other, at = draw.choice(others)
        with suppress(KeyError, IndexError):  # an earlier change has removed it
            holder[key] = deepcopy(draw.choice([draw.choice(ODD), other[at], other[at]]))
            if draw.random() < 0.2:
                value = holder.pop(key)
                if isinstance(holder, dict) and draw.random() < 0.5:
                    holder[f"{key}_x"] = value
    return records


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


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "damaged.json"


@examples(1500)
@given(st.sampled_from(sorted(SOURCES)), st.integers(0, 2**40))
@example("chat log", 5983)  # a reward in a trajectory without an id
def test_damaged_records_lose_nothing(file: Path, name: str, seed: int) -> None:
    """Compare with counts made from the spans."""
    file.write_text(json.dumps(damaged(name, random.Random(seed))))
    try:
        spans = distinct(read_spans(file), Counter())
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
    spans = from_json([{"resourceSpans": [{"scopeSpans": [{"spans": [{"spanId": "1", "attributes": attributes}]}]}]}])
    assert spans[0].attributes["gen_ai.operation.name"] == "chat"
    assert [left.what for left in convert(spans).left_out] == ["model call"]
