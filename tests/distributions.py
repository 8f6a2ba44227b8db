"""Distributions in a temporary folder, for tests of entry points, and commands that see them."""

import os
import subprocess
from pathlib import Path

from tests.forks import fast_python

# Modules with a propagation rule, an estimator and a threshold

HALVES = """
from dataclasses import dataclass, replace
from typing import ClassVar

from creditflow.credit import OutcomeRule, option, propagation_rule
from creditflow.credit.records import NOTHING


@propagation_rule("halves")
@dataclass(frozen=True)
class Halves(OutcomeRule):
    flow: ClassVar[str] = NOTHING

    factor: float = option(0.5, at_least=0.0, at_most=1.0)

    def credit(self, inputs):
        credit = self.paid(inputs)
        own_S, shared_S = self.factor * credit.own_S, self.factor * credit.shared_S
        return replace(credit, own_S=own_S, shared_S=shared_S, paid_S=None)
"""
DOUBLED = """
from creditflow.credit import Estimate, advantage_estimator


@advantage_estimator("doubled")
def doubled(inputs):
    return Estimate(2.0 * inputs.groups.mean_S)
"""
STEADY = """
from creditflow.credit.thresholds.base import METRIC, threshold_kind


@threshold_kind("steady")
class Steady:
    floor = 0.0

    def __init__(self, team, level=0.4):
        self.level = level

    def theta(self, agent):
        return self.level

    def update(self, observed):
        pass

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]

    def metrics(self):
        return {METRIC: self.level}
"""


def install(folder: Path, entry_points: str, name: str = "theirs", **modules: str) -> None:
    """Write a distribution with the text of its `entry_points.txt`, and modules by name."""
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entry_points)


def python(site: Path, *arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` (default: `site`), with the distributions in `site` on its path."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [fast_python(), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        cwd=folder or site,
        check=False,
    )


def creditflow(site: Path, *words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of creditflow that sees the distributions in `site`."""
    return python(site, "-m", "creditflow", *words, folder=folder)


def succeeded(site: Path, *words: object, folder: Path | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    result = creditflow(site, *words, folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr
