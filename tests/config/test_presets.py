"""Presets of published methods in recipes: their options, contradictions, notices and records."""

import pytest

from creditflow.config import load_recipe, recipe_of_dict
from creditflow.config.algorithm import rule_options
from creditflow.config.presets import PRESETS, preset_text
from creditflow.engines.base import expect_supported
from creditflow.errors import ConfigError
from tests.cli.commands import creditflow
from tests.paths import TOY


def recipe(tmp_path, algorithm, name="mine"):
    path = tmp_path / f"{name}.yaml"
    path.write_text(f"extends: {TOY}\nalgorithm: {algorithm}\n")
    return path


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_sets_its_options(tmp_path, name):
    loaded = load_recipe(recipe(tmp_path, f"{{preset: {name}}}"))
    for key, value in PRESETS[name].options.items():
        section, option = key.split(".")
        set_to = loaded.to_dict()[section][option]
        assert set_to == (rule_options(value) if option == "propagation" else value), key
    assert recipe_of_dict(loaded.to_dict(), loaded.name, loaded.folder).config == loaded.config
    (record := tmp_path / "record.yaml").write_text(loaded.to_yaml())
    assert load_recipe(record).config.algorithm == loaded.config.algorithm
    if name != "mappo":  # a verl worker receives rows
        expect_supported(loaded.config, "verl")


CONTRADICTION = "group_by: got 'task', but algorithm.preset: dr_mas sets"


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        ("{preset: dr_mas, group_by: task}", [], CONTRADICTION),
        ("{preset: dr_mas}", ["algorithm.group_by=task"], CONTRADICTION),
        ("{}", ["algorithm.preset=dr_mas", "algorithm.group_by=task"], CONTRADICTION),
        ("{preset: at_grpo}", ["algorithm.outcome_to=answer"], "propagation: got .*'answer'.*at_grpo sets"),
        ("{preset: dr_mas, threshold_share: true}", [], "threshold_share: true means propagation 'threshold'"),
        ("{preset: magrp}", [], r"preset: expected one of .*got 'magrp' \(did you mean 'magrpo'\?\)"),
    ],
)
def test_preset_refuses_contradictions_and_unknown_names(tmp_path, algorithm, overrides, message):
    with pytest.raises(ConfigError, match=f"^algorithm\\.{message}"):
        load_recipe(recipe(tmp_path, algorithm), overrides)


def test_preset_replaces_options_of_an_extended_recipe(tmp_path):
    base = recipe(tmp_path, "{propagation: threshold, propagation_threshold: 0.3, group_by: agent}", "base")
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {base}\nalgorithm: {{preset: dr_mas}}\n")
    loaded = load_recipe(path)
    assert loaded.config.algorithm.group_by == "task_agent"
    assert any("algorithm.group_by: 'agent' of an extended recipe is replaced" in notice for notice in loaded.notices)
    assert loaded.config.algorithm.propagation == {"rule": "identical", "shared_reward": "outcome"}


def test_preset_accepts_equal_options_and_null(tmp_path):
    path = recipe(tmp_path, "{preset: dr_mas, group_by: task_agent, threshold_share: null}")
    assert load_recipe(path).config.algorithm.group_by == "task_agent"
    algorithm = load_recipe(path, ["algorithm.preset=null", "algorithm.group_by=task"]).config.algorithm
    assert (algorithm.preset, algorithm.group_by) == (None, "task")


def test_other_engine_refuses_local_options_by_name(tmp_path):
    config = load_recipe(recipe(tmp_path, "{preset: mappo}")).config
    with pytest.raises(ConfigError, match=r"critic.context: trajectory is for --engine .*; bare does not support it"):
        expect_supported(config, "bare")


def test_check_prints_the_options_of_the_preset():
    result = creditflow("check", TOY, "algorithm.preset=dr_mas", "--tasks", 1)
    assert result.exit_code == 0, result.output
    assert preset_text("dr_mas") in " ".join(result.output.split())
    assert preset_text("dr_mas").startswith("preset dr_mas (arXiv 2602.08847) sets ")
    assert preset_text("calibrated").startswith("preset calibrated sets propagation: calibrated, ")
