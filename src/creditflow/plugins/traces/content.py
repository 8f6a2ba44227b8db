"""Converts the parts of a message, in any provider's form, to text.

A message's content is a text or a list of parts: texts, reasoning, images and other media, tool calls and their
results. OpenAI, Anthropic, Bedrock (and Strands), Gemini, Vercel's AI SDK, OpenInference and OpenTelemetry each have
their own form. Media become a short marker. A part in no known form becomes a marker with its name.
"""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from creditflow.plugins.traces.spans import text_of

Raw = dict[str, Any]
LIST_TYPES = (list, tuple)
"""A tuple, as `list | tuple` would make a new type at every check, dozens of times per span."""
Kind = Literal["text", "block", "reasoning", "tool", "media", "unknown"]
Line = tuple[Kind, str]
"""Kind and text. A `block` continues the block before it: providers split one text at citations and chunks."""
MOST_DEEP = 16
"""Maximum nesting of parts that is read (a tool result or a message may hold parts)."""


@dataclass(slots=True)
class FoundParts:
    """Media and unknown parts found while reading messages."""

    media: list[tuple[str, Any]] = field(default_factory=list)
    """Marker and original part of each image, audio, video or file."""
    unknown: list[str] = field(default_factory=list)
    """Names of the parts in no known form."""


def joined(lines: Sequence[Line]) -> str:
    """Join lines with newlines, but a block directly to the block before it."""
    pieces: list[str] = []
    before: Kind | None = None
    for kind, text in lines:
        if pieces and not (kind == before == "block"):
            pieces.append("\n")
        pieces.append(text)
        before = kind
    return text_of("".join(pieces))


def lines_of(parts: Sequence[Any], notes: FoundParts, depth: int = 0) -> list[Line]:
    """The lines of parts: at least one for each, except for kinds without text."""
    lines: list[Line] = []
    for part in parts:
        for kind, text in _lines_of_part(part, notes, depth):
            # A message may hold a tool result or its reasoning twice, in two forms.
            twice = kind in ("tool", "reasoning") and lines and lines[-1][1] == text and not _is_call(part)
            if not twice:
                lines.append((kind, text))
    return lines


def _lines_of_part(part: Any, notes: FoundParts, depth: int) -> Iterator[Line]:
    if depth > MOST_DEEP:
        yield _unknown("nested too deep", notes)
    elif isinstance(part, str):
        yield ("media" if is_data_url(part) else "text"), shortened(part, notes)
    elif not isinstance(part, dict):
        if part is not None:
            yield _unknown(type(part).__name__, notes)
    elif part:
        yield from _lines_of_object(part, notes, depth)


def _lines_of_object(part: Raw, notes: FoundParts, depth: int) -> Iterator[Line]:
    kind = part.get("type") if isinstance(part.get("type"), str) else None
    text = part.get("content", part.get("text"))
    if isinstance(text, str) and text.startswith(_A_MESSAGE):
        yield from _lines_of_repr(text, notes, depth)
    elif kind is None and (key := next((key for key in part if key in _WRAPPED), None)) is not None:
        yield from _lines_of_wrapped(part, key, notes, depth)
    elif _is_reasoning(part, kind):
        yield "reasoning", _reasoning(part)
    elif _is_call(part):
        yield "tool", _call(part)
    elif kind in _RESULTS or (kind is not None and kind.endswith("_tool_result")):
        yield from _result(_first(part, _RESULT_KEYS), notes, depth)
    elif kind in _MEDIA or (kind is None and not _OF_A_MEDIUM.isdisjoint(part)):
        yield from _media(part, kind or "file", notes)
    elif isinstance(text, str):
        yield ("block" if "text" in part else "text"), text
    elif isinstance(refusal := part.get("refusal"), str):
        yield "text", refusal
    elif kind == "message" or "role" in part:
        yield from lines_of(_contents(part), notes, depth + 1)
    elif kind in _EMPTY:
        return
    elif "json" in part and kind in (None, "json"):
        yield "tool", dumped(shortened(part["json"], notes))
    else:
        yield _unknown(kind or ", ".join(map(text_of, list(part)[:4])), notes)


def _unknown(name: str, notes: FoundParts) -> Line:
    notes.unknown.append(name[:80])
    return "unknown", f"[{name[:80]}]"


def _contents(message: Raw) -> Sequence[Any]:
    content = message.get("content", message.get("parts"))
    return content if isinstance(content, LIST_TYPES) else (content,)


def are_parts(value: Sequence[Any]) -> bool:
    """Whether a list read from a text holds message parts, rather than JSON that the message is about."""
    if not value or not all(isinstance(part, dict) and part for part in value):
        return False
    typed = [part["type"] for part in value if isinstance(part.get("type"), str)]
    untyped = [part for part in value if not isinstance(part.get("type"), str)]
    return all(map(_is_untyped, untyped)) and bool(untyped or any(map(_is_known, typed)))


def _is_known(kind: str) -> bool:
    return kind in _KINDS or kind.endswith("_tool_result")


def _is_untyped(part: Raw) -> bool:
    return part.keys() <= {"text", "thought"} or part.keys() == {"json"} or any(key in part for key in _WRAPPED)


# ---- reasoning and tools -------------------------------------------------------------------------------------------

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal", "message", "compaction")
_REASONING = ("reasoning", "thinking", "redacted_thinking", "redacted-reasoning", "thought", "reasoning.text",
              "reasoning.summary", "reasoning.encrypted")  # fmt: skip
_CALLS = (
    *("tool_call", "tool_use", "function", "function_call", "tool-call", "server_tool_use", "server_tool_call"),
    *("mcp_call", "mcp_tool_use", "custom_tool_call"),
)
_RESULTS = (
    *("tool_call_response", "tool_result", "tool-result", "function_call_output", "function_response"),
    *("server_tool_call_response", "custom_tool_call_output"),
)
_RESULT_KEYS = ("response", "result", "content", "output", "server_tool_call_response")
_EMPTY = ("step-start", "cache_point", "item_reference")
"""Kinds of parts without text."""
_REDACTED = "[redacted reasoning]"


def _is_reasoning(part: Raw, kind: str | None) -> bool:
    return kind in _REASONING or part.get("thought") is True


def _reasoning(part: Raw) -> str:
    """The text of a reasoning part; a marker if the provider has redacted it."""
    for key in ("thinking", "text", "content", "reasoning", "summary"):
        value = part.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, LIST_TYPES):  # OpenAI: a list of texts
            texts = [part.get("text") for part in value if isinstance(part, dict)]
            if written := "\n".join(text for text in texts if isinstance(text, str) and text):
                return written
    return _REDACTED


def _is_call(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") in _CALLS or isinstance(part.get("function"), dict))


def _call(part: Raw) -> str:
    """A tool call as JSON: `name` and `arguments`."""
    function = part.get("function")  # OpenAI's form
    fields = function if isinstance(function, dict) else part
    arguments = json_of(_first(fields, ("arguments", "input", "args", "server_tool_call")))
    name = _first(fields, ("name", "toolName", "tool_name"))
    return dumped({"name": name, "arguments": {} if arguments is None else arguments})  # some omit empty arguments


def _result(value: Any, notes: FoundParts, depth: int) -> Iterator[Line]:
    """The lines of a tool result: its parts, a text, or JSON."""
    if isinstance(value, str):
        parts = json_of(value)
        if not (isinstance(parts, list) and are_parts(parts)):
            yield ("media" if is_data_url(value) else "tool"), shortened(value, notes)
            return
        value = parts
    if isinstance(value, dict) and value.get("type") in _OUTPUTS and "value" in value:  # Vercel's form
        yield from _result(value["value"], notes, depth + 1) if depth < MOST_DEEP else ()
    elif are_parts(parts := value if isinstance(value, list) else [value]):
        yield "tool", joined(lines_of(parts, notes, depth + 1))
    else:
        yield "tool", dumped(shortened(value, notes))


_OUTPUTS = ("text", "json", "content", "error-text", "error-json")


def _first(part: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((part[key] for key in keys if part.get(key) is not None), None)


_A_MESSAGE = "{'content': "
"""Prefix of a tool-calling message from OpenTelemetry's Agents SDK instrumentation: its text is the `repr` of OpenAI's
whole message."""


def _lines_of_repr(text: str, notes: FoundParts, depth: int) -> Iterator[Line]:
    try:
        message = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        message = None
    if not isinstance(message, dict):
        yield "text", text
        return
    calls = message.get("tool_calls")
    yield from lines_of([*_contents(message), *(calls if isinstance(calls, list) else ())], notes, depth + 1)


# ---- media ---------------------------------------------------------------------------------------------------------

_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_file"), "image"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document", "blob", "uri", "media", "resource"), "file"),
}
_MIME = frozenset(("mime_type", "mimeType", "media_type", "mediaType"))
_OF_A_MEDIUM = _MIME | {"url"}
_MIME_OR_FORMAT = (*sorted(_MIME), "format")
_PAYLOADS = ("data", "bytes", "file_data", "content", "image", "audio", "blob", "b64_json", "base64")
_ADDRESSES = ("url", "uri", "fileUri", "file_uri", "image_url", "audio_url", "video_url", "file_id", "fileId")
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]+")


def is_data_url(text: str) -> bool:
    """Whether a text is a whole data URL in base64."""
    return text[:5] == "data:" and ";base64," in text[:200] and not any(map(str.isspace, text[:300]))


def _media(part: Raw, kind: str, notes: FoundParts) -> Iterator[Line]:
    source, resource = part.get("source"), part.get("resource")
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        yield "text", source["data"]  # Anthropic's document of plain text
    elif isinstance(resource, dict) and isinstance(resource.get("text"), str):
        yield "text", resource["text"]  # MCP's resource of plain text
    else:
        yield "media", _medium(part, _MEDIA.get(kind, "file"), part, notes)


def _medium(part: Any, modality: str, original: Any, notes: FoundParts) -> str:
    """The marker of an image, audio, video or file; the original goes to `notes`."""
    fields = dict(_fields(part, 0))
    mime = text_of(_first(fields, _MIME_OR_FORMAT))[:80]
    payload, address = _first(fields, _PAYLOADS), _first(fields, _ADDRESSES)
    for url in (payload, address):
        if isinstance(url, str) and is_data_url(url):
            head, _, payload = url.partition(",")
            mime, address = head[5:].partition(";")[0] or mime, None
    if isinstance(payload, str) and payload.startswith(("http://", "https://")):
        payload, address = None, payload
    if isinstance(stated := fields.get("modality"), str) and stated:
        modality = stated
    elif modality == "file" and "/" in mime and mime.partition("/")[0] in ("image", "audio", "video"):
        modality = mime.partition("/")[0]
    if mime and "/" not in mime and modality != "file":
        mime = f"{modality}/{mime}"
    source = mime if payload is not None else text_of(address)[:200] or mime
    marker = f"[{modality[:40]}{': ' if source or payload is not None else ''}"
    marker += ", ".join(filter(None, (source, "" if payload is None else _size(payload)))) + "]"
    notes.media.append((marker, original))
    return marker


def _fields(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Keys and values of a part and of the objects in it, down to a depth of three."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, dict) and depth < 3:
                yield from _fields(inner, depth + 1)
            elif isinstance(inner, str | bytes) and inner:
                yield text_of(key), inner


def _size(payload: str | bytes) -> str:
    """The size of a base64 or binary payload; empty for other text (such as a note that data was removed)."""
    if isinstance(payload, bytes):
        size = len(payload)
    elif not _BASE64.fullmatch(payload[:256]):
        return ""
    else:
        size = len(payload) * 3 // 4 - payload[-2:].count("=")
    for unit, factor in (("MB", 1_000_000), ("kB", 1_000)):
        if size >= factor:
            return f"{size / factor:.0f} {unit}" if size >= 10 * factor else f"{size / factor:.1f} {unit}"
    return f"{size} B"


def shortened(value: Any, notes: FoundParts, depth: int = 0) -> Any:
    """A JSON value with markers in place of media."""
    if isinstance(value, str):
        return _medium({"url": value}, "file", value, notes) if is_data_url(value) else value
    if depth > MOST_DEEP:
        return value
    if isinstance(value, dict):
        if not _MIME.isdisjoint(value) and any(isinstance(value.get(key), str) for key in _PAYLOADS):
            return _medium(value, _MEDIA.get(text_of(value.get("type")), "file"), value, notes)
        return {key: shortened(inner, notes, depth + 1) for key, inner in value.items()}
    if isinstance(value, LIST_TYPES):
        return [shortened(inner, notes, depth + 1) for inner in value]
    return value


# ---- parts without a type ------------------------------------------------------------------------------------------


_WRAPPED = {
    **dict.fromkeys(("toolUse", "functionCall", "function_call"), "call"),
    **dict.fromkeys(("toolResult", "functionResponse", "function_response"), "result"),
    "reasoningContent": "reasoning",
    **{modality: modality for modality in ("image", "audio", "video")},
    **dict.fromkeys(("document", "inlineData", "inline_data", "fileData", "file_data"), "file"),
    **dict.fromkeys(("guardContent", "citationsContent", "executableCode", "executable_code"), "texts"),
    **dict.fromkeys(("codeExecutionResult", "code_execution_result"), "texts"),
    "cachePoint": "empty",
}
"""Identifying key to kind, for parts without a type: Bedrock's and Gemini's forms."""


def _lines_of_wrapped(part: Raw, key: str, notes: FoundParts, depth: int) -> Iterator[Line]:
    kind, fields = _WRAPPED[key], part[key] if isinstance(part[key], dict) else {"text": part[key]}
    if kind == "call":
        yield "tool", _call({"type": "tool_call", **fields})
    elif kind == "result":
        yield from _result(_first(fields, _RESULT_KEYS), notes, depth)
    elif kind == "reasoning":
        text = fields.get("reasoningText")
        yield "reasoning", _reasoning(text if isinstance(text, dict) else fields)
    elif kind == "texts":
        content = _first(fields, ("content", "text", "code", "output"))
        yield from lines_of(content if isinstance(content, list) else [content], notes, depth + 1)
    elif kind != "empty":
        yield "media", _medium(part, kind, part, notes)


_KINDS = frozenset((*_TEXTS, *_REASONING, *_CALLS, *_RESULTS, *_MEDIA, *_EMPTY, "generic"))


# ---- JSON ----------------------------------------------------------------------------------------------------------


def json_of(value: Any) -> Any:
    """Parse a text that is a JSON object or array; return any other value as is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def dumped(value: Any) -> str:
    """A value as JSON; empty if JSON cannot hold it."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_spelled)
    except (ValueError, RecursionError, TypeError):
        return ""


def _spelled(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
