"""Tests of reading spans in each form."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.proto.metrics.v1.metrics_pb2 import Histogram, Metric, MetricsData, Sum
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from creditflow.errors import DataError
from creditflow.plugins.traces import convert, from_agent_lightning, from_json, from_readable, read_spans
from creditflow.plugins.traces.spans import Link
from tests.paths import TRACES


def test_metrics_are_ignored_beside_spans_and_refused_alone(tmp_path: Path) -> None:
    usage = Histogram(data_points=[{"sum": 7.0}])
    metrics = [Metric(name="gen_ai.client.token.usage", description="8 bytes!", histogram=usage)]
    metrics.append(Metric(name="calls", sum=Sum(data_points=[{"as_int": 1}])))
    measured = MetricsData(resource_metrics=[{"scope_metrics": [{"metrics": metrics}]}])
    traced = (TRACES / "langgraph_openinference.pb").read_bytes()
    framed = [len(part).to_bytes(4, "big") + part for part in (measured.SerializeToString(), traced)]
    as_json = json.dumps(MessageToDict(measured))
    lines = f"{as_json}\n{json.dumps(json.loads((TRACES / 'langgraph_openinference.json').read_text()))}"
    for name, alone, beside in (
        ("all.pb", measured.SerializeToString(), b"".join(framed)),
        ("all.jsonl", as_json.encode(), lines.encode()),
    ):
        file = tmp_path / name
        file.write_bytes(beside)
        assert len(read_spans(file)) == 13
        file.write_bytes(alone)
        with pytest.raises(DataError, match=rf"{name}: expected spans or log records, got metrics or profiles"):
            read_spans(file)


def test_unicode_line_separators_do_not_end_json_lines(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "one\u2028two\x85three"}, {"role": "assistant", "content": "four"}]
    file = tmp_path / "log.jsonl"
    file.write_text(f"{json.dumps({'messages': said}, ensure_ascii=False)}\n" * 2)
    assert len(convert(read_spans(file)).trajectories) == 2


def test_readable_spans_and_log_records_are_converted() -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    logged, logs = LoggerProvider(), InMemoryLogRecordExporter()
    logged.add_log_record_processor(SimpleLogRecordProcessor(logs))
    logger = logged.get_logger("test")
    with tracer.start_as_current_span("trajectory"):
        with tracer.start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}) as call:
            call.add_event("gen_ai.user.message", {"content": "What is 3 + 4?"})
            call.add_event("gen_ai.choice", {"message": json.dumps({"content": "7"}), "finish_reason": "length"})
        with tracer.start_as_current_span("later", links=[trace.Link(call.get_span_context())]) as later:
            later.set_status(StatusCode.ERROR, "broken")
        with tracer.start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}):
            logger.emit(event_name="gen_ai.user.message", body={"content": "And twice that?"})
            logger.emit(event_name="gen_ai.choice", body={"message": {"content": "14"}})
            logger.emit(body="another matter")
    spans = from_readable(exporter.get_finished_spans(), logs.get_finished_logs())
    chat, broken, _, root = spans
    assert (chat.parent, root.parent, broken.error, chat.error) == (root.id, None, "broken", "")
    assert broken.links == [Link(chat.trace, chat.id)]
    (trajectory,) = convert(spans).trajectories
    assert [(step.prompt, step.response) for step in trajectory.steps] == [
        ("[user]\nWhat is 3 + 4?", "7"),
        ("[user]\nAnd twice that?", "14"),
    ]
    assert trajectory.status == "truncated"


def lightning(name: str, start: float, end: float, parent: str | None = None, **attributes: Any) -> dict[str, Any]:
    """A span as returned by `Span.model_dump()` of Agent Lightning 0.3."""
    given = {key.replace("__", "."): value for key, value in attributes.items()}
    return {
        "rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 0, "trace_id": "0" * 32, "span_id": name,
        "parent_id": parent, "name": name, "status": {"status_code": "OK", "description": None}, "attributes": given,
        "events": [], "links": [], "start_time": start, "end_time": end, "context": None, "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    }  # fmt: skip


def test_agent_lightning_attempt_is_one_trajectory() -> None:
    spans = [
        lightning("agent", 100.0, 109.0, agent__name="writer"),
        lightning("openai.chat.completion", 101.0, 102.0, "agent", gen_ai__prompt__0__role="user",
                  gen_ai__prompt__0__content="Write.", gen_ai__completion__0__content="Text.",
                  gen_ai__response__id="r1", prompt_token_ids=[1, 2], response_token_ids=[3]),
        {**lightning("agentlightning.annotation", 103.0, 103.1, "agent", agentlightning__reward__0__name="good",
                     agentlightning__reward__0__value=0.5, agentlightning__reward__1__name="short",
                     agentlightning__reward__1__value=1.0), "span_id": "a1"},
        {**lightning("agentlightning.annotation", 110.0, 110.1, agentlightning__reward__0__name="primary",
                     agentlightning__reward__0__value=1.0), "span_id": "a2"},
    ]  # fmt: skip
    (trajectory,) = convert(from_agent_lightning(spans)).trajectories
    (step,) = trajectory.steps
    assert (trajectory.id, step.agent, step.prompt_ids, step.response_ids) == ("ro-1/at-1", "writer", (1, 2), (3,))
    assert {name: score.value for name, score in step.scores.items()} == {"good": 0.5, "short": 1.0}
    assert trajectory.outcome is not None
    assert trajectory.outcome.value == 1.0
    (alone,) = from_agent_lightning([{**spans[0], "attempt_id": None}])
    assert alone.trace == "ro-1"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.json", b"\xff\xfe", "expected JSON in UTF-8"),
        ("x.json", b"[1, 2", "expected OTLP as JSON"),
        ("x.json", b'{"a": 1}', r"expected OTLP \(`resourceSpans`, `resourceLogs`\), .*, got an object with 'a'"),
        (
            "x.jsonl",
            b'{"resourceSpans": []}\n{"resourceSpans\n{}',
            "line 2 of those that are not empty: [^:]*, column ",
        ),
        ("x.json", b"[" * 100_000, "nested too deep|expected OTLP"),
        ("x.pb", b"\x0a\xff\xff", "expected OTLP as protobuf"),
        ("x.pb", b"", r"x\.pb: is empty"),
        ("x.jsonl", b"\n", r"x\.jsonl: is empty"),
        ("x.json", b"{}", r"got \{\}"),
        ("x.json.gz", gzip.compress(b"{}", mtime=0), "unpack compressed files first"),
        ("x.json", b"\x0a\xff\xff", r"protobuf is known by a name that ends with \.pb or \.bin"),
        ("x.json", b'{"resourceSpans": "x"}', "resourceSpans: expected a list, got 'x'"),
        ("x.jsonl", b'{"resourceSpans": []}\nnull', "object 2: expected OTLP"),
        ("x.json", b'{"messages": "hi"}', "a list `messages`, or `request`.*, got an object with 'messages'"),
        (
            "x.json",
            b'{"resourceSpans": [{"spans": []}]}',
            "x.json: resourceSpans: scopeSpans: expected a list, got spans",
        ),
    ],
)
def test_file_of_an_unknown_form_is_refused(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        read_spans(tmp_path / name)


@pytest.mark.parametrize("end", ["a character", "a text", "a line"])
@pytest.mark.parametrize("form", ["spans", "chats"])
def test_torn_last_line_warns_and_the_rest_is_read(tmp_path: Path, end: str, form: str) -> None:
    span = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "Größe"}
    line = {"spans": {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]},
            "chats": {"messages": [{"role": "user", "content": "Größe?"}]}}[form]  # fmt: skip
    whole = json.dumps(line, ensure_ascii=False).encode()
    stop = {"a character": whole.index("ö".encode()) + 1, "a text": whole.index(b"Gr") + 1, "a line": -1}[end]
    (tmp_path / "x.jsonl").write_bytes(whole + b"\n" + whole + b"\n" + whole[:stop])
    with pytest.warns(UserWarning, match=r"x\.jsonl: line 3, the last, is torn; all before it is read"):
        assert len(read_spans(tmp_path / "x.jsonl")) == 2


def test_torn_last_protobuf_message_warns(tmp_path: Path) -> None:
    traced = (TRACES / "langgraph_openinference.pb").read_bytes()
    framed = len(traced).to_bytes(4, "big") + traced
    (tmp_path / "x.pb").write_bytes(framed + framed[:-1])
    with pytest.warns(UserWarning, match=r"x\.pb: message 2, the last, is torn; all before it is read"):
        assert len(read_spans(tmp_path / "x.pb")) == 13


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_spans(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match="Is a directory; name the files in it"):
        read_spans(tmp_path)


def test_unrelated_log_records_make_no_spans() -> None:
    logs = [{"spanId": "b" * 16, "body": {"stringValue": "started"}}, {"eventName": "app.click"}, {}]
    assert from_json([{"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}], "sent_at": 1}]) == []
