"""What benchmarks share: figures held against what must hold, and the file under docs/results that they end in."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Figure:
    """One number, and what it must hold."""

    what: str
    value: float
    hold: float | None = None
    """What it must reach, or stay below; None: reported, no more."""
    at_most: bool = False
    """Whether `hold` bounds it from above."""
    unit: str = ""
    spread: tuple[float, float] | None = None
    """The smallest and the largest of the repeats that `value` is the median of; where `what` says so, an interval."""

    @classmethod
    def of(cls, what: str, repeats: Sequence[float], hold: float | None = None, **more: Any) -> Figure:
        """The median of `repeats`, with their spread."""
        return cls(what, median(repeats), hold, spread=(min(repeats), max(repeats)), **more)

    @property
    def short(self) -> bool:
        """Whether it misses what must hold; a number that is none misses everything."""
        if self.hold is None:
            return False
        return not (self.value <= self.hold if self.at_most else self.value >= self.hold)


def compare(recipe: str, key: str, values: Sequence[str], seeds: int, folder: Path, *more: str) -> dict[str, Any]:
    """What `comparison.json` says after `creditflow compare` of a shipped recipe; runs that `folder` holds are kept.

    `more`: further words of the command, options or overrides.
    """
    command = [sys.executable, "-m", "creditflow", "compare", f"recipes/{recipe}.yaml"]
    command += ["--vary", f"{key}={','.join(values)}", "--seeds", str(seeds), f"trainer.default_local_dir={folder}"]
    subprocess.run([*command, *more], cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return found


def show(figures: Sequence[Figure]) -> bool:
    """Print the table of what was measured against what must hold; True if a number falls short."""
    lines = [("", "measured", "from .. to", "must hold", "")]
    for figure in figures:
        spread = f"{figure.spread[0]:.3g} .. {figure.spread[1]:.3g}" if figure.spread else ""
        bound = "" if figure.hold is None else f"{'<=' if figure.at_most else '>='} {figure.hold:g}"
        verdict = "" if figure.hold is None else "FALLS SHORT" if figure.short else "holds"
        lines.append((figure.what, f"{figure.value:.3g} {figure.unit}".rstrip(), spread, bound, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return any(figure.short for figure in figures)


def write(
    name: str, figures: Sequence[Figure], packages: Sequence[str], details: Mapping[str, Any] | None = None
) -> Path:
    """Write `docs/results/<name>.json`: the figures, under which command, when, on what; `details` as they come."""
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
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    return path


def processor() -> str:
    """Its name and how many."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return f"{names[0]} x {len(names)}" if names else platform.processor()
