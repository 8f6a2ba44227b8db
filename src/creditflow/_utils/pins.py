"""Methods of other packages that creditflow overrides or relies on, pinned by the hash of their source.

A table has one entry for each tested version: the hash of each method, by name (`file: Class.method`). A version is
accepted if none of its methods differs from those of a tested one.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


def changed_methods(root: Path, tested: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The methods of the package at `root` that differ from those of the nearest tested version."""
    here = method_hashes(root, {name for of_version in tested.values() for name in of_version})
    differ = [sorted(name for name in here if here[name] != known.get(name)) for known in tested.values()]
    return min(differ, key=len)


def difference(root: Path, tested: Mapping[str, Mapping[str, str]]) -> str:
    """A part of an error: the methods that `changed_methods` finds, and the tested versions. Empty if it finds none."""
    methods = ", ".join(name.split(": ")[1] for name in changed_methods(root, tested))
    return methods and f"differs from {', '.join(tested)}, which creditflow was tested with, in {methods}"


def method_hashes(root: Path, names: Iterable[str]) -> dict[str, str]:
    """The hash of each method's source in the package at `root`; empty if the method is absent.

    Empty lines, and spaces and line breaks at the end of a line, do not count.
    """
    names = sorted(names)
    sources = {name: text for file in {name.split(": ")[0] for name in names} for name, text in _methods(root, file)}
    lines = {name: [line.rstrip() for line in sources.get(name, "").splitlines() if line.strip()] for name in names}
    texts = {name: "\n".join(of_method) for name, of_method in lines.items()}
    return {name: text and hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}


def _methods(root: Path, file: str) -> Iterator[tuple[str, str]]:
    """The name and the source of each method in a file."""
    if not (root / file).is_file():
        return
    text = (root / file).read_text()
    for node in (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)):
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}: {node.name}.{item.name}", ast.get_source_segment(text, item) or ""
