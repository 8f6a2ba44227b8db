"""Read access to a run's folder.

Opening reads only `run.json`, file names and the last bytes of each step file, so that a run of ten million steps
opens at once. The content of a step file is read on demand.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditflow.errors import DataError, InputError, first_line
from creditflow.runs.run_folder import read_events, read_metrics, read_run
from creditflow.runs.step_files import Recorded, read_step_file


@dataclass(frozen=True)
class Ledger:
    """The record of a run, which may still be in progress."""

    path: Path
    steps: tuple[int, ...]
    """The training steps with a step file, in order."""
    torn: tuple[Path, ...]
    """Step files that a crash cut off while they were written; `steps` does not contain them."""

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Open the folder of a run. Raises InputError if `path` is not one, DataError for a run of another version."""
        if not (path / "run.json").is_file():
            raise InputError(f"{path}: expected the folder of a run, with a run.json in it")
        read_run(path)
        files = sorted(file for file in path.glob("steps/*.parquet") if re.fullmatch("[0-9]{6,9}", file.stem))
        torn = tuple(file for file in files if _is_torn(file))
        return cls(path, tuple(sorted(int(file.stem) for file in files if file not in torn)), torn)

    @property
    def run(self) -> dict[str, Any]:
        """`run.json`: configuration, versions, seed. See `read_run`."""
        return read_run(self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """See `read_metrics`."""
        return read_metrics(self.path)

    def events(self) -> list[dict[str, Any]]:
        """See `read_events`."""
        return read_events(self.path)

    def file(self, step: int) -> Path:
        """Path of the file of training step `step`. Raises InputError if the step is not on record."""
        at = bisect_left(self.steps, step)  # for runs of many steps
        if self.steps[at : at + 1] != (step,):
            has = f"{self.steps[0]} to {self.steps[-1]}" if self.steps else "none"
            raise InputError(f"{self.path}: expected a training step that is on record ({has}), got {step}")
        return self.path / f"steps/{step:06d}.parquet"

    def read(self, step: int) -> Recorded:
        """Read a training step. Raises InputError if it is not on record, DataError if its file cannot be read."""
        return read_step_file(self.file(step))

    def __iter__(self) -> Iterator[Recorded]:
        return (self.read(step) for step in self.steps)

    def training_step_of(self, id: str, column: str = "step_id") -> int:
        """The training step that contains step `id`, or trajectory `id` if `column` is `trajectory_id`.

        Our engines put the training step into an id, so numbers in the id are searched first. Raises InputError if the
        id is not on record.
        """
        if not self.steps:
            raise InputError(f"{self.path}: no training step is on record yet")
        said = [n for n in dict.fromkeys(map(int, re.findall(r"\d{1,9}", id))) if n in self.steps]
        for step in (*said, *(n for n in reversed(self.steps) if n not in said)):
            if id in _ids(self.file(step), column):
                return step
        example = _ids(self.file(self.steps[-1]), column)[:1] or ["..."]
        noun = "step" if column == "step_id" else "trajectory"
        raise InputError(f"{self.path}: expected the id of a {noun}, such as {example[0]!r}; there is no {id!r}")


def _ids(file: Path, column: str) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            values: list[str] = opened.read(columns=[column]).column(column).drop_null().to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{file}: not a readable Parquet file of steps: {first_line(error)}") from error
    return values


def _is_torn(file: Path) -> bool:
    """Whether a file is incomplete: a whole Parquet file ends with the length of its footer and a magic number."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(size - 8, 0))
        tail = stream.read()
    return tail[4:] != b"PAR1" or int.from_bytes(tail[:4], "little") > size - 12
