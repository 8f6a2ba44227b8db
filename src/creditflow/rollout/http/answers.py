"""Parts of answers that all dialects share: ids of tool calls, counts of tokens, server-sent events."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from creditflow.data import Message, Step
from creditflow.rollout.chat import ToolCall
from creditflow.rollout.recorder import Reply

_CALL_ID = re.compile("call_([0-9a-f]{8})_([0-9]{1,9})_[0-9]+")
"""The rollout (`rollout_of`), the step's index, and the call's number."""


def call_id(step: Step, number: int) -> str:
    """Return the id of a step's tool call."""
    return f"call_{rollout_of(step.trajectory_id)}_{step.index}_{number}"


def rollout_of(trajectory_id: str) -> str:
    """Return a short hash of a trajectory's id, for ids in its answers.

    A prompt may contain a conversation of another trajectory.
    """
    return hashlib.blake2b(trajectory_id.encode(errors="replace"), digest_size=4).hexdigest()


def answered(messages: Sequence[Message], trajectory_id: str) -> list[int]:
    """Return the indices of a trajectory's steps whose tool calls a conversation answers."""
    ids = [_CALL_ID.fullmatch(str(message.get("tool_call_id"))) for message in messages]
    return [int(id[2]) for id in ids if id is not None and id[1] == rollout_of(trajectory_id)]


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
