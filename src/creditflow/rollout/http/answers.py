"""Parts of answers that all dialects share: ids of tool calls, counts of tokens, server-sent events."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from creditflow.data import Message, Step
from creditflow.rollout.chat import ToolCall
from creditflow.rollout.recorder import Reply

_CALL_ID = re.compile("[0-9A-Z]{9}")
"""Nine letters and digits, since Mistral's chat templates take no other: 20 bits of `rollout_of`, `_STEP_BITS` of the
step's index and `_CALL_BITS` of the call's number, in base 36."""
_STEP_BITS, _CALL_BITS = 15, 11


def call_id(step: Step, number: int) -> str:
    """Return the id of a step's tool call."""
    rollout, steps, calls = int(rollout_of(step.trajectory_id)[:5], 16), 1 << _STEP_BITS, 1 << _CALL_BITS
    return np.base_repr((rollout * steps + step.index % steps) * calls + number % calls, 36).rjust(9, "0")


def rollout_of(trajectory_id: str) -> str:
    """Return a short hash of a trajectory's id, for ids in its answers.

    A prompt may contain a conversation of another trajectory.
    """
    return hashlib.blake2b(trajectory_id.encode(errors="replace"), digest_size=4).hexdigest()


def answered(messages: Sequence[Message], trajectory_id: str) -> list[int]:
    """Return the indices of a trajectory's steps whose tool calls a conversation answers."""
    ids = [message.get("tool_call_id") for message in messages]
    values = [int(id, 36) >> _CALL_BITS for id in ids if isinstance(id, str) and _CALL_ID.fullmatch(id)]
    parts = [divmod(value, 1 << _STEP_BITS) for value in values]
    return [index for rollout, index in parts if f"{rollout:05x}" == rollout_of(trajectory_id)[:5]]


def finish_reason(reply: Reply) -> str:
    """Return `stop` or `length`."""
    return str(reply.step.info.get("finish_reason", "stop"))


def divided(reply: Reply, *, tools: bool, several: bool) -> tuple[str, Sequence[ToolCall]]:
    """Split a reply into text and valid tool calls; `several` as False keeps one call.

    Without `tools`, for a reply that was cut off, and with a malformed call, everything is text for the client.
    """
    text, calls = reply.parts
    if not (tools and calls) or any(call.arguments is None for call in calls):
        return reply.text, []
    return text, calls if several else calls[:1]


def said(reply: Reply, text: str, calls: Sequence[ToolCall]) -> Message:
    """Return a divided reply as a message of chat completions."""
    if not calls:
        return {"role": "assistant", "content": text}
    named = [call.to_message(call_id(reply.step, i)) for i, call in enumerate(calls)]
    return {"role": "assistant", "content": text or None, "tool_calls": named}


def prompt_tokens(reply: Reply) -> int:
    """Return the number of tokens read; for a policy behind an endpoint, the server's count."""
    return _count(reply, "prompt_tokens", reply.step.prompt_ids)


def response_tokens(reply: Reply) -> int:
    """Return the number of tokens sampled; for a policy behind an endpoint, the server's count."""
    return _count(reply, "completion_tokens", reply.step.response_ids)


def _count(reply: Reply, name: str, ids: Sequence[int]) -> int:
    count = reply.step.info.get(name)
    return count if isinstance(count, int) else len(ids)


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Return events as server-sent events, each named by its `type`."""
    # In ASCII: for many clients U+2028 ends a line.
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()
