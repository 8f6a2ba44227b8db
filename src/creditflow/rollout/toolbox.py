"""Ready-made tools, `calculator` and `python`, and the loader of a recipe's tools.

    agents: {solver: {tools: [calculator, {fn: python, timeout: 5}, "tools.py:weather"]}}

This module uses libraries and the sandbox, but no rollouts, models or credit.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat

from creditflow._utils.arithmetic import OPERATORS, evaluated
from creditflow._utils.loading import load_object
from creditflow._utils.sections import Section, checked
from creditflow.errors import ConfigError, did_you_mean
from creditflow.removed import removed_hint
from creditflow.rollout.tools import Tool


class ToolEntry(Section):
    """A tool that a recipe names."""

    fn: str
    name: str | None = None
    args: dict[str, Any] | None = None
    timeout: PositiveFloat | None = None


def load_tools(entries: Sequence[Any], base: Path, key: str, offered: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Load the tools that a recipe names. Raises ConfigError that names the wrong entry.

    `base`: the folder of relative files. `offered`: default arguments for classes that take them
    (`sandbox`).
    """
    tools = [_load(entry, base, f"{key}[{i}]", offered) for i, entry in enumerate(entries)]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{key}: two tools are called {twice[0]}; give one another `name`")
    return tuple(tools)


def _load(entry: Any, base: Path, key: str, offered: Mapping[str, Any]) -> Tool:
    if not isinstance(entry, str | Mapping):
        raise ConfigError(f"{key}: expected a name, `file.py:function`, or {{fn, name, args, timeout}}, got {entry!r}")
    options = checked(ToolEntry, {"fn": entry} if isinstance(entry, str) else entry, key)
    fn, args = options.fn, options.args or {}
    if fn in READY_MADE:
        function: Any = READY_MADE[fn]
    elif ":" in fn:
        function = load_object(fn, base, f"{key}.fn")
    else:
        choices = f"one of {', '.join(READY_MADE)}, or `file.py:function`"
        hint = removed_hint(f"tool {fn}") or did_you_mean(fn, list(READY_MADE))
        raise ConfigError(f"{key}: expected {choices}, got {fn!r}{hint}")
    if inspect.isclass(function):
        takes = inspect.signature(function).parameters
        args = {**{word: value for word, value in offered.items() if word in takes}, **args}
        try:
            function, args = function(**args), {}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key} ({fn}): {error}") from error
    if not callable(function):
        raise ConfigError(f"{key}: expected a function, {fn} is a {type(function).__name__}")
    return Tool.from_function(function, name=options.name, args=args, timeout=options.timeout)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a tool as quick: it is called on the event loop, without a thread, and does not change batching."""
    function.inline = True  # type: ignore[attr-defined]
    return function


_CHARACTERS, _DIGITS, _EXPONENT = 500, 1000, 1000


@inline
def calculator(expression: str) -> str:
    """Works out an arithmetic expression of numbers, + - * / // % ** and parentheses.

    Args:
        expression: Such as "(3 + 4) * 2 ** 10 / 7".
    """
    if len(expression) > _CHARACTERS:
        raise ValueError(f"expected at most {_CHARACTERS} characters, got {len(expression)}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    result = evaluated(tree.body, _OPERATORS)
    return _spelled(result) if isinstance(result, float) else str(result)


def _spelled(number: float) -> str:
    """Format with 15 digits, which any decimal keeps in a round trip; with 17 if only these are exact."""
    short, long = f"{number:.15g}", f"{number:.17g}"
    return long if float(short) != number and Decimal(long) == Decimal(number) else short


def _power(base: float, exponent: float) -> Any:
    if abs(exponent) > _EXPONENT or abs(base) > 10**_EXPONENT:
        raise ValueError(f"expected exponents of at most {_EXPONENT}")
    if isinstance(base, int) and isinstance(exponent, int):
        _expect_bits((base.bit_length() - 1) * exponent)  # a lower bound; computing the power would take long
    return base**exponent


def _bounded(operation: Callable[..., Any], *operands: float) -> int | float:
    value: Any = operation(*operands)
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int):
        _expect_bits(value.bit_length())
    return value  # type: ignore[no-any-return]


def _expect_bits(n: int) -> None:
    if n > _DIGITS * 4:
        raise ValueError("the result is too large")


_UNBOUNDED = {**OPERATORS, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power}
_OPERATORS = {kind: partial(_bounded, operation) for kind, operation in _UNBOUNDED.items()}


class Python:
    """Runs a Python program in a sandbox and returns its output.

    `sandbox`: `backend` and its options, as in `reward.sandbox`. Raises SandboxUnavailable if it cannot be opened.
    """

    def __init__(self, sandbox: Mapping[str, Any] | None = None) -> None:
        from creditflow.sandbox import open_sandbox

        self._box = open_sandbox(**dict(sandbox or {}))

    def __call__(self, code: str) -> str:
        """Runs a Python program on its own and gives what it prints. Nothing is kept from one run to the next.

        Args:
            code: The program; it must print what is wanted of it.
        """
        result = self._box.run(["python", "-"], stdin=code.encode("utf-8", "replace"))
        output = result.stdout.decode("utf-8", "replace")
        if result.limit is not None:
            return f"{output}\nerror: the program was stopped: more {result.limit} than it may use".lstrip()
        if result.exit_code != 0:
            return f"{output}\n{result.stderr.decode('utf-8', 'replace')}".strip() or f"exit code {result.exit_code}"
        return output or "(nothing was printed)"


READY_MADE: dict[str, Any] = {
    "calculator": calculator,
    "python": Python,
}
