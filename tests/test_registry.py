"""Tests of registries: built-in entries, and entry points of other distributions."""

from pathlib import Path

import pytest

from creditflow.errors import ConfigError
from creditflow.registry import Registry
from tests.distributions import install

GROUP = "creditflow.colours"
CODE = "RED = 'ff0000'\nNUMBER = 1\n"


@pytest.fixture
def colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[str]:
    points = "red = paint:RED\nnumber = paint:NUMBER\nbroken = no_paint:RED\nblue = paint:RED\n"
    install(tmp_path, f"[{GROUP}]\n{points}", paint=CODE)
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[str] = Registry("paint.colour", group=GROUP, kind=str)
    registry.add("blue", "0000ff")
    registry.add("green", "00ff00")
    registry.add("number", "one")
    return registry


def test_entry_point_is_loaded_by_its_name(colours: Registry[str]) -> None:
    assert colours.names() == ("blue", "broken", "green", "number", "red")
    assert (colours["red"], colours["green"], "broken" in colours) == ("ff0000", "00ff00", True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "entry point 'broken' of creditflow.colours: no_paint:RED cannot be loaded: ModuleNotFoundError"),
        ("number", "entry point 'number' of creditflow.colours: expected an object of type str, got int"),
        ("blue", "entry point 'blue' of creditflow.colours: expected a new name, got 'blue', which is taken"),
        ("gren", "paint.colour: expected one of .* got 'gren' \\(did you mean 'green'\\?\\)"),
    ],
)
def test_wrong_entry_is_refused_when_used(colours: Registry[str], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        colours[name]


def test_taken_name_is_refused() -> None:
    registry: Registry[str] = Registry("paint.colour")
    registry.add("red", "ff0000")
    with pytest.raises(ConfigError, match="expected a new name, got 'red', which is registered already"):
        registry.add("red", "ee0000")
