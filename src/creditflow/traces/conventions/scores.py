"""Scores listed apart from spans (`traces.exports`): one span each."""

from __future__ import annotations

from collections.abc import Iterator

from creditflow.traces.conventions.base import NO_SCORE, Convention, Entries, Link, Reward, RewardWithoutNumber
from creditflow.traces.spans import Span, text_of

_PREFIX = "creditflow.score."
_NAME, _VALUE, _LABEL, _OF = (f"{_PREFIX}{key}" for key in ("name", "value", "label", "of"))


def _rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    """The score, with a link to each id that its span may have; without any, it belongs to the whole trajectory."""
    if _NAME not in span.attributes:
        return
    value = span.attributes.get(_VALUE)
    if value is None:
        value = RewardWithoutNumber.label(span.attributes[_LABEL]) if _LABEL in span.attributes else NO_SCORE
    targets = span.attributes.get(_OF) or ()
    links: list[Link] = [(("span_id", text_of(id)),) for id in targets] if isinstance(targets, list | tuple) else []
    yield Reward([(text_of(span.attributes[_NAME]) or "score", value)], links or [()])


CONVENTION = Convention(name="scores", precedence=5, rewards=_rewards, reward_prefixes=(_PREFIX,))
