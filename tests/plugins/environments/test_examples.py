"""Tests of the environment examples with the real libraries: each trains two steps of a generated tiny model."""

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from creditflow.runs import Ledger
from tests.cli.commands import toy_run
from tests.paths import ROOT

FOLDER = ROOT / "examples" / "environments"
OPENENV = Path(os.environ.get("CREDITFLOW_OPENENV_PYTHON", ROOT / ".venv/openenv/bin/python"))
NO_TEXTARENA = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="pip install 'creditflow[textarena]'"
)
NO_OPENENV = pytest.mark.skipif(
    not OPENENV.is_file(), reason=f"{OPENENV} is absent: make openenv installs OpenEnv's server"
)


def trained(recipe: Path | str, folder: Path, *settings: str) -> Ledger:
    return Ledger.open(toy_run(folder / "run", "trainer.device=cpu", *settings, recipe=recipe))


def trajectories_of(ledger: Ledger) -> list:
    return [one for step in ledger.steps for one in ledger.read(step).batch.to_trajectories()]


def test_gymnasium_example_trains_two_steps(tmp_path):
    ledger = trained(FOLDER / "gymnasium.yaml", tmp_path)
    made = trajectories_of(ledger)
    assert len(made) == 2 * 16
    assert {step.agent for one in made for step in one.steps} == {"agent"}
    assert all(one.outcome.status == "ok" for one in made)
    assert {one.task.extra_info["seed"] % 2 for one in made} == {1}


@pytest.mark.parametrize(
    ("name", "agents"),
    [
        ("pettingzoo", ("player_1", "player_2")),
        pytest.param("textarena", ("player_0", "player_1"), marks=NO_TEXTARENA),
    ],
)
@pytest.mark.slow
def test_two_policies_train_by_their_own_outcomes(name, agents, tmp_path):
    ledger = trained(FOLDER / f"{name}.yaml", tmp_path)
    made = trajectories_of(ledger)
    for one in made:
        earned = json.loads(one.answer)
        assert set(earned) == set(agents)
        assert one.outcome.value == earned[agents[0]]
        assert all(one.outcomes[agent].value == earned[agent] for agent in {step.agent for step in one.steps})
    assert {step.policy for one in made for step in one.steps} <= {"first", "second"}
    rows = [row for row in ledger.metrics() if "first/actor/grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.fixture(scope="module")
def openenv_server() -> Iterator[int]:
    """The port of the example's OpenEnv server."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [OPENENV, FOLDER / "openenv_server.py", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield int(server.stdout.readline())
        server.terminate()


@NO_OPENENV
def test_openenv_example_trains_two_steps(openenv_server, tmp_path):
    """Rollouts of one task have the same secret: the right guess of one is the right guess of all."""
    text = (FOLDER / "openenv.yaml").read_text()
    recipe = tmp_path / "openenv.yaml"
    recipe.write_text(text.replace("127.0.0.1:8000?", f"127.0.0.1:{openenv_server}?sessions=3&"))
    made = trajectories_of(trained(recipe, tmp_path, "actor_rollout_ref.rollout.n=6"))
    assert len(made) == 2 * 4 * 6
    assert all(one.status != "failed" and 1 <= len(one.steps) <= 4 for one in made)
    assert {one.outcome.value for one in made} == {0.0, 1.0}
    assert "Guess a number from 0 to 9." in made[0].steps[0].prompt
    right: dict[int, set[str]] = {}
    for one in made:
        if one.outcome.value == 1.0:
            right.setdefault(one.task.extra_info["seed"], set()).add(one.steps[-1].info["action"])
    assert all(len(guesses) == 1 for guesses in right.values())
