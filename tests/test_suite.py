"""Properties of the test suite itself."""

import re

import pytest
import yaml

from tests import changed
from tests.paths import ROOT


def test_prose_hook_rejects_indirect_phrases_only():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (pattern,) = [re.compile(hook["entry"]) for hook in hooks if hook["language"] == "pygrep"]
    rejected = [
        '    """Of a run, the steps."""',
        "# Whose step it is",
        f"which is {'told'} to the guard",
        f"def test_{'x' * 56}(",
    ]
    assert all(map(pattern.search, rejected))
    pages = [path for folder in ("docs", "src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*")]
    lines = [
        f"{path}: {line}"
        for path in [*pages, *ROOT.glob("*.md")]
        if path.suffix in (".py", ".md")
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]
    assert lines == []


def test_pre_commit_and_the_project_use_one_ruff():
    (version,) = set(re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert version in (ROOT / "constraints.txt").read_text().splitlines()


SELECTED = {
    "src/creditflow/registry.py": "tests/test_registry.py",
    "src/creditflow/plugins/__init__.py": "tests/config/test_plugins.py",
    "tests/oracle/groups.py": "tests/credit/test_groups.py",
    "benchmarks/cases.py": "tests/test_benchmark_cases.py",
}


def test_check_selects_tests_and_names_files_without(monkeypatch, capsys):
    assert all(test in changed.tests_of(file) for file, test in SELECTED.items())
    monkeypatch.setattr(changed, "changed_files", lambda: ["src/creditflow/errors.py", "tests/test_suite.py"])
    monkeypatch.setattr(pytest, "main", lambda options: pytest.ExitCode.NO_TESTS_COLLECTED)
    assert changed.main([]) == 0
    _, without, slow = capsys.readouterr().out.splitlines()
    assert without == "no tests are selected for src/creditflow/errors.py; `make test` runs all"
    assert slow.startswith("all of these tests are slow")
