"""The spans of one trajectory with their nesting, times and meanings, and the choice of calls that become steps.

`spans` and `span_reading` handle formats and conventions; `convert` builds the steps.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from creditflow.plugins.traces.conventions.base import AgentSpan, Meaning, ModelCall
from creditflow.plugins.traces.span_reading import read_span
from creditflow.plugins.traces.span_tree import SpanTree, build_tree
from creditflow.plugins.traces.spans import Reward, Span

NO_AGENT = "agent"
"""The agent name of calls without one."""


@dataclass(frozen=True, slots=True)
class TrajectorySpans:
    """The n spans of one trajectory."""

    spans: Sequence[Span]
    tree: SpanTree
    start: list[int]
    end: list[int]
    """[n] nanoseconds; `start < end`."""
    meanings: list[Meaning | None]
    rewards: list[tuple[int, Reward]]
    """Span and reward, in order of the spans' starts."""
    agent_around: list[int | None]
    """[n] the nearest enclosing agent span, or the span itself if it is one."""
    agent_at: list[int | None]
    """[n] the same, or else the last agent span to start among those whose times enclose the span's (separate tracers
    do not nest their spans)."""

    @classmethod
    def read(cls, spans: Sequence[Span], mended: Counter[str]) -> TrajectorySpans:
        """Read the spans; count their defects in `mended`."""
        tree = build_tree([span.id for span in spans], [span.parent for span in spans])
        mended.update(tree.mended.values())
        read = [read_span(span) for span in spans]
        meanings = [meaning for meaning, _ in read]
        start, end = _times(spans, mended)
        rewards = [(at, reward) for at, (_, of_span) in enumerate(read) if of_span for reward in of_span]
        rewards.sort(key=lambda placed: start[placed[0]])
        agents = [at for at, meaning in enumerate(meanings) if type(meaning) is AgentSpan]
        around: list[int | None] = [None] * len(spans)
        if not agents:
            return cls(spans, tree, start, end, meanings, rewards, around, around)
        for at in agents:
            around[at] = at
        around = tree.inherited(around)
        working = list(around)
        for at, other in _meanwhile([at for at, agent in enumerate(around) if agent is None], agents, start, end):
            working[at] = other
        return cls(spans, tree, start, end, meanings, rewards, around, working)

    def call(self, at: int) -> ModelCall:
        """The model call of span `at`, which must be one."""
        meaning = self.meanings[at]
        assert type(meaning) is ModelCall
        return meaning

    def agents_of(self, calls: Sequence[int]) -> dict[int, str]:
        """Call to its agent's name: by its own attributes, else by its agent span, else the only name in the trace."""
        spans = {meaning.name for meaning in self.meanings if type(meaning) is AgentSpan}
        own = {self.call(at).agent for at in calls} - {""}
        other = next(iter(own)) if len(own) == 1 and spans <= own else NO_AGENT
        agents = {}
        for at in calls:
            around = self.agent_at[at]
            work = None if around is None else self.meanings[around]
            agents[at] = self.call(at).agent or (work.name if isinstance(work, AgentSpan) else other)
        return agents


def _times(spans: Sequence[Span], mended: Counter[str]) -> tuple[list[int], list[int]]:
    """[n] starts and ends, at least a nanosecond apart.

    A missing time is set to the other one, or, if both are missing, to the start of the span before it in the file. An
    end before the start is set to the start.
    """
    starts, ends, latest = [], [], 0
    for span in spans:
        start, end = span.start, span.end
        if start is None:
            mended["no time at all" if end is None else "no start time"] += 1
            start = latest if end is None else end
        elif end is None:
            mended["no end time"] += 1
        elif end < start:
            mended["an end before its start"] += 1
        latest = start
        starts.append(start)
        first, end = start + 1, end or 0
        ends.append(end if end > first else first)
    return starts, ends


_LOOKED_BACK = 64
"""The number of preceding agent spans searched for one whose times enclose a span's."""


def _meanwhile(
    spans: Sequence[int], agents: Sequence[int], start: Sequence[int], end: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Pairs of a span and the agent span whose times enclose it."""
    agents = sorted(agents, key=start.__getitem__)
    began = [start[agent] for agent in agents]
    for at in spans:
        stop = bisect_right(began, start[at])
        enclosing = (agent for agent in reversed(agents[max(0, stop - _LOOKED_BACK) : stop]) if end[agent] >= end[at])
        if (agent := next(enclosing, None)) is not None:
            yield at, agent


@dataclass(frozen=True, slots=True)
class Selection:
    """The calls that become steps, and the reasons for leaving out the rest."""

    calls: list[int]
    """Spans of the calls that become steps, in order of start."""
    all_calls: list[int]
    """The same and the calls left out for their agent or for a missing response: each call made, once."""
    agents: list[str]
    """The agent of each of `calls`."""
    several: list[int]
    """Those of `calls` with several responses."""
    same_as: dict[int, int]
    """Repeated record of a call to the record that is kept."""
    left_out: dict[int, str]
    """Every other call, with the reason."""
    shared_ids: int
    """Number of calls with the response id of another call but a different response."""


def choose(trajectory_spans: TrajectorySpans, agent_match: re.Pattern[str]) -> Selection:
    """Choose the calls whose agents match `agent_match`, each once; not those of judges or without a response."""
    reward = _rewards_around(trajectory_spans)
    left_out: dict[int, str] = {}
    able: dict[int, ModelCall] = {}
    unable: dict[int, ModelCall] = {}
    several: list[int] = []
    for at, meaning in enumerate(trajectory_spans.meanings):
        if type(meaning) is not ModelCall:
            continue
        if reward[at] is not None:
            left_out[at] = "made by a reward"
        elif why := meaning.unusable:
            left_out[at] = f"it failed: {trajectory_spans.spans[at].error}" if trajectory_spans.spans[at].error else why
            unable[at] = meaning
        else:
            able[at] = meaning
            if meaning.choices:
                several.append(at)
    same_as, shared_ids = _repeated(trajectory_spans, able)
    for at, first in same_as.items():
        left_out[at] = f"the same call as span {trajectory_spans.spans[first].id}"
    agents = trajectory_spans.agents_of([at for at in able if at not in same_as])
    calls_in_order = [*agents, *_alone(trajectory_spans.tree, unable, able)] if unable else list(agents)
    calls_in_order.sort(key=trajectory_spans.end.__getitem__)
    calls_in_order.sort(key=trajectory_spans.start.__getitem__)  # calls with the same start stay in order of their ends
    named = {agent for agent in agents.values() if agent_match.search(agent)}
    for at, agent in agents.items():
        if agent not in named:
            left_out[at] = f"agent {agent!r} is not asked for"
    calls = [at for at in calls_in_order if at not in left_out] if left_out else calls_in_order
    several = [at for at in several if at not in left_out]
    return Selection(calls, calls_in_order, [agents[at] for at in calls], several, same_as, left_out, shared_ids)


def _rewards_around(trajectory_spans: TrajectorySpans) -> list[int | None]:
    """[n] the nearest enclosing reward span, or the span itself if it is one."""
    own = [at if type(meaning) is Reward else None for at, meaning in enumerate(trajectory_spans.meanings)]
    return trajectory_spans.tree.inherited(own) if trajectory_spans.rewards else own


def _alone(tree: SpanTree, unable: Mapping[int, ModelCall], able: Mapping[int, ModelCall]) -> Iterator[int]:
    """Calls in `unable` with no other record.

    Another record of the same call has its response id, or encloses it, or lies inside it.
    """
    ids = {call.response_id for call in able.values()} - {""}
    around = tree.inherited([at if at in able else None for at in range(len(tree.parents))])
    around_some: set[int] = set()
    for at in reversed(tree.order):
        if at in able or at in around_some:
            around_some.add(tree.parents[at])
    for at, call in unable.items():
        if call.response_id not in ids and around[at] is None and at not in around_some:
            yield at


def _repeated(trajectory_spans: TrajectorySpans, able: Mapping[int, ModelCall]) -> tuple[dict[int, int], int]:
    """Map repeated records of calls to the record kept, and count calls that share only a response id.

    Two records are of one call if they have the same response id and either the same response or one inside the other
    (some servers return an id twice). If one has no id, they need the same response and one inside the other; or, by
    two integrations at the same time, the same prompt and response. The fullest record is kept; among equals the
    outermost, then the first.
    """
    tree = trajectory_spans.tree
    inside: dict[int, int] = {}
    """Span to the nearest enclosing call, or to itself if it is a call."""
    of_id: dict[str, int] = {}
    """Response id to its first call."""
    of_both: dict[tuple[str, str], int] = {}
    """Response id and response to their first call, for ids with several responses."""
    shared = 0
    group: dict[int, int] = {}
    """Call to the first record of the same call."""
    members: dict[int, list[int]] = {}
    """First record to all records of the same call."""
    for at in tree.order:
        around = inside.get(tree.parents[at])
        if at not in able:
            if around is not None:
                inside[at] = around
            continue
        inside[at] = first = at
        call = able[at]
        if around is not None and _same(call, able[around]):
            first = group[around]
        if call.response_id:
            same = of_id.setdefault(call.response_id, first)
            if same != first and first == at:
                response = able[same].response
                if response and call.response and response != call.response:
                    first = of_both.setdefault((call.response_id, call.response), at)
                    shared += first == at
                else:  # a record without a text has only its id to match
                    first = same
        group[at] = first
        if first != at:
            members.setdefault(first, [first]).append(at)
    _join_integrations(trajectory_spans, able, group, members)
    same_as = {}
    for records in members.values():
        fullest = max(records, key=lambda at: able[at].fullness)  # among equals the first
        same_as.update({at: fullest for at in records if at != fullest})
    return same_as, shared


def _join_integrations(
    trajectory_spans: TrajectorySpans,
    able: Mapping[int, ModelCall],
    group: dict[int, int],
    members: dict[int, list[int]],
) -> None:
    """Join groups of records of one call that two integrations made side by side: equal texts at the same time."""
    if len({(call.scope, call.source) for call in able.values()}) < 2:
        return
    start, end = trajectory_spans.start, trajectory_spans.end
    earlier: dict[str, list[tuple[int, set[tuple[str, str]]]]] = {}
    for at in sorted({group[at] for at in able}, key=start.__getitem__):
        call = able[at]
        own = {(able[record].scope, able[record].source) for record in members.get(at, [at])}
        others = earlier.setdefault(" ".join(call.spoken.split()), [])
        for first, integrations in others[-_LOOKED_BACK:]:
            other = able[first]
            ids_differ = other.response_id and call.response_id and other.response_id != call.response_id
            same_prompt = not (call.messages and other.messages) or _prompt(call) == _prompt(other)
            if start[at] < end[first] and same_prompt and not (ids_differ or integrations & own):
                members.setdefault(first, [first]).extend(members.pop(at, [at]))
                integrations.update(own)
                break
        else:
            others.append((at, own))


def _prompt(call: ModelCall) -> list[str]:
    """The texts of a prompt, without differences in spacing."""
    return [" ".join(message["content"].split()) for message in call.messages]


def _same(inner: ModelCall, outer: ModelCall) -> bool:
    if inner.response_id and outer.response_id:
        return inner.response_id == outer.response_id
    return inner.response == outer.response
