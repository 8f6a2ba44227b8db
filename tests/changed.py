"""Run the tests of what differs from the last commit: `python -m tests.changed PYTEST_OPTIONS`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

from tests.paths import ROOT

OTHERS = {
    "docs": "tests/test_docs.py",
    "README.md": "tests/test_docs.py",
    "Makefile": "tests/test_docs.py",
    "constraints.txt": "tests/test_docs.py",
    "benchmarks": "tests/test_benchmarks.py",
    "examples": "tests/test_examples.py",
    "pyproject.toml": "tests/test_packaging.py",
}


def changed_files() -> list[str]:
    """The files that differ from the last commit, and those that git neither tracks nor ignores."""
    commands = ["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"]
    outputs = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for command in commands]
    return [line for output in outputs for line in output.stdout.splitlines()]


def tests_of(file: str) -> Iterator[str]:
    """The test files of a file's package, those with the module's name first. Tests of packages inside are left out."""
    path = PurePath(file)
    if path.parts[:2] == ("src", "creditflow"):
        path = PurePath("tests", *path.parts[2:])
    if path.parts[0] != "tests":
        yield from [OTHERS[path.parts[0]]] if path.parts[0] in OTHERS else []
    elif path.name.startswith("test_"):
        yield from [file] if (ROOT / file).exists() else []
    else:
        folder = next(parent for parent in path.parents if (ROOT / parent).is_dir())
        if folder != PurePath("tests"):
            tests = [str(test.relative_to(ROOT)) for test in (ROOT / folder).glob("test_*.py")]
            yield from sorted(tests, key=lambda test: (path.stem not in test, test))


def main(options: list[str]) -> int:
    files = changed_files()
    tests = list(dict.fromkeys(test for file in files for test in tests_of(file)))
    print(f"{len(files)} files differ from the last commit; {len(tests)} files of tests", flush=True)
    return pytest.main([*options, *map(str, (Path(ROOT, test) for test in tests))]) if tests else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
