"""The ready-made tools, and the tools of a recipe."""

import asyncio
import contextlib
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.config import load_recipe
from creditflow.engines.common.components import build_components
from creditflow.errors import ConfigError
from creditflow.rollout.toolbox import calculator, load_tools
from tests.paths import RECIPES, ROOT
from tests.sandbox import boxes


def tool(entry, base: Path = Path(), offered=None):
    (made,) = load_tools([entry], base, "team.agents.a.tools", offered or {})
    return made


def said(made, **arguments) -> str:
    return asyncio.run(made(arguments, {})).text


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4) * 2 ** 3", "56"),
        ("7 / 2", "3.5"),
        ("-7 // 2 % 3", "2"),
        ("1e3 + .5", "1000.5"),
        (" 0.1 + 0.2", "0.3"),
        ("4.35 * 100", "435"),
        ("2 / 3", "0.666666666666667"),
        ("2 ** 53 / 2", "4503599627370496"),
        ("246913578024691 / 2", "123456789012345.5"),
        ("10 ** 22 / 1", "1e+22"),
        ("999999999999999e2 * 1", "9.99999999999999e+16"),
        ("1e308 * 10", "inf"),
        ("1e308 * 10 * 0", "nan"),
    ],
)
def test_calculator_computes_arithmetic(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "2 ** 9 ** 9",
        "9 ** 999 ** 2",
        "(10 ** 999) ** 1000",
        "1 +",
        "(-8) ** 0.5",
        "True",
        "1 < 2",
        "(" * 400,
        "x",
        "'a' * 9",
    ],
)
def test_calculator_refuses_other_expressions(expression):
    with pytest.raises((ValueError, ArithmeticError)):
        calculator(expression)
    assert said(tool("calculator"), expression=expression).startswith("error: ")


@given(st.integers(0, 10**15 - 1), st.integers(-20, 20))
def test_calculator_keeps_decimals_of_15_digits(digits, exponent):
    number = f"{digits}e{exponent}"
    assert Decimal(calculator(f"{number} * 1")) == Decimal(number)


@given(st.text(alphabet="0123456789+-*/%(). e", max_size=60))
def test_calculator_bounds_any_expression(expression):
    with contextlib.suppress(ValueError, ArithmeticError):
        assert len(calculator(expression)) < 2000


def test_python_runs_in_the_sandbox_and_returns_its_output():
    boxes.bubblewrap()
    python = tool("python", offered={"sandbox": {"wall_s": 5.0}})
    assert said(python, code="print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in said(python, code="print('first')\n1 / 0")
    assert said(python, code="x = 1") == "(nothing was printed)"
    assert "No such file" in said(python, code=f"open({str(ROOT / 'pyproject.toml')!r})")
    quick = tool({"fn": "python", "args": {"sandbox": {"wall_s": 0.5}}})
    assert said(quick, code="while True: pass").startswith("error: the program was stopped")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("calcuator", r"tools\[0\]: expected one of .*did you mean 'calculator'"),
        (
            {"fn": "calculator", "arg": {}},
            r"unknown key 'team.agents.a.tools\[0\].arg' .did you mean 'team.agents.a.tools\[0\].args'",
        ),
        ({"name": "x"}, r"tools\[0\].fn: expected a text, got nothing"),
        (7, r"tools\[0\]: expected a name, `file.py:function`"),
        ({"fn": "calculator", "timeout": 0}, r"tools\[0\].timeout: expected a number above 0, got 0"),
        ("missing.py:f", r"tools\[0\].fn: no file 'missing.py'"),
        ({"fn": "python", "args": {"box": {}}}, r"tools\[0\] \(python\): .*unexpected keyword argument 'box'"),
        ({"fn": "python", "args": {"sandbox": {"wall": 1}}}, "unknown key 'bubblewrap.wall'"),
    ],
)
def test_invalid_tool_entry_is_refused_by_its_place(entry, message):
    with pytest.raises(ConfigError, match=message):
        tool(entry)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools are called calculator; give one another `name`"):
        load_tools(["calculator", "calculator"], Path(), "tools", {})
    named = load_tools(["calculator", {"fn": "calculator", "name": "sums"}], Path(), "tools", {})
    assert [one.name for one in named] == ["calculator", "sums"]


def test_recipe_sets_tools_per_agent_and_their_turns(tmp_path):
    (tmp_path / "mine.py").write_text("def shout(text: str) -> str:\n    'Louder.'\n    return text.upper()\n")
    options = [
        "team.agents.verifier.tools=[calculator, {fn: 'mine.py:shout', timeout: 2}]",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    ]
    recipe = load_recipe(RECIPES / "arithmetic_chain.yaml", options)
    with pytest.raises(ConfigError, match=r"team.agents.verifier.tools\[1\].fn: no file 'mine.py'"):
        build_components(recipe, tasks=False)
    options[0] = options[0].replace("mine.py", str(tmp_path / "mine.py"))
    components = build_components(load_recipe(RECIPES / "arithmetic_chain.yaml", options), tasks=False)
    assert [one.name for one in components.agents["verifier"].tools] == ["calculator", "shout"]
    assert components.agents["verifier"].tools[1].timeout == 2
    assert components.agents["planner"].tools == ()
    assert components.sampling.max_assistant_turns == 3


def test_tools_of_endpoint_agents_are_refused():
    recipe = RECIPES / "arithmetic_chain.yaml"
    options = [
        "policies={default: {}, judge: {endpoint: {base_url: 'http://127.0.0.1:1/v1', model: m}}}",
        "team.agents.verifier={policy: judge, tools: [calculator]}",
    ]
    with pytest.raises(ConfigError, match="tools: are for policies of the run, and judge is behind an endpoint"):
        build_components(load_recipe(recipe, options), tasks=False)
