"""An engine of another distribution, in every command that has an engine; and errors for unknown engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.engines.base import ENGINES, find_engine, sampling_engine
from tests.builders import unregister, without_progress
from tests.distributions import install, succeeded
from tests.paths import TOY

DUMMY = '''
import asyncio
from creditflow.data import Step, Trajectory, TrajectoryBatch
from creditflow.cli import app
from creditflow.engines.base import CheckResult, Engine
from creditflow.engines.common.components import build_components
from creditflow.engines.common.run import FINISHED, create_folder, run_facts, run_path
from creditflow.monitoring.evaluation import Evaluation


def echo(components, tasks, n, key):
    """Every agent repeats the task."""
    trajectories = []
    for t, task in enumerate(tasks):
        for k in range(n):
            id = f"{key}-{t}-{k}"
            steps = [
                Step(f"{id}-{i}", id, i, agent, 0, (i - 1,) if i else (), task.text, f"{task.text} {k}" * (k + 1))
                for i, agent in enumerate(components.agents)
            ]
            trajectories.append(Trajectory(id, f"{key}-{t}", task, steps, (len(steps) - 1,), steps[-1].response))
    return trajectories, asyncio.run(components.rewards.score(trajectories))


class EchoEngine(Engine):
    name = "dummy"
    rolls_out = True

    def train(self, recipe, options, reporter, make_report=None):
        components = build_components(recipe)
        folder = create_folder(recipe, run_path(recipe), run_facts(recipe, self.name, ()), reporter)
        folder.write_text(FINISHED, self.evaluate(components, reporter).to_json())
        return folder

    def check(self, components, n_tasks):
        n = components.recipe.config.actor_rollout_ref.rollout.n
        return CheckResult(*echo(components, components.train_tasks[:n_tasks], n, "check"), None)

    def evaluate(self, components, reporter):
        batch = TrajectoryBatch.from_trajectories(echo(components, components.val_tasks, 1, "val")[0])
        return Evaluation.from_batches(batch, batch, 1)


ENGINE = EchoEngine()
'''


@pytest.fixture
def distribution(tmp_path: Path) -> Iterator[Path]:
    """A folder with an installed distribution of two entry points, one of which is no engine."""
    engines = "dummy = echo_engine:ENGINE\nwrong = echo_engine:echo\n"
    (tmp_path / "packages").mkdir()
    install(tmp_path / "packages", f"[creditflow.engines]\n{engines}", "echo_engine", echo_engine=DUMMY)
    yield tmp_path / "packages"
    unregister(ENGINES, "dummy")


def with_dummy(distribution: Path, command: str, *words: str) -> str:
    """Run a command with the engine in a process that finds the distribution; returns its output."""
    return succeeded(distribution, command, TOY, "--engine", "dummy", *words, folder=distribution.parent)


def test_dummy_engine_trains_a_recipe(distribution):
    assert "validation, on " in with_dummy(distribution, "train", "trainer.default_local_dir=run")
    assert '"engine": "dummy"' in (distribution.parent / "run" / "run.json").read_text()


def test_dummy_engine_checks_and_evaluates_a_recipe(distribution):
    printed = with_dummy(distribution, "check")
    assert "agents, in 4 tasks x 4 " in printed
    assert "training would change nothing on these tasks" in printed  # all of its responses are alike
    with_dummy(distribution, "eval", "--json", "numbers.json")
    assert (distribution.parent / "numbers.json").exists()


@pytest.mark.slow
def test_dummy_engine_trains_every_arm_of_a_comparison(distribution):
    vary = ("--vary", "algorithm.propagation=threshold,own", "trainer.default_local_dir=out", "--jobs", "2")
    with_dummy(distribution, "compare", *vary)
    facts = sorted((distribution.parent / "out").glob("*/seed0/run.json"))
    assert len(facts) == 3
    assert all('"engine": "dummy"' in file.read_text() for file in facts)


UNKNOWN = "--engine: expected local or dummy or verl or wrong, got 'dumy' (did you mean 'dummy'?)"
WRONG = "--engine: entry point 'wrong' of creditflow.engines: expected an object of type Engine, got function"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train", ["dumy"], UNKNOWN),
        ("eval", ["dumy"], UNKNOWN),
        ("train", ["wrong"], WRONG),
        ("train", ["dummy", "audit.every=1"], "audit.every: 1 is for --engine local; dummy does not support it"),
        ("train", ["dummy", "--", "a=1"], "--: is for verl's configuration; add --engine verl"),
    ],
)
def test_unknown_engine_or_option_is_refused(distribution, monkeypatch, command, words, message):
    monkeypatch.syspath_prepend(distribution)
    done = CliRunner().invoke(app, [command, str(TOY), "--engine", *words])

    assert (done.exit_code, done.stdout, without_progress(done.stderr)) == (2, "", f"error: {message}\n")


def test_engine_without_rollouts_is_sampled_by_the_default():
    assert sampling_engine(find_engine("verl")) is find_engine("local")
    assert sampling_engine(find_engine("local")) is find_engine("local")
