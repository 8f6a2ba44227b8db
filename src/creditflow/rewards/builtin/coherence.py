"""The ready-made, cheap measure of coherence: repetition, contradictions, and overlap with the task.

It is lexical: it counts words and numbers, and cannot tell whether a text is true, good, or grammatical. It reads one
response and its task, nothing else of the trajectory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from creditflow.data import Score, Step, Trajectory
from creditflow.rewards.registry import builtin, reward
from creditflow.rewards.support.arithmetic import calculations_in
from creditflow.rewards.support.text import numbers_in

MAX_CHARACTERS = 20_000
"""Number of characters read, counted from the end of a text."""
SHORTEST_WORD, STEM = 4, 6
"""Minimum length of a content word, and the number of letters by which words are compared."""


@builtin
@reward(name="coherence")
class Coherence:
    """A weighted mean of three parts, each from 0 (bad) to 1; the score's reason lists them.

    `repetition`: the share of the response's n-grams of words that are distinct (`n` 4): 1 without repetition, near 0
    in a loop. It is 1 - seq-rep-n of Welleck et al. (arXiv 1908.04319), and distinct-n of Li et al. (arXiv 1510.03055)
    on one text. Sound texts repeat a little: published solutions of GSM8K have 0.96 on average.

    `numbers`: the share of checkable claims about numbers that contradict neither arithmetic nor each other; 1 without
    claims. Claims are calculations, `2+2=4`, right within 0.1 % or half a cent; and values of single letters, `x = 3`:
    two different values are a contradiction. The check is strict, so that honest work is not penalized. A calculation
    counts only if both its ends are certain. Names of more than one letter (`total = 5`, then `total = 8`) never count.
    The second value of a letter does not count if it may be a further solution or an update: if the text in between has
    a word such as `or`, `and`, `case`, `now`, `next`, `then`, `step`, `if`, `let`, `try` or `again`, or if the letter
    occurs anywhere in the text with a power, an index or a +- sign.

    `overlap`: the share of the task's numbers, and of its words of four letters and more, that occur in the response;
    the mean of both. Meant for plans. A step with one sub-task cannot cover the whole task: give it the weight 0 there.
    A task without numbers and words leaves the part out.

    Limits: it does not judge truth. A response that copies the task has full overlap, and a short one has no repetition
    and no contradiction: use it beside a reward for correctness, and with a small weight. Words are runs of letters, so
    in languages written without spaces only repeated clauses are found. An empty response is 0.

    Range: 0 to 1. Cost: half a millisecond for a solution of 300 characters, linear in the text; 10 ms per 1,000
    characters of nothing but calculations. Source: as above; the parts `numbers` and `overlap` are this project's.
    Raises ValueError if a weight is negative, all are 0, or n is not 1 to 20.
    """

    def __init__(self, repetition: float = 1.0, numbers: float = 1.0, overlap: float = 1.0, n: int = 4) -> None:
        self.weights = {"repetition": repetition, "numbers": numbers, "overlap": overlap}
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"expected {name} to be a weight of 0 or more, got {weight}")
        if sum(self.weights.values()) == 0:
            raise ValueError("expected a weight of more than 0 for repetition, numbers or overlap")
        if not 1 <= n <= 20:
            raise ValueError(f"expected n-grams of 1 to 20 words, got n={n}")
        self.n = n

    def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        text = step.response[-MAX_CHARACTERS:]
        if not text.strip():
            return Score(0.0, reason="an empty response")
        claims = checked_claims(text)
        parts = {
            "repetition": distinct_share(text, self.n),
            "numbers": sum(claim.holds for claim in claims) / len(claims) if claims else 1.0,
            "overlap": overlap_share(text, trajectory.task.text[-MAX_CHARACTERS:]),
        }
        counted = {name: part for name, part in parts.items() if part is not None and self.weights[name] > 0}
        total = sum(self.weights[name] for name in counted)
        value = sum(self.weights[name] * part for name, part in counted.items()) / total if total else 1.0
        wrong = "; ".join(claim.text for claim in claims if not claim.holds)[:80]
        listed = ", ".join(f"{name} {part:.2f}" for name, part in parts.items() if part is not None)
        return Score(min(1.0, max(0.0, value)), reason=listed + (f" ({wrong})" if wrong else ""))


# Repetition

_TOKEN = re.compile(r"[^\W\d_]{1,60}|\d{1,30}|[^\w\s]|_")


def distinct_share(text: str, n: int) -> float:
    """The share of distinct n-grams of words, numbers and signs; 1 if the text has none."""
    tokens = _TOKEN.findall(text.casefold())
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


# Numbers


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about numbers that can be checked within the text."""

    text: str
    holds: bool


def checked_claims(text: str) -> list[Claim]:
    """The calculations with certain ends, each once, and one claim per letter that is given values."""
    return [*dict.fromkeys(_calculations(text)), *_named_values(text)]


_BEFORE = re.compile(r"(?:\A|[\s=:,;<>\"'\u2019`|])\Z")
_AFTER = re.compile(r"\s{0,4}(?:[-+*/^\u00d7\u00f7!%({\\0-9\u00bc-\u00be]|x\s?[0-9])|[a-zA-Z_]")
_NOT_BEFORE = re.compile(
    r"(?i)(?:\b(?:of|by|mod|modulo|times|plus|minus|over|root|log|ln|squared|cubed|power|than|from|to|base)|[-+*/^(\u00d7\u00f7])\s{0,4}\Z"
)
_NOT_AFTER = re.compile(
    r"(?i)\s{0,4}(?:\b(?:remainder|rem|r|hundred|thousand|million|billion|dozen|mod|times|plus|minus|over)\b)"
)


def _calculations(text: str) -> Iterator[Claim]:
    for calculation in calculations_in(text, MAX_CHARACTERS):
        certain = (
            calculation.computed is not None
            and calculation.text[:1] in tuple("0123456789.(")
            and _BEFORE.search(calculation.lead[-1:])
            and not _NOT_BEFORE.search(calculation.lead[-16:])
            and not _AFTER.match(calculation.tail)
            and not _NOT_AFTER.match(calculation.tail)
        )
        if certain:
            yield Claim(calculation.text, calculation.holds)


_NAMED = re.compile(
    r"(?<![\w\\^{}.'\u2019)\]+*/=<>-])(?P<name>[a-zA-Z])\s{0,3}=\s{0,3}\$?(?P<value>-?[0-9]{1,15}(?:\.[0-9]{1,10})?)"
    r"(?![\w^]|[.,/:][0-9]|\s{0,4}[-+*/=^(\\\u00d7\u00f7%!])"
)
_OPERATION_BEFORE = re.compile(r"(?:[-+*/=<>^(\u00d7\u00f7|]|[0-9])\s{0,4}\Z")
_OTHERWISE = re.compile(
    r"(?i)\b(?:or|and|either|case|cases|if|when|where|suppose|let|assume|assuming|try|trying|now|new|next|then|step|for|"
    r"becomes|instead|again|wrong|actually|wait|correct|correction|mistake|after|before|until|loop|option|guess|first|"
    r"second|another|other|example|part|problem|solutions|roots|increase|decrease|add|update|updated|to|at)\b"
)


def _named_values(text: str) -> Iterator[Claim]:
    values: dict[str, list[re.Match[str]]] = {}
    for match in _NAMED.finditer(text):
        if not _OPERATION_BEFORE.search(text[max(0, match.start() - 5) : match.start()]):
            values.setdefault(match["name"], []).append(match)
    for name, matches in values.items():
        if _may_have_several(name, text):
            continue
        clash = next((second for first, second in itertools.pairwise(matches) if _clash(first, second, text)), None)
        yield Claim(
            f"{name} = {matches[0]['value']} ... {clash.group()}" if clash else matches[0].group(), clash is None
        )


def _may_have_several(name: str, text: str) -> bool:
    return (
        re.search(rf"{name}\s?(?:[\^\u00b2\u00b3_0-9([]|\*\*|'|\+=|-=|\*=|\\pm|=\s?(?:\\pm|\u00b1))", text) is not None
        or "\u00b1" in text
    )


def _clash(first: re.Match[str], second: re.Match[str], text: str) -> bool:
    """Whether one letter is given two values, and the text between them names no reason for the change."""
    if math.isclose(float(first["value"]), float(second["value"]), rel_tol=1e-3, abs_tol=0.0051):
        return False
    between = text[first.end() : second.start()]
    listed = re.fullmatch(r"[\s,;$\\)(]*", between) is not None
    return not listed and _OTHERWISE.search(between) is None


# Overlap


def overlap_share(text: str, task: str) -> float | None:
    """The share of the task's numbers and content words that occur in the text; None if the task has neither."""
    shares = []
    for pattern_of in (_numbers, _words):
        if pattern_words := pattern_of(task):
            shares.append(len(pattern_words & pattern_of(text)) / len(pattern_words))
    return sum(shares) / len(shares) if shares else None


def _numbers(text: str) -> set[float]:
    return {abs(number.value) for number in numbers_in(text)}


def _words(text: str) -> set[str]:
    words = re.findall(rf"[^\W\d_]{{{SHORTEST_WORD},60}}", text.casefold())
    return {word[:STEM] for word in words}
