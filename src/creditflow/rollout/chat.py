"""Convert chat messages to tokens, and response tokens to text and tool calls, for every engine.

Tool schemas and calls have the Hermes format (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`), the default
of verl and of Qwen's models. A chat template that renders tools, calls and results writes them itself; for other
templates this module writes them into the system prompt. A template that has agents call in another format is refused.
This module holds no model, runs no tool, and imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from creditflow.data import Message
from creditflow.data.trajectory import content_text, without_nulls
from creditflow.errors import ConfigError, ModelError, first_line

_THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[think]": "[/think]",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    "<|start_thinking|>": "<|end_thinking|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
"""Tags around a model's thoughts, in lower case: opening tag -> closing tag."""
_THOUGHT_TAGS = "|".join(map(re.escape, (*_THOUGHTS, *_THOUGHTS.values())))
_LEADING_THOUGHT = re.compile(rf"\s*(?:{'|'.join(map(re.escape, _THOUGHTS))})", re.IGNORECASE)
_CLOSING_THOUGHT = re.compile("|".join(map(re.escape, _THOUGHTS.values())), re.IGNORECASE)
_OPENING = "<tool_call>"
_CALL_TAG = re.compile(r"</?tool_call>")
_BLANK = re.compile(r"\s*")
_EXTENT = json.JSONDecoder(strict=False, parse_int=len, parse_float=len, parse_constant=len)
"""Finds the end of a JSON value. It accepts any number, so that each error has a position."""
_DEPTH = 64
"""Maximum nesting of a call's JSON: the parsed value is written again by recursive functions."""
_BEFORE = 8
"""Maximum number of tokens of one character; no decoder depends on earlier tokens."""
_MARK = "\u241fresponse\u241f"
"""Placeholder for a message's content, to find the text that a chat template writes around it."""
_NAME = "look_up"
"""Placeholder for the name of the tool in a call, for the same purpose."""
_CALL: Message = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {"place": "Ulm"}}}
"""A call for probing a template; `_TOOL` is another tool, for the same purpose."""
_TOOL = {"type": "function", "function": {"name": "list", "description": "", "parameters": {"type": "object"}}}
_LIST_OPENING = "You may call functions. These are there:"
"""The beginning of a list of tools that this module writes; a prompt that contains it has the Hermes format."""
_CONTROL = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
"""A token that is unlikely in ordinary text. Words, line breaks and full stops may be added tokens, too."""
_READ_BACK = re.compile(
    rf"\W+(?:think(?:ing)?|thought|reasoning)\W+|</?(?:answer|tool_calls?|tool_responses?|tools)>|{_THOUGHT_TAGS}",
    re.IGNORECASE,
)
"""Tags that models write within a turn and that programs parse from the text. They end no turn and stay in messages,
even if the tokenizer marks them as special."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call written by an agent."""

    name: str
    """Empty if the call has no name."""
    arguments: Mapping[str, Any] | None
    """None if the call is malformed."""
    error: str = ""
    """The reason why the call is malformed; empty if it is valid."""
    id: str = field(default="", compare=False)
    """The id that the agent wrote; empty if it wrote none."""

    def to_message(self, id: str) -> Message:
        """Return the call in the format of OpenAI's chat completions."""
        spelled = json.dumps(dict(self.arguments or {}), ensure_ascii=False)
        return {"id": id, "type": "function", "function": {"name": self.name, "arguments": spelled}}


def _probe_messages(id: str = "call00000") -> list[Message]:
    """Return a question, its call and the result. Some templates refuse ids of another length."""
    return [
        {"role": "user", "content": _NAME},
        {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "id": id}]},
        {"role": "tool", "tool_call_id": id, "name": _NAME, "content": _MARK},
    ]


def parse_tool_calls(text: str, *, in_thought: bool = False) -> tuple[str, list[ToolCall]]:
    """Split a response into its text and its tool calls, in order; malformed calls are included.

    A call ends at the end of its JSON. Calls inside a leading thought (`<think>...</think>` and similar tags) are text;
    one without a closing tag is the whole response. `in_thought`: the prompt has opened the thought (`opens_thought`).
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    begin = at = 0
    if in_thought or _LEADING_THOUGHT.match(text):
        closing = _CLOSING_THOUGHT.search(text)
        at = len(text) if closing is None else closing.end()
    while (tag := text.find(_OPENING, at)) >= 0:
        more, at = _calls_at(text, tag + len(_OPENING))
        if more:
            calls += more
            kept.append(text[begin:tag])
            begin = at
    return ("".join((*kept, text[begin:])).strip(), calls) if calls else (text, [])


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the opening tag of a thought, so that the response begins inside it."""
    return prompt[-_THOUGHT_END:].rstrip().lower().endswith(tuple(_THOUGHTS))


_THOUGHT_END = 64
"""Characters: an opening tag, and the white space that a chat template may write after it."""


def _calls_at(text: str, at: int) -> tuple[list[ToolCall], int]:
    """Return the calls after an opening tag at `at`, and their end; no calls if the tag is only mentioned."""
    calls: list[ToolCall] = []
    while text.startswith(("{", "["), body := _end_of_blank(text, at)) and not (calls and text[body] == "["):
        try:
            _, at = _EXTENT.raw_decode(text, body)
        except json.JSONDecodeError as error:
            malformed, end = _malformed(text, body, error.pos)
            return [*calls, *malformed], end
        except RecursionError:
            return [*calls, _call_of(text[body:])], len(text)
        calls.append(_call_of(text[body:at]))
    if not calls:
        return _malformed(text, body, body)
    return calls, body + len("</tool_call>") if text.startswith("</tool_call>", body) else at


def _malformed(text: str, body: int, scanned: int) -> tuple[list[ToolCall], int]:
    """Return the malformed call that begins at `body`, and its end.

    It ends at the next tag after `scanned`. If no JSON begins at `body` and another call opens before the closing tag,
    the text only mentions the tag, and no call is returned.
    """
    tag = _CALL_TAG.search(text, scanned)
    end = len(text) if tag is None else tag.start()
    opens = tag is not None and tag[0] == "<tool_call>"
    if opens and scanned == body:
        return [], body
    return [_call_of(text[body:end].strip())], end if opens or tag is None else tag.end()


def _end_of_blank(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    assert blank is not None
    return blank.end()


def _call_of(body: str) -> ToolCall:
    try:
        call = _plain(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", None, f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return ToolCall("", None, 'expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments")
    if arguments is None:
        arguments = call.get("parameters")  # Llama 3's name for it
    if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's messages
        try:
            arguments = _plain(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return ToolCall(call["name"], None, f"the arguments are no JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], None, f"expected arguments by name, got a {type(arguments).__name__}")
    return ToolCall(call["name"], arguments, id=str(call.get("id") or ""))


def _plain(text: str) -> Any:
    """Parse JSON that can be written again.

    Excludes NaN and numbers beyond the range of floats (1e999 is read as infinity); halves of surrogate pairs, which
    JSON can spell out, are replaced. Raises ValueError or RecursionError for anything else.
    """
    value = json.loads(text, parse_constant=_no_number)
    layer, depth = [value], 0
    while layer := [inner for outer in layer for inner in _inside(outer)]:
        depth += 1
        if depth > _DEPTH:
            raise ValueError(f"it is nested deeper than {_DEPTH}")
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text that each token of a response adds; joined, the pieces are the response's text.

    A character of several tokens belongs to the last of them. A token may decode differently alone than after others
    (for example, without its leading space), so each is decoded after the preceding tokens that can matter.
    """
    text, texts, at, length = decode(ids), [], 0, 0
    first, before = 0, ""
    for index in range(len(ids)):
        if index % _BEFORE == 0:
            first = max(0, index - _BEFORE)
            before = decode(ids[first:index])
        now = decode(ids[first : index + 1])
        length += len(now) - len(before)
        whole = length - len(now) + len(now.rstrip("\ufffd"))  # an incomplete character is held back
        end = len(text) if index + 1 == len(ids) else min(max(at, whole), len(text))
        texts.append(text[at:end])
        at, before = end, now
    return texts


def message_text(message: Message) -> str:
    """Return a message's content with its tool calls written out. Raises ModelError for malformed calls."""
    content = message.get("content")
    if isinstance(content, str) and not message.keys() & _CALL_KEYS:  # most messages; traces have many
        return content
    calls = [_call_spelled(call) for call in _calls_in(message)]
    return "\n".join(filter(None, (content_text(content), *calls)))


def _for_template(message: Message) -> Message:
    """Return a message in the form that chat templates read: text as content, and calls in the current format."""
    plain = without_nulls(message)
    plain["content"] = content_text(plain.get("content"))
    if plain.get("role") == "function":
        plain["role"] = "tool"
    if calls := _calls_in(plain):
        plain = {**plain, "tool_calls": calls}
        plain.pop("function_call", None)
    return plain


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls and results have ids of nine letters and digits.

    Results without ids follow the order of the calls.
    """
    plain: list[Message] = []
    unanswered: dict[str, object] = {}  # short id -> id
    for place, message in enumerate(messages):
        ids: Message = {}
        if calls := message.get("tool_calls"):
            unanswered = {}
            for k, call in enumerate(calls):
                id = call.get("id")
                short = _short_id(id or f"{place}.{k}")
                unanswered[_short_id(f"{place}.{k}") if short in unanswered else short] = id
            ids["tool_calls"] = [{**call, "id": id} for call, id in zip(calls, unanswered, strict=True)]
        elif message.get("role") == "tool":
            id = message.get("tool_call_id")
            short = next((short for short, own in unanswered.items() if not id or own == id), _short_id(id or place))
            unanswered.pop(short, None)
            ids["tool_call_id"] = short
        plain.append({**message, **ids})
    return plain


def _short_id(id: object) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", text := str(id)):
        return text
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def _spelled_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Rewrite messages for a template without tool support: schemas, calls and results become contents."""
    plain: list[Message] = []
    for of_tools, group in groupby(messages, lambda message: message.get("role") == "tool"):
        if of_tools:  # results of one response's calls make one message: most templates require alternating turns
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            plain.append({"role": "user", "content": "\n".join(results)})
        else:
            plain += [{"role": message.get("role"), "content": message_text(message)} for message in group]
    if tools:
        own = [plain.pop(0)["content"]] if plain and plain[0]["role"] == "system" else []
        plain.insert(0, {"role": "system", "content": "\n\n".join((*own, _tools_prompt(tools)))})
    return plain


_CALL_KEYS = frozenset(("tool_calls", "function_call"))


def _calls_in(message: Message) -> list[dict[str, Any]]:
    """Return a message's tool calls with arguments as objects, as chat templates expect.

    OpenAI's messages hold arguments as a text, which a template that writes JSON would put in quotation marks. A
    `function_call`, OpenAI's former format, counts as a call. Raises ModelError for malformed calls.
    """
    before = message.get("function_call")
    calls = message.get("tool_calls") or ([] if before is None else [{"type": "function", "function": before}])
    plain = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ModelError('tool_calls: expected a list of {"function": {"name": ..., "arguments": ...}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = _plain(arguments) if arguments.strip() else {}
        plain.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return plain


def _call_spelled(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _tools_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"{_LIST_OPENING}\n<tools>\n{listed}\n</tools>\n"
        "For each call, write a JSON object with the function's name and its arguments:\n"
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    )


class _TokenRemover:
    """Removes tokens from texts, in time linear in a text's length for any content."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(tokens)
        self._lengths = sorted({len(token) for token in self._tokens})
        self._first_letters = frozenset(token[0] for token in self._tokens)
        self._last_letters = frozenset(token[-1] for token in self._tokens)

    def __call__(self, text: str) -> str:
        """Return `text` without the tokens.

        Each is removed as soon as it is complete, so a token whose halves meet after a removal is removed, too.
        """
        # True for most texts, and fast for hostile ones.
        if self._first_letters.isdisjoint(text) or self._last_letters.isdisjoint(text):
            return text
        kept: list[str] = []
        for letter in text:
            kept.append(letter)
            if letter in self._last_letters:
                end = "".join(kept[-self._lengths[-1] :])
                length = next((length for length in self._lengths if end[-length:] in self._tokens), 0)
                del kept[len(kept) - length :]
        return "".join(kept)


class ChatModel:
    """A model whose prompts and responses a `ChatTokenizer` converts: the base of every policy, whatever samples."""

    chat_tokenizer: ChatTokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self.chat_tokenizer.tokenizer

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[int, ...]]:
        """See `ChatTokenizer.encode`."""
        return self.chat_tokenizer.encode(messages, tools)

    def follow(self, messages: Sequence[Message], prompt: str = "") -> tuple[int, ...]:
        """See `ChatTokenizer.follow`."""
        return self.chat_tokenizer.follow(messages, prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """See `ChatTokenizer.decode`."""
        return self.chat_tokenizer.decode(ids)


class ChatTokenizer:
    """Converts messages to prompt text and tokens, and a response's tokens to text.

    `tokenizer`: a tokenizer of transformers. `end_ids`: the `eos_token_id` of the model's generation configuration.
    `template_options`: further arguments of the chat template (`enable_thinking`).
    """

    def __init__(
        self, tokenizer: Any, end_ids: int | Iterable[int] | None = None, template_options: Any = None
    ) -> None:
        self.tokenizer, self._template_options = tokenizer, dict(template_options or {})
        ids = [] if end_ids is None else [end_ids] if isinstance(end_ids, int) else sorted(end_ids)
        padding = (tokenizer.pad_token_id, *ids, tokenizer.eos_token_id, 0)
        self.pad_id = int(next(token for token in padding if token is not None))
        """The padding token; also the whole prompt if the messages have no tokens."""
        ends = (*ids, tokenizer.eos_token_id, self._end_of_turn())
        self.end_ids = frozenset(int(token) for token in ends if token is not None)
        """Tokens that end a response: those of the model, the tokenizer and the chat template."""
        self._control = self._control_tokens()
        self.special_tokens = [token for token in self._control.values() if token]
        """The tokens that a response's text leaves out and that no message may spell: those that end a response, are
        the tokenizer's bos, pad or unk token, or stand around turns. Special tokens of another use are text."""
        self._without_special_tokens = _TokenRemover(self.special_tokens)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[int, ...]]:
        """Return prompt text and tokens.

        Messages are rendered by the tokenizer's chat template; without one, their contents are joined by line breaks.
        `tools`: JSON schemas of functions in OpenAI's format. Special tokens, and the tokens that the template writes
        around turns, are removed from messages, so that one agent's text cannot close the next one's turn. If the
        rendered prompt does not name each tool, the schemas are written into the system prompt, and calls and results
        as text. Raises ModelError for messages that the chat template rejects or fails on, ConfigError for tools if the
        template has calls of another format, which cannot be read.
        """
        text = self._text(messages, tools)
        return text, self._tokenize(text) or (self.pad_id,)  # the model needs a position to predict from

    def follow(self, messages: Sequence[Message], prompt: str = "") -> tuple[int, ...]:
        """Return the tokens between a response to `prompt` and the next one of the same agent.

        These are the end of its turn, `messages` by others (the results of its calls), and the beginning of its next
        turn. The end-of-sequence token is left out, since the response already has it. Results have the format of the
        prompt's tools. Raises ModelError if the tokenizer's chat template leaves responses out.
        """
        spoken: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}]
        plain = self._plain((*spoken, *messages))
        own = self._renders_tools and _LIST_OPENING not in prompt
        _, mark, text = (self._rendered(plain, [_TOOL]) if own else self._spelled(plain)).partition(_MARK)
        if not mark:
            raise ModelError("the chat template leaves a response out that tools were called in")
        if not self.tokenizer.chat_template:
            text += "\n"
        ids = tuple(self._ids(text))
        return ids[1:] if ids and ids[0] in self.end_ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response without `special_tokens`; the tags of thoughts and tool calls are kept."""
        return str(self.tokenizer.decode([id for id in ids if id not in self._control]))

    def _tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, with those that the tokenizer adds at the beginning if there is no template.

        Without tokens of the end: they would end the prompt before the response.
        """
        if self.tokenizer.chat_template:  # it writes the tokens of the beginning itself
            return tuple(self._ids(text))
        ids = list(self.tokenizer(text, add_special_tokens=True)["input_ids"])
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        return tuple(ids)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        plain, tools = self._plain(messages), self._clean(tools)
        if self._renders_tools:
            # Some templates list tools only without a system prompt, or not at all. Messages may contain the names.
            text, untold = self._rendered(plain, tools), self._example(plain) if tools else ""
            names = (str(tool.get("function", tool).get("name")) for tool in tools)
            if all(text.count(name) > untold.count(name) for name in names):
                if tools and not self._renders_readable_calls:
                    raise ConfigError(
                        "tools: the model's chat template has agents call in a format other than <tool_call>..., which "
                        "cannot be read; use another model, or a chat template with that format or without tools"
                    )
                return text
        return self._spelled(plain, tools)

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template gets them, without special tokens.

        They are cleaned in this form, since a list of parts, or JSON's escapes, may hide a special token.
        """
        plain: list[Message] = self._clean([_for_template(message) for message in messages])
        return plain if self._takes_any_id else _with_short_ids(plain)

    def _spelled(self, plain: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if not self._renders_texts:
            raise ModelError("the chat template leaves out contents that are texts, so the model would not see them")
        plain = _spelled_out(plain, tools)
        if not self.tokenizer.chat_template:
            return "\n".join(message["content"] for message in plain)
        return self._rendered(plain)

    @cached_property
    def _renders_texts(self) -> bool:
        """Whether the content of a message is rendered; templates of some models with images take lists alone."""
        text = self._example([{"role": "user", "content": _MARK}])
        return not text or _MARK.strip("\u241f") in text.lower()

    @cached_property
    def _renders_tools(self) -> bool:
        """Whether the template renders a call and its result, and a result after a call as text (`follow`)."""
        question, call, result = _probe_messages()
        whole = self._example([question, call, result], [_TOOL])
        told = self._example([question, {"role": "assistant", "content": _NAME}, result], [_TOOL])
        return "Ulm" in whole and _MARK in whole and _MARK in told

    @cached_property
    def _takes_any_id(self) -> bool:
        """Whether calls may have ids of any length; Mistral's template takes nine letters and digits."""
        short, long = (self._example(_probe_messages(id)) for id in ("call00000", "call_0"))
        return bool(long or not short)

    @cached_property
    def _renders_readable_calls(self) -> bool:
        question, call, _ = _probe_messages()
        response = self._example([question, call], [_TOOL], answering=False)
        return ToolCall(_NAME, _CALL["function"]["arguments"]) in parse_tool_calls(response)[1]

    def _example(self, *arguments: Any, **options: Any) -> str:
        """Like `_rendered`, but return an empty text if the template does not render the messages."""
        if self.tokenizer.chat_template:
            with suppress(ModelError, ImportError):  # without jinja2, messages cannot be rendered later either
                return self._rendered(*arguments, **options)
        return ""

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, answering: bool = True
    ) -> str:
        """Render messages with the chat template. Raises ModelError if the template rejects them or fails.

        `answering`: whether to append the beginning of a response.
        """
        from jinja2 import TemplateError

        options = self._template_options | {"tokenize": False, "add_generation_prompt": answering}
        options |= {"tools": list(tools)} if tools else {}
        try:
            text = self.tokenizer.apply_chat_template(list(messages), **options)
        except TemplateError as error:
            raise ModelError(f"the chat template refuses these messages: {first_line(error)}") from error
        # A template may compute with any field that a client sent.
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ModelError(f"the chat template cannot read these messages: {why}") from error
        return str(text)

    def _end_of_turn(self) -> int | None:
        """Return the token that the chat template writes after a response, or None.

        A token that it also writes inside a response does not count: gpt-oss closes its analysis with `<|end|>`.
        """
        user: Message = {"role": "user", "content": _MARK}
        response: Message = {"role": "assistant", "content": _MARK}
        behind = self._example([user, response], answering=False).rpartition(_MARK)[2].lstrip()
        called = self._example([user, {**response, "tool_calls": [_CALL]}], answering=False).rpartition(_MARK)[2]
        token = next(iter(self._ids(behind)), None)
        if token is None or (added := self.tokenizer.added_tokens_decoder.get(token)) is None:
            return None
        ends = added.special or (_CONTROL.fullmatch(added.content) and not _READ_BACK.fullmatch(added.content))
        inside, name, _ = called.partition(_NAME)
        return token if ends and not (name and added.content in inside) else None

    def _control_tokens(self) -> dict[int, str]:
        """Return the added tokens that end a response, have a name, or stand around turns: id -> text."""
        tokens = {
            id: token.content
            for id, token in self.tokenizer.added_tokens_decoder.items()
            if (token.special or _CONTROL.fullmatch(token.content)) and not _READ_BACK.fullmatch(token.content)
        }
        turns = self._turn_tokens(tokens.values())
        named = {*self.end_ids, *(getattr(self.tokenizer, f"{name}_token_id") for name in ("pad", "bos", "unk"))}
        return {id: token for id, token in tokens.items() if id in named or token in turns}

    def _turn_tokens(self, tokens: Collection[str]) -> set[str]:
        """Return those of `tokens` that the chat template writes around turns; all special ones if it renders none.

        These are the tokens beside a message, and those between messages of a user and an assistant: a fixed preamble
        and the beginning of a response may mention others. Tokens of a tool list and of results count as well; those
        of a call do not, because responses contain calls.
        """
        exchange: list[Message] = [{"role": role, "content": _MARK} for role in ("system", "user", "assistant", "user")]
        # Some templates take no system prompt, or no turns.
        for talk in (exchange, exchange[1:], exchange[-1:]):
            if _MARK in (text := self._example(talk, answering=False)):
                break
        else:
            added = self.tokenizer.added_tokens_decoder.values() if self.tokenizer.chat_template else ()
            return {token.content for token in added if token.special}
        token = f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})"
        beside = re.findall(rf"{token}\s*\w*\s*{_MARK}", text) + re.findall(rf"{_MARK}\s*{token}", text)
        between = re.findall(token, "".join(text.split(_MARK)[1:-1][-2:]))
        # Without responses in its prompts, a template shows the beginning of one at the prompt's end.
        between = between or re.findall(token, self._example(talk).removeprefix(text))[:1]
        call = self._example(_probe_messages()[:2])
        listed = re.findall(token, self._example(_probe_messages(), [_TOOL]) if call else "")
        return {*beside, *between, *(token for token in listed if token not in call)}

    def _clean(self, value: Any) -> Any:
        """Return `value` without `special_tokens`, at any depth, keys included."""
        if isinstance(value, str):
            return self._without_special_tokens(value)
        if isinstance(value, list | tuple):
            return [self._clean(inner) for inner in value]
        if isinstance(value, Mapping):
            return {self._clean(key): self._clean(inner) for key, inner in value.items()}
        return value
