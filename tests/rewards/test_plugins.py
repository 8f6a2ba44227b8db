"""Tests of extensions from other distributions: a reward function and a sandbox back end, by entry points."""

import re
from pathlib import Path

import pytest

from creditflow.runs import Ledger
from tests.distributions import creditflow, install, python, succeeded
from tests.paths import TOY

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
    points = (
        "[creditflow.rewards]\ndummy_ascii = dummy_rewards:dummy_ascii\n"
        "[creditflow.sandboxes]\ndummy_box = dummy_sandboxes:BACKEND\n"
    )
    install(folder, points, dummy_rewards=REWARD, dummy_sandboxes=SANDBOX)
    return folder


def test_installed_reward_is_used_by_guard_and_commands(site: Path, tmp_path: Path) -> None:
    overrides = (
        "reward.functions=[{fn: dummy_ascii}, {fn: 'toy.py:first_byte_is_printable'}]",
        "guard.rules={low_ascii: {metric: reward/dummy_ascii/mean, below: 2, window: 1, action: warn}}",
    )
    run, page = tmp_path / "run", tmp_path / "report.html"
    succeeded(site, "train", TOY, *overrides, f"trainer.default_local_dir={run}")
    assert "low_ascii" in (run / "events.jsonl").read_text()
    step = Ledger.open(run).read(1).batch.step_ids[0]  # the writer's, the first step of its trajectory
    assert "dummy_ascii" in succeeded(site, "why", run, step)
    succeeded(site, "report", run, "-o", page)
    assert "dummy_ascii" in page.read_text()
    succeeded(site, "recredit", run, "algorithm.propagation=discounted")


@pytest.mark.slow
def test_sandbox_check_probes_an_installed_box(site: Path) -> None:
    check = creditflow(site, "sandbox", "check", "--backend", "dummy_box")
    assert check.returncode == 1, check.stdout + check.stderr
    assert re.fullmatch(r"dummy_box: [3-5] of 10 probes contained", check.stdout.splitlines()[-1])


def test_installed_box_runs_code_tests(site: Path) -> None:
    script = (
        "from creditflow.rewards.registry import REWARD_FUNCTIONS\n"
        "reward = REWARD_FUNCTIONS['code_tests'](sandbox={'backend': 'dummy_box', 'colour': 'red'})\n"
        "score = reward('```python\\nprint(int(input()) + 1)\\n```', {'inputs': ['1\\n'], 'outputs': ['2\\n']})\n"
        "print('value', getattr(score, 'value', score))\n"
    )
    result = python(site, "-c", script)
    assert result.stdout.strip() == "value 1.0", result.stderr
