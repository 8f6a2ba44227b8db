"""Which step, or which whole play, a reward of a trace belongs to.

It knows the rules, in their order: what the reward says itself; the agent at work around it; time. Not what becomes of
the numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from creditflow.adapters.meaning import Reward
from creditflow.adapters.play import Chosen, Play
from creditflow.adapters.spans import text_of

Rule = Literal["name", "link", "agent", "time"]
WHOLE = -1
"""In place of a step: the whole play."""


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

    1. One of the name `outcome` is the whole play's.
    2. What says where it belongs (a link to a span, the id of a response, an attribute of the span itself) belongs
       there: to that call's step; to the last step, by then, of an agent whose span it is; to the whole play, where the
       span encloses all steps. Of several links the first counts that leads somewhere.
    3. What lies inside of an agent's span belongs to the last step that this agent had made by then; unless all steps
       and all rewards lie inside of agents' spans, these steps all inside of that one, which then says nothing.
    4. Any other belongs to the last step that had ended by then. But where all had ended, and no step has a reward of
       that name, it is the whole play's.
    """
    if not play.rewards:
        return []
    owners = _Owners(play, chosen)
    found = [given for at, reward in play.rewards for given in owners.given(at, reward, outcome)]
    late = [given.rule == "time" and play.start[given.at] >= owners.all_ended for given in found]
    of_steps = {given.name for given, is_late in zip(found, late, strict=True) if not is_late and given.owner != WHOLE}
    return [
        replace(given, owner=WHOLE) if is_late and given.owner is not None and given.name not in of_steps else given
        for given, is_late in zip(found, late, strict=True)
    ]


class _Owners:
    """What is asked of one play again and again."""

    def __init__(self, play: Play, chosen: Chosen) -> None:
        self._play, self._chosen = play, chosen
        self._step_of = {at: step for step, at in enumerate(chosen.calls)}
        self._step_of.update({at: self._step_of[same] for at, same in chosen.same_as.items() if same in self._step_of})
        self._spans_with: dict[str, dict[str, list[int]]] = {}
        by_end = sorted(range(len(chosen.calls)), key=lambda step: play.end[chosen.calls[step]])
        self._all = _Steps(by_end, [play.end[chosen.calls[step]] for step in by_end])
        self.all_ended = self._all.ends[-1] if by_end else 0
        self._of_agent: dict[int, _Steps] = {}
        for step in by_end:
            at = chosen.calls[step]
            if (agent := play.agent_at[at]) is not None:
                own = self._of_agent.setdefault(agent, _Steps([], []))
                own.steps.append(step)
                own.ends.append(play.end[at])
        self._outside = any(play.agent_around[at] is None for at, _ in play.rewards)
        """Whether a reward lies inside of no agent's span: then those that do are not the whole play's."""
        self._silent = {play.agent_at[at] for at in chosen.left_out if at not in chosen.same_as} - set(self._of_agent)
        inside = [int(at in self._step_of and at not in chosen.same_as) for at in range(len(play.spans))]
        for at in reversed(play.forest.order):
            if (parent := play.forest.parents[at]) >= 0:
                inside[parent] += inside[at]
        self._steps_inside = inside

    def given(self, at: int, reward: Reward, outcome: str) -> Iterator[Given]:
        owner, rule, nobody = self._owner(at, reward)
        for name, value in reward.values:
            if outcome and name == outcome:
                yield Given(at, name, value, WHOLE, "name")
            else:
                yield Given(at, name, value, owner, rule, nobody)

    def _owner(self, at: int, reward: Reward) -> tuple[int | None, Rule, str]:
        own = not isinstance(self._play.meanings[at], Reward)  # an attribute of what it belongs to
        time = self._play.end[at] if own else self._play.start[at]
        if not self._chosen.calls:
            return None, "time", "the play has no step"
        if reward.links:
            return self._linked(reward, time)
        around = self._play.agent_around[at]
        if around is not None and around in self._silent:
            return None, "agent", "the calls of its agent are left out"
        says = around in self._of_agent and (self._outside or self._steps_inside[around] < len(self._chosen.calls))
        if around is not None and says:
            step = self._of_agent[around].last_by(time)
            return step, "agent", "" if step is not None else "its agent had made no step by then"
        step = self._all.last_by(time)
        return step, "time", "" if step is not None else "no step had ended by then"

    def _linked(self, reward: Reward, time: int) -> tuple[int | None, Rule, str]:
        nobody = ""
        for link in reward.links:
            owner, nobody = self._at(link, time)
            if owner is not None:
                return owner, "link", ""
        return None, "link", nobody

    def _at(self, link: tuple[tuple[str, str], ...], time: int) -> tuple[int | None, str]:
        """Whose what is linked to `link` is, or why it is nobody's."""
        if not link:
            return WHOLE, ""
        first, *others = link
        spans = [at for at in self._with(*first)[:_MOST_SPANS] if all(at in self._with(*other) for other in others)]
        if not spans:
            return None, f"what it is linked to ({_spelled(link)}) is not in the play"
        for at in spans:
            if at in self._step_of:
                return self._step_of[at], ""
        at = spans[0]
        if at in self._chosen.left_out:
            return None, f"the call that it is linked to is left out: {self._chosen.left_out[at]}"
        if self._steps_inside[at] == len(self._chosen.calls):
            return WHOLE, ""
        step = self._of_agent[at].last_by(time) if at in self._of_agent else None
        return step, "" if step is not None else "what it is linked to had made no step by then"

    def _with(self, key: str, value: str) -> Sequence[int]:
        """The spans that have an attribute of this value."""
        if key not in self._spans_with:
            if len(self._spans_with) == _MOST_KEYS:
                return ()
            found: dict[str, list[int]] = {}
            for at, span in enumerate(self._play.spans):
                has = {"span_id": span.id, "trace_id": span.trace}.get(key) or span.attributes.get(key)
                if has is not None:
                    found.setdefault(text_of(has), []).append(at)
            self._spans_with[key] = found
        return self._spans_with[key].get(value, ())


_MOST_KEYS, _MOST_SPANS = 16, 64
"""So many different attributes may be linked by in one play, and so many spans that one pair fits are looked at."""


def _spelled(link: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{key} {value}" for key, value in link)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps by their ends."""

    steps: list[int]
    ends: list[int]

    def last_by(self, time: int) -> int | None:
        """The last that had ended by `time`."""
        place = bisect_right(self.ends, time)
        return self.steps[place - 1] if place else None
