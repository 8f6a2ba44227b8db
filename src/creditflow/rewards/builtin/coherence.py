"""The ready-made, cheap measure of coherence: repetition, wrong calculations, and overlap with the task.

It is lexical: it counts words and numbers, and cannot tell whether a text is true, good, or grammatical. It reads one
response and its task, nothing else of the trajectory.
"""

from __future__ import annotations

import math
import re

from creditflow.data import Score, Step, Trajectory
from creditflow.rewards.registry import builtin, reward
from creditflow.rewards.support.arithmetic import Calculation, calculations_in
from creditflow.rewards.support.text import numbers_in

MAX_CHARACTERS = 20_000
"""Number of characters read, counted from the end of a text."""
SHORTEST_WORD, STEM = 4, 6
"""Minimum length of a content word, and the number of letters by which words are compared."""


@builtin
@reward(name="coherence")
class Coherence:
    """A weighted mean of three parts, each from 0 (bad) to 1; the score's reason lists them.

    `repetition`: Weight of the share of the response's n-grams of words that are distinct: 1 without repetition, near 0
    in a loop. It is 1 - seq-rep-n of Welleck et al. (arXiv 1908.04319), and distinct-n of Li et al. (arXiv 1510.03055)
    on one text.
    `numbers`: Weight of the share of calculations that are right within 0.1 % or half a cent, such as `2+2=4`; 1
    without any. A calculation counts only if both its ends are certain.
    `overlap`: Weight of the share of the task's numbers, and of its words of four letters and more, that occur in the
    response; the mean of both. Meant for plans: set it to 0 for a step with one sub-task, which cannot cover the whole
    task. A task without numbers and words leaves the part out.
    `n`: Words of an n-gram, from 1 to 20.

    Limits: it does not judge truth. A response that copies the task has full overlap, and a short one has no repetition
    and no calculation: use it beside a reward for correctness, and with a small weight. Words are runs of letters, so
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


def checked_claims(text: str) -> list[Calculation]:
    """The calculations with certain ends, each once."""
    certain = filter(_is_certain, calculations_in(text, MAX_CHARACTERS))
    return [*{calculation.text: calculation for calculation in certain}.values()]


_BEFORE = re.compile(r"(?:\A|[\s=:,;<>\"'\u2019`|])\Z")
_AFTER = re.compile(r"\s{0,4}(?:[-+*/^\u00d7\u00f7!%({\\0-9\u00bc-\u00be]|x\s?[0-9])|[a-zA-Z_]")
_NOT_BEFORE = re.compile(
    r"(?i)(?:\b(?:of|by|mod|modulo|times|plus|minus|over|root|log|ln|squared|cubed|power|than|from|to|base)|[-+*/^(\u00d7\u00f7])\s{0,4}\Z"
)
_NOT_AFTER = re.compile(
    r"(?i)\s{0,4}(?:\b(?:remainder|rem|r|hundred|thousand|million|billion|dozen|mod|times|plus|minus|over)\b)"
)


def _is_certain(calculation: Calculation) -> bool:
    return bool(
        calculation.computed is not None
        and calculation.text[:1] in tuple("0123456789.(")
        and _BEFORE.search(calculation.lead[-1:])
        and not _NOT_BEFORE.search(calculation.lead[-16:])
        and not _AFTER.match(calculation.tail)
        and not _NOT_AFTER.match(calculation.tail)
    )


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
