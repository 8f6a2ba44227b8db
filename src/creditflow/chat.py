"""Chat messages to tokens, a response's tokens to text, and the calls of tools in it: the same for every engine.

Tools are told and called as Hermes' models do it (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`), which is
verl's default format and that of Qwen's models. A chat template that knows tools spells them itself; for others it is
done here, in the system prompt. This module holds no model, runs no tool, and imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from creditflow.errors import ModelError, first_line
from creditflow.trajectory import Message

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
"""The tags around a model's thoughts, in lower case: opening tag -> closing tag."""
_THOUGHT_TAGS = "|".join(map(re.escape, (*_THOUGHTS, *_THOUGHTS.values())))
_TAG = re.compile(f"<tool_call>|{_THOUGHT_TAGS}", re.IGNORECASE)
_CALL_TAG = re.compile(r"</?tool_call>")
_BLANK = re.compile(r"\s*")
_EXTENT = json.JSONDecoder(strict=False, parse_int=len, parse_float=len, parse_constant=len)
"""Finds where a JSON value ends. It refuses no number, so that each error has a position."""
_DEPTH = 64
"""Of a call's JSON: what is read here is written down again, by calls within calls."""
_BEFORE = 8
"""Tokens: of so many a character has none more, and no decoder looks farther back."""
_MARK = "\u241fresponse\u241f"
"""Stands for what a message says where a template is asked what it writes around that."""
_NAME = "look_up"
"""The name of the tool in a call that a template writes for the same purpose."""
_CONTROL = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
"""How a token looks that nobody writes by chance; a word, a line break or a full stop may be an added token too."""
_READ_BACK = re.compile(
    rf"\W+(?:think(?:ing)?|thought|reasoning)\W+|</?(?:answer|tool_calls?|tool_responses?|tools)>|{_THOUGHT_TAGS}",
    re.IGNORECASE,
)
"""What models write within a turn, and programs read again as text: it ends no turn, and messages keep it, even where
the tokenizer calls it special."""


class PromptIds(tuple[int, ...]):
    """A prompt that is tokens already."""


Prompt = str | Sequence[Message] | PromptIds
"""What a policy is asked: a text is what the model reads, chat messages become that."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as an agent wrote it."""

    name: str
    """Empty where it named none."""
    arguments: Mapping[str, Any] | None
    """None where what stands there is no call."""
    error: str = ""
    """Why it is none; empty where it is one."""

    def to_message(self, id: str) -> Message:
        """As OpenAI's chat completions have it."""
        spelled = json.dumps(dict(self.arguments or {}), ensure_ascii=False)
        return {"id": id, "type": "function", "function": {"name": self.name, "arguments": spelled}}


def parse_tool_calls(text: str, *, in_thought: bool = False) -> tuple[str, list[ToolCall]]:
    """Split a response into its text and its tool calls, in order; malformed calls are included.

    A call ends where its JSON ends. Calls inside thoughts (`<think>...</think>` and its kin) are text: a thought ends
    at its closing tag, and a leading thought without one is the whole response. `in_thought`: the prompt has opened a
    thought (`opens_thought`). Without it, what precedes a lone closing tag is a thought too.

    Takes time linear in the length of the text.
    """
    if "<tool_call>" not in text:
        return text, []
    calls: list[ToolCall] = []
    kept: list[str] = []
    thoughts = _Thoughts(text, in_thought)
    begin, at = 0, thoughts.end
    while (tag := _TAG.search(text, at)) is not None:
        if tag[0] != "<tool_call>":
            at = thoughts.skip(tag)
            if thoughts.end == at and tag[0].lower() not in _THOUGHTS:  # all of it was a thought
                begin, calls, kept = 0, [], []
            continue
        found, at = _calls_at(text, tag.end())
        if found:
            calls += found
            kept.append(text[begin : tag.start()])
            begin = at
    return ("".join((*kept, text[begin:])).strip(), calls) if calls else (text, [])


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the opening tag of a thought, so that the response begins inside it."""
    return prompt[-_THOUGHT_END:].rstrip().lower().endswith(tuple(_THOUGHTS))


_THOUGHT_END = 64
"""Characters: an opening tag, and the blanks that a chat template may write after it."""


class _Thoughts:
    """The thoughts of one response, found from left to right."""

    def __init__(self, text: str, in_thought: bool) -> None:
        self._text = text
        self._unclosed: set[str] = set()
        """Closing tags that do not occur any more: they are searched for once."""
        self._over = False
        """Whether a thought has been closed already; a lone closing tag is then plain text."""
        self._leading = True
        self.end = 0
        """End of the last thought that was found."""
        if in_thought:
            closing = re.search("|".join(map(re.escape, _THOUGHTS.values())), text, re.IGNORECASE)
            self._close(len(text) if closing is None else closing.end())

    def skip(self, tag: re.Match[str]) -> int:
        """The position behind a tag of thoughts, or behind the thought that it opens."""
        name = tag[0].lower()
        self._leading = self._leading and not self._text[self.end : tag.start()].strip()
        if name not in _THOUGHTS:
            if not self._over:
                self._close(tag.end())
            return tag.end()
        closing = self._closing(_THOUGHTS[name], tag.end())
        if closing is None and not self._leading:
            return tag.end()  # a mention
        self._close(len(self._text) if closing is None else closing)
        return self.end

    def _closing(self, tag: str, at: int) -> int | None:
        if tag in self._unclosed:
            return None
        found = re.compile(re.escape(tag), re.IGNORECASE).search(self._text, at)
        if found is None:
            self._unclosed.add(tag)
            return None
        return found.end()

    def _close(self, end: int) -> None:
        self.end, self._over = end, True


def _calls_at(text: str, at: int) -> tuple[list[ToolCall], int]:
    """The calls behind an opening tag at `at`, and where they end; none where the tag is only mentioned."""
    found: list[ToolCall] = []
    while text.startswith(("{", "["), body := _end_of_blank(text, at)) and not (found and text[body] == "["):
        try:
            _, at = _EXTENT.raw_decode(text, body)
        except json.JSONDecodeError as error:
            malformed, end = _malformed(text, body, error.pos)
            return [*found, *malformed], end
        except RecursionError:
            return [*found, _call_of(text[body:])], len(text)
        found.append(_call_of(text[body:at]))
    if not found:
        return _malformed(text, body, body)
    return found, body + len("</tool_call>") if text.startswith("</tool_call>", body) else at


def _malformed(text: str, body: int, scanned: int) -> tuple[list[ToolCall], int]:
    """A call that is no JSON ends at the next tag behind what was `scanned`. Without an object it is none at all where
    another call begins before its closing tag: the text mentions the tag.
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
        arguments = call.get("parameters")  # as Llama 3 writes it
    if isinstance(arguments, str):  # spelled twice, as in OpenAI's messages
        try:
            arguments = _plain(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return ToolCall(call["name"], None, f"the arguments are no JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], None, f"expected arguments by name, got a {type(arguments).__name__}")
    return ToolCall(call["name"], arguments)


def _plain(text: str) -> Any:
    """JSON that can be written down again: no NaN, no number beyond all floats (1e999 is read as infinity), and no
    halves of surrogate pairs, which JSON can spell out.

    Raises ValueError or RecursionError for what is none.
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
    """What each of a response's tokens adds to its text; joined, they are that text.

    A character of several tokens is the last one's. Decoded alone, a token may be told otherwise than behind another (a
    space before it is left out, say), so each is decoded behind those before it, as many as may matter.
    """
    text, found, at, length = decode(ids), [], 0, 0
    first, before = 0, ""
    for index in range(len(ids)):
        if index % _BEFORE == 0:
            first = max(0, index - _BEFORE)
            before = decode(ids[first:index])
        now = decode(ids[first : index + 1])
        length += len(now) - len(before)
        whole = length - len(now) + len(now.rstrip("\ufffd"))  # what is half a character yet is not told yet
        end = len(text) if index + 1 == len(ids) else min(max(at, whole), len(text))
        found.append(text[at:end])
        at, before = end, now
    return found


def without_nulls(message: Message, *, in_arguments: bool = False) -> Message:
    """`message` without the keys that are null and without an empty list of tool calls; `content` may be null.

    Chat templates test whether a key is there. OpenAI's client writes every key of its types (`model_dump()`), and
    Parquet every key that any row has. `in_arguments`: remove nulls from the calls' arguments too, where Parquet has
    written them; elsewhere they are values.
    """
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    depth = _DEPTH if in_arguments else _CALL_LEVELS
    for key in ("tool_calls", "function_call", "content"):
        if isinstance(kept.get(key), list | tuple | Mapping):
            kept[key] = _bare(kept[key], depth)
    if kept.get("tool_calls") in ([], ()):
        del kept["tool_calls"]
    return kept


_CALL_LEVELS = 2
"""Objects in each other: a call, and its function; what is farther down are arguments."""


def _bare(value: Any, depth: int) -> Any:
    """`value` without null keys, down to `depth` levels of objects."""
    if isinstance(value, list | tuple):
        return [_bare(one, depth) for one in value]
    if isinstance(value, Mapping) and depth > 0:
        return {key: _bare(one, depth - 1) for key, one in value.items() if one is not None}
    return value


def content_text(content: object) -> str:
    """The text of a message's content: a text, nothing, or OpenAI's list of parts, of which those of text count."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def message_text(message: Message) -> str:
    """What a message says: its content, and its calls of tools spelled out. Raises ModelError for what is no call."""
    content = message.get("content")
    if isinstance(content, str) and not message.keys() & _CALL_KEYS:  # as most are; traces have many
        return content
    calls = [_call_spelled(call) for call in _calls_in(message)]
    return "\n".join(filter(None, (content_text(content), *calls)))


def _for_template(message: Message) -> Message:
    """A message as chat templates read it: its content is a text, and its calls have today's form."""
    plain = without_nulls(message)
    plain["content"] = content_text(plain.get("content"))
    if plain.get("role") == "function":
        plain["role"] = "tool"
    if calls := _calls_in(plain):
        plain = {**plain, "tool_calls": calls}
        plain.pop("function_call", None)
    return plain


def _spelled_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for a template that knows no tools: all that is about them in the contents."""
    plain: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            # Results of one response's calls make one message: most templates want turns to alternate.
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            if plain and plain[-1].get("of_tools"):
                plain[-1]["content"] += f"\n{content}"
            else:
                plain.append({"role": "user", "content": content, "of_tools": True})
            continue
        plain.append({"role": message.get("role"), "content": message_text(message)})
    if tools:
        own = [plain.pop(0)["content"]] if plain and plain[0]["role"] == "system" else []
        plain.insert(0, {"role": "system", "content": "\n\n".join((*own, _told(tools)))})
    return [{"role": message["role"], "content": message["content"]} for message in plain]


_CALL_KEYS = frozenset(("tool_calls", "function_call"))


def _calls_in(message: Message) -> list[dict[str, Any]]:
    """A message's tool calls, with arguments as chat templates want them: OpenAI's messages have them as a text, of
    which a template that writes JSON would write the quotation marks. Raises ModelError for what is no call.

    A `function_call`, the form that OpenAI had before, counts as one.
    """
    before = message.get("function_call")
    calls = message.get("tool_calls") or ([] if before is None else [{"type": "function", "function": before}])
    found = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ModelError('tool_calls: expected a list of {"function": {"name": ..., "arguments": ...}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = _plain(arguments) if arguments.strip() else {}
        found.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return found


def _call_spelled(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _told(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. These are there:\n<tools>\n{listed}\n</tools>\n"
        "For each call, write a JSON object with the function's name and its arguments:\n"
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    )


class _Remover:
    """Takes tokens out of texts, in time linear in a text's length, whatever stands in it.

    Aho and Corasick, "Efficient string matching" (1975). A state stands for the longest end of a text that begins a
    token; 0 is that of none.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        """By state: the state behind a letter, 0 where none is named."""
        self._whole = [0]
        """By state: the length of the shortest token that ends there, 0 where none does."""
        for token in tokens:
            state = 0
            for letter in token:
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self._whole.append(0)
                state = self._next[state][letter]
            self._whole[state] = len(token)
        # Shorter ones first: what a state takes over from that of its longest proper end must be complete.
        found = [(state, 0) for state in self._next[0].values()]
        for state, end in found:
            found += [(after, self._next[end].get(letter, 0)) for letter, after in self._next[state].items()]
            self._next[state] = {**self._next[end], **self._next[state]}
            self._whole[state] = self._whole[end] or self._whole[state]

    def __call__(self, text: str) -> str:
        """`text` without them. Each is taken out as soon as it is whole, so of halves that meet then none is left."""
        if not any(letter in text for letter in self._next[0]):  # as most are, and it is hundreds of times as quick
            return text
        following, wholes, state = self._next, self._whole, 0
        kept, states = [""], [0]
        for letter in text:
            state = following[state].get(letter, 0)
            kept.append(letter)
            states.append(state)
            if whole := wholes[state]:
                del kept[-whole:], states[-whole:]
                state = states[-1]
        return "".join(kept)


class ChatTokenizer:
    """Messages to prompt text and tokens, and a response's tokens to text.

    `tokenizer`: as transformers has it. `end_ids`: the `eos_token_id` of the model's generation configuration.
    `n_tokens`: token ids that the model has, where its vocabulary is padded; default: those of the tokenizer.
    """

    def __init__(self, tokenizer: Any, end_ids: int | Iterable[int] | None = None, n_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._n_tokens = max(n_tokens or 0, len(tokenizer))
        given = [] if end_ids is None else [end_ids] if isinstance(end_ids, int) else sorted(end_ids)
        padding = (tokenizer.pad_token_id, *given, tokenizer.eos_token_id, 0)
        self.pad_id = int(next(token for token in padding if token is not None))
        """Stands where there is no token; the prompt's only one where the messages have none."""
        ends = (*given, tokenizer.eos_token_id, self._end_of_turn())
        self.end_ids = frozenset(int(token) for token in ends if token is not None)
        """Tokens that end a response: those of the model, of the tokenizer and of the chat template."""
        special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        ending = {id: text for id, text in special.items() if not _READ_BACK.fullmatch(text)}
        self._left_out = frozenset(ending) if len(ending) < len(special) else None
        """Tokens that no text shows, where the tokenizer's own choice of them would hide thoughts or calls."""
        self.special_tokens = [token for token in (*ending.values(), *self._turn_tokens()) if token]
        """What no message may spell: those that the tokenizer calls special, and those of turns that it does not."""
        self._without_special_tokens = _Remover(self.special_tokens)

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[int, ...]]:
        """Prompt text and tokens; with the tokenizer's chat template where it has one, else the contents in lines.

        `tools`: JSON schemas of functions, as OpenAI has them. Special tokens that are spelled out in a message are
        taken out of it, and so are the tokens that the template writes around turns: what one agent writes must not be
        able to close the next one's turn. `prompt` as a text is what the model reads, special tokens included, and none
        is added: who gives one answers for what stands in it. Raises ModelError for messages that the chat template
        refuses or trips over, and for tokens that there are not.
        """
        if isinstance(prompt, PromptIds):
            if unknown := [token for token in prompt if not 0 <= token < self._n_tokens]:
                raise ModelError(f"prompt: expected tokens from 0 to {self._n_tokens - 1}, got {unknown[0]}")
            return str(self.tokenizer.decode(list(prompt))), tuple(prompt)
        text = prompt if isinstance(prompt, str) else self._text(prompt, tools)
        bare = not isinstance(prompt, str) and not self.tokenizer.chat_template  # a template writes them itself
        ids = self._begun(text) if bare else self._ids(text)
        return text, tuple(ids) or (self.pad_id,)  # there must be a position to predict from

    def follow(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between a response and the next one of the same agent: the end of its turn, `messages` by others
        (the results of its calls), and the beginning of its next turn.

        The end-of-sequence token is left out, which the response has already. Raises ModelError where the tokenizer's
        chat template leaves responses out.
        """
        spoken: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}]
        _, mark, text = self._text((*spoken, *messages), ()).partition(_MARK)
        if not mark:
            raise ModelError("the chat template leaves a response out that tools were called in")
        if not self.tokenizer.chat_template:
            text += "\n"
        ids = tuple(self._ids(text))
        return ids[1:] if ids and ids[0] in self.end_ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens; the tags of thoughts and tool calls are kept."""
        if self._left_out is not None:
            return str(self.tokenizer.decode([id for id in ids if id not in self._left_out]))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _begun(self, text: str) -> list[int]:
        """The tokens of `text` behind those that the tokenizer begins a text with.

        Tokens that it adds at the end are left out: an end-of-sequence token would end the prompt before the response.
        """
        plain, whole = self._ids(text), list(self.tokenizer(text, add_special_tokens=True)["input_ids"])
        if not plain:
            return whole[: whole[:1] == [self.tokenizer.bos_token_id]]
        starts = (k for k in range(len(whole) - len(plain) + 1) if whole[k : k + len(plain)] == plain)
        begin = next(starts, None)
        return plain if begin is None else whole[: begin + len(plain)]

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        # Cleaned as the template gets it: what is still a list of parts, or JSON's escapes, may hide a special token.
        plain = [_for_template(message) for message in messages]
        plain, tools = self._clean(plain), self._clean(tools)
        template = self.tokenizer.chat_template
        if not template or "tool" not in template:
            plain, tools = _spelled_out(plain, tools), ()
        if not template:
            return "\n".join(message["content"] for message in plain)
        return self._rendered(plain, tools)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, answering: bool = True
    ) -> str:
        """The chat template's text for messages. Raises ModelError for those that it refuses or trips over.

        `answering`: whether the beginning of a response follows.
        """
        asked: dict[str, Any] = {"tools": list(tools)} if tools else {}
        from jinja2 import TemplateError

        try:
            made = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answering, **asked
            )
        except TemplateError as error:
            raise ModelError(f"the chat template refuses these messages: {first_line(error)}") from error
        # A template computes with whatever a client sent under whatever name.
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ModelError(f"the chat template cannot read these messages: {why}") from error
        return str(made)

    def _end_of_turn(self) -> int | None:
        """The token that the chat template writes behind a response; None where it writes none.

        A token that it also writes inside a response ends none: gpt-oss closes its analysis with `<|end|>`.
        """
        if not self.tokenizer.chat_template:
            return None
        user: Message = {"role": "user", "content": _MARK}
        said: Message = {"role": "assistant", "content": _MARK}
        call = {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": {}}}
        behind = called = ""
        with suppress(ModelError, ImportError):  # as in `_turn_tokens`
            behind = self._rendered([user, said], answering=False).rpartition(_MARK)[2].lstrip()
        with suppress(ModelError, ImportError):  # not every template takes calls
            called = self._rendered([user, {**said, "tool_calls": [call]}], answering=False).rpartition(_MARK)[2]
        token = next(iter(self._ids(behind)), None)
        if token is None or (added := self.tokenizer.added_tokens_decoder.get(token)) is None:
            return None
        ends = added.special or (_CONTROL.fullmatch(added.content) and not _READ_BACK.fullmatch(added.content))
        inside, name, _ = called.partition(_NAME)
        return token if ends and not (name and added.content in inside) else None

    def _turn_tokens(self) -> list[str]:
        """Added tokens that the tokenizer does not call special, but that the chat template writes around turns.

        None where it renders no exchange.
        """
        added = {
            id: token.content
            for id, token in self.tokenizer.added_tokens_decoder.items()
            if not token.special and _CONTROL.fullmatch(token.content) and not _READ_BACK.fullmatch(token.content)
        }
        if not added or not self.tokenizer.chat_template:
            return []
        exchange = [{"role": role, "content": _MARK} for role in ("system", "user", "assistant", "user")]
        for messages in (exchange, exchange[1:], exchange[-1:]):  # not every template takes a system prompt, or turns
            with suppress(ModelError, ImportError):  # without jinja2 no messages are read later either
                ids = set(self.tokenizer(self._rendered(messages), add_special_tokens=False)["input_ids"])
                return [token for id, token in added.items() if id in ids]
        return []

    def _clean(self, value: Any) -> Any:
        """`value` without special tokens, in whatever depth, names among them."""
        if isinstance(value, str):
            return self._without_special_tokens(value)
        if isinstance(value, list | tuple):
            return [self._clean(one) for one in value]
        if isinstance(value, Mapping):
            return {self._clean(key): self._clean(one) for key, one in value.items()}
        return value
