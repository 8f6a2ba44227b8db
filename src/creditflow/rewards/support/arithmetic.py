"""Parse and evaluate the calculations in a text, such as `48/2 = 24`.

The text comes from a model: it is clipped, matched by regular expressions of bounded length, parsed as a syntax tree of
+ - * / on numbers, and never evaluated as code.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass

from creditflow._utils.arithmetic import evaluated, number
from creditflow.rewards.support.text import numbers_in

READ_CHARACTERS = 4_000
"""Default number of characters that are read, counted from the end of a text."""


@dataclass(frozen=True, slots=True)
class Calculation:
    """An equation `expression = number` in a text."""

    text: str
    operands: tuple[float, ...]
    operators: frozenset[str]
    stated: float
    computed: float | None
    """The value of the expression; None for a division by zero."""
    lead: str = ""
    """Text right before the expression, as far as it was examined; `\u2026` if the expression may begin earlier."""
    tail: str = ""
    """The first characters after the stated number."""

    @property
    def holds(self) -> bool:
        """Whether the stated number is right within 0.1 % or half a cent, since solutions round."""
        return self.computed is not None and math.isclose(self.computed, self.stated, rel_tol=1e-3, abs_tol=0.0051)


_SIGNS: dict[type[ast.AST], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_RIGHT_SIDE = re.compile(r"=\s{0,3}\$?\s?(-?[0-9][0-9,]{0,20}(?:\.[0-9]{1,12})?|-?\.[0-9]{1,12})")
_LEFT_SIDE, _LEFT_WORDS, _TAIL = 120, 20, 16
_VARIABLE = re.compile(r"x(?!\s{0,3}[0-9.($])")
_LEFT_CHARACTERS = "0123456789.,+-*/()$%x\u00d7\u00f7\u2212 "
_AS_ASCII = str.maketrans({"\u00d7": "*", "x": "*", "\u00f7": "/", "\u2212": "-", "$": "", ",": ""})


def calculations_in(text: str, characters: int = READ_CHARACTERS) -> list[Calculation]:
    """Return every `expression = number` with at least one operation, in order; only the last `characters` are read.

    An x multiplies if a number or an opening bracket follows it. Otherwise it is a variable, and the expression begins
    after it.
    """
    text = text[-characters:]
    calculations = []
    for match in _RIGHT_SIDE.finditer(text):
        before = text[max(0, match.start() - _LEFT_SIDE) : match.start()]
        left = before[len(before.rstrip(_LEFT_CHARACTERS)) :]
        left = _VARIABLE.split(left)[-1]
        if (tree := _arithmetic(left)) is not None:
            expression, body, computed, skipped = tree
            stated = match[1].rstrip(",")  # a comma after the number ends a clause
            calculations.append(
                Calculation(
                    text=f"{expression}={stated}",
                    operands=tuple(abs(operand.value) for operand in numbers_in(expression)),
                    operators=frozenset(_SIGNS[kind] for kind in map(type, ast.walk(body)) if kind in _SIGNS),
                    stated=float(stated.replace(",", "")),
                    computed=computed,
                    lead=_lead(before, left, skipped),
                    tail=text[match.start(1) + len(stated) : match.end() + _TAIL],
                )
            )
    return calculations


def _lead(before: str, left: str, skipped: str) -> str:
    if skipped:
        return f"{skipped} "
    if len(left) == _LEFT_SIDE or len(left.split()) > _LEFT_WORDS:
        return "\u2026"
    return before[: len(before) - len(left.lstrip())]


def _arithmetic(left: str) -> tuple[str, ast.expr, float | None, str] | None:
    """The longest suffix of `left` that is an expression with an operation: text, tree, value, and the words before it.

    For `1. 48/2` the expression is `48/2`.
    """
    left = re.sub(r"([0-9]+(?:\.[0-9]+)?)\s?%", r"(\1/100)", left.translate(_AS_ASCII))
    words = left.split()[-_LEFT_WORDS:]
    for start in range(len(words)):
        rest = " ".join(words[start:])
        expression = rest.lstrip("*/) ")
        try:
            body = ast.parse(expression, mode="eval").body
            value = _value(body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if any(isinstance(node, ast.BinOp) for node in ast.walk(body)):
            before = " ".join([*words[:start], rest[: -len(expression)]]).strip()
            return expression.replace(" ", ""), body, value, before
    return None


def _value(body: ast.expr) -> float | None:
    """The value in floats; None on a division by zero. Raises ValueError for other syntax."""
    try:
        return float(evaluated(body, operand=lambda node: float(number(node))))
    except ZeroDivisionError:
        return None
