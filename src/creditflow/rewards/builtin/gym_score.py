"""The scorers of reasoning-gym's families, as an outcome.

Some scorers evaluate the answer as Python or with sympy. Such an answer is first parsed as a syntax tree and refused
unless it is a plain literal or a small formula.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

from creditflow.data import Score, Trajectory
from creditflow.data.gym_tasks import gym_data_set, gym_entry
from creditflow.rewards.registry import builtin, outcome
from creditflow.rewards.support.text import without_thoughts

MAX_ANSWER_CHARACTERS = 4000
MAX_FORMULA_CHARACTERS, MAX_FORMULA_DEGREE, MAX_NUMBER = 300, 60, 10**12
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).){0,4000}?)</answer>", re.DOTALL)
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs")
)


@builtin
@outcome(timeout=30.0)
def reasoning_gym(trajectory: Trajectory, strict: bool = False) -> Score:
    """The family's own `score_answer(answer, entry)`, for a task from a `reasoning-gym://` address.

    The answer is the text in the last `<answer>...</answer>`, else after the last `####`, else all of it. `strict`: 1
    for full marks, else 0; without it, families may give partial marks, such as for a right number within other text.
    An answer that the scorer cannot read scores 0. Formulas and literals that the scorer would evaluate are limited in
    length, degree and names first.

    Range: [0, 1]. Cost: microseconds to milliseconds; more for a formula that sympy simplifies. Source:
    reasoning-gym 0.1.25. Raises DataError for a task from another source; an error of the scorer that does not come
    from the answer passes through.
    """
    entry = gym_entry(trajectory.task)
    if trajectory.answer is None:
        return Score(0.0, reason="the workflow returned no answer")
    text = answer_in(trajectory.answer)
    if len(text) > MAX_ANSWER_CHARACTERS:
        return Score(0.0, reason=f"the answer has more than {MAX_ANSWER_CHARACTERS} characters")
    evaluable = _EVALUATED.get(trajectory.task.extra_info["family"])
    if evaluable is not None and text != entry["answer"] and not evaluable(text):
        return Score(0.0, reason="the answer is no literal or formula of the accepted form")
    data_set = gym_data_set(trajectory.task)
    try:
        value = float(data_set.score_answer(text, entry))
    except Exception as error:
        data_set.score_answer(entry["answer"], entry)  # raises here if the scorer or the entry is at fault
        return Score(0.0, reason=f"the scorer cannot read the answer: {type(error).__name__}")
    return Score(float(value >= 1.0) if strict else value)


def answer_in(text: str) -> str:
    """Return the tagged or marked answer of a text, which may have several lines, or else the whole text."""
    text = without_thoughts(text)
    tagged = _TAGGED.findall(text[-2 * MAX_ANSWER_CHARACTERS :])
    return (tagged[-1] if tagged else text.rpartition("####")[2]).strip()


# What may be evaluated


def is_literal(text: str) -> bool:
    """Whether the text is a Python literal, or no Python expression at all (which a scorer's `eval` refuses)."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):  # brackets or signs nested too deep
        return False
    return all(isinstance(node, _LITERALS) for node in ast.walk(tree))


def is_formula(text: str) -> bool:
    """Whether the text is a formula of low degree: numbers, one-letter names, + - * / **, elementary functions."""
    if len(text) > MAX_FORMULA_CHARACTERS:
        return False
    try:
        return _degree(ast.parse(text.strip(), mode="eval").body) <= MAX_FORMULA_DEGREE
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: brackets nested too deep
        return False


_LITERALS = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load, ast.Name),
    *(ast.UnaryOp, ast.USub, ast.UAdd),
)
"""A name alone has no effect; it may neither be called nor have attributes."""


def _degree(node: ast.expr) -> float:
    """A bound on the degree. A number counts as degree 1, as a power of it grows in the same way.

    Raises ValueError for anything that is no formula.
    """
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= MAX_NUMBER and not isinstance(value, bool):
            degree = 1.0
        case ast.Name(id=name) if len(name) == 1 and name.isascii():
            degree = 1.0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            degree = _degree(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            degree = _degree(left) * max(1.0, abs(_exponent(right)))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            degree = max(_degree(left), _degree(right))
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            degree = _degree(left) + _degree(right)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            degree = _degree(argument)
        case _:
            raise ValueError
    return degree


def _exponent(node: ast.expr) -> float:
    """The value of a literal exponent: a whole number or a fraction of them."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool) and value <= MAX_FORMULA_DEGREE:
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right) if _exponent(right):
            return max(abs(_exponent(left)), abs(_exponent(right)))
    raise ValueError


_EVALUATED: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_literal),
    **dict.fromkeys(
        ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
        is_formula,
    ),
}
"""The families whose scorer evaluates the answer, and the check that an answer must pass first."""
