"""Assigns each reward of a trace to a step or to the whole trajectory.

The rules, in order: the reward's own links, the agent span around it, its time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from creditflow.plugins.traces.selection import Selection, TrajectorySpans
from creditflow.plugins.traces.spans import Reward, RewardWithoutNumber, text_of

Rule = Literal["name", "link", "agent", "time"]
WHOLE = -1
"""The owner of a reward for the whole trajectory, in place of a step's index."""
OF_THE_WHOLE = ("outcome", "final_reward")
"""Names of rewards that belong to the whole trajectory, wherever they were given."""


@dataclass(frozen=True, slots=True)
class PlacedReward:
    """One value of a reward, with its owner."""

    at: int
    """The reward's span."""
    name: str
    value: Any
    owner: int | None
    """A step's index, `WHOLE`, or None if unassigned."""
    rule: Rule
    nobody: str = ""
    """The reason why it is unassigned."""


def place(trajectory_spans: TrajectorySpans, chosen: Selection, outcome: str) -> list[PlacedReward]:
    """Assign every value of every reward of `trajectory_spans`, in order of time.

    1. A reward named `outcome` or one of `OF_THE_WHOLE` belongs to the whole trajectory.
    2. A reward with a target (a link to a span, a response id, or an attribute of the span itself) belongs to it. A
       call's reward belongs to its step, and that of a span around all calls to the whole trajectory. That of an
       agent's span belongs to the agent's last step so far, that of any other span to the last call inside it so far.
       If a span has no calls (a tool's), its reward is treated as one given when the span began. Of several links the
       first one that resolves counts.
    3. A reward inside an agent's span belongs to the agent's last step so far. This rule does not apply if the span
       contains all calls, unless some reward lies outside all agents' spans.
    4. Any other reward belongs to the last step that had ended by then. It belongs to the whole trajectory if all steps
       had ended and no step has a reward of that name.

    Calls that are left out count as well: a reward that belongs to one of them is unassigned, rather than the next
    step's.
    """
    if not trajectory_spans.rewards:
        return []
    owners = _Owners(trajectory_spans, chosen)
    placed = [entry for at, reward in trajectory_spans.rewards for entry in owners.given(at, reward, outcome)]
    late = [entry.rule == "time" and trajectory_spans.start[entry.at] >= owners.all_ended for entry in placed]
    of_steps = {entry.name for entry, is_late in zip(placed, late, strict=True) if not is_late and entry.owner != WHOLE}
    return [
        replace(entry, owner=WHOLE, nobody="")
        if is_late and chosen.calls and entry.name not in of_steps and not isinstance(entry.value, RewardWithoutNumber)
        else entry
        for entry, is_late in zip(placed, late, strict=True)
    ]


class _Owners:
    """Look-ups over one trajectory that every reward shares."""

    def __init__(self, trajectory_spans: TrajectorySpans, chosen: Selection) -> None:
        self._trajectory, self._chosen = trajectory_spans, chosen
        self._step_of = {at: step for step, at in enumerate(chosen.calls)}
        self._spans_with: dict[str, dict[str, list[int]]] = {}
        self._calls = sorted(chosen.all_calls, key=trajectory_spans.end.__getitem__)
        """All calls made, by end."""
        self.all_ended = trajectory_spans.end[self._calls[-1]] if self._calls else 0
        self._of_agent: dict[int, list[int]] = {}
        """The same for each agent's span."""
        for at in self._calls:
            if (agent := trajectory_spans.agent_around[at]) is not None:
                self._of_agent.setdefault(agent, []).append(at)
        self._outside = any(trajectory_spans.agent_around[at] is None for at, _ in trajectory_spans.rewards)
        """Whether a reward lies outside all agents' spans; rule 3 then applies even to a span around all calls."""
        tree = trajectory_spans.tree
        self._n_inside, self._size = [0] * len(tree.order), [1] * len(tree.order)
        """[n], [n] number of calls, and of spans, at and inside each span."""
        for at in chosen.all_calls:
            self._n_inside[at] = 1
        for at in reversed(tree.order):
            if (parent := tree.parents[at]) >= 0:
                self._n_inside[parent] += self._n_inside[at]
                self._size[parent] += self._size[at]
        self._place = {at: place for place, at in enumerate(tree.order)}
        """Span to its position in depth-first order."""

    def given(self, at: int, reward: Reward, outcome: str) -> Iterator[PlacedReward]:
        owner, rule, nobody = self._owner(at, reward)
        for name, value in reward.values:
            if isinstance(value, RewardWithoutNumber):
                yield PlacedReward(at, name, value, None, rule, value.reason)
            elif self._chosen.calls and (name in OF_THE_WHOLE or (outcome and name == outcome)):
                yield PlacedReward(at, name, value, WHOLE, "name")
            else:
                yield PlacedReward(at, name, value, owner, rule, nobody)

    def _owner(self, at: int, reward: Reward) -> _Owner:
        own = not isinstance(self._trajectory.meanings[at], Reward)  # an attribute of its target span
        time = self._trajectory.end[at] if own else self._trajectory.start[at]
        if not self._chosen.calls:
            return None, "time", "the trajectory has no step"
        owner = None
        for link in reward.links:
            if (owner := self._at(link, at, time))[0] is not None:
                break
        return owner or self._by_place(at, time)

    def _by_place(self, at: int, time: int) -> _Owner:
        """The owner of a reward at `at` without a target, by rules 3 and 4."""
        around = self._trajectory.agent_around[at]
        if around in self._of_agent and (self._outside or self._n_inside[around] < len(self._chosen.all_calls)):
            return self._step(self._last_by(self._of_agent[around], time), "agent")
        return self._step(self._last_by(self._calls, time), "time")

    def _last_by(self, calls: Sequence[int], time: int) -> int | None:
        """The last of `calls`, which are sorted by end, that had ended by `time`."""
        place = bisect_right(calls, time, key=self._trajectory.end.__getitem__)
        return calls[place - 1] if place else None

    def _step(self, call: int | None, rule: Rule) -> _Owner:
        """The step of a call, or the reason for its omission."""
        if call is None:
            return None, rule, "no step had ended by then"
        call = self._chosen.same_as.get(call, call)
        if call in self._step_of:
            return self._step_of[call], rule, ""
        return None, rule, f"the call that it belongs to is left out: {self._chosen.left_out[call]}"

    def _at(self, link: tuple[tuple[str, str], ...], given_at: int, time: int) -> _Owner:
        """The owner that a link resolves to, or the reason why it resolves to none."""
        if not link:
            return WHOLE, "link", ""
        fewest = min([self._with(key, value) for key, value in link], key=len)
        spans = [at for at in fewest[:_MOST_SPANS] if all(self._value(at, key) == value for key, value in link)]
        if not spans:
            pairs = ", ".join(f"{key} {value}" for key, value in link)
            return None, "link", f"what it is linked to ({pairs}) is not in the trajectory"
        same_as, end = self._chosen.same_as, self._trajectory.end
        if steps := [at for span in spans if (at := same_as.get(span, span)) in self._step_of]:
            # A server may have reused a response id: the link means the last such call so far.
            return self._step(next((at for at in reversed(steps) if end[at] <= time), steps[0]), "link")
        owner, rule, nobody = self._of_span(spans[0], time)
        return owner, rule if spans[0] == given_at else "link", nobody

    def _of_span(self, at: int, time: int) -> _Owner:
        """The owner of a reward whose target span is not a step's."""
        if at in self._chosen.left_out:
            return self._step(at, "link")
        if self._n_inside[at] == len(self._chosen.all_calls):
            return WHOLE, "link", ""
        if at in self._of_agent:
            return self._step(self._last_by(self._of_agent[at], time), "link")
        if self._n_inside[at]:
            calls = self._calls[: bisect_right(self._calls, time, key=self._trajectory.end.__getitem__)]
            inside = range(self._place[at], self._place[at] + self._size[at])
            last = next((call for call in reversed(calls[-_LOOKED_BACK:]) if self._place[call] in inside), None)
            return self._step(last, "link")
        return self._by_place(at, self._trajectory.start[at])

    def _with(self, key: str, value: str) -> Sequence[int]:
        """Spans whose attribute (or id) `key` has this value."""
        if key not in self._spans_with:
            if len(self._spans_with) == _MOST_KEYS:
                return ()
            spans = self._spans_with[key] = {}
            for at in range(len(self._trajectory.spans)):
                if has := self._value(at, key):
                    spans.setdefault(has, []).append(at)
        return self._spans_with[key].get(value, ())

    def _value(self, at: int, key: str) -> str:
        """A span's attribute, or its id if `key` is `span_id` or `trace_id`."""
        span = self._trajectory.spans[at]
        ids = {"span_id": span.id, "trace_id": span.trace_id or span.trace}
        return ids.get(key) or text_of(span.attributes.get(key))


_Owner = tuple[int | None, Rule, str]
"""The owner, the rule that found it, and the reason for a missing owner."""
_MOST_KEYS, _MOST_SPANS = 16, 64
"""Limits: different link attributes in one trajectory, and candidate spans that match a link's rarest pair."""
_LOOKED_BACK = 1024
"""The number of last-ended calls searched for one inside a span."""
