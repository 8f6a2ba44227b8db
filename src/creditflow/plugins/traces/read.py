"""Reads trace files in all supported forms."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from creditflow.errors import DataError
from creditflow.plugins.traces.chat_log import from_chat_log, is_chat_log
from creditflow.plugins.traces.exports import export_of, read_export, with_traces
from creditflow.plugins.traces.spans import Span, expect_spans, from_json, json_values, protobuf_messages


def read_spans(paths: Path | str | Iterable[Path | str]) -> list[Span]:
    """Read the spans of one file, or of several that belong together.

    Collectors may write spans to one file and the log records with their messages to another, and products their scores
    to a third. Reads OTLP as JSON (one object, or one per line), OTLP as protobuf (`.pb`, `.bin`, `.binpb`), Agent
    Lightning's spans as JSON (a list, or one per line), exports of other products (`exports`), and chat logs
    (`chat_log`). Raises DataError for a file of another form.
    """
    objects: list[Any] = []
    others: list[Span] = []
    """Spans of chat logs and exports."""
    lines = 0
    for path in map(Path, [paths] if isinstance(paths, Path | str) else paths):
        try:
            data = path.read_bytes()
        except IsADirectoryError as error:
            raise DataError(f"{path}: is a folder; name the files in it") from error
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        if not data.strip():
            raise DataError(f"{path}: is empty")
        if path.suffix in (".pb", ".bin", ".binpb"):
            objects += expect_spans(protobuf_messages(data, str(path)), str(path))
            continue
        values = [
            record for value in json_values(data, path) for record in (value if isinstance(value, list) else [value])
        ]
        if values and is_chat_log(values[0]):
            others += from_chat_log(values, str(path), after=lines)
            lines += len(values)
        elif values and (export := export_of(values[0])) is not None:
            others += read_export(export, values, str(path))
        else:
            objects += expect_spans(values, str(path))
    return with_traces(from_json(objects) + others)
