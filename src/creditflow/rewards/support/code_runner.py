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

SOLUTION, PROGRAM, USUAL = "solution.py", "in_box.py", "usual.py"
MAX_CHARACTERS = 200_000
"""Maximum length of an answer."""
MAX_DEPTH = 50


def main() -> None:
    """Answer the question on standard input, on standard output; the solution's own output is discarded."""
    ask = json.loads(sys.stdin.buffer.read())
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        # Now: the solution may redefine what the modules of the tests hold.
        for name in ask.get("imports", ()):
            __import__(name)
        packages = {name.split(".")[0] for name in ask.get("imports", ())}
        modules = [module for name, module in sys.modules.items() if name.split(".")[0] in packages]
        classes = [thing for module in modules for thing in vars(module).values() if isinstance(thing, type)]
        kept = [(owner, dict(vars(owner))) for owner in (builtins, *modules, *classes)]
        with open(SOLUTION, encoding="utf-8") as file:  # noqa: PTH123 (importing pathlib takes 4 ms)
            source = file.read()
        with open(USUAL, encoding="utf-8") as file:  # noqa: PTH123
            exec(file.read(), usual := dict[str, object]())
        # Among the builtins: a name that the solution does not define must not be callable as one of its functions.
        vars(module)["__builtins__"] = {**vars(builtins), **usual}
        exec(compile(source, SOLUTION, "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        _tell(output, {"not_loaded": _described(error)})
    try:
        for owner, names in kept:
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        if "test" in ask:
            _run_test(ask, vars(module), kept[0][1], output)
            _tell(output, {})
        answer = {"value": encoded(_called(ask, vars(module)))}
    except BaseException as error:
        answer = {"raised": _described(error)}
    _tell(output, answer)


def encoded(value: object, depth: int = 0) -> Any:
    """Encode a value as JSON data. A value that is not plain data becomes `{"other": its type}`."""
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or value is True or value is False or type(value) in (int, float, str):
        return value
    if isinstance(value, list):
        return _encoded_items(value, depth + 1)
    for kind, plain in ((int, int), (float, float), (str, str.__str__)):  # a subclass
        if isinstance(value, kind):
            return plain(value)
    for name, (kinds, encode, _) in _FORMS.items():
        if isinstance(value, kinds):
            return {name: encode(value, depth + 1)}
    if type(value).__name__ in ("Fraction", "Decimal"):  # importing them to check takes 4 ms
        return {"ratio": value.as_integer_ratio()}  # type: ignore[attr-defined]
    return {"other": type(value).__name__[:80]}


def decoded(data: Any, depth: int = 0) -> Any:
    """Decode data from `encoded`, with plain types only; a value that was not plain data becomes an `OtherValue`.

    Raises ValueError, KeyError, TypeError or ArithmeticError for data that `encoded` never returns.
    """
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
    if isinstance(data, list):
        return _decoded_items(data, depth + 1)
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    return _FORMS[name][2](content, depth + 1)


class OtherValue:
    """A value that is not plain data; equal only to itself."""

    def __init__(self, name: str) -> None:
        self.name = name[:80]

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _encoded_items(values: Any, depth: int) -> list[Any]:
    return [encoded(value, depth) for value in values]


def _decoded_items(data: Any, depth: int) -> list[Any]:
    return [decoded(value, depth) for value in data]


_FORMS: dict[str, tuple[Any, Callable[[Any, int], Any], Callable[[Any, int], Any]]] = {
    "tuple": (tuple, _encoded_items, lambda data, depth: tuple(_decoded_items(data, depth))),
    "set": (set, _encoded_items, lambda data, depth: set(_decoded_items(data, depth))),
    "frozenset": (frozenset, _encoded_items, lambda data, depth: frozenset(_decoded_items(data, depth))),
    "dict": (
        dict,
        lambda value, depth: [_encoded_items(pair, depth) for pair in value.items()],
        lambda data, depth: dict(_decoded_items(pair, depth) for pair in data),
    ),
    "bytes": ((bytes, bytearray), lambda value, depth: value.hex(), lambda data, depth: bytes.fromhex(data)),
    "complex": (complex, lambda value, depth: [value.real, value.imag], lambda data, depth: complex(*data)),
    "ratio": ((), encoded, lambda data, depth: _fraction(*data)),
    "other": ((), encoded, lambda data, depth: OtherValue(str(data))),
}
"""Types by their names in JSON, with functions that encode and decode them. `encoded` itself makes the last two."""


def _fraction(numerator: int, denominator: int) -> Any:
    from fractions import Fraction

    return Fraction(numerator, denominator)


def _called(ask: dict[str, Any], names: dict[str, Any]) -> object:
    if "fn" in ask:
        method = getattr(names.get("Solution"), ask["fn"], None)
        function = names[ask["fn"]] if method is None else getattr(names["Solution"](), ask["fn"])
        return function(*ask["args"])
    scope = {**names, "__builtins__": builtins}
    return eval(compile(f"(\n{ask['call']}\n)", "call", "eval", dont_inherit=True), scope)


def _run_test(ask: dict[str, Any], names: dict[str, Any], own_builtins: dict[str, Any], output: int) -> None:
    """Run a program of tests, which reports each of its checks at once: a later one may end the process."""

    def report(check: int, fault: BaseException | None = None) -> None:
        described = "" if fault is None else _described(fault)[:100]
        line = json.dumps({"nonce": ask["nonce"], "check": check, "fault": described})
        os.write(output, line.encode() + b"\n")

    own = {"__builtins__": own_builtins, "__name__": "__main__", "__seen__": seen, "__report__": report}
    exec(compile(ask["test"], "test", "exec", dont_inherit=True), {**names, **own})


def seen(value: object, depth: int = 0) -> object:
    """Return the value; raise TypeError if it, or an item of it, is an object that claims to equal anything."""
    kind = type(value)
    if kind in _ATOMS or depth > MAX_DEPTH:
        return value
    if kind in (list, tuple, set, frozenset, dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:  # type: ignore[attr-defined]
            seen(item, depth + 1)
    elif _claims_anything(value):
        raise TypeError(f"an object that equals anything: {kind.__name__}")
    return value


_ATOMS = frozenset((int, float, str, bool, type(None), bytes, complex))


_CLAIMS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda value, other: value == other,
    lambda value, other: not value.__ne__(other),
    lambda value, other: value < other and value > other,
    lambda value, other: value <= other and value >= other,
    lambda value, other: type(value).__contains__(value, other),
    lambda value, other: value - other == value - 2 * other,
    lambda value, other: other - value == 2 * other - value,
)
"""Claims about a value that are false of nearly all others, if those are drawn at random."""


def _claims_anything(value: object) -> bool:
    """Whether one claim of the value holds for every one of 24 random numbers, or for every one of 24 random texts."""
    numbers = [int.from_bytes(os.urandom(9), "big") for _ in range(24)]
    return any(
        all(_holds(claim, value, other) for other in others)
        for others in (numbers, [f"{number:x}" for number in numbers])
        for claim in _CLAIMS
    )


def _holds(claim: Callable[[Any, Any], Any], value: object, other: object) -> bool:
    try:
        return bool(claim(value, other))
    except Exception:  # the value's own code: a comparison with other types may raise
        return False


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _tell(output: int, answer: dict[str, Any]) -> NoReturn:
    """Write the answer and exit at once, without waiting for the solution's threads and exit handlers."""
    text = json.dumps(answer)
    if len(text) > MAX_CHARACTERS:
        text = json.dumps({"raised": f"its value takes more than {MAX_CHARACTERS} characters"})
    with open(output, "w", encoding="ascii") as file:
        file.write(text)
    os._exit(0)


if __name__ == "__main__":
    main()
