"""The events of Agent Lightning 1.0's gateway, as its API returns them.

Agent Lightning 0.3 has spans (`traces.spans`). The gateway keeps one reward for each rollout, the last one. That reward
becomes the outcome, and an earlier one belongs to the call before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.traces.exports.base import Export, GivenScore, Records, value_or_label
from creditflow.traces.requests import mapping, prompt_of, responses_of
from creditflow.traces.spans import Span, text_of, time_of

_EVENT = frozenset(("event_type", "rollout_id", "data"))


def _read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    rewards: dict[str, list[GivenScore]] = {}
    last_call: dict[str, str] = {}
    for number, event in enumerate(records):
        trace = "/".join(filter(None, (text_of(event["rollout_id"]), text_of(event.get("attempt_id")))))
        data, time = mapping(event["data"]), _nanoseconds(event.get("timestamp"))
        if event["event_type"] == "model_request":
            last_call[trace] = f"event {number}"
            into.spans.append(_call(trace, last_call[trace], data, time))
        elif event["event_type"] == "reward":
            target = (last_call[trace],) if trace in last_call else ()
            reward = GivenScore("reward", value_or_label(data.get("value")), trace, target, time)
            rewards.setdefault(trace, []).append(reward)
    for given in rewards.values():
        given[-1].targets = ()
        into.scores += given


def _call(trace: str, id: str, data: Mapping[str, Any], ended: int | None) -> Span:
    request, response = mapping(data.get("request")), mapping(data.get("response"))
    choices = response.get("choices")
    choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
    usage, latency = mapping(data.get("usage")), data.get("latency_ms")
    took = _nanoseconds(latency, 1e6)
    started = None if ended is None or took is None else time_of(ended - took)
    found = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": data.get("model"),
        "gen_ai.request.temperature": request.get("temperature"),
        "gen_ai.input.messages": prompt_of(request),
        "gen_ai.output.messages": responses_of(response) if choice else None,
        "gen_ai.response.id": response.get("id"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "prompt_token_ids": response.get("prompt_token_ids"),
        "response_token_ids": choice.get("token_ids"),
        "logprobs.content": mapping(choice.get("logprobs")).get("content"),
    }
    error = f"status {data.get('http_status')}" if data.get("status") == "error" else ""
    attributes = {key: value for key, value in found.items() if value is not None}
    return Span(trace, id, None, "model_request", started, ended, attributes, error=error)


def _nanoseconds(time: Any, unit: float = 1e9) -> int | None:
    """A time of any size as nanoseconds; None if it is not a number of a usable size. `unit`: its nanoseconds."""
    try:
        return time_of(float(time) * unit)
    except (TypeError, ValueError, OverflowError):
        return None


EXPORT = Export(name="Agent Lightning 1.0", has=lambda record: record.keys() >= _EVENT, read=_read)
