"""OpenAI's wire format for a policy in training: requests of clients, and their answers.

Options that such a policy cannot support are refused, unless the recipe allows ignoring them. Nothing is ignored
silently: a client's idea of the sample must match the trained tokens. This module has no rollouts and no server.
Imports pydantic.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from creditflow.data import Message, Step
from creditflow.data.messages import without_nulls
from creditflow.rollout.chat import PromptIds, opens_thought, parse_tool_calls
from creditflow.rollout.recorder import Reply

MOST_CHOICES = 64
MOST_MESSAGES = 4096
_COOLEST = 0.01
"""Lower temperatures above 0 give log-probs beyond the range of floats."""
_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        "audio prediction web_search_options max_new_tokens allowed_token_ids prompt_embeds prompt_logprobs "
        "custom_logit_processor custom_params vllm_xargs nvext session_params lora_path adapter_id samplers truncate "
        "truncate_prompt_tokens repetition_detection thinking_token_budget thinking_budget guided_json guided_regex "
        "guided_choice guided_grammar structural_tag structured_outputs response_schema regex ebnf json_schema "
        "chat_template",
    ),
    ((1,), "top_p typical_p typical tfs_z tfs best_of repetition_penalty repeat_penalty length_penalty"),
    (
        (0,),
        "min_p presence_penalty frequency_penalty top_logprobs top_n_tokens n_probs min_tokens min_new_tokens top_a "
        "nsigma eta_cutoff epsilon_cutoff dynatemp_range smoothing_factor xtc_probability dry_multiplier mirostat "
        "mirostat_mode",
    ),
    ((-1, 0), "top_k top_n_sigma"),
    ((-1,), "n_predict"),
    (("",), "suffix grammar input_prefix input_suffix"),
    (
        (False,),
        "echo ignore_eos use_beam_search guided_json_object continue_final_message add_special_tokens watermark "
        "return_hidden_states return_tokens_as_token_ids no_stop_trim include_stop_str_in_output return_full_text",
    ),
    ((True,), "do_sample add_generation_prompt skip_special_tokens spaces_between_special_tokens"),
    (([],), "functions stop_token_ids stop_regex stop_sequences bad_words logits_processors documents lora"),
    (({},), "chat_template_kwargs"),
    (({}, []), "logit_bias"),
    ((["text"],), "modalities"),
    (({"type": "text"},), "response_format"),
    (("auto", "none"), "tool_choice"),
    (("none", "auto"), "function_call"),
)
"""Fields of OpenAI, vLLM, SGLang, llama.cpp and TGI that would change the sample or its report, and the values besides
null that have no effect. A field that only refines another one (`mirostat_tau`) does nothing alone."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    name: (None, *values) for values, names in _NEUTRAL_VALUES for name in names.split()
}
REFUSED_FIELDS = frozenset(_NEUTRAL)
"""Allowed names in `team.ignored_fields`."""


@dataclass(eq=False)
class Refused(Exception):
    """A request that is refused."""

    status: int
    """As in HTTP."""
    message: str
    code: str | None = None
    """As in OpenAI's errors."""
    param: str | None = None
    again: bool | None = None
    """Whether OpenAI's client should retry; None: the client decides."""

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="allow")


class StreamOptions(_RequestBody):
    """Options of a stream."""

    include_usage: bool | None = False


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Request(_RequestBody):
    """Fields of both kinds of requests."""

    model: str = Field(max_length=256)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[Text], BeforeValidator(_listed), Field(max_length=16)] = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    """Kept with the step, for reward functions."""
    return_token_ids: bool | None = False
    """As in vLLM: return the tokens of prompt and response, as used in training."""

    def ignored(self, allowed: Collection[str] = ()) -> tuple[str, ...]:
        """Return the names of ignored fields.

        Raises Refused for a field that would change the sample, unless `allowed` contains it.
        """
        if self.temperature is not None and 0 < self.temperature < _COOLEST:
            raise Refused(400, f"temperature: expected 0, or {_COOLEST:g} and more", param="temperature")
        ignored = []
        for name, value in (self.model_extra or {}).items():
            if value in _NEUTRAL.get(name, (None,)):
                continue
            if name in _NEUTRAL and name not in allowed:
                neutral = " or ".join(json.dumps(one) for one in _NEUTRAL[name] if one is not None) or "nothing"
                raise Refused(
                    400,
                    f"{name}: expected {neutral}: what is sampled here is trained on as it was sampled; "
                    f"team.ignored_fields: [{name}] in the recipe lets it be ignored",
                    code="unsupported_parameter",
                    param=name,
                )
            ignored.append(name)
        return tuple(sorted(ignored))


class FunctionDefinition(_RequestBody):
    """The function of a tool."""

    name: str = Field(max_length=256)


class ToolDefinition(_RequestBody):
    """One tool of a request."""

    type: Literal["function"]
    function: FunctionDefinition


_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of a message's content, and the key of each part's text."""


class ChatMessage(_RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None

    @field_validator("content")
    @classmethod
    def _texts(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type")
            if not isinstance(kind, str) or kind not in _PARTS:
                raise ValueError(f"a part of type {str(kind)[:80]!r}: expected text")
            if not isinstance(part.get(_PARTS[kind]), str):
                raise ValueError(f"a part of type {kind!r}: expected its {_PARTS[kind]} as a text")
        if isinstance(content, list):
            return [{"type": "text", "text": part[_PARTS[part["type"]]]} for part in content]
        return content


class ChatRequest(Request):
    """`POST chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    tools: list[ToolDefinition] | None = Field(None, max_length=512)
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False

    def ignored(self, allowed: Collection[str] = ()) -> tuple[str, ...]:
        # Only one of several calls is reported, but all were sampled, and are trained on.
        several = ("parallel_tool_calls",) if self.parallel_tool_calls is False else ()
        return tuple(sorted((*super().ignored(allowed), *several)))

    @property
    def conversation(self) -> list[Message]:
        """The messages in the form that chat templates read."""
        plain = [message.model_dump(exclude_unset=True) for message in self.messages]
        return [without_nulls({**one, "role": _ROLES.get(one["role"], one["role"])}) for one in plain]

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Schemas of the functions that may be called; None if the request has none, and the agent's tools apply."""
        if (self.model_extra or {}).get("tool_choice") == "none":
            return []
        return None if self.tools is None else [tool.model_dump() for tool in self.tools]

    @property
    def most_tokens(self) -> int | None:
        """The limit under its new name or its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_ROLES = {"developer": "system", "function": "tool"}


def _prompts(value: Any) -> Any:
    one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if one else value


Tokens = Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]


class TextRequest(Request):
    """`POST completions`."""

    prompt: Annotated[list[str | Tokens], BeforeValidator(_prompts), Field(min_length=1, max_length=MOST_CHOICES)]
    logprobs: int | None = Field(None, ge=0, le=1)

    @property
    def prompts(self) -> list[str | PromptIds]:
        """The prompts as the model reads them."""
        return [one if isinstance(one, str) else PromptIds(one) for one in self.prompt]


_Body = TypeVar("_Body", bound=BaseModel)


def parsed(kind: type[_Body], body: bytes) -> _Body:
    """Parse a request body. Raises Refused if it is invalid."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None) from None


# Answers

_CALL_ID = re.compile(r"call_([0-9a-f]{8})_(\d{1,9})_\d{1,9}")


def _call_id(step: Step, number: int) -> str:
    return f"call_{_rollout_of(step.trajectory_id)}_{step.index}_{number}"


def _rollout_of(trajectory_id: str) -> str:
    """Return a short hash of a trajectory's id, for the ids of its tool calls.

    A prompt may contain a conversation of another trajectory.
    """
    return hashlib.blake2b(trajectory_id.encode(errors="replace"), digest_size=4).hexdigest()


def answered(messages: Sequence[Message], trajectory_id: str) -> list[int]:
    """Return the indices of a trajectory's steps whose tool calls a conversation answers."""
    ids = [message.get("tool_call_id") for message in messages]
    matches = [_CALL_ID.fullmatch(id) for id in ids if isinstance(id, str)]
    return [int(match[2]) for match in matches if match and match[1] == _rollout_of(trajectory_id)]


TokensOf = Callable[[Reply], list[dict[str, Any]]]
"""Returns a reply's tokens in the format of chat completions."""


def completion(request: ChatRequest | TextRequest, replies: Sequence[Reply], tokens_of: TokensOf) -> dict[str, Any]:
    """Return a `chat.completion` or a `text_completion`, with one choice for each reply."""
    if isinstance(request, ChatRequest):
        kind, prompts = "chat.completion", replies[:1]
        choices = [_chat_choice(request, reply, tokens_of) for reply in replies]
        prompt_ids = _prompt_ids(request, replies[0])  # vLLM sends it once for a chat, else with each choice
    else:
        kind, prompts, prompt_ids = "text_completion", replies, {}
        choices = [_text_choice(request, reply, tokens_of) for reply in replies]
    for index, (choice, reply) in enumerate(zip(choices, replies, strict=True)):
        choice |= {"index": index, "step_id": reply.step.id}
        if request.return_token_ids:
            choice["token_ids"] = list(reply.step.response_ids)
    read = sum(_count(reply, "prompt_tokens", reply.step.prompt_ids) for reply in prompts)
    sampled = sum(_count(reply, "completion_tokens", reply.step.response_ids) for reply in replies)
    return {
        "id": replies[0].step.id,
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"policy-version-{replies[0].step.policy_version}",
        **prompt_ids,
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
    }


def streamed(answer: Mapping[str, Any], *, usage: bool) -> bytes:
    """Return an answer as server-sent events: for each choice its role, its content, and its finish reason."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage", "prompt_token_ids")}
    if chat := "message" in answer["choices"][0]:
        head["object"] = "chat.completion.chunk"
    chunks = [
        {**head, "choices": [part]} for choice in answer["choices"] for part in (_deltas if chat else _texts)(choice)
    ]
    if "prompt_token_ids" in answer:
        chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    if usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    lines = [json.dumps(chunk) for chunk in chunks]  # in ASCII: for many clients U+2028 ends a line
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()


def _texts(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    end = {name: choice[name] for name in ("index", "finish_reason", "step_id")}
    return [{**choice, "finish_reason": None}, {**end, "text": "", "logprobs": None}]


def _deltas(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    if calls := message.get("tool_calls"):
        deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
    parts: list[dict[str, Any]] = [{"index": choice["index"], "delta": one, "finish_reason": None} for one in deltas]
    parts[-1] |= {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
    end = {name: choice[name] for name in ("index", "finish_reason", "step_id")}
    return [*parts, {**end, "delta": {}}]


def _chat_choice(request: ChatRequest, reply: Reply, tokens_of: TokensOf) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    finish = _finish_reason(reply)
    if request.schemas and finish == "stop":
        text, calls = parse_tool_calls(reply.text, in_thought=opens_thought(reply.step.prompt))
        if calls and all(call.arguments is not None for call in calls):  # malformed calls stay text for the client
            finish = "tool_calls"
            kept = calls[:1] if request.parallel_tool_calls is False else calls
            named = [call.to_message(_call_id(reply.step, i)) for i, call in enumerate(kept)]
            message |= {"content": text or None, "tool_calls": named}
    logprobs = {"content": tokens_of(reply), "refusal": None} if request.logprobs else None
    return {"message": message, "finish_reason": finish, "logprobs": logprobs}


def _text_choice(request: TextRequest, reply: Reply, tokens_of: TokensOf) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": reply.text, "finish_reason": _finish_reason(reply), "logprobs": None}
    if request.logprobs is not None:
        tokens = tokens_of(reply)
        texts = [token["token"] for token in tokens]
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        }
    return {**choice, **_prompt_ids(request, reply)}


def _prompt_ids(request: Request, reply: Reply) -> dict[str, Any]:
    return {"prompt_token_ids": list(reply.step.prompt_ids)} if request.return_token_ids else {}


def _count(reply: Reply, name: str, ids: Sequence[int]) -> int:
    """Return the number of tokens; for a policy behind an endpoint, the server's count."""
    count = reply.step.info.get(name)
    return count if isinstance(count, int) else len(ids)


def _finish_reason(reply: Reply) -> str:
    return str(reply.step.info.get("finish_reason", "stop"))
