"""Converts spans to trajectories: selects the steps and sets their agents, parents and rewards.

docs/how_to/traces.md explains the rules. Every model call becomes a step or is listed as left out, with the reason;
every reward is assigned or listed likewise.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from typing import Any, Literal

from creditflow._utils.text_search import reused
from creditflow.data import Message, Score, Step, Task, Trajectory, into_range
from creditflow.errors import ConfigError, ScoreRangeError
from creditflow.plugins.traces.conventions.base import ModelCall
from creditflow.plugins.traces.events import unread, with_calls_apart
from creditflow.plugins.traces.messages import dumped
from creditflow.plugins.traces.rewards import OF_THE_WHOLE, WHOLE, PlacedReward, place
from creditflow.plugins.traces.selection import Selection, TrajectorySpans, choose
from creditflow.plugins.traces.span_reading import message_kind
from creditflow.plugins.traces.span_tree import before, build_tree
from creditflow.plugins.traces.spans import Span, distinct, text_of, without_collection

OUTCOMES = (*OF_THE_WHOLE, "reward", "primary")
"""Names of outcome rewards, in order of precedence. If none is given, a trajectory's first reward is its outcome."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of `convert`."""

    agent_match: str = ""
    """A regular expression (`re.search`): calls of other agents are left out."""
    outcome: str = ""
    """The name of the reward that is the outcome; empty: see `rewards.place`."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Reward name to range of values; [0, 1] for rewards without an entry."""
    trajectory_by: str = ""
    """The attribute that identifies a span's trajectory, read from the span, an enclosing span or the resource. Empty:
    a trace is a trajectory, together with the traces that link to it."""
    uid_by: str = ""
    """The attribute that names the task, read likewise. Empty: trajectories with the same first prompt share a task."""


What = Literal["model call", "choice", "reward", "record"]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A model call, a further response, a reward or a record that was not converted, with the reason.

    A record is a `gen_ai.*` event that no rule reads, or a part of a file that could not be read.
    """

    what: What
    trajectory: str
    span: str
    name: str
    """The name of the span, reward or record; the text of a choice."""
    reason: str


@dataclass(slots=True)
class Converted:
    """The result of `convert`."""

    trajectories: list[Trajectory] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    mended: Counter[str] = field(default_factory=Counter)
    """Defects of spans that were used all the same, with their counts."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Counts by name of ignored spans (neither call, agent nor reward) and of message events on other spans."""
    spans: int = 0


def convert(spans: Iterable[Span], options: ConvertOptions | None = None) -> Converted:
    """Convert spans to trajectories by the rules of docs/how_to/traces.md.

    The spans of one trajectory need not be adjacent. Steps without token ids in the trace have no tokens; unknown
    log-probabilities are NaN. Raises ConfigError for unusable `options`.
    """
    options = options or ConvertOptions()
    try:
        re.compile(options.agent_match)
    except re.error as error:
        raise ConfigError(f"agent_match {options.agent_match!r} is not a regular expression: {error}") from error
    for name, (low, high) in options.ranges.items():
        if not (math.isfinite(high - low) and low < high):
            raise ConfigError(f"range of reward {name!r}: expected two finite numbers, low < high, got {low}, {high}")
    result = Converted()
    traces: dict[str, list[Span]] = {}
    seen: _Seen = {}
    with without_collection():
        for span in with_calls_apart(distinct(spans, result.mended)):
            traces.setdefault(span.trace, []).append(span)
            result.spans += 1
        spans_by_trajectory = _by_attribute(traces, options.trajectory_by) if options.trajectory_by else _linked(traces)
        for name, of_trajectory in spans_by_trajectory.items():
            _convert(name, of_trajectory, options, seen, result)
    return result


def _by_attribute(traces: Mapping[str, Sequence[Span]], key: str) -> dict[str, list[Span]]:
    """Group spans by the value of an attribute.

    A trace's spans without a value belong to the trace's only value, or form one group.
    """
    spans_by_trajectory: dict[str, list[Span]] = {}
    for trace, spans in traces.items():
        values = _inherited(spans, key)
        only = set(values) - {None}
        rest = only.pop() if len(only) == 1 else trace
        for span, value in zip(spans, values, strict=True):
            spans_by_trajectory.setdefault(rest or trace if value is None else value, []).append(span)
    return spans_by_trajectory


def _linked(traces: Mapping[str, list[Span]]) -> dict[str, list[Span]]:
    """Join traces that link to one another into one group, under the name of the first.

    A message's receiver often starts a new trace, and so does a later scoring of the trajectory. A span that links to
    several traces joins none: it may be a batch of many trajectories.
    """
    group_of = {trace: [trace] for trace in traces}
    for trace, spans in traces.items():
        for span in spans:
            others = {link.trace for link in span.links if link.trace != trace and link.trace in traces}
            if len(others) == 1 and (other := group_of[others.pop()]) is not (group := group_of[trace]):
                small, large = sorted((other, group), key=len)
                large += small
                group_of |= dict.fromkeys(small, large)
    first_of: dict[int, str] = {}
    spans_by_trajectory: dict[str, list[Span]] = {}
    for trace, spans in traces.items():
        first = first_of.setdefault(id(group_of[trace]), trace)
        spans_by_trajectory.setdefault(first, []).extend(spans)
    return spans_by_trajectory


def _inherited(spans: Sequence[Span], key: str) -> list[str | None]:
    """[n] an attribute's value for each span: its own, the nearest enclosing span's, or its resource's.

    An empty value counts as none.
    """
    own = [text_of(span.attributes.get(key)) or None for span in spans]
    tree = build_tree([span.id for span in spans], [span.parent for span in spans])
    values = zip(tree.inherited(own), spans, strict=True)
    return [value or text_of(span.resource.get(key)) or None for value, span in values]


_Seen = dict[tuple[str, str], str]
"""Response id and response to their first trajectory."""


def _convert(name: str, spans: Sequence[Span], options: ConvertOptions, seen: _Seen, result: Converted) -> None:
    """Convert the spans of one trajectory and add the results to `result`."""
    trajectory_spans = TrajectorySpans(spans, result.mended)
    chosen = choose(trajectory_spans, options.agent_match)

    def leave_out(what: What, at: int, part: str, reason: str) -> None:
        result.left_out.append(LeftOut(what, name, spans[at].id, part, reason))

    _note_unread(name, trajectory_spans, result)
    for at, reason in sorted(chosen.left_out.items()):
        leave_out("model call", at, spans[at].name, reason)
    calls = [trajectory_spans.calls[at] for at in chosen.calls]
    steps = _steps(name, trajectory_spans, chosen, calls)
    for at, call in zip(chosen.calls, calls, strict=True):
        for choice in call.choices:
            leave_out("choice", at, choice, "one of several responses of a call: the first is the step's")
        if call.response_id and seen.setdefault((call.response_id, call.response), name) != name:
            result.mended["a call that is also in another trajectory"] += 1
        if not (call.messages or call.prompt_ids):
            result.mended["a call without its prompt"] += 1
        for part in call.unknown:
            result.mended[f"messages not read in full: {part}"] += 1
    prompt = _first_prompt(trajectory_spans, chosen)
    uid = _uid(trajectory_spans, name if prompt is None else _spelled(prompt), options.uid_by)
    asked = [message for message in prompt or () if message["role"] == "user"] or prompt or ()
    trajectory = Trajectory(name, uid, Task("trace", tuple(asked), None), steps)
    rewards = place(trajectory_spans, chosen, options.outcome)
    for reward in rewards:
        if reward.owner is None:
            leave_out("reward", reward.at, reward.name, reward.nobody)
    for reward in _pay(trajectory, rewards, options):
        leave_out("reward", reward.at, reward.name, "given again later")
    if not steps:
        return
    trajectory.answer, trajectory.answer_steps = steps[-1].response, (len(steps) - 1,)
    if cut := [step.agent for step in steps if step.info.get("finish_reason") == "length"]:
        trajectory.status, trajectory.info["truncated"] = "truncated", f"{cut[0]} was cut off"
    result.trajectories.append(trajectory)


def _note_unread(name: str, trajectory_spans: TrajectorySpans, result: Converted) -> None:
    giving = {at for at, _ in trajectory_spans.rewards}
    for at, (span, meaning) in enumerate(zip(trajectory_spans.spans, trajectory_spans.meanings, strict=True)):
        if meaning is None and at not in giving and (span.name or span.attributes):
            result.passed_over[span.name or "a span without a name"] += 1
        listed = [*span.unread, *(unread(span) if span.events else ())]
        result.left_out += [LeftOut("record", name, span.id, record, reason) for record, reason in listed]
        if span.events and at not in trajectory_spans.calls:
            names = (event.name for event in span.events if message_kind(event) and event.name not in dict(listed))
            result.passed_over.update(f"{event} on a span of no call" for event in names)


def _steps(name: str, trajectory_spans: TrajectorySpans, chosen: Selection, calls: Sequence[ModelCall]) -> list[Step]:
    spans, start, end = trajectory_spans.spans, trajectory_spans.start, trajectory_spans.end
    read = reused(
        [[message["content"] for message in call.messages] for call in calls],
        [call.spoken for call in calls],
        [start[at] for at in chosen.calls],
        [end[at] for at in chosen.calls],
    )
    # The first step has no parents either way.
    by_time = {} if all(read[1:]) else before(trajectory_spans.tree, start, end, chosen.calls)
    step_of = {at: step for step, at in enumerate(chosen.calls)}
    turns: dict[str, int] = {}
    originals: set[str] = set()
    steps = []
    for index, (at, call, agent) in enumerate(zip(chosen.calls, calls, chosen.agents, strict=True)):
        turn = turns[agent] = turns.get(agent, -1) + 1
        parents = read[index] or tuple(sorted([step_of[earlier] for earlier in by_time.get(at, ())]))
        info = {
            "span_id": spans[at].id,
            "start_ns": start[at],
            "end_ns": end[at],
            "parents_by": "text" if read[index] else "time",
            "done": index == len(calls) - 1,
            **call.info,
        }
        if call.media:
            # Prompts repeat the conversation, so an image of the first prompt is in every later one.
            first = {marker: original for marker, original in call.media if marker not in originals}
            originals |= first.keys()
            info["media"] = {m: json.loads(dumped(first[m]) or "null") if m in first else None for m, _ in call.media}
        n = len(call.response_ids)
        logprobs = call.logprobs if len(call.logprobs) == n else _shared((math.nan,), n)
        place = f"{name}/{index}", name, index, agent, turn, parents
        texts = _spelled(call.messages), call.response
        mask, model = _shared((1,), n), call.model or "default"
        ids = call.prompt_ids, call.response_ids
        steps.append(Step(*place, *texts, *ids, mask, logprobs, call.temperature, model, info=info))
    return steps


_shared = lru_cache(maxsize=128)(mul)
"""Repeats a tuple. Separate ones for each step, and their garbage collection, take a tenth of the conversion time."""


def _spelled(messages: Sequence[Message]) -> str:
    """Messages as the recorder's `spelled` writes them; here every content is a text, which simplifies it."""
    return "\n\n".join([f"[{message['role']}]\n{message['content']}" for message in messages])


def _first_prompt(trajectory_spans: TrajectorySpans, chosen: Selection) -> Sequence[Message] | None:
    """The prompt of the trajectory's first call, whether that call is a step or is left out; None if it was cut off."""
    for call in map(trajectory_spans.calls.__getitem__, chosen.all_calls):
        if call.messages or call.is_cut:
            return call.messages or None
    return ()


def _uid(trajectory_spans: TrajectorySpans, prompt: str, key: str) -> str:
    named = next(filter(None, _inherited(trajectory_spans.spans, key)), "") if key else ""
    return named or hashlib.sha256(prompt.encode(errors="replace")).hexdigest()[:16]


def _pay(trajectory: Trajectory, rewards: Sequence[PlacedReward], options: ConvertOptions) -> list[PlacedReward]:
    """Assign rewards to the steps and the trajectory; return those that a later one replaced."""
    last = {(reward.owner, reward.name): number for number, reward in enumerate(rewards)}
    replaced: list[PlacedReward] = []
    whole: dict[str, Score] = {}
    for number, reward in enumerate(rewards):
        owner, name = reward.owner, reward.name
        score = _score(reward.value, options.ranges.get(name, (0.0, 1.0)))
        if owner is not None and last[owner, name] != number:
            replaced.append(reward)
        elif owner == WHOLE:
            whole[name] = score
        elif owner is not None:
            trajectory.steps[owner].scores[name] = score
            trajectory.steps[owner].info.setdefault("rewards_by", {})[name] = reward.rule
    if whole:
        names = (options.outcome, *OUTCOMES, *whole)
        outcome = next(name for name in names if name in whole)
        trajectory.outcome = whole.pop(outcome)
        trajectory.info["outcome"] = outcome
    if whole:
        trajectory.info["rewards"] = {name: score.value for name, score in whole.items()}
    return replaced


def _score(value: Any, range_: tuple[float, float]) -> Score:
    """A reward as a score, with status `failed` unless the value is a number in its range."""
    why = f"expected a number, got {text_of(value)[:80]!r}"
    try:
        if math.isfinite(number := float(value)):
            return Score(into_range(number, range_), range_)
    except ScoreRangeError as error:
        why = f"{error}; give the reward's range"
    except (TypeError, ValueError, OverflowError):
        pass
    return Score(math.nan, range_, status="failed", reason=why)
