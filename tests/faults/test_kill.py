"""Runs that are killed at random moments and gone on with, against runs that were not."""

import functools
import json
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.engines.small_runs import CRITIC, EVERY_STEP, TWO_POLICIES, expect_the_same, write_recipe
from tests.faults.dies import PLACES
from tests.forks import fast_python
from tests.paths import ROOT
from tests.rewards.processes import HANG_S

ADAPTER = ("actor_rollout_ref.model.lora_rank=2",)
TEAMS = {
    "one policy": (),
    "two policies, one with an adapter": TWO_POLICIES,
    "an adapter": ADAPTER,
    "a critic": CRITIC,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, word_model_folder: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("killed"), word_model_folder).parent


def train(folder: Path, name: str, team: str, place: str = "", k: int = 0, when: str = "before") -> list[str]:
    """Train and return the lines of output; kill the run at `place`, if one is named."""
    command = [fast_python(), "-m", "tests.faults.dies", place, str(k), when]
    command += ["train", str(folder / "toy.yaml"), *EVERY_STEP, *TEAMS[team]]
    command += [f"trainer.default_local_dir={folder / name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == (-signal.SIGKILL if k else 0), done.stderr[-2000:]
    return done.stdout.splitlines()


@functools.cache
def whole(folder: Path, team: str) -> tuple[Path, dict[str, int]]:
    """Train without a kill; return the folder and the number of passes of each place."""
    name = f"whole, {team}"
    return folder / name, json.loads(train(folder, name, team)[-1])


def expect_that_a_kill_changes_nothing(folder: Path, team: str, place: str, seed: int) -> None:
    there, passed = whole(folder, team)
    rng = random.Random(f"{team}, {place}, {seed}")
    k, when = rng.randint(1, passed[place]), rng.choice(["before", "after"])
    name = f"{team}, {place}, {seed}"

    train(folder, name, team, place, k, when)
    if not (folder / name / "evaluation.json").exists():  # the last file: the run was finished
        train(folder, name, team)  # by a process of its own, as after any kill

    expect_the_same(there, folder / name)
    left = [path.name for path in (folder / name).rglob(".*")]
    assert left == []


@pytest.mark.parametrize(
    ("team", "place"),
    [
        ("one policy", "generation"),
        pytest.param("two policies, one with an adapter", "sums of a checkpoint", marks=pytest.mark.slow),
        pytest.param("an adapter", "update", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_run_equals_an_uninterrupted_one(folder, team, place):
    expect_that_a_kill_changes_nothing(folder, team, place, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_any_place_of_the_kill_gives_the_same_run(folder, place, seed):
    expect_that_a_kill_changes_nothing(folder, "one policy", place, seed)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["generation", "update", "optimizer of a checkpoint", "writing to disk"])
@pytest.mark.parametrize("team", [team for team in TEAMS if team != "one policy"])
def test_any_team_gives_the_same_run_after_a_kill(folder, team, place):
    expect_that_a_kill_changes_nothing(folder, team, place, seed=3)
