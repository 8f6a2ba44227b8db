"""Parse formulas by math-verify, and compare them: exactly where sympy can decide, else to hundreds of digits.

The library compares sets, intervals, tuples and relations. Numbers and formulas with variables are compared here,
because the library passes unequal ones: it rounds to a number of decimals, so any two small numbers are equal there.
Importing this module imports sympy. The caller limits the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, grader, parser
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

MAX_BITS = 300_000
"""Limit for the binary digits of a whole number. No signal can end the evaluation of a much longer one."""
MAX_FACTORIAL = 20_000
DIGITS = 1_000
"""Digits to which a difference is evaluated."""
RELATIVE = sympy.Rational(1, 10 ** (DIGITS // 2))
"""Two numbers are equal if their evaluated difference is at most this share of them."""
LIBRARY_DIGITS = 200
"""Digits of the library's comparison, of sets for example."""
POINTS = 6
"""Number of points at which two formulas are compared."""
# the time limit covers everything, and units are already removed: the library would read the t of `x + t` as one
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True
_TARGET = LatexExtractionConfig(
    normalization_config=parser.NormalizationConfig(units=False, malformed_operators=True, boxed="none")
)
_EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")


class TooLargeError(ValueError):
    """A number is too long to evaluate."""


@lru_cache(maxsize=256)
def parse(text: str) -> Any:
    """The expression of a LaTeX formula; for an equation between numbers their value, if it holds.

    None if it cannot be read, or has no value.
    """
    sides = _EQUALS.split(text)
    if len(sides) > 1 and not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)):
        values = [parse(side.strip()) for side in sides]
        return values[-1] if all(same(value, values[-1]) for value in values) else None
    if not text or text.count("(") + text.count("[") != text.count(")") + text.count("]"):
        return None
    parsed = parser.parse(f"${text}$", [_TARGET], fallback_mode="no_fallback", parsing_timeout=None)
    try:
        expression = parsed[0].as_immutable() if isinstance(parsed[0], sympy.MatrixBase) else parsed[0]
        return None if _evaluated(expression).has(sympy.nan, sympy.zoo) else expression
    except Exception:  # not read, too large, or nothing that sympy can evaluate
        return None


def same(left: Any, right: Any) -> bool:
    """Whether two expressions from `parse` have the same meaning; False if one is None, or if sympy raises."""
    try:
        return _same(*_comparable(left, right))
    except Exception:  # a hostile expression; sympy may raise anything
        return False


def decimals(expression: Any, digits: int) -> Fraction | None:
    """The value of a real number to `digits` significant digits; None for other expressions."""
    try:
        value = expression.doit()
        return Fraction(int(value.p), int(value.q)) if value.is_Rational else Fraction(str(value.evalf(digits)))
    except Exception:  # no number, complex, infinite, or without digits
        return None


def _evaluated(expression: Any) -> Any:
    """Evaluate everything in the expression, with exact decimals. Raises TooLargeError."""
    _refuse_long(expression)
    if isinstance(expression, Relational | sympy.And):  # evaluated, sympy would make "symbol = set" false
        return expression.func(*map(_evaluated, _parts(expression)), evaluate=False)
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    return (expression.xreplace(exact) if exact else expression).doit()


def _refuse_long(expression: Any) -> None:
    """Raise TooLargeError if a power or a factorial in the expression is too long, measured from the inside out."""
    for part in sympy.postorder_traversal(expression):
        if isinstance(part, sympy.Sum | sympy.Product):
            _refuse_long(part.function.subs({variable: limits[-1] for variable, *limits in part.limits if limits}))
        if not isinstance(part, sympy.Expr) or not part.is_number:
            continue
        if isinstance(part, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.binomial):
            if any(argument.evalf(5) > MAX_FACTORIAL for argument in part.args):
                raise TooLargeError("a factorial too long to evaluate")
        elif isinstance(part, sympy.Pow):
            for value in part.evalf(5).as_real_imag():
                if value.is_Float and abs(value._mpf_[2] + value._mpf_[3]) > MAX_BITS:
                    raise TooLargeError("a power too long to evaluate")


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
        yield _evaluated(_renamed(expression, names))


def _same(left: Any, right: Any) -> bool:
    if any(isinstance(side, BooleanAtom) or side.has(sympy.nan, sympy.zoo) for side in (left, right)):
        return False
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):  # these are Expr, too
        return left.shape == right.shape and all(map(_same, left.flat(), right.flat()))
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return left == right or _same_value(left, right)
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq) and left.lhs == right.lhs:
        return _same(left.rhs, right.rhs)  # the library would round both sides
    for equation, value in ((left, right), (right, left)):
        if isinstance(equation, sympy.Eq) and isinstance(value, sympy.Expr | sympy.Tuple):
            named = grader.is_assignment_relation(equation) or all(
                side.is_Symbol for side in equation.lhs.as_numer_denom()
            )
            return named and _same(equation.rhs, value)
    return _in_library(left, right) or _in_library(right, left) or _same_relation(left, right)


def _in_library(left: Any, right: Any) -> bool:
    options = {"allow_set_relation_comp": True, "timeout_seconds": None}
    return bool(grader.verify(left, right, numeric_precision=LIBRARY_DIGITS, **options))


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
    if difference.is_Rational or difference.is_infinite:
        return bool(difference == 0)
    terms = sum(abs(term.evalf(15)) for term in sympy.Add.make_args(difference))
    return bool(abs(difference.evalf(15, maxn=DIGITS)) <= RELATIVE * terms)


def _same_relation(left: Any, right: Any) -> bool:
    """Whether two relations have the same solutions, or are the same up to a factor."""
    equations = isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq)
    unknowns = sorted(left.free_symbols, key=str)
    if left.free_symbols != right.free_symbols or not unknowns:
        return False
    if len(unknowns) == 1 and not equations:
        return _in_library(left.as_set(), right.as_set())
    left, right = (side.reversed if isinstance(side, sympy.Gt | sympy.Ge) else side for side in (left, right))
    if type(left) is not type(right) or not isinstance(left, Relational):
        return False
    quotient = sympy.cancel((left.lhs - left.rhs) / (right.lhs - right.rhs))
    factor = quotient.xreplace(next(iter(_points(quotient.free_symbols))))
    if _has_value(factor) and factor != 0 and (equations or factor.is_positive) and _same_value(quotient, factor):
        return True
    some, others = (sympy.solve(side, unknowns[-1]) for side in (left, right)) if equations else ((), ())
    return bool(some) and _same(sympy.FiniteSet(*some), sympy.FiniteSet(*others))
