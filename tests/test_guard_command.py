"""`creditflow guard test`, as a stranger calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.monitor.scenarios import SCENARIOS

RECIPE = str(Path(__file__).parents[1] / "recipes/arithmetic_chain.yaml")


def call(*words: str):
    return CliRunner().invoke(app, ["guard", "test", RECIPE, *words])


@pytest.mark.parametrize(("scenario", "rule"), [(name, scenario.rule) for name, scenario in SCENARIOS.items()])
def test_each_scenario_is_replayed_and_says_what_would_have_happened(scenario, rule) -> None:
    result = call("--scenario", scenario)
    assert result.exit_code == 0, result.output
    if rule is not None:
        assert rule in result.output
        assert "fired" in result.output


def test_a_file_of_metrics_is_replayed(tmp_path) -> None:
    file = tmp_path / "series.jsonl"
    rows = [{"reward/error_rate": 0.3, "reward/judged_plays": 1000}] * 5
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = call("--scenario", str(file))
    assert "credit is the shared global reward" in result.output
    assert "without anything to look at: accuracy" in result.output


def test_rules_are_those_of_the_recipe_and_its_overrides(tmp_path) -> None:
    file = tmp_path / "series.jsonl"
    file.write_text('{"reward/error_rate": 0.3, "reward/judged_plays": 1000}\n' * 5)
    result = call("guard.rules.error_rate.above=0.5", "--scenario", str(file))
    assert "nothing is changed" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scenario", "entropy_colapse"], "did you mean 'entropy_collapse'"),
        (["guard.enable=false", "--scenario", "healthy"], "switched off"),
        (["guard.rules.entropy.metric=actor/entrpy", "--scenario", "healthy"], "actor/entropy"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert said in result.output


def test_a_file_that_holds_no_metrics_is_refused(tmp_path) -> None:
    file = tmp_path / "series.jsonl"
    for text, said in (
        ("", "holds no metrics"),
        ('{"step": NaN}', "step"),
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"step": "x"}', "step"),
    ):
        file.write_text(text)
        result = call("--scenario", str(file))
        assert result.exit_code == 2
        assert said in result.output
