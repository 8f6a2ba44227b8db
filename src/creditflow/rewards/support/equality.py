"""Parse formulas by math-verify, and compare them: exactly where sympy can decide, else to hundreds of digits.

The library compares sets, intervals, tuples and relations. Numbers and formulas with variables are compared here,
because the library passes unequal ones: it rounds to a number of decimals, so any two small numbers are equal there.
Importing this module imports sympy. The caller limits the time.
"""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, grader, parser

from creditflow.rewards.support.mathematics import Answer

MAX_BITS = 300_000
"""Limit for the binary digits of a number. No signal can end the evaluation of a much longer one."""
DIGITS = 1_000
"""Digits to which numbers are compared, also by the library."""
RELATIVE = sympy.Rational(1, 10 ** (DIGITS // 2))
"""Two numbers are equal if their evaluated difference is at most this share of them."""
POINTS = 6
"""Number of points at which two formulas are compared."""
# the time limit covers everything; without `units` (the default), `x + t` keeps its t
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True
_TARGET = LatexExtractionConfig(normalization_config=parser.NormalizationConfig(malformed_operators=True, boxed="none"))
_in_library = partial(grader.verify, numeric_precision=DIGITS, allow_set_relation_comp=True, timeout_seconds=None)
_GROWING = (sympy.Pow, sympy.factorial, sympy.factorial2, sympy.gamma, sympy.binomial)


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    """The expression of a LaTeX formula, evaluated; the value of an equation that holds for all values.

    `sum = value` with unknown terms is the value. None if it cannot be read, is too large, or has no value.
    """
    is_balanced = text.count("(") + text.count("[") == text.count(")") + text.count("]")
    parsed = parser.parse(f"${text}$" * is_balanced, [_TARGET], fallback_mode="no_fallback", parsing_timeout=None)
    with suppress(Exception):  # not read, too large, or nothing that sympy can evaluate
        expression = parsed[0].as_immutable() if isinstance(parsed[0], sympy.MatrixBase) else parsed[0]
        if isinstance(expression, sympy.Rel | sympy.And):
            sides = [_evaluated(side) for relation in expression.atoms(sympy.Rel) for side in relation.args]
            is_identity = all(_same(side, sides[0]) for side in sides)
            if is_identity or not expression.free_symbols | expression.atoms(sympy.core.function.AppliedUndef):
                return sides[0] if is_identity else None
            if isinstance(expression, sympy.Eq) and expression.lhs.has(sympy.Integral, sympy.Sum, sympy.Product):
                return sides[-1]
        expression = _evaluated(expression)
        return None if expression.has(sympy.nan, sympy.zoo) else expression
    return None


def value(answer: Answer) -> Any:
    """The number or the expression of an answer without parts; None if the library cannot read it."""
    return _parse(answer.text) if answer.number is None else sympy.Rational(answer.number)


def same(answer: Answer, truth: Answer, factor: Fraction = Fraction(1)) -> bool:
    """Whether the answer, times a factor, has the meaning of the truth; False if sympy raises."""
    with suppress(Exception):  # a hostile expression; sympy may raise anything
        return bool(_same(value(answer) if factor == 1 else value(answer) * factor, value(truth)))
    return False


def decimals(answer: Answer) -> Fraction | None:
    """The value of a real number to DIGITS significant digits; None for other answers."""
    with suppress(Exception):  # no number, complex, infinite, or without digits
        return Fraction(str(value(answer).evalf(DIGITS)))
    return None


def _evaluated(expression: Any) -> Any:
    """Evaluate the expression, with exact decimals, real variables, and `i` as the imaginary unit."""
    if isinstance(expression, sympy.Rel | sympy.And):  # evaluated, sympy would make "symbol = set" false
        return expression.func(*map(_evaluated, getattr(expression, "_unsorted_args", expression.args)), evaluate=False)
    new: dict[Any, Any] = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    for name in expression.free_symbols | expression.atoms(sympy.core.function.AppliedUndef):
        new[name] = sympy.I if str(name) == "i" else sympy.Symbol(str(name), real=True)
    expression = expression.xreplace(new)
    _refuse_long(expression)
    is_real = not expression.has(sympy.I)
    return expression.doit().replace(  # an odd root of a negative number is real
        lambda power: is_real and power.is_Pow and power.exp.is_Rational and power.exp.q % 2 == 1 < power.exp.q,
        lambda power: sympy.sign(power.base) ** power.exp.p * abs(power.base) ** power.exp,
    )


def _refuse_long(expression: Any) -> None:
    """Raise ValueError if a power or a factorial in the expression is too long, measured from the inside out."""
    for part in sympy.postorder_traversal(expression):
        if isinstance(part, sympy.Sum | sympy.Product):
            _refuse_long(part.function.subs({variable: limits[-1] for variable, *limits in part.limits if limits}))
        elif isinstance(part, _GROWING) and part.is_number:
            for value in part.evalf(5).as_real_imag():
                if value.is_Float and abs(value._mpf_[2] + value._mpf_[3]) > MAX_BITS:
                    raise ValueError("a number too long to evaluate")


def _same(left: Any, right: Any) -> Any:
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):  # these are Expr, too
        return left.shape == right.shape and all(map(_same, left.flat(), right.flat()))
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return left == right or _same_value(left, right)
    is_alike = isinstance(left, sympy.Eq) is isinstance(right, sympy.Eq)
    return is_alike and (_in_library(left, right) or _in_library(right, left) or _same_relation(left, right))


def _same_value(left: Any, right: Any) -> bool:
    """Whether two formulas are equal: at points where both are real, else by simplifying their difference."""
    difference = left - right
    values = [difference.xreplace(point) for point in _points(difference)]
    seen = [_vanishes(value) for value in values if _has_value(value, difference.has(sympy.I))]
    return all(seen) if len(seen) * 2 >= len(values) else bool(sympy.simplify(difference) == 0)


def _points(expression: Any) -> Any:
    """Values for the variables, of both signs, at which unequal formulas hardly ever agree; primes for a factorial."""
    variables, is_whole = sorted(expression.free_symbols, key=str), expression.has(*_GROWING[1:])
    for k in range(POINTS if variables else 1):
        signs = [1 if is_whole else sympy.Rational((-1) ** (k >> i % 3 & 1), 13) for i in range(len(variables))]
        yield {name: signs[i] * sympy.prime(5 + 3 * i + 7 * k) for i, name in enumerate(variables)}


def _has_value(expression: Any, is_complex: bool) -> bool:
    _refuse_long(expression)
    value = expression.evalf(15)
    return bool(value.is_finite and value.as_real_imag()[0].is_Number and (is_complex or value.is_real))


def _vanishes(difference: Any) -> bool:
    """Whether a sum of numbers is negligible relative to its terms."""
    terms = sum(abs(term.evalf(15)) for term in sympy.Add.make_args(difference))
    return bool(abs(difference.evalf(15, maxn=DIGITS)) <= RELATIVE * terms)


def _same_relation(left: Any, right: Any) -> bool:
    """Whether two relations have the same solutions, or are the same up to a factor."""
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        some, others = (sympy.fraction(sympy.together(eq.lhs - eq.rhs))[0].primitive()[1] for eq in (left, right))
        return _same_value(some, others) or _same_value(some, -others)
    if len(left.free_symbols | right.free_symbols) == 1:
        return bool(_in_library(left.as_set(), right.as_set()))
    some, others = ((relation.lts - relation.gts).primitive()[1] for relation in (left, right))
    return type(left) in (type(right), type(right.reversed)) and _same_value(some, others)


# sympy's first comparison takes half a second, which no time limit should count
same(Answer("expression", "3x^2+4y^2=12"), Answer("expression", r"\frac{x^2}{4}+\frac{y^2}{\sqrt{9}}=1"))
