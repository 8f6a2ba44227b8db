"""Find the responses that later prompts contain.

It works on texts and times, without spans, and leaves the use of its results to the caller. ahocorasick_rs is imported
at the first call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import contains
from typing import Any

from creditflow._utils.install import needs

SHORTEST = 8
"""Minimum length, in characters, of a response that is searched for inside messages. A shorter one counts only as a
whole message: `yes` occurs in many prompts that used no agent's `yes`."""
_LOOKED_BACK = 64
"""Maximum number of steps with the same response whose end is compared with the reader's start."""
_FEW = 64
"""Texts. Up to this number, a search for each text is faster than an automaton."""
_TRIES = 16
"""Maximum number of searches of one prompt; each restarts after the start of a response that is given only later."""


def reused(
    messages: Sequence[Sequence[str]], responses: Sequence[str], start: Sequence[int], end: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return, [S], for each of S steps the earlier steps whose whole response is in one of its messages, ascending.

    `messages`: [S] the messages that each step read; `start`, `end`: [S] times, `start` ascending. White space around a
    response is ignored. A response that its own step had already read (for example, one of the task's options) counts
    only as a whole message: inside other text it proves nothing. Among overlapping texts the one that begins first
    counts, then the longest: the reader of a summary with a quotation has used the summary. Among steps with the same
    response, the last one that had ended when the prompt was made counts, else the last one that had begun.
    """
    steps_of: dict[str, list[int]] = {}
    inside_of: dict[str, list[int]] = {}
    """The same for responses that are searched for inside messages."""
    for step, response in enumerate(responses):
        if text := response.strip():
            steps_of.setdefault(text, []).append(step)
            if len(text) >= SHORTEST and not any(map(contains, messages[step], repeat(text))):
                inside_of.setdefault(text, []).append(step)
    search = _Search(list(inside_of))
    n_before = 0
    """Number of texts that a step before `step` has given; `inside_of` is ordered by first steps."""
    texts = search.texts
    sources: list[tuple[int, ...]] = []
    for step, parts in enumerate(messages):
        while n_before < len(texts) and inside_of[texts[n_before]][0] < step:
            n_before += 1
        used: list[int] = []
        for part in parts:
            whole = part.strip()
            if whole in steps_of and (as_message := _source(steps_of[whole], step, start, end)) is not None:
                used.append(as_message)
            elif n_before:
                for text in search.texts_in(whole, n_before):
                    source = _source(inside_of[text], step, start, end)
                    assert source is not None, "a text is only looked for after a step has said it"
                    used.append(source)
        sources.append(tuple(sorted(set(used)) if len(used) > 1 else used))
    return sources


def read_in(messages: Sequence[str], responses: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of `responses` that `messages` contain, if all were given before; see `reused`."""
    n = len(responses)
    return reused([*([()] * n), messages], [*responses, ""], range(n + 1), range(n + 1))[n]


class _Search:
    """Searches a prompt for many texts at once."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self._shortest = min(map(len, texts), default=0)
        self._automaton = _automaton(texts) if len(texts) > _FEW else None
        self._known: dict[str, tuple[int, list[str]]] = {}
        """For each prompt, the number of texts searched for, and those found: every step repeats the system prompt."""

    def texts_in(self, prompt: str, n: int) -> Iterable[str]:
        """Return those of the first `n` texts that occur in `prompt` and do not overlap an earlier one."""
        if len(prompt) < self._shortest:
            return ()
        if self._automaton is not None:
            return _texts_in(prompt, self.texts, self._automaton, n)
        n_known, there = self._known.get(prompt, _NOTHING_KNOWN)
        if n_known < n:
            more = [text for text in self.texts[n_known:n] if text in prompt]
            there = there + more if more else there
            self._known[prompt] = n, there
        if len(there) > 1:  # a single text overlaps no other
            return _texts_in(prompt, there, _automaton(there), n)
        return there


_NOTHING_KNOWN: tuple[int, list[str]] = (0, [])


def _automaton(texts: Sequence[str]) -> Any:
    with needs("search in prompts", "traces"):
        import ahocorasick_rs
    return ahocorasick_rs.AhoCorasick(texts, matchkind=ahocorasick_rs.MatchKind.LeftmostLongest)


def _texts_in(prompt: str, texts: Sequence[str], automaton: Any, n: int) -> Iterator[str]:
    """Search like `_Search.texts_in`, with an automaton of all texts.

    If the automaton finds a text that is not among the first `n`, the search restarts after that text's first
    character: one of the first `n` may begin inside it.
    """
    begin: int | None = 0
    for left in range(_TRIES)[::-1]:
        rest, begin = prompt[begin:] if begin else prompt, None
        at = len(prompt) - len(rest)
        for index, first, _ in automaton.find_matches_as_indexes(rest):
            if index < n:
                yield texts[index]
            elif left:
                begin = at + first + 1
                break
        if begin is None:
            return


def _source(steps: Sequence[int], reader: int, start: Sequence[int], end: Sequence[int]) -> int | None:
    """Return the one of the ascending `steps` that `reader` has read; None if none came before it."""
    stop = bisect_left(steps, reader)
    if not stop:
        return None
    last = steps[stop - 1]
    if stop == 1 or end[last] <= start[reader]:
        return last
    recent = steps[max(0, stop - _LOOKED_BACK) : stop]
    return next((step for step in reversed(recent) if end[step] <= start[reader]), last)
