"""The JSON Schema of recipes, and the refusal of every value that it refuses."""

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from creditflow.config import load_recipe
from creditflow.config.schema import json_schema
from creditflow.errors import ConfigError
from tests.builders import examples
from tests.cli.commands import creditflow
from tests.distributions import HALVES
from tests.paths import RECIPES, ROOT, TOY

SCHEMA = json_schema()
FILE = ROOT / "docs/schema.json"


def valid(value: object, part: dict[str, Any] = SCHEMA) -> bool:
    return bool(Draft202012Validator({**part, "$defs": SCHEMA["$defs"]}).is_valid(value))


def test_schema_file_is_current():
    """`creditflow schema > docs/schema.json` writes it."""
    assert json.loads(creditflow("schema").stdout) == SCHEMA
    Draft202012Validator.check_schema(SCHEMA)
    stored = json.loads(FILE.read_text())
    if pydantic.VERSION < "2.13":  # it leaves out the docstrings of dataclasses
        del stored["$defs"]["RewardFunctionConfig"]["description"]
    assert stored == SCHEMA


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipe_fits_its_schema_and_loads(path):
    words, _, file = path.read_text().splitlines()[0].partition("$schema=")

    assert words == "# yaml-language-server: "
    assert (path.parent / file).resolve() == FILE
    assert valid(OmegaConf.to_container(OmegaConf.load(path)))
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize(
    ("recipe", "fits"),
    [
        ({"extends": "other.yaml", "data": None}, True),
        ({"data": {"train_batch_size": "${recipe.size}"}, "team": {"agents": {"a": None}}}, True),
        ({"policies": {"far": {"endpoint": "http://127.0.0.1:8000/v1"}}}, True),
        ({"algorithm": {"propagation": "mine.py:rule"}}, True),
        ({"data": {"train_batch": 4}}, False),
        ({"algorithm": {"gamma": 1.5}}, False),
        ({"reward": {"functions": [{"weight": 1.0}]}}, False),
    ],
)
def test_schema_judges_a_recipe(recipe, fits):
    assert valid(recipe) == fits


def test_schema_of_a_recipe_has_the_rules_of_its_files(tmp_path):
    (tmp_path / "rules.py").write_text(HALVES)
    (tmp_path / "mine.yaml").write_text(f"extends: {TOY}\nalgorithm: {{propagation: rules.py:Halves}}\n")
    schema = json.loads(creditflow("schema", tmp_path / "mine.yaml").stdout)

    def fits(**spec: object) -> bool:
        return Draft202012Validator(schema).is_valid({"algorithm": {"propagation": spec}})

    for name in ("rules.py:Halves", f"{tmp_path}/rules.py:Halves"):
        assert fits(rule=name, factor=0.5)
        assert not fits(rule=name, facter=0.5)
    assert fits(rule="other.py:Halves", facter=0.5)


Path = tuple[str | int, ...]


def references(part: Any) -> Iterator[tuple[Path, str]]:
    """The sections that a value may hold: a path to one of them, and its name."""
    if not isinstance(part, dict):
        return
    if "$ref" in part:
        yield (), part["$ref"].rpartition("/")[2]
    for one in part.get("anyOf", ()):
        yield from references(one)
    for key, step in (("additionalProperties", "default"), ("items", 0)):
        yield from (((step, *steps), name) for steps, name in references(part.get(key)))


def options(section: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The path and schema of every option, with one entry of each mapping and list of sections."""
    for name, part in section["properties"].items():
        yield (*path, name), part
        for steps, inner in references(part):
            yield from options(SCHEMA["$defs"][inner], (*path, name, *steps))


ANY = {"description", "default"}
OPTIONS = [(path, part) for path, part in options(SCHEMA) if path != ("extends",) and part.keys() - ANY]


def test_every_option_has_a_description():
    sections = [path for path, part in OPTIONS if "$ref" not in str(part) and "description" not in part]

    assert sections == []


TEXT = st.text("abcxyz_- ", max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-3, 3) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)


def as_text(value: Any) -> Any:
    """`value` with its numbers as texts, which options for texts accept."""
    if isinstance(value, list):
        return [as_text(item) for item in value]
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return str(value) if type(value) in (int, float) else value


def nested(path: Path, value: object) -> Any:
    """A recipe that sets one option."""
    for name in reversed(path):
        value = {name: value} if isinstance(name, str) else [{"fn": "exact_match", **value}]
    return value


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "base.yaml").write_text('{"team": {"workflow": "team.py:solve", "agents": {"solver": {}}}}')
    return folder / "base.yaml"


@examples(300)
@given(option=st.sampled_from(OPTIONS), value=VALUES)
def test_wrong_value_is_refused_with_its_full_key(base, option, value):
    path, part = option
    assume(not valid(value, part) and not valid(as_text(value), part))
    key = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path)[1:]
    recipe = base.with_name("recipe.yaml")
    recipe.write_text(json.dumps({"extends": "base.yaml", **nested(path, value)}))

    with pytest.raises(ConfigError) as refused:
        load_recipe(recipe)

    assert str(refused.value).removeprefix("unknown key '").startswith(key)
