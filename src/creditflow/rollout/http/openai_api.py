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
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}, []),
    "top_logprobs": (None, 0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    # Fields of vLLM and SGLang
    "min_tokens": (None, 0),
    "min_new_tokens": (None, 0),
    "max_new_tokens": (None,),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "stop_regex": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "logits_processors": (None, []),
    "custom_logit_processor": (None,),
    "custom_params": (None,),
    "vllm_xargs": (None,),
    "nvext": (None,),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "thinking_budget": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json_object": (None, False),
    "structural_tag": (None,),
    "structured_outputs": (None,),
    "response_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None, False),
    "prompt_embeds": (None,),
    "session_params": (None,),
    "lora_path": (None,),
    "prompt_logprobs": (None,),
    "return_hidden_states": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "return_tokens_as_token_ids": (None, False),
    "no_stop_trim": (None, False),
    "include_stop_str_in_output": (None, False),
    # Fields of llama.cpp, similar servers, and TGI; fields that only refine another one (`mirostat_tau`) do nothing
    # alone
    "n_predict": (None, -1),
    "typical_p": (None, 1),
    "typical": (None, 1),
    "tfs_z": (None, 1),
    "tfs": (None, 1),
    "top_a": (None, 0),
    "top_n_sigma": (None, -1, 0),
    "nsigma": (None, 0),
    "eta_cutoff": (None, 0),
    "epsilon_cutoff": (None, 0),
    "dynatemp_range": (None, 0),
    "smoothing_factor": (None, 0),
    "xtc_probability": (None, 0),
    "dry_multiplier": (None, 0),
    "repeat_penalty": (None, 1),
    "mirostat": (None, 0),
    "mirostat_mode": (None, 0),
    "samplers": (None,),
    "grammar": (None, ""),
    "n_probs": (None, 0),
    "lora": (None, []),
    "input_prefix": (None, ""),
    "input_suffix": (None, ""),
    "do_sample": (None, True),
    "watermark": (None, False),
    "stop_sequences": (None, []),
    "top_n_tokens": (None, 0),
    "truncate": (None,),
    "return_full_text": (None, False),
    "adapter_id": (None,),
}
"""Fields that would change the sample or its report, and the values that have no effect."""
REFUSED_FIELDS = frozenset(_NEUTRAL)
"""Allowed names in `team.ignored_fields`."""


class Refused(Exception):
    """A request that is refused; `status` as in HTTP, `code` as in OpenAI's errors.

    `again`: whether OpenAI's client should retry; None: the client decides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        again: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.again = status, code, param, again

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


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
        found = []
        for name, value in (self.model_extra or {}).items():
            if value in _NEUTRAL.get(name, (None,)):
                continue
            if name in _NEUTRAL and name not in allowed:
                neutral = " or ".join(json.dumps(one) for one in _NEUTRAL[name] if one is not None) or "nothing"
                said = (
                    f"{name}: expected {neutral}: what is sampled here is trained on as it was sampled; "
                    f"team.ignored_fields: [{name}] in the recipe lets it be ignored"
                )
                raise Refused(400, said, code="unsupported_parameter", param=name)
            found.append(name)
        return tuple(sorted(found))


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
    found = [_CALL_ID.fullmatch(id) for id in ids if isinstance(id, str)]
    return [int(one[2]) for one in found if one and one[1] == _rollout_of(trajectory_id)]


TokensOf = Callable[[Reply], list[dict[str, Any]]]
"""Returns a reply's tokens in the format of chat completions."""


def chat_answer(asked: ChatRequest, replies: Sequence[Reply], tokens: TokensOf) -> dict[str, Any]:
    """Return a `chat.completion`."""
    choices = [_chat_choice(asked, index, reply, tokens) for index, reply in enumerate(replies)]
    prompt = _prompt_ids(asked, replies[0])  # vLLM sends it once for a chat, and with each choice of a completion
    return {
        **_envelope("chat.completion", asked, replies),
        **prompt,
        "choices": choices,
        "usage": _usage(replies, asked),
    }


def text_answer(asked: TextRequest, replies: Sequence[Reply], tokens: TokensOf) -> dict[str, Any]:
    """Return a `text_completion`."""
    choices = []
    for index, reply in enumerate(replies):
        said = tokens(reply) if asked.logprobs is not None else []
        offsets = [0]
        for token in said:
            offsets.append(offsets[-1] + len(token["token"]))
        listed = {
            "tokens": [token["token"] for token in said],
            "token_logprobs": [token["logprob"] for token in said],
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }
        choices.append(
            {
                "index": index,
                "text": reply.text,
                "finish_reason": _finish_reason(reply),
                "logprobs": None if asked.logprobs is None else listed,
                **_prompt_ids(asked, reply),
                **_ids(asked, reply),
            }
        )
    return {**_envelope("text_completion", asked, replies), "choices": choices, "usage": _usage(replies, asked)}


def streamed(answer: Mapping[str, Any], *, usage: bool) -> bytes:
    """Return an answer as server-sent events: for each choice its role, its content, and its finish reason."""
    kind = str(answer["object"])
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage", "prompt_token_ids")}
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        index, end = choice["index"], choice["finish_reason"]
        if kind == "text_completion":
            chunks.append({**head, "choices": [{**choice, "finish_reason": None}]})
            last = {"index": index, "text": "", "logprobs": None, "finish_reason": end, "step_id": choice["step_id"]}
            chunks.append({**head, "choices": [last]})
            continue
        head["object"] = "chat.completion.chunk"
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if message["content"]:
            deltas.append({"content": message["content"]})
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        made: list[dict[str, Any]] = [{"index": index, "delta": delta, "finish_reason": None} for delta in deltas]
        made[-1] |= {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
        made.append({"index": index, "delta": {}, "finish_reason": end, "step_id": choice["step_id"]})
        chunks += [{**head, "choices": [one]} for one in made]
    if "prompt_token_ids" in answer:
        chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    if usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    lines = [json.dumps(chunk) for chunk in chunks]  # in ASCII: for many clients U+2028 ends a line
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()


def _chat_choice(asked: ChatRequest, index: int, reply: Reply, tokens: TokensOf) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    finish = _finish_reason(reply)
    if asked.schemas and finish == "stop":
        said, calls = parse_tool_calls(reply.text, in_thought=opens_thought(reply.step.prompt))
        meant = [call for call in calls if call.arguments is not None]
        if meant and len(meant) == len(calls):  # malformed calls stay text, visible to the client
            finish = "tool_calls"
            kept = meant if asked.parallel_tool_calls in (None, True) else meant[:1]
            named = [call.to_message(_call_id(reply.step, i)) for i, call in enumerate(kept)]
            message |= {"content": said or None, "tool_calls": named}
    listed = {"content": tokens(reply), "refusal": None} if asked.logprobs else None
    return {"index": index, "message": message, "finish_reason": finish, "logprobs": listed, **_ids(asked, reply)}


def _envelope(kind: str, asked: Request, replies: Sequence[Reply]) -> dict[str, Any]:
    step = replies[0].step
    version = f"policy-version-{step.policy_version}"
    return {
        "id": step.id,
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
        "system_fingerprint": version,
    }


def _prompt_ids(asked: Request, reply: Reply) -> dict[str, Any]:
    return {"prompt_token_ids": list(reply.step.prompt_ids)} if asked.return_token_ids else {}


def _ids(asked: Request, reply: Reply) -> dict[str, Any]:
    tokens = {"token_ids": list(reply.step.response_ids)} if asked.return_token_ids else {}
    return {"step_id": reply.step.id, **tokens}


def _usage(replies: Sequence[Reply], asked: Request) -> dict[str, Any]:
    prompts = replies if isinstance(asked, TextRequest) else replies[:1]
    read, said = sum(_counts(one)[0] for one in prompts), sum(_counts(one)[1] for one in replies)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


def _counts(reply: Reply) -> tuple[int, int]:
    """Return the tokens of prompt and response; for a policy behind an endpoint, the server's counts."""
    told, step = reply.step.info, reply.step
    read, said = told.get("prompt_tokens"), told.get("completion_tokens")
    return (
        read if isinstance(read, int) else len(step.prompt_ids),
        said if isinstance(said, int) else len(step.response_ids),
    )


def _finish_reason(reply: Reply) -> str:
    return str(reply.step.info.get("finish_reason", "stop"))
