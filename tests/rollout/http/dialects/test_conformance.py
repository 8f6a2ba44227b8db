"""The tables of docs/reference/api_dialects.md, compared with the code and with the types of the official clients."""

import json
import re
import types
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic import types as anthropic_types
from anthropic.types import beta as anthropic_beta
from openai.types import chat, responses
from openai.types.chat.chat_completion_content_part_param import ChatCompletionContentPartParam
from openai.types.responses.response_output_message_param import Content

from creditflow.rollout.http.dialects import DIALECTS
from creditflow.rollout.http.requests import RefusedError, parsed
from tests.paths import DOCS

PAGE = (DOCS / "reference" / "api_dialects.md").read_text()
NAME = re.compile(r"`([^`]+)`")


def table(title: str) -> dict[str, tuple[str, str]]:
    """Return the rows of the table under a heading: name -> how it is treated, and the remark."""
    section = re.split(r"^#+ ", PAGE.split(f"### {title}\n")[1], flags=re.MULTILINE)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {name: (row[1].strip(" |"), row[2] if len(row) > 2 else "") for row in rows for name in NAME.findall(row[0])}


def fields(*kinds) -> set[str]:
    return {name for kind in kinds for name in get_type_hints(kind, include_extras=True)}


def members(kind) -> list:
    """Return the members of a union type at any depth."""
    if get_origin(kind) is Annotated:
        return members(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [member for one in get_args(kind) for member in members(one)]
    return [kind]


def kinds(union) -> set[str]:
    """Return the values of `type` of the members of a union."""
    found = set()
    for member in members(union):
        literal = get_type_hints(member)["type"]
        while get_origin(literal) is not Literal:
            literal = get_args(literal)[0]
        found.update(get_args(literal))
    return found


def both(params, name: str) -> set[str]:
    return fields(getattr(params, f"{name}NonStreaming"), getattr(params, f"{name}Streaming"))


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
RESPONSE = {"model": "m", "input": "x"}
MESSAGE = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def treated(dialect: str, body: dict, listed: str) -> str:
    """Return how a request is treated; `listed`: the name of the tested field in the list of ignored ones."""
    try:
        ignored = parsed(DIALECTS[dialect].request, json.dumps(body).encode()).ignored()
    except RefusedError:
        return "refused"
    return "ignored" if listed in ignored else "supported"


def treated_field(dialect: str, body: dict, name: str) -> str:
    request = DIALECTS[dialect].request
    if name in request.model_fields and name not in request.neutral:
        return "supported"
    return treated(dialect, {**body, name: 3}, name)


MESSAGE_PARAMS = both(anthropic_types.message_create_params, "MessageCreateParams") | both(
    anthropic_beta.message_create_params, "MessageCreateParams"
)
TOP = [
    ("chat", "openai_chat", CHAT, both(chat.completion_create_params, "CompletionCreateParams")),
    ("response", "openai_responses", RESPONSE, both(responses.response_create_params, "ResponseCreateParams")),
    ("message", "anthropic_messages", MESSAGE, MESSAGE_PARAMS),
]


@pytest.mark.parametrize(("kind", "dialect", "body", "official"), TOP, ids=[top[0] for top in TOP])
def test_every_field_of_the_client_is_treated_as_documented(kind, dialect, body, official):
    rows, request = table(f"Fields of a {kind} request"), DIALECTS[dialect].request
    assert set(rows) == official | set(request.model_fields)
    assert {name: row[0] for name, row in rows.items()} == {name: treated_field(dialect, body, name) for name in rows}
    for name, (treatment, remark) in rows.items():
        if treatment == "refused":
            neutral = [value for value in request.neutral[name] if value is not None]
            assert [json.loads(value) for value in NAME.findall(remark)] == neutral, name
            assert all(treated(dialect, {**body, name: value}, name) == "supported" for value in [None, *neutral]), name


def chat_part(kind: str) -> dict:
    return {**CHAT, "messages": [{"role": "user", "content": [{"type": kind, "text": "", "refusal": ""}]}]}


def input_item(kind: str) -> dict:
    more = {"role": "user", "content": "x", "call_id": "c", "name": "f", "arguments": "{}", "output": "x"}
    return {**RESPONSE, "input": [{"type": kind, **more}]}


def item_part(kind: str) -> dict:
    return {**RESPONSE, "input": chat_part(kind)["messages"]}


TOOL = {"name": "f", "parameters": {}, "input_schema": {}}


def response_tool(kind: str) -> dict:
    return {**RESPONSE, "tools": [{"type": kind, **TOOL}]}


def block(kind: str) -> dict:
    more = {"text": "x", "id": "c", "name": "f", "input": {}, "tool_use_id": "c", "content": "x"}
    return {**MESSAGE, "messages": [{"role": "user", "content": [{"type": kind, **more}]}]}


def message_tool(kind: str) -> dict:
    return {**MESSAGE, "tools": [{"type": kind, **TOOL}]}


def text_field(name: str) -> dict:
    return {**RESPONSE, "text": {name: 3}}


def function_field(name: str) -> dict:
    known = {"type": "function", "description": "x", "strict": True, **TOOL}
    return {**RESPONSE, "tools": [known if name in known else {**known, name: True}]}


def output_field(name: str) -> dict:
    return {**MESSAGE, "output_config": {name: 3}}


def choice_field(name: str) -> dict:
    return {**MESSAGE, "tool_choice": {"type": "auto", name: "auto" if name == "type" else True}}


BLOCKS = {
    anthropic_types.TextBlockParam: {"type": "text", "text": "x"},
    anthropic_types.ToolUseBlockParam: {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    anthropic_types.ToolResultBlockParam: {"type": "tool_result", "tool_use_id": "c", "content": "x"},
}


def block_field(name: str) -> dict:
    blocks = [{name: True, **block} if name in fields(kind) else block for kind, block in BLOCKS.items()]
    return {**MESSAGE, "messages": [{"role": "user", "content": blocks}]}


def tool_field(name: str) -> dict:
    known = {"type": "custom", "description": "x", "strict": True, "name": "f", "input_schema": {}}
    return {**MESSAGE, "tools": [{name: True, **known}]}


CHOICES = members(anthropic_types.message_create_params.ToolChoice)
ITEM_PARTS = kinds(responses.ResponseInputContentParam) | kinds(Content)
OBJECTS = {
    "openai_chat": [("Parts of a chat message", kinds(ChatCompletionContentPartParam) | {"refusal"}, chat_part)],
    "openai_responses": [
        ("Input items", kinds(responses.ResponseInputItemParam), input_item),
        ("Parts of an item", ITEM_PARTS, item_part),
        ("Tools of a response request", kinds(responses.ToolParam), response_tool),
        ("Fields of text", fields(responses.ResponseTextConfigParam), text_field),
        ("Fields of a function", fields(responses.FunctionToolParam), function_field),
    ],
    "anthropic_messages": [
        ("Content blocks", kinds(anthropic_types.ContentBlockParam), block),
        ("Tools of a message request", kinds(anthropic_types.ToolUnionParam), message_tool),
        ("Fields of output_config", fields(anthropic_beta.BetaOutputConfigParam), output_field),
        ("Fields of tool_choice", fields(*CHOICES) - {"name"}, choice_field),
        ("Fields of a block", fields(*BLOCKS), block_field),
        ("Fields of a tool", fields(anthropic_types.ToolParam), tool_field),
    ],
}


@pytest.mark.parametrize("dialect", OBJECTS)
def test_every_part_of_an_object_is_treated_as_documented(dialect):
    for title, official, body_of in OBJECTS[dialect]:
        rows = table(title)
        assert set(rows) == official, title
        refused = {name for name in rows if treated(dialect, body_of(name), name) == "refused"}
        assert {name for name, row in rows.items() if row[0] == "refused"} == refused, title


UNKNOWN = {"unknown": 3}


ANY, FORM = {"type": "any"}, {"format": {"type": "json_schema", "schema": {}}}
CHOSEN = {"type": "function", "function": {"name": "add"}}
SAMPLED = {
    "grammar": "root ::= x",
    "guided_json": {},
    "repetition_penalty": 1.2,
    "tool_choice": CHOSEN,
    "typical_p": 0.2,
}
REASONING = ["reasoning.encrypted_content"]
ALLOWED = [
    ("openai_chat", {**CHAT, **SAMPLED}, " ".join(SAMPLED)),
    ("openai_chat", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ("openai_chat", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("openai_responses", {**RESPONSE, "text": FORM, "include": REASONING}, "include text.format"),
    ("anthropic_messages", {**MESSAGE, "output_config": FORM, "tool_choice": ANY}, "output_config.format tool_choice"),
]


@pytest.mark.parametrize(("dialect", "body", "names"), ALLOWED)
def test_refused_fields_are_ignored_if_allowed(dialect, body, names):
    allowed = tuple(names.split())
    request = parsed(DIALECTS[dialect].request, json.dumps(body).encode())
    assert request.ignored(allowed) == allowed
    for name in {*allowed} - {"include"}:  # an unknown part of it is ignored
        with pytest.raises(RefusedError, match=rf"^{name}: expected .* team\.ignored_fields: \[{name}\]"):
            request.ignored({*allowed} - {name})


def test_unknown_field_of_a_chat_message_reaches_the_template():
    body = {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], **UNKNOWN}]}
    request = parsed(DIALECTS["openai_chat"].request, json.dumps(body).encode())
    assert request.ignored() == ()
    assert request.asked().messages == body["messages"]


def test_page_lists_every_dialect():
    assert {f"POST {dialect.path}" for _, dialect in DIALECTS.items()} <= set(
        NAME.findall(PAGE.split("## OpenAI chat")[0])
    )
