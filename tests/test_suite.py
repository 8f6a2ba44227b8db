"""Properties of the test suite itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, settings

from tests.paths import ROOT

UNSTABLE = {
    "time": "time.time()",
    "process": "f'{os.getpid()}'",
    "address": "repr(object())",
    "sets": "str(set('abcdefgh'))",
}


def collections(*words: str | Path) -> list[list[str]]:
    """The ids that two processes collect, in order. Their hash seeds and clocks differ."""
    pytest_words = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=-q", "-p", "no:cacheprovider"]
    started = [
        subprocess.Popen(
            [*pytest_words, *words, *more],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            text=True,
            stdout=subprocess.PIPE,
        )
        for seed, more in (("1", []), ("2", ["-p", "tests.other_clock"]))
    ]
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    return [[line for line in output.splitlines() if "::" in line] for output in printed]


@pytest.mark.parametrize("tests", ["tests/plugins/traces/test_spans.py", pytest.param("tests", marks=pytest.mark.slow)])
def test_ids_are_independent_of_clock_process_and_hash_seed(tests, tmp_path):
    lines = ["import os, pytest, time", "def test_steady(): pass"]
    for name, value in UNSTABLE.items():
        lines += [f"@pytest.mark.parametrize('x', [{value}])", f"def test_{name}(x): pass"]
    bad = tmp_path / "test_unstable.py"
    bad.write_text("\n".join(lines))

    def of_bad(line: str) -> bool:
        return bad.name in line or line.startswith("::")  # pytest leaves out the name of a file outside the project

    # The two lists differ for the bad file, so the comparison of the other ids can fail.
    (first, first_bad), (second, second_bad) = (
        ([line for line in found if not of_bad(line)], [line for line in found if of_bad(line)])
        for found in collections(tests, bad)
    )
    assert len(first) > 20
    assert first == second
    assert (len(first_bad), len(second_bad)) == (5, 5)
    assert {line.partition("::")[2] for line in {*first_bad} & {*second_bad}} == {"test_steady"}


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


def test_hypothesis_is_reproducible_without_a_time_limit():
    assert (settings().derandomize, settings().print_blob, settings().deadline) == (True, True, None)
    assert HealthCheck.too_slow in settings().suppress_health_check
