"""Shared parts of the benchmarks: figures with their targets, the result file, the exit code."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from creditflow._utils.files import json_ready

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
MISSED = "targets missed"
PEER_MISSING = "peer missing"
"""The beginnings of two lines that the runner (`python -m benchmarks`) reads."""


@dataclass(frozen=True)
class Figure:
    """One number and its target."""

    what: str
    value: float
    """NaN for an unknown value."""
    hold: float | None = None
    """The target; None for a figure that is only reported."""
    at_most: bool = False
    """Whether `hold` bounds it from above."""
    unit: str = ""
    spread: tuple[float, float] | None = None
    """The smallest and the largest repeat, with `value` as their median; or an interval, named in `what`."""

    @classmethod
    def from_values(cls, what: str, repeats: Sequence[float], hold: float | None = None, **more: Any) -> Figure:
        """The median of `repeats`, with their spread; NaN for no repeats."""
        if not repeats:
            return cls(what, math.nan, hold, **more)
        return cls(what, median(repeats), hold, spread=(min(repeats), max(repeats)), **more)

    @property
    def short(self) -> bool:
        """True if the value misses its target; NaN misses every target."""
        if self.hold is None:
            return False
        return not (self.value <= self.hold if self.at_most else self.value >= self.hold)


def measured_apart(
    module: str,
    part: str,
    *more: str,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    python: Sequence[str] = (sys.executable,),
) -> dict[str, Any]:
    """The JSON that `python -m benchmarks.MODULE --part PART` prints in a process of its own."""
    print(part, flush=True)
    command = [*python, "-m", f"benchmarks.{module}", "--part", part, *more]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
    variables = {**os.environ, **quiet, **(environment or {})}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {part}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def quick_parser(page: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser of arguments with the option `--quick`, which `quick` explains; `page`: the text of `--help`."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Exit with the code that `main` returns: 0, or 1 if a figure misses its target. Exit with 2 on an error.

    An uncaught exception would end Python with 1, like a missed target.
    """
    try:
        code = main()
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        print(end.code, file=sys.stderr)
        code = 2
    except Exception:
        traceback.print_exc()
        code = 2
    sys.exit(code)


def peer_missing(name: str, install: str) -> None:
    """Report a missing peer: only this project's side was measured."""
    print(f"{PEER_MISSING}: {name} ({install} installs it): only this project was measured", flush=True)


def show(figures: Sequence[Figure]) -> bool:
    """Print the table of figures and targets; True if a figure misses its target."""
    lines = [("", "measured", "from .. to", "must hold", "")]
    for figure in figures:
        spread = f"{figure.spread[0]:.3g} .. {figure.spread[1]:.3g}" if figure.spread else ""
        bound = "" if figure.hold is None else f"{'<=' if figure.at_most else '>='} {figure.hold:g}"
        verdict = "" if figure.hold is None else "FALLS SHORT" if figure.short else "holds"
        value = "unknown" if math.isnan(figure.value) else f"{figure.value:.3g} {figure.unit}".rstrip()
        lines.append((figure.what, value, spread, bound, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    missed, held = sum(figure.short for figure in figures), sum(figure.hold is not None for figure in figures)
    print(f"{MISSED}: {missed} of {held}", flush=True)
    return missed > 0


def write(
    name: str,
    figures: Sequence[Figure],
    packages: Sequence[str],
    measured: Mapping[str, str],
    details: Mapping[str, Any] | None = None,
) -> Path:
    """Write `docs/results/<name>.json`: the figures with command, date, processor and versions; `details` as they are.

    `measured`: the hashes of the measured files, from `benchmarks.sources`.
    """
    facts: dict[str, Any] = {
        "command": f"python -m benchmarks.{name}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": processor(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
        "figures": [
            {
                "what": figure.what,
                "value": figure.value,
                "unit": figure.unit,
                "spread": figure.spread,
                "must_hold": None
                if figure.hold is None
                else {"at_most" if figure.at_most else "at_least": figure.hold},
                "holds": None if figure.hold is None else not figure.short,
            }
            for figure in figures
        ],
        **(details or {}),
        "measured": dict(measured),
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(json_ready(facts), indent=2) + "\n")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    return path


def fill_page(page: Path, command: str, lines: Sequence[str]) -> None:
    """Replace the lines of a page between the marks of `command`. Raises ValueError if a mark is missing."""
    begin, end = f"<!-- made by `{command}` -->\n", "<!-- to here -->"
    head, found, rest = page.read_text().partition(begin)
    _, ends, tail = rest.partition(end)
    if not found or not ends:
        raise ValueError(f"{page}: expected the lines {begin.strip()} and {end}")
    page.write_text("".join([head, begin, *(f"{line}\n" for line in lines), end, tail]))


def processor() -> str:
    """The processor's name and count."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return f"{names[0]} x {len(names)}" if names else platform.processor()
