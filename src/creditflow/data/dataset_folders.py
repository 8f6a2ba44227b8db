"""Folders of tasks: data sets saved by Hugging Face's `datasets`, and folders of Parquet or JSONL files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from creditflow._utils.install import pip_install
from creditflow.errors import DataError, first_line

Split = Literal["train", "val"]

SUFFIXES = (".parquet", ".jsonl")
"""Endings of files that hold tasks."""
_SAVED = "state.json"
"""A file that `save_to_disk` writes for a `Dataset`; a `DatasetDict` has a folder with one for each split."""
_TRAIN = ("train", "training")
_HELD_OUT = ("validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
_NAMES: dict[Split, tuple[str, ...]] = {"train": _TRAIN, "val": (*_HELD_OUT, *_TRAIN)}
"""Names of splits, the preferred one first. A folder without a held-out split validates on its training split."""


def parts_of_folder(folder: Path, split: Split, key: str) -> list[Path]:
    """Return the files of one split in a folder, sorted by name, or the folder of a saved data set.

    A `DatasetDict` has its splits in subfolders. In other folders, file names give the split (`test-00000.parquet`). If
    no name does, all files belong to every split. Raises DataError for a folder without tasks or without the split.
    """
    if (folder / _SAVED).is_file():
        return [folder]
    splits = _splits(folder, key)
    if "" not in splits:
        return splits[_chosen(splits, split, folder, key)]
    if len(splits) > 1:
        named = ", ".join(name for name in splits if name)
        raise DataError(
            f"{key}: {folder}: expected a split in every file's name or in none, got {splits[''][0].name!r} beside "
            f"files of {named}; list the files instead of the folder"
        )
    return splits[""]


def saved_rows(folder: Path, choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set that `Dataset.save_to_disk` has written, with the columns that `choose` keeps.

    Raises DataError if it is unreadable or `datasets` is not installed.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(f"{folder}: reading it needs the package that saved it: {pip_install('datasets')}") from error
    try:
        # The format that was set when the data set was saved (torch, numpy) is removed: rows are Python values.
        dataset = datasets.load_from_disk(str(folder.resolve())).with_format(None)
        yield from dataset.select_columns(choose(dataset.column_names))
    except DataError:
        raise
    except Exception as error:  # a broken file raises errors of pyarrow, json, fsspec and others
        raise DataError(f"{folder}: not a readable data set: {type(error).__name__}: {first_line(error)}") from error


def _splits(folder: Path, key: str) -> dict[str, list[Path]]:
    """The parts of each split by the split's name; the empty name stands for files without one."""
    saved = {path.name: [path] for path in sorted(folder.iterdir()) if (path / _SAVED).is_file()}
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file() and not path.name.startswith("."):
            words = re.split(r"[^a-z]+", path.stem.lower())
            splits.setdefault(next((word for word in words if word in _NAMES["val"]), ""), []).append(path)
    if not (splits := saved or splits):
        entries = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{key}: {folder}: expected a data set of `save_to_disk`, or {', '.join(SUFFIXES)} files in the folder "
            f"itself, got {entries}"
        )
    return splits


def _chosen(splits: dict[str, list[Path]], split: Split, folder: Path, key: str) -> str:
    for name in _NAMES[split]:
        if name in splits:
            return name
    options = ", ".join(splits)
    raise DataError(
        f"{key}: {folder}: expected a split {' or '.join(map(repr, _NAMES[split][:2]))}, got {options}; "
        f"name the folder or the files of a split, such as {splits[next(iter(splits))][0]}"
    )
