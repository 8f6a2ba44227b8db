"""Run the page about a supervised warm-up with the real TRL, which `make benchmarks` installs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import DOCS
from tests.test_docs_code import BLOCK

TRL = Path(os.environ.get("CREDITFLOW_TRL", Path(sys.prefix) / "trl"))
PAGE = DOCS / "how_to" / "sft.md"
LOSS = re.compile(r"'loss': '([\d.]+)'")
PASS = re.compile(r"pass@1 \(mean over trajectories\) +([\d.]+)\s+pass@1, greedy +([\d.]+)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not (TRL / "trl").is_dir():
        pytest.skip("TRL is missing: make benchmarks")
    folder = tmp_path_factory.mktemp("sft")
    for name, _, text in BLOCK.findall(PAGE.read_text()):
        if name:
            (folder / name).write_text(text)
    run(folder, "demonstrate.py")
    return folder


def run(folder: Path, *arguments: str, trl: bool = False) -> str:
    paths = [str(TRL)] * trl + [os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def evaluate(folder: Path, model: str) -> tuple[float, float]:
    found = PASS.search(run(folder, "-m", "creditflow", "eval", "recipe.yaml", f"actor_rollout_ref.model.path={model}"))
    assert found
    return float(found[1]), float(found[2])


@pytest.mark.slow
def test_warm_up_lowers_the_loss_and_raises_the_evaluation(folder):
    losses = [float(loss) for loss in LOSS.findall(run(folder, "warm_up.py", trl=True))]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 4
    before, after = evaluate(folder, "tiny"), evaluate(folder, "warm")
    assert sum(after) > sum(before)
