"""Parse a judge's verdict strictly: a reply that is not exactly a verdict is an error, never a low score.

Replies are hostile input: everything here is linear in the text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from creditflow.data.trajectory import clip_rounding
from creditflow.errors import CreditflowError
from creditflow.rewards.support.fences import blocks_in

MAX_CHARACTERS = 100_000
"""A longer reply is refused."""
REASON_CHARACTERS = 200

_THOUGHT = ("<think>", "</think>")
_BEFORE, _AFTER = r"[ \t*_#`]*", r"[*_`]*[:\uff1a]"
"""Characters around the label: `**Score**: 7`, `## Score: 7`. A quotation (>) is text by someone else."""
_AROUND = " \t*_`"
"""Characters that may surround the value."""
_SHOWN_AS_NOTHING = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0]+"
)
_NORMALIZED_CHARACTERS = 500
"""Characters of a line that are normalized; normalizing takes longer than linear time."""
_NO_WORD = r"(?:[\W\d_]|<[a-z]{1,10}>)*"
"""List markers, numbers, quotations, emphasis, tags."""
_COLON = r"(?:[^\w:]|[\d_])*[:\u02d0\u2236\ua789]"
"""A colon or a character that looks like one, after any emphasis or numbers: `**Score** (1-10):`."""
_NEW_LINE = re.compile(r"\r\n?|\n")
_NUMBER = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?")


class VerdictError(CreditflowError):
    """A reply without one clear verdict on the scale; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class JudgeVerdict:
    """The verdict of a judge."""

    value: float
    """0 (worst) to 1 (best)."""
    reason: str = ""
    """The judge's own words, at most 200 characters."""


@dataclass(frozen=True, slots=True)
class JudgeScale:
    """A number from `low` (worst) to `high` (best); its value is rescaled to [0, 1]."""

    low: float
    high: float
    label: str = "Score"

    def described(self) -> str:
        """Describe a valid verdict, for the instruction to the judge."""
        return f"a number from {self.low:g} (worst) to {self.high:g} (best)"

    def value(self, verdict: Any) -> float:
        """The value from 0 to 1 of a text, or of a value in JSON. Raises VerdictError if it is invalid."""
        if isinstance(verdict, str) and _NUMBER.fullmatch(verdict):
            verdict = float(verdict)
        if isinstance(verdict, bool) or not isinstance(verdict, int | float):
            raise VerdictError(f"expected {self.described()}, got {_shown(verdict)}")
        verdict = clip_rounding(verdict, self.low, self.high)
        if not self.low <= verdict <= self.high:
            raise VerdictError(f"{_shown(verdict)} is off the scale from {self.low:g} to {self.high:g}")
        return float((verdict - self.low) / (self.high - self.low))


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several words, each with its value in [0, 1]; case is ignored."""

    values: Mapping[str, float]
    label: str = "Score"

    def described(self) -> str:
        """Describe a valid verdict, for the instruction to the judge."""
        return f"one of: {', '.join(self.values)}"

    def value(self, verdict: Any) -> float:
        """The value of a word. Raises VerdictError for any other value."""
        for word, value in self.values.items():
            if isinstance(verdict, str) and verdict.casefold() in (word.casefold(), word.casefold().removesuffix(".")):
                return value
        raise VerdictError(f"expected {self.described()}, got {_shown(verdict)}")


Form = JudgeScale | Choices
"""The form of a valid verdict. `label` stands before it, as in `Score: 7`; in lower case it is the key in JSON."""
WINNER = Choices({"A": 1.0, "B": 0.0, "tie": 0.5}, label="Winner")
"""The better of two responses; its value is the first one's."""


def instruction(form: Form, style: str) -> str:
    """Instruct the judge how to write its verdict; `style` is `line` or `json`."""
    if style == "json":
        example = "N" if isinstance(form, JudgeScale) else '"..."'
        shape = f'{{"reason": "...", "{form.label.lower()}": {example}}}'
        return (
            f"Answer with one JSON object and nothing else: {shape}. "
            f'"reason" holds your reason in a few sentences; "{form.label.lower()}" is {form.described()}.'
        )
    return (
        "Give your reason in a few sentences. Then write your verdict, once, as the last line, with nothing after it, "
        f"in exactly this form:\n{form.label}: V\nV is {form.described()}."
    )


def read(reply: str, form: Form, style: str) -> JudgeVerdict:
    """Parse the verdict in a reply of the given style.

    `line`: the last line that is not blank must be exactly `Score: V` (`Winner: V`). Asterisks and other Markdown
    around label and value, and a full stop, are ignored, but a quotation or a list item does not count. Every other
    line that resembles a verdict, in whatever markup, must give the same value. `json`: the whole reply is one JSON
    object, fenced or not, with the verdict and, optionally, a reason. The thoughts of a reasoning model are not read:
    `<think>...</think>` at the beginning of the reply, and text before a lone `</think>` if it holds no verdict.

    Raises VerdictError: no verdict, one off the scale, or several that contradict one another.
    """
    if len(reply) > MAX_CHARACTERS:
        raise VerdictError(f"a reply of {len(reply)} characters; at most {MAX_CHARACTERS} are read")
    answer = _without_thoughts(reply, form, style)
    return _read_json(answer, form) if style == "json" else _read_line(answer, form)


def _without_thoughts(reply: str, form: Form, style: str) -> str:
    start, end = _THOUGHT
    thought, parsed, answer = reply.partition(end)
    if not (parsed and thought.lstrip().startswith(start)):
        answer = reply
    # If the prompt opens the thought, the reply only closes it. A text quoted by a verdict may hold the tag, too.
    before, _, after = answer.rpartition(end)
    drafted = f'"{form.label.lower()}"' in before.lower() if style == "json" else bool(_verdicts_in([before], form))
    answer = answer if drafted else after
    if start in answer:
        raise VerdictError("the reply ends while the judge still thinks (<think> without </think>)")
    return answer


def _read_line(answer: str, form: Form) -> JudgeVerdict:
    lines = _NEW_LINE.split(answer)
    while len(lines) > 1 and not lines[-1].strip():
        lines.pop()
    *others, last = lines
    labelled = re.match(f"{_BEFORE}{form.label}{_AFTER}", last, re.IGNORECASE | re.ASCII)
    if labelled is None:
        got = _shown(last.strip()) if last.strip() else "nothing"
        raise VerdictError(f"expected the last line to be '{form.label}: ...', got {got}")
    final = _trimmed(last[labelled.end() :])
    value = form.value(final)
    verdicts = [*_verdicts_in(others, form), final]
    if any(form.value(other) != value for other in verdicts[:-1]):
        raise VerdictError(f"contradicting verdicts: {', '.join(map(_shown, verdicts[:5]))}")
    return JudgeVerdict(value, _short("\n".join(others)))


def _verdicts_in(texts: Sequence[str], form: Form) -> list[str]:
    """The value in every line that resembles a verdict, by a more lenient pattern than that of a valid one."""
    like = re.compile(rf"{_NO_WORD}(?:[a-z]{{1,4}}[.)]{_NO_WORD})?{form.label}{_COLON}", re.IGNORECASE)
    plain = (_plain(line) for text in texts for line in text.splitlines())
    return [_trimmed(line[match.end() :]) for line in plain if (match := like.match(line))]


def _trimmed(value: str) -> str:
    return value.strip(_AROUND).removesuffix(".").strip(_AROUND)


def _plain(line: str) -> str:
    """A line as it is displayed: full-width letters and colons become plain, and invisible characters are removed."""
    if line.isascii():
        return line
    line = _SHOWN_AS_NOTHING.sub("", line)
    return unicodedata.normalize("NFKC", line[:_NORMALIZED_CHARACTERS]) + line[_NORMALIZED_CHARACTERS:]


def _read_json(answer: str, form: Form) -> JudgeVerdict:
    key = form.label.lower()
    try:
        (block,) = (block for block in blocks_in(answer) if block.language is not None or block.text.strip())
        plain = block.text if block.language in (None, "", "json") and block.is_closed else answer
        parsed = json.loads(plain, object_pairs_hook=_without_twins, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise VerdictError(f"expected one JSON object, got {_shown(answer)}") from error
    if not isinstance(parsed, dict) or key not in parsed:
        raise VerdictError(f"expected a JSON object with {key!r}, got {_shown(answer)}")
    if other := sorted(set(parsed) - {key, "reason"}):
        raise VerdictError(f"expected {key!r} and 'reason' alone in the JSON object, got {_shown(other[0])} too")
    verdict = parsed[key]
    if isinstance(form, JudgeScale) and isinstance(verdict, str):
        raise VerdictError(f"expected {form.described()}, got a text, {_shown(verdict)}")
    reason = parsed.get("reason", "")
    if not isinstance(reason, str):
        raise VerdictError(f"expected a text as 'reason', got {_shown(reason)}")
    return JudgeVerdict(form.value(verdict), _short(reason))


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise VerdictError("contradicting verdicts: a key of the JSON object comes twice")
    return parsed


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _short(text: str) -> str:
    plain = text[: 4 * REASON_CHARACTERS].encode("utf-8", "replace").decode()
    return " ".join(plain.split())[:REASON_CHARACTERS]


def _shown(value: Any) -> str:
    """The beginning of a reply or of a value, in one line."""
    text = value if isinstance(value, str) else _plain_text(value)
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _plain_text(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an int of too many digits, a list nested too deeply
        return f"a {type(value).__name__}"
