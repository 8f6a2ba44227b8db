"""A frozen policy: an agent's model behind an OpenAI-compatible endpoint.

Its replies come from outside, so they are bounded and made safe to store before any other use. `endpoint` holds the
connection.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from creditflow.data import Message
from creditflow.errors import EndpointError, PromptTooLong
from creditflow.rollout.client import ChatClient, ChatReply
from creditflow.rollout.endpoint import AttemptError, Endpoint, EndpointUsage, choice_of, usage_of

CHARACTERS_PER_TOKEN = 64
"""Maximum characters of a reply for each token that it may have; a longer reply is cut off there, since the server
ignored `max_tokens`."""


class FrozenModel(ChatClient):
    """A model that is called over HTTP, from any event loop. Call `aclose` in each loop that called it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        """Return the reply to `messages`. `seed` is sent as a number, for servers that support one."""
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
        """Return and reset the counts: requests, retries, answers, tokens as the server counts them, and latencies."""
        counts, self.endpoint.counts = self.endpoint.counts, EndpointUsage()
        return counts.metrics(None)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self.endpoint.aclose()


def _reply(answer: Any, most_characters: int) -> ChatReply:
    text, end = choice_of(answer)
    if end == "content_filter":
        raise AttemptError("the reply was withheld by a content filter")
    if text is None and end == "length":
        text = ""  # the whole response was a thought
    if not isinstance(text, str):
        raise AttemptError("answered with a chat completion without text")
    # JSON can spell out halves of surrogate pairs, which no file can store.
    text = text[: most_characters + 1].encode("utf-8", "replace").decode()
    cut_off = end == "length" or len(text) > most_characters
    prompt_tokens, completion_tokens = usage_of(answer) or (None, None)
    return ChatReply(text[:most_characters], "length" if cut_off else "stop", prompt_tokens, completion_tokens)
