"""Decomposed against shared credit on the arithmetic recipes: `python -m benchmarks.decomposed_credit [--quick]`.

Runs `creditflow compare` on each recipe into `runs/decomposed_credit/`, where finished runs are found again and not
repeated, and holds the results against the numbers of DESIGN 12. In full, about an hour and a half on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RULES = ("identical", "none", "discounted", "threshold")


@dataclass(frozen=True)
class Study:
    """One comparison, and what must hold in it: points of pass@1 above `identical`, share of step errors saved."""

    recipe: str
    points: float | None = None
    fewer_errors: float | None = None
    rules: tuple[str, ...] = RULES
    arms: tuple[str, ...] = ("none_answer",)
    """Decomposed arms of the recipe that are not one of the rules as they come; empty: none of its arms are run."""


STUDIES = (
    Study("arithmetic_chain", points=0.08, fewer_errors=0.25),
    Study("arithmetic_chain_long", points=0.12, fewer_errors=0.25),
    Study("arithmetic_chain_sparse", rules=("identical", "none", "threshold"), arms=()),
)
QUICK = ("trainer.total_training_steps=2", "data.val_max_samples=64")


def main() -> int:
    """Run, print, write `docs/results/decomposed_credit.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two training steps: shows that it runs, proves nothing")
    quick = parser.parse_args().quick
    results: dict[str, Any] = {}
    missed = False
    for study in STUDIES[:1] if quick else STUDIES:
        folder = ROOT / "runs" / "decomposed_credit" / (f"{study.recipe}-quick" if quick else study.recipe)
        _compare(study, folder, quick)
        values = json.loads((folder / "comparison.json").read_text())["values"]
        best = max((*study.rules[1:], *study.arms), key=lambda rule: _mean(values, rule, "pass_at_1"))
        points = _mean(values, best, "pass_at_1") - _mean(values, "identical", "pass_at_1")
        fewer = 1 - _mean(values, best, "step_error_rate") / _mean(values, "identical", "step_error_rate")
        print(f"{study.recipe}: {best} - identical: {100 * points:+.1f} points of pass@1", _held(points, study.points))
        print(f"{study.recipe}: {best} against identical: {100 * fewer:.0f} % fewer step errors",
              _held(fewer, study.fewer_errors))  # fmt: skip
        missed |= _short(points, study.points) or _short(fewer, study.fewer_errors)
        comparison = json.loads((folder / "comparison.json").read_text())
        results[study.recipe] = {"best": best, "points": points, "fewer_step_errors": fewer, **comparison}
    if not quick:
        _write(results)
    return int(missed and not quick)


def _compare(study: Study, folder: Path, quick: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "creditflow",
        "compare",
        f"recipes/{study.recipe}.yaml",
        "--vary",
        f"algorithm.propagation={','.join(study.rules)}",
    ]
    command += ["--seeds", "1" if quick else "3", f"trainer.default_local_dir={folder}"]
    command += [] if study.arms else ["--no-arms"]
    subprocess.run([*command, *(QUICK if quick else ())], cwd=ROOT, check=True)


def _mean(values: dict[str, Any], rule: str, metric: str) -> float:
    return float(values[rule][metric]["after"]["mean"])


def _short(number: float, hold: float | None) -> bool:
    return hold is not None and number < hold


def _held(number: float, hold: float | None) -> str:
    if hold is None:
        return "(reported)"
    return f"({'FALLS SHORT OF' if _short(number, hold) else 'holds:'} {100 * hold:.0f})"


def _write(results: dict[str, Any]) -> None:
    facts = {
        "command": "python -m benchmarks.decomposed_credit",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": _processor(),
        "versions": {name: version(name) for name in ("creditflow", "torch", "transformers", "numpy")},
    }
    out = ROOT / "docs" / "results" / "decomposed_credit.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n")
    print(f"written: {out.relative_to(ROOT)}")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
    return f"{names[0]} x {len(names)}" if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
