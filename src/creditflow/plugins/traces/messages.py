"""The one reader of messages: OpenAI's chat and responses, Anthropic, Bedrock, Gemini, OpenTelemetry, LangChain.

A message is a role and parts: texts, reasoning, media, tool calls and their results, the last two with their ids. The
reader takes decoded values. A text inside of them is never parsed, except where a convention says that it is JSON:
`decode` and `nested`. Media become a short marker, and a part in no known form a marker with its name.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from creditflow.plugins.traces.spans import LIST_TYPES, mapping, text_of

Raw = dict[str, Any]
Kind = Literal["text", "block", "reasoning", "call", "result", "media", "unknown"]
MOST_DEEP = 16
"""Maximum nesting of parts that is read (a tool result or a message may hold parts)."""
OF_A_TEXT = frozenset(("role", "content", "finish_reason"))
"""Keys of a message that is one text."""
NOT_PLAIN = ("[", "data:")
"""Prefixes of a content that may be a JSON list of parts, or a data URL."""


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _kinds(**names: str) -> dict[str, str]:
    """Name to kind."""
    return {name: kind for kind, of_kind in names.items() for name in of_kind.split()}


_TYPES = _kinds(
    text="text input_text output_text summary_text reasoning_text refusal message compaction generic",
    reasoning="reasoning thinking redacted_thinking redacted-reasoning thought "
    "reasoning.text reasoning.summary reasoning.encrypted",
    call="tool_call tool_use function function_call tool-call server_tool_use server_tool_call mcp_call mcp_tool_use "
    "custom_tool_call",
    result="tool_call_response tool_result tool-result function_call_output function_response "
    "server_tool_call_response custom_tool_call_output",
    image="image image_url input_image image_file",
    audio="audio input_audio audio_url",
    video="video video_url input_video",
    file="file input_file document blob uri media resource",
    empty="step-start cache_point item_reference",
)
"""A part's type to its kind."""
_KINDS = frozenset(_TYPES.values())
_ITEMS = ("reasoning", "call", "result")
"""Kinds of parts that OpenAI's responses API lists beside messages."""
_MEDIA = ("image", "audio", "video", "file")
_WRAPPED = _kinds(
    call="toolUse functionCall function_call",
    result="toolResult functionResponse function_response",
    reasoning="reasoningContent",
    image="image",
    audio="audio",
    video="video",
    file="document inlineData inline_data fileData file_data",
    texts="guardContent citationsContent executableCode executable_code codeExecutionResult code_execution_result",
    empty="cachePoint",
)
"""Identifying key to kind, for parts without a type: Bedrock's and Gemini's forms."""
_ARGUMENTS = ("arguments", "input", "args", "server_tool_call")
_RESULTS = ("response", "result", "content", "output", "server_tool_call_response")
_IDS = ("call_id", "id", "toolCallId", "toolUseId", "tool_call_id", "tool_use_id")
_PROMPTS = ("messages", "input", "contents", "prompt")
_SYSTEM = ("system", "instructions", "systemInstruction", "system_instruction")
_CONTENTS = ("parts", "contents", "content", "text", "completion", "output_text", "user")
"""Keys of a message's content, of which the first with a value counts. `user` is OpenLLMetry's prompt of Anthropic's
completions."""
_BESIDE = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Keys of reasoning outside of the content: vLLM, SGLang and DeepSeek; OpenRouter; Ollama; LiteLLM."""
WHY_ENDED = ("finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason")
"""Keys of the reason why a response ended."""
_BODY = frozenset(("content", "parts", "tool_calls", "function_call", "refusal"))
_OF_A_MESSAGE = _BODY | _words(
    "role name id index type status tool_call_id object created model usage usageMetadata system_fingerprint metrics "
    "service_tier logprobs token_ids prompt_token_ids choices candidates stop_sequence audio annotations example "
    "additional_kwargs response_metadata usage_metadata invalid_tool_calls tool_call_chunks artifact chunk_position "
    "phase container images"
).union(WHY_ENDED, _BESIDE)
"""All keys of messages, and of responses that are one."""
_READ = _OF_A_MESSAGE.union(_CONTENTS, ("files", "generation_info"))
_MARKS = ("role", "type", "index", "message", *WHY_ENDED)
"""Keys that messages and choices have, but not every object with a content."""
_OF_A_REQUEST = {*_PROMPTS, *_SYSTEM} | _words(
    "tools tool_choice functions function_call response_format model text temperature top_p max_tokens stream stop n "
    "max_output_tokens store metadata reasoning previous_response_id parallel_tool_calls truncation include user seed"
)
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "model"))
ANSWERING = ("assistant", "model")
"""Roles of a model's messages: OpenAI's and Gemini's."""


class Part(NamedTuple):
    """A part of a message as text."""

    kind: Kind
    """A `block` continues the block before it: providers split one text at citations and chunks."""
    text: str
    id: str = ""
    """The id of a tool call or of its result; empty: none was recorded."""


@dataclass(slots=True)
class ChatMessage:
    """A message of a prompt, or a response."""

    role: str
    parts: list[Part]
    finish_reason: Any = None
    is_choice: bool = False
    """Whether it is numbered, as one of several choices."""
    name: str = ""

    @property
    def text(self) -> str:
        """Reasoning, texts, calls as JSON and results, one per line."""
        return joined(self.parts)

    @property
    def has_text(self) -> bool:
        """Whether it has more than reasoning and tool calls."""
        return any(part.kind not in ("call", "reasoning") for part in self.parts)

    @property
    def calls(self) -> list[Part]:
        """The tool calls."""
        return [part for part in self.parts if part.kind == "call"]


@dataclass(slots=True)
class Notes:
    """Observations while reading messages."""

    media: list[tuple[str, Any]] = field(default_factory=list)
    """Marker and original part of each image, audio, video or file."""
    unknown: list[str] = field(default_factory=list)
    """Names of the parts in no known form."""
    cut: list[str] = field(default_factory=list)
    """Attributes with JSON that was cut off."""
    has_repr: bool = False
    """Whether the instrumentation writes the `repr` of OpenAI's whole message as the text of a tool-calling one."""


def joined(parts: Sequence[Part]) -> str:
    """Join parts with newlines, but a block directly to the block before it."""
    blocks = [part.kind == before.kind == "block" for before, part in pairwise(parts)]
    breaks = ["", *("" if is_block else "\n" for is_block in blocks)]
    return text_of("".join([f"{line_break}{part.text}" for line_break, part in zip(breaks, parts, strict=False)]))


# ---- JSON in texts -------------------------------------------------------------------------------------------------

Form = Literal["json", "either", "text", "parts"]
"""The form of a value: JSON; a text, or messages as JSON; a text as it stands; a text, or one message or its parts as
JSON."""
_MESSAGE_CUT = re.compile(
    r'(\[\s{0,9}\{\s{0,9}"(id|type|content|text|toolUse|toolResult|reasoningContent|functionCall)'
    r'|\[?\s{0,9}\{\s{0,9}"(role|messages|parts|lc)")'
)
"""The beginning of messages as JSON, other than of an answer in JSON."""
BLOCKS = re.compile(r'\[\s{0,9}\{\s{0,9}"type":\s{0,9}"text",\s{0,9}"text":')
"""The beginning of a list of texts as JSON, which a tracer has written rather than a model."""


def decode(value: Any, form: Form, name: str, notes: Notes) -> Any:
    """The value of an attribute called `name`, whose texts have this form; None if its JSON was cut off."""
    if form == "text" or not isinstance(value, str) or value[:1] not in ("{", "[", '"'):
        return value
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):
        if form == "json" or _MESSAGE_CUT.match(value):
            notes.cut.append(name)
            return None
        return value
    if form == "parts":
        return decoded if are_parts(decoded) or _has_only_message_keys(decoded) else value
    return decoded if form == "json" or are_messages(decoded) else value


def are_messages(value: Any) -> bool:
    """Whether a decoded value holds messages, by all keys of each, rather than an answer in JSON."""
    if isinstance(value, list):
        return bool(value) and all(_is_message(item) or _kind_of(item) in _KINDS for item in value)
    value = mapping(value)
    is_request = value.keys() <= _OF_A_REQUEST and isinstance(first_in(value, _PROMPTS), list)
    is_response = "role" not in value and any(isinstance(value.get(key), list) for key in _CHOICES)
    return is_request or is_response or _is_message(value)


def _is_message(value: Any) -> bool:
    return _has_only_message_keys(value) and _role_of(value, "") in _ROLES


def _has_only_message_keys(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= _OF_A_MESSAGE and not _BODY.isdisjoint(value)


def _kind_of(part: Any) -> str:
    """The kind of a part with a type, the type itself if it is not known; empty for a part without one."""
    kind = mapping(part).get("type")
    if not isinstance(kind, str):
        return ""
    return "result" if kind.endswith("_tool_result") else _TYPES.get(kind, kind)


# ---- requests and responses ----------------------------------------------------------------------------------------


def prompt_of(request: Any, notes: Notes, *, nested: bool = False) -> list[ChatMessage]:
    """The messages of a request: to OpenAI, Anthropic, Bedrock, Gemini or LangChain; a list of messages; or a text."""
    system = None
    if isinstance(request, Mapping) and request.keys().isdisjoint(("role", "type")):
        system = first_in({**mapping(request.get("config")), **filled(request)}, _SYSTEM)  # Gemini's has a config
        read = first_in(request, _PROMPTS)
        request = request if system is None and read is None else read
    items = list(listed(request))
    if len(items) == 1 and isinstance(items[0], LIST_TYPES):
        items = list(items[0])  # LangChain's list of requests
    read = [{"role": "system", "content": system}, *items] if system else items
    return together(message_of(item, "user", notes, nested=nested) for item in read if item is not None)


def together(messages: Iterable[ChatMessage | None]) -> list[ChatMessage]:
    """Join the items of one response, which the responses API and OpenInference list as separate messages.

    An item without a text continues the assistant's message before it, and so does the item after one without a text.
    Contents of Gemini's role `model` are one message, too: its client stores each chunk of a stream apart. A message
    of results that those before it hold, by id and text, is left out: botocore records a tool's message and a user's.
    """
    whole: list[ChatMessage] = []
    results: set[Part] = set()
    for message in messages:
        before = whole[-1] if whole else None
        if message is None or (message.parts and results.issuperset(message.parts)):
            continue
        results = {part for part in (*results, *message.parts) if part.id and message.role not in ANSWERING}
        is_next = before and (message.role, message.name) == (before.role, before.name)
        is_item = before and message.parts and before.parts and not (message.has_text and before.has_text)
        if before and is_next and message.role == "model":
            parts = (*before.parts, *message.parts)
            before.parts = [part._replace(kind="block") if part.kind == "text" else part for part in parts]
        elif before and is_next and is_item and message.role == "assistant":
            before.parts += message.parts
        else:
            whole.append(message)
    return whole


def responses_of(response: Any, notes: Notes, *, nested: bool = False) -> list[ChatMessage]:
    """The message of each choice of a response, in the form of any API, or the messages of a list."""
    choices = [choice for choice in choices_of(response) if choice is not None]
    return [m for choice in choices if (m := message_of(choice, "assistant", notes, nested=nested)) is not None]


READERS = {"prompt": prompt_of, "response": responses_of}
"""The side of a call to its reader. `nested`: the content of a message may be its parts as JSON."""


def choices_of(response: Any) -> list[Any]:
    """The choices of a response, each an object with the message or the message itself.

    OpenAI completions have `choices` and Gemini responses `candidates`. Other providers return one message: Bedrock in
    `output`, Ollama in `message`, Anthropic as the response itself. OpenAI's responses API returns a list of items.
    LangChain's models return lists of `generations`, one for each request.
    """
    if isinstance(response, LIST_TYPES):
        is_message = are_parts(response) and not any("role" in part for part in response)
        return [{"role": "assistant", "content": response}] if is_message else list(response)
    if not isinstance(response, Mapping):
        return [response]
    for key in _CHOICES:
        if isinstance(choices := response.get(key), list) and choices:
            return choices[0] if isinstance(choices[0], list) else choices
    output, ended = response.get("output"), first_in(response, WHY_ENDED)
    if output is None or "role" in response:
        return [response]
    if isinstance(output, str):
        return [{**response, "content": output, "output": None}]
    if isinstance(output, list):
        ended = mapping(response.get("incomplete_details")).get("reason") or response.get("status")
    message = output.get("message", output) if isinstance(output, dict) else output
    message = {"content": message} if isinstance(message, list) else mapping(message)
    return [{"role": "assistant", **message, "finish_reason": ended}]


_CHOICES = ("choices", "candidates", "generations")


def filled(value: Mapping[str, Any]) -> Raw:
    """An object without its keys of no value: some clients write all keys of a type."""
    return {key: inner for key, inner in value.items() if inner is not None}


def first_in(values: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first value that is not None."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


# ---- messages ------------------------------------------------------------------------------------------------------


def message_of(raw: Any, role: str, notes: Notes, *, nested: bool = False) -> ChatMessage | None:
    """A message in any form, or a text. None for the definition of a tool.

    `role`: the role of a message without one. `nested`: the content may be a message or a list of parts as JSON.
    """
    if not isinstance(raw, Mapping):
        return ChatMessage(role, list(_part(raw, notes, 0)))
    content = raw.get("content")
    if type(content) is str and OF_A_TEXT.issuperset(raw) and not (content.startswith(NOT_PLAIN) or notes.has_repr):
        role, reason = text_of(raw.get("role") or role), raw.get("finish_reason")
        kind: Kind = "reasoning" if role == THINKING else "text"
        role = "assistant" if role == THINKING else role
        return ChatMessage(role, [Part(kind, content)] if content else [], reason)
    message = filled(_unwrapped(raw, notes, nested=nested))
    content = next((message[key] for key in _CONTENTS if message.get(key) not in (None, "", [], ())), None)
    if isinstance(content, Mapping) and "parts" in content:
        content = content["parts"]  # Gemini
    if nested and isinstance(content, str) and content[:1] == "[":
        content = decode(content, "parts", "content", notes)
    items, name = listed(content), text_of(message.get("name"))
    if (item := _kind_of(message)) in _ITEMS and "role" not in message:  # an item of the responses API
        items, name, role = [message], "", "tool" if item == "result" else "assistant"
    elif items and all(map(_is_definition, items)):
        return None
    parts = list(_parts(items, notes, 0))
    if not any(part.kind == "reasoning" for part in parts):
        parts = [*_parts(_reasoning_beside(message), notes, 0), *parts]
    parts += _parts(_further(message), notes, 0)
    if items != [message]:
        told = [part for part in parts if part.kind == "call"]
        parts += [call for call in _parts(_calls_beside(message), notes, 0) if not _take_equal(call, told)]
    foreign = [key for key in message if isinstance(key, str) and key not in _READ and "." not in key]
    has_content = parts or any(key in _CONTENTS or key in _BODY for key in message)
    if foreign and not (has_content and any(key in raw or key in message for key in _MARKS)):
        parts = [_unknown(", ".join(foreign[:4]), notes)]
    if _role_of(message, role) == "tool" and (id := text_of(first_in(message, _IDS))):
        parts = [Part("result", joined(parts), id)]
    reason = first_in({**mapping(raw.get("generation_info")), **raw, **message}, WHY_ENDED)
    return ChatMessage(_role_of(message, role), parts, reason, "index" in raw, name)


THINKING = "thinking"
"""The role of OpenLLMetry's message of Anthropic's reasoning."""


def _unwrapped(raw: Mapping[str, Any], notes: Notes, *, nested: bool) -> Mapping[str, Any]:
    """The message in a choice, in an event's body, or in LangChain's constructor."""
    inner = raw.get("message")
    if nested and isinstance(inner, str):
        decoded = decode(inner, "parts", "message", notes)
        inner = decoded if isinstance(decoded, dict) else {"content": decoded}
    if isinstance(inner, Mapping) and raw.get("role") is None:
        return _unwrapped({**inner}, notes, nested=False) if "lc" in inner else inner
    return mapping(raw.get("kwargs")) if raw.get("type") == "constructor" else raw


def _role_of(message: Mapping[str, Any], role: str) -> str:
    """The role, by its name or LangChain's type (`human`, `AIMessageChunk`); `role`: that of a message without it."""
    if named := message.get("role"):
        return text_of(named)
    kind = text_of(message.get("type")).removesuffix("Chunk").removesuffix("Message").lower()
    return {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}.get(kind, role)


def _reasoning_beside(message: Mapping[str, Any]) -> Iterator[Any]:
    """Reasoning outside of the content. A message may have the same under several keys: only the first counts."""
    values = (value for value in map(message.get, _BESIDE) if value and isinstance(value, (str, *LIST_TYPES)))
    for item in listed(next(values, None)):
        yield {"type": "reasoning", **(item if isinstance(item, dict) else {"text": item})}


def _further(message: Mapping[str, Any]) -> Iterator[Any]:
    """Further kinds of response content: OpenAI's refusal and transcript of audio, OpenRouter's images."""
    yield from (message.get("refusal"), mapping(message.get("audio")).get("transcript"))
    for key in ("images", "files"):
        yield from listed(message.get(key))


def _calls_beside(message: Mapping[str, Any]) -> Iterator[Any]:
    for call in listed(json_of(message.get("tool_calls"))):
        yield {"type": "tool_call", **mapping(call.get("tool_call")), **call} if isinstance(call, dict) else call
    if call := mapping(json_of(message.get("function_call"))):
        yield {"type": "tool_call", **call}


def _take_equal(call: Part, told: list[Part]) -> bool:
    """Remove the call from `told` that is `call` in another form, by id, or by text if one has no id."""
    for other in told:
        if call.id == other.id if call.id and other.id else call.text == other.text:
            told.remove(other)
            return True
    return False


def listed(value: Any) -> Sequence[Any]:
    """`value` as a list: a list as is, None as an empty list, anything else as a list of one."""
    return value if isinstance(value, LIST_TYPES) else () if value is None else (value,)


# ---- parts ---------------------------------------------------------------------------------------------------------


def are_parts(value: Any) -> bool:
    """Whether a decoded list holds message parts, rather than JSON that the message is about."""
    if not isinstance(value, LIST_TYPES) or not value or not all(isinstance(part, dict) and part for part in value):
        return False
    untyped = [filled(part) for part in value if not isinstance(part.get("type"), str)]
    return all(map(_is_untyped, untyped)) and bool(untyped or not _KINDS.isdisjoint(map(_kind_of, value)))


def _is_untyped(part: Raw) -> bool:
    return part.keys() <= {"text", "thought"} or part.keys() == {"json"} or any(key in part for key in _WRAPPED)


def _parts(items: Iterable[Any], notes: Notes, depth: int) -> Iterator[Part]:
    for item in items:
        yield from _part(item, notes, depth)


def _part(part: Any, notes: Notes, depth: int) -> Iterator[Part]:
    if depth > MOST_DEEP:
        yield _unknown("nested too deep", notes)
    elif isinstance(part, str):
        yield from _text(part, "text", notes, depth)
    elif part is not None and not isinstance(part, dict):
        yield _unknown(type(part).__name__, notes)
    elif part and (part := filled(part)):
        yield from _object(part, notes, depth)


def _text(text: str, kind: Kind, notes: Notes, depth: int) -> Iterator[Part]:
    message = None
    if notes.has_repr and text.startswith("{'content': ") and len(text) < _LONGEST_REPR:  # Python has printed it
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            message = mapping(ast.literal_eval(text))
    if message:
        yield from _parts([*listed(message.get("content")), *_calls_beside(message)], notes, depth + 1)
    elif is_data_url(text):
        yield Part("media", _medium({"url": text}, "file", text, notes))
    elif text:
        yield Part(kind, text)


_LONGEST_REPR = 1_000_000


def _object(part: Raw, notes: Notes, depth: int) -> Iterator[Part]:
    if "message_content" in part or "tool_call" in part:  # OpenInference
        call = mapping(part.get("tool_call"))
        part = {**mapping(part.get("message_content")), **({"type": "tool_call"} if call else {}), **call} or part
    kind, original = _kind_of(part), part
    if not kind and (key := next((key for key in part if key in _WRAPPED and part[key] != {}), None)) is not None:
        kind, inner = _WRAPPED[key], part[key] if isinstance(part[key], dict) else {"text": part[key]}
        part = dict(mapping(inner.get("reasoningText"))) or inner
    if kind == "reasoning" or part.get("thought") is True:
        yield Part("reasoning", _reasoning(part))
    elif kind == "empty" or _is_definition(part):
        return
    elif kind == "call" or isinstance(part.get("function"), dict):
        yield _call(part)
    elif kind == "result":
        id, results = text_of(first_in(part, _IDS)), _result(first_in(part, _RESULTS), notes, depth)
        yield from (result._replace(id=id) for result in results)
    elif kind in _MEDIA or (not kind and not _OF_A_MEDIUM.isdisjoint(part)):
        yield from _media(original, kind or "file", notes)
    elif isinstance(text := first_in(part, _TEXTS if kind == "texts" else _TEXTS[:4]), str):
        yield from _text(text, "block" if "text" in part else "text", notes, depth)
    elif text is not None and (kind == "texts" or part.get("type") == "message" or "role" in part):
        yield from _parts(listed(text), notes, depth + 1)
    elif "json" in part and kind in ("", "json"):
        yield Part("result", dumped(part["json"]))
    else:
        name = part.get("type")
        yield _unknown(name if isinstance(name, str) else ", ".join(map(text_of, list(part)[:4])), notes)


_TEXTS = ("content", "text", "parts", "refusal", "code", "output")
"""Keys of a part's text; the last two are those of Gemini's code execution."""


def _unknown(name: str, notes: Notes) -> Part:
    notes.unknown.append(name[:80])
    return Part("unknown", f"[{name[:80]}]")


def _reasoning(part: Raw) -> str:
    """The text of a reasoning part; a marker if the provider has redacted it."""
    for value in map(part.get, ("thinking", "text", "content", "reasoning", "summary")):
        texts = [item if isinstance(item, str) else mapping(item).get("text") for item in listed(value)]  # OpenAI's
        if written := "\n".join(text for text in texts if isinstance(text, str) and text):
            return written
    return "[redacted reasoning]"


def _is_definition(part: Any) -> bool:
    """Whether a part defines a tool rather than calling it."""
    fields = mapping(mapping(part).get("function")) or mapping(part)
    has_schema = any(isinstance(fields.get(key), Mapping) for key in ("parameters", "input_schema", "inputSchema"))
    return has_schema and "name" in fields and first_in(fields, _ARGUMENTS) is None


def _call(part: Raw) -> Part:
    """A tool call as JSON: `name` and `arguments`."""
    fields = mapping(part.get("function")) or part  # OpenAI's form
    arguments, name = json_of(first_in(fields, _ARGUMENTS)), first_in(fields, ("name", "toolName", "tool_name"))
    call = {"name": name, "arguments": {} if arguments is None else arguments}  # some omit empty arguments
    return Part("call", dumped(call), text_of(first_in(part, _IDS)))


def _result(value: Any, notes: Notes, depth: int) -> Iterator[Part]:
    """The lines of a tool result: its parts, a text, or JSON."""
    if isinstance(value, str):
        yield from _text(value, "result", notes, depth) if value else [Part("result", "")]
    elif isinstance(value, dict) and value.get("type") in _OUTPUTS and "value" in value:  # Vercel's form
        yield from _result(value["value"], notes, depth + 1) if depth < MOST_DEEP else ()
    elif are_parts(parts := value if isinstance(value, list) else [value]):
        yield Part("result", joined(list(_parts(parts, notes, depth + 1))))
    else:
        yield Part("result", dumped(value))


_OUTPUTS = ("text", "json", "content", "error-text", "error-json")

# ---- media ---------------------------------------------------------------------------------------------------------

_MIME = frozenset(("mime_type", "mimeType", "media_type", "mediaType"))
_OF_A_MEDIUM = _MIME | {"url"}
_ABOUT_MEDIA = _MIME | {"type", "modality", "format", "detail"}


def is_data_url(text: str) -> bool:
    """Whether a text is a whole data URL in base64."""
    return text[:5] == "data:" and ";base64," in text[:200] and not any(map(str.isspace, text[:300]))


def _media(part: Raw, kind: str, notes: Notes) -> Iterator[Part]:
    source, resource = mapping(part.get("source")), mapping(part.get("resource") or part.get("document"))
    text = source.get("data") if source.get("type") == "text" else first_in(resource, ("text", "data"))
    if isinstance(text, str):
        yield Part("text", text)  # Anthropic's or Cohere's document, or MCP's resource, of plain text
    else:
        yield Part("media", _medium(part, kind, part, notes))


def _medium(part: Any, kind: str, original: Any, notes: Notes) -> str:
    """The marker of an image, audio, video or file: its kind, and a hash of its longest text, the data or the address.

    The original goes to `notes`.
    """
    fields = dict(_fields(part, 0))
    longest = _spelled(max([value for key, value in fields.items() if key not in _ABOUT_MEDIA], key=len, default=""))
    head, _, data = longest.partition(",") if is_data_url(longest) else ("", "", longest)
    mime = head[5:] or text_of(first_in(fields, sorted(_MIME)))
    kind = next(k for k in (fields.get("modality"), mime.partition("/")[0], kind) if k in _MEDIA)
    marker = f"[{kind} {hashlib.sha256(data.encode(errors='replace')).hexdigest()[:12]}]"
    notes.media.append((marker, original))
    return marker


def _fields(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Keys and values of a part and of the objects in it, down to a depth of three."""
    for key, inner in value.items():
        if isinstance(inner, dict) and depth < 3:
            yield from _fields(inner, depth + 1)
        elif isinstance(inner, str | bytes):
            yield text_of(key), inner


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


def unflattened(entry: Mapping[str, Any]) -> Raw:
    """An object from attributes by the rest of their names: `tool_calls.0.id` is a field of the first of a list."""
    tree: Raw = {}
    for path, value in entry.items():
        *way, last = path.split(".", MOST_DEEP)
        at = tree
        for key in way:
            if not isinstance(at.get(key), dict):
                at[key] = {}
            at = at[key]
        at[last] = value
    return {key: _numbered(value) for key, value in tree.items()}


def _numbered(value: Any) -> Any:
    """Objects whose keys are numbers as lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _numbered(item) for key, item in value.items()}
    if inner and all(key.isdecimal() and len(key) < 9 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner
