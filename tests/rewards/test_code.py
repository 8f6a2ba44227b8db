"""Tests of code_tests with honest and hostile programs, in every form of test."""

import itertools
import json
import time
from dataclasses import replace

import pytest

from creditflow.data import Trajectory
from creditflow.errors import ConfigError
from creditflow.rewards.builtin.code import MAX_CODE_CHARACTERS, CaseVerdict, CodeTests, code_in, run_tests, summary
from creditflow.rewards.support.test_cases import read_tests
from creditflow.sandbox import SandboxUnavailable
from creditflow.testing import check_reward_function
from tests.rewards import trajectories
from tests.rewards.trajectories import load
from tests.sandbox import boxes

FENCE = "```"
SQUARE = "def f(x):\n    return x * x"
CASE = "import unittest\nclass T(unittest.TestCase):\n"
TESTS = ["assert f(2) == 4", "assert f(-3) == 9", "assert f(0) == 0"]


def block(code: str, info: str = "python") -> str:
    return f"Here it is.\n\n{FENCE}{info}\n{code}\n{FENCE}\n\nThat is all."


@pytest.fixture
def bubblewrap():
    """Skip without bubblewrap."""
    boxes.bubblewrap()


def score(text: str, truth: object, **args: object) -> tuple[float, str]:
    scored = CodeTests(**{"seconds": 8, **args})(text, truth)
    assert (scored.status, scored.range) == ("ok", (0.0, 1.0))
    return scored.value, scored.reason


# Cutting


DOCTEST = f'def f(x):\n    """A.\n\n    {FENCE}python\n    f(2)\n    {FENCE}\n    """\n    return 1'
TAGS = "def f(x): return x.split('</think>')[-1], '<think>'"
NEXT = f"\n{FENCE}\n{FENCE}python\n"
LISTED = f"1. The code:\n   {FENCE}python\n   def f(x):\n       return x * x\n   {FENCE}\n2. That is all."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (block("x = 1"), "x = 1"),
        (block("x = 1", "py"), "x = 1"),
        (block("x = 1") + block("x = 2"), "x = 2"),
        (block("x = 1") + block("$ pip install x", "sh"), "x = 1"),
        (block("x = 1", "") + block("x = 2", ""), "x = 2"),
        (block("x = 1", "Python 3"), "x = 1"),
        (block(SQUARE, "python3.11") + block("4", "text"), SQUARE),
        (block(SQUARE, "{.python .numberLines}") + block("f = 2", "main.pyc"), SQUARE),
        (block(SQUARE, "main.py") + block("f = 2", "pytb"), SQUARE),
        ("x = 1", "x = 1"),
        (f"{FENCE}python\nx = 1", "x = 1"),  # cut off
        (f"{FENCE}python\n{FENCE}", ""),
        (f"{FENCE}{FENCE}python\ns = '''\n{FENCE}\n'''\n{FENCE}{FENCE}", f"s = '''\n{FENCE}\n'''"),
        (f"  {FENCE}python\r\nx = 1\r\n  {FENCE}", "x = 1\r"),
        (block("x" * MAX_CODE_CHARACTERS), "x" * MAX_CODE_CHARACTERS),
        (block("x" * (MAX_CODE_CHARACTERS + 1)), ""),
        ("", ""),
        # fences that are indented, in lists, or of tildes
        (LISTED, SQUARE),
        (LISTED.replace("\n", "\r\n"), SQUARE.replace("\n", "\r\n") + "\r"),
        (f"- {FENCE}python\n  x = 1\n  {FENCE}", "x = 1"),
        (f"  * a\n    1) {FENCE}py\n       if x:\n           y\n       {FENCE}", "if x:\n    y"),
        (f"\t{FENCE}\n\tx = 1\n\t{FENCE}", "x = 1"),
        (f"{FENCE}python\n    x = 1\n    y = 2\n{FENCE}", "x = 1\ny = 2"),
        (f"    {FENCE}python\nx = 1\nif x:\n  y\n    {FENCE}", "x = 1\nif x:\n  y"),
        (f"   {FENCE}python\n   s = '''\n a\n\n   '''\n   {FENCE}", "s = '''\na\n\n'''"),
        (f"{FENCE}python\n    # so\ndef f():\n    return 1\n{FENCE}", "    # so\ndef f():\n    return 1"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
        (f"~~~~ py\ns = '{FENCE}'\n~~~\n~~~~", f"s = '{FENCE}'\n~~~"),
        # examples and output do not count as programs; thoughts are not read
        (f"{SQUARE}\n{FENCE}\nIt squares x.", SQUARE),
        (block(SQUARE) + block("print(f(2))") + block("4", "") + block("y = 4", ""), SQUARE),
        (block("print(1)") + block(SQUARE, ""), SQUARE),
        (block("def add(x): return x") + block("print(add(2))"), "def add(x): return x"),
        (block(SQUARE) + f"{FENCE}python\ndef f(x):\n    return (", SQUARE),
        (f"{FENCE}python\n{SQUARE}\n{FENCE}python\nprint(f(2))\n{FENCE}", SQUARE),
        (block(DOCTEST), DOCTEST),
        (f"<answer>{FENCE}python\nx = 1\n{FENCE}</answer>", "x = 1"),
        (f"The code is {FENCE}python\nx = 1{FENCE}", "x = 1"),
        (f"Here:\n<answer>\n{SQUARE}\n</answer>\nDone.", f"\n{SQUARE}\n"),
        (
            "".join(map(block, ("import math", "def g(x): return math.pi", "def f(x): return g(x)", "print(f(1))"))),
            "import math\n\ndef g(x): return math.pi\n\ndef f(x): return g(x)",
        ),
        (block(f"# So: {FENCE}python\nx = int('1')"), f"# So: {FENCE}python\nx = int('1')"),
        ("<think>No.</think>" + block(TAGS) + "It ends at `</think>`.", TAGS),
        (block(f"    {TAGS}"), TAGS),
        (TAGS, TAGS),
        (block("def f(x: ListNode):\n    return x", ""), "def f(x: ListNode):\n    return x"),
        (f"<think>{block(SQUARE)}</think>{block('print(1)', '')}", "print(1)"),
        (f"<think>{block(SQUARE)}</think>I cannot.", "I cannot."),
        (f"<think>{block(SQUARE)} Or", ""),
    ],
)
def test_code_is_the_last_complete_program(text, code):
    assert code_in(text) == code


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        *(((SQUARE, example), (0,)) for example in (
            "from solution import f\nprint(f(2))", "import f\nprint(f.f(2))", "from __main__ import f\nprint(f(2))",
            "import pytest\ndef test_a():\n    assert f(2) == 4", "import doctest\ndoctest.testmod()",
            "from setuptools import setup\nsetup(name='f')", "def f(x: int) -> int:\n    ...")),
        ((SQUARE, "f = lambda x: x * x"), (1,)), ((SQUARE, "def h(x): return f(x)"), (0, 1)),
        (("def g(x): return x", "def h(x): return g(x)", "def f(x): return h(x)", "print(f(2))"), (0, 1, 2)),
        ((SQUARE, "f, g = (lambda x: x * x), None"), (1,)), ((SQUARE, "if 1:\n    f = lambda x: x * x"), (1,)),
        ((SQUARE, "def f(x): return g(x)", "def g(x): return x * x", "assert g(1) == 1"), (2, 1)),
    ],
)  # fmt: skip
def test_code_defines_names_of_the_tests(pieces, kept):
    assert code_in("".join(map(block, pieces)), {"f", "h"}) == "\n\n".join(pieces[i] for i in kept)


@pytest.mark.parametrize("piece", ["`", "```", "```\n", "```python\n", "`" * 17 + "\n", " ```py x\n", "\n"])
def test_hostile_text_is_cut_in_linear_time(piece):
    start = time.process_time()
    code_in(piece * 200_000)
    assert time.process_time() - start < 30  # quadratic time would be hours


# Honest programs


@pytest.mark.parametrize(
    ("code", "truth", "expected"),
    [
        (SQUARE, TESTS, "passed 3/3 [1 1 1]"),
        ("def f(x):\n    return x + x", TESTS, "passed 2/3 [1 0 1]; test 1: raised: AssertionError: f(-3) == 9"),
        ("def f(x):\n    return 4 / x", TESTS[::2], "passed 0/2 [0 0]; test 0: raised: AssertionError: f(2) == 4"),
        ("def g(x):\n    return x", TESTS[:1], "passed 0/1 [0]; test 0: raised: NameError: name 'f' is not defined"),
        ("def f(x)\n    return x", TESTS, "passed 0/3 [0 0 0]; test 0: cannot be loaded: SyntaxError"),
        ("print(int(input()) ** 2)", [{"input": "3\n", "output": "9"}, {"input": "x", "output": "9"}],
         "passed 1/2 [1 0]; test 1: exit code 1: ValueError"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nif __name__ == '__main__':\n    print('end')",
         {"inputs": ["1 2\n3\n"], "outputs": ["6\nend\n"]}, "passed 1/1 [1]"),
        ("class Solution:\n    def f(self, a, b):\n        return (a, b)",
         {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[1, [2]]]}, "passed 1/1 [1]"),
        (SQUARE, {"fn_name": "f", "inputs": ["3"], "outputs": ["9"]}, "passed 1/1 [1]"),
        ("def f(x):\n    return x[1]",
         {"fn_name": "f", "inputs": [[{1: {2: 3}}]], "outputs": [{2: 3}]}, "passed 1/1 [1]"),
        ("def f(node: Node) -> Node:\n    return Node(node.x + 1)",
         "class Node:\n    def __init__(self, x): self.x = x\ndef check(f):\n    assert f(Node(1)).x == 2\ncheck(f)",
         "passed 1/1 [1]"),
        ("def sum(a, b):\n    return a - b", ["assert sum(3, 1) == 2", {"call": "sum(3, 1)", "expect": 2}],
         "passed 2/2 [1 1]"),
        (SQUARE, "import math\nassert math.isclose(f(math.pi), 9.8696, rel_tol=1e-4)\nassert f(2) == f(-2)",
         "passed 2/2 [1 1]"),
        (SQUARE, "def check(candidate):\n    for x in range(9):\n        assert candidate(x) == x * x\n"
         "check(f)\nassert True", "passed 1/1 [1]"),
        (SQUARE, ["def check(candidate):\n    assert candidate(3) == 10\ncheck(f)"],
         "passed 0/1 [0]; test 0: raised: AssertionError"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n\ndef f(x):\n    return P(x)",
         ["assert f(3).x == 3", {"call": "[f(1).x]", "expect": [1]}, "assert f(3).x == P(3).x"],
         "passed 3/3 [1 1 1]"),
        ("def f(x):\n    return int(input())", [
            "from unittest.mock import patch\npatch('builtins.input', return_value='5').start()\nassert f(2) == 5",
            "import builtins\nbuiltins.input = lambda: '5'\nassert f(2) == 5\nassert f(3) == 5",
            f"{CASE}    def test_f(self): self.assertEqual(f(2), 5)"],
         "passed 2/3 [1 1 0]; test 2: raised: AssertionError: test_f (__main__.T.test_f): AssertionError: EOFError"),
        ("def f(x):\n    yield x + 1", ["assert math.floor(next(f(2))) == 3", {"call": "sqrt(next(f(3)))", "expect": 2},
                                        {"call": "list(itertools.islice(f(2), 6))", "expect": [3]}],
         "passed 3/3 [1 1 1]"),
        ("from random import random\ndef add(x): return x\ndef sum(x): return 5\ndef re(x): return x",
         ["assert add(x=2) == 2", "assert math.floor(sum(2)) == 5", "assert add(re(random.choice([2]))) == 2"],
         "passed 3/3 [1 1 1]"),
        ("class Real:\n    def __contains__(self, x): return x < inf\ndef f(x): return g(x)", [
            "assert 2.5 in Real()", {"call": "f(2)", "expect": 2}], "passed 1/2 [1 0]"),
        ("def f(x): return g(x)", {"prompt": "import math\ndef g(x): return x + math.e\n\ndef f(x):\n",
                                   "test": "def check(h): assert g(-math.e) == 0 and h(0) > 2", "entry_point": "f"},
         "passed 1/1 [1]"),
        ("def typed(f):\n    def g(x):\n        if not isinstance(x, f.__annotations__['x']): raise TypeError\n"
         "        return f(x)\n    return g\n@typed\ndef f(x: int) -> int: return x * x", TESTS, "passed 3/3 [1 1 1]"),
        ("def f(x: int) -> str:\n    return str(x)", ["assert f.__annotations__ == {'x': int, 'return': str}"],
         "passed 1/1 [1]"),
        ("print('x' * 1_500_000)", {"inputs": [""], "outputs": ["x" * 1_500_000]}, "passed 1/1 [1]"),
        ("print('x' * 1_500_000)", {"inputs": [""], "outputs": ["x"]}, "passed 0/1 [0]; test 0: wrong answer: 1500001"),
        ("def f(n): return list(range(n))", [{"call": "f(50000)", "expect": list(range(50_000))}], "passed 1/1 [1]"),
        (SQUARE, "".join(f"assert f({i}) == {i * i}  \n" for i in range(500)), "passed 500/500 [1 1"),
        (f"n = int(input())\nm = n * n\nprint(m){NEXT}n = int(input()){NEXT}m = n * n{NEXT}print(m)",
         [{"input": "3", "output": "9"}], "passed 1/1 [1]"),
        (f"{SQUARE}{NEXT}print(f(int(input()))){NEXT}print(f(2))  # no input()", [{"input": "3", "output": "9"}],
         "passed 1/1 [1]"),
        (f"def g(x): return x * x{NEXT}from __future__ import annotations\ndef f(x): return g(x)", TESTS,
         "passed 3/3 [1 1 1]"),
        *((f"{code}{NEXT}import random\nprint(random.random())", [{"input": "3\n", "output": "9"}], "passed 1/1 [1]")
          for code in ("import fileinput\nprint(int(next(fileinput.input())) ** 2)",
                       "import os\nos.write(1, str(int(os.read(0, 99)) ** 2).encode())",
                       "import sys\nsys.__stdout__.write(str(int(sys.__stdin__.read()) ** 2))",
                       f"def main():\n    print(f(int(input())))\nmain(){NEXT}{SQUARE}")),
        ("", TESTS, "passed 0/3 [0 0 0]; test 0: no code"),
    ],
)  # fmt: skip
def test_score_is_the_share_of_passed_tests(bubblewrap, code, truth, expected):
    value, reason = score(block(code), truth)
    assert reason.startswith(expected)
    passed, of = expected.split()[1].removesuffix(";").split("/")
    assert value == int(passed) / int(of)


def test_tests_are_selected_by_index_and_number(bubblewrap):
    double = block("def f(x):\n    return x + x")
    assert score(double, TESTS, only=[1])[0] == 0.0
    assert score(double, TESTS, only=[2, 0])[0] == 1.0
    assert score(double, json.dumps(TESTS), max_tests=2)[0] == 0.5
    assert score(double, TESTS, all_or_nothing=True) == (0.0, score(double, TESTS)[1])
    assert score(block(SQUARE), TESTS, all_or_nothing=True)[0] == 1.0
    with pytest.raises(ValueError, match="index 3, the task has 3 tests"):
        score(double, TESTS, only=[3])


def test_every_run_is_fresh(bubblewrap):
    code = """
import os
was_there = os.path.exists("note")
open("note", "w").close()
calls = []
def f(x):
    calls.append(x)
    return [was_there, len(calls)]
"""
    assert score(block(code), ["assert f(1) == [False, 1]"] * 3)[0] == 1.0


# Programs of tests, in the forms of public data sets

ODD = "def f(x):\n    return 2 * x + 1"
HUMANEVAL = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 5\n    assert candidate(0) == 1\n"
PROGRAMS = {
    "humaneval": (HUMANEVAL + "check(f)", 1),
    "humaneval's row": ({"test": HUMANEVAL, "entry_point": "f"}, 1),
    "bigcodebench's row": ({"test": CASE + "    def test_f(self): self.assertEqual(f(2), 5)", "entry_point": "f"}, 1),
    "humaneval in a list": ([HUMANEVAL + "check(f)"], 1),
    "mbpp": ({"test_list": ["assert f(2) == 5", "assert math.sqrt(f(4)) == 3"], "test_imports": ["import math"]}, 2),
    "loop": ("for i in range(1, 3):\n    assert f(i) == 2 * i + 1\n", 1),
    "raises": ("try:\n    f('')\n    assert False\nexcept TypeError:\n    pass\n", 1),
    "main": ("def main():\n    assert f(2) == 5\nif __name__ == '__main__':\n    main()\n", 1),
    "functions of functions": ("def t():\n    assert f(2) == 5\nfor u in (t,):\n    u()\n", 1),
    "functions": ("from solution import f\ndef test_a():\n    assert f(2) == 5\ndef test_b():\n    assert f(0)\n", 2),
    "coroutine": ("async def test_f():\n    assert f(2) == 5\n", 1),
    "unittest": ("from unittest import TestCase, main\nimport unittest\nclass T(TestCase):\n    def test_f(self):\n"
                 "        self.assertEqual(f(2), 5)\nif __name__ == '__main__':\n    unittest.main()\n", 1),
    "state": ("q = [f(1), f(2)]\nassert q.pop() == 5\nassert q.pop() == 3\nq = [f(5)]\nassert q.pop() == 11", 3),
    "returned": ("def test_f():\n    return f(2) == 5\n", 1),
    "skipped": (f"{CASE}    @unittest.skip('later')\n    def test_no(self): pass\n"
                "    def test_f(self):\n        self.assertEqual(f(2), 5)", 1),
    "exit code": ("import sys\nif f(2) != 5:\n    sys.exit(1)\n", 1),
    "exit code at the end": ("def main():\n    return 0 if f(2) == 5 else 1\nraise SystemExit(main())", 1),
    "exit in the middle": ("import sys\nif f(2) == 5:\n    sys.exit()\nassert False", 1),
    "late fault": ("assert f\nfor t in [lambda: f(2)]:\n    {5: 1}[t()]\n", 1),
    "call of a named function": ([{"input": "2", "output": "5", "testtype": "functional",
                                   "metadata": {"func_name": "f"}}], 1),
    "its metadata as text": ([{"input": "2", "output": "5", "metadata": '{"func_name": "f"}'}], 1),
    "synthetic-1": ({"language": "python", "test_cases": [{"type": "function_call", "fn_name": "f", "input": [2],
                                                           "output": [5]}]}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_tests_passes_right_code_alone(bubblewrap, name):
    truth, n = PROGRAMS[name]
    assert score(block(ODD), truth) == (1.0, f"passed {n}/{n} [{' '.join('1' * n)}]")
    assert score(block("def f(x):\n    return 0"), truth)[0] == 0.0
    assert score("I do not know.", truth, all_or_nothing=True)[0] == 0.0


PYTEST = """
import pytest
@pytest.fixture
def five():
    return 5
@pytest.mark.parametrize("x", [2])
def test_f(x, five):
    assert f(x) == five
class TestF:
    def test_f(self):
        with pytest.raises(TypeError):
            f("")
"""


def test_pytest_runs_its_own_tests(tmp_path, monkeypatch):
    with boxes.opened("unsafe_subprocess", tmp_path, monkeypatch, wall_s=60, cpu_s=60) as box:
        assert run_tests(box, ODD, read_tests(PYTEST))[0].reason == ""
        collected_only = "open('pytest.ini', 'w').write('[pytest]\\naddopts = --collect-only')\ndef f(x): return 0"
        ends = [f"import pytest\ndef f(x): pytest.{end}" for end in ("skip('no')", "xfail('no')", "exit('no', 0)")]
        hooks = ["import pytest\npytestmark = pytest.mark.xfail", "def pytest_generate_tests(metafunc): 1 / 0"]
        for code in (collected_only, *ends, *hooks):
            assert not run_tests(box, code, read_tests(f"from solution import *{PYTEST}"))[0].passed
        assert run_tests(box, f"{ODD}\n{hooks[1]}", read_tests(f"from solution import *{PYTEST}"))[0].passed


@pytest.mark.parametrize(
    ("truth", "reason"),
    [
        ("import no_such_module.x\nassert f(2) == 5", "do not run in the sandbox: .* No module named 'no_such_module'"),
        (["print(1)"], "pass with functions that do nothing"),
        (HUMANEVAL, "pass with functions that do nothing; is `check` never called"),
        ("def helper(x):\n    assert f(x)\n", "pass with functions"),
        ("def check(f):\n    def inner():\n        assert f(2)\ncheck(f)", "pass with functions"),
        ("print('ok' if f(2) == 5 else 'wrong')", "pass with functions"),
        ("try:\n    assert f(2) == 5\nexcept AssertionError:\n    print('wrong')", "pass with functions"),
        ("def test_all():\n    yield f, 2\n", "pass with functions"),
        (f"{CASE}    async def test_f(self):\n        self.assertEqual(await f(2), 5)", "pass with functions"),
        ("try:\n    assert f(2) == 5\nexcept Exception:\n    pass", "pass with functions"),
    ],
)
def test_tests_that_cannot_fail_are_refused(bubblewrap, truth, reason):
    with pytest.raises(ValueError, match=f"ground_truth: its tests .*{reason}"):
        score(block(ODD), truth)


@pytest.mark.parametrize(
    ("code", "test", "passes"),
    [
        ("class No:\n    def __bool__(self):\n        return False\ndef f(x):\n    return No()", "assert f(2)", False),
        ("async def f(x):\n    return 5", "assert f(2) is not None", True),
        ("import numpy as np\ndef f(x):\n    return np.bool_(False)", "assert f(2)", False),
        ("import numpy as np\ndef f(x):\n    return np.bool_(False)", "assert not f(2)", True),
        ("import numpy as np\ndef f(x):\n    return np.int64(5)", "assert f(2) != 5", False),
        ("import numpy as np\ndef f(x):\n    return np.int64(5)", "assert f(2) == 5", True),
        ("import numpy as np\ndef f(x):\n    return np.float64(1e40)", "assert f(2) == 1e40", True),
        ("def f(x):\n    return range(10**9)", "assert 5 in f(2)", True),
        ("import numpy as np\ndef f(x):\n    return np.float64(5)", {"call": "f(2)", "expect": 5}, True),
        ("import numpy as np\ndef f(x):\n    return np.arange(2)", {"call": "f(2)", "expect": [0, 1]}, True),
        ("import __main__\ndef f(x): raise __main__.Exit(0)", "if f(2) != 5:\n    exit(1)", False),
        ("class All:\n    def __contains__(*_): return True\ndef f(x): return All()", "assert 5 in f(2)", False),
        ("class Odd:\n    def __eq__(self, n): return n % 2\ndef f(x): return Odd()", "assert f(2) == 5", True),
    ],
)  # fmt: skip
def test_truth_of_a_value_is_pythons(tmp_path, monkeypatch, code, test, passes):
    with boxes.opened("unsafe_subprocess", tmp_path, monkeypatch, wall_s=30) as box:  # numpy takes much memory
        assert run_tests(box, code, read_tests([test]))[0].passed == passes


# Hostile programs

EVERY_FORM = [
    "assert f(2) == 5",
    {"call": "f(2)", "expect": 5},
    "assert abs(f(2) - 5.5) < 1e-6",
    "import math\nassert math.isclose(f(2), 5.5)",
    "assert sorted(f(2)) == [5]",
    "assert 4 < f(2) and f(2) < 6",
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(2), 5)",
    f"{CASE}    def setUp(self): self.n = f(2)\n    def test_f(self): self.assertEqual(self.n, 5)",
    f"{CASE}    def test_f(self):\n        with self.subTest(): self.assertEqual(f(2), 5)",
    "for y in map(f, [2]): assert y == 5",
    "assert f(2) - 5 == 0 and f(2) == f(1) + 3",
    {"input": "2\n", "output": "5\n"},
]
EQUAL = """
class Equal(float):
    def yes(self, *others): return True
    def me(self, *others): return self
    def nothing(self, *others): return 0.0
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __contains__ = yes
    __add__ = __radd__ = me
    __sub__ = __rsub__ = __abs__ = nothing
    __hash__ = None
    def __iter__(self): return iter([self])
"""
CHEATS = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "exit when called": "import os\ndef f(x): os._exit(0)",
    "equal to all": EQUAL + "def f(x): return Equal(7)\nprint(f(2))",
    "equal to all of a size": "class E(float):\n    def __eq__(s, o): return type(o) is int and o < 9999\n"
    "    def __ne__(s, o): return type(o) is int and o > 9999\ndef f(x): return E()",
    "an object equal to all": EQUAL.replace("float", "object") + "def f(x): return Equal()\nprint(f(2))",
    "says so": "print('passed', 'ok', '5/5', True)\ndef f(x): print('passed'); return 'passed'",
    "answers for it": """
import os
for fd in range(64):
    try: os.write(fd, b'{"value": true, "nonce": "", "passed": true}')
    except OSError: pass
os._exit(0)
""",
    "redefines what compares": """
import builtins, math, operator
builtins.abs = lambda x: 0
builtins.sorted = builtins.list = lambda *a, **k: True
math.isclose = operator.eq = lambda *a, **k: True
import unittest
unittest.TestCase.assertEqual = lambda *a: None
class AssertionError(Exception): pass
def f(x): return 0
""",
    "redefines what compares, when called": """
import builtins, math, unittest
def f(x):
    builtins.abs = lambda x: 0
    math.isclose = lambda *a, **k: True
    unittest.TestCase.assertEqual = lambda *a: None
    return 0
""",
    "has names of built-in functions": "def abs(x): return 0\ndef sorted(x): return [5]\ndef f(x): return 0",
    "adds to classes of tests": """
import sys, types, unittest
sys.modules["math"] = types.SimpleNamespace(isclose=lambda *a, **k: True)
own = object.__getattribute__
unittest.TestCase.__getattribute__ = lambda s, n: (lambda *a: None) if n == "assertEqual" else own(s, n)
def f(x):
    for case in unittest.TestCase.__subclasses__():
        case.assertEqual = lambda *a: None
    return 0
""",
    "skips": "import unittest\ndef f(x): raise unittest.SkipTest",
    "stops": "import unittest\ndef f(x): raise unittest.case._ShouldStop",
    "ends the loop": "def f(x): raise StopIteration",
    "replaces the code": "from unittest import TestCase\nTestCase.assertEqual.__code__ = (lambda *a: None).__code__\n"
    "def f(x): return 0",
    "no difference": "class E:\n    def __sub__(s, o): return 0.0\n    __rsub__ = __sub__\ndef f(x): return E()",
    "less and more": "class E(int):\n    def __lt__(s, o): return True\n    __gt__ = __lt__\ndef f(x): return E()",
    "unequal to nothing": "class E:\n    def __ne__(s, o): return False\ndef f(x): return [E()]",
    "answers at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "closes everything": "import os\nos.closerange(0, 64)\ndef f(x): os._exit(0)",
    "rewrites the files": "for name in ('code_runner.py', 'solution.py'): open(name, 'w').write('print(5)')\nf = print",
    "too much": "def f(x): return 'x' * 500_000",
    "too deep": "def f(x):\n    v = []\n    for _ in range(60): v = [v]\n    return v",
    "recursion": "def f(x): return f(x)",
    "noise": "import os, sys\nsys.stdout.buffer.write(os.urandom(5000))\ndef f(x): print('\\x00' * 999); return {}",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_simple_cheats_fail_every_form_of_test(bubblewrap, cheat):
    value, reason = score(CHEATS[cheat], EVERY_FORM)
    assert value == 0.0, reason


LOOKS_FOR_THE_WORD = """
import json, os, sys
frame = sys._getframe()
while frame:
    if "nonce" in frame.f_locals.get("ask", {}):
        for part in range(9):
            answer = {"nonce": frame.f_locals["ask"]["nonce"], "part": part}
            os.write(frame.f_locals["output"], json.dumps(answer).encode() + b"\\n")
        os._exit(0)
    frame = frame.f_back
def f(x): return 0
"""


def test_search_for_the_word_cheats_only_tests_in_the_box(bubblewrap):
    value, reason = score(LOOKS_FOR_THE_WORD, EVERY_FORM)
    assert reason.startswith("passed 10/12 [1 0 1 1 1 1 1 1 1 1 1 0]")
    assert value == 10 / 12


def test_late_module_is_loaded_before_the_solution(tmp_path, monkeypatch):
    tests = read_tests("import numpy as np\nnp.testing.assert_equal(f(2), 5)")
    cheat = "import numpy.testing as t\nt.assert_equal = lambda *a: None\ndef f(x): return 0"
    with boxes.opened("unsafe_subprocess", tmp_path, monkeypatch, wall_s=30) as box:  # numpy takes much memory
        assert [run_tests(box, code, tests)[0].passed for code in (cheat, ODD)] == [False, True]


def test_exceeded_limit_fails_only_its_test(bubblewrap):
    code = """
def f(x):
    while x == 1: pass
    if x == 2: return len(bytearray(2_000_000_000))
    if x == 3:
        while True: print('x' * 10_000)
    return x
"""
    truth = [f"assert f({x}) == {x}" for x in (0, 1, 2, 3, 4)]
    scored = CodeTests({"memory_mb": 200}, seconds=1)(block(code), truth)
    assert scored.value == 2 / 5
    assert scored.reason.startswith("passed 2/5 [1 0 0 0 1]; test 1: exceeded its limit: ")
    assert scored.reason.removesuffix("wall").removesuffix("cpu") == scored.reason[: scored.reason.rindex(" ") + 1]


def test_tests_beyond_the_total_time_fail(bubblewrap):
    value, reason = score(block("def f(x):\n    while True: pass"), TESTS, seconds=0.5, total_seconds=0.2)
    assert value == 0.0
    assert reason.startswith("passed 0/3 [0 0 0]")
    verdicts = run_tests(boxes.bubblewrap(wall_s=0.5), "while True: pass", read_tests(TESTS), total_seconds=0.2)
    assert [verdict.reason for verdict in verdicts[1:]] == ["not run: 0.2 s were over"] * 2


def test_reasons_are_bounded_and_printable(bubblewrap):
    _, reason = score("def f(x):\n    raise ValueError('\\ud800\\n\\x00')", TESTS)
    assert reason == "passed 0/3 [0 0 0]; test 0: raised: ValueError:    "
    verdicts = [CaseVerdict(i % 2 == 0, "x" * 1000) for i in range(500)]
    assert len(summary(verdicts)) <= 300
    assert summary(verdicts).startswith("passed 250/500 [1 0 1")


# Faults outside of the program


def test_sandbox_fault_is_a_failed_score():
    calls = itertools.count()

    def answer(request):
        return boxes.run_python(request) if next(calls) == 0 else (500, b"out of order")

    with boxes.fusion_service(answer) as url:
        sandbox = {"backend": "sandbox_fusion", "url": url, "retries": 0}
        trajectory = a_trajectory(block(SQUARE), TESTS)
        trajectories.score([load("code_tests", args={"sandbox": sandbox})], [trajectory])
    assert trajectory.outcome.status == "failed"
    assert "SandboxError" in trajectory.outcome.reason
    assert "500" in trajectory.outcome.reason


def test_truth_beyond_the_output_limit_is_refused(bubblewrap):
    with pytest.raises(ValueError, match=r"101 bytes is more than output_bytes \(100\)"):
        score("print(1)", {"inputs": [""], "outputs": ["x" * 101]}, sandbox={"output_bytes": 100})


# Conventions of benchmarks


SOLUTIONS = {
    "typing": ("def f(x: List[int], y: Optional[Dict] = None) -> Tuple[int]:\n    return x[0], 2", [1, 2]),
    "collections": ("def f(x):\n    d = defaultdict(deque)\n    return Counter(x)[1] + len(d[0])", 1),
    "heapq": ("def f(x):\n    h = []\n    heappush(h, 3)\n    return [heappop(h), heapq.nlargest(1, x)]", [3, [1]]),
    "math": ("def f(x):\n    return [gcd(4, 6), inf > sqrt(4), math.isqrt(17)]", [2, True, 4]),
    "itertools": ("def f(x):\n    return [list(accumulate([1, 2])), list(pairwise([1, 2]))]", [[1, 3], [[1, 2]]]),
    "functools": (
        "@cache\ndef g(n):\n    return n and g(n - 1) + 1\ndef f(x):\n    return reduce(add, [g(5000), 2])",
        5002,
    ),
    "bisect": ("class Solution:\n    def f(self, x: List[int]) -> int:\n        return bisect_left([1, 3], 2)", 1),
    "string": ("def f(x):\n    return ascii_lowercase[0] + string.digits[1]", "a1"),
    "re": ("def f(x):\n    return re.sub('a', 'b', 'aa') + str(len(findall('a', 'aa')))", "bb2"),
    "its own": ("def gcd(a, b):\n    return 'mine'\ndef f(x):\n    return gcd(4, 6)", "mine"),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_usual_names_work_without_an_import(bubblewrap, name):
    code, value = SOLUTIONS[name]
    assert score(block(code), {"fn_name": "f", "inputs": [[[1]]], "outputs": [value]}) == (1.0, "passed 1/1 [1]")


GCD = [{"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, [{"call": "gcd(4, 6)", "expect": 2}]]


@pytest.mark.parametrize("truth", [*GCD, ["assert gcd(4, 6) == 2"]])
def test_usual_names_are_not_a_solution(bubblewrap, truth):
    value, reason = score(block("print(gcd)"), truth)
    assert value == 0.0
    assert "gcd" in reason


def test_scripts_must_import_their_names(bubblewrap):
    assert score(block("print(gcd(4, 6))"), [{"input": "", "output": "2"}])[0] == 0.0


# In a recipe


def a_trajectory(text: str, truth: object) -> Trajectory:
    trajectory = trajectories.a_trajectory(agents="c", answer=text)
    trajectory.steps[0].response, trajectory.task = text, replace(trajectory.task, ground_truth=truth)
    return trajectory


@pytest.mark.parametrize("level", ["step", "outcome"])
def test_code_tests_scores_steps_and_outcomes(bubblewrap, level):
    function = load("code_tests", level=level, shared={"sandbox": {"memory_mb": 300}})
    assert function.name == "code_tests"
    limits = {"memory_mb": 300, "wall_s": 5.0, "cpu_s": 5.0, "output_bytes": 16_000_000}
    assert function.instance.sandbox == {"backend": "auto", **limits}
    trajectory = a_trajectory(block("def f(x):\n    return x + x"), TESTS)
    trajectories.score([function], [trajectory])
    scored = trajectory.outcome if level == "outcome" else trajectory.steps[0].scores["code_tests"]
    assert scored.value == pytest.approx(2 / 3)


def test_missing_sandbox_is_reported_at_load(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    args = {"sandbox": {"backend": "container", "image": "python:3.11-slim"}}
    with pytest.raises(SandboxUnavailable, match="docker and podman not found"):
        load("code_tests", args=args)
    assert not issubclass(SandboxUnavailable, ConfigError | ValueError)  # not an error of the recipe


def test_code_tests_conforms(bubblewrap):
    check_reward_function("code_tests", [a_trajectory(block(SQUARE), TESTS)], args={"max_tests": 1})
