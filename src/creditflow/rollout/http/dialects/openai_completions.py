"""OpenAI's completions of texts and tokens: `POST completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from creditflow.data import Message
from creditflow.rollout.chat import Prompt, PromptIds
from creditflow.rollout.http import openai_format
from creditflow.rollout.http.answers import finish_reason, prompt_tokens
from creditflow.rollout.http.openai_format import CompletionFields, prompt_token_ids
from creditflow.rollout.http.requests import MOST_CHOICES, Dialect, TokensOf
from creditflow.rollout.recorder import Reply


def _prompts(value: Any) -> Any:
    is_single = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if is_single else value


Tokens = Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]


class TextRequest(CompletionFields):
    """`POST completions`."""

    prompt: Annotated[list[str | Tokens], BeforeValidator(_prompts), Field(min_length=1, max_length=MOST_CHOICES)]
    logprobs: int | None = Field(None, ge=0, le=1)

    def prompts(self, earlier: Sequence[Message] = ()) -> Sequence[Prompt]:
        return [prompt if isinstance(prompt, str) else PromptIds(prompt) for prompt in self.prompt]


def answer(request: TextRequest, replies: Sequence[Reply], tokens_of: TokensOf) -> dict[str, Any]:
    """Return a `text_completion` with one choice for each reply."""
    choices = [_choice(request, reply, tokens_of) for reply in replies]
    return openai_format.completed(request, replies, "text_completion", choices, sum(map(prompt_tokens, replies)))


def _choice(request: TextRequest, reply: Reply, tokens_of: TokensOf) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": reply.text, "finish_reason": finish_reason(reply), "logprobs": None}
    if request.logprobs is not None:
        tokens = tokens_of(reply)
        texts = [token["token"] for token in tokens]
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        }
    return {**choice, **prompt_token_ids(request, reply)}


def streamed(request: TextRequest, answer: Mapping[str, Any]) -> bytes:
    """Return an answer as server-sent events: for each choice its text, and its finish reason."""
    return openai_format.chunks(request, answer, _texts, "text_completion")


def _texts(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    end = {name: choice[name] for name in ("index", "finish_reason", "step_id")}
    return [{**choice, "finish_reason": None}, {**end, "text": "", "logprobs": None}]


DIALECT = Dialect("/completions", TextRequest, answer, streamed, openai_format.error, openai_format.VARIABLES)
