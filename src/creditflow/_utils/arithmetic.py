"""Evaluate syntax trees of arithmetic. Nothing is run as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

Operators = Mapping[type[ast.AST], Callable[..., Any]]

OPERATORS: Operators = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
"""Signs, sums, products and quotients."""


def number(node: ast.expr) -> int | float:
    """The number that a node spells out. Raises ValueError for any other node."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    raise ValueError(f"expected numbers, operators and brackets, got {ast.unparse(node)[:40]}")


def evaluated(node: ast.expr, operators: Operators = OPERATORS, operand: Callable[[ast.expr], Any] = number) -> Any:
    """The value of a tree of operators on operands.

    Raises ValueError for other syntax, and what an operator raises.
    """
    match node:
        case ast.UnaryOp(op=op, operand=inner) if type(op) in operators:
            return operators[type(op)](evaluated(inner, operators, operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
            return operators[type(op)](evaluated(left, operators, operand), evaluated(right, operators, operand))
    return operand(node)
