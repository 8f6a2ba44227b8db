"""Reads trace files in all supported forms."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from creditflow.errors import DataError
from creditflow.plugins.traces.chat_log import from_chat_log, is_chat_log
from creditflow.plugins.traces.exports import export_of, read_export, with_traces
from creditflow.plugins.traces.spans import Span, json_values, protobuf_messages, spans_and_logs, with_events


def read_spans(paths: Path | str | Iterable[Path | str]) -> list[Span]:
    """Read the spans of one file, or of several that belong together.

    Collectors may write spans to one file and the log records with their messages to another, and products their scores
    to a third. Reads OTLP as JSON (one object, or one per line), OTLP as protobuf (`.pb`, `.bin`, `.binpb`), Agent
    Lightning's spans as JSON (a list, or one per line), exports of other products (`exports`), and chat logs
    (`chat_log`). Raises DataError for a file of another form.
    """
    spans: list[Span] = []
    logs: list[Span] = []
    lines = 0
    for path in map(Path, [paths] if isinstance(paths, Path | str) else paths):
        try:
            data = path.read_bytes()
        except OSError as error:
            hint = "; name the files in it" if isinstance(error, IsADirectoryError) else ""
            raise DataError(f"{path}: {error.strerror or error}{hint}") from error
        if not data.strip():
            raise DataError(f"{path}: is empty")
        is_protobuf = path.suffix in (".pb", ".bin", ".binpb")
        read = protobuf_messages(data, str(path)) if is_protobuf else json_values(data, path)
        values = [record for value in read for record in (value if isinstance(value, list) else [value])]
        if values and is_chat_log(values[0]):
            spans += from_chat_log(values, str(path), after=lines)
            lines += len(values)
        elif values and (export := export_of(values[0])) is not None:
            spans += read_export(export, values, str(path))
        else:
            more, records = spans_and_logs(values, str(path))
            spans += more
            logs += records
    return with_traces(with_events(spans, logs))
