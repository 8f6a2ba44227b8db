"""Files of traces, whatever form they have."""

from __future__ import annotations

from pathlib import Path

from creditflow.adapters.chat_log import from_chat_log, is_chat_log
from creditflow.adapters.spans import Span, from_json, from_otlp_protobuf, json_values
from creditflow.errors import DataError


def read_spans(path: Path | str) -> list[Span]:
    """The spans of a file: OTLP as JSON (one object, or one in each line), OTLP as protobuf (`.pb`, `.bin`), Agent
    Lightning's spans as JSON (a list, or one in each line), or a log of chats (`chat_log`).

    Raises DataError where the file cannot be read as any of these.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if path.suffix in (".pb", ".bin", ".binpb"):
        return from_otlp_protobuf(data, str(path))
    values = [one for value in json_values(data, path) for one in (value if isinstance(value, list) else [value])]
    return from_chat_log(values, str(path)) if values and is_chat_log(values[0]) else from_json(values, str(path))
