"""Langfuse's scores, as its SDK posts them since version 5. Its spans go over OTLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.traces.exports.base import Export, GivenScore, Records, nanoseconds, value_or_label
from creditflow.traces.spans import text_of


def _has(record: Mapping[str, Any]) -> bool:
    return {"name", "value"} <= record.keys() and not record.keys().isdisjoint(("traceId", "sessionId"))


def _read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    for score in records:
        name, trace = text_of(score.get("name")) or "score", text_of(score.get("traceId"))
        if not trace:
            into.lost.append((f"score {name}", "it belongs to a session, not to a trace"))
            continue
        observation = text_of(score.get("observationId"))
        time = nanoseconds(score.get("timestamp"))
        value = value_or_label(score.get("value"), score.get("stringValue"))
        into.scores.append(GivenScore(name, value, trace, (observation,) if observation else (), time))


EXPORT = Export(name="Langfuse", has=_has, read=_read, lists=("data",))
