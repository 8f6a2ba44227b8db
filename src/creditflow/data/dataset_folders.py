"""Folders of tasks: data sets saved by Hugging Face's `datasets`, and folders of Parquet, Arrow or JSONL files.

Saved data sets are read with `datasets` if it is installed, otherwise with pyarrow. Both are imported on first use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from creditflow.errors import DataError, first_line

Split = Literal["train", "val"]
Rows = Iterator[dict[str, Any]]

SUFFIXES = (".parquet", ".jsonl", ".arrow")
"""Endings of files that hold tasks."""
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes for a `Dataset` and for a `DatasetDict`."""
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


def has_held_out_split(folder: Path) -> bool:
    """Whether a folder's validation tasks are others than its training tasks."""
    if not folder.is_dir() or (folder / _SAVED).is_file():
        return False
    return any(name in _HELD_OUT for name in _splits(folder, "data.train_files"))


def open_saved(folder: Path, columns: Collection[str]) -> tuple[list[str], Rows]:
    """Open a data set that `Dataset.save_to_disk` has written.

    Returns the names of all its columns, and its rows with those in `columns`. Raises DataError if it is unreadable.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        files = _listed_files(folder)
        return _arrow_columns(files[0]), (row for file in files for row in arrow_rows(file, columns))
    try:
        # The format that was set when the data set was saved (torch, numpy) is removed: rows are Python values.
        dataset = datasets.load_from_disk(str(folder.resolve())).with_format(None)
        names = list(dataset.column_names)
        kept = dataset.select_columns([name for name in names if name in columns])
    except Exception as error:  # a broken file raises errors of pyarrow, json, fsspec and others
        raise _unreadable(folder, error) from error
    return names, _saved_rows(folder, kept)


def _saved_rows(folder: Path, dataset: Any) -> Rows:
    try:
        yield from dataset
    except Exception as error:  # as above
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> DataError:
    return DataError(f"{folder}: not a readable data set: {type(error).__name__}: {first_line(error)}")


def arrow_rows(path: Path, columns: Collection[str] = ()) -> Rows:
    """Yield the rows of an Arrow file (stream or file format); of some `columns`, or of all."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            for batch in _batches(file):
                if own := [field for field in batch.schema if "extension<" in str(field.type)]:
                    what = ", ".join(f"{field.name}: {field.type}"[:80] for field in own)
                    raise DataError(f"{path}: has columns that only `datasets` can read ({what}): pip install datasets")
                kept = [name for name in batch.schema.names if not columns or name in columns]
                yield from batch.select(kept).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Arrow file: {first_line(error)}") from error


def _batches(file: Any) -> Iterator[Any]:
    import pyarrow as pa

    start = file.read(6)
    file.seek(0)
    if start == b"ARROW1":
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(file)


def _arrow_columns(path: Path) -> list[str]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            return list(pa.ipc.open_stream(file).schema.names)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Arrow file: {first_line(error)}") from error


def _listed_files(folder: Path) -> list[Path]:
    """The Arrow files that `state.json` lists, each directly in `folder`."""
    state = _json(folder / _SAVED)
    listed = state.get("_data_files")
    paths = [entry.get("filename") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    names = [name for name in paths if isinstance(name, str) and Path(name).name == name]
    if not names or len(names) < len(paths):
        raise DataError(f"{folder / _SAVED}: _data_files: expected the names of files in this folder, got {listed!r}")
    return [folder / name for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a readable JSON file: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


def _splits(folder: Path, key: str) -> dict[str, list[Path]]:
    """The parts of each split by the split's name; the empty name stands for files without one."""
    if (folder / _SAVED_SPLITS).is_file():
        names = _json(folder / _SAVED_SPLITS).get("splits")
        if not isinstance(names, list) or not all(isinstance(n, str) and Path(n).name == n for n in names):
            raise DataError(f"{folder / _SAVED_SPLITS}: splits: expected names of subfolders, got {names!r}")
        if missing := [name for name in names if not (folder / name / _SAVED).is_file()]:
            raise DataError(f"{folder}: expected a data set in {missing[0]!r}, got no {missing[0]}/{_SAVED}")
        return {name: [folder / name] for name in names}
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file() and not path.name.startswith("."):
            words = re.split(r"[^a-z]+", path.stem.lower())
            splits.setdefault(next((word for word in words if word in _NAMES["val"]), ""), []).append(path)
    if not splits:
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
