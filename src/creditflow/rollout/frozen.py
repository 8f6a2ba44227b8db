"""A frozen policy: a model behind an OpenAI-compatible endpoint that an agent acts through.

What it writes is another's text, so it is bounded and made fit to be kept before anything else sees it. How an endpoint
is reached, `endpoint` knows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from creditflow.errors import EndpointError, PromptTooLong
from creditflow.rollout.client import ChatClient, ChatReply
from creditflow.rollout.endpoint import Counts, Endpoint, FailedTry, usage_of
from creditflow.trajectory import Message

CHARACTERS_PER_TOKEN = 64
"""A reply of more characters than so many for each token that it may have is cut off there: the server did not heed
`max_tokens`."""


class FrozenModel(ChatClient):
    """A model that is asked over HTTP. May be called from any event loop; `aclose` in each that it was called from."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        """The reply to `messages`; `seed` is sent as a number, for servers that heed one."""
        digest = hashlib.sha256(json.dumps(seed).encode()).digest()
        fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": int.from_bytes(digest[:4]) >> 1}
        most = CHARACTERS_PER_TOKEN * max_tokens
        try:
            return await self.endpoint.complete(messages, lambda answer: _reply(answer, most), fields)
        except EndpointError as error:
            if error.prompt_too_long:
                raise PromptTooLong(f"does not fit: {error}") from error
            raise

    def metrics(self) -> dict[str, float]:
        """Since last asked: requests, retries, answered, tokens as the server counts them, latencies of its answers."""
        counts, self.endpoint.counts = self.endpoint.counts, Counts()
        return counts.metrics(None)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self.endpoint.aclose()


def _reply(answer: Any, most_characters: int) -> ChatReply:
    try:
        choice = answer["choices"][0]
        text, end = choice["message"]["content"], choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise FailedTry("answered with something that is no chat completion") from error
    if end == "content_filter":
        raise FailedTry("the reply was withheld by a content filter")
    if text is None and end == "length":
        text = ""  # all of it was thought, nothing said
    if not isinstance(text, str):
        raise FailedTry("answered with a chat completion without text")
    # Halves of surrogate pairs, which JSON may spell out, can be written to no file.
    text = text[: most_characters + 1].encode("utf-8", "replace").decode()
    cut_off = end == "length" or len(text) > most_characters
    prompt_tokens, completion_tokens = usage_of(answer) or (None, None)
    return ChatReply(text[:most_characters], "length" if cut_off else "stop", prompt_tokens, completion_tokens)
