"""Tests of loading the user's functions by reference."""

import builtins
import importlib
import math
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from creditflow._utils.loading import USER_FILES, is_reference, load_object
from creditflow.errors import USER_MODULE, ConfigError


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


def test_file_beside_the_recipe_comes_first(base: Path, elsewhere: Path) -> None:
    (elsewhere / "mine.py").write_text("where = 'elsewhere'")
    assert load_object("mine.py:where", base, "k") == "elsewhere"
    (base / "mine.py").write_text("where = 'base'")
    assert load_object("mine.py:where", base, "k") == "base"
    assert load_object("mine.py:where", elsewhere, "k") == "elsewhere"


def test_file_runs_once_and_shares_its_state(base: Path) -> None:
    (base / "mine.py").write_text(
        "calls = []\n"
        "open('runs.txt', 'a').write('run ')\n"
        "def note(what):\n"
        "    calls.append(what)\n"
    )  # fmt: skip
    (base / "link.py").symlink_to(base / "mine.py")
    note = load_object("mine.py:note", base, "k")
    note("one")
    assert load_object("mine.py:calls", base, "other key") == ["one"]
    for path in ("./mine.py", f"{base}/mine.py", "../base/mine.py", "link.py"):
        assert load_object(f"{path}:note", base, "k") is note
    assert Path("runs.txt").read_text() == "run "


def test_file_imports_its_neighbours(base: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = list(sys.path)
    monkeypatch.setattr(builtins, "_", None, raising=False)  # until gettext installs it
    for folder in (base, elsewhere):
        (folder / "team.py").write_text(f"import rewards\nfolder = {folder.name!r}\n")
        (folder / "rewards.py").write_text(
            "import json, team as other, gettext\nfrom team import folder\nfrom creditflow import Score\n"
            "from . import team as same\ngettext.install('x')\n"
            "def place():\n    import late\n    return _(folder), late.team is other is same, json.dumps(late.A().n)\n"
        )
        (folder / "late.py").write_text(
            "from __future__ import annotations\nimport dataclasses as d, team\n@d.dataclass\nclass A:\n    n: int = 3"
        )
        (folder / "creditflow.py").write_text("1 / 0")
        (folder / "json.py").write_text("1 / 0")
        (folder / "pytest.py").write_text("from pytest import raises")
    places = {folder.name: load_object("rewards.py:place", folder, "k") for folder in (base, elsewhere)}
    assert {name: place() for name, place in places.items()} == {name: (name, True, "3") for name in places}
    assert load_object("team.py:rewards", base, "k").place is places["base"]
    assert load_object("pytest.py:raises", base, "k") is pytest.raises
    assert (sys.path, "team" in sys.modules) == (path, False)

    (base / "team.py").write_text("folder = 'edited'")
    edited = load_object("rewards.py:place", base, "k")
    assert edited()[0] == "edited"
    assert places["base"]()[0] == "base"

    (base / "late.py").write_text("1 / 0")
    files = pickle.dumps(USER_FILES)
    for name in [name for name in sys.modules if name.startswith(USER_MODULE)]:
        del sys.modules[name]
    for file in base.iterdir():
        file.unlink()
    USER_FILES.clear()
    USER_FILES.update(pickle.loads(files))
    for expected, place in {"base": places["base"], "edited": edited}.items():
        assert importlib.import_module(place.__module__).place() == (expected, True, "3")


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
    assert refused(".loading:load_object", base) == "'.loading' is no module's name"
    assert refused("creditflow.no_such_module:solve", base) == "no module 'creditflow.no_such_module'"


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


def test_error_in_a_file_is_one_line_and_unloads_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "mine.py").write_text("import os, other\nsolve = other.__name__\n1 / ('SET' in os.environ)\n")
    (base / "other.py").write_text("import mine")
    for _ in range(2):
        assert refused("mine.py:solve", base) == "ZeroDivisionError: division by zero (mine.py:3)"
    monkeypatch.setenv("SET", "1")
    assert load_object("mine.py:solve", base, "k") == load_object("other.py:mine", base, "k").solve


def test_wrong_option_of_a_decorator_names_the_line(base: Path) -> None:
    (base / "mine.py").write_text(
        "from creditflow import reward\n@reward(agent='x')\ndef solve(step, trajectory): pass"
    )
    assert re.fullmatch(
        r"TypeError: reward\(\) got .* argument 'agent'.* \(mine.py:2\)", refused("mine.py:solve", base)
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import Other", "no module 'Other' (mine.py:2); a recipe's file can import what is installed, and the Python"),
        ("from . import nothing", "cannot import name 'nothing' from '.' (unknown location) (mine.py:2)"),
        ("from .. import other", "attempted relative import beyond top-level package (mine.py:2)"),
        ("from other import x", "cannot import name 'x' from 'other' ({base}/other.py) (mine.py:2)"),
        ("from math import own", "(mine.py:2); math.py beside it never replaces the installed math: rename the file"),
    ],
)
def test_failed_import_names_file_and_line(text: str, reason: str, base: Path) -> None:
    for name, content in {"mine": f"'A reward.'\n{text}", "other": "", "math": "own = 1"}.items():
        (base / f"{name}.py").write_text(content)
    assert reason.format(base=base) in refused("mine.py:solve", base)
    assert (load_object("math.py:own", base, "k"), load_object("math:sqrt", base, "k")) == (1, math.sqrt)


def test_reference_has_a_colon_and_is_no_file(elsewhere: Path) -> None:
    (elsewhere / "run:1.jsonl").write_text("{}")
    references = ["mine.py:make", "package.module:make", "no/such/folder:x", "run:2.jsonl"]
    others = ["tasks.parquet", "a/folder", "", None, 3, ["mine.py:make"], "run:1.jsonl", f"{elsewhere}/run:1.jsonl"]
    assert [value for value in (*references, *others) if is_reference(value)] == references
