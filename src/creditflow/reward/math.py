"""The ready-made comparison of mathematical answers, by the math-verify library.

It knows nothing of trajectories: text and truth in, a number out. The library (and sympy with it) is imported at the
first call that needs it.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from creditflow.reward.registry import answer, builtin
from creditflow.reward.text import final_answer

MAX_CHARACTERS = 1_000
"""The library's expressions are not linear in the text; of a longer answer only the end is read."""

_PLAIN_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,5}|[0-9]{1,15})(?:\.[0-9]{1,6})?")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2}")


@builtin
@answer
def math_verify(text: str, truth: Any, seconds: int = 2) -> float:
    r"""1 where the answer is mathematically equal to the truth: numbers, fractions, LaTeX, sets, intervals.

    Of a text with a line `#### answer`, only what follows the last #### is read. Two plain numbers are compared here;
    all else goes to the library, which gives up after `seconds` (an answer that takes longer scores 0: it is the
    answer's doing). It measures by signal.alarm and so works in the main thread of a process only: elsewhere this
    raises RuntimeError, and the score is `failed` rather than computed without a limit (`9^{9^{9^9}}` never ends).

    Range: 0 or 1. Cost: 1 ms, seconds on hostile input. Source: https://github.com/huggingface/Math-Verify.
    Raises ValueError where the truth cannot be read.
    """
    found, wanted = _normalise(final_answer(text)[-MAX_CHARACTERS:]), _normalise(final_answer(str(truth)))
    if _PLAIN_NUMBER.fullmatch(found) and _PLAIN_NUMBER.fullmatch(wanted):
        return float(_value(found) == _value(wanted))
    if not found:
        return 0.0
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_verify limits its time by signal.alarm, which works in the main thread only")

    from math_verify import parse, verify

    gold = parse(_delimited(wanted), parsing_timeout=seconds)
    if not gold:
        raise ValueError(f"expected a ground truth that math-verify can read, got {str(truth)[:80]!r}")
    return float(verify(gold, parse(_delimited(found), parsing_timeout=seconds), timeout_seconds=seconds))


def _normalise(answer: str) -> str:
    r"""`\$1,080.00`, `$50\%$`, `72.` as the library reads them right: `1,080.00`, `50%`, `72`."""
    answer = answer.replace("\\%", "%").replace("\\$", "").strip()
    if len(answer) > 2 and answer[0] == answer[-1] == "$" and not set(answer[1:-1]) & {"\\", "$"}:
        answer = answer[1:-1]
    answer = re.sub(r"\A\$\s?(?=[-.0-9]+)(?!.*\$)", "", answer, flags=re.DOTALL)
    return answer.strip().rstrip(".").rstrip()


def _delimited(answer: str) -> str:
    """The library reads a bare `x^2 + 1` only between dollar signs; prose, numbers with % and boxes it finds itself."""
    bare = not set(answer) & {"$", "%"} and "\\boxed" not in answer and not _WORD.search(answer)
    return f"${answer}$" if bare else answer


def _value(number: str) -> float:
    return float(number.replace(",", ""))
