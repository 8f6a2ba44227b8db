r"""Read written mathematical answers: numbers, quantities, lists, sets, intervals, matrices, formulas, choices, words.

A text becomes an `Answer`. Only rational numbers are evaluated here. Formulas stay texts, for the math-verify library
to parse. The text comes from a model: lengths, nesting and exponents are bounded, and every expression here takes time
linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from importlib import import_module
from itertools import accumulate
from math import factorial
from typing import Any, Literal

from creditflow.rewards.support.text import as_ascii

MAX_CHARACTERS = 1_000
"""Length of the longest text that is read as an answer."""
MAX_DEPTH = 24
"""Depth of nested brackets; the library's LaTeX grammar takes time exponential in it."""
Unit = tuple[str, Fraction]
"""Dimension and size: `cm^2` is an area of 1/10,000."""
MAX_PARTS = 24
"""A longer list is compared as words."""
PERCENT: Unit = ("%", Fraction(1, 100))


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer."""

    kind: Literal["number", "expression", "set", "ordered", "words"]
    """A rational number; a formula, equation or matrix; parts in any order; parts in order between brackets (a point or
    an interval) or colons (a ratio of three or more terms, relative to the first); or words, also a choice from A to J.
    An equation with a name has one part, the value.
    """
    text: str
    """The tidied text without the unit; words have no capitals, and a choice is one."""
    number: Fraction | None = None
    unit: Unit | None = None
    """The unit of a number or expression. A counted thing, a word that names no unit, has size 0.
    Words behind a per cent sign are part of its name.
    """
    parts: tuple[Answer, ...] = ()
    name: str = ""
    """The left side of an equation, if it is a name: a text without numbers, powers and signs (`x_1`, `P(A)`)."""

    def has(self, kind: str) -> bool:
        """Whether the answer or one of its parts is of this kind."""
        return self.kind == kind or any(part.has(kind) for part in self.parts)


def read(text: str) -> Answer | None:
    """Parse an answer; None if it is empty, too long or too deep, or has numbers too large."""
    text = tidy(text) if len(text := text.strip()) <= MAX_CHARACTERS else ""
    return _read(text) if any(map(str.isalnum, text)) and not _is_large(text) else None


_LARGE = re.compile(r"\^[{(]{0,4}[-+]?\d{5}|\d{5}!|!!!|\d[eE][-+]?\d{4}|\^[^{}()]\^|(?:\^[{(][^{}()]*){2}\^")
# the library evaluates these commands while it parses, before `equality` can measure their numbers
_EVALUATED = re.compile(r"(?=.*[\^!]).*(?:vmatrix|\\(?:det|gcd|lcm)(?![a-zA-Z])|rank)")


def _is_large(text: str) -> bool:
    """Whether brackets are too deep, exponents three high, or an exponent or factorial has five digits."""
    depths = accumulate((character in "([{") - (character in ")]}") for character in text)
    return max(depths) > MAX_DEPTH or bool(_LARGE.search(packed := "".join(text.split())) or _EVALUATED.match(packed))


# Tidying

_DOLLAR = "\uff04"  # a dollar sign for money, so that those around formulas can be removed
_COMMANDS = ["\\cdot ", "\\times ", "\\infty ", "\\pm ", "\\pi ", "\\emptyset ", " degrees ", "\\sqrt "]
_SYMBOLS = str.maketrans(dict(zip("\u00b7\u00d7\u221e\u00b1\u03c0\u2205\u00b0\u221a", _COMMANDS, strict=True)))
_SCALES = (("hundred", 2), ("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12))
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infty|sqrt"
_CODES = {rf"usd|[a-z]{{1,2}}{_DOLLAR}": _DOLLAR, r"inr|rs\.?": "\u20b9", "eur": "\u20ac", r"gbp|\\pounds": "\u00a3"}
_STYLE = r"\\(?:(?:text|math)(?!bb|c|fr|sc)[a-z]{0,6}|operatorname|mbox|underline|emph|rm)\s?\{"
_DECLARATIONS = r"[a-z]{4,12}style|bm|boldsymbol|bf|it|em|sf|tiny|[a-z]{0,8}size|small|(?i:large|huge)"
_BALANCED = r"((?:[^{}]|\{[^{}]*\})*)"
_SYMBOL = r"\\(?!sqrt|frac|binom)[a-zA-Z]+(?![a-zA-Z])"
_WHOLE = rf"\\(?:sqrt|frac\{{[^{{}}]*\}}|binom\{{[^{{}}]*\}})\{{[^{{}}]*\}}|{_SYMBOL}(?! ?\{{)"
_ROWS = r"\\begin ?\{(?:cases|gathered|aligned)\}|\\\{ ?\\begin ?\{array\} ?\{[lcr| ]{1,40}\}"
_REWRITES: tuple[tuple[str, Any], ...] = (
    (r"(?<!\\)\\\\(?=[a-zA-Z])(?!.*\\end)", r"\\"),
    (r"\\\\(?![a-zA-Z])\s?(?:\[[^\[\]]{0,12}\])?\s?[,;:]?", r"\\\\ "),
    (r"\\(?:text)?color\s?\{[a-zA-Z]{1,20}\}|\\(?:left|right|[bB]igg?[lr]?)(?=[\s()\[\].|\\])\s?\.?", ""),
    (rf"(?:\A|\{{){_BALANCED}\\(over|choose)(?![a-zA-Z]){_BALANCED}(?:\}}|\Z)", r"\\\2{\1}{\3}"),
    (r"\\(?:(?:[dtc]|nice|s)frac|over)(?![a-zA-Z])", r"\\frac"),
    (r"(\d ?)?\\(?:[dt]?binom|choose)(?![a-zA-Z])", lambda m: "\\binom" if m[1] is None else m[1] + "\\cdot \\binom"),
    (r"\\([lr])angle(?![a-zA-Z])", lambda side: "()"[side[1] == "r"]),
    (rf"(?:{_ROWS})(.*)\\end ?\{{\w+\}}", lambda rows: rows[1].replace("\\\\", ",")),
    (r"\\(begin|end) ?\{(?:(?:small|[bBp])?matrix\*?|array)\}(?:\[[a-z]\]| ?\{[lcr| ]{1,40}\})?", r"\\\1{pmatrix}"),
    (r"\\(?:varnothing|empty)(?![a-zA-Z])|\\\{\s?\\\}", r"\\emptyset "),
    (r"\^\s?\{?\s?\\circ(?![a-zA-Z])\s?\}?|\\degree(?![a-zA-Z])", " degrees "),
    (r"(?<=\d)\.\.\.|\\dots(?![a-zA-Z])", r"\\ldots "),
    (r"(?i)(?<![a-z])([ap])\.\s?m\.?(?![a-z])", r"\1m"),
    (r"(?i)(?<![\\a-z])(?:per\s?cent(?:age)?|pct)(?![a-z])|\\%", "%"),
    (r"(?<=\d)\s{0,3}(?:\{,\}|(?<!\\)\\!,|,(?<!\\)\\!|')\s{0,3}(?=\d{3})", ","),
    (r"([\[(][^\[\](),;]{1,60});([^\[\](),;]{1,60}[\])])", r"\1,\2"),  # an interval
    (r"(?<![a-zA-Z])\{([:=<>+*/-])\}|\\colon(?![a-zA-Z])", lambda sign: sign[1] or ":"),
    (rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1 "),
    (r"\\sqrt(?:\s?\(((?:[^()]|\([^()]*\))*)\)|\s(\d{1,20}|\w))", lambda root: f"\\sqrt{{{root[1] or root[2]}}}"),
    (r"\^\s?(-\s?\w{1,20})", r"^{\1}"),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
    (r"(?<=(?:rm|xt)\{[A-Z])(?:\\[,; ]|~| )(?=[a-z]{1,2}\})", r" \\cdot "),  # N m
    (rf"(?:\\mu ?|\u03bc)({_STYLE})|({_STYLE} ?)\\mu ?|\u03bc(?=[a-zA-Z])", "\\1\\2\u00b5"),
    *[(_STYLE + _BALANCED + r"\}", r" \1 ")] * 2,
    (rf"(?:(?<!\\)\\(?:[,;:! ()\[\]]|(?:{_DECLARATIONS}|limits|hline|q?quad)(?![a-zA-Z]))|~|[\s\x00])+", " "),
    (rf"(\\sqrt(?: ?\[[^\[\]]*\])?|\\frac|\\binom) ?([0-9a-zA-Z]|{_SYMBOL})", r"\1{\2}"),
    (rf"(\\(?:frac|binom) ?\{{{_BALANCED}\}}) ?([0-9a-zA-Z]|{_SYMBOL})", r"\1{\3}"),
    (rf"(\\sqrt(?: ?\[[^\[\]]*\])?|\\frac|\^|_) ?({_WHOLE})", r"\1{\2}"),
    (r"(?<![\d.,^{])\d{1,3}(?: \d{3}){1,20}(?!\d|\s?/)", lambda groups: groups[0].replace(" ", "")),
    (r"(?<=\d )([kMG]?) ?(\\Omega|\u03a9|\\AA)(?![a-zA-Z])", lambda m: m[1] + ("\xc5" if "A" in m[2] else "ohm")),
    *((rf"(?i)(?<![a-z])(?:{code})\s?(?=\.?\d)", sign) for code, sign in _CODES.items()),
    *((rf"(?i)(?<=[\d}}])\s?{word}s?(?![a-z])", rf" \\cdot 10^{{{power}}}") for word, power in _SCALES),
    (r"(?i)\A\s?(?:[a-z]\s?(?:\\in(?![a-z])|\u2208)|\\approx|\u2248|(?:approximate|rough)ly\b|about\b)", ""),
    (r"(?<=\d) ?(?:\^ ?\{? ?)?(?:st|nd|rd|th)(?![a-zA-Z])(?: ?\})?|, ?&? ?(?==)|&(?= ?(?:[=<>]|\\[lg]e))", ""),
)


def tidy(text: str) -> str:
    """Normalize delimiters, spaces, sizes and fonts, which do not change the answer, and write symbols as LaTeX."""
    text = re.sub("([\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]{1,5})", r"^{\1}", text.strip("`* \n"))
    text = as_ascii(unicodedata.normalize("NFKC", re.sub("([\u00bc-\u00be\u2150-\u215e])", r" \1", text)))
    text = text.replace("\\$", _DOLLAR).replace("**", "^").replace("\\imath", "i").replace("\\jmath", "j")
    text = text.replace("$", _DOLLAR if text.count("$") == 1 and _DOLLAR not in text else "").translate(_SYMBOLS)
    for pattern, by in _REWRITES:
        text = re.sub(pattern, by, text, flags=re.DOTALL)
    return text.strip().rstrip(" .;,")


# Taking apart

_TOKEN = r"(?P<opens>\\begin\b|[(\[{])|(?P<closes>\\end\b|[)\]}])|"
_SCRIPTS = "или|и|和|或|与|及|と|または|এবং|ও|আর|অথবা|বা|และ|หรือ|మరియు|లేదా"
_LATIN = r"(?<=\S )(?:und|oder|et|ou|na|au)(?= (?:[\w\\($]|\Z))|(?<=[\d}$] )[yo](?= (?:[\d$]|\Z))"  # else variables
AND_OR = rf"(?:(?<![\\a-zA-Z])(?:or|and)(?![a-z])|{_LATIN}|(?<![^\x00-\x7f])(?:{_SCRIPTS})(?![^\x00-\x7f]))"
"""Words that join answers: English; German, French, Swahili, Spanish; Russian to Telugu, if no letters touch them."""
_COMMAS, _EQUALS = rf"{_TOKEN}{AND_OR}|[,;]", _TOKEN + "(?<![<>!:])="
# Greek letters and characters such as \u211d are mathematical symbols
_LETTER, _OTHER_SCRIPT = (rf"[^\W\d_{latin}\u0370-\u03ff\u2100-\u214f]" for latin in ("", "a-zA-Z"))
_BRACKETS = {"\\{\\}", "{}", *(opens + closes for opens in "([" for closes in ")]")}
_COMMA_GROUPS = re.compile(r"(?<![0-9.,(\[])[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20}(?![0-9]|,[0-9])")
_ONE_NUMBER = re.compile(r"-?\d{1,2}(?P<groups>(?:,\d{2})+,\d{3})|-?\d{1,20},(?:\d{2}|\d{4,20}|(?<=\b0,)\d{3})")


_NOTE = r"[.:)]\s.{1,200}|\s\([^\W\d_]{3}[\w ,.'-]{0,200}\)"


def _read(text: str) -> Answer:
    if choice := re.fullmatch(rf"(?s)(?:(?i:option|choice|answer)\s?\(?([A-Ja-j])|\(?([A-J]))\)?(?:{_NOTE})?", text):
        return Answer("words", "".join(choice.groups("")).upper())
    if total := _sum_of_units(text):
        return total
    if _split(text)[1] == len(text) > 0:
        width = 2 if text.startswith("\\{") else 1
        inside, brackets = text[width:-width], text[:width] + text[-width:]
        parts, _ = _split(inside)
        if brackets in _BRACKETS and (width == 2 or len(parts) > 1):
            return _several("set" if "{" in brackets else "ordered", parts, text)
        if brackets in ("()", "{}"):
            return _read(inside.strip())
    pieces, _ = _split(_COMMA_GROUPS.sub(lambda match: match[0].replace(",", ""), text))
    if len(rows := [row for row in text.split(";") if row.strip()]) > 1 and all("," in row for row in rows):
        pieces = [f"\\{{{row}\\}}" for row in rows]  # x=1, y=2; x=3, y=4
    signed = [piece.replace("\\pm", sign).strip() for piece in pieces for sign in "+-"[: piece.count("\\pm") + 1]]
    return _several("set", signed, text) if len(signed) > 1 else _element("".join(signed))


def _several(kind: Literal["set", "ordered"], pieces: list[str], text: str) -> Answer:
    parts = tuple(map(_read, pieces))
    if len(parts) > MAX_PARTS or len({part.has("words") for part in parts}) > 1:
        return _words(text)
    comma = _ONE_NUMBER.fullmatch(text)  # read as such only against one number: 2,74 is 2.74, and 1,00,000 a lakh
    number = Fraction(text.replace(",", "" if comma["groups"] else ".")) if comma else None
    return Answer(kind, text, number, parts=parts)


def _words(text: str) -> Answer:
    return Answer("words", " ".join(text.casefold().split()).strip('"\u201c\u201d'))


def _split(text: str, at: str = _COMMAS) -> tuple[list[str], int]:
    """Split the text at commas, semicolons, `or` and `and` outside of brackets; also the end of the first bracket."""
    pieces, depth, start, closed = [], 0, 0, 0
    for token in re.finditer(at, text):
        depth += (token["opens"] is not None) - (token["closes"] is not None)
        if depth == 0 and token["closes"]:
            closed = closed or token.end()
        elif depth == 0 and not token["opens"]:
            pieces.append(text[start : token.start()])
            start = token.end()
    return [piece for piece in (part.strip().rstrip(" .;,") for part in (*pieces, text[start:])) if piece], closed


def _sum_of_units(text: str) -> Answer | None:
    """`5 feet 4 inches` as one quantity, in its first unit; sizes must fall, because `5 m and 3 m` are two."""
    pieces = re.split(r"(?<=[a-zA-Z]),?\s?(?:and\s)?(?=[0-9])", text)
    parts = [_element(piece) for piece in pieces if len(pieces) > 1]
    units = [part.unit for part in parts if part.number is not None and part.unit]
    sizes = [size for _, size in units]
    if len(units) != len(pieces) or len(dict(units)) > 1 or sizes != sorted({*sizes}, reverse=True):
        return None
    total = sum(part.number * size for part, size in zip(parts, sizes, strict=True) if part.number) / sizes[0]
    return Answer("number", str(total), Fraction(total), units[0])


# One element

_CURRENCIES = {_DOLLAR: "dollar", "\u20ac": "euro", "\u00a3": "pound", "\u20b9": "rupee", "\u00a5": "yen"}
_UNITS: dict[str, Unit] = {name: (name, Fraction(1)) for name in (*_CURRENCIES.values(), "am", "pm", "degree")}
_UNITS |= {"usd": _UNITS["dollar"], "cent": ("dollar", Fraction(1, 100)), "deg": _UNITS["degree"], "%": PERCENT}
"""Units in which answers differ from physics: money, times of day and angles are never converted."""
_SHORT_UNIT = re.compile(r"[ghlmsACFHJKLNVW\xc5]|\xb5\w|[cdkmnu][mgls]|[kmu][AFHJLNVW]|ft|hr|in|lb|mi|oz|yd|Hz|Pa")
"""Others of one or two letters are products of variables: pint would read 2ab as attobarns."""
_POWERS = rf"{_LETTER}{{1,20}}(?:\s?\^\s?\{{?\s?-?[1-4]\s?\}}?)?"
_UNIT = rf"%|{_POWERS}(?:\s?(?:/|\\cdot|\s)\s?{_POWERS}){{0,3}}"
_LAST_UNIT = re.compile(rf"(?:(?<=[\d)}}])|(?<=\\pi))(?:\s?(%))?(\s?(?:([(\[])\s?)?)({_UNIT})\s?(?(3)[)\]]|)\s?\Z")
_WORD = re.compile(rf"{_OTHER_SCRIPT}|(?<![\\a-zA-Z])(?<![nd_]{{){_LETTER}{{3}}|(?<![^ ])(?i:it|is|so|we|if) ")
"""A word, rather than variables side by side, `\\begin{pmatrix}`, or an index."""
# a time such as 12:00 would be a division by zero
_NO_FORMULA = re.compile(rf"(?i)no|up|on|in|so|we|is|if|[0-9]+:00|{_LETTER}+(?:[ '-]+{_LETTER}+)+|[^\uff04]*\uff04.*")


# the text left of `=` with a number, a power or a sign is part of an equation that is to be solved
_ARGUMENTS = re.compile(r"(?<=int)(?! ?_ ?\{?[-\d]).*|(?<=\\sum)(?!.*=).*|_ ?(?:\{[^{}]*\}|\w)|(?<=[\w'}]) ?\([^()]*\)")
_NO_NAME = re.compile(r"\A\s?-|[0-9^!<>.?]|\\(?:sqrt|log|ln|exp|pi)(?![a-z])|\A[^a-zA-Z]*\Z")


def _element(text: str) -> Answer:
    sides, _ = _split(text, _EQUALS)
    is_named = len(sides) > 1 and len(sides[0]) < 60 and not _NO_NAME.search(_ARGUMENTS.sub("", sides[0]))
    if is_named and not (side := _read(sides[-1])).has("words"):
        return Answer("expression", text, name="".join(sides[0].split()), parts=(side,))
    if len(terms := _split(text, _TOKEN + ":")[0]) > 2 and len(sides) == 1:
        return _several("ordered", [f"\\frac{{{term}}}{{{terms[0]}}}" for term in terms[1:]], f":{text}:")
    text = text if len(sides) == 1 else re.sub(r"(\d{1,9}(?:\.\d{1,9})?)\s?%", r"\\frac{\1}{100}", text)  # 1/2 = 50%
    if currency := re.fullmatch(r"(?s)([-+]?)\s?([\uff04\u20ac\u00a3\u20b9\u00a5])\s?(\S.*)", text):
        text = currency[1] + currency[3] + ("" if currency[3][-1].isalpha() else f" {_CURRENCIES[currency[2]]}")
    value, unit = _cut_unit(text)
    if (number := rational(value)) is not None:
        return Answer("number", value, number, unit)
    # any degrees left are inside a formula: \sin 30^\circ
    value = re.sub(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?degrees\s?", r"(\1\\frac{\\pi}{180})", value).strip()
    is_formula = not (_NO_FORMULA.fullmatch(value) or _WORD.search(value))
    return Answer("expression", value, None, unit) if is_formula else _words(text)


def _cut_unit(text: str) -> tuple[str, Unit | None]:
    """The text before a unit or a counted thing, and this.

    A single letter is a unit only after a space (`5 m`), else a variable (`5m`).
    """
    if (match := _LAST_UNIT.search(text)) and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        before, (percent, space, _, name) = text[: match.start()].strip(), match.groups("")
        unit = unit_of(re.sub(r"\s?\^\s?\{?\s?(-?\d)\s?\}?", r"**\1", name.replace("\\cdot", "*")))
        is_apart = space == " " or (" " in space and rational(before) is not None) or re.search(_OTHER_SCRIPT, name)
        if unit and not percent and (len(name) > 1 or name == "%" or is_apart):
            return before, unit
        is_thing = _WORD.search(name.removesuffix("s")) and (percent or not (unit or unit_of(name.split()[0])))
        if is_thing and is_apart and (rational(before) is not None or re.search(r"[\\^]", before)):
            return before, (percent + name.lower().removesuffix("s"), PERCENT[1] if percent else Fraction(0))
    return text, None


_registry: Any = cache(lambda: import_module("pint").UnitRegistry(non_int_type=Fraction))


@lru_cache(maxsize=1024)  # the words are a model's: an endless cache would fill the memory
def unit_of(name: str) -> Unit | None:
    """The dimension and the size of a unit by its name, in any number; None for other words."""
    unit = _UNITS.get(name.lower().removesuffix("s"))
    are_variables = not all(map(_SHORT_UNIT.fullmatch, re.findall(r"\b[^\W\d]{1,2}\b", name)))
    if unit or are_variables or re.fullmatch(r"\w(?: \w)+|.*units?", name):
        return unit
    registry = _registry()
    try:
        quantity = registry.Quantity(Fraction(1), registry.parse_units(name)).to_base_units()
        return str(sorted(quantity.dimensionality.items())), Fraction(quantity.magnitude)
    except Exception:  # no unit, one of temperature, or a text that pint cannot parse
        return None


# Numbers

_FRACTION = re.compile(r"\\frac ?\{ ?(-?\d{1,300}) ?\} ?\{ ?(\d{1,300}) ?\}")
_QUOTIENT = re.compile(r"(?:(\d{1,300})\s)?(\d{1,300})\s?[/:]\s?(\d{1,300})")
_REPEATING = re.compile(r"(\d*)\.(\d*?)(?:(\d{1,9}?)\3{1,30}\s?\\ldots|\s?\\(?:overline|bar|dot)\s?\{\s?(\d+)\s?\})")
_BASE = re.compile(r"\(?(\d[\da-zA-Z]{0,60})\)?\s?_\s?(?:\{\s?(\d{1,2})\s?\}|([2-9]))")
_POWER = re.compile(r"(?:(.*\S)\s?(?:\\times|\\cdot|\*|x))?\s?(\d{1,3})\s?\^\s?(?:\{\s?([-+]?\d{1,3})\s?\}|(\d))")
_DECIMAL = re.compile(r"((?:\d{1,300}\.?\d{0,300}|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)(?:\s?\\ldots)?")


def rational(text: str) -> Fraction | None:
    """The rational number that the text writes out; None for other texts."""
    text = _FRACTION.sub(r" \1/\2", text).strip()
    text = re.sub(r"(?<![^-])(\d\d?) ?!\Z", lambda number: str(factorial(int(number[1]))), text)
    sign, text = -1 if text.startswith("-") else 1, (text[1:] if text[:1] in ("-", "+") else text).strip()
    try:
        if match := _QUOTIENT.fullmatch(text):
            return sign * (int(match[1] or 0) + Fraction(int(match[2]), int(match[3])))
        if match := _REPEATING.fullmatch(text):
            fixed, cycle = f"0{match[1]}{match[2]}", match[3] or match[4]
            return Fraction(sign * (int(fixed + cycle) - int(fixed)), (10 ** len(cycle) - 1) * 10 ** len(match[2]))
        if match := _BASE.fullmatch(text):
            return sign * Fraction(int(match[1], int(match[2] or match[3])))
        if (match := _POWER.fullmatch(text)) and (factor := rational(match[1] or "1")) is not None:
            return sign * factor * Fraction(int(match[2])) ** int(match[3] or match[4])
        return sign * Fraction(match[1]) if (match := _DECIMAL.fullmatch(text)) else None
    except (ValueError, ZeroDivisionError):  # a digit outside of the base; division by zero
        return None
