"""Tests of loading the user's functions by reference."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from creditflow._utils.loading import is_reference, load_object
from creditflow.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_module_outlives_its_test() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory other than the recipe's folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path, elsewhere: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    return folder


def refused(reference: str, base: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_object(reference, base, "team.workflow")
    message = str(raised.value)
    assert message.startswith("team.workflow: ")
    return message.removeprefix("team.workflow: ")


def test_module_is_imported_by_its_dotted_name(base: Path) -> None:
    assert load_object("math:sqrt", base, "k") is math.sqrt
    assert load_object("creditflow._utils.loading:load_object", base, "k") is load_object


def test_file_beside_the_recipe_comes_first(base: Path, elsewhere: Path) -> None:
    (elsewhere / "mine.py").write_text("where = 'elsewhere'")
    assert load_object("mine.py:where", base, "k") == "elsewhere"
    (base / "mine.py").write_text("where = 'base'")
    assert load_object("mine.py:where", base, "k") == "base"


def test_file_may_be_a_relative_or_absolute_path(base: Path) -> None:
    (base / "sub").mkdir()
    (base / "sub" / "mine.py").write_text("value = []")
    value = load_object("sub/mine.py:value", base, "k")
    assert load_object(f"{base}/sub/mine.py:value", base, "k") is value
    assert load_object("../base/sub/mine.py:value", base, "k") is value


def test_file_runs_once_and_shares_its_state(base: Path) -> None:
    (base / "mine.py").write_text(
        "calls = []\n"
        "open('runs.txt', 'a').write('run ')\n"
        "def note(what):\n"
        "    calls.append(what)\n"
    )  # fmt: skip
    note = load_object("mine.py:note", base, "k")
    note("one")
    assert load_object("mine.py:calls", base, "other key") == ["one"]
    assert load_object("./mine.py:note", base, "k") is note
    assert Path("runs.txt").read_text() == "run "


def test_symlink_to_a_file_is_the_same_module(base: Path) -> None:
    (base / "mine.py").write_text("value = []")
    (base / "link.py").symlink_to(base / "mine.py")
    assert load_object("link.py:value", base, "k") is load_object("mine.py:value", base, "k")


def test_same_file_name_in_two_folders_is_two_modules(base: Path, elsewhere: Path) -> None:
    (base / "mine.py").write_text("where = 'base'")
    (elsewhere / "mine.py").write_text("where = 'elsewhere'")
    assert load_object("mine.py:where", base, "k") == "base"
    assert load_object("mine.py:where", elsewhere, "k") == "elsewhere"


def test_file_does_not_shadow_a_standard_module(base: Path) -> None:
    (base / "math.py").write_text("sqrt = 'mine'")
    assert load_object("math.py:sqrt", base, "k") == "mine"
    assert load_object("math:sqrt", base, "k") is math.sqrt


def test_file_may_define_dataclasses(base: Path) -> None:
    (base / "mine.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Thing:\n"
        "    number: int = 3\n"
    )  # fmt: skip
    assert load_object("mine.py:Thing", base, "k")().number == 3


@pytest.mark.parametrize("reference", ["", ":", "solve", "mine.py", "mine.py:", ":solve", "a/b.py"])
def test_malformed_reference_is_refused(reference: str, base: Path) -> None:
    expected = f"expected `package.module:function` or `file.py:function`, got {reference!r}"
    assert refused(reference, base) == expected


def test_missing_file_error_lists_the_search_path(base: Path) -> None:
    assert refused("mine.py:solve", base) == f"no file 'mine.py' in {base} or the working directory"
    (base / "mine.py").mkdir()
    assert refused("mine.py:solve", base) == f"no file 'mine.py' in {base} or the working directory"


def test_missing_module_is_named(base: Path) -> None:
    assert refused("no_such_package:solve", base) == "no module 'no_such_package'"
    assert refused("no_such_package.sub:solve", base) == "no module 'no_such_package'"
    assert refused("creditflow.no_such_module:solve", base) == "no module 'creditflow.no_such_module'"


def test_missing_dependency_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "mine_of_this_test.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(base)
    assert refused("mine_of_this_test:solve", base) == "no module 'no_such_package'"


def test_relative_module_is_refused(base: Path) -> None:
    assert refused(".loading:load_object", base).startswith("'.loading' is no module's name")


@pytest.mark.parametrize("where", ["mine.py", "math"])
def test_missing_name_error_names_the_module(where: str, base: Path) -> None:
    (base / "mine.py").write_text("def solve(): pass")
    assert refused(f"{where}:xyzzy", base) == f"{where} has no 'xyzzy'"
    assert refused("mine.py:slove", base) == "mine.py has no 'slove' (did you mean 'solve'?)"


def test_syntax_error_has_file_and_line(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = base / "broken_of_this_test.py"
    broken.write_text("a = 1\n\ndef solve(:\n    pass\n")
    assert refused("broken_of_this_test.py:solve", base).startswith(f"{broken}:3: ")
    monkeypatch.syspath_prepend(base)
    assert refused("broken_of_this_test:solve", base).startswith(f"{broken}:3: ")


def test_fixed_file_loads_after_an_error(base: Path) -> None:
    (base / "mine.py").write_text("def solve(:")
    assert "mine.py:1: " in refused("mine.py:solve", base)
    (base / "mine.py").write_text("solve = 'mended'")
    assert load_object("mine.py:solve", base, "k") == "mended"


def test_error_in_a_file_propagates_and_unloads_it(base: Path) -> None:
    (base / "mine.py").write_text("solve = 'half'\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_object("mine.py:solve", base, "k")


@pytest.mark.parametrize("value", ["mine.py:make", "package.module:make", "no/such/folder:x"])
def test_value_with_a_colon_is_a_reference(value: str) -> None:
    assert is_reference(value)


@pytest.mark.parametrize("value", ["tasks.parquet", "a/folder", "", None, 3, ["mine.py:make"]])
def test_value_without_a_colon_is_not_a_reference(value: object) -> None:
    assert not is_reference(value)


def test_existing_file_with_a_colon_is_not_a_reference(elsewhere: Path) -> None:
    (elsewhere / "run:1.jsonl").write_text("{}")
    assert not is_reference("run:1.jsonl")
    assert not is_reference(str(elsewhere / "run:1.jsonl"))
    assert is_reference("run:2.jsonl")
