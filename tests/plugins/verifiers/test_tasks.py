"""Addresses of verifiers' tasksets, which are parsed without verifiers."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from creditflow._utils.install import install_command
from creditflow.config import load_recipe
from creditflow.data.datasets import load_tasks, validation_files
from creditflow.errors import ConfigError, DataError
from creditflow.plugins.verifiers.tasks import parse_address
from creditflow.plugins.verifiers.workflow import _reads

MISSING = importlib.util.find_spec("verifiers") is None


def test_hooks_that_read_a_variable_are_found() -> None:
    read: list[Any] = [lambda a, b: a + b, lambda a: [a], lambda a: dict(**locals()), lambda a: lambda: a]
    assert all(_reads(hook, "a") for hook in read)
    assert not _reads(lambda a, b: {"a": b.a}, "a")


def test_address_is_parsed_into_options() -> None:
    address = parse_address(
        "verifiers://owner/price-desk@1.2?size=5&split=val&repeat=3&task.judges=[]&env.id=user-sim&env.user.max_turns=4",
        "data.train_files",
    )
    assert (address.taskset, address.size, address.split, address.runtime) == ("owner/price-desk@1.2", 5, "val", "none")
    assert address.options == {
        "taskset.repeat": "3",
        "taskset.task.judges": "[]",
        "id": "user-sim",
        "user.max_turns": "4",
    }


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "expected verifiers://NAME"),
        ("../os", "expected verifiers://NAME"),
        ("desk?size=0", "size: expected a whole number of 1 or more, got '0'"),
        ("desk?split=test", "split: expected train, val, tune, got 'test'"),
        ("desk?runtime=docker", "runtime: expected none, or subprocess"),
        ("desk?env.=1", "expected options as name=value or env.path.to.name=value, got ''"),
        ("desk?a..b=1", "expected options as name=value"),
        ("desk?task=1&task.judges=2", "task has a value by another option"),
        ("desk?env.taskset.label=a&label=b", "expected each option once"),
        ("desk?id=judged", "and no id of a taskset"),
        ("desk?task.judges=2&task=1", "other options set parts of it"),
    ],
)
def test_malformed_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_address(f"verifiers://{address}", "team.workflow")


def test_validation_tasks_come_from_another_split() -> None:
    assert validation_files("verifiers://desk", None) == "verifiers://desk"
    with pytest.raises(DataError, match="validation would use the same problems"):
        validation_files("verifiers://desk?split=train", None)


@pytest.mark.skipif(not MISSING, reason="verifiers is installed")
def test_missing_verifiers_is_named_with_its_installation(tmp_path: Path) -> None:
    message = rf"in a separate environment, .* needs verifiers: {re.escape(install_command('verifiers'))}"
    with pytest.raises(ConfigError, match=f"data.train_files: .*{message}"):
        load_tasks("verifiers://desk", tmp_path, {}, "train")
    (tmp_path / "recipe.yaml").write_text('team: {workflow: "verifiers://desk"}\n')
    with pytest.raises(ConfigError, match=f"team.workflow: .*{message}"):
        load_recipe(tmp_path / "recipe.yaml")
