"""Tests of programs: parse them from a data set's formats, and check a program's output against them.

Tests come from the data set or from a model; they are parsed here and never run. `stdin` is all that a box receives:
the expected result stays outside.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from creditflow.rewards.support.code_runner import MAX_CHARACTERS, PROGRAM, SOLUTION, decoded

MAX_TEST_CHARACTERS = 20_000
"""Limit for one test that is Python code; parsing takes time and stack."""
REL_TOL, ABS_TOL = 1e-6, 1e-9
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class InputOutput:
    """A script that must print `output` when given `input`."""

    input: str
    output: str
    program: str = SOLUTION

    def stdin(self, nonce: str) -> bytes:
        """Standard input of the program."""
        return self.input.encode(errors="replace")

    def fault(self, stdout: bytes, nonce: str) -> str:
        """Compare line by line as text: `2.0` differs from `2`. White space at the end of lines is ignored."""
        expected, got = _lines(self.output), _lines(stdout.decode(errors="replace"))
        if expected == got:
            return ""
        first = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), None)
        if first is None:
            return f"wrong answer: expected {len(expected)} lines, got {len(got)}"
        return f"wrong answer in line {first}: expected {shown(expected[first])}, got {shown(got[first])}"


@dataclass(frozen=True, slots=True)
class CaseCall:
    """A call of the solution; its value is checked outside of the box."""

    ask: Mapping[str, Any]
    """`fn` and `args`; or `call`, the Python source of the call, evaluated after the statements in `setup`."""
    holds: Callable[[Any], bool]
    expected: str
    program: str = PROGRAM

    def stdin(self, nonce: str) -> bytes:
        """The question to the calling program."""
        return json.dumps(dict(self.ask)).encode()

    def fault(self, stdout: bytes, nonce: str) -> str:
        """The fault, if the value cannot be read or fails the check."""
        try:
            answer = _answer(stdout)
            if "value" not in answer:
                return _no_answer(answer)
            value = decoded(answer["value"])
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            return "its answer cannot be read"
        try:
            if self.holds(value):
                return ""
        except (TypeError, ArithmeticError, RecursionError):  # such as `<` between a text and a number
            pass
        return f"wrong answer: expected {self.expected}, got {shown(value)}"


@dataclass(frozen=True, slots=True)
class InBox:
    """Assertions that run inside the box; the test passes if the nonce comes back, which is written at the end."""

    source: str
    setup: str = ""
    program: str = PROGRAM

    def stdin(self, nonce: str) -> bytes:
        """The assertion, with the nonce that its end writes."""
        return json.dumps({"assert": self.source, "setup": self.setup, "nonce": nonce}).encode()

    def fault(self, stdout: bytes, nonce: str) -> str:
        """The fault, if the nonce is missing."""
        try:
            answer = _answer(stdout)
        except (ValueError, TypeError, RecursionError):
            return "its answer cannot be read"
        return "" if answer.get("nonce") == nonce else _no_answer(answer)


Case = InputOutput | CaseCall | InBox
"""A test of a program: the file to run (the solution, or the program that calls it), its input, and a check of its
output, which returns the fault or an empty text.
"""


def not_loaded(stdout: bytes) -> str:
    """The solution's own report that it cannot be loaded, in which case no test can pass; empty if it was loaded."""
    try:
        return str(_answer(stdout).get("not_loaded", ""))[:200]
    except (ValueError, TypeError, RecursionError):
        return ""


def shown(value: object) -> str:
    """Short text of a value, for a reason."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().replace("\r\n", "\n").split("\n")]


def _answer(stdout: bytes) -> dict[str, Any]:
    """Parse the output of the calling program. It is hostile input: the solution can write it too."""
    if len(stdout) > MAX_CHARACTERS:
        raise ValueError("the answer is too long")
    answer = json.loads(stdout or b"{}")
    if not isinstance(answer, dict):
        raise TypeError("an answer is an object")
    return answer


def _no_answer(answer: Mapping[str, Any]) -> str:
    for kind, what in (("not_loaded", "cannot be loaded"), ("raised", "raised")):
        if kind in answer:
            return f"{what}: {str(answer[kind])[:100]}"
    return "ended before it answered"


# Reading


def read_tests(truth: Any) -> tuple[Case, ...]:
    """Parse the tests in a ground truth, given as JSON text or as the decoded value.

    Accepted are `{"inputs": [...], "outputs": [...]}` (APPS, verl), which holds calls if `"fn_name"` is given; a list
    of `{"input": ..., "output": ...}`, `{"call": "f(2, 3)", "expect": 5}` or texts with `assert`; or one such text.
    Each assertion of that text is a test, run after the other statements. Raises ValueError for anything else,
    and for an empty list.
    """
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except RecursionError as error:
            raise ValueError("the tests are nested too deep") from error
        except ValueError:
            return tuple(_of_text(truth))
    if isinstance(truth, str):
        return tuple(_of_text(truth))
    if isinstance(truth, Mapping):
        tests = tuple(_of_columns(truth))
    elif isinstance(truth, Sequence):
        tests = tuple(_of_one(test, f"test {i}") for i, test in enumerate(truth))
    else:
        raise ValueError(f"expected tests, got {shown(truth)}")
    if not tests:
        raise ValueError("expected at least one test, got none")
    return tests


def read_assert(text: str) -> Case:
    """Parse a text with `assert` as a test. Raises ValueError if it is not Python or has no assertion."""
    statements = _statements(text)
    *setup, last = statements
    if isinstance(last, ast.Assert) and not any(isinstance(statement, ast.Assert) for statement in setup):
        return _of_assert(last, text, "\n".join(_source(text, statement) for statement in setup))
    return InBox(text)


def _of_columns(truth: Mapping[str, Any]) -> Iterator[Case]:
    inputs, outputs, name = truth.get("inputs"), truth.get("outputs"), truth.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"expected tests with as many inputs as outputs, got {shown(dict(truth))}")
    for test_input, expected in zip(inputs, outputs, strict=True):
        if name is None:
            yield InputOutput(_joined(test_input), _joined(expected))
        else:
            yield _of_fn(str(name), test_input, expected)


def _joined(text: Any) -> str:
    lines = text if isinstance(text, list) else [text]
    if any(line is None or (isinstance(line, float) and math.isnan(line)) for line in lines):
        raise ValueError(f"expected the input and output of a test as text, got {shown(text)}")
    return "\n".join(map(str, lines))


def _of_fn(name: str, arguments: Any, expected: Any) -> Case:
    if isinstance(arguments, str):  # verl: JSON, one argument per line
        args = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    elif isinstance(arguments, list):
        args = arguments
    else:
        raise ValueError(f"expected the arguments of {name} as a list, or as lines of JSON, got {shown(arguments)}")
    wrapped = isinstance(expected, list) and len(expected) == 1

    def holds(value: Any) -> bool:
        # APPS wraps most values in a list of one.
        return alike(value, expected) or (wrapped and alike(value, expected[0]))

    return CaseCall({"fn": name, "args": args}, holds, shown(expected))


def _of_one(test: Any, where: str) -> Case:
    if isinstance(test, str):
        try:
            return read_assert(test)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
        return InputOutput(_joined(test["input"]), _joined(test["output"]))
    if isinstance(test, Mapping) and {"call", "expect"} <= test.keys():
        expected = test["expect"]
        return CaseCall({"call": str(test["call"])}, lambda value: alike(value, expected), shown(expected))
    raise ValueError(f"{where}: expected input and output, call and expect, or an assert, got {shown(test)}")


def _of_text(text: str) -> Iterator[Case]:
    statements = _statements(text)
    setup = "\n".join(_source(text, statement) for statement in statements if not isinstance(statement, ast.Assert))
    for statement in statements:
        if isinstance(statement, ast.Assert):
            yield _of_assert(statement, text, setup)


# Assertions


def _statements(text: str) -> list[ast.stmt]:
    if len(text) > MAX_TEST_CHARACTERS:
        raise ValueError(f"expected a test of at most {MAX_TEST_CHARACTERS} characters, got {len(text)}")
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"expected tests, got neither JSON nor Python: {shown(text)}") from error
    if not any(isinstance(node, ast.Assert) for statement in statements for node in ast.walk(statement)):
        raise ValueError(f"expected a test with `assert`, got {shown(text)}")
    return statements


def _source(text: str, node: ast.AST) -> str:
    return ast.get_source_segment(text, node) or ""


_OPERATORS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("", operator.eq),
    ast.NotEq: ("not ", operator.ne),
    ast.Lt: ("less than ", operator.lt),
    ast.LtE: ("at most ", operator.le),
    ast.Gt: ("more than ", operator.gt),
    ast.GtE: ("at least ", operator.ge),
    ast.Is: ("", operator.is_),
    ast.IsNot: ("not ", operator.is_not),
    ast.In: ("one of ", lambda value, container: value in container),
    ast.NotIn: ("none of ", lambda value, container: value not in container),
}


def _of_assert(statement: ast.Assert, text: str, setup: str) -> Case:
    try:
        node, holds, expected = _condition(statement.test)
    except (ValueError, TypeError, RecursionError):  # another form, or an operand that must be constant is not
        node = None
    if node is None or not _is_plain(node):
        return InBox(_source(text, statement), setup)
    return CaseCall({"call": _source(text, node), "setup": setup}, holds, expected)


def _condition(test: ast.expr) -> tuple[ast.expr, Callable[[Any], bool], str]:
    """The expression to evaluate on the solution, the condition on its value, and the words for that.

    Raises ValueError or TypeError for other forms than those in `read_tests`' documentation.
    """
    match test:
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(op=ast.Sub()) as difference], keywords=[]),
            ops=[ast.Lt() | ast.LtE() as operation],
            comparators=[limit],
        ):
            node, other = _sides(difference.left, difference.right)
            expected, most, compare = constant(other), constant(limit), _OPERATORS[type(operation)][1]
            return node, lambda value: compare(abs(value - expected), most), f"{shown(expected)} within {shown(most)}"
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            if isinstance(operation, ast.Eq):
                left, right = _sides(left, right)
            expected, (word, compare) = constant(right), _OPERATORS[type(operation)]
            if isinstance(operation, ast.Is | ast.IsNot) and not (expected is None or isinstance(expected, bool)):
                raise ValueError("identity with a value that is made anew")
            return left, lambda value: bool(compare(value, expected)), word + shown(expected)
        case ast.Call(args=[first, second]) if ast.unparse(test.func) in ("math.isclose", "isclose"):
            node, other = _sides(first, second)
            expected = constant(other)
            tolerances = {str(keyword.arg): constant(keyword.value) for keyword in test.keywords}
            if not tolerances.keys() <= {"rel_tol", "abs_tol"}:
                raise ValueError("isclose has two tolerances")
            return node, lambda value: math.isclose(value, expected, **tolerances), f"about {shown(expected)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand, lambda value: not value, "something false"
        case ast.Call():
            return test, bool, "something true"
    raise ValueError("an assertion of another form")


def _sides(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    """The side that calls the solution, and the other."""
    return (left, right) if _is_plain(left) else (right, left)


_SHAPING = frozenset(
    ("sorted", "list", "set", "frozenset", "tuple", "dict", "str", "int", "float", "bool", "repr", "any", "all")
) | {"len", "sum", "min", "max", "abs", "round", "next"}
_COMPARING = frozenset(("math", "cmath", "np", "numpy", "operator", "torch"))


def _is_plain(node: ast.expr) -> bool:
    """Whether the expression only calls the solution, so that it holds nothing of the expected result.

    A value can redefine `== 5` or `- 5`; so no operation may surround the call inside the box.
    """
    match node:
        case ast.Subscript():
            return _is_plain(node.value) and _is_constant(node.slice)
        case ast.Attribute():
            return not node.attr.startswith("__") and _is_plain(node.value)
        case ast.List() | ast.Tuple():
            return bool(node.elts) and all(map(_is_plain, node.elts))
        case ast.Call():
            return _is_plain_call(node)
    return False


def _is_plain_call(node: ast.Call) -> bool:
    match node.func:
        case ast.Attribute(attr=attribute, value=owner):
            return not attribute.startswith("__") and _is_owner(owner)
        case ast.Name(id=name) if hasattr(builtins, name):
            others = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            return name in _SHAPING and bool(node.args) and _is_plain(node.args[0]) and all(map(_is_constant, others))
    return isinstance(node.func, ast.Name)


def _is_owner(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id not in _COMPARING and not hasattr(builtins, node.id)
    return _is_plain(node)


def _is_constant(node: ast.expr) -> bool:
    try:
        constant(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


_MAKERS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (set, frozenset, list, tuple, dict, float)}


def constant(node: ast.expr) -> Any:
    """The value of a literal, or of `set`, `frozenset`, `list`, `tuple`, `dict` or `float` of a literal.

    Raises ValueError or TypeError for other expressions.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) <= 1 and not node.keywords:
        if node.func.id not in _MAKERS:
            raise ValueError(f"{node.func.id} makes no constant")
        return _MAKERS[node.func.id](*map(constant, node.args))
    return ast.literal_eval(node)


def alike(value: Any, expected: Any) -> bool:
    """Whether a value equals a JSON value: lists equal tuples, and keys compare as text.

    Decimals are compared within 1e-6 (relative) or 1e-9 (absolute).
    """
    if isinstance(expected, list):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(alike(item, other) for item, other in zip(value, expected, strict=True))
        )
    if isinstance(expected, Mapping):
        named = {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else None
        return (
            named is not None and named.keys() == expected.keys() and all(alike(named[k], expected[k]) for k in named)
        )
    if isinstance(value, float) or isinstance(expected, float):
        return _close(value, expected)
    return bool(value == expected)


def _close(number: Any, other: Any) -> bool:
    """Whether two numbers, one of them a decimal, are nearly equal, or both NaN."""
    if number == other or (number != number and other != other):  # noqa: PLR0124 (NaN)
        return True
    try:
        return math.isclose(number, other, rel_tol=REL_TOL, abs_tol=ABS_TOL)
    except (TypeError, OverflowError):
        return False
