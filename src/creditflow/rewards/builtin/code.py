"""The ready-made reward for programs: the share of tests that the code in a response passes, in a sandbox.

This module extracts the code and runs the tests. `support.test_cases` parses and checks tests; `sandbox` runs programs.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from creditflow._utils.sections import expected
from creditflow.data import Score
from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support import code_runner
from creditflow.rewards.support.arguments import Above0, Whole, WholeAbove0, check_arguments
from creditflow.rewards.support.test_cases import Case, not_loaded, read_tests
from creditflow.sandbox import Result, Sandbox, open_sandbox

MAX_CODE_CHARACTERS = 50_000
"""Longer code passes no test."""
MAX_TEXT_CHARACTERS = 400_000
"""Number of characters read, counted from the end of a response."""
SECONDS = 5.0
"""Default time limit of a test, if neither the entry nor `reward.sandbox` sets one."""
Indices = Annotated[Annotated[Sequence[Whole], Field(min_length=1)] | None, expected("a list of indices from 0")]
_MARKS = 40
_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """Result of one test of a program."""

    passed: bool
    reason: str = ""
    """Reason for the failure; may contain output of the program."""


@builtin
@answer(name="code_tests", timeout=120.0)
class CodeTests:
    """The share of tests that the code in the text passes, in a sandbox; the reason lists them and the first fault.

    The code is the last ```python block, else the last fenced block, else the whole text. The truth holds the tests, as
    JSON text or decoded (`creditflow.rewards.support.test_cases.read_tests`), in one of three forms:
    * `{"inputs": [...], "outputs": [...]}`: scripts that read and print, as in APPS and verl. Output is compared line
      by line as text, except white space at the end of lines: numbers must be printed exactly as expected. With
      `"fn_name"`, the tests are calls of that function (or of that method of a class Solution) with JSON arguments.
      Code that is called, as opposed to a script, may use common names of the standard library without an import:
      `List`, `deque`, `heappush`, `inf`.
    * a list of `{"input": ..., "output": ...}`, of `{"call": "f(2, 3)", "expect": 5}`, or of texts `"assert f(2, 3) ==
      5"`, as in HumanEval and MBPP.
    * one text with assertions, each of which is a test.
    JSON values are compared with a tolerance (1e-6 relative, 1e-9 absolute, at any depth), and lists equal tuples.
    Values in assertions are compared by Python's ==.

    Each test is a fresh run. A program that raises, exits, exceeds a limit or leaves no answer fails that test; a
    program that reports that it cannot be loaded fails all. Only a fault of the sandbox raises: the score is then
    `failed`.

    Expected results never enter the box: output and values are compared outside, after being read as text or JSON. The
    same holds for assertions of the forms `f(...) == literal` (and `!=`, `<`, `in`, `is None`), `f(...)`, `not f(...)`,
    `math.isclose(f(...), literal)` and `abs(f(...) - literal) < literal`, also with methods and items, and through
    `sorted`, `set`, `len` and similar functions. Any other assertion runs in the box, next to the code that it judges.
    It passes if it reaches its end, which is proved by a word that is new in every run. Functions may return only plain
    data there, so redefining == or ending early does not help. Values returned by methods may still redefine ==, and
    code that searches its own process for that word can find it.

    `sandbox`: `backend` (default `auto`) and its options; default in a recipe: `reward.sandbox`. The sandbox is opened
    when the recipe is loaded, so that an unusable one is reported then.
    `only`: indices of the tests that count, from 0, so that each can be a separate score. `max_tests`: number of tests
    that count, from the first. `seconds`: wall and CPU time of each test; default: the sandbox's `wall_s` and `cpu_s`,
    else 5.
    `total_seconds`: time after which no further test is started; the remaining tests fail. Including the last test, it
    must end before the function's time-out (120), which would mask the score of a slow program instead of failing it.
    `all_or_nothing`: 1 if every test passed, else 0.

    Range: [0, 1]. Cost: one run of Python in the sandbox per test; 25 ms with bubblewrap. Source: HumanEval (arXiv
    2107.03374), MBPP (2108.07732), APPS (2105.09938). Raises ValueError if the truth holds no tests, SandboxError.
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
        self.only = None if only is None else tuple(only)
        self.max_tests = max_tests
        self.total_seconds = float(total_seconds)
        self.all_or_nothing = bool(all_or_nothing)
        self.sandbox = sandbox_options(sandbox, seconds)
        open_box(self.sandbox)

    def __call__(self, text: str, truth: Any) -> Score:
        tests = self._chosen(read_tests(truth))
        verdicts = run_tests(open_box(self.sandbox), code_in(text), tests, total_seconds=self.total_seconds)
        passed = sum(verdict.passed for verdict in verdicts)
        value = float(passed == len(verdicts)) if self.all_or_nothing else passed / len(verdicts)
        return Score(value, reason=summary(verdicts))

    def _chosen(self, tests: Sequence[Case]) -> list[Case]:
        chosen = list(tests)
        if self.only is not None:
            if max(self.only) >= len(tests):
                raise ValueError(f"expected a test of index {max(self.only)}, the task has {len(tests)} tests")
            chosen = [tests[i] for i in self.only]
        return chosen[: self.max_tests]


def summary(verdicts: Sequence[CaseVerdict]) -> str:
    """Format the passed tests and the first fault: `passed 3/5 [1 1 0 1 0]; test 2: reason`."""
    marks = " ".join(str(int(verdict.passed)) for verdict in verdicts[:_MARKS])
    more = " ..." if len(verdicts) > _MARKS else ""
    passed = f"passed {sum(verdict.passed for verdict in verdicts)}/{len(verdicts)} [{marks}{more}]"
    fault = next((f"; test {i}: {verdict.reason}" for i, verdict in enumerate(verdicts) if not verdict.passed), "")
    # The fault may quote the program's output: a lone surrogate in it could not be written to a file.
    return "".join(letter if letter.isprintable() else " " for letter in (passed + fault)[:_REASON_CHARACTERS])


# Code in a text

_FENCE = re.compile(
    r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?"
    r"(?:(?P<ticks>`{3,16})(?P<info>[^`]{0,80})|(?P<waves>~{3,16})(?P<note>.{0,80}))"
)
_PYTHON = ("python", "python3", "py")


def code_in(text: str) -> str:
    """The code in a response: its last ```python block, else its last fenced block, else all of it.

    A fence consists of backticks or tildes and may be indented, as under an item of a list; the code is dedented. An
    unclosed block extends to the end of the text. Takes time linear in the text. Returns an empty text for code of more
    than MAX_CODE_CHARACTERS.
    """
    last: dict[bool, str] = {}
    inside: list[str] | None = None
    closes, is_python = "", False
    for line in text[-MAX_TEXT_CHARACTERS:].split("\n"):
        stripped = line.strip()
        if inside is None:
            if (fence := _FENCE.fullmatch(line.rstrip())) is not None:
                closes, inside = fence["ticks"] or fence["waves"], []
                is_python = (fence["info"] or fence["note"] or "").strip().lower().split(" ")[0] in _PYTHON
        elif stripped.startswith(closes) and not stripped.strip(closes[0]):
            last[is_python] = _dedented(inside)
            inside = None
        else:
            inside.append(line)
    if inside is not None:
        last[is_python] = _dedented(inside)
    code = last.get(True, last.get(False, text[-MAX_TEXT_CHARACTERS:]))
    return code if len(code) <= MAX_CODE_CHARACTERS else ""


def _dedented(lines: list[str]) -> str:
    """Remove the indentation of the first statement from the lines of a block."""
    statements = (line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    width = _indentation(next(statements, ""))
    return "\n".join(line[min(width, _indentation(line)) :] for line in lines)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


# Running


def sandbox_options(sandbox: Mapping[str, Any] | None, seconds: float | None = None) -> dict[str, Any]:
    """Complete the options of `reward.sandbox`: back end `auto`, and `seconds` as the limit of each run."""
    options = {"backend": "auto", **(sandbox or {})}
    if seconds is not None:
        return {**options, "wall_s": seconds, "cpu_s": seconds}
    return {"wall_s": SECONDS, "cpu_s": SECONDS, **options}


def open_box(options: Mapping[str, Any]) -> Sandbox:
    """The sandbox with these options (and `backend`), one per thread and process. Raises as `open_sandbox` does."""
    return _box(json.dumps(dict(options), sort_keys=True, default=str), threading.get_ident())


@lru_cache(maxsize=32)
def _box(options: str, thread: int) -> Sandbox:
    # A box keeps the files that were written to it, so threads must not share one.
    return open_sandbox(**json.loads(options))


@cache
def _caller() -> bytes:
    return Path(str(code_runner.__file__)).read_bytes()


def run_tests(box: Sandbox, code: str, tests: Sequence[Case], *, total_seconds: float = math.inf) -> list[CaseVerdict]:
    """Run each test on the code, in a fresh run, and return the verdicts in order.

    No other thread may use the box during the call. After `total_seconds` no further test is started; the remaining
    tests fail. Cost: one run per test; no run without code, and one run if the code cannot be loaded. Raises
    SandboxError.
    """
    if not code.strip():
        return [CaseVerdict(False, "no code")] * len(tests)
    box.write(code_runner.SOLUTION, code.encode(errors="replace"))
    box.write(code_runner.PROGRAM, _caller())
    verdicts: list[CaseVerdict] = []
    deadline = time.monotonic() + total_seconds
    for test in tests:
        if time.monotonic() > deadline:
            verdicts.append(CaseVerdict(False, f"not run: {total_seconds:g} s were over"))
            continue
        verdict, is_hopeless = _run(box, test)
        verdicts.append(verdict)
        if is_hopeless:
            return [*verdicts, *[verdict] * (len(tests) - len(verdicts))]
    return verdicts


def _run(box: Sandbox, test: Case) -> tuple[CaseVerdict, bool]:
    """The verdict, and whether the solution reported that it cannot be loaded at all."""
    nonce = secrets.token_hex(16)
    result = box.run(["python", test.program], stdin=test.stdin(nonce))
    if fault := _ended_badly(result):
        return CaseVerdict(False, fault), False
    fault = test.fault(result.stdout, nonce)
    return CaseVerdict(not fault, fault), test.program == code_runner.PROGRAM and bool(not_loaded(result.stdout))


def _ended_badly(result: Result) -> str:
    if result.limit is not None:
        return f"exceeded its limit: {result.limit}"
    if result.signal is not None:
        return f"ended by signal {result.signal}"
    if result.exit_code != 0:
        lines = result.stderr[-2000:].decode(errors="replace").strip().splitlines()
        return f"exit code {result.exit_code}" + (f": {lines[-1][:100]}" if lines else "")
    return ""
