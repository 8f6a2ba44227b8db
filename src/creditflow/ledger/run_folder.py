"""A run's folder: `run.json`, `config.yaml`, `metrics.jsonl`, `steps/NNNNNN.parquet`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from creditflow.credit import Assignment
from creditflow.errors import DataError, InputError
from creditflow.files import make_folder, write_whole
from creditflow.trajectory import TrajectoryBatch


class RunFolder:
    """Where one run writes. Files appear whole or not at all; metrics are appended line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, run: Mapping[str, Any], config_yaml: str) -> RunFolder:
        """A new folder with `run.json` and `config.yaml`; refuses one that holds a run already."""
        if (path / "run.json").exists():
            raise InputError(f"trainer.default_local_dir: {path} holds a run already; name another folder")
        make_folder(path / "steps", "trainer.default_local_dir")
        for unfinished in path.glob(".*.part"):  # it was killed here before
            unfinished.unlink()
        folder = cls(path)
        folder.write_text("config.yaml", config_yaml)
        folder.write_text("run.json", json.dumps(run, indent=2) + "\n")
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was begun before."""
        if not (path / "run.json").is_file():
            raise InputError(f"trainer.default_local_dir: {path} holds no run: expected a run.json in it")
        make_folder(path / "steps", "trainer.default_local_dir")
        return cls(path)

    def rewind(self, step: int) -> None:
        """Back to where training step `step` was recorded: what follows is appended as if nothing had come after it.

        Step files and metrics of later steps are removed, and `evaluation.json` with them; a torn last line of metrics
        and files that were never finished, too. Rewinding again, after a crash, does the rest. Raises DataError where
        another line of metrics is damaged; then nothing is removed.
        """
        file = self.path / "metrics.jsonl"
        lines = _whole_lines(self.path) if file.is_file() else []
        if odd := [line for line, row in lines if not isinstance(row.get("step"), int)]:
            raise DataError(f"{file}: expected a training step in every line, got {odd[0][:60]}")
        kept = [line for line, row in lines if row["step"] <= step]
        numbered = [found for found in self.path.glob("steps/*.parquet") if found.stem.isdigit()]
        later = [found for found in numbered if int(found.stem) > step]
        if later or len(kept) < len(lines):
            (self.path / "evaluation.json").unlink(missing_ok=True)  # it speaks of the end
        if file.is_file():
            self.write_text(file.name, "".join(f"{line}\n" for line in kept))
        for found in (*later, *self.path.glob("steps/.*.part"), *self.path.glob(".*.part")):
            found.unlink()

    def write_text(self, name: str, text: str) -> None:
        """The file `name`, replaced whole."""
        write_whole(self.path / name, lambda path: path.write_text(text))

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of `metrics.jsonl`; numbers that JSON has no word for become null."""
        values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**values, "step": step}) + "\n")

    def write_steps(self, step: int, batch: TrajectoryBatch, assignment: Assignment | None = None) -> None:
        """`steps/NNNNNN.parquet`: every step of the training step, with where its advantage came from.

        Without an assignment (credit was never assigned, because too many scores failed): the plays alone.
        """
        columns = step_columns(assignment) if assignment else None
        write_whole(self.path / f"steps/{step:06d}.parquet", lambda path: batch.write_parquet(path, columns))


def step_columns(assignment: Assignment) -> dict[str, NDArray[Any]]:
    """The [S] columns of an assignment under the names that they have in the step files."""
    renamed = {"stratum": "stratum_in_force", "group": "group_id"}  # a column of the batch, and a word of SQL
    names = [f.name.removesuffix("_S") for f in fields(assignment) if f.name.endswith("_S")]
    return {renamed.get(name, name): getattr(assignment, f"{name}_S") for name in names}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, those of one step as one; a torn last line (of a killed run) is left out.

    Raises DataError where another line is damaged.
    """
    rows: list[dict[str, Any]] = []
    for _, row in _whole_lines(path):
        if rows and row.get("step") == rows[-1].get("step"):
            rows[-1] |= row
        else:
            rows.append(row)
    return rows


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line of metrics as it stands, and what it says."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append((line, json.loads(line)))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DataError(f"{path / 'metrics.jsonl'}:{number}: not JSON: {error.msg}") from error
    return rows
