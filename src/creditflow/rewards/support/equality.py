"""Equality of two sympy expressions: exact where sympy can decide, else to hundreds of digits.

Numbers and formulas are compared here: math-verify compares them after rounding to a number of decimals, so any two
small numbers are equal there. The library compares sets, intervals and tuples of them. Importing this module imports
sympy. The caller limits the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import sympy
from math_verify import grader
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

MAX_BITS = 300_000.0
"""Limit for the binary digits of a whole number. No signal can end the evaluation of a much longer one."""
DIGITS = 1_000
"""Digits to which a difference is evaluated."""
RELATIVE = sympy.Rational(1, 10 ** (DIGITS // 2))
"""Two numbers are equal if their evaluated difference is at most this share of them."""
LIBRARY_DIGITS = 200
"""Digits of the library's comparison, of sets for example."""
POINTS = 6
"""Number of points at which two formulas are compared."""


class TooLargeError(ValueError):
    """A number is too long to evaluate."""


def same(left: Any, right: Any) -> bool:
    """Whether two expressions that math-verify parsed have the same meaning.

    Both must have passed through `worked_out`, so that no number in them is too long.
    """
    left, right = _comparable(left, right)
    if any(isinstance(side, BooleanAtom) or side.has(sympy.nan, sympy.zoo) for side in (left, right)):
        return False
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):  # these are Expr, too
        return left.shape == right.shape and all(map(same, left.flat(), right.flat()))
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return left == right or _same_value(left, right)
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq) and left.lhs == right.lhs:
        return same(left.rhs, right.rhs)  # the library would round both sides
    return _same_in_library(left, right) or _same_in_library(right, left) or _same_relations(left, right)


def worked_out(expression: Any) -> Any:
    """Evaluate everything in the expression, with exact decimals. Raises TooLargeError."""
    if _bits(expression) > MAX_BITS:
        raise TooLargeError("a number too long to work out")
    if isinstance(expression, Relational | sympy.And):  # evaluated, sympy would make "symbol = set" false
        return expression.func(*map(worked_out, _parts(expression)), evaluate=False)
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    return (expression.xreplace(exact) if exact else expression).doit()


def _bits(expression: Any) -> float:
    """Upper bound for the binary digits of the whole numbers in the expression and during its evaluation."""
    if isinstance(expression, sympy.Rational):
        return float(abs(expression.p).bit_length() + expression.q.bit_length())
    inside = [_bits(argument) for argument in getattr(expression, "args", ())]
    most = max(inside, default=1.0)
    if most > MAX_BITS or not getattr(expression, "is_number", False):
        return most
    if isinstance(expression, sympy.Pow):
        return inside[0] * _at_most(expression.exp, inside[1])
    if isinstance(expression, sympy.factorial | sympy.gamma | sympy.factorial2 | sympy.binomial):
        n = _at_most(expression.args[0], inside[0])
        return n * math.log2(n + 2)
    return sum(inside) if isinstance(expression, sympy.Add | sympy.Mul) else most


def _at_most(number: Any, bits: float) -> float:
    """Upper bound for the absolute value of a number of at most `bits` binary digits."""
    if isinstance(number, sympy.Rational) and bits < 1000:
        return float(abs(number.p) / number.q)
    return float(2.0 ** min(bits, 1000.0))


# Making two expressions comparable


def _links(expression: Any) -> list[Any]:
    return _parts(expression) if isinstance(expression, sympy.And) else [expression]


def _parts(expression: Any) -> list[Any]:
    """The arguments in the order in which they were written."""
    return list(getattr(expression, "_unsorted_args", expression.args))


def _renamed(expression: Any, names: dict[Any, Any]) -> Any:
    if isinstance(expression, Relational | sympy.And):
        return expression.func(*(_renamed(part, names) for part in _parts(expression)), evaluate=False)
    return expression.xreplace(names)


def _comparable(*expressions: Any) -> Iterator[Any]:
    """Evaluate the expressions, with one symbol per name and `i` as the imaginary unit."""
    symbols = [symbol for expression in expressions for symbol in expression.free_symbols if symbol.name != "i"]
    real = all(symbol.is_real for symbol in symbols)
    for expression in expressions:
        names = {call: sympy.Symbol(str(call), real=real) for call in expression.atoms(AppliedUndef)}
        for symbol in expression.free_symbols:
            names[symbol] = sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name, real=real)
        yield worked_out(_renamed(expression, names))


# Comparing


def _same_in_library(left: Any, right: Any) -> bool:
    grader.TIMEOUT_WARNING_SHOWN = True  # the caller limits the time
    same: bool = grader.verify(
        left,
        right,
        numeric_precision=LIBRARY_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return same


def _same_value(left: Any, right: Any) -> bool:
    """Whether two formulas are equal: at points where both have a value, else by simplifying their difference."""
    difference = left - right
    if difference.is_number:
        return _vanishes(difference)
    if left.free_symbols and right.free_symbols and not left.free_symbols & right.free_symbols:
        return False
    values = [difference.xreplace(point) for point in _points(difference.free_symbols)]
    seen = [_vanishes(value) for value in values if _has_value(value)]
    return all(seen) if len(seen) * 2 > POINTS else bool(sympy.simplify(difference) == 0)


def _points(symbols: Iterable[Any]) -> Iterator[dict[Any, Any]]:
    """Values for the symbols, of both signs, at which unequal formulas hardly ever agree."""
    ordered = sorted(symbols, key=str)
    for k in range(POINTS):
        primes = (sympy.prime(5 + 3 * i + 7 * k) for i in count())
        signs = ((-1) ** ((k >> i % 3) & 1) for i in count())
        yield {symbol: sympy.Rational(sign * p, 13) for symbol, p, sign in zip(ordered, primes, signs, strict=False)}


def _has_value(expression: Any) -> bool:
    value = expression.evalf(15)
    return bool(value.is_number and value.is_finite and value.as_real_imag()[0].is_Number)


def _vanishes(difference: Any) -> bool:
    """Whether a sum of numbers is negligible relative to its terms."""
    if difference.is_Rational:
        return bool(difference == 0)
    if difference.is_infinite:
        return False
    terms = sum(abs(term.evalf(15)) for term in sympy.Add.make_args(difference))
    return bool(abs(difference.evalf(15, maxn=DIGITS)) <= RELATIVE * terms)


# Equations and inequalities


def _same_relations(left: Any, right: Any) -> bool:
    """Whether two chains of relations in one unknown have the same solutions, or each link that of the other chain.

    Links may differ by a constant factor.
    """
    if (intervals := _solutions(left, right)) is not None:
        return _same_in_library(*intervals) or _same_in_library(*reversed(intervals))
    links, others = _links(left), _links(right)
    if not all(isinstance(link, Relational) for link in (*links, *others)):
        return False
    return len(links) == len(others) and all(any(_same_relation(a, b) for b in others) for a in links)


def _solutions(left: Any, right: Any) -> tuple[Any, Any] | None:
    """The solutions of two inequalities in the same unknown; None for other relations, or if sympy finds none."""
    links = (*_links(left), *_links(right))
    inequalities = all(isinstance(link, sympy.Lt | sympy.Le | sympy.Gt | sympy.Ge) for link in links)
    if not inequalities or len(left.free_symbols) != 1 or left.free_symbols != right.free_symbols:
        return None
    try:
        return left.as_set(), right.as_set()
    except (NotImplementedError, TypeError, ValueError):  # sympy cannot solve it
        return None


def _same_relation(left: Any, right: Any) -> bool:
    """Whether one relation is the other times a constant, which must be positive for an inequality."""
    if isinstance(left, sympy.Gt | sympy.Ge):
        left = left.reversed
    if isinstance(right, sympy.Gt | sympy.Ge):
        right = right.reversed
    if type(left) is not type(right) or left.free_symbols != right.free_symbols:
        return False
    quotient = sympy.cancel((left.lhs - left.rhs) / (right.lhs - right.rhs))
    point = next(iter(_points(quotient.free_symbols)))
    factor = quotient.xreplace(point)
    if not _has_value(factor) or factor == 0 or not (isinstance(left, sympy.Eq | sympy.Ne) or factor.is_positive):
        return False
    return _same_value(quotient, factor) or (isinstance(left, sympy.Eq) and _same_solutions(left, right))


def _same_solutions(left: Any, right: Any) -> bool:
    unknowns = sorted(left.free_symbols, key=str)
    some, others = (sympy.solve(equation, unknowns[-1]) for equation in (left, right))
    return bool(some) and same(sympy.FiniteSet(*some), sympy.FiniteSet(*others))
