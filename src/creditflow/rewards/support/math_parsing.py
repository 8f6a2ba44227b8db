r"""Parse written mathematical answers: LaTeX, percentages, units, lists, sets, intervals, mixed numbers.

A text becomes an `Answer` of plain parts; a text that cannot be an answer is refused. Formulas stay as written, for the
math-verify library to parse. Only rational numbers are evaluated here. The text comes from a model: every expression
here is bounded and takes time linear in the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from creditflow.rewards.support.text import as_ascii

MAX_CHARACTERS = 1_000
"""Number of characters read, counted from the end of a text."""
MAX_BOX_DISTANCE = 20_000
"""Number of characters searched for a box, counted from the end of a text."""
MAX_DEPTH = 24
"""Depth of nested brackets; the library's LaTeX grammar takes time exponential in it."""
MAX_PARTS = 24
SIGNIFICANT_DIGITS = 6
"""A decimal with fewer digits is never equal to an irrational or repeating number."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit, by kind and size: `cm^2` is length^2, a ten-thousandth."""

    kind: str
    size: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Part:
    """One element of an answer: its text without the unit, and its value if it is a rational number."""

    text: str
    number: Fraction | None = None
    unit: Unit | None = None
    percent: bool = False
    places: int | None = None
    """Decimal places, for a decimal with six significant digits or more."""
    words: str = ""
    """Casefolded words, if it consists of words alone: `yes`, `monday`."""
    inner: Answer | None = None
    """The content of the brackets, for a point or a set within a list."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer."""

    kind: Literal["one", "set", "ordered", "prose"]
    """One part; several in any order; several in order between brackets (a point or an interval); or a sentence."""
    parts: tuple[Part, ...]
    brackets: str = ""
    text: str = ""


class NotAnAnswerError(ValueError):
    """A text that cannot be a mathematical answer; the message gives the reason."""


def read(text: str) -> Answer:
    """Parse the answer in a text: its last box, else the text after `answer is` or a colon, else all of it.

    Raises NotAnAnswerError if it is empty, nested too deep, or holds numbers too large to evaluate.
    """
    text = text[-MAX_BOX_DISTANCE:]
    for _ in range(3):  # a box may hold a box
        text = text if (boxed := last_box(text)) is None else boxed
    whole = re.sub(r"[^\D0-9]", lambda digit: str(int(digit.group())), as_ascii(text[-MAX_CHARACTERS:])).strip()
    refuse_monsters(whole)
    answer = _take_apart(_tidy(whole))
    if answer.kind == "prose":
        *_, rest = _MARKER.split(whole)
        if rest != whole and rest.strip() and (after := _take_apart(_tidy(rest))).kind != "prose":
            return after
        # the library finds numbers between blanks only
        answer = replace(answer, text=_NEXT_TO_OTHER_SCRIPT.sub(" ", whole))
    return answer


_MARKER = re.compile(r"(?i)\banswer\s{0,3}(?:is|:)\s{0,3}:?|(?<=[^\W\d_])\s?:")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s{0,3}")
_BETWEEN_BOXES = re.compile(r"\s{0,3}\$?\s{0,3}(?:[,;]|[,;]?\s{0,3}(?:and|or))?\s{0,3}\$?\s{0,3}")


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, and of boxes that a comma, `and` or `or` joins to it.

    An unclosed box holds the rest of the text. None without a box.
    """
    boxes = [(match.start(), *_content(text, match.end())) for match in list(_BOX.finditer(text))[-MAX_PARTS:]]
    # leave out a box within a box
    boxes = [box for i, box in enumerate(boxes) if not any(box[0] < before[2] for before in boxes[:i])]
    if not boxes:
        return None
    joined = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _BETWEEN_BOXES.fullmatch(text, box[2], joined[0][0]):
            break
        joined.insert(0, box)
    return ",".join(dict.fromkeys(content for _, content, _ in joined))


def _content(text: str, start: int) -> tuple[str, int]:
    r"""The content and the end of a box that begins at `start`; for `\boxed 7` the word."""
    if text[start : start + 1] != "{":
        word = text[start:].split(maxsplit=1)[0].rstrip("$.,;") if text[start:].strip() else ""
        return word, start + len(word)
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + 1 : start + brace.start()].strip(), start + brace.end()
    return text[start + 1 :].strip(), len(text)


_TOO_LARGE = re.compile(
    r"\^\s?[{( ]{0,4}[-+]?\s?[0-9]{5}|\^\s?[^\s{}()]\s?\^|\^\s?\{\s?[0-9]{2,4}\s?\^\s?\{?\s?[0-9]{2}"
    r"|[0-9]{5}\s?!|[0-9]{3}\s?!\s?!|!\s?!\s?!|[0-9]\s?[eE][-+]?[0-9]{4}"
)

_WORKED_OUT_AT_ONCE = re.compile(r"vmatrix|\\(?:det|gcd|lcm)(?![a-zA-Z])|rank")
"""Commands that the library evaluates while it parses, before `equality` can measure their numbers."""
_POWER_OF_ANY_SIZE = re.compile(r"[)}\]]\s?[\^!]|\^\s?\{\s?-?\s?[0-9]{0,4}[^-0-9}\s]|[0-9]{3}\s?!")


def refuse_monsters(text: str) -> None:
    """Raise NotAnAnswerError if the text nests too deep, or holds powers and factorials too large to write down.

    It checks characters, not values: `equality` measures the numbers, and a time limit stops the rest.
    """
    _refuse_depth(text)
    if _TOO_LARGE.search(text) or (re.search(r"[)}\]]\s?!", text) and text.count("!") > 1):
        raise NotAnAnswerError("an exponent or a factorial of five digits, or a tower of them")
    if _WORKED_OUT_AT_ONCE.search(text) and _POWER_OF_ANY_SIZE.search(text):
        raise NotAnAnswerError("a power of unknown size in a determinant or a divisor")


def _refuse_depth(text: str) -> None:
    opened: list[bool] = []  # for each open bracket, whether it is an exponent
    exponents = 0
    previous = ""
    for character in text:
        if character in "([{":
            opened.append(previous == "^")
            exponents += opened[-1]
        elif character in ")]}" and opened:
            exponents -= opened.pop()
        elif character == "^" and (exponents > 1 or (exponents and previous in ")]}")):
            raise NotAnAnswerError("a tower of exponents")
        if len(opened) > MAX_DEPTH:
            raise NotAnAnswerError(f"brackets more than {MAX_DEPTH} deep")
        if not character.isspace():
            previous = character


# Tidying

_SAME = {
    "\u00b7": "\\cdot ", "\u221e": "\\infty ", "\u2205": "\\emptyset ", "\u00b1": "\\pm ", "\u221a": "\\sqrt ",
    "\u00b0": " degrees ", "\u00bd": "\\frac{1}{2}", "\u00b2": "^{2}", "\u00b3": "^{3}",
}  # fmt: skip
_CURRENCY = {"\uff04": "dollar", "$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}
_DOLLAR = "\uff04"  # a dollar sign for money, so that those around mathematics can be removed

_SPACE = r"(?:(?<!\\)\\[,;:! ]|~|[\s\x00])"
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(?<!\\)\\[()\[\]]", " "),  # `\\[` is a new row with a bracket after it
        (r"\\\\(?![a-zA-Z])\s?(?:\[[^\[\]]{0,12}\])?\s?[,;:]?", r"\\\\ "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?=[\s()\[\].|\\])\s?\.?", ""),
        (r"\\(?:textstyle|limits|hline)(?![a-zA-Z])", ""),
        (
            r"\\begin\s?\{(?:(?:small|[bBp])?matrix\*?|array)\}(?:\s?\[[a-z]\]|\s?\{[lcr|\s]{1,40}\})?",
            r"\\begin{pmatrix}",
        ),
        (r"\\end\s?\{(?:(?:small|[bBp])?matrix\*?|array)\}", r"\\end{pmatrix}"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])", r"\\emptyset "),
        (r"\^\s?\{?\s?\\circ(?![a-zA-Z])\s?\}?|\\degree(?![a-zA-Z])", " degrees "),
        (r"(?<=[0-9])\.\.\.|\\dots(?![a-zA-Z])", r"\\ldots "),
        (r"(?i)(?<![a-z])([ap])\.\s?m\.?(?![a-z])", r"\1m"),
        (r"(?i)(?<![\\a-z])(?:per\s?cent|pct)(?![a-z])|\\%", "%"),
        (r"\*\*", "^"),
        (r"(?<=[0-9])\s{0,3}(?:\{,\}|(?<!\\)\\!,|,(?<!\\)\\!)\s{0,3}(?=[0-9]{3})", ","),
    )
)
_STYLED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|rm)\s?\{([^{}]{0,200})\}")
_SPACED_GROUPS = re.compile(rf"(?<![0-9.,])[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}}){{1,20}}(?![0-9]|\s?/)")
_COMMA_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3}){1,20}(?![0-9]|,[0-9])")
_SPACES = re.compile(rf"{_SPACE}+|\\q?quad(?![a-zA-Z])")
_VARIABLE_IN = re.compile(r"\A[a-zA-Z]\s?(?:\\in(?![a-zA-Z])|\u2208)")


def _tidy(text: str) -> str:
    """Normalize delimiters, spaces, sizes and fonts, which do not change the answer."""
    text = text.strip().strip("`").removeprefix("**").removesuffix("**").replace("\\$", _DOLLAR)
    if text.count("$") != 1:
        text = text.replace("$", "")
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

_SEPARATOR = r"(?<![\\a-zA-Z])(?:or|and)(?![a-zA-Z])|[,;]"
_TOKEN = re.compile(rf"(?P<opens>\\begin(?![a-zA-Z])|[(\[{{])|(?P<closes>\\end(?![a-zA-Z])|[)\]}}])|{_SEPARATOR}")
_LETTER = r"[^\W\d_\u0370-\u03ff\u2100-\u214f]"
"""Greek letters and characters such as \u211d are mathematical symbols."""
_OTHER_SCRIPT = r"[^\W\d_a-zA-Z\u0370-\u03ff\u2100-\u214f]"
_NEXT_TO_OTHER_SCRIPT = re.compile(rf"(?<={_OTHER_SCRIPT})(?=[!-~])|(?<=[!-~])(?={_OTHER_SCRIPT})")
_WORD = re.compile(rf"(?<![\\a-zA-Z]){_LETTER}+")
_CASES = re.compile(r"\\begin\s?\{cases\}(.*)\\end\s?\{cases\}", re.DOTALL)


def _take_apart(text: str) -> Answer:
    if "\\{" not in text and not any(map(str.isalnum, text)):
        raise NotAnAnswerError("no letter and no digit")
    if text in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return Answer("set", (), text=text)
    if (cases := _CASES.fullmatch(text)) is not None:
        return _several("set", [row for row in map(str.strip, cases[1].split("\\\\")) if row], text)
    if outer := _outer(text):
        inside = _split(text[len(outer) : -len(outer)])
        if outer == "\\{" or (outer == "{" and len(inside) > 1):
            return _several("set", inside, text)
        if outer != "{" and len(inside) > 1:
            return _several("ordered", inside, text)
        if outer == "{" or (outer == "(" and not any(map(_is_word, _WORD.findall(text)))):
            return _take_apart(text[1:-1].strip())
    return _several("set", _split(_COMMA_GROUPS.sub(lambda match: match.group().replace(",", ""), text)), text)


def _several(kind: Literal["set", "ordered"], texts: list[str], text: str) -> Answer:
    if kind == "set":
        texts = [signed for element in texts for signed in _both_signs(element)]
    parts = tuple(part for element in texts[:MAX_PARTS] if (part := _part(element)) is not None)
    # not a list: `42 and that is all`
    clause_beside_value = any(" " in part.words for part in parts) and not all(part.words for part in parts)
    if len(parts) < len(texts[:MAX_PARTS]) or clause_beside_value:
        return Answer("prose", (), text=text)
    if len(texts) > MAX_PARTS:
        raise NotAnAnswerError(f"more than {MAX_PARTS} parts")
    if kind == "ordered":
        return Answer(kind, parts, brackets=text[0] + text[-1], text=text)
    return Answer("one" if len(parts) == 1 else "set", parts, text=text)


def _both_signs(text: str) -> list[str]:
    if text.count("\\pm") != 1:
        return [text]
    return [text.replace("\\pm", sign).strip() for sign in "+-"]


def _outer(text: str) -> str:
    r"""The bracket that opens at the very beginning and closes at the very end: `(`, `[`, `{`, `\{`, or nothing.

    Half-open intervals count: any of `(` and `[` may be closed by any of `)` and `]`.
    """
    first = "\\{" if text.startswith("\\{") else text[:1]
    last = "\\}" if text.endswith("\\}") else text[-1:]
    if (first, last) not in {("\\{", "\\}"), ("{", "}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")}:
        return ""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token["opens"] is not None) - (token["closes"] is not None)
        if depth == 0 and token["closes"]:
            return first if token.end() == len(text) else ""
    return ""


def _split(text: str) -> list[str]:
    """Split the text at commas, semicolons, `or` and `and` outside of brackets; empty pieces are left out."""
    pieces, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token["opens"] is not None) - (token["closes"] is not None)
        if depth == 0 and not token["opens"] and not token["closes"]:
            pieces.append(text[start : token.start()])
            start = token.end()
    pieces.append(text[start:])
    return [piece for piece in map(_without_full_stop, pieces) if piece]


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
    **{prefix + name: Unit(name, Fraction(size))
        for name in ("A", "C", "Hz", "J", "K", "N", "Pa", "V", "W")
        for prefix, size in (("", "1"), ("m", "0.001"), ("k", "1000"), ("M", "1000000"))
    },
    "am": Unit("am"), "pm": Unit("pm"),
    "degree": Unit("degree"), "deg": Unit("degree"), "radian": Unit("radian"), "rad": Unit("radian"),
}  # fmt: skip
_MULTIPLES = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MATHEMATICS = frozenset(
    (
        *("pi", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
        *("log", "ln", "exp", "mod", "inf", "infty", "infinity", "lim", "max", "min", "gcd", "lcm", "det"),
        *("alpha", "beta", "gamma", "delta", "theta", "lambda", "phi"),
    )
)
_SHORT_WORDS = frozenset(("yes", "no", "odd", "all"))
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3}
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_WORDS = re.compile(rf"{_LETTER}(?:{_LETTER}|[' -]){{0,200}}")
_TRAILING_UNIT = re.compile(
    rf"(?P<space>\s?)(?<![\\a-zA-Z])(?P<words>{_LETTER}{{1,20}}(?: {_LETTER}{{1,20}}){{0,3}})"
    r"(?:\s?\^\s?(?:(?P<power>[23])|\{\s?(?P<braced>[23])\s?\}))?\Z"
)
_RATE = re.compile(r"(?<=[0-9.)}])\s([a-zA-Z]{1,20})\s?(?:/|\bper\b)\s?([a-zA-Z]{1,20})\Z")
_LEADING_CURRENCY = re.compile(r"(?P<sign>[-+]?)\s?(?P<currency>[\uff04$\u20ac\u00a3])\s?(?P<rest>\S.*)\Z", re.DOTALL)


def _is_word(run: str) -> bool:
    """Whether adjacent letters are a word, rather than variables side by side."""
    if run.lower() in _MATHEMATICS:
        return False
    return len(run) > 2 or re.search(_OTHER_SCRIPT, run) is not None


def _part(text: str) -> Part | None:
    """Parse one element; None if it is a sentence."""
    text = text.strip()
    outer = _outer(text)
    if outer in ("(", "[", "\\{"):
        if len(_split(text[len(outer) : -len(outer)])) > 1:
            inner = _take_apart(text)
            return None if inner.kind == "prose" else Part(text, inner=inner)
        if outer == "(" and text.endswith(")"):
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
    if re.fullmatch(r"[0-9]{1,2}:00", text):  # a time: a ratio to 0 has no value
        return Part(text, words=text)
    if _WORDS.fullmatch(text) and (
        len(text) > 3 or " " in text or text.lower() in _SHORT_WORDS or re.search(_OTHER_SCRIPT, text)
    ):
        return None if text.lower() in _MATHEMATICS else Part(text, words=" ".join(text.casefold().split()))
    # any degrees left are inside a formula: \sin 30^\circ
    text = re.sub(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?degrees\s?", r"(\1\\frac{\\pi}{180})", text).strip()
    if any(map(_is_word, _WORD.findall(text))) and "\\begin{" not in text and "\\operatorname" not in text:
        return None
    return Part(text, unit=unit, percent=percent)


def _cut_unit(text: str) -> tuple[str, Unit | None, int] | None:
    """The text before a unit, the unit (None for other words, such as apples), and `million` as a factor.

    A single letter is a unit only after a space (`5 m`), else a variable (`5m`). None without a unit.
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
    of_things = not words or (_is_word(name) and (match["space"] or re.search(_OTHER_SCRIPT, name)))
    return (before, None, multiple) if of_things and _rational(before) else None


def _unit(name: str) -> Unit | None:
    return _UNITS.get(name) or _UNITS.get(name.lower()) or _UNITS.get(name.lower().removesuffix("s"))


_WHOLE = r"[0-9]{1,300}"
_RATIONALS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<int>{_WHOLE})",
        rf"(?P<before>{_WHOLE})?\.(?P<fixed>[0-9]{{0,30}}?)(?P<repeated>[0-9]{{1,9}}?)(?P=repeated){{1,30}}\s?\\ldots",
        rf"(?P<decimal>(?:{_WHOLE})?\.[0-9]{{1,300}}|{_WHOLE}\.)(?:\s?\\ldots)?",
        rf"(?P<decimal>{_WHOLE}(?:\.[0-9]{{1,300}})?)[eE](?P<ten>[-+]?[0-9]{{1,3}})",
        rf"(?P<decimal>{_WHOLE}(?:\.[0-9]{{1,300}})?)\s?(?:\\times|\\cdot|\u00d7|\*|x)\s?10\s?\^\s?"
        r"(?:\{\s?(?P<ten>[-+]?[0-9]{1,3})\s?\}|(?P<ten1>[0-9]))",
        rf"(?:(?P<int>{_WHOLE})\s)?\s?(?P<num>{_WHOLE})\s?/\s?(?P<den>{_WHOLE})",
        rf"(?P<num>{_WHOLE})\s?:\s?(?P<den>{_WHOLE})",
        rf"(?P<int>{_WHOLE})?\s?\\[dtc]?frac\s?(?:\{{\s?(?P<num>-?{_WHOLE})\s?\}}|(?P<num1>[0-9]))\s?"
        rf"(?:\{{\s?(?P<den>{_WHOLE})\s?\}}|(?P<den1>[0-9]))",
        rf"(?P<before>{_WHOLE})?\.(?P<fixed>[0-9]{{0,300}})\s?\\(?:overline|bar|dot)\s?"
        rf"\{{\s?(?P<repeated>[0-9]{{1,100}})\s?\}}",
        r"(?P<digits>[0-9][0-9a-zA-Z]{0,60})\s?_\s?(?:\{\s?(?P<base>[0-9]{1,2})\s?\}|(?P<base1>[2-9]))",
    )
)


def _rational(text: str) -> tuple[Fraction, int | None] | None:
    """The rational number that the text writes out, and its decimal places if it is a decimal with enough digits."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    bare = text[1:].strip() if text[:1] in ("-", "+") else text
    for pattern in _RATIONALS:
        if match := pattern.fullmatch(bare):
            groups = {name: value for name, value in match.groupdict().items() if value is not None}
            value = _worth(groups)
            return None if value is None else (sign * value, _places(groups))
    return None


def _worth(groups: dict[str, str]) -> Fraction | None:
    ten = groups.get("ten", groups.get("ten1", "0"))
    whole = Fraction(groups.get("int", "0"))
    if "decimal" in groups:
        return Fraction(groups["decimal"].rstrip(".") + f"e{int(ten)}")
    if "repeated" in groups:
        fixed, repeated = groups.get("fixed", ""), groups["repeated"]
        digits = Fraction(int(repeated), 10 ** len(repeated) - 1)
        shift = Fraction(f"1e-{len(fixed)}")
        return Fraction(groups.get("before", "0")) + (int(fixed or "0") + digits) * shift
    if "digits" in groups:
        base = int(groups.get("base", groups.get("base1", "10")))
        try:
            return Fraction(int(groups["digits"], base)) if base > 1 else None
        except ValueError:  # a digit outside of the base
            return None
    if "num" in groups or "num1" in groups:
        denominator = int(groups.get("den", groups.get("den1", "1")))
        numerator = int(groups.get("num", groups.get("num1", "0")))
        return whole + Fraction(numerator, denominator) if denominator else None
    return whole


def _places(groups: dict[str, str]) -> int | None:
    _, point, decimals = groups.get("decimal", "").partition(".")
    significant = len(groups.get("decimal", "").replace(".", "").lstrip("0"))
    return len(decimals) if point and "ten" not in groups and significant >= SIGNIFICANT_DIGITS else None
