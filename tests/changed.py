"""Run the tests of what differs from the last commit: `python -m tests.changed PYTEST_OPTIONS`."""

import subprocess
import sys
from pathlib import PurePath

import pytest

from tests.paths import ROOT

OTHERS: dict[tuple[str, ...], str] = {
    ("docs/", "README.md", "Makefile", "constraints.txt"): "tests/test_docs.py",
    ("benchmarks/",): "tests/test_benchmark*.py",
    ("examples/",): "tests/test_examples.py",
    ("pyproject.toml",): "tests/test_packaging.py",
    ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", ".pre-commit-config.yaml"): "tests/test_suite.py",
    ("tests/oracle/",): "tests/credit/test_*.py",
    ("tests/verl_cpu/",): "tests/engines/verl/test_*.py",
}
"""The beginning of a file's path -> its tests, where the package does not say them."""


def changed_files() -> list[str]:
    """The files that differ from the last commit, and those that git neither tracks nor ignores."""
    commands = ["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"]
    outputs = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for command in commands]
    return [line for output in outputs for line in output.stdout.splitlines()]


def tests_of(file: str) -> list[str]:
    """The test files of a file's package, those with the module's name first. Tests of packages inside are left out.

    For a module without a package of tests, those with its name.
    """
    path = PurePath(file)
    if path.parts[:2] == ("src", "creditflow"):
        path = PurePath("tests", *path.parts[2:])
    stem = path.parent.name if path.stem == "__init__" else path.stem
    if other := next((pattern for start, pattern in OTHERS.items() if file.startswith(start)), None):
        tests = [*ROOT.glob(other)]
    elif path.parts[0] != "tests":
        tests = []
    elif path.name.startswith("test_") and (ROOT / file).exists():
        tests = [ROOT / file]
    else:
        folder = next(parent for parent in path.parents if (ROOT / parent).is_dir())
        tests = [] if folder == PurePath("tests") else [*(ROOT / folder).glob("test_*.py")]
        tests = tests or [*ROOT.glob(f"tests/**/test_{stem}.py")]
    return sorted((str(test.relative_to(ROOT)) for test in tests), key=lambda test: (stem not in test, test))


def main(options: list[str]) -> int:
    selected = {file: tests_of(file) for file in changed_files()}
    tests = list(dict.fromkeys(test for tests in selected.values() for test in tests))
    print(f"changed files: {len(selected)}; files of tests: {len(tests)}", flush=True)
    if without := [file for file, tests in selected.items() if not tests]:
        print(f"no tests are selected for {', '.join(without)}; `make test` runs all", flush=True)
    code = pytest.main([*options, *(str(ROOT / test) for test in tests)]) if tests else 0
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        print("all of these tests are slow: `make test-all` runs them")
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
