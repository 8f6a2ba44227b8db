"""Properties of the test suite itself."""

import re

import yaml

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
