"""The ready-made reward for programs: the share of tests that the code in a response passes, in a sandbox.

This module extracts the code and runs the tests. `support.test_cases` parses and checks tests; `sandbox` runs programs.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import symtable
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from creditflow._utils.sections import expected
from creditflow.data import Score
from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support import code_runner, test_cases
from creditflow.rewards.support.arguments import Above0, Whole, WholeAbove0, check_arguments
from creditflow.rewards.support.fences import blocks_in, indentation
from creditflow.rewards.support.test_cases import Case, InputOutput, TestProgram, parsed, read_tests, whole_program
from creditflow.rewards.support.text import without_thoughts
from creditflow.rewards.support.usual_names import usual_imports, usual_names
from creditflow.sandbox import Result, Sandbox, open_sandbox

MAX_CODE_CHARACTERS = 50_000
"""Longer code passes no test."""
MAX_TEXT_CHARACTERS = 400_000
"""Number of characters read, counted from the end of a response."""
SECONDS = 5.0
"""Default time limit of a test, if neither the entry nor `reward.sandbox` sets one."""
OUTPUT_BYTES, MIN_OUTPUT, OUTPUT_RATIO = 16_000_000, 200_000, 10
"""Default limit of a test's output. The sum of the second, and the third times the expected size, is wrong unread."""
Indices = Annotated[Annotated[Sequence[Whole], Field(min_length=1)] | None, expected("a list of indices from 0")]
_CANDIDATES = 20
"""Number of blocks that are tried as programs, from the last."""
_MARKS, _REASON_CHARACTERS = 40, 300


class CaseVerdict(NamedTuple):
    """Result of one test of a program."""

    passed: bool
    reason: str = ""
    """Reason for the failure; may contain output of the program."""


@builtin
@answer(name="code_tests", timeout=120.0, read_truth=read_tests)
class CodeTests:
    """The share of tests that the code in the text passes, in a sandbox; the reason lists them and the first fault.

    The code is the last Python block, outside of thoughts, that defines the names in the tests (`code_in`). For scripts
    with input it is the last block that reads input and prints. The truth holds the tests, as JSON text or decoded
    (`creditflow.rewards.support.test_cases.read_tests`), in one of three forms:

    * `{"inputs": [...], "outputs": [...]}`, or a list of `{"input": ..., "output": ...}`: scripts that read and print,
      as in APPS, TACO, verl and LiveCodeBench. Output is compared line by line as text, except white space at the end
      of lines: numbers must be printed exactly as expected. With `fn_name`, `func_name` or `metadata.func_name`, the
      tests are calls of that function (or of that method of a class Solution) with JSON arguments.
    * a list of `{"call": "f(2, 3)", "expect": 5}`. Values are compared with a tolerance (1e-6 relative, 1e-9 absolute,
      at any depth), and lists equal tuples.
    * Python code: a list of texts, each of which is a test, as in MBPP (`test_list`); or one text, whose assertions
      outside of functions are the tests, or else the whole program, as in HumanEval (`test`, `entry_point`). It runs as
      a program beside the solution, and values are compared by Python itself.

    Code that is called, as opposed to a script, and its tests may use the names in `USUAL_MODULES` without an import:
    `List`, `deque`, `inf`.

    `sandbox`: `backend` (default `auto`) and its options; default: `reward.sandbox`. The sandbox is opened when the
    recipe is loaded, so that an unusable one is reported then.
    `only`: Indices of the tests that count, so that each can be a separate score; default: all.
    `max_tests`: Number of tests that count, from the first; default: all.
    `seconds`: Wall and CPU time of each test; default: the sandbox's `wall_s` and `cpu_s`, else 5.
    `total_seconds`: Time after which no further test is started; the remaining tests fail. Including the last test, it
    must end before the function's time-out (120 s), which would mask the score of a slow program.
    `all_or_nothing`: 1 if every test passed, else 0.

    Each test is a fresh run. A program that raises, exits, exceeds a limit or leaves no answer fails that test; a
    program that reports that it cannot be loaded fails all. Code of more than 50,000 characters passes nothing.

    Expected results of the first two forms never enter the box: output and values are compared outside, after being
    read as text or JSON. Python code runs in the box, next to the code that it judges. A test passes if it reaches its
    end, which is proved by a word that is new in every run; an object that claims to equal anything fails it, and so
    does a function that the solution redefines. Code that searches its own process for that word can find it.

    Range: 0 to 1. Cost: one run of Python in the sandbox per test; 25 ms with bubblewrap. Source: HumanEval (arXiv
    2107.03374), MBPP (2108.07732), APPS (2105.09938). Raises ValueError if the truth holds no tests, or tests in Python
    that the sandbox cannot run or that code without effect passes; SandboxError for a fault of the sandbox. The score
    is then `failed`.
    """

    def __init__(
        self,
        sandbox: Mapping[str, Any] | None = None,
        only: Indices = None,
        max_tests: WholeAbove0 | None = None,
        seconds: float | None = None,
        total_seconds: Above0 = 45.0,
        all_or_nothing: bool = False,
    ) -> None:
        check_arguments(CodeTests.__init__, locals())
        self.only, self.max_tests = only and tuple(only), max_tests
        self.total_seconds, self.all_or_nothing = float(total_seconds), bool(all_or_nothing)
        self.sandbox = sandbox_options(sandbox, seconds)
        open_box(self.sandbox)

    def __call__(self, text: str, truth: Any) -> Score:
        tests, box = read_tests(truth), open_box(self.sandbox)
        if self.only is not None and max(self.only) >= len(tests):
            raise ValueError(f"expected a test of index {max(self.only)}, the task has {len(tests)} tests")
        tests = tuple(tests[i] for i in self.only or range(len(tests)))[: self.max_tests]
        code = code_in(text, set().union(*map(asked_names, tests)))
        verdicts = run_tests(box, code, tests, total_seconds=self.total_seconds)
        share = sum(verdict.passed for verdict in verdicts) / len(verdicts)
        return Score(float(share == 1) if self.all_or_nothing else share, reason=summary(verdicts))


def summary(verdicts: Sequence[CaseVerdict]) -> str:
    """Format the passed tests and the first fault: `passed 3/5 [1 1 0 1 0]; test 2: reason`."""
    marks = [str(int(verdict.passed)) for verdict in verdicts[:_MARKS]] + ["..."] * (len(verdicts) > _MARKS)
    passed = f"passed {sum(verdict.passed for verdict in verdicts)}/{len(verdicts)} [{' '.join(marks)}]"
    fault = next((f"; test {i}: {verdict.reason}" for i, verdict in enumerate(verdicts) if not verdict.passed), "")
    # The fault may quote the program's output: a lone surrogate in it could not be written to a file.
    return "".join(letter if letter.isprintable() else " " for letter in (passed + fault)[:_REASON_CHARACTERS])


# Code in a text

_PYTHON = re.compile(r"[{.]*(?:i?python|py)[0-9.]*(?:[^a-z0-9].*)?|\S{1,80}\.py")
"""Words after a fence: `python`, `py3`, `{.python}`, `python:main.py`, `main.py`."""


def code_in(text: str, names: Set[str] = frozenset()) -> str:
    """The code in a response: its last complete program outside of thoughts that defines some of the names.

    Candidates are blocks (`blocks_in`) in Python or without a language, and the text before the first fence, between
    lines of one tag. A program is complete if it is valid Python, does something, and uses no name that nothing
    defines. An import defines nothing that a test may ask for. If a block lacks names that earlier blocks define, it is
    joined to them, and to later blocks that define the other names. `names`: those that the tests ask for
    (`asked_names`). If no candidate defines one of them, all candidates count, but a block without functions is joined
    to nothing: it is an example of a call, or of output. Without a program, the last candidate that defines a name,
    else the last ```python block, else the last fenced block, else all of the text.

    The code is dedented. Returns an empty text for code of more than MAX_CODE_CHARACTERS.
    """
    text = without_thoughts(_marked(text))[-MAX_TEXT_CHARACTERS:]
    before, *rest = blocks_in(text)
    blocks = [(block.language, _dedented(block.text)) for block in rest if block.language is not None]
    likely = _TAG_LINE.split(_dedented(before.text))
    likely += [code for language, code in blocks if not language or _PYTHON.fullmatch(language)]
    marked = [block for block in blocks if _PYTHON.fullmatch(block[0])] or blocks or [("", text)]
    valid = [code for code in likely[-_CANDIDATES:] if _parsed(code)[0].body]
    code = _last_program(valid, names) or marked[-1][1]
    return code.replace(_MARK, "think>") if len(code) <= MAX_CODE_CHARACTERS else ""


def asked_names(test: Case) -> Set[str]:
    """The names that a test asks the code to define; for a script with input, a mark of code that reads and prints."""
    if isinstance(test, InputOutput):
        return {_SCRIPT.pattern} if test.input.strip() else set()
    return {test.ask["fn"]} if "fn" in test.ask else set(test.ask["outside"] or test.ask.get("names", ()))


def expected_size(test: Case) -> int:
    """Size of the output that passes a test, in bytes; approximate for the reports of a program."""
    if isinstance(test, TestProgram):
        return 80 * len(test.ask["test"])
    output = test.output if isinstance(test, InputOutput) else json.dumps(code_runner.encoded(test.accepted[0]))
    return len(output.encode(errors="replace"))


_TAG_LINE = re.compile(r"(?m)^[ \t]*(?:</?\w{1,20}>|\[/?[A-Z]{1,20}\])[ \t]*$")
_MARK = "think\ue000"


def _marked(text: str) -> str:
    """The text with other marks in place of those of thoughts within valid programs and quotation marks."""
    text = re.sub(r"([`'\"])</?think>\1", lambda match: match[0].replace("think>", _MARK), text)
    for block, *_ in blocks_in(text[-MAX_TEXT_CHARACTERS:])[-2 * _CANDIDATES :]:
        if "think>" in block and is_complete(_dedented(block)):
            text = text.replace(block, block.replace("think>", _MARK))
    return text


def _last_program(codes: Sequence[str], names: Set[str]) -> str | None:
    """The last of some valid codes that defines a name and is complete, or becomes so with the other ones."""
    defined = list(map(_defined, codes))
    asked, programs = names & set().union(*defined), list[str]()
    for i, code in enumerate(codes):
        tree, left = _parsed(_joined(codes[: i + 1]))
        lacks = tree.body and (not _parsed(code)[1] <= left or asked - defined[i])
        if asked & defined[i] if asked else re.search(r"(?m)^(?:async )?(?:def|class) ", code) or not lacks:
            helpers = [codes[j] for j in range(i + 1, len(codes)) if defined[j] & left & _parsed(code)[1]]
            programs.append(_joined([*(codes[:i] if lacks else ()), *helpers, code]))
    return next(filter(is_complete, reversed(programs)), programs[-1] if asked else None)


def _joined(codes: Sequence[str]) -> str:
    """The codes as one program, which begins with the imports from `__future__` of all of them."""
    lines = "\n\n".join(codes).split("\n")
    return "\n".join(sorted(lines, key=lambda line: len(codes) == 1 or not line.startswith("from __future__ ")))


_READS = r"(?<![.\w])input\(|\bfileinput\b|(?:\b|__)stdin(?:\b|__)(?! *=)|(?:open|FileIO|\bread)\(0\b"
_SCRIPT = re.compile(rf"(?s)(?=.*(?:{_READS})).*(?:\bprint\b|(?:\b|__)stdout(?:\b|__)|(?:open|FileIO|\bwrite)\(1\b)")
"""Code that reads and prints."""
_OUTLINE = r".*(?:: *|\n[ \t]+)(?:\.\.\.|pass|raise NotImplementedError.*)[ \t]*$"
_DEFINITIONS = re.compile(rf"(?m)^[ \t]*(?:async )?(?:def|class) (?!{_OUTLINE})(\w+)")
"""Names of functions and classes, except outlines: those without a body."""


def _defined(code: str) -> set[str]:
    """The functions, classes and other names that a code defines, and _SCRIPT's pattern if it reads and prints."""
    plain = re.sub("#.*", "", code)
    symbols = symtable.symtable(code, "code", "exec").get_symbols()
    others = {symbol.get_name() for symbol in symbols if symbol.is_assigned() and not symbol.is_namespace()}
    return {*_DEFINITIONS.findall(plain), *others, *([_SCRIPT.pattern] if _SCRIPT.match(plain) else [])}


def is_complete(code: str) -> bool:
    """Whether the code is valid Python that does something and defines or imports every name but the usual ones."""
    tree, names = _parsed(code)
    acts = any(isinstance(node, (*test_cases.DEFINITIONS, ast.Call, ast.Lambda)) for node in ast.walk(tree))
    return acts and ("import *" in code or names <= usual_names().keys())


@lru_cache(maxsize=64)
def _parsed(code: str) -> tuple[ast.Module, set[str]]:
    """The tree of the code and the names that it does not define; an empty tree if it is no Python, or too long."""
    with suppress(ValueError):
        return parsed(code if len(code) <= MAX_CODE_CHARACTERS else "")
    return ast.Module([], []), set()


def _dedented(block: str) -> str:
    """Remove the indentation of the first statement from the lines of a block."""
    lines = block.split("\n")
    width = indentation(next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), ""))
    return "\n".join(line[min(width, indentation(line)) :] for line in lines)


# Running


def sandbox_options(sandbox: Mapping[str, Any] | None, seconds: float | None = None) -> dict[str, Any]:
    """Complete the options of `reward.sandbox`: back end `auto`, limits of output and of time (`seconds`)."""
    limits = dict.fromkeys(("wall_s", "cpu_s"), SECONDS if seconds is None else seconds)
    options = {"backend": "auto", "output_bytes": OUTPUT_BYTES, **(sandbox or {})}
    return {**limits, **options} if seconds is None else {**options, **limits}


def open_box(options: Mapping[str, Any]) -> Sandbox:
    """The sandbox with these options (and `backend`), one per thread and process. Raises as `open_sandbox` does."""
    return _box(json.dumps(dict(options), sort_keys=True, default=str), threading.get_ident())


@lru_cache(maxsize=32)
def _box(options: str, thread: int) -> Sandbox:
    # A box keeps the files that were written to it, so threads must not share one.
    return open_sandbox(**json.loads(options))


def _write(box: Sandbox, code: str) -> None:
    """Write the code, the calling program, and imports of the usual names that the code uses and does not define."""
    box.write(code_runner.SOLUTION, code.encode(errors="replace"))
    box.write(code_runner.PROGRAM, Path(code_runner.__file__).read_bytes())
    box.write(code_runner.USUAL, usual_imports(_parsed(code)[1]).encode())


def run_tests(box: Sandbox, code: str, tests: Sequence[Case], *, total_seconds: float = math.inf) -> list[CaseVerdict]:
    """Run each test on the code, in a fresh run, and return the verdicts in order.

    No other thread may use the box during the call. After `total_seconds` no further test is started; the remaining
    tests fail. Cost: one run per test, or per text of Python, and one without code per text and process; no run without
    code, and one run if the code cannot be loaded. Raises ValueError for a program that tests nothing, and an
    expected output above the box's `output_bytes`; SandboxError.
    """
    if not code.strip():
        return [CaseVerdict(False, "no code")] * len(tests)
    if (size := max(map(expected_size, tests))) > (most := box.limits.output_bytes):
        raise ValueError(f"ground_truth: an expected output of {size} bytes is more than output_bytes ({most})")
    for of_text in {id(test.ask): test for test in tests if isinstance(test, TestProgram)}.values():
        _expect_failure(box, of_text.stdin(""))  # type: ignore[arg-type]  # a protocol is not Hashable to mypy
    _write(box, code)
    verdicts: list[CaseVerdict] = []
    runs: dict[int, tuple[Result, str]] = {}
    deadline = time.monotonic() + total_seconds
    for test in tests:
        program = code_runner.SOLUTION if isinstance(test, InputOutput) else code_runner.PROGRAM
        key = id(test if isinstance(test, InputOutput) else test.ask)
        if key not in runs:
            if time.monotonic() > deadline:
                fault = f"not run: {total_seconds:g} s were over"
                break
            nonce = secrets.token_hex(16)
            runs[key] = box.run(["python", program], stdin=test.stdin(nonce)), nonce
        result, nonce = runs[key]
        is_long = len(result.stdout) > MIN_OUTPUT + OUTPUT_RATIO * expected_size(test)
        fault = f"wrong answer: {len(result.stdout)} bytes" if is_long else test.fault(result.stdout, nonce)
        # A check of a program that reported its end has passed, whatever came later.
        if (ended := _ended_badly(result)) and (fault or not isinstance(test, TestProgram)):
            fault = ended
        verdicts.append(CaseVerdict(not fault, fault))
        if fault.startswith(test_cases.NOT_LOADED):
            break
    return verdicts + [CaseVerdict(False, fault)] * (len(tests) - len(verdicts))


@lru_cache(maxsize=256)
def _expect_failure(box: Sandbox, program: bytes) -> None:
    """Raise ValueError if a program of tests passes with functions that do nothing, or does not run in the box."""
    ask, nonce = json.loads(program), secrets.token_hex(16)
    _write(box, "".join(f"def {name}(*_, **__): {ask['stub']}\n" for name in ask["outside"]))
    result = box.run(["python", code_runner.PROGRAM], stdin=TestProgram(ask, ()).stdin(nonce))
    if fault := TestProgram(ask, (code_runner.STARTED,)).fault(result.stdout, nonce):
        raise ValueError(f"ground_truth: its tests do not run in the sandbox: {_ended_badly(result) or fault}")
    if not whole_program(ask).fault(result.stdout, nonce):
        raise ValueError("ground_truth: its tests pass with functions that do nothing; is `check` never called?")


def _ended_badly(result: Result) -> str:
    if result.limit is not None or result.signal is not None:
        return f"exceeded its limit: {result.limit}" if result.limit is not None else f"ended by signal {result.signal}"
    last = result.stderr[-2000:].decode(errors="replace").strip().splitlines()[-1:]
    return ": ".join([f"exit code {result.exit_code}", *(line[:100] for line in last)]) if result.exit_code != 0 else ""
