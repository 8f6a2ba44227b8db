"""Tests that every span, record and evaluation is imported or listed."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from creditflow.errors import DataError
from creditflow.plugins.traces import Converted, Span, convert, from_json
from creditflow.plugins.traces.spans import SpanEvent
from tests.paths import TRACES
from tests.plugins.traces.test_events import attributes, read, value

RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted((TRACES).glob("*.json"))}
GIVES = ("agentlightning.reward.", "gen_ai.evaluation.", "creditflow.rewards.")


def all_of(messages: list[Any]) -> list[dict[str, Any]]:
    return [s for m in messages for r in m["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]]


def logs_of(messages: list[Any]) -> list[dict[str, Any]]:
    return [log for m in messages for r in m.get("resourceLogs", ()) for s in r["scopeLogs"] for log in s["logRecords"]]


def keys_of(record: dict[str, Any]) -> list[str]:
    return [pair["key"] for pair in record.get("attributes", ())]


def is_call(span: dict[str, Any]) -> bool:
    values = {pair["key"]: pair["value"].get("stringValue") for pair in span.get("attributes", ())}
    return values.get("gen_ai.operation.name") == "chat" or values.get("openinference.span.kind") == "LLM"


def counts(made: Converted) -> tuple[set[str], int]:
    """Ids of the spans with an imported or listed call, and the number of imported or listed rewards."""
    steps = [step for trajectory in made.trajectories for step in trajectory.steps]
    calls = {step.info["span_id"] for step in steps} | {one.span for one in made.left_out if one.what == "model call"}
    rewards = sum(len(step.scores) for step in steps) + sum(one.what == "reward" for one in made.left_out)
    rewards += sum(
        (trajectory.outcome is not None) + len(trajectory.info.get("rewards", ())) for trajectory in made.trajectories
    )
    return calls, rewards


def renamed(recorded: dict[str, Any], old: str) -> dict[str, Any]:
    """A copy with attribute `old`, and all attributes that begin with `old.`, renamed."""
    copy = deepcopy(recorded)
    for record in (*all_of([copy]), *logs_of([copy])):
        for pair in record.get("attributes", ()):
            if pair["key"] == old or pair["key"].startswith(f"{old}."):
                pair["key"] = f"{old}_x{pair['key'][len(old) :]}"
    return copy


def names(recorded: dict[str, Any]) -> Iterator[str]:
    """Names and name prefixes of the attributes of calls and rewards."""
    found = set()
    for record in (*all_of([recorded]), *logs_of([recorded])):
        if is_call(record) or any(key.startswith(GIVES) for key in keys_of(record)) or "body" in record:
            for key in keys_of(record):
                parts = key.split(".")
                found |= {".".join(parts[:stop]) for stop in range(2, len(parts) + 1)}
    return iter(sorted(found))


@pytest.mark.parametrize("name", RECORDED)
def test_renamed_attribute_keeps_calls_and_rewards(name: str) -> None:
    recorded = RECORDED[name]
    called = {span["spanId"] for span in all_of([recorded]) if is_call(span)}
    _, n_rewards = counts(convert(from_json([recorded])))
    assert called
    assert n_rewards
    for old in names(recorded):
        made = convert(from_json([renamed(recorded, old)]))
        calls, rewards = counts(made)
        assert called <= calls, old
        assert rewards >= n_rewards, old
        lost = any(step.prompt == "" for trajectory in made.trajectories for step in trajectory.steps)
        assert not lost or made.mended["a call without its prompt"], old


@pytest.mark.parametrize("place", ["scopeSpans", "spans", "resourceLogs", "scopeLogs", "logRecords"])
def test_renamed_container_is_refused(place: str) -> None:
    recorded = json.loads(json.dumps(RECORDED["autogen_otel_logs"]).replace(f'"{place}"', f'"{place}_x"'))
    with pytest.raises(DataError, match=rf"{place}: expected a list, got {place}_x"):
        from_json([recorded])


SCORE = {"gen_ai.evaluation.name": "good", "gen_ai.evaluation.score.value": 0.5}
CALL = {
    "gen_ai.operation.name": "chat",
    "gen_ai.input.messages": json.dumps([{"role": "user", "content": "What colour is the sky?"}]),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": "The sky is blue."}]),
}


def span(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"traceId": "c" * 32, "spanId": "a" * 16, "name": "chat", "startTimeUnixNano": "1000",
            "endTimeUnixNano": "2000", "attributes": attributes(values), **more}  # fmt: skip


@pytest.mark.parametrize(
    "log",
    [
        {"eventName": "gen_ai.evaluation.result", "attributes": attributes(SCORE)},
        {"attributes": attributes({**SCORE, "event.name": "gen_ai.evaluation.result"})},
        {"attributes": attributes({**SCORE, "otel.event.name": "gen_ai.evaluation.result"})},
        {"eventName": "log", "attributes": attributes({**SCORE, "otel.event.name": "gen_ai.evaluation.result"})},
        {"eventName": "gen_ai.evaluation.result", "body": value(SCORE)},
        {"attributes": attributes(SCORE)},
        None,
    ],
    ids=["eventName", "event.name", "otel.event.name", "both names", "body", "no name", "of the span"],
)
def test_evaluation_is_imported_under_each_name(log: dict[str, Any] | None) -> None:
    logs = [{"traceId": "c" * 32, "spanId": "a" * 16, "timeUnixNano": "3000", **log}] if log else []
    (trajectory,) = read(logs, [span(CALL if log else {**CALL, **SCORE})]).trajectories
    (step,) = trajectory.steps
    assert {name: score.value for name, score in step.scores.items()} == {"good": 0.5}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"gen_ai.evaluation.name": "good"}, "good"),
        ({"gen_ai.evaluation.explanation": "well done"}, "evaluation"),
        ({"agentlightning.reward.0.name": "good"}, "good"),
        ({"evaluations.0.evaluation.name": "good", "evaluations.0.evaluation.explanation": "fine"}, "good"),
        ({"openinference.span.kind": "EVALUATOR", "output.value": "{}"}, "judge"),
        ({"reward": 0.5}, "reward"),
        ({"my.reward.good": 0.5}, "my.reward.good"),
    ],
)
def test_evaluation_without_a_known_score_is_listed(values: dict[str, Any], name: str) -> None:
    spans = [Span("t", "a", None, "chat", 1, 2, CALL), Span("t", "b", None, "judge", 3, 4, values)]
    (left,) = convert(spans).left_out
    assert (left.what, left.span, left.name) == ("reward", "b", name)


def test_messages_that_name_no_span_are_listed() -> None:
    said = (("gen_ai.user.message", {"content": "Why?"}), ("gen_ai.choice", {"message": {"content": "So."}}))
    logs = [{"traceId": "c" * 32, "timeUnixNano": "3", "eventName": name, "body": value(body)} for name, body in said]
    made = read(logs, [span({"gen_ai.operation.name": "chat"})])
    assert (made.trajectories, sorted(left.what for left in made.left_out)) == ([], ["model call"] * 2 + ["record"])


def test_unknown_event_is_listed() -> None:
    event = SpanEvent("gen_ai.choice.delta", {"content": "Hi"})
    made = convert([Span("t", "a", None, "chat", 1, 2, CALL, [event, SpanEvent("exception", {})])])
    assert [(one.what, one.name, one.reason) for one in made.left_out] == [
        ("record", "gen_ai.choice.delta", "an event of this name is not read")
    ]
