"""Distributions in a temporary folder, for tests of entry points, and commands that see them."""

import os
import subprocess
from pathlib import Path

from tests.forks import fast_python


def install(folder: Path, entry_points: str, name: str = "theirs", **modules: str) -> None:
    """Write a distribution with the text of its `entry_points.txt`, and modules by name."""
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entry_points)


def python(site: Path, *arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` (default: `site`), with the distributions in `site` on its path."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [fast_python(), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        cwd=folder or site,
        check=False,
    )


def creditflow(site: Path, *words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of creditflow that sees the distributions in `site`."""
    return python(site, "-m", "creditflow", *words, folder=folder)


def succeeded(site: Path, *words: object, folder: Path | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    result = creditflow(site, *words, folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr
