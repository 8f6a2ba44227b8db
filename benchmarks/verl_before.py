"""The driver's part of a training step on verl, at an earlier commit and today: `python -m benchmarks.verl_before`.

`git archive` writes the commit `BEFORE` to a temporary folder, so a full clone is needed. Each side runs in a separate
process, with its own `benchmarks.verl.drive` and the same trajectories. The sides take turns in changing order; a
figure is the median of the turns. Three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.record import ROOT, Figure, exit_with, show, write
from benchmarks.sources import hashes
from benchmarks.verl import MEASURES as VERL_MEASURES
from benchmarks.verl import PACKAGES, TASKS

MEASURES = (*VERL_MEASURES, "benchmarks/verl.py")
BEFORE = "7cac71b"
"""The last commit before several policies, the asynchronous modes and early fetching."""
TURNS, WARM_UP = 12, 2
UPDATE, STEP_FILE = "from the last trajectory to the update", "step file"
TARGETS = {UPDATE: 2.0, STEP_FILE: 2.0}

SCRIPT = """
import gc, json, sys, tempfile
from pathlib import Path
from benchmarks import verl
tasks = int(sys.argv[1])
queue, _ = verl.made(tasks)
with tempfile.TemporaryDirectory() as folder:
    for _ in sys.stdin:
        gc.collect()
        seconds = verl.drive(queue, Path(folder)).seconds
        print("seconds", json.dumps(seconds), flush=True)
"""


class Driver:
    """A process that does the driver's part of one training step for each call, with the code in a folder."""

    def __init__(self, root: Path, tasks: int) -> None:
        paths = (root / "src", root, root / "tests" / "verl_cpu" / "src")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tasks)],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self) -> dict[str, float]:
        """The seconds of each part. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            name, _, values = line.partition(" ")
            if name == "seconds":
                found: dict[str, float] = json.loads(values)
                return found
        raise RuntimeError(f"a side of the comparison ended with status {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def parts(seconds: dict[str, float]) -> dict[str, float]:
    """The compared parts of a step."""
    return {
        UPDATE: seconds["whole"] - seconds["recording"],
        STEP_FILE: seconds["step file"],
        "metrics": seconds["metrics"],
        "the driver's whole part, early fetching included": seconds["whole"] + seconds.get("receiving early", 0.0),
    }


def main() -> int:
    """Measure, print, write `docs/results/verl_before.json`; 1 if a ratio is below its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the tasks, two turns; writes nothing")
    quick = parser.parse_args().quick
    measured, tasks = hashes(MEASURES), TASKS // 8 if quick else TASKS
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        roots = {"before": Path(folder), "today": ROOT}
        drivers = {name: stack.enter_context(closing(Driver(root, tasks))) for name, root in roots.items()}
        turns = []
        for turn in range(WARM_UP + (2 if quick else TURNS)):
            order = list(drivers)[:: 1 if turn % 2 else -1]  # each side meets the memory that the other leaves
            turns.append({name: parts(drivers[name].seconds()) for name in order})
    figures = []
    for part in turns[0]["today"]:
        before, today = ([turn[name][part] for turn in turns[WARM_UP:]] for name in ("before", "today"))
        figures += [
            Figure.from_values(f"{part}, before", before, unit="s"),
            Figure.from_values(f"{part}, today", today, unit="s"),
            Figure.from_values(
                f"{part}: before / today",
                [a / b for a, b in zip(before, today, strict=True)],
                TARGETS.get(part),
                unit="x",
            ),
        ]
    missed = show(figures)
    if not quick:
        write("verl_before", figures, PACKAGES, measured, {"before": BEFORE})
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
