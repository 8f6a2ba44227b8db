r"""How people and models write mathematical answers: LaTeX, percentages, units, lists, sets, intervals, mixed numbers.

It turns a text into an `Answer` of plain parts, and refuses what cannot be an answer. It must not know what an answer
is compared with, nor evaluate anything but rational numbers. What it reads was written by a model: every expression
here is bounded and takes time linear in the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

MAX_CHARACTERS = 1_000
"""Of a longer text only the end is read."""
MAX_BOX_DISTANCE = 20_000
"""Of which a box may stand this far from the end."""
MAX_DEPTH = 24
"""Brackets within brackets; the grammar of the library that reads LaTeX takes exponential time in them."""
MAX_PARTS = 24
MAX_EXPONENT = 10_000
MAX_BRACKET_EXPONENT = 100
"""Of a sum or product in brackets, which may have to be multiplied out."""
MAX_FACTORIAL = 1_000
SIGNIFICANT_DIGITS = 6
"""A decimal with fewer digits is not taken for an irrational or repeating number."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit that can be told from others: `cm^2` is length^2, a ten-thousandth."""

    kind: str
    size: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Part:
    """One element of an answer: what stands there without its unit, and the number it is, if it is a rational one."""

    text: str
    number: Fraction | None = None
    unit: Unit | None = None
    percent: bool = False
    places: int | None = None
    """Decimals behind the point where it is written as a decimal with six significant digits or more."""
    words: str = ""
    """Casefolded words where it is made of words alone: `yes`, `monday`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer taken apart."""

    kind: Literal["one", "set", "ordered", "prose"]
    """One part; several in any order; several in order between brackets (a point or an interval); or a sentence."""
    parts: tuple[Part, ...]
    brackets: str = ""
    text: str = ""


_NUMERIC_EXPONENT = re.compile(
    r"([)}\]]?)\s?\^\s?[{( ]{0,4}[-+]?\s?([0-9]{1,1000})\s?(?:\^\s?[{( ]{0,4}[-+]?([0-9]{1,1000}))?"
)


class NotAnAnswer(ValueError):
    """A text that no mathematical answer looks like; the message says why."""


def read(text: str) -> Answer:
    """What the text says: its last box, else what follows its last `answer is`, else all of it.

    Raises NotAnAnswer where it is empty, nested too deep, or speaks of numbers too large to work out.
    """
    boxed = last_box(text[-MAX_BOX_DISTANCE:])
    whole = (text if boxed is None else boxed)[-MAX_CHARACTERS:].strip()
    refuse_monsters(whole)
    answer = _take_apart(_tidy(whole))
    if answer.kind == "prose":
        *_, rest = re.split(r"(?i)\banswer\s{0,3}(?:is|:)\s{0,3}:?", whole)
        if rest != whole and rest.strip() and (after := _take_apart(_tidy(rest))).kind != "prose":
            return after
    return replace(answer, text=whole)


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds; None where there is none that closes."""
    for opened in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s?\{", text))[-3:]):
        depth = 1
        for i in range(opened.end(), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[opened.end() : i].strip()
    return None


def refuse_monsters(text: str) -> None:
    """Raise NotAnAnswer where the text nests too deep, or holds powers and factorials that nobody can write down.

    It reads signs, not values: what it lets through may still take long, and is stopped by a clock elsewhere.
    """
    _refuse_depth(text)
    for match in _NUMERIC_EXPONENT.finditer(text):
        after_bracket, base, power = match[1], match[2], match[3]
        most = MAX_BRACKET_EXPONENT if after_bracket else MAX_EXPONENT
        if len(base) > 5 or int(base) > most:
            raise NotAnAnswer(f"an exponent above {most}")
        if power is not None and (len(base) > 3 or len(power) > 1 or int(base) ** int(power) > 1000):
            raise NotAnAnswer("a tower of exponents")
    for match in re.finditer(r"(?<![0-9])([0-9]{0,1000})\s?(!{1,1000})", text):
        n, marks = match[1], match[2]
        if n and (len(marks) > 2 or len(n) > 4 or int(n) > MAX_FACTORIAL):
            raise NotAnAnswer(f"a factorial above {MAX_FACTORIAL}!")
    if re.search(r"[)}\]]\s?!", text) and (text.count("!") > 1 or re.search(r"[0-9]{3}|\^", text)):
        raise NotAnAnswer("a factorial of something large")
    if re.search(r"[0-9]\s?[eE][-+]?[0-9]{4}", text):
        raise NotAnAnswer("an exponent beyond every float")


def _refuse_depth(text: str) -> None:
    opened: list[bool] = []  # of each open bracket, whether it is an exponent
    exponents = 0
    previous = ""
    for character in text:
        if character in "([{":
            opened.append(previous == "^")
            exponents += opened[-1]
        elif character in ")]}" and opened:
            exponents -= opened.pop()
        elif character == "^" and (exponents > 1 or (exponents and previous in ")]}")):
            raise NotAnAnswer("a tower of exponents")
        if len(opened) > MAX_DEPTH:
            raise NotAnAnswer(f"brackets more than {MAX_DEPTH} deep")
        if not character.isspace():
            previous = character
    if re.search(r"\^\s?[^\s{}()]\s?\^", text):
        raise NotAnAnswer("a tower of exponents")


# Tidying

_SAME = {
    "\u2212": "-", "\u2013": "-", "\u00d7": "\\times ", "\u00f7": "/", "\u00b7": "\\cdot ", "\u03c0": "\\pi ",
    "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u222a": "\\cup ", "\u2205": "\\emptyset ",
    "\u00b1": "\\pm ", "\u00b0": " degrees ", "\u00bd": "\\frac{1}{2}", "\u2044": "/", "\u2019": "'",
    "\u2009": "\\,", "\u202f": "\\,", "\u00a0": "\\,", "\u2006": "\\,", "~": "\\,",
}  # fmt: skip
_CURRENCY = {"\uff04": "dollar", "$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}
_DOLLAR = "\uff04"  # a dollar that is money, so that those which delimit mathematics can go

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\(?:left|right|[bB]igg?[lr]?)(?=[\s()\[\].|\\])\s?\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|hline)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:geq|geqslant|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:leq|leqslant|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])", r"\\emptyset "),
        (r"\^\s?\{?\s?\\circ(?![a-zA-Z])\s?\}?|\\degree(?![a-zA-Z])", " degrees "),
        (r"(?i)(?<![\\a-z])(?:infinity|infty)(?![a-z])", r"\\infty "),
        (r"(?i)(?<![\\a-z])(?:per\s?cent|pct)(?![a-z])", "%"),
        (r"\\%", "%"),
        (r"\*\*", "^"),
        (r"\{\s?([^{}\\]{1,100})\\over(?![a-zA-Z])\s?([^{}\\]{1,100})\}", r"\\frac{\1}{\2}"),
        (r"(?<=[0-9])\s{0,3}\{,\}\s{0,3}(?=[0-9]{3})", ","),
        (r"(?<=[0-9])\\!(?=,|[0-9]{3})", ""),
        (r"(?<=,)\\!(?=[0-9]{3})", ""),
    )
)
_STYLED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|rm)\s?\{([^{}]{0,200})\}")
_SPACED_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\\,|\\ | )[0-9]{3}){1,20}(?![0-9]|\s?/)")
_COMMA_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3}){1,20}(?![0-9]|,[0-9])")
_SPACES = re.compile(r"\\[,;: ]|\\q?quad(?![a-zA-Z])|[\s\x00]+")
_VARIABLE_IN = re.compile(r"\A[a-zA-Z]\s?(?:\\in(?![a-zA-Z])|\u2208)")


def _tidy(text: str) -> str:
    """One way to write what can be written in many."""
    text = text.strip().strip("`").removeprefix("**").removesuffix("**")
    text = text.replace("\\$", _DOLLAR)
    if text.count("$") != 1:
        text = text.replace("$", "")
    for delimiter in ("\\(", "\\)", "\\[", "\\]"):
        # `\\[` in a matrix is a line break with a bracket after it
        text = re.sub(r"(?<!\\)" + re.escape(delimiter), " ", text)
    for character, same in _SAME.items():
        text = text.replace(character, same)
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    text = _STYLED.sub(r" \1 ", text)
    text = _SPACED_GROUPS.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    text = _SPACES.sub(" ", text)
    return _without_full_stop(_VARIABLE_IN.sub("", text))


def _without_full_stop(text: str) -> str:
    return text.strip().rstrip(".;,").strip()


# Taking apart

_SEPARATOR = re.compile(r"(?<![\\a-zA-Z])(?:or|and)(?![a-zA-Z])|[,;]")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_CLOSES = {"(": ")", "[": "]", "{": "}"}


def _take_apart(text: str) -> Answer:
    if "\\{" not in text and not any(map(str.isalnum, text)):
        raise NotAnAnswer("no letter and no digit")
    if text in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return Answer("set", (), text=text)
    if "\\begin{" in text:
        return Answer("one", (Part(text),), text=text)
    outer = _outer(text)
    if outer:
        width = len(outer)
        inside = _split(text[width:-width])
        if outer == "\\{" or (outer == "{" and len(inside) > 1):
            return _several("set", inside, text)
        if outer != "{" and len(inside) > 1:
            return _several("ordered", inside, text)
        if outer == "{" or (outer == "(" and _WORD.search(text) is None):
            return _take_apart(text[1:-1].strip())
    return _several("set", _split(_COMMA_GROUPS.sub(lambda match: match.group().replace(",", ""), text)), text)


def _several(kind: Literal["set", "ordered"], texts: list[str], text: str) -> Answer:
    if len(texts) > MAX_PARTS:
        raise NotAnAnswer(f"more than {MAX_PARTS} parts")
    if kind == "set":
        texts = [signed for one in texts for signed in _both_signs(one)]
    parts = [_part(one) for one in texts]
    if any(part is None for part in parts):
        return Answer("prose", (), text=text)
    read = tuple(part for part in parts if part is not None)
    if kind == "ordered":
        return Answer(kind, read, brackets=text[0] + text[-1], text=text)
    return Answer("one" if len(read) == 1 else "set", read, text=text)


def _both_signs(text: str) -> list[str]:
    if text.count("\\pm") != 1:
        return [text]
    return [text.replace("\\pm", sign).strip() for sign in "+-"]


def _outer(text: str) -> str:
    r"""The bracket that opens at the very beginning and closes at the very end: `(`, `[`, `{`, `\{`, or nothing.

    Half-open intervals count: any of `(` and `[` may be closed by any of `)` and `]`.
    """
    first = "\\{" if text.startswith("\\{") else text[:1]
    if first not in ("(", "[", "{", "\\{"):
        return ""
    last = "\\}" if text.endswith("\\}") else text[-1:]
    if (first, last) not in {("\\{", "\\}"), ("{", "}")} and not (first in "([" and last in ")]"):
        return ""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and i >= len(first) - 1:
            return first if i == len(text) - 1 else ""
    return ""


def _split(text: str) -> list[str]:
    """The text between commas, semicolons, `or` and `and` that stand in no bracket; empty pieces are left out."""
    cuts = {match.start(): match.end() for match in _SEPARATOR.finditer(text)}
    pieces, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and i in cuts:
            pieces.append(text[start:i])
            start = cuts[i]
    pieces.append(text[start:])
    return [piece for one in pieces if (piece := _without_full_stop(one))]


# One part

_UNITS: dict[str, Unit] = {
    **{name: Unit("length", Fraction(size)) for names, size in (
        ("mm millimeter millimetre", "0.001"), ("cm centimeter centimetre", "0.01"), ("dm", "0.1"),
        ("m meter metre", "1"), ("km kilometer kilometre", "1000"), ("inch inches", "0.0254"),
        ("ft foot feet", "0.3048"), ("yd yard", "0.9144"), ("mi mile", "1609.344"),
    ) for name in names.split()},
    **{name: Unit("mass", Fraction(size)) for names, size in (
        ("mg milligram", "0.000001"), ("g gram", "0.001"), ("kg kilogram", "1"),
    ) for name in names.split()},
    **{name: Unit("time", Fraction(size)) for names, size in (
        ("ms millisecond", "0.001"), ("s sec second", "1"), ("min minute", "60"), ("h hr hour", "3600"),
        ("day", "86400"), ("week", "604800"),
    ) for name in names.split()},
    **{name: Unit("length^3", Fraction(size)) for names, size in (
        ("ml mL milliliter millilitre", "0.000001"), ("l L liter litre", "0.001"),
    ) for name in names.split()},
    **{name: Unit("dollar", Fraction(size)) for names, size in (
        ("dollar usd USD", "1"), ("cent", "0.01"),
    ) for name in names.split()},
    "euro": Unit("euro"), "EUR": Unit("euro"), "pound": Unit("pound"),
    "degree": Unit("degree"), "deg": Unit("degree"), "radian": Unit("radian"), "rad": Unit("radian"),
}  # fmt: skip
_MULTIPLES = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MATHEMATICS = frozenset(
    (
        *("pi", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
        *("log", "ln", "exp", "mod", "inf", "lim", "max", "min", "gcd", "lcm", "det"),
        *("alpha", "beta", "gamma", "delta", "theta", "lambda", "phi"),
    )
)
_SHORT_WORDS = frozenset(("yes", "no", "odd", "all"))
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3}
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_TRAILING_UNIT = re.compile(
    r"(?P<space>\s?)(?<![\\a-zA-Z])(?P<words>[a-zA-Z]{1,20}(?: [a-zA-Z]{1,20}){0,3})"
    r"(?:\s?\^\s?(?:(?P<power>[23])|\{\s?(?P<braced>[23])\s?\}))?\Z"
)
_RATE = re.compile(r"(?<=[0-9.)}])\s([a-zA-Z]{1,20})\s?(?:/|\bper\b)\s?([a-zA-Z]{1,20})\Z")
_LEADING_CURRENCY = re.compile(r"(?P<sign>[-+]?)\s?(?P<currency>[\uff04$\u20ac\u00a3])\s?(?P<rest>\S.*)\Z", re.DOTALL)


def _part(text: str) -> Part | None:
    """One element; None where it is a sentence."""
    text = text.strip()
    if _outer(text) == "(" and text.endswith(")") and len(_split(text[1:-1])) == 1:
        text = text[1:-1].strip()
    unit: Unit | None = None
    percent = False
    if text.endswith("%"):
        text, percent = text[:-1].strip(), True
    if match := _LEADING_CURRENCY.match(text):
        unit, text = Unit(_CURRENCY[match["currency"]]), match["sign"] + match["rest"]
    multiple = 1
    if (cut := _cut_unit(text)) is not None:
        text, trailing, multiple = cut
        unit = trailing or unit
    if number := _rational(text):
        value, places = number
        return Part(text, value * multiple, unit, percent, places if multiple == 1 else None)
    if re.fullmatch(r"[a-zA-Z][a-zA-Z' -]{1,200}", text) and (
        len(text) > 3 or " " in text or text.lower() in _SHORT_WORDS
    ):
        return None if text.lower() in _MATHEMATICS else Part(text, words=" ".join(text.casefold().split()))
    # what is left of degrees stands inside a formula: \sin 30^\circ
    text = re.sub(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?degrees\s?", r"(\1\\frac{\\pi}{180})", text).strip()
    named = {word for word in _WORD.findall(text) if word not in _MATHEMATICS}
    if any(len(word) > 2 for word in named) and "\\begin{" not in text and "\\operatorname" not in text:
        return None
    return Part(text, unit=unit, percent=percent)


def _cut_unit(text: str) -> tuple[str, Unit | None, int] | None:
    """What stands before a unit, the unit (None: a word that is none, such as apples), and `million` as a factor.

    A single letter is a unit only after a space (`5 m`), else a variable (`5m`). None where there is no unit.
    """
    if match := _RATE.search(text):
        over, under = (_unit(match[group]) for group in (1, 2))
        if over is not None and under is not None:
            return text[: match.start()].strip(), Unit(f"{over.kind}/{under.kind}", over.size / under.size), 1
    match = _TRAILING_UNIT.search(text)
    before = text[: match.start()].strip() if match else ""
    if match is None or before[-1:] not in tuple("0123456789.)}") or _TRIGONOMETRY.search(text):
        return None
    words = match["words"].split()
    multiple = _MULTIPLES.get(words[0].lower(), 1)
    words = words[1:] if multiple > 1 else words
    power = int(match["power"] or match["braced"] or 1)
    if words and words[0].lower() in _POWERS:
        power = _POWERS[words.pop(0).lower()]
    name = words[0] if words else ""
    unit = _unit(name)
    if unit is not None and len(words) == 1 and (len(name) > 1 or match["space"]):
        return before, (unit if power == 1 else Unit(f"{unit.kind}^{power}", unit.size**power)), multiple
    of_things = not words or (len(name) > 2 and name.lower() not in _MATHEMATICS)
    return (before, None, multiple) if of_things and match["space"] and _rational(before) else None


def _unit(name: str) -> Unit | None:
    return _UNITS.get(name) or _UNITS.get(name.lower()) or _UNITS.get(name.lower().removesuffix("s"))


_WHOLE = r"[0-9]{1,300}"
_RATIONALS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<int>{_WHOLE})",
        rf"(?P<decimal>(?:{_WHOLE})?\.[0-9]{{1,300}}|{_WHOLE}\.)",
        rf"(?P<decimal>{_WHOLE}(?:\.[0-9]{{1,300}})?)[eE](?P<ten>[-+]?[0-9]{{1,3}})",
        rf"(?P<decimal>{_WHOLE}(?:\.[0-9]{{1,300}})?)\s?(?:\\times|\\cdot|\*|x)\s?10\s?\^\s?"
        r"(?:\{\s?(?P<ten>[-+]?[0-9]{1,3})\s?\}|(?P<ten1>[0-9]))",
        rf"(?:(?P<int>{_WHOLE})\s)?\s?(?P<num>{_WHOLE})\s?/\s?(?P<den>{_WHOLE})",
        rf"(?P<int>{_WHOLE})?\s?\\frac\s?(?:\{{\s?(?P<num>-?{_WHOLE})\s?\}}|(?P<num1>[0-9]))\s?"
        rf"(?:\{{\s?(?P<den>{_WHOLE})\s?\}}|(?P<den1>[0-9]))",
        rf"(?P<before>{_WHOLE})?\.(?P<fixed>[0-9]{{0,300}})\s?\\(?:overline|bar|dot)\s?"
        rf"\{{\s?(?P<repeated>[0-9]{{1,100}})\s?\}}",
        r"(?P<digits>[0-9][0-9a-zA-Z]{0,60})\s?_\s?(?:\{\s?(?P<base>[0-9]{1,2})\s?\}|(?P<base1>[2-9]))",
    )
)


def _rational(text: str) -> tuple[Fraction, int | None] | None:
    """The rational number that the text writes out, and the decimals it has if it is a decimal with digits enough."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    bare = text[1:].strip() if text[:1] in ("-", "+") else text
    for pattern in _RATIONALS:
        if match := pattern.fullmatch(bare):
            found = {name: value for name, value in match.groupdict().items() if value is not None}
            value = _worth(found)
            return None if value is None else (sign * value, _places(found))
    return None


def _worth(found: dict[str, str]) -> Fraction | None:
    ten = found.get("ten", found.get("ten1", "0"))
    whole = Fraction(found.get("int", "0"))
    if "decimal" in found:
        return Fraction(found["decimal"].rstrip(".") + f"e{int(ten)}")
    if "repeated" in found:
        fixed, repeated = found.get("fixed", ""), found["repeated"]
        digits = Fraction(int(repeated), 10 ** len(repeated) - 1)
        shift = Fraction(f"1e-{len(fixed)}")
        return Fraction(found.get("before", "0")) + (int(fixed or "0") + digits) * shift
    if "digits" in found:
        base = int(found.get("base", found.get("base1", "10")))
        try:
            return Fraction(int(found["digits"], base)) if base > 1 else None
        except ValueError:  # a digit that the base has not
            return None
    if "num" in found or "num1" in found:
        denominator = int(found.get("den", found.get("den1", "1")))
        numerator = int(found.get("num", found.get("num1", "0")))
        return whole + Fraction(numerator, denominator) if denominator else None
    return whole


def _places(found: dict[str, str]) -> int | None:
    _, point, decimals = found.get("decimal", "").partition(".")
    significant = len(found.get("decimal", "").replace(".", "").lstrip("0"))
    return len(decimals) if point and "ten" not in found and significant >= SIGNIFICANT_DIGITS else None
