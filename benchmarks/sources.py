"""Hashes of the files that a benchmark measures, and outdated result files.

The hash of a Python file covers its code: comments, docstrings and layout do not change it. The hash of any other file
covers its bytes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.record import RESULTS, ROOT

TRAINING = (
    "src/creditflow/credit",
    "src/creditflow/engines/local",
    "src/creditflow/rewards",
    "src/creditflow/rollout",
    "src/creditflow/data/__init__.py",
)
"""The parts that decide the result of a training run on the local engine."""


def hashes(measures: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """The hash of each file that `measures` names, by its path below `root`.

    A folder means its .py and .yaml files. Raises FileNotFoundError if a path does not exist.
    """
    return {
        str(file.relative_to(root)): content_hash(file.name, file.read_bytes())
        for name in measures
        for file in _files(root / name)
    }


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted([*path.rglob("*.py"), *path.rglob("*.yaml")])
    else:
        raise FileNotFoundError(f"MEASURES: {path} does not exist")


@cache
def content_hash(name: str, content: bytes) -> str:
    """The first twelve hexadecimal digits of the hash of a file's code."""
    if name.endswith(".py"):
        content = repr(_plain(ast.parse(content))).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def _plain(node: object) -> object:
    """Convert `node` to nested lists, without positions, docstrings and empty fields.

    `ast.dump` is unsuitable: empty fields differ between versions of Python.
    """
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    if isinstance(node, ast.AST):
        fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
        return [type(node).__name__, *(field for field in fields if field[1] not in (None, []))]
    return node


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# ---- folders of runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The folder of a benchmark's runs, and the hashes of the sources at its creation."""

    folder: Path
    measured: dict[str, str]

    @classmethod
    def begin(cls, name: str, measures: Sequence[str], *, quick: bool, below: Path = ROOT / "runs") -> Work:
        """Open `runs/NAME`, whose finished runs are kept, or an empty `runs/NAME-quick`.

        Kept runs may be older than the current code, so the hashes are stored beside the folder at its creation. Raises
        SystemExit if the folder exists without them.
        """
        folder = below / (f"{name}-quick" if quick else name)
        stamp = folder.with_name(f"{folder.name}.measured.json")
        if quick:
            shutil.rmtree(folder, ignore_errors=True)
        elif stamp.exists():
            return cls(folder, json.loads(stamp.read_text()))
        elif folder.exists():
            raise SystemExit(f"error: {folder}: its runs have no {stamp.name}: remove the folder to run them again")
        folder.mkdir(parents=True)
        work = cls(folder, hashes(measures))
        stamp.write_text(json.dumps(work.measured))
        return work


# ---- outdated results ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One result file, compared with the current sources."""

    name: str
    date: str
    measured: int
    """The number of files with a hash; 0 for a file written by hand."""
    changed: tuple[str, ...]
    """Files whose code has changed."""
    gone: tuple[str, ...]
    """Files that no longer exist."""

    @property
    def outdated(self) -> bool:
        """True if a measured file was changed or removed."""
        return bool(self.changed or self.gone)

    @classmethod
    def read(cls, path: Path, root: Path = ROOT) -> Result:
        """Compare the hashes in `path` with the files below `root`."""
        facts = json.loads(path.read_text())
        measured: dict[str, str] = facts.get("measured", {})
        there = {name: hashes([name], root)[name] for name in measured if (root / name).is_file()}
        changed = tuple(name for name, found in there.items() if found != measured[name])
        gone = tuple(name for name in measured if name not in there)
        return cls(path.stem, facts.get("date", ""), len(measured), changed, gone)


def results(folder: Path = RESULTS, root: Path = ROOT) -> list[Result]:
    """All result files in `folder`, by name."""
    return [Result.read(path, root) for path in sorted(folder.glob("*.json"))]
