"""Tests of extensions from other distributions: a reward function and a sandbox back end, by entry points."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from creditflow.runs import Ledger
from tests.forks import fast_python
from tests.paths import TOY
from tests.rewards.processes import HANG_S

REWARD = '''
"""A dummy reward."""
from creditflow import reward


@reward(level="step", agent_match="writer")
def dummy_ascii(step, trajectory):
    """The share of ASCII characters in the response."""
    return sum(letter.isascii() for letter in step.response) / max(1, len(step.response))
'''

SANDBOX = '''
"""A dummy sandbox: no isolation at all."""
import warnings

from creditflow.sandbox import SandboxBackend, UnsafeSubprocess


def create(limits=None, *, colour="grey"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return UnsafeSubprocess(limits)


BACKEND = SandboxBackend("dummy_box", create)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed distribution: two modules and their entry points."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "dummy_rewards.py").write_text(REWARD)
    (folder / "dummy_sandboxes.py").write_text(SANDBOX)
    install(
        folder,
        "[creditflow.rewards]\ndummy_ascii = dummy_rewards:dummy_ascii\nbroken = nowhere_to_be_found:f\n"
        "[creditflow.sandboxes]\ndummy_box = dummy_sandboxes:BACKEND\n",
    )
    return folder


def install(folder: Path, entry_points: str) -> None:
    metadata = folder / "dummy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def python(site: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [fast_python(), *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )


def creditflow(site: Path, folder: Path, *arguments: object) -> str:
    done = python(site, folder, "-m", "creditflow", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_installed_reward_is_used_by_guard_and_commands(site: Path, tmp_path: Path) -> None:
    overrides = (
        "reward.functions=[{fn: dummy_ascii}, {fn: 'toy.py:first_byte_is_printable'}]",
        "guard.rules={low_ascii: {metric: reward/dummy_ascii/mean, below: 2, window: 1, action: warn}}",
    )
    run, page = tmp_path / "run", tmp_path / "report.html"
    assert "dummy_ascii" in creditflow(site, tmp_path, "check", TOY, *overrides)
    creditflow(site, tmp_path, "train", TOY, *overrides, f"trainer.default_local_dir={run}")
    assert "low_ascii" in (run / "events.jsonl").read_text()
    step = Ledger.open(run).read(1).batch.step_ids[0]  # the writer's, the first step of its trajectory
    assert "dummy_ascii" in creditflow(site, tmp_path, "why", run, step)
    creditflow(site, tmp_path, "report", run, "-o", page)
    assert "dummy_ascii" in page.read_text()
    creditflow(site, tmp_path, "recredit", run, "algorithm.propagation=discounted")


def test_unknown_reward_suggests_the_installed_one(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, "-m", "creditflow", "check", TOY, "reward.functions=[{fn: dummy_asci}]")
    assert done.returncode == 2
    assert "did you mean 'dummy_ascii'?" in done.stderr.replace("\n", " ")


def test_broken_entry_point_is_named_only_when_used(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, "-m", "creditflow", "check", TOY, "reward.functions=[{fn: broken}]")
    assert done.returncode == 2
    assert "entry point 'broken' of creditflow.rewards: nowhere_to_be_found:f cannot be loaded" in done.stderr


def test_sandbox_check_probes_an_installed_box(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, "-m", "creditflow", "sandbox", "check", "--backend", "dummy_box")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.fullmatch(r"dummy_box: [3-5] of 10 probes contained", done.stdout.splitlines()[-1])


def test_installed_box_runs_code_tests(site: Path, tmp_path: Path) -> None:
    script = (
        "from creditflow.rewards.registry import REWARD_FUNCTIONS\n"
        "reward = REWARD_FUNCTIONS['code_tests'](sandbox={'backend': 'dummy_box', 'colour': 'red'})\n"
        "score = reward('```python\\nprint(int(input()) + 1)\\n```', {'inputs': ['1\\n'], 'outputs': ['2\\n']})\n"
        "print('value', getattr(score, 'value', score))\n"
    )
    done = python(site, tmp_path, "-c", script)
    assert done.stdout.strip() == "value 1.0", done.stderr


def test_taken_sandbox_name_is_refused(site: Path, tmp_path: Path) -> None:
    install(tmp_path, "[creditflow.sandboxes]\nbubblewrap = creditflow.sandbox.backends.bubblewrap:BACKEND\n")
    done = python(tmp_path, tmp_path, "-m", "creditflow", "sandbox", "check")
    assert done.returncode == 2
    assert "expected a new name, got 'bubblewrap', which is taken" in done.stderr
