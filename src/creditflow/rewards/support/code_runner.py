"""Call a solution inside a box, with one question per run and without the expected answer.

Runs as a program beside `solution.py` and imports nothing of creditflow. It shares its process with the solution, so
its whole output is treated as the solution's. Values leave as JSON, since parsing JSON runs no code. Only a test that
is run here as an assertion contains its expected value.
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

SOLUTION, PROGRAM = "solution.py", "in_box.py"
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
        with open(SOLUTION, encoding="utf-8") as file:  # noqa: PTH123 (importing pathlib takes 4 ms)
            source = file.read()
        code = compile(source, SOLUTION, "exec", dont_inherit=True)
        # Among the builtins: a name that the solution does not define must not be callable as one of its functions.
        vars(module)["__builtins__"] = {**vars(builtins), **_usual_names(code)}
        exec(code, vars(module))
    except BaseException as error:
        _tell(output, {"not_loaded": _described(error)})
    try:
        answer = _answered(ask, vars(module))
    except BaseException as error:
        answer = {"raised": _described(error)}
    _tell(output, answer)


_USUAL = {
    "typing": "Any Callable Deque DefaultDict Dict FrozenSet Generator Generic Hashable Iterable Iterator List Literal "
    "Mapping NamedTuple Optional OrderedDict Sequence Set Tuple Type TypeVar Union",
    "json": "dumps loads",
    "sys": "maxsize setrecursionlimit stdin stdout",
    "io": "StringIO",
    "operator": "add and_ attrgetter eq floordiv ge gt itemgetter le lt methodcaller mul ne neg or_ sub truediv xor",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "itertools": "accumulate batched chain combinations combinations_with_replacement compress count cycle dropwhile "
    "filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "statistics": "mean median mode pstdev pvariance stdev variance",
    "random": "choice choices randint random randrange sample shuffle uniform",
    "math": "acos asin atan atan2 ceil comb copysign cos degrees dist e exp fabs factorial floor fmod fsum gcd "
    "hypot inf isclose isfinite isinf isnan isqrt lcm log log10 log1p log2 modf nan perm pi prod radians sin sqrt tan "
    "tau trunc",
    "copy": "copy deepcopy",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "datetime": "date datetime time timedelta timezone",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "re": "compile findall finditer fullmatch match search split sub",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits octdigits printable punctuation "
    "whitespace",
}
"""Names that LeetCode and LiveCodeBench import for every solution; the first module that has a name is used."""


def _usual_names(code: types.CodeType) -> dict[str, object]:
    """The usual names and modules that occur in the code; importing all of them would take longer than a run."""
    used: set[str] = set()
    left = [code]
    while left:
        block = left.pop()
        used.update(block.co_names)
        left += [inner for inner in block.co_consts if isinstance(inner, types.CodeType)]
    imports: dict[str, object] = {}
    for module, names in _USUAL.items():
        needed = [
            name for name in names.split() if name in used and name not in imports and not hasattr(builtins, name)
        ]
        if module in used or needed:
            imported = __import__(module)
            imports.update({name: getattr(imported, name) for name in needed if hasattr(imported, name)})
            if module in used:
                imports.setdefault(module, imported)
    return imports


def encoded(value: object, depth: int = 0) -> Any:
    """Encode a value as JSON data. A value that is not plain data becomes `{"other": its type}`."""
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
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


def _answered(ask: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    if "fn" in ask:
        method = getattr(names.get("Solution"), ask["fn"], None)
        function = names[ask["fn"]] if method is None else getattr(names["Solution"](), ask["fn"])
        return {"value": encoded(function(*ask["args"]))}
    scope = {**names, "__builtins__": builtins}
    if "assert" in ask:
        scope.update({name: _plainly(value) for name, value in names.items() if _is_function(name, value)})
    exec(compile(ask.get("setup", ""), "setup", "exec", dont_inherit=True), scope)
    if "assert" in ask:
        exec(compile(ask["assert"], "test", "exec", dont_inherit=True), scope)
        return {"nonce": ask["nonce"]}
    return {"value": encoded(eval(compile(f"(\n{ask['call']}\n)", "call", "eval", dont_inherit=True), scope))}


_EMPTY: dict[str, int] = {}
_ITERATORS = (
    *(types.GeneratorType, types.CoroutineType, range, map, filter, zip, enumerate, reversed),
    *(type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items())),
)
"""Types that yield items and cannot be equal to everything."""


def _is_function(name: str, value: object) -> bool:
    return callable(value) and not isinstance(value, type) and not name.startswith("__")


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function so that it returns plain data only: other objects could claim to equal anything."""

    def called(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if type(value) in _ITERATORS:
            return value
        plain = decoded(encoded(value))
        if isinstance(plain, OtherValue):
            raise TypeError(f"a value that is plain data was expected, {plain.name} came")
        return plain

    return called


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
