"""A run's folder: `run.json`, `config.yaml`, `metrics.jsonl`, `events.jsonl`, `failures.log`,
`steps/NNNNNN.parquet`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from creditflow.credit import Assignment
from creditflow.errors import CreditflowError, DataError, InputError, first_line
from creditflow.files import json_ready, make_folder, write_whole
from creditflow.ledger.step_files import write_step_file
from creditflow.tracebacks import KEY
from creditflow.trajectory import TrajectoryBatch


class RunFolder:
    """Where one run writes. Files appear whole or not at all; metrics are appended line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logged: set[tuple[str, ...]] = set()
        """Places in users' code whose tracebacks are in `failures.log`."""

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

    def rewind(self, step: int, aside: str | None = None) -> None:
        """Back to where training step `step` was recorded: what follows is appended as if nothing had come after it.

        Step files, metrics and events of later steps are removed, and `evaluation.json` with them; a torn last line and
        files that were never finished, too. Rewinding again, after a crash, does the rest. `aside`: a folder in this
        one where later step files and metrics are kept; their events then stay too: they say why. Raises DataError
        where another line is damaged; then nothing is removed.
        """
        metrics, events = (_whole_lines(self.path / name) for name in ("metrics.jsonl", "events.jsonl"))
        kept = [line for line, row in metrics if row["step"] <= step]
        numbered = [found for found in self.path.glob("steps/*.parquet") if found.stem.isdigit()]
        later = [found for found in numbered if int(found.stem) > step]
        if later or len(kept) < len(metrics):
            (self.path / "evaluation.json").unlink(missing_ok=True)  # it speaks of the end
        if aside is not None:
            make_folder(self.path / aside, "trainer.default_local_dir")
            gone = [line for line, row in metrics if row["step"] > step]
            if gone:
                self._write_lines(f"{aside}/metrics.jsonl", gone)
            for found in later:
                found.rename(self.path / aside / found.name)
            later = []
        else:
            # What led back to where the run goes on from now stays, with all before it.
            led = [i for i, (_, row) in enumerate(events) if row.get(BACK_TO, math.inf) <= step]
            stays = led[-1] + 1 if led else 0
            self._write_lines(
                "events.jsonl", [line for i, (line, row) in enumerate(events) if i < stays or row["step"] <= step]
            )
        self._write_lines("metrics.jsonl", kept)
        for found in (*later, *self.path.glob("steps/.*.part"), *self.path.glob(".*.part")):
            found.unlink()

    def _write_lines(self, name: str, lines: Sequence[str]) -> None:
        """Where there is such a file, or something to write."""
        if lines or (self.path / name).is_file():
            self.write_text(name, "".join(f"{line}\n" for line in lines))

    def write_text(self, name: str, text: str) -> None:
        """The file `name`, replaced whole."""
        write_whole(self.path / name, lambda path: path.write_text(text))

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of `metrics.jsonl`; numbers that JSON has no word for become null."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**json_ready(metrics), "step": step}) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """See `read_events`."""
        return read_events(self.path)

    def append_events(self, events: Iterable[Mapping[str, Any]], back_to: int | None = None) -> None:
        """Lines of `events.jsonl`, each with its `step`. `back_to`: the step that the run goes on from because of them.

        Appended and synced: an event stands also where the process dies of what it says.
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
        """Write the tracebacks of users' code to `failures.log`: the first from each place in it.

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
        """`steps/NNNNNN.parquet`: every step of the training step, with where its advantage came from.

        Without an assignment (credit was never assigned, because too many scores failed): the plays alone.
        """
        target = self.path / f"steps/{step:06d}.parquet"
        write_whole(target, lambda path: write_step_file(path, step, batch, assignment))


FAILURES = "failures.log"
"""Whole tracebacks of users' workflows and reward functions."""
BACK_TO = "goes_on_after"
"""In an event that led back to a checkpoint: the training step after which the run goes on."""


def log_failures(
    error: CreditflowError, folder: RunFolder, step: int, infos: Iterable[tuple[str, Mapping[str, Any]]]
) -> None:
    """Write the tracebacks behind an error to `failures.log`; its message then names that file."""
    found = [one for one in infos if KEY in one[1]]
    if found and folder.append_failures(step, found):
        error.args = (f"{error}; whole tracebacks: {folder.path / FAILURES}",)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `events.jsonl`, if there are any; a torn last one is left out."""
    return [row for _, row in _whole_lines(path / "events.jsonl")]


def rollbacks(path: Path) -> list[int]:
    """The training steps that a run was led back to, in order."""
    return [event[BACK_TO] for event in read_events(path) if BACK_TO in event]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, those of one step as one; a torn last line (of a killed run) is left out.

    Raises DataError where another line is damaged.
    """
    rows: list[dict[str, Any]] = []
    for _, row in _whole_lines(path / "metrics.jsonl"):
        if rows and row["step"] == rows[-1]["step"]:
            rows[-1] |= row
        else:
            rows.append(row)
    return rows


def torn_lines(path: Path) -> list[str]:
    """One sentence for each JSON file of a run whose last line is torn: readers leave that line out."""
    files = [path / name for name in ("metrics.jsonl", "events.jsonl")]
    return [f"{file.name}: line {number}, the last, is torn and left out" for file in files for number in _torn(file)]


def _torn(file: Path) -> list[int]:
    lines = file.read_text().splitlines() if file.is_file() else []
    return [len(lines)] if len(_whole_lines(file)) < len(lines) else []


def _whole_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line of JSON as it stands, and what it says; none where there is no such file.

    A torn last line is left out. Raises DataError where another is damaged, or says of no training step. Numbers that
    no float holds are null.
    """
    lines = file.read_text().splitlines() if file.is_file() else []
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_int=_whole_number)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise DataError(f"{file}:{number}: not JSON: {first_line(error)}") from error
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{file}:{number}: expected an object with the training step, got {line[:60]}")
        rows.append((line, json_ready(row)))
    return rows


def _whole_number(digits: str) -> int | None:
    return int(digits) if len(digits) < _DIGITS else None


_DIGITS = 300
"""Longer numbers are none that were measured, and a float does not hold them."""
