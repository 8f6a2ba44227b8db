"""The spans of one trajectory with their nesting, times and meanings, and the choice of calls that become steps.

`spans` and `span_reading` handle formats and conventions; `convert` builds the steps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from creditflow.plugins.traces.conventions.base import AgentSpan, ModelCall
from creditflow.plugins.traces.span_reading import read_span
from creditflow.plugins.traces.span_tree import SpanTree, build_tree
from creditflow.plugins.traces.spans import Reward, Span

NO_AGENT = "agent"
"""The agent name of calls without one."""


class TrajectorySpans:
    """The n spans of one trajectory."""

    def __init__(self, spans: Sequence[Span], mended: Counter[str]) -> None:
        """Read the spans; count their defects in `mended`."""
        self.spans = spans
        self.tree = build_tree([span.id for span in spans], [span.parent for span in spans])
        mended.update(self.tree.mended.values())
        read = [read_span(span) for span in spans]
        self.meanings = [meaning for meaning, _ in read]
        self.calls = {at: meaning for at, meaning in enumerate(self.meanings) if type(meaning) is ModelCall}
        """Span to its model call."""
        self.agents = {at: meaning.name for at, meaning in enumerate(self.meanings) if type(meaning) is AgentSpan}
        """Span of an agent to the agent's name."""
        self.start, self.end = _times(spans, mended)
        """[n] nanoseconds; `start < end`."""
        self.rewards = [(at, reward) for at, (_, rewards) in enumerate(read) if rewards for reward in rewards]
        """Span and reward, in order of the spans' starts."""
        self.rewards.sort(key=lambda placed: self.start[placed[0]])
        self.agent_around = self.tree.around(self.agents)
        """[n] the nearest enclosing agent span, or the span itself if it is one."""

    def agents_of(self, calls: Sequence[int]) -> dict[int, str]:
        """Call to its agent's name: by its own attributes, else by its agent span, else the only name in the trace."""
        own = {self.calls[at].agent for at in calls} - {""}
        other = next(iter(own)) if len(own) == 1 and own.issuperset(self.agents.values()) else NO_AGENT
        around = [None if by is None else self.agents[by] for by in self.agent_around]
        return {at: self.calls[at].agent or around[at] or other for at in calls}


def _times(spans: Sequence[Span], mended: Counter[str]) -> tuple[list[int], list[int]]:
    """[n] starts and ends, at least a nanosecond apart.

    A missing time is set to the other one, or, if both are missing, to the start of the span before it in the file. An
    end before the start is set to the start.
    """
    starts, ends, start = [], [], 0
    for span in spans:
        first, last = span.start, span.end
        start = first if first is not None else start if last is None else last
        starts.append(start)
        ends.append(start + 1 if last is None or last <= start else last)
        if first is None or last is None or last < first:
            mended["a time that is missing, or an end before its start"] += 1
    return starts, ends


_LOOKED_BACK = 64
"""The number of spans searched for a call with the same response."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The calls that become steps, and the reasons for leaving out the rest."""

    calls: list[int]
    """Spans of the calls that become steps, in order of start."""
    all_calls: list[int]
    """The same and the calls left out for their agent or for a missing response: each call made, once."""
    agents: list[str]
    """The agent of each of `calls`."""
    same_as: dict[int, int]
    """Repeated record of a call to the record that is kept."""
    left_out: dict[int, str]
    """Every other call, with the reason."""


def choose(trajectory_spans: TrajectorySpans, agent_match: str) -> Selection:
    """Choose the calls whose agents match `agent_match`, each once; not those of judges or without a response."""
    tree, spans = trajectory_spans.tree, trajectory_spans.spans
    reward = tree.around({at for at, meaning in enumerate(trajectory_spans.meanings) if type(meaning) is Reward})
    left_out: dict[int, str] = {}
    able: dict[int, ModelCall] = {}
    unable: dict[int, ModelCall] = {}
    for at, call in trajectory_spans.calls.items():
        if reward[at] is not None:
            left_out[at] = "made by a reward"
        elif call.unusable:
            left_out[at] = f"it failed: {spans[at].error}" if spans[at].error else call.unusable
            unable[at] = call
        else:
            able[at] = call
    same_as = _repeated(trajectory_spans, able)
    for at, first in same_as.items():
        left_out[at] = f"the same call as span {spans[first].id}"
    agents = trajectory_spans.agents_of([at for at in able if at not in same_as])
    calls_in_order = [*agents, *_alone(tree, unable, able)] if unable else list(agents)
    calls_in_order.sort(key=trajectory_spans.end.__getitem__)
    calls_in_order.sort(key=trajectory_spans.start.__getitem__)  # calls with the same start stay in order of their ends
    named = {agent for agent in agents.values() if re.search(agent_match, agent)}
    for at, agent in agents.items():
        if agent not in named:
            left_out[at] = f"agent {agent!r} is not asked for"
    calls = [at for at in calls_in_order if at not in left_out] if left_out else calls_in_order
    return Selection(calls, calls_in_order, [agents[at] for at in calls], same_as, left_out)


def _alone(tree: SpanTree, unable: Mapping[int, ModelCall], able: Mapping[int, ModelCall]) -> Iterator[int]:
    """Calls in `unable` with no other record.

    Another record of the same call has its response id, or encloses it, or lies inside it.
    """
    ids = {call.response_id for call in able.values()} - {""}
    around_able, around_unable = tree.around(able), tree.around(unable)
    enclose = {around_unable[at] for at in able}
    alone = (at for at in unable if around_able[at] is None and at not in enclose)
    return (at for at in alone if unable[at].response_id not in ids)


def _repeated(trajectory_spans: TrajectorySpans, able: Mapping[int, ModelCall]) -> dict[int, int]:
    """Map repeated records of calls to the record kept.

    Two records are of one call if they have the same response id and either the same response or one inside the other
    (some servers return an id twice). If one has no id, they need the same response and one inside the other; or, by
    two integrations at the same time, the same prompt and response. The fullest record is kept; among equals the
    outermost, then the first.
    """
    tree = trajectory_spans.tree
    enclosing = tree.around(able)
    are_mixed = len({(call.scope, call.source) for call in able.values()}) > 1
    earlier: dict[tuple[str, str], list[int]] = {}
    """Response id, or text, to the calls that have it."""
    records_of: dict[int, list[int]] = {}
    """Call to all records of the same call."""
    for at in tree.order:
        if at not in able:
            continue
        call, parent = able[at], tree.parents[at]
        outer = enclosing[parent] if parent >= 0 else None
        candidates = [] if outer is None else [outer]
        keys = [("id", call.response_id)] if call.response_id else []
        keys += [("text", " ".join(call.spoken.split()))] if are_mixed else []
        for key in keys:
            candidates += earlier.setdefault(key, [])[-_LOOKED_BACK:]
        for other in candidates:
            records = records_of[other]
            if _is_same(call, able[other], is_nested=other == outer) or (
                are_mixed and _is_beside(trajectory_spans, at, other, [able[record] for record in records])
            ):
                break
        else:
            records = []
        records.append(at)
        records_of[at] = records
        for key in keys:
            earlier[key].append(at)
    several = {at: records for at, records in records_of.items() if len(records) > 1}
    kept = {at: max(records, key=lambda record: able[record].fullness) for at, records in several.items()}
    return {at: fullest for at, fullest in kept.items() if at != fullest}


def _is_same(call: ModelCall, other: ModelCall, *, is_nested: bool) -> bool:
    """Whether two records, perhaps `call` inside `other`, are of one call by response id and response."""
    if call.response_id and other.response_id:
        has_both = call.response and other.response and call.response != other.response
        return call.response_id == other.response_id and (is_nested or not has_both)
    return is_nested and call.response == other.response


def _is_beside(trajectory_spans: TrajectorySpans, at: int, other: int, records: Sequence[ModelCall]) -> bool:
    """Whether an integration that made none of `records`, those of call `other`, recorded the call at the same time."""
    start, end = trajectory_spans.start, trajectory_spans.end
    call, same = trajectory_spans.calls[at], trajectory_spans.calls[other]
    ids_differ = call.response_id and same.response_id and call.response_id != same.response_id
    is_other = (call.scope, call.source) not in {(record.scope, record.source) for record in records}
    is_at_once = start[at] < end[other] and start[other] < end[at]
    is_said_alike = " ".join(call.spoken.split()) == " ".join(same.spoken.split())
    prompts = [[" ".join(message["content"].split()) for message in record.messages] for record in (call, same)]
    is_asked_alike = prompts[0] == prompts[1] or not all(prompts)
    return is_at_once and is_other and not ids_differ and is_said_alike and is_asked_alike
