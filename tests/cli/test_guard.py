"""The command `creditflow guard test`."""

import json

import pytest
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.monitoring.scenarios import SCENARIOS
from tests.paths import RECIPES

RECIPE = str(RECIPES / "arithmetic_chain.yaml")


def call(*words: str):
    return CliRunner().invoke(app, ["guard", "test", RECIPE, *words])


@pytest.mark.parametrize(("scenario", "rule"), [(name, scenario.rule) for name, scenario in SCENARIOS.items()])
def test_each_scenario_is_replayed_with_its_events(scenario, rule) -> None:
    result = call("--scenario", scenario)
    assert result.exit_code == 0, result.output
    if rule is not None:
        assert rule in result.output
        assert "fired" in result.output


def test_metrics_file_is_replayed(tmp_path) -> None:
    file = tmp_path / "series.jsonl"
    rows = [{"reward/error_rate": 0.3, "reward/judged_trajectories": 1000}] * 5
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = call("--scenario", str(file))
    assert "credit is the shared global reward" in result.output
    assert "rules without metrics in this series: accuracy" in result.output


def test_overrides_change_the_rules(tmp_path) -> None:
    file = tmp_path / "series.jsonl"
    file.write_text('{"reward/error_rate": 0.3, "reward/judged_trajectories": 1000}\n' * 5)
    result = call("guard.rules.error_rate.above=0.5", "--scenario", str(file))
    assert "nothing has changed" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scenario", "entropy_colapse"], "did you mean 'entropy_collapse'"),
        (["guard.enable=false", "--scenario", "healthy"], "switched off"),
        (["guard.rules.entropy.metric=actor/entrpy", "--scenario", "healthy"], "actor/entropy"),
    ],
)
def test_bad_input_exits_with_code_2(words, message) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.output


def test_file_without_metrics_is_refused(tmp_path) -> None:
    file = tmp_path / "series.jsonl"
    for text, message in (
        ("", "holds no metrics"),
        ('{"step": NaN}', "step"),
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"step": "x"}', "step"),
    ):
        file.write_text(text)
        result = call("--scenario", str(file))
        assert result.exit_code == 2
        assert message in result.output
