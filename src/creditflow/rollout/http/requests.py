"""Requests of clients in the form that all dialects share: fields, refusals, and the record of a dialect.

Options that a policy in training cannot support are refused, unless the recipe allows ignoring them. Nothing is ignored
silently: a client's idea of the sample must match the trained tokens. This module has no rollouts and no server.
Imports pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from creditflow.data import Message
from creditflow.rollout.recorder import Reply

MOST_CHOICES = 64
MOST_MESSAGES = 4096
MOST_TOOLS = 512
_COOLEST = 0.01
"""Lower temperatures above 0 give log-probs beyond the range of floats."""
_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        "audio prediction web_search_options max_new_tokens allowed_token_ids prompt_embeds prompt_logprobs "
        "custom_logit_processor custom_params vllm_xargs nvext session_params lora_path adapter_id truncate "
        "truncate_prompt_tokens repetition_detection thinking_token_budget thinking_budget guided_json guided_regex "
        "guided_choice guided_grammar structural_tag structured_outputs regex ebnf json_schema grammar chat_template",
    ),
    ((1,), "top_p typical_p best_of repetition_penalty length_penalty"),
    ((0,), "min_p presence_penalty frequency_penalty top_logprobs min_tokens min_new_tokens"),
    ((-1, 0), "top_k"),
    (("",), "suffix"),
    (
        (False,),
        "echo ignore_eos use_beam_search guided_json_object continue_final_message add_special_tokens "
        "return_hidden_states return_tokens_as_token_ids no_stop_trim include_stop_str_in_output",
    ),
    ((True,), "add_generation_prompt skip_special_tokens spaces_between_special_tokens"),
    (([],), "functions stop_token_ids stop_regex stop_sequences bad_words logits_processors documents"),
    (({},), "chat_template_kwargs"),
    (({}, []), "logit_bias"),
    ((["text"],), "modalities"),
    (({"type": "text"},), "response_format"),
    (("auto", "none"), "tool_choice"),
    (("none", "auto"), "function_call"),
)
"""Fields of OpenAI, vLLM and SGLang that would change the sample or its report, and the values besides null that have
no effect."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    name: (None, *values) for values, names in _NEUTRAL_VALUES for name in names.split()
}
"""Refused fields of every dialect, each with its values that have no effect."""


@dataclass(eq=False)
class RefusedError(Exception):
    """A request that is refused."""

    status: int
    """As in HTTP."""
    message: str
    code: str | None = None
    """As in OpenAI's errors."""
    param: str | None = None
    again: bool | None = None
    """Whether the client should retry; None: the client decides."""

    def __str__(self) -> str:
        return self.message


class RequestBody(BaseModel):
    """An object of a request, with any further fields."""

    model_config = ConfigDict(extra="allow")


class ToolForm(RequestBody):
    """A tool of a request."""

    @property
    def definition(self) -> dict[str, Any]:
        """The schema in the form of chat completions."""
        return self.model_dump()


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


ShortName = Annotated[str, Field(max_length=256)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], BeforeValidator(_listed), Field(max_length=16)]
TokenLimit = Annotated[int, Field(ge=1, le=2**31)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in the form that all dialects share."""

    messages: list[Message]
    """As chat templates read them."""
    max_tokens: int | None
    """The limit of a response."""
    stop: Sequence[str]
    """Texts at which a response ends."""
    choices: int = 1
    """Number of responses."""


class Request(RequestBody):
    """Fields of all dialects, and the values that the server reads.

    A subclass translates its dialect: the prompt into messages of OpenAI's chat completions, the form that chat
    templates read. Equal prompts of two dialects are therefore equal tokens.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    """Refused fields, each with its values that have no effect."""

    several_field: ClassVar[str] = "parallel_tool_calls"
    """The option that allows several calls in an answer."""

    model: ShortName
    temperature: float | None = Field(None, ge=0, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    metadata: dict[str, Any] | None = None
    """Kept with the step, for reward functions."""

    def asked(self) -> Asked:
        """Translate the request. Raises RefusedError."""
        raise NotImplementedError

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Schemas of the functions that may be called; None if the request has none, and the agent's tools apply."""
        return None

    @property
    def several(self) -> bool:
        """Whether an answer may have several calls."""
        raise NotImplementedError

    def unread(self) -> dict[str, Any]:
        """Return the fields that are not read; those of an object that are refused by their path: `text.format`.

        Further fields of messages, parts and tools are not listed: none has an effect on the sample.
        """
        # Without several calls only one is reported, but all were sampled, and are trained on.
        return {**(self.model_extra or {}), **({} if self.several else {self.several_field: True})}

    def ignored(self, allowed: Collection[str] = ()) -> tuple[str, ...]:
        """Return the names of ignored fields.

        Raises RefusedError for a field that would change the sample, unless `allowed` contains it.
        """
        if self.temperature is not None and 0 < self.temperature < _COOLEST:
            raise RefusedError(400, f"temperature: expected 0, or {_COOLEST:g} and more", param="temperature")
        ignored = []
        for name, value in self.unread().items():
            if value in self.neutral.get(name, (None,)):
                continue
            if name in self.neutral and name not in allowed:
                neutral = (
                    " or ".join(json.dumps(value) for value in self.neutral[name] if value is not None) or "nothing"
                )
                raise RefusedError(
                    400,
                    f"{name}: expected {neutral}: what is sampled here is trained on as it was sampled; "
                    f"team.ignored_fields: [{name}] in the recipe lets it be ignored",
                    code="unsupported_parameter",
                    param=name,
                )
            ignored.append(name)
        return tuple(sorted(ignored))


TokensOf = Callable[[Reply], list[dict[str, Any]]]
"""Returns a reply's tokens in the format of chat completions."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format: requests to one path, their answers, and errors.

    The functions take a request of the type `request`.
    """

    path: str
    """Below `/t/NAME/v1`."""
    request: type[Request]
    answer: Callable[[Any, Sequence[Reply], TokensOf], dict[str, Any]]
    """Returns the answer to a request, ready for JSON."""
    streamed: Callable[[Any, Mapping[str, Any]], bytes]
    """Returns an answer as server-sent events."""
    error: Callable[[RefusedError], dict[str, Any]]
    """Returns the body of a refusal."""
    variables: tuple[str, str]
    """Environment variables from which the official client reads its base URL and its key."""
    client_adds_version: bool = False
    """Whether the official client adds `/v1` to its base URL."""


Body = TypeVar("Body", bound=BaseModel)


def parsed(kind: type[Body], body: bytes) -> Body:
    """Parse a request body. Raises RefusedError if it is invalid."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RefusedError(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None) from None
