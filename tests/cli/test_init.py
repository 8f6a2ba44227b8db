"""`creditflow init`: each template is a project that trains and passes its own test."""

import subprocess
from pathlib import Path

import pytest

from creditflow.cli.init import TEMPLATES
from creditflow.runs import Ledger
from tests.builders import mostly_slow
from tests.cli.commands import creditflow
from tests.forks import fast_python

NAMES = sorted(path.name for path in TEMPLATES.iterdir() if not path.name.startswith("_"))
FILES = {"README.md", "recipe.yaml", "rewards.py", "tasks.jsonl", "team.py", "test_team.py"}


def test_templates_are_those_of_the_help():
    assert NAMES == ["chain", "loop", "router", "tools"]
    text = " ".join(creditflow("init", "--help").stdout.split())
    assert all(f"{name}: " in text for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_template_trains_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    created = creditflow("init", "mine", "--template", name)
    assert created.exit_code == 0, created.output
    assert {path.name for path in Path("mine").iterdir()} == FILES
    assert "creditflow train mine/recipe.yaml" in created.stdout
    trained = creditflow("train", "mine/recipe.yaml", "trainer.total_training_steps=2")
    assert trained.exit_code == 0, trained.output
    (run,) = Path("runs").iterdir()
    ledger = Ledger.open(run)
    assert ledger.steps == (1, 2)
    assignments = [recorded.assignment for recorded in ledger]
    assert all(assignment is not None and assignment.advantage.advantage_S.any() for assignment in assignments)


@pytest.mark.parametrize("name", mostly_slow(NAMES, {"chain"}))
def test_template_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    (tmp_path / "mine").mkdir()  # an empty folder is filled
    assert creditflow("init", tmp_path / "mine", "--template", name).exit_code == 0
    python = fast_python()
    code = f"import pytest, sys; sys.executable = {python!r}; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    done = subprocess.run([python, "-c", code], cwd=tmp_path / "mine", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["full"], "NAME: full is not empty; name a new folder, or empty this one first"),
        (["file"], "NAME: file cannot be made: File exists"),
        (
            ["new", "--template", "chian"],
            "--template: expected one of chain, loop, router, tools, got 'chian' (did you mean 'chain'?)",
        ),
    ],
)
def test_init_refuses_bad_input_and_writes_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/mine.txt").touch()
    Path("file").touch()
    result = creditflow("init", *arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]
