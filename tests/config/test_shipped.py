"""Tests of shipped recipes: found by name, after files, and by the recipes that extend them."""

from pathlib import Path

import pytest

from creditflow.config import load_recipe
from creditflow.config.loading import find_recipe, shipped_recipes
from creditflow.errors import ConfigError
from tests.cli.commands import creditflow
from tests.paths import RECIPES


@pytest.mark.parametrize("name", ["arithmetic_chain", "arithmetic_chain.yaml"])
def test_bare_name_finds_the_shipped_recipe(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == RECIPES / "arithmetic_chain.yaml"
    recipe = load_recipe(name)
    assert (recipe.name, recipe.folder) == ("arithmetic_chain", RECIPES)


def test_file_comes_before_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dapo.yaml").touch()
    (tmp_path / "tool_chain").mkdir()
    assert find_recipe("dapo.yaml") == Path("dapo.yaml")
    assert find_recipe("dapo") == RECIPES / "dapo.yaml"
    assert find_recipe("tool_chain") == RECIPES / "tool_chain.yaml"
    assert find_recipe(missing := tmp_path / "tool_chain.yaml") == missing


def test_recipe_extends_a_shipped_one_by_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: arithmetic_chain_long\nrecipe: {operations: 7}\n")
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe.config.recipe["operations"] == 7
    assert recipe.config.trainer.total_training_steps == 24


def test_files_of_an_extended_recipe_are_beside_it(tmp_path):
    (base := tmp_path / "base").mkdir()
    prompt = "team.py: you are" + " not" * 1000 + " team.py:solve"
    for folder in (base, tmp_path):
        (folder / "saved").mkdir()
    (base / "base.yaml").write_text(
        f"team: {{workflow: 'team.py:solve', agents: {{solver: {{system: '{prompt}'}}}}}}\n"
        f"data: {{train_files: [tasks.jsonl, other.jsonl, {base}/tasks.jsonl, saved]}}\n"
        "trainer: {experiment_name: tasks.jsonl}\n"
        "reward: {functions: [{fn: 'team.py:right'}, {fn: 'mine.py:right'}]}\n"
    )
    for name in ("team.py", "tasks.jsonl"):
        (base / name).touch()
    for name in ("team.py", "mine.py", "other.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "mine.yaml").write_text("extends: base/base.yaml\nteam: {agents: {critic: {system: team.py}}}\n")
    config = load_recipe(tmp_path / "mine.yaml").config
    assert config.team.workflow == f"{base}/team.py:solve"
    tasks = f"{base}/tasks.jsonl"
    assert config.data.train_files == [tasks, "other.jsonl", tasks, f"{base}/saved"]
    assert config.trainer.experiment_name == "tasks.jsonl"
    assert [entry.fn for entry in config.reward.functions] == [f"{base}/team.py:right", "mine.py:right"]
    assert {name: agent.system for name, agent in config.team.agents.items()} == {
        "solver": prompt,
        "critic": "team.py",
    }


def test_unknown_recipe_names_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^arithmetic_chian: no such recipe \(did you mean 'arithmetic_chain'\?\)$"):
        load_recipe("arithmetic_chian")
    (tmp_path / "child.yaml").write_text("extends: nobody.yaml\n")
    for name in ("child.yaml", "child.yaml/nobody.yaml"):
        with pytest.raises(ConfigError, match=r"nobody\.yaml: no such recipe; `creditflow recipes` lists the shipped$"):
            load_recipe(name)
    with pytest.raises(ConfigError, match=r"chlid\.yml: no such recipe \(did you mean '.*/child\.yaml'\?\)$"):
        load_recipe(tmp_path / "chlid.yml")
    with pytest.raises(ConfigError, match=r"^logic_single: no such recipe; removed in 0\.1: use `sums_single`"):
        load_recipe("logic_single")
    assert {"arithmetic_chain", "dapo", "tool_chain"} <= set(shipped_recipes())


def test_recipes_lists_each_with_its_team():
    _, *lines = creditflow("recipes").stdout.partition("\n\n")[0].splitlines()
    rows = dict(zip(lines[::2], lines[1::2], strict=True))
    assert sorted(head.split()[0] for head in rows) == shipped_recipes()
    for head, text in rows.items():
        team = load_recipe(head.split()[0]).config.team
        assert text.strip().partition(": ")[0].split(", ") == list(team.agents)
