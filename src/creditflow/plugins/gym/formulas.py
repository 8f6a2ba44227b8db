"""Bounds on a text that a scorer evaluates as Python, with sympy or as a formula of logic.

The text is parsed as a syntax tree. Only arithmetic and elementary functions are computed, and only from that tree.
"""

from __future__ import annotations

import ast
import cmath
import math
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from creditflow._utils.arithmetic import OPERATORS, evaluated, number

MAX_CHARACTERS, MAX_DEGREE, MAX_NUMBER = 300, 60, 10**12
MAX_TERMS = 60
"""Limit for the terms of a formula after multiplying out: `(x + y)**9` has 10."""
MAX_ROOT = 6
"""Limit for the denominator of an exponent."""
MAX_FUNCTIONS, MAX_NESTED = 8, 2
"""Limits for the functions in a formula, and for functions of functions. sympy's time grows exponentially with both."""
POINTS = (0.37 + 0.21j, 0.9 - 0.6j, -0.53 + 0.45j, 0.29, 1.3, -0.7)
"""Points at which a derivative is compared. A formula may be undefined or on another branch at some of them."""
REL_TOL, STEP = 1e-6, 2e-5
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of the parser. The last two: brackets or signs nested too deep."""
_ARITHMETIC = re.compile(r"[0-9+\-*/()\s]*", re.ASCII)
_PART_OF_PROPOSITION = re.compile(r"\u00acV|\(V\)|V[\u2227\u2228\u2192\u2194]V")  # not; and, or, implies, iff
_LARGE_EXPONENT = re.compile(r"[0-9.][eE][+-]?[0-9_]{4}")
_LARGE_COUNT = re.compile(r"[0-9]{2}")


def is_literal(text: str) -> bool:
    """Whether the text is a Python literal, or no Python expression at all (which a scorer's `eval` refuses)."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(node, _LITERALS) for node in ast.walk(tree))


_LITERALS = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load, ast.Name),
    *(ast.UnaryOp, ast.USub, ast.UAdd),
)
"""A name alone has no effect; it may neither be called nor have attributes."""


def is_polynomial(text: str) -> bool:
    """Whether the text is a small formula without functions."""
    tree = _parsed(text)
    return tree is not None and not any(isinstance(node, ast.Call) for node in ast.walk(tree))


def may_be_integral(text: str, integrand: str, variable: str) -> bool:
    """Whether the text is a small formula, and its derivative equals the integrand at half of the points or more.

    Also true if the integrand cannot be computed. A wrong formula is refused here in microseconds, while sympy's time
    to simplify it has no bound.
    """
    formula, integrand_tree = _parsed(text), _parsed(integrand)
    if formula is None or integrand_tree is None:
        return formula is not None
    pairs = list(_slopes_and_values(formula, integrand_tree, variable))
    equal = sum(cmath.isclose(slope, value, rel_tol=REL_TOL, abs_tol=REL_TOL) for slope, value in pairs)
    return 0 < len(pairs) <= 2 * equal


def is_arithmetic(text: str) -> bool:
    """Whether the text is arithmetic with whole numbers: + - * / and brackets, and no division by 0."""
    return arithmetic_value(text) is not None


def arithmetic_value(text: str) -> Fraction | None:
    """The exact value of arithmetic with whole numbers; None for any other text."""
    if len(text) > MAX_CHARACTERS or not _ARITHMETIC.fullmatch(text):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return Fraction(evaluated(tree, operand=lambda node: Fraction(number(node))))
    except (*_UNREADABLE, ZeroDivisionError):
        return None


def is_proposition(text: str) -> bool:
    """Whether the text is a formula of logic: capital letters, the five signs and brackets."""
    if len(text) > MAX_CHARACTERS:
        return False
    rest, reduced = "", re.sub("[A-Z]", "V", "".join(text.split()))
    while rest != reduced:
        rest, reduced = reduced, _PART_OF_PROPOSITION.sub("V", reduced)
    return rest == "V"


def has_small_exponents(text: str) -> bool:
    """Whether no number in the text has an exponent of four digits or more: `1e9999` is long to write out."""
    return _LARGE_EXPONENT.search(text) is None


def has_small_counts(text: str) -> bool:
    """Whether no number in the text has two digits or more."""
    return _LARGE_COUNT.search(text) is None


# Formulas


def _parsed(text: str) -> ast.expr | None:
    """The tree of a small formula (numbers, one-letter names, + - * / **, elementary functions); None for other text.

    Limits: length, degree, terms after multiplying out, roots, number and nesting of functions.
    """
    if len(text) > MAX_CHARACTERS or not text.isascii() or not has_small_exponents(text):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _size(tree)
    except _UNREADABLE:
        return None
    return tree


class _Size(NamedTuple):
    """Bounds on a formula. A number has degree 1, as its powers grow in the same way."""

    degree: float = 1
    terms: int = 1
    functions: int = 0
    nested: int = 0


def _size(node: ast.expr) -> _Size:
    """Measure a formula. Raises ValueError above a limit and for any other syntax."""
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= MAX_NUMBER and not isinstance(value, bool):
            return _Size()
        case ast.Name(id=name) if len(name) == 1:
            return _Size()
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _size(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _size(left), _exponent(right)
            times = max(1, math.ceil(abs(power)))
            degree = base.degree * max(times, power.denominator)
            size = base._replace(degree=degree, terms=math.comb(base.terms + times - 1, times))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operation, right=right):
            first, second = _size(left), _size(right)
            functions, nested = first.functions + second.functions, max(first.nested, second.nested)
            if isinstance(operation, ast.Add | ast.Sub):
                size = _Size(max(first.degree, second.degree), first.terms + second.terms, functions, nested)
            else:
                size = _Size(first.degree + second.degree, first.terms * second.terms, functions, nested)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            inner = _size(argument)
            size = inner._replace(functions=inner.functions + 1, nested=inner.nested + 1)
        case _:
            raise ValueError
    limits = (MAX_DEGREE, MAX_TERMS, MAX_FUNCTIONS, MAX_NESTED)
    if any(value > limit for value, limit in zip(size, limits, strict=True)):
        raise ValueError
    return size


def _exponent(node: ast.expr) -> Fraction:
    """The value of a literal exponent: a whole number or a fraction of them."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool) and value <= MAX_DEGREE:
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right) if divisor := _exponent(right):
            power = _exponent(left) / divisor
            if power.denominator <= MAX_ROOT:
                return power
    raise ValueError


# Derivatives


_NAMES = "sin cos tan exp log sqrt asin acos atan sinh cosh tanh"
FUNCTIONS: dict[str, Callable[[complex], complex]] = {name: getattr(cmath, name) for name in _NAMES.split()}
"""The functions of formulas, which have the same names in sympy and cmath."""
_CONSTANTS = {"E": cmath.e, "I": 1j}
"""sympy's constants of one letter. Any other letter is a constant without a value."""


def _slopes_and_values(formula: ast.expr, integrand_tree: ast.expr, variable: str) -> Iterator[tuple[complex, complex]]:
    """The derivative of one formula and the value of another, at the points where both are defined."""
    for point in POINTS:
        try:
            terms = (weight * _value(formula, variable, point + place * STEP) for place, weight in _STENCIL)
            yield sum(terms) / (12 * STEP), _value(integrand_tree, variable, point)
        except (ArithmeticError, ValueError):
            continue


_STENCIL = ((-2, 1), (-1, -8), (1, 8), (2, -1))
"""Places and weights of a difference whose error falls with the fourth power of the step."""


def _value(formula: ast.expr, variable: str, point: complex) -> complex:
    """The value of a formula where the variable is `point`. Raises ArithmeticError or ValueError."""

    def operand(node: ast.expr) -> complex:
        match node:
            case ast.Name(id=name):
                return point if name == variable else _CONSTANTS.get(name, complex(0.4 + ord(name) % 16 / 10, 0.3))
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                return FUNCTIONS[name](_value(argument, variable, point))
        return complex(number(node))

    return complex(evaluated(formula, {**OPERATORS, ast.Pow: operator.pow}, operand))
