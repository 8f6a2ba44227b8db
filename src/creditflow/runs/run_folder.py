"""A run's folder.

It holds `run.json`, `config.yaml`, `metrics.jsonl`, `events.jsonl`, `failures.log` and `steps/NNNNNN.parquet`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from creditflow._utils.files import json_ready, make_folder, write_whole
from creditflow._utils.tracebacks import KEY
from creditflow.credit import Assignment
from creditflow.data import TrajectoryBatch
from creditflow.errors import CreditflowError, DataError, InputError, first_line, json_fault
from creditflow.runs.step_files import FORMAT, expect_format, write_step_file


class RunFolder:
    """Writer for a run's folder. Files are replaced atomically; metrics and events are appended as lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logged: set[tuple[str, ...]] = set()
        """Places in users' code with a traceback in `failures.log`."""

    @classmethod
    def create(cls, path: Path, run: Mapping[str, Any], config_yaml: str) -> RunFolder:
        """Create a folder with `run.json` and `config.yaml`. Raises InputError if it already holds a run."""
        if (path / "run.json").exists():
            raise InputError(f"trainer.default_local_dir: {path} holds a run already; name another folder")
        make_folder(path / "steps", "trainer.default_local_dir")
        for unfinished in path.glob(".*.part"):  # left by a killed run
            unfinished.unlink()
        folder = cls(path)
        folder.write_text("config.yaml", config_yaml)
        folder.write_text("run.json", json.dumps({"format": FORMAT, **run}, indent=2) + "\n")
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run. Raises InputError if it holds none, DataError for another version."""
        if not (path / "run.json").is_file():
            raise InputError(f"trainer.default_local_dir: {path} holds no run: expected a run.json in it")
        read_run(path)
        make_folder(path / "steps", "trainer.default_local_dir")
        return cls(path)

    def rewind(self, step: int, aside: str | None = None) -> None:
        """Return to the state after training step `step`, so that later records can be appended again.

        Removes step files, metrics and events of later steps, and `evaluation.json` with them; also a torn last line
        and unfinished files. A rewind that a crash interrupted can be repeated. `aside`: a folder in this one that
        keeps the later step files and metrics; their events then stay in place, since they give the reason. Raises
        DataError if another line is damaged; then nothing is removed.
        """
        metrics, events = (_whole_lines(self.path / name) for name in ("metrics.jsonl", "events.jsonl"))
        kept = [line for line, row in metrics if row["step"] <= step]
        numbered = [file for file in self.path.glob("steps/*.parquet") if file.stem.isdigit()]
        later = [file for file in numbered if int(file.stem) > step]
        if later or len(kept) < len(metrics):
            (self.path / "evaluation.json").unlink(missing_ok=True)  # it describes the end of the run
        if aside is not None:
            make_folder(self.path / aside, "trainer.default_local_dir")
            gone = [line for line, row in metrics if row["step"] > step]
            if gone:
                self._write_lines(f"{aside}/metrics.jsonl", gone)
            for file in later:
                file.rename(self.path / aside / file.name)
            later = []
        else:
            # Events up to the last rollback to this step or an earlier one stay.
            led = [i for i, (_, row) in enumerate(events) if row.get(BACK_TO, math.inf) <= step]
            stays = led[-1] + 1 if led else 0
            self._write_lines(
                "events.jsonl", [line for i, (line, row) in enumerate(events) if i < stays or row["step"] <= step]
            )
        self._write_lines("metrics.jsonl", kept)
        for file in (*later, *self.path.glob("steps/.*.part"), *self.path.glob(".*.part")):
            file.unlink()

    def _write_lines(self, name: str, lines: Sequence[str]) -> None:
        """Write `lines` to `name`; skip an absent file without lines."""
        if lines or (self.path / name).is_file():
            self.write_text(name, "".join(f"{line}\n" for line in lines))

    def write_text(self, name: str, text: str) -> None:
        """Replace the file `name` atomically."""
        write_whole(self.path / name, lambda path: path.write_text(text))

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to `metrics.jsonl`; non-finite numbers become null."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**json_ready(metrics), "step": step}) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """See `read_events`."""
        return read_events(self.path)

    def append_events(self, events: Iterable[Mapping[str, Any]], back_to: int | None = None) -> None:
        """Append lines to `events.jsonl`, each with its `step`.

        `back_to`: the training step from which the run continues because of these events. The lines are synced to disk,
        so that an event survives if the process ends because of it.
        """
        led = {} if back_to is None else {BACK_TO: back_to}
        lines = [json.dumps({**event, **led}) for event in events]
        if not lines:
            return
        with (self.path / "events.jsonl").open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def append_failures(self, step: int, infos: Iterable[tuple[str, Mapping[str, Any]]]) -> bool:
        """Write tracebacks of users' code to `failures.log`, the first from each place in the code.

        `infos`: id and `info` of each trajectory of a training step. Returns whether this run has written any.
        """
        entries = []
        for id, info in infos:
            for what, text in info.get(KEY, {}).items():
                place = (what, *(line for line in text.splitlines() if line.startswith("  File ")))
                if place not in self._logged:
                    self._logged.add(place)
                    entries.append(f"training step {step}, trajectory {id}: {what}\n{text.rstrip()}\n\n")
        if entries:
            with (self.path / FAILURES).open("a") as file:
                file.write("".join(entries))
        return bool(self._logged)

    def write_steps(self, step: int, batch: TrajectoryBatch, assignment: Assignment | None = None) -> None:
        """Write `steps/NNNNNN.parquet`: every step of the training step, with the terms of its advantage.

        Without an assignment (too many scores failed for credit to be assigned), write only the trajectories.
        """
        target = self.path / f"steps/{step:06d}.parquet"
        write_whole(target, lambda path: write_step_file(path, step, batch, assignment))


FAILURES = "failures.log"
"""File of the full tracebacks of users' workflows and reward functions."""
BACK_TO = "goes_on_after"
"""Key in a rollback's event: the training step after which the run continues."""


def log_failures(
    error: CreditflowError, folder: RunFolder, step: int, infos: Iterable[tuple[str, Mapping[str, Any]]]
) -> None:
    """Write the tracebacks behind an error to `failures.log`, and add the file's name to the message."""
    failures = [info for info in infos if KEY in info[1]]
    if failures and folder.append_failures(step, failures):
        error.args = (f"{error}; whole tracebacks: {folder.path / FAILURES}",)


def read_run(path: Path) -> dict[str, Any]:
    """The content of a run's `run.json`. Raises DataError if it is damaged or of another version."""
    file = path / "run.json"
    try:
        run = json.loads(file.read_text())
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {first_line(error)}") from error
    if not isinstance(run, dict):
        raise DataError(f"{file}: expected a JSON object, got {type(run).__name__}")
    expect_format(file, run.get("format", 1))
    return run


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `events.jsonl`, empty without the file; a torn last line is left out."""
    return [row for _, row in _whole_lines(path / "events.jsonl")]


def rollbacks(path: Path) -> list[int]:
    """The training steps that a run was rolled back to, in order."""
    return [event[BACK_TO] for event in read_events(path) if BACK_TO in event]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, with the lines of one step merged.

    A torn last line (of a killed run) is left out. Raises DataError if another line is damaged.
    """
    rows: list[dict[str, Any]] = []
    for _, row in _whole_lines(path / "metrics.jsonl"):
        if rows and row["step"] == rows[-1]["step"]:
            rows[-1] |= row
        else:
            rows.append(row)
    return rows


def torn_lines(path: Path) -> list[str]:
    """One sentence for each JSON file of a run with a torn last line, which readers leave out."""
    files = [path / name for name in ("metrics.jsonl", "events.jsonl")]
    lines = {file: len(file.read_text().splitlines()) for file in files if file.is_file()}
    torn = [(file, n) for file, n in lines.items() if len(_whole_lines(file)) < n]
    return [f"{file.name}: line {n}, the last, is torn and left out" for file, n in torn]


def _whole_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each JSON line as text and as an object; empty without the file.

    A torn last line is left out. Raises DataError if another line is damaged or has no training step. Numbers outside
    the range of a float become null.
    """
    lines = file.read_text().splitlines() if file.is_file() else []
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_int=_whole_number)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise DataError(f"{file}:{number}: not JSON: {json_fault(error)}") from error
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{file}:{number}: expected an object with the training step, got {line[:60]}")
        rows.append((line, json_ready(row)))
    return rows


def _whole_number(digits: str) -> int | None:
    return int(digits) if len(digits) < _DIGITS else None


_DIGITS = 300
"""Integers with this many digits or more become null: no measurement is that long, and a float may overflow."""
