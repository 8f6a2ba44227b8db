"""Which step, or which whole play, a reward of a trace belongs to.

It knows the rules, in their order: what the reward says itself; the agent at work around it; time. Not what becomes of
the numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from creditflow.adapters.meaning import NoScore, Reward
from creditflow.adapters.play import Chosen, Play
from creditflow.adapters.spans import text_of

Rule = Literal["name", "link", "agent", "time"]
WHOLE = -1
"""In place of a step: the whole play."""
OF_THE_WHOLE = ("outcome", "final_reward")
"""A reward of one of these names is the whole play's, wherever it was given."""


@dataclass(frozen=True, slots=True)
class Given:
    """One number that a reward gives, and whose it is."""

    at: int
    """The reward's span."""
    name: str
    value: Any
    owner: int | None
    """A step, `WHOLE`, or nobody."""
    rule: Rule
    nobody: str = ""
    """Why it is nobody's."""


def place(play: Play, chosen: Chosen, outcome: str) -> list[Given]:
    """Every number of every reward of `play`, by time.

    1. One of the name `outcome` is the whole play's, and so is one of a name in `OF_THE_WHOLE`.
    2. What says where it belongs (a link to a span, the id of a response, an attribute of the span itself) belongs
       there: to that call's step; to the last step, by then, of an agent whose span it is; to the whole play, where the
       span encloses all calls; to the last call inside of any other span, by then; and where there is none inside (a
       tool's span), to whom a reward would belong that was given there when it began. Of several links the first counts
       that leads somewhere.
    3. What lies inside of an agent's span belongs to the last step that this agent had made by then; unless all calls
       and all rewards lie inside of agents' spans, these calls all inside of that one, which then says nothing.
    4. Any other belongs to the last step that had ended by then. But where all had ended, and no step has a reward of
       that name, it is the whole play's.

    All calls count, also those that are left out: what belongs to one of these is nobody's, and not the next one's.
    """
    if not play.rewards:
        return []
    owners = _Owners(play, chosen)
    found = [given for at, reward in play.rewards for given in owners.given(at, reward, outcome)]
    late = [given.rule == "time" and play.start[given.at] >= owners.all_ended for given in found]
    of_steps = {given.name for given, is_late in zip(found, late, strict=True) if not is_late and given.owner != WHOLE}
    return [
        replace(given, owner=WHOLE, nobody="")
        if is_late and chosen.calls and given.name not in of_steps and not isinstance(given.value, NoScore)
        else given
        for given, is_late in zip(found, late, strict=True)
    ]


class _Owners:
    """What is asked of one play again and again."""

    def __init__(self, play: Play, chosen: Chosen) -> None:
        self._play, self._chosen = play, chosen
        self._step_of = {at: step for step, at in enumerate(chosen.calls)}
        self._spans_with: dict[str, dict[str, list[int]]] = {}
        by_end = sorted(chosen.made, key=play.end.__getitem__)
        self._all = _Calls(by_end, [play.end[at] for at in by_end])
        self.all_ended = self._all.ends[-1] if by_end else 0
        self._of_agent: dict[int, _Calls] = {}
        for at in by_end:
            if (agent := play.agent_at[at]) is not None:
                own = self._of_agent.setdefault(agent, _Calls([], []))
                own.calls.append(at)
                own.ends.append(play.end[at])
        self._outside = any(play.agent_around[at] is None for at, _ in play.rewards)
        """Whether a reward lies inside of no agent's span: then those that do are not the whole play's."""
        inside = [0] * len(play.spans)
        for at in chosen.made:
            inside[at] = 1
        for at in reversed(play.forest.order):
            if (parent := play.forest.parents[at]) >= 0:
                inside[parent] += inside[at]
        self._n_inside = inside
        """[n] calls at and inside of each span."""

    def given(self, at: int, reward: Reward, outcome: str) -> Iterator[Given]:
        owner, rule, nobody = self._owner(at, reward)
        for name, value in reward.values:
            if isinstance(value, NoScore):
                yield Given(at, name, value, None, rule, value.reason)
            elif self._chosen.calls and (name in OF_THE_WHOLE or (outcome and name == outcome)):
                yield Given(at, name, value, WHOLE, "name")
            else:
                yield Given(at, name, value, owner, rule, nobody)

    def _owner(self, at: int, reward: Reward) -> _Owner:
        own = not isinstance(self._play.meanings[at], Reward)  # an attribute of what it belongs to
        time = self._play.end[at] if own else self._play.start[at]
        if not self._chosen.calls:
            return None, "time", "the play has no step"
        return self._linked(at, reward, time) if reward.links else self._by_place(at, time)

    def _by_place(self, at: int, time: int) -> _Owner:
        """Whose a reward is that was given at `at`, and says no more."""
        around = self._play.agent_around[at]
        if around in self._of_agent and (self._outside or self._n_inside[around] < len(self._chosen.made)):
            call = self._of_agent[around].last_by(time)
            return self._step(call, "agent", "its agent had made no call by then")
        return self._step(self._all.last_by(time), "time", "no step had ended by then")

    def _step(self, call: int | None, rule: Rule, otherwise: str) -> _Owner:
        """The step that a call is, or why it is none; `otherwise`: why there is no call."""
        if call is None:
            return None, rule, otherwise
        call = self._chosen.same_as.get(call, call)
        if call in self._step_of:
            return self._step_of[call], rule, ""
        return None, rule, f"the call that it belongs to is left out: {self._chosen.left_out[call]}"

    def _linked(self, at: int, reward: Reward, time: int) -> _Owner:
        for link in reward.links:
            found = self._at(link, at, time)
            if found[0] is not None:
                break
        return found

    def _at(self, link: tuple[tuple[str, str], ...], given_at: int, time: int) -> _Owner:
        """Whose what is linked to `link` is, or why it is nobody's."""
        if not link:
            return WHOLE, "link", ""
        first, *others = sorted([self._with(key, value) for key, value in link], key=len)
        spans = [at for at in first[:_MOST_SPANS] if all(_is_in(other, at) for other in others)]
        if not spans:
            return None, "link", f"what it is linked to ({_spelled(link)}) is not in the play"
        same_as, end = self._chosen.same_as, self._play.end
        if steps := [at for one in spans if (at := same_as.get(one, one)) in self._step_of]:
            # A server may have given the id of a response again: meant is the last that was there.
            return self._step(next((at for at in reversed(steps) if end[at] <= time), steps[0]), "link", "")
        owner, rule, nobody = self._of_span(spans[0], time)
        return owner, rule if spans[0] == given_at else "link", nobody

    def _of_span(self, at: int, time: int) -> _Owner:
        """Whose a reward is that belongs to a span which is no step's."""
        n_inside = self._n_inside[at]
        if at in self._chosen.left_out:
            return self._step(at, "link", "")
        if n_inside == len(self._chosen.made):
            return WHOLE, "link", ""
        if at in self._of_agent:
            return self._step(self._of_agent[at].last_by(time), "link", "its agent had made no call by then")
        if n_inside:
            return self._step(self._last_inside(at, time), "link", "no call inside of what it is linked to had ended")
        return self._by_place(at, self._play.start[at])

    def _last_inside(self, at: int, time: int) -> int | None:
        """Of the calls inside of a span, the last that had ended by `time`."""
        place, behind = self._extent
        stop = bisect_right(self._all.ends, time)
        recent = reversed(self._all.calls[max(0, stop - _LOOKED_BACK) : stop])
        return next((call for call in recent if place[at] <= place[call] < behind[at]), None)

    @cached_property
    def _extent(self) -> tuple[list[int], list[int]]:
        """[n], [n] of each span its place among all, as they enclose one another, and the first place behind what it
        encloses.
        """
        order, parents = self._play.forest.order, self._play.forest.parents
        place = [0] * len(order)
        for at, span in enumerate(order):
            place[span] = at
        behind = [at + 1 for at in place]
        for span in reversed(order):
            if (parent := parents[span]) >= 0:
                behind[parent] = max(behind[parent], behind[span])
        return place, behind

    def _with(self, key: str, value: str) -> Sequence[int]:
        """The spans that have an attribute of this value."""
        if key not in self._spans_with:
            if len(self._spans_with) == _MOST_KEYS:
                return ()
            found: dict[str, list[int]] = {}
            for at, span in enumerate(self._play.spans):
                ids = {"span_id": span.id, "trace_id": span.trace_id or span.trace}
                has = ids.get(key) or span.attributes.get(key)
                if has is not None:
                    found.setdefault(text_of(has), []).append(at)
            self._spans_with[key] = found
        return self._spans_with[key].get(value, ())


_Owner = tuple[int | None, Rule, str]
"""Whose a reward is, by which rule, and why it is nobody's."""
_MOST_KEYS, _MOST_SPANS = 16, 64
"""So many different attributes may be linked by in one play, and so many spans that a link's rarest pair fits count."""
_LOOKED_BACK = 1024
"""So many calls, the last that had ended, are asked whether they lie inside of a span."""


def _is_in(rising: Sequence[int], number: int) -> bool:
    place = bisect_left(rising, number)
    return place < len(rising) and rising[place] == number


def _spelled(link: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{key} {value}" for key, value in link)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls by their ends."""

    calls: list[int]
    ends: list[int]

    def last_by(self, time: int) -> int | None:
        """The last that had ended by `time`."""
        place = bisect_right(self.ends, time)
        return self.calls[place - 1] if place else None
