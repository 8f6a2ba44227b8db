"""The spans of one play, read: how they nest, when they were, what they mean, and which calls become steps.

It knows nothing of forms and conventions (`spans`, `meaning`), nor of what steps and rewards are made into.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from creditflow.adapters.forest import Forest, forest_of
from creditflow.adapters.meaning import AgentAtWork, Meaning, ModelCall, Reward, read_span
from creditflow.adapters.spans import Span

NO_AGENT = "agent"
"""The name of an agent that nothing names."""


@dataclass(frozen=True, slots=True)
class Play:
    """n spans."""

    spans: Sequence[Span]
    forest: Forest
    start: list[int]
    end: list[int]
    """[n] nanoseconds; `start < end`."""
    meanings: list[Meaning | None]
    rewards: list[tuple[int, Reward]]
    """Each with its span, by their beginnings."""
    agent_around: list[int | None]
    """[n] the nearest span of an agent at work around it, or itself."""
    agent_at: list[int | None]
    """[n] the same; where there is none, the one that began last of those that go on from before it began until after
    it ended (tracers that do not know of one another do not nest)."""

    @classmethod
    def read(cls, spans: Sequence[Span], mended: Counter[str]) -> Play:
        """Counts in `mended` what was wrong with spans."""
        forest = forest_of([span.id for span in spans], [span.parent for span in spans])
        mended.update(forest.mended.values())
        read = [read_span(span) for span in spans]
        meanings = [meaning for meaning, _ in read]
        start, end = _times(spans, mended)
        rewards = [(at, reward) for at, (_, given) in enumerate(read) if given for reward in given]
        rewards.sort(key=lambda given: start[given[0]])
        agents = [at for at, meaning in enumerate(meanings) if type(meaning) is AgentAtWork]
        around: list[int | None] = [None] * len(spans)
        if not agents:
            return cls(spans, forest, start, end, meanings, rewards, around, around)
        for at in agents:
            around[at] = at
        around = forest.inherited(around)
        working = list(around)
        for at, other in _meanwhile([at for at, agent in enumerate(around) if agent is None], agents, start, end):
            working[at] = other
        return cls(spans, forest, start, end, meanings, rewards, around, working)

    def call(self, at: int) -> ModelCall:
        """What a call's span says."""
        meaning = self.meanings[at]
        assert type(meaning) is ModelCall
        return meaning

    def agent_of(self, at: int) -> str:
        """By what the call says itself, else by the agent at work there."""
        around = self.agent_at[at]
        work = None if around is None else self.meanings[around]
        return self.call(at).agent or (work.name if isinstance(work, AgentAtWork) else "") or NO_AGENT


def _times(spans: Sequence[Span], mended: Counter[str]) -> tuple[list[int], list[int]]:
    """[n] beginnings and ends. One that is missing is the other one, or, where both are, when the span before in the
    file began; one that ends before it begins ends where it began. Nothing is shorter than a nanosecond.
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
"""Of agents that began before something, so many are looked at."""


def _meanwhile(
    spans: Sequence[int], agents: Sequence[int], start: Sequence[int], end: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Of each span that lies, by its times alone, in an agent's, that agent's."""
    agents = sorted(agents, key=start.__getitem__)
    began = [start[agent] for agent in agents]
    for at in spans:
        stop = bisect_right(began, start[at])
        found = (agent for agent in reversed(agents[max(0, stop - _LOOKED_BACK) : stop]) if end[agent] >= end[at])
        if (agent := next(found, None)) is not None:
            yield at, agent


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which calls become steps."""

    calls: list[int]
    """Spans, in the order of their beginnings."""
    made: list[int]
    """The same with those that are left out for what they are, or for whose: all that were made, each once."""
    agents: list[str]
    """Of each of these, who made it."""
    several: list[int]
    """Those of them that were given several responses."""
    same_as: dict[int, int]
    """Of a call that repeats another one, that one."""
    left_out: dict[int, str]
    """Of every other call, why not."""
    shared_ids: int
    """How many calls had the response id of another one, and another response."""


def choose(play: Play, wanted: re.Pattern[str]) -> Chosen:
    """The calls of the agents that are `wanted`, each once; not those of a reward, nor those that brought nothing."""
    reward = _rewards_around(play)
    left_out: dict[int, str] = {}
    able: dict[int, ModelCall] = {}
    unable: dict[int, ModelCall] = {}
    several: list[int] = []
    for at, meaning in enumerate(play.meanings):
        if type(meaning) is not ModelCall:
            continue
        if reward[at] is not None:
            left_out[at] = "made by a reward"
        elif why := meaning.unusable:
            left_out[at] = f"it failed: {play.spans[at].error}" if play.spans[at].error else why
            unable[at] = meaning
        else:
            able[at] = meaning
            if meaning.choices:
                several.append(at)
    same_as, shared_ids = _repeated(play.forest, able)
    for at, first in same_as.items():
        left_out[at] = f"the same call as span {play.spans[first].id}"
    agents = {at: play.agent_of(at) for at in able if at not in same_as}
    made = [*agents, *_alone(play.forest, unable, able)] if unable else list(agents)
    made.sort(key=play.end.__getitem__)
    made.sort(key=play.start.__getitem__)  # of those that began together, as they ended
    named = {agent for agent in agents.values() if wanted.search(agent)}
    for at, agent in agents.items():
        if agent not in named:
            left_out[at] = f"agent {agent!r} is not asked for"
    calls = [at for at in made if at not in left_out] if left_out else made
    several = [at for at in several if at not in left_out]
    return Chosen(calls, made, [agents[at] for at in calls], several, same_as, left_out, shared_ids)


def _rewards_around(play: Play) -> list[int | None]:
    """[n] the nearest span that is there to give a reward around each, or itself."""
    own = [at if type(meaning) is Reward else None for at, meaning in enumerate(play.meanings)]
    return play.forest.inherited(own) if play.rewards else own


def _alone(forest: Forest, unable: Mapping[int, ModelCall], able: Mapping[int, ModelCall]) -> Iterator[int]:
    """Those of which nothing was recorded, unless another record may be of the same call: by its response id, or since
    one lies inside of the other.
    """
    ids = {call.response_id for call in able.values()} - {""}
    around = forest.inherited([at if at in able else None for at in range(len(forest.parents))])
    around_some: set[int] = set()
    for at in reversed(forest.order):
        if at in able or at in around_some:
            around_some.add(forest.parents[at])
    for at, call in unable.items():
        if call.response_id not in ids and around[at] is None and at not in around_some:
            yield at


def _repeated(forest: Forest, able: Mapping[int, ModelCall]) -> tuple[dict[int, int], int]:
    """Calls that were recorded more than once, and how many have the response id of another one without being the same.

    The same are those of one response id, if they have the same response too or one lies inside of the other: there are
    servers that give an id twice. Where one has no id, those of the same response inside of one another. The fullest
    record stays; of equals the outermost, then the first.
    """
    inside: dict[int, int] = {}
    """Of what lies in a call, or is one, the nearest call."""
    of_id: dict[str, int] = {}
    """By response id the first call."""
    of_both: dict[tuple[str, str], int] = {}
    """By response id and response, where an id has several responses."""
    shared = 0
    group: dict[int, int] = {}
    """By call, the first of those that are the same."""
    members: dict[int, list[int]] = {}
    """By the first of those that are the same, all of them."""
    for at in forest.order:
        around = inside.get(forest.parents[at])
        if at not in able:
            if around is not None:
                inside[at] = around
            continue
        inside[at] = first = at
        call = able[at]
        if around is not None and _same(call, able[around]):
            first = group[around]
        if call.response_id:
            known = of_id.setdefault(call.response_id, first)
            if known != first and first == at:
                response = able[known].response
                if response and call.response and response != call.response:
                    first = of_both.setdefault((call.response_id, call.response), at)
                    shared += first == at
                else:  # of a record without a text nothing more is known than the id
                    first = known
        group[at] = first
        if first != at:
            members.setdefault(first, [first]).append(at)
    same_as = {}
    for found in members.values():
        fullest = max(found, key=lambda at: able[at].fullness)  # of equals the first
        same_as.update({at: fullest for at in found if at != fullest})
    return same_as, shared


def _same(inner: ModelCall, outer: ModelCall) -> bool:
    if inner.response_id and outer.response_id:
        return inner.response_id == outer.response_id
    return inner.response == outer.response
