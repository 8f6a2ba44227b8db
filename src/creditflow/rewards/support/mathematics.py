r"""Read written mathematical answers: numbers, quantities, lists, sets, intervals, matrices, formulas, choices, words.

A text becomes an `Answer`. Only rational numbers are evaluated here. Formulas stay texts, for the math-verify library
to parse. The text comes from a model: lengths, nesting and exponents are bounded, and every expression here takes time
linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Literal

from creditflow.rewards.support.text import as_ascii

MAX_CHARACTERS = 1_000
"""A longer text is refused."""
MAX_DEPTH = 24
"""Depth of nested brackets; the library's LaTeX grammar takes time exponential in it."""
MAX_PARTS = 24
Unit = tuple[Hashable, Fraction]
"""Dimension and size: `cm^2` is an area of 1/10,000."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer."""

    kind: Literal["number", "expression", "set", "ordered", "choice", "words"]
    """A rational number; a formula, equation or matrix; parts in any order; parts in order between brackets (a point or
    an interval); a letter from A to J; or words.
    """
    text: str
    """The tidied text without the unit; for words, without capitals."""
    number: Fraction | None = None
    unit: Unit | None = None
    """The unit of a number or expression."""
    thing: str = ""
    """The counted thing: a word after a number that names no unit."""
    percent: bool = False
    parts: tuple[Answer, ...] = ()

    @property
    def brackets(self) -> str:
        """The first and the last character."""
        return self.text[:1] + self.text[-1:]

    def has_words(self) -> bool:
        """Whether it is words, a choice or a list of them."""
        return self.kind in ("words", "choice") or any(part.has_words() for part in self.parts)

    def has_expression(self) -> bool:
        """Whether the library is needed to compare it."""
        return self.kind == "expression" or any(part.has_expression() for part in self.parts)


class NotAnAnswerError(ValueError):
    """A text that cannot be a mathematical answer; the message gives the reason."""


def read(text: str) -> Answer:
    """Parse an answer. Raises NotAnAnswerError if it is empty, too long or nested, or has numbers too large."""
    if len(text) > MAX_CHARACTERS:
        raise NotAnAnswerError(f"longer than {MAX_CHARACTERS:,} characters")
    text = re.sub(r"[^\D0-9]", lambda digit: str(int(digit.group())), as_ascii(text)).strip()
    _refuse_large(text)
    return _read(tidy(text))


def is_value(text: str) -> bool:
    """Whether the text can be read as an answer other than words."""
    try:
        return not read(text).has_words()
    except NotAnAnswerError:
        return False


_LARGE = re.compile(r"\^\s?[{( ]{0,4}[-+]?\s?[0-9]{5}|[0-9]{5}\s?!|!\s?!\s?!|[0-9]\s?[eE][-+]?[0-9]{4}")
# the library evaluates these commands while it parses, before `equality` can measure their numbers
_EVALUATED = re.compile(r"vmatrix|\\(?:det|gcd|lcm)(?![a-zA-Z])|rank")
_POWER_OF_ANY_SIZE = re.compile(r"[)}\]]\s?[\^!]|\^\s?\{\s?-?\s?[0-9]{0,4}[^-0-9}\s]|[0-9]{3}\s?!")


def _refuse_large(text: str) -> None:
    if _LARGE.search(text) or (_EVALUATED.search(text) and _POWER_OF_ANY_SIZE.search(text)):
        raise NotAnAnswerError("an exponent or a factorial of five digits, or a power of unknown size in a determinant")
    opened: list[bool] = []  # for each open bracket, whether it is an exponent
    previous = ""
    for character in "".join(text.split()):
        if character in "([{":
            opened.append(previous == "^")
        elif character in ")]}" and opened:
            opened.pop()
        elif character == "^" and (sum(opened) > 1 or (any(opened) and previous in ")]}")):
            raise NotAnAnswerError("a tower of exponents")
        if len(opened) > MAX_DEPTH:
            raise NotAnAnswerError(f"brackets more than {MAX_DEPTH} deep")
        previous = character
    if re.search(r"\^[^\s{}()]\^", text):
        raise NotAnAnswerError("a tower of exponents")


# Tidying

_MONEY = "\uff04"  # a dollar sign for money, so that those around formulas can be removed
_SYMBOLS = str.maketrans({
    "\u00b7": "\\cdot ", "\u00d7": "\\times ", "\u221e": "\\infty ", "\u00b1": "\\pm ", "\u03c0": "\\pi ",
    "\u2205": "\\emptyset ", "\u00b0": " degrees ",
})  # fmt: skip
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infty|sqrt"
_SPACE = r"(?:(?<!\\)\\[,;:! ]|~|[\s\x00])"
_REWRITES = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\\$", _MONEY),
        (r"(?<!\\)\\[()\[\]]", " "),  # `\\[` is a new row with a bracket after it
        (r"\\\\(?![a-zA-Z])\s?(?:\[[^\[\]]{0,12}\])?\s?[,;:]?", r"\\\\ "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?=[\s()\[\].|\\])\s?\.?", ""),
        (r"\\(?:textstyle|displaystyle|limits|hline)(?![a-zA-Z])|\\q?quad", " "),
        (r"\\(begin|end) ?\{(?:(?:small|[bBp])?matrix\*?|array)\}(?:\[[a-z]\]| ?\{[lcr| ]{1,40}\})?", r"\\\1{pmatrix}"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])", r"\\emptyset "),
        (r"\^\s?\{?\s?\\circ(?![a-zA-Z])\s?\}?|\\degree(?![a-zA-Z])", " degrees "),
        (r"(?<=[0-9])\.\.\.|\\dots(?![a-zA-Z])", r"\\ldots "),
        (r"(?i)(?<![a-z])([ap])\.\s?m\.?(?![a-z])", r"\1m"),
        (r"(?i)(?<![\\a-z])(?:per\s?cent(?:age)?|pct)(?![a-z])|\\%", "%"),
        (r"\*\*", "^"),
        (r"(?<=[0-9])\s{0,3}(?:\{,\}|(?<!\\)\\!,|,(?<!\\)\\!)\s{0,3}(?=[0-9]{3})", ","),
        (r"\u221a\s?\(", r"\\sqrt("),
        (r"\u221a\s?(\w{1,20})", r"\\sqrt{\1}"),
        (rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1 "),
        (r"\^\s?(-\s?\w{1,20})", r"^{\1}"),
        (r"([0-9])[eE]([-+]?[0-9]{1,3})(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it)|operatorname|mbox|rm)\s?\{([^{}]{0,200})\}", r" \1 "),
    )
)  # fmt: skip
_SUPERSCRIPTS = re.compile("[\u207b\u207a]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]{1,5}")
_SPACED_GROUPS = re.compile(rf"(?<![0-9.,^{{])[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}}){{1,20}}(?![0-9]|\s?/)")
_COMMA_GROUPS = re.compile(r"(?<![0-9.,(\[])[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20}(?![0-9]|,[0-9])")


def tidy(text: str) -> str:
    """Normalize delimiters, spaces, sizes and fonts, which do not change the answer, and write symbols as LaTeX."""
    text = text.strip().strip("`*")
    if "matrix" not in text:
        text = re.sub(r"(?<!\\)\\\\(?=[a-zA-Z])", r"\\", text)
    if text.count("$") != 1:
        text = re.sub(r"(?<!\\)\$", "", text)
    text = _SUPERSCRIPTS.sub(lambda digits: f"^{{{as_ascii(unicodedata.normalize('NFKC', digits[0]))}}}", text)
    text = re.sub(
        "[\u00bc-\u00be\u2150-\u215e]", lambda sign: " " + as_ascii(unicodedata.normalize("NFKC", sign[0])), text
    )
    text = text.translate(_SYMBOLS)
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    for opening in reversed(list(re.finditer(r"\\sqrt\s?(?=\()", text))):  # the library ends it at the first bracket
        end = _closing(text, opening.end())
        if end:
            text = f"{text[: opening.start()]}\\sqrt{{{text[opening.end() + 1 : end - 1]}}}{text[end:]}"
    text = _SPACED_GROUPS.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    text = re.sub(rf"{_SPACE}+", " ", text)
    return _without_full_stop(re.sub(r"\A\s?[a-zA-Z]\s?(?:\\in(?![a-zA-Z])|\u2208)", "", text))


def _without_full_stop(text: str) -> str:
    return text.strip().rstrip(".;,").strip()


# Taking apart

_TOKEN = re.compile(
    r"(?P<opens>\\begin(?![a-zA-Z])|[(\[{])|(?P<closes>\\end(?![a-zA-Z])|[)\]}])"
    r"|(?<![\\a-zA-Z])(?:or|and)(?![a-z])|[,;]"
)
_LETTER = r"[^\W\d_\u0370-\u03ff\u2100-\u214f]"  # Greek letters and characters such as \u211d are mathematical symbols
_OTHER_SCRIPT = r"[^\W\d_a-zA-Z\u0370-\u03ff\u2100-\u214f]"
_CASES = re.compile(r"\\begin\s?\{cases\}(.*)\\end\s?\{cases\}", re.DOTALL)
_BRACKETS = {("\\{", "\\}"), ("{", "}"), *((opens, closes) for opens in "([" for closes in ")]")}


def _read(text: str) -> Answer:
    if "\\{" not in text and not any(map(str.isalnum, text)):
        raise NotAnAnswerError("no letter and no digit")
    if text in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return Answer("set", text)
    if choice := _CHOICE.fullmatch(text):
        return Answer("choice", choice[1])
    if cases := _CASES.fullmatch(text):
        return _several("set", [row for row in map(str.strip, cases[1].split("\\\\")) if row], text)
    if outer := _outer(text):
        inside = _split(text[len(outer) : -len(outer)])
        if outer == "\\{" or len(inside) > 1:
            return _several("set" if "{" in outer else "ordered", inside, text)
        if outer + text[-1] in ("()", "{}"):
            return _read(text[1:-1].strip())
    pieces = _split(_COMMA_GROUPS.sub(lambda match: match.group().replace(",", ""), text))
    if len(rows := [row for row in text.split(";") if row.strip()]) > 1 and all("," in row for row in rows):
        pieces = [f"\\{{{row}\\}}" for row in rows]  # x=1, y=2; x=3, y=4
    signed = [piece.replace("\\pm", sign).strip() for piece in pieces for sign in "+-"[: piece.count("\\pm") + 1]]
    total = _sum_of_units(text)
    return total or (_several("set", signed, text) if len(signed) > 1 else _element(signed[0] if signed else text))


def _several(kind: Literal["set", "ordered"], pieces: list[str], text: str) -> Answer:
    if len(pieces) > MAX_PARTS:
        raise NotAnAnswerError(f"more than {MAX_PARTS} parts")
    parts = tuple(map(_read, pieces))
    words = [part.has_words() for part in parts]
    if any(words) and not all(words):
        return _words(text)
    comma = _DECIMAL_COMMA.fullmatch(text)
    return Answer(kind, text, Fraction(f"{comma[1]}.{comma[2]}") if comma else None, parts=parts)


def _words(text: str) -> Answer:
    return Answer("words", " ".join(text.casefold().split()))


def _closing(text: str, start: int) -> int:
    """The end of the bracket that opens at `start`; 0 if it stays open."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token["opens"] is not None) - (token["closes"] is not None)
        if depth == 0:
            return token.end()
    return 0


def _outer(text: str) -> str:
    r"""The bracket that opens at the beginning and closes at the end: `(`, `[`, `{`, `\{`, or nothing."""
    first = "\\{" if text.startswith("\\{") else text[:1]
    last = "\\}" if text.endswith("\\}") else text[-1:]
    return first if (first, last) in _BRACKETS and _closing(text, len(first) - 1) == len(text) else ""


def _split(text: str) -> list[str]:
    """Split the text at commas, semicolons, `or` and `and` outside of brackets; empty pieces are left out."""
    pieces, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token["opens"] is not None) - (token["closes"] is not None)
        if depth == 0 and not token["opens"] and not token["closes"]:
            pieces.append(text[start : token.start()])
            start = token.end()
    return [piece for piece in map(_without_full_stop, [*pieces, text[start:]]) if piece]


# One element

_DECIMAL_COMMA = re.compile(r"(-?[0-9]{1,20}),([0-9]{2}|[0-9]{4,20}|(?<=\b0,)[0-9]{3})")
_CHOICE = re.compile(r"(?i:option|choice|answer)?\s?\(?([A-J])\)?(?:[.:)]\s.{1,200})?", re.DOTALL)
_CURRENCY = {_MONEY: "dollar", "$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}
_UNITS: dict[str, Unit] = {
    **{name: (name, Fraction(1)) for name in ("dollar", "euro", "pound", "am", "pm", "degree", "radian")},
    "usd": ("dollar", Fraction(1)), "cent": ("dollar", Fraction(1, 100)), "deg": ("degree", Fraction(1)),
}  # fmt: skip
"""Units in which answers differ from physics: money, times of day and angles are never converted."""
_LETTER_UNITS = frozenset("ghlmosACFHJKLNVW")
_MULTIPLES = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TRAILING_UNIT = re.compile(
    rf"(?:(?<=[0-9)}}])|(?<=\\pi))(?P<space>\s?)(?P<name>{_LETTER}{{1,20}}(?: {_LETTER}{{1,20}}){{0,3}}"
    r"(?:\s?/\s?[a-zA-Z]{1,20})?)(?:\s?\^\s?\{?\s?(?P<power>[23])\s?\}?)?\Z"
)
_CURRENCY_FIRST = re.compile(r"(?P<sign>[-+]?)\s?(?P<currency>[\uff04$\u20ac\u00a3])\s?(?P<rest>\S.*)\Z", re.DOTALL)
_SUM = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s?([a-zA-Z]{1,20})(?:,?\s?and\s|,?\s?)")
_WORD = re.compile(rf"(?<![\\a-zA-Z]){_LETTER}+")
_NAMES = re.compile(r"(?:\\(?:begin|end)|_)\s?\{\w{1,12}\}")
# a time such as 12:00 would be a division by zero
_NO_FORMULA = re.compile(rf"(?i)no|up|on|in|[0-9]+:00|{_LETTER}+(?:[ '-]+{_LETTER}+)+|[^$]*\$.*")


def _is_word(letters: str) -> bool:
    """Whether adjacent letters are a word, rather than variables side by side."""
    return len(letters) > 2 or re.search(_OTHER_SCRIPT, letters) is not None


def _element(text: str) -> Answer:
    percent, value = text.endswith("%"), text.removesuffix("%").strip()
    currency = _CURRENCY_FIRST.match(value)
    value = currency["sign"] + currency["rest"] if currency else value
    value, unit, thing, multiple = _cut_unit(value)
    unit = unit or ((_CURRENCY[currency["currency"]], Fraction(1)) if currency else None)
    if (number := rational(value)) is not None:
        return Answer("number", value, number * multiple, unit, thing, percent)
    # any degrees left are inside a formula: \sin 30^\circ
    value = re.sub(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?degrees\s?", r"(\1\\frac{\\pi}{180})", value).strip()
    value = value if multiple == 1 else f"{value} \\cdot {multiple}"
    if _NO_FORMULA.fullmatch(value) or any(map(_is_word, _WORD.findall(_NAMES.sub("", value)))):
        return _words(text)
    return Answer("expression", value, unit=unit, thing=thing, percent=percent)


def _sum_of_units(text: str) -> Answer | None:
    """`5 feet 4 inches` as one quantity, in its first unit; sizes must fall, because `5 m and 3 m` are two."""
    pairs = _SUM.findall(text)
    units = [unit for _, name in pairs if (unit := unit_of(name))]
    sizes = [size for _, size in units]
    if (
        not 1 < len(units) == len(pairs)
        or sizes != sorted({*sizes}, reverse=True)
        or _SUM.sub("", text).strip()
        or len({dimension for dimension, _ in units}) > 1
    ):
        return None
    total = sum(Fraction(number) * size for (number, _), (_, size) in zip(pairs, units, strict=True)) / units[0][1]
    return Answer("number", str(total), Fraction(total), units[0])


def _cut_unit(text: str) -> tuple[str, Unit | None, str, int]:
    """The text before a unit or a counted thing, both of these, and `million` as a factor.

    A single letter is a unit only after a space (`5 m`), else a variable (`5m`).
    """
    match = _TRAILING_UNIT.search(text)
    if match is None or re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return text, None, "", 1
    before, name = text[: match.start()].strip(), match["name"]
    first, _, rest = name.partition(" ")
    multiple = _MULTIPLES.get(first.lower(), 1)
    name = rest if multiple > 1 else name
    unit = unit_of(f"{name}**{match['power']}" if match["power"] else name)
    if not name or (unit and (len(name) > 1 or match["space"])):
        return before, unit, "", multiple
    name = name.lower().removesuffix("s")
    is_thing = (
        _is_word(name) and unit_of(name.split()[0]) is None and (match["space"] or re.search(_OTHER_SCRIPT, name))
    )
    if unit is None and is_thing and (rational(before) is not None or "\\" in before or "^" in before):
        return before, None, name, multiple
    return text, None, "", 1


@cache
def _registry() -> Any:
    import pint

    return pint.UnitRegistry(non_int_type=Fraction)


@lru_cache(maxsize=1024)  # the words are a model's: an endless cache would fill the memory
def unit_of(name: str) -> Unit | None:
    """The dimension and the size of a unit by its name, in any number; None for other words."""
    if unit := _UNITS.get(name.lower().removesuffix("s")):
        return unit
    if (len(name) == 1 and name not in _LETTER_UNITS) or name == "pi" or name.endswith(("unit", "units")):
        return None
    try:
        unit = _registry().Quantity(Fraction(1), _registry().parse_units(name)).to_base_units()
        return unit.dimensionality, Fraction(unit.magnitude)
    except Exception:  # pint raises many kinds of exception for other words
        return None


# Numbers

_FRACTION = re.compile(
    r"(?:(?P<whole>[0-9]{1,300})(?=[\s\\])\s?)?(?:(?P<num>[0-9]{1,300})\s?/\s?(?P<den>[0-9]{1,300})"
    r"|\\[dtc]?frac\s?(?:\{\s?(?P<over>-?[0-9]{1,300})\s?\}|(?P<digit>[0-9]))\s?"
    r"(?:\{\s?(?P<under>[0-9]{1,300})\s?\}|(?P<digit2>[0-9])))"
)
_TENS = re.compile(r"\s?(?:\\times|\\cdot|\*|x)\s?10\s?\^\s?(?:\{\s?([-+]?[0-9]{1,3})\s?\}|([0-9]))\Z")
_DECIMAL = re.compile(r"(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:e[-+]?[0-9]{1,3})?(?:\s?\\ldots)?")
_REPEATING = re.compile(
    r"(?P<before>[0-9]{0,300})\.(?:(?P<fixed>[0-9]{0,30}?)(?P<cycle>[0-9]{1,9}?)(?P=cycle){1,30}\s?\\ldots"
    r"|(?P<fixed2>[0-9]{0,300})\s?\\(?:overline|bar|dot)\s?\{\s?(?P<cycle2>[0-9]{1,100})\s?\})"
)
_RATIO = re.compile(r"([0-9]{1,300})\s?:\s?([0-9]{1,300})")
_BASE = re.compile(r"([0-9][0-9a-zA-Z]{0,60})\s?_\s?(?:\{\s?([0-9]{1,2})\s?\}|([2-9]))")


def rational(text: str) -> Fraction | None:
    """The rational number that the text writes out; None for other texts."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    text = text[1:].strip() if text[:1] in ("-", "+") else text
    try:
        if match := _REPEATING.fullmatch(text):
            fixed, cycle = match["fixed"] or match["fixed2"] or "", match["cycle"] or match["cycle2"]
            tail = int(fixed or "0") + Fraction(int(cycle), 10 ** len(cycle) - 1)
            return (int(match["before"] or "0") + tail * Fraction(1, 10 ** len(fixed))) * sign
        if match := _FRACTION.fullmatch(text):
            over = match["num"] or match["over"] or match["digit"]
            under = match["den"] or match["under"] or match["digit2"]
            return sign * (int(match["whole"] or "0") + Fraction(int(over), int(under)))
        if match := _RATIO.fullmatch(text):
            return sign * Fraction(int(match[1]), int(match[2]))
        if match := _BASE.fullmatch(text):
            return sign * Fraction(int(match[1], int(match[2] or match[3])))
        text = _TENS.sub(lambda ten: f"e{ten[1] or ten[2]}", text)
        return Fraction(text.replace("\\ldots", "").strip()) * sign if _DECIMAL.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):  # a digit outside of the base; division by zero
        return None
