"""Call a solution inside a box, with one question per run and without the expected answer.

Runs as a program beside `solution.py` and imports nothing of creditflow. It shares its process with the solution, so
its whole output is treated as the solution's. Values leave as JSON, since parsing JSON runs no code. Only a program of
tests, which runs here, contains its expected values.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types

TYPE_CHECKING = False  # importing typing takes 7 ms, which would be a third of a run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

STARTED = -1
"""The part that is reported before those of a program of tests."""
SOLUTION, PROGRAM, USUAL = "solution.py", "in_box.py", "usual.py"
MAX_DEPTH = 50
NAMES: dict[str, Any] = {}
"""The names that the tests see: those of the solution, and of what runs before it."""


def main() -> None:
    """Answer the question on standard input, on standard output; the solution's own output is discarded."""
    ask = json.loads(sys.stdin.buffer.read())
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        # Before the solution, which may redefine functions of these modules.
        for name in ask.get("imports", ()):
            __import__(name, fromlist=ask["names"])  # a module that is loaded when it is first used, too
        exec(ask.get("before", ""), NAMES)
        definitions = _definitions()
        # Importing pathlib takes 4 ms.
        imports, source = [open(name, encoding="utf-8").read() for name in (USUAL, SOLUTION)]  # noqa: PTH123, SIM115
        exec(imports, vars(module))
        usual = set(vars(module))
        vars(module).update(NAMES)
        try:
            exec(compile(source, SOLUTION, "exec", dont_inherit=True), vars(module))
        except NameError:
            # An annotation may name a class of the tests: load it again, and evaluate none.
            exec(compile(source, SOLUTION, "exec", annotations.compiler_flag, dont_inherit=True), vars(module))
    except BaseException as error:
        _tell(output, {"not_loaded": _described(error)})
    try:
        _restore(definitions)
        # A name that the solution does not define must not be callable as one of its functions. Its own functions
        # hide built-in ones only from tests that use no other name of the solution.
        modules = {name for name, value in NAMES.items() if isinstance(value, types.ModuleType)}
        hidden = usual.union(modules, vars(builtins) if ask.get("outside") else ())
        NAMES.update({"map": _map} | {name: value for name, value in vars(module).items() if name not in hidden})
        if "test" in ask:
            _run_test(ask, vars(module), definitions, output)
            _tell(output, {})
        answer = {"value": encoded(_called(ask))}
    except BaseException as error:
        answer = {"raised": _described(error)}
    _tell(output, answer)


_LONG = 10**4000
"""Python writes no numbers of more than 4300 digits."""
COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict)}
"""Types by their names in JSON; a list has none. A dict is sent as pairs."""


def encoded(value: object, depth: int = 0) -> Any:
    """Encode a value as JSON data. A value that is not plain data becomes `{"other": its text}`."""
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, complex) and not value.imag:
        value = value.real
    if value is None or value is True or value is False:
        return value
    for kind, plain in ((int, int), (float, float), (str, str.__str__)):  # subclasses, too
        if isinstance(value, kind) and not (isinstance(value, int) and abs(value) >= _LONG):
            return plain(value)
    for name, collection in COLLECTIONS.items():
        if isinstance(value, collection):
            pairs = value.items() if isinstance(value, dict) else value
            items = [encoded(item, depth + (name != "dict")) for item in pairs]
            return items if name == "list" else {name: items}
    if isinstance(value, int):
        return {"hex": hex(value)}
    if type(value).__name__ in ("Fraction", "Decimal"):  # importing them to check takes 4 ms
        return {"ratio": value.as_integer_ratio()}  # type: ignore[attr-defined]
    return {"other": repr(value)[:80]}


def decoded(data: Any, depth: int = 0) -> Any:
    """Decode data of `encoded`; a value that was not plain data becomes an `OtherValue`.

    Raises ValueError, TypeError or ArithmeticError for data that `encoded` never returns.
    """
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
    if not isinstance(data, dict | list):
        return data
    ((kind, content),) = data.items() if isinstance(data, dict) else [("list", data)]
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](decoded(item, depth + (kind != "dict")) for item in content)
    if kind == "hex":
        return int(content, 16)  # type: ignore[arg-type]  # another type raises TypeError
    if kind == "ratio":
        from fractions import Fraction

        return Fraction(*content)
    return OtherValue(content)


class OtherValue:
    """A value that is not plain data; equal only to itself."""

    def __init__(self, text: object) -> None:
        self.text = str(text)

    def __repr__(self) -> str:
        return self.text


def _called(ask: dict[str, Any]) -> object:
    sys.setrecursionlimit(max(50_000, sys.getrecursionlimit()))  # as in LiveCodeBench
    if "call" in ask:
        return eval(compile(f"(\n{ask['call']}\n)", "call", "eval", dont_inherit=True), NAMES)
    is_method = hasattr(NAMES.get("Solution"), ask["fn"])
    function = getattr(NAMES["Solution"](), ask["fn"]) if is_method else NAMES[ask["fn"]]
    return function(*decoded(ask["args"]))


class _Loaded:
    """An object whose attributes are the loaded modules."""

    def __init__(self) -> None:
        self.__dict__ = sys.modules


def _definitions() -> list[tuple[Any, Any, str, Any, Any]]:
    """The loaded modules, their parts, and those of their classes: owner, its names, name, value, code."""
    modules = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    classes = {id(thing): thing for module in modules for thing in vars(module).values() if isinstance(thing, type)}
    return [part for owner in (*modules, *classes.values(), _Loaded()) for part in _parts(owner)]


def _parts(owner: Any) -> list[tuple[Any, Any, str, Any, Any]]:
    """The functions, classes and modules in an owner; for a unittest case, None for each part that it inherits."""
    own = vars(owner)
    inherited = set(dir(owner)).difference(own) if hasattr(owner, "assertEqual") else ()
    return [(owner, own, name, None, None) for name in inherited] + [
        (owner, own, name, value, value.__code__ if isinstance(value, types.FunctionType) else None)
        for name, value in own.items()
        if callable(value) or isinstance(value, classmethod | property | types.ModuleType)
    ]


def _restore(definitions: list[tuple[Any, Any, str, Any, Any]]) -> list[str]:
    """Restore redefined functions, classes and modules, and return their names."""
    names = []
    sys.settrace(None)  # a trace function can jump over assertions
    for owner, own, name, value, code in definitions:
        if own.get(name) is not value or (code is not None and value.__code__ is not code):
            names.append(name)
            delattr(owner, name) if value is None else setattr(owner, name, value)
            if code is not None:
                value.__code__ = code
    return names


class Exit(SystemExit):
    """An exit of the tests, as opposed to one of the solution."""


def _run_test(ask: dict[str, Any], solution: dict[str, Any], definitions: list[Any], output: int) -> None:
    """Run a program of tests, which reports each of its tests at once: a later one may end the process."""

    def report(part: int, fault: str = "") -> None:
        # Only what the solution changes is undone; the tests' own changes must reach it.
        if redefined := _restore([part for part in definitions if part[2] not in ask["stored"]]):
            fault = f"the solution redefines {min(redefined)}"
        os.write(output, json.dumps({"nonce": ask["nonce"], "part": part, "fault": fault[:100]}).encode() + b"\n")

    def leave(code: object = None) -> NoReturn:
        exits.append(Exit(code))
        raise exits[-1]

    exits: list[Exit] = []
    report(STARTED)
    scope = dict(NAMES, __name__="__main__", __seen__=seen, __leave__=leave, __passes__=passes, __whole__=WHOLE)
    try:
        for part, (source, is_test) in enumerate(ask["test"]):
            fault = ""
            try:
                exec(compile(source, "test", "exec", dont_inherit=True), scope)
            except BaseException as error:
                if not is_test:
                    raise
                fault = _described(error)
            if is_test:
                report(part, fault)
            for name, thing in scope.items():
                if isinstance(thing, type) and hasattr(thing, "assertEqual"):
                    definitions += _parts(thing)
                elif isinstance(thing, type) and name not in vars(builtins):
                    solution.setdefault(name, thing)
    except Exit as exit:
        if exit.code or not any(exit is own for own in exits):
            raise
    report(len(ask["test"]))


def passes(case: Any) -> bool:
    """Run a unittest case: whether each of its tests reported a success, except those that the case itself skips.

    Raises AssertionError with the first test that fails.
    """
    import unittest

    result, passed = unittest.TestResult(), list[object]()
    vars(result).update(addSuccess=passed.append, addExpectedFailure=lambda test, _: passed.append(test))
    suite, mark = unittest.defaultTestLoader.loadTestsFromTestCase(case), "__unittest_skip__"
    runs = [t for t in suite if not (hasattr(t, mark) or hasattr(getattr(t, vars(t)["_testMethodName"]), mark))]
    suite.run(result)
    for test, trace in result.failures + result.errors:
        raise AssertionError(f"{test}: {trace.splitlines()[-1]}")
    return len(passed) == len(runs) > 0


class Whole:
    """The body of a test. It fails unless it reaches its end: test frameworks pass over some exceptions."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and kind not in (AssertionError, Exit):
            raise AssertionError(_described(error)) from error


WHOLE = Whole()


def _map(function: Any, *columns: Any) -> Any:
    """A `map` that a StopIteration of the function does not end."""
    return (function(*row) for row in zip(*columns, strict=False))


def seen(value: object, depth: int = 0) -> object:
    """Return the value; raise TypeError if it, or an item of it, is an object that equals or contains anything."""
    kind = type(value)
    if kind in COLLECTIONS.values() and depth < MAX_DEPTH:
        for item in [*value, *value.values()] if isinstance(value, dict) else value:  # type: ignore[attr-defined]
            seen(item, depth + 1)
    elif _FLAGS(kind) & _DEFINED and _claims_anything(value):
        raise TypeError(f"an object that equals or contains anything: {kind.__name__}")
    return value


_FLAGS: Callable[[type], int] = type.__dict__["__flags__"].__get__
_DEFINED = 1 << 9
"""Set in the flags of types that a program defines. Operators of built-in types, and of numpy's, are honest."""
_CLAIMS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda value, other: value == other,
    lambda value, other: not value.__ne__(other),
    lambda value, other: value < other and value > other,
    lambda value, other: value <= other and value >= other,
    lambda value, _: type(value).__contains__(value, [object()]),  # an interval may contain all numbers
    # Every difference of a MagicMock is one mock, whose size has no order.
    lambda value, other: value - other == value - 2 * other and getattr(value - other, "__abs__", int)() < float("inf"),
    lambda value, other: other - value == 2 * other - value and getattr(other - value, "__abs__", int)() < float("inf"),
)
"""Claims about a value that are false of nearly all others."""


def _claims_anything(value: object) -> bool:
    """Whether a claim of the value holds for all of some numbers of one size, texts of one length, or collections."""
    numbers = [int.from_bytes(os.urandom(9), "big") | 1 << 70 for _ in range(24)]
    families: list[list[Any]] = [[number % size + size for number in numbers] for size in (10, 1000, 10**5, 1 << 80)]
    families += [[f"{number:x}"[-length:] for number in numbers] for length in (1, 4, 18)]
    wraps: tuple[Any, ...] = (float, lambda n: [n], lambda n: (n,), lambda n: {n}, lambda n: {n: n})
    families += [[True, False], *([wrap(number % 1000) for number in numbers] for wrap in wraps)]
    for claim in _CLAIMS:
        for others in families:
            try:
                if all(claim(value, other) for other in others):
                    return True
            except Exception:  # the value's own code: a comparison with other types may raise
                pass
    return False


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _tell(output: int, answer: dict[str, Any]) -> NoReturn:
    """Write the answer and exit at once, without waiting for the solution's threads and exit handlers."""
    with open(output, "w", encoding="ascii") as file:
        file.write(json.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    main()
