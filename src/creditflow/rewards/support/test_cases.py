"""Tests of programs: read the formats of public data sets, and check a program's output against its tests.

Tests come from the data set or from a model. Assertions run in the box as the program that their author wrote; the
expected results of all other tests stay outside of it.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import symtable
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

from creditflow.errors import json_fault
from creditflow.rewards.support.code_runner import decoded, encoded
from creditflow.rewards.support.usual_names import usual_imports, usual_names

MAX_TEST_CHARACTERS = 1_000_000
"""Limit for a test that is Python code; public tests with long inputs have up to some 100,000."""
REL_TOL, ABS_TOL = 1e-6, 1e-9
_SHOWN = 60


def _in_json(key: object) -> str:
    return json.dumps(key) if key is None or isinstance(key, bool) else str(key)


def alike(value: Any, expected: Any) -> bool:
    """Whether a value equals an expected one: lists equal tuples, and a text equals one key that JSON writes so.

    Decimals are compared within 1e-6 (relative) or 1e-9 (absolute).
    """
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(alike, value, expected))
    if isinstance(expected, Mapping) and isinstance(value, dict) and len(value) == len(expected):
        named = {key if key in expected else _in_json(key): item for key, item in value.items()}
        return named.keys() == expected.keys() and all(alike(named[key], expected[key]) for key in expected)
    if isinstance(value, float) or isinstance(expected, float):
        with suppress(TypeError, OverflowError):
            are_nan = value != value and expected != expected  # noqa: PLR0124
            if are_nan or math.isclose(value, expected, rel_tol=REL_TOL, abs_tol=ABS_TOL):
                return True
    return bool(value == expected)


class InputOutput(NamedTuple):
    """A script that must print `output` when given `input`."""

    input: str
    output: str

    def stdin(self, nonce: str) -> bytes:
        """Standard input of the program."""
        return self.input.encode(errors="replace")

    def fault(self, stdout: bytes, nonce: str) -> str:
        """Compare line by line as text: `2.0` differs from `2`. White space at the end of lines is ignored."""
        for i, (expected, got) in enumerate(zip_longest(*map(_lines, (self.output, stdout.decode(errors="replace"))))):
            if expected != got:
                return f"wrong answer in line {i}: expected {shown(expected)}, got {shown(got)}"
        return ""


class CaseCall(NamedTuple):
    """A call of the solution; its value is checked outside of the box."""

    ask: Mapping[str, Any]
    """`fn` and `args`; or `call`, the Python source of the call."""
    accepted: Sequence[Any]
    """The expected value, and others that pass as well."""
    same: Callable[[Any, Any], bool] = alike

    def stdin(self, nonce: str) -> bytes:
        """The question to the calling program."""
        return json.dumps(dict(self.ask)).encode()

    def fault(self, stdout: bytes, nonce: str) -> str:
        """The fault, if the value cannot be read or fails the check."""
        answer = _answers(stdout)[-1]
        if "value" not in answer:
            return _no_answer(answer)
        try:
            value = decoded(answer["value"])
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            return UNREAD
        with suppress(TypeError, ArithmeticError, RecursionError):
            if any(self.same(value, expected) for expected in self.accepted):
                return ""
        return f"wrong answer: expected {shown(self.accepted[0])}, got {shown(value)}"


class TestProgram(NamedTuple):
    """A test of a program that runs inside the box, beside the solution; each report is proved by the nonce."""

    ask: Mapping[str, Any]
    """The program, for the runner; see `read_program`."""
    reports: Sequence[int]
    """Indices of the parts that must be reported to have passed; the number of parts means the end of the program."""

    def stdin(self, nonce: str) -> bytes:
        """The program, with the nonce that proves its reports."""
        return json.dumps({**self.ask, "nonce": nonce}).encode()

    def fault(self, stdout: bytes, nonce: str) -> str:
        """The fault of the first part that failed, or that was never reported."""
        answers = _answers(stdout)
        faults = {str(answer.get("part")): answer.get("fault") for answer in answers if answer.get("nonce") == nonce}
        for part in map(str, self.reports):
            if part not in faults:
                return _no_answer(answers[-1])
            if faults[part]:
                return f"raised: {str(faults[part])[:100]}"
        return ""


Case = InputOutput | CaseCall | TestProgram
"""A test of a program: its input, and a check of its output, which returns the fault or an empty text.
"""


UNREAD, NOT_LOADED = "its answer cannot be read", "cannot be loaded"
"""The second begins the fault of a solution that reports so itself: no test can pass."""


def shown(value: object) -> str:
    """Short text of a value, for a reason."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().replace("\r\n", "\n").split("\n")]


@lru_cache(maxsize=1)
def _answers(stdout: bytes) -> list[dict[str, Any]]:
    """Parse the output of the calling program. It is hostile input: the solution can write it too."""
    with suppress(ValueError, RecursionError):
        answers = [json.loads(line) for line in stdout.splitlines()]
        if all(isinstance(answer, dict) for answer in answers):
            return answers or [{}]
    return [{"unread": ""}]


def _no_answer(answer: Mapping[str, Any]) -> str:
    kinds = (("not_loaded", f"{NOT_LOADED}: "), ("raised", "raised: "), ("unread", UNREAD))
    faults = (f"{what}{str(answer[kind])[:100]}" for kind, what in kinds if kind in answer)
    return next(faults, "ended before it answered")


# Reading


def read_tests(truth: Any) -> tuple[Case, ...]:
    """Parse the tests in a ground truth, given as JSON text or as the decoded value.

    Accepted are:
    * `{"inputs": [...], "outputs": [...]}` (APPS, TACO, verl), and a list of `{"input": ..., "output": ...}`
      (LiveCodeBench, DeepCoder, SYNTHETIC-1, there under `test_cases`). They are scripts, or calls of a function if one
      is named: by `fn_name`, `func_name` or `metadata.func_name`. `testtype` or `type` may name the kind;
    * a list of `{"call": "f(2, 3)", "expect": 5}`, and of texts of Python code, each of which is a test (MBPP, there
      under `test_list`);
    * one text of Python code (`read_program`); `{"test": ..., "entry_point": ...}` is HumanEval's, where `prompt` may
      hold imports and helpers.
    Raises ValueError for anything else, and if there is no test.
    """
    if isinstance(truth, str):
        with suppress(ValueError, RecursionError):
            truth = json.loads(truth)
    if isinstance(truth, str):
        return read_program(truth)
    if isinstance(truth, Mapping) and {"test", "entry_point"} <= truth.keys():
        check = re.search(r"(?m)^def (check(?=\()|\w+(?=\(candidate\b))", str(truth["test"]))
        call = f"{check[1]}({truth['entry_point']})" if check else ""
        return read_program(f"{truth['test']}\n\n{call}\n", _before_entry(truth))
    truth = _listed(truth) if isinstance(truth, Mapping) else truth
    if not isinstance(truth, Sequence) or not truth:
        raise ValueError(f"expected tests, got {shown(truth)}")
    tests: list[Case] = []
    for i, test in enumerate(truth):
        try:
            tests.append(_of_one(test))
        except ValueError as error:
            raise ValueError(f"test {i}: {json_fault(error)}") from error
    if all(isinstance(test, InputOutput) and not test.output.strip() for test in tests):
        raise ValueError("expected a test with an output, got empty ones, which any program passes")
    return tuple(tests)


def _before_entry(truth: Mapping[str, Any]) -> str:
    """The imports, constants and helpers in a row's `prompt`, before its entry point; empty without Python."""
    name = re.match(r"\w*", str(truth["entry_point"]))[0]  # type: ignore[index]
    before = re.split(rf"(?m)^(?:async )?(?:def|class) {name}\b", str(truth.get("prompt") or ""))[0]
    with suppress(ValueError):
        return "\n".join(ast.unparse(node) for node in parsed(before)[0].body if not isinstance(node, ast.Expr))
    return ""


def _listed(truth: Mapping[str, Any]) -> list[Any]:
    """The tests of an object that holds a list of them, or columns of inputs and outputs."""
    if isinstance(truth.get("test_list"), list):
        before = "\n".join(map(str, [*(truth.get("test_imports") or []), truth.get("test_setup_code") or ""]))
        return [f"{before}\n{test}" for test in truth["test_list"]]
    if isinstance(truth.get("test_cases"), list):
        if str(truth.get("language") or "python").lower() not in ("python", "python3"):
            raise ValueError(f"expected tests of Python programs, got language {shown(truth['language'])}")
        return list(truth["test_cases"])
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"expected as many inputs as outputs, test_list or test_cases, got keys {shown([*truth])}")
    return [{**truth, "input": before, "output": after} for before, after in zip(inputs, outputs, strict=True)]


_SCRIPTS = frozenset(("stdin", "stdin_stdout", "standard_input"))
_FUNCTIONS = frozenset(("functional", "function_call", "call_based"))


def _of_pair(test: Mapping[str, Any], test_input: Any, expected: Any) -> Case:
    """A pair of input and output; `test` says whether a script reads it, or a function gets it as its arguments."""
    metadata = test.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = test.get("fn_name") or test.get("func_name") or metadata.get("func_name") or metadata.get("fn_name")
    kind = test.get("testtype") or test.get("type") or ("functional" if name else "stdin")
    if kind in _SCRIPTS:
        return InputOutput(_joined(test_input), _joined(expected))
    if kind not in _FUNCTIONS:
        raise ValueError(f"expected a test of type {', '.join(sorted(_SCRIPTS | _FUNCTIONS))}, got {shown(kind)}")
    if not name:
        raise ValueError(f"expected the function's name (fn_name, or metadata.func_name) of a {kind} test, got none")
    return _of_fn(str(name), test_input, expected)


def _joined(text: Any) -> str:
    lines = text if isinstance(text, list) else [text]
    if not all(isinstance(line, str | int | float) and line == line for line in lines):  # noqa: PLR0124 (NaN)
        raise ValueError(f"expected the input and output of a test as text, got {shown(text)}")
    return "\n".join(map(str, lines))


def _of_fn(name: str, arguments: Any, expected: Any) -> Case:
    if isinstance(arguments, str):  # LiveCodeBench, verl: JSON, one argument per line
        arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    if not isinstance(arguments, list):
        raise ValueError(f"expected the arguments of {name} as a list, or as lines of JSON, got {shown(arguments)}")
    expected = decoded(_plain(expected))
    # APPS and SYNTHETIC-1 wrap most values in a list of one.
    accepted = (expected, *expected) if isinstance(expected, list) and len(expected) == 1 else (expected,)
    return CaseCall({"fn": name, "args": _plain(arguments)}, accepted)


def _plain(value: Any) -> Any:
    """The value in JSON. Raises ValueError if no solution's value could equal it: a date, bytes."""
    data = encoded(value)
    if other := re.search(r'\{"other": ("[^"]*")', json.dumps(data)):
        raise ValueError(f"expected numbers, texts and collections of them, got {other[1]}")
    return data


def _of_one(test: Any) -> Case:
    if isinstance(test, str):
        return whole_program(read_program(test)[0].ask)
    if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
        return _of_pair(test, test["input"], test["output"])
    if isinstance(test, Mapping) and {"call", "expect"} <= test.keys():
        ask = {"call": str(test["call"]), **_names(*parsed(str(test["call"])))}
        return CaseCall(ask, (decoded(_plain(test["expect"])),))
    raise ValueError(f"expected input and output, call and expect, or Python code, got {shown(test)}")


# Programs of tests


@lru_cache(maxsize=256)
def read_program(text: str, before: str = "") -> tuple[TestProgram, ...]:
    """Parse Python code into tests: its assertions outside of functions, or else the whole program up to its end.

    Functions `test...()` and unittest's cases are called at the end, and count as assertions. Test functions with
    parameters and classes `Test...` are pytest's, which runs the whole text as one test. A program that calls `exit` is
    one test, too; it also passes by exiting with 0. `before` runs before the solution, which may use its names.
    Raises ValueError if the text is no Python.
    """
    if not 0 < len(text.strip()) <= MAX_TEST_CHARACTERS:
        raise ValueError(f"expected a test of one to at most {MAX_TEST_CHARACTERS} characters, got {len(text)}")
    # The tests see the names that they use; others may be hooks of a test framework.
    tree, outside = parsed(re.sub(r"(?m)^from solution import \*", "pass", text))
    names = _names(tree, outside, before)
    if any(isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) for node in ast.walk(tree)):
        raise ValueError(f"expected assertions that can fail, got one of a tuple in {shown(text)}")
    runs_all = {"unittest.main", "pytest.main", *re.findall(r"from (?:unittest|pytest) import .*\b(main)\b", text)}
    tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS) or not _calls(node) & runs_all]
    called = {name for node in tree.body if not isinstance(node, DEFINITIONS) for name in _calls(node)}
    runs = [run for node in tree.body if (run := _run_of(node, called)) is not None]
    nodes, whole = list(ast.walk(tree)), ast.withitem(ast.Name("__whole__", ast.Load()))
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.With) and _TEST.match(ast.unparse(node)):
            node.body = [ast.copy_location(ast.With([whole], node.body), node)]
    if "" in runs:
        tree = ast.parse(_PYTEST.format(source=_NAMES % sorted(outside) + ast.unparse(_Seen().visit(tree))))
    else:
        tree.body += ast.parse("\n".join(runs)).body
    exits = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in _EXITS]
    for node in exits:
        node.func = ast.Name("__leave__", ast.Load())
    aliases = [(node, alias.name) for node in nodes if isinstance(node, _IMPORTS) for alias in node.names]
    modules = {getattr(node, "module", name) for node, name in aliases if not getattr(node, "level", 0)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    stored = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    raises = exits or any(isinstance(node, ast.Assert | ast.Raise) for node in nodes) or _FAILS.search(text)
    parts: list[tuple[str, bool]] = []
    ask = {
        "test": parts,
        "stub": "raise NotImplementedError" if raises and "except AssertionError" not in text else "return object()",
        **names,
        "imports": sorted(name for name in modules if name.split(".")[0] not in _OURS),
        "names": sorted({name for _, name in aliases} | {node.attr for node in attributes}),
        "stored": sorted(stored.union(_STORES.findall(text))),
    }
    for kind, group in groupby(_Seen().visit(tree).body, type):
        sources = [ast.unparse(ast.fix_missing_locations(node)) for node in group]
        is_test = kind is ast.Assert and not exits
        parts += [(source, True) for source in sources] if is_test else [("\n".join(sources), False)]
    tests = [i for i, (_, is_test) in enumerate(parts) if is_test] or [len(parts)]
    return tuple(TestProgram(ask, (i, len(parts)) if i == tests[-1] else (i,)) for i in tests)


def _names(tree: ast.AST, outside: set[str], before: str = "") -> dict[str, Any]:
    """The names in a test that the solution defines, and the code that runs before the solution.

    Usual modules are imported. So are other usual names, unless a test uses no name but them: they are the solution's.
    """
    bases = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {name: f"import {name}" for name in outside}
    rest = {name for name in outside if usual_names().get(name) != modules[name] or name not in bases}
    own = {name for name in rest if usual_names().get(name, modules[name]) == modules[name]} or rest
    return {"outside": sorted(own), "before": usual_imports(outside - own) + before}


def whole_program(ask: Mapping[str, Any]) -> TestProgram:
    """All tests of a program as one."""
    return TestProgram(ask, (*[i for i, (_, is_test) in enumerate(ask["test"]) if is_test], len(ask["test"])))


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_OURS = ("solution", "__main__", "__future__")
_TEST = re.compile(r"(?:@(?!.*(?:xfail|expectedFailure)).*\n)*(?:async )?def test|with .*subTest")
"""The beginning of a function or a part that is a test, and is not expected to fail."""
_STORES = re.compile(r"(?:(?:patch|setattr)[\w.]{0,30}\([^'\"]{0,80}|\[)['\"](?:[\w.]{1,200}\.)?(\w+)['\"]")
"""A name that tests may replace with `patch` or `setattr`, or as a key: `sys.modules["math"] = ...`."""
_FAILS = re.compile(r"\b(?:assert|raises|fail)\w*\(")
_EXITS = {"sys.exit", "os._exit", "exit", "quit", "SystemExit"}
_NAMES = "from __main__ import NAMES as __names__, WHOLE as __whole__, seen as __seen__\n"
_NAMES += "globals().update({name: __names__[name] for name in %s if name in __names__})\n"
_PYTEST = """
import os, pytest
os.environ.update(PYTEST_ADDOPTS="", PYTEST_PLUGINS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
open("test_solution.py", "w", encoding="utf-8").write({source!r})
class Unfinished(set):
    __hash__ = object.__hash__  # pytest up to 9.0 keeps plug-ins in a set
    def pytest_exception_interact(self, node, call):
        self.reason = node.name + ": " + call.excinfo.exconly(tryshort=True)
    def pytest_collection_finish(self, session):
        self.update(item.nodeid for item in session.items)
    def pytest_runtest_logreport(self, report):
        is_marked = {{"skip", "skipif", "xfail"}} & set(report.keywords)
        self -= {{report.nodeid}} if is_marked or (report.passed and report.when == "call") else set()
options = ["-q", "-x", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "test_solution.py"]
assert pytest.main(options, [unfinished := Unfinished()]) == 0 and not unfinished, getattr(unfinished, "reason", "")
"""


def parsed(code: str) -> tuple[ast.Module, set[str]]:
    """The tree of Python code, and the names that it neither defines nor imports, without Python's own.

    Raises ValueError for anything but Python.
    """
    try:
        tree, tables = ast.parse(code), [symtable.symtable(code, "code", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"expected tests, got neither JSON nor Python ({error}): {shown(code)}") from error
    used, own = set[str](), {*vars(builtins), "__file__"}
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is tables[0] or symbol.is_global():
                used |= {symbol.get_name()} if symbol.is_referenced() else set()
                own |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return tree, used - own


def _calls(node: ast.AST) -> set[str]:
    return {ast.unparse(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}


def _run_of(node: ast.stmt, called: set[str]) -> str | None:
    """The assertion that runs a test function or a case; an empty text for a test of pytest's; None for no test."""
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in node.bases):
        return f"import unittest\nassert __passes__({node.name})"
    if not isinstance(node, DEFINITIONS) or not node.name.startswith(("test", "Test")) or node.name in called:
        return None
    if isinstance(node, ast.ClassDef) or node.args.args or node.decorator_list:
        return ""
    run = f"asyncio.run({node.name}())" if isinstance(node, ast.AsyncFunctionDef) else f"{node.name}()"
    return f"import asyncio\nassert str({run}) != 'False'"


class _Seen(ast.NodeTransformer):
    """Let the runner see every value that a call returns, and every operand of a comparison."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_own = isinstance(node.func, ast.Name) and node.func.id in ("__leave__", "super")
        return node if is_own else _seen(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = node.msg or ast.Constant(ast.unparse(node.test)[:_SHOWN])
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        node.left, *node.comparators = map(_seen, (node.left, *node.comparators))
        return node


def _seen(node: ast.expr) -> ast.expr:
    is_plain = isinstance(node, ast.Constant) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "__seen__")
    return node if is_plain else ast.Call(ast.Name("__seen__", ast.Load()), [node], [])
