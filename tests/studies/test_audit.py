"""Tests of counterfactual credit on real, small runs: measured in training and by `creditflow audit`."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from creditflow._utils.progress import Reporter
from creditflow.cli import app
from creditflow.cli.audit import _spread_over_tasks
from creditflow.config import load_recipe
from creditflow.credit import CreditOptions, assign, explain
from creditflow.credit.shapley import KEY, Values
from creditflow.engines.local.trainer import train
from creditflow.errors import ConfigError, TooManyFailedScores
from creditflow.runs import Ledger
from creditflow.studies.audit import Measured, agreement
from tests.builders import batch_of, make_trajectory, step
from tests.paths import TOY
from tests.trees import tree_of_branches


def a_run(folder: Path, *overrides: str) -> Ledger:
    options = [f"trainer.default_local_dir={folder}", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    return Ledger.open(train(load_recipe(TOY, [*options, *overrides]), Reporter()).path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("audit") / "run", "trainer.save_freq=1").path


def audit(*arguments: object):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def a_trajectory(id: str, task: str, good: float, outcome: float):
    return make_trajectory(id, [step("one", good, tokens=1), step("two", 1.0, tokens=1)], outcome=outcome, task=task)


def added(good: float) -> Values:
    """Values of one trajectory: the first agent's follow its score, the second agent's are zero."""
    value_A = np.array([good - 0.5, 0.0])
    return Values(value_A, np.full(2, 0.1), value_A, np.full(2, np.nan), 4, ("one", "two"))


@settings(max_examples=10)
@given(st.integers(0, 100))
def test_agreement_of_exact_and_shared_credit(seed):
    rng = np.random.default_rng(seed)
    good = rng.choice([0.0, 0.25, 0.75], size=24).tolist()
    batch = batch_of(*(a_trajectory(f"p{i}", f"q{i // 4}", good[i], float(i % 2)) for i in range(24)))
    seen = Measured.from_values(batch, {f"p{i}": added(good[i]) for i in range(24)})
    assert len(seen.shapley_X) == 48
    values = [value for one in good for value in (one - 0.5, 0.0)]
    assert seen.precision is not None
    assert math.isclose(seen.precision.reliability, max(0.0, 1 - 0.01 / np.var(values)))
    own = agreement("own", assign(batch, CreditOptions(propagation="none", w_o=0.0)), seen)
    shared = agreement("shared", assign(batch, CreditOptions(propagation="identical")), seen)
    assert math.isclose(own.by_agent["one"].value, 1.0)
    assert math.isnan(own.by_agent["two"].value)
    assert shared.within.value == 0.5
    assert own.by_agent["one"].low <= own.by_agent["one"].value <= own.by_agent["one"].high + 1e-12


@pytest.mark.parametrize("error", [[np.nan, np.nan], [0.1, np.nan]])
def test_agreement_needs_known_errors_and_several_tasks(error: list[float]):
    batch = batch_of(a_trajectory("p", "q", 0.5, 1.0), a_trajectory("o", "q", 0.0, 0.0))
    columns = (np.array([0.5, 0.0]), np.array(error), np.array([0.5, 0.0]), np.array(error))
    seen = Measured.from_values(batch, {"p": Values(*columns, 3, ("one", "two"))})
    assert seen.precision is None
    found = agreement("own", assign(batch, CreditOptions(propagation="none")), seen).credit
    assert (found.value, math.isnan(found.low), math.isnan(found.high)) == (-1.0, True, True)


def test_audit_chooses_no_branches():
    chosen = _spread_over_tasks(batch_of(*tree_of_branches()), 10)
    assert [one.id for one in chosen] == ["t", "other"]


def test_audit_prints_a_row_per_rule_and_saves_its_values(run: Path, tmp_path: Path):
    done = audit(run, "--rollouts", 9, "--rule", "identical", "--rule", "propagation=none outcome_to=answer",
                 "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "training step 2: 8 trajectories replayed; checkpoint 1 acts" in done.output
    for words in ("in force", "identical", "propagation=none outcome_to=answer", "writer", "critic"):
        assert words in done.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((run / "audit/000002.json").read_text())
    assert kept == json.loads((tmp_path / "a.json").read_text())
    batch = Ledger.open(run).read(2).batch
    assert kept["values"].keys() == set(batch.trajectory_ids)
    assert all(
        one["rollouts"] == 9 for one in kept["values"].values()
    )  # two agents: three coalitions, three times each
    # The writer affects the outcome only through the critic, and both answer with random bytes.
    for id, outcome in zip(batch.trajectory_ids, batch.outcome.tolist(), strict=True):
        total = sum(kept["values"][id]["shapley"].values())
        assert -1e-9 <= outcome - total <= 1 + 1e-9  # the outcome of the baseline alone
    again = audit(run, "--rollouts", 9, "--rule", "identical", "--json", tmp_path / "b.json")
    assert again.exit_code == 0
    assert json.loads((tmp_path / "b.json").read_text())["values"] == kept["values"]


def test_audit_of_noise_advises_against_comparing_rules(run: Path):
    done = audit(run, "--rollouts", 9)
    words = " ".join(done.output.split())
    kept = json.loads((run / "audit/000002.json").read_text())
    values = [v for one in kept["values"].values() for v in one["shapley"].values() if v is not None]
    errors = [v for one in kept["values"].values() for v in one["shapley_se"].values() if v is not None]
    allowed = 1 + 1.645 * math.sqrt(2 / (len(values) - 1))
    assert kept["is_noise"] == (np.var(values) <= np.mean(np.square(errors)) * allowed)
    assert ("These values are noise at 9 rollouts per trajectory: do not compare rules" in words) is kept["is_noise"]


def test_audit_with_other_models_prints_their_paths(run: Path):
    model = run / "checkpoints/global_step_2"
    done = audit(run, "--training-step", 1, "--rollouts", 3, "--budget", 12, "--model", model, "--baseline", model)
    assert done.exit_code == 0, done.output
    assert "training step 1: 4 trajectories replayed" in done.output
    assert done.output.count(str(model)) == 2
    assert "measurement error" not in done.output  # with one rollout per coalition the error is unknown
    assert "noise" not in done.output
    first = audit(run, "--training-step", 1, "--rollouts", 3)
    assert "the initial model acts" in first.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rule", ""], "--rule: expected the name of a rule, or options of credit, got nothing"),
        (["--rule", "propagation=gae"], "got 'gae'"),
        (["--rollouts", "2"], "expected at least 3 rollouts for 2 agents, got 2"),
        (
            ["--rollouts", "30", "--budget", "20"],
            "--budget: expected at least --rollouts",
        ),
        (["--training-step", "7"], "expected a training step that is on record (1 to 2), got 7"),
        (["--rule", "treshold"], "shapley, threshold, uniform, got 'treshold'"),
        (["--rule", "gama=1"], "did you mean 'gamma'?"),
        (["--model", "nowhere"], "nowhere"),
        (["--rule", "shapley", "--budget", "30", "--rollouts", "9"], "expected Shapley values, found none"),
    ],
)
def test_audit_refuses_bad_input(run: Path, options: list[str], said: str):
    done = audit(run, *options)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_audit_without_a_checkpoint_requires_a_model(run: Path, tmp_path: Path):
    (tmp_path / "steps").mkdir()
    for name in ("run.json", "config.yaml", "steps/000001.parquet"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    done = audit(tmp_path)
    assert done.exit_code == 2
    assert "expected a checkpoint of the embedded engine, found none; name a model with --model" in done.output


def test_audit_checks_its_folder_before_rollouts(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("audit"))
    (tmp_path / "run/audit").write_text("in the way")
    done = audit(tmp_path / "run")
    assert done.exit_code == 2
    assert "audit cannot be made: File exists" in done.output
    assert "replayed" not in done.output


def test_audit_of_a_verl_run_requires_a_model(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text()) | {"engine": "verl"}
    (tmp_path / "run/run.json").write_text(json.dumps(facts))
    assert "name a model with --model" in audit(tmp_path / "run").output


def test_audit_of_a_shapley_run_measures_new_values(tmp_path: Path):
    options = ("algorithm.propagation=shapley", "algorithm.counterfactual_rollouts=9", "algorithm.w_r=0")
    ledger = a_run(tmp_path / "run", *options, "trainer.save_freq=1")
    done = audit(ledger.path, "--rollouts", 9, "--budget", 36, "--rule", "shapley")
    assert done.exit_code == 0, done.output
    kept = json.loads((ledger.path / "audit/000002.json").read_text())
    assert len(kept["values"]) == 4
    in_force, again = kept["rules"]
    assert {**in_force, "rule": "", "options": {}} == {**again, "rule": "", "options": {}}
    assert in_force["credit"]["value"] is None or in_force["credit"]["value"] < 0.99
    batch = ledger.read(2).batch
    trained = {id: info[KEY]["shapley"] for id, info in zip(batch.trajectory_ids, batch.trajectory_info, strict=True)}
    assert any(kept["values"][id]["shapley"] != trained[id] for id in kept["values"])


def test_check_accepts_a_recipe_with_shapley():
    result = CliRunner().invoke(app, ["check", str(TOY), "algorithm.propagation=shapley"])
    assert result.exit_code == 0, result.output
    assert "the recipe can be trained" in result.output


def test_failing_counterfactual_rollouts_end_the_run(tmp_path: Path):
    (tmp_path / "toy.yaml").write_text(TOY.read_text().replace("toy.py:solve", "broken.py:solve"))
    (tmp_path / "toy.py").write_text(TOY.with_name("toy.py").read_text())
    (tmp_path / "broken.py").write_text(
        "trajectories = 0\n"
        "async def solve(task, team):\n"
        "    global trajectories\n"
        "    trajectories += 1\n"
        "    if trajectories > 8:\n"
        "        raise OSError('the tool is gone')\n"
        "    return await team.critic(await team.writer(task.text))\n"
    )
    options = ["algorithm.propagation=shapley", "algorithm.counterfactual_rollouts=3", "trainer.val_before_train=false"]
    with pytest.raises(TooManyFailedScores, match=r"24 of 24 counterfactual rollouts failed.*the tool is gone"):
        train(
            load_recipe(tmp_path / "toy.yaml", [*options, f"trainer.default_local_dir={tmp_path / 'run'}"]), Reporter()
        )
    assert Ledger.open(tmp_path / "run").read(1).batch.n_trajectories == 8


def test_training_by_shapley_values_records_and_explains_them(tmp_path: Path):
    ledger = a_run(tmp_path / "one", "algorithm.propagation=shapley", "algorithm.counterfactual_rollouts=6")
    metrics = ledger.metrics()
    for row in metrics:
        assert row["rollout/counterfactual_rollouts"] == 8 * 6
        assert row["rollout/counterfactual_failed_frac"] == 0
        assert row["timing/counterfactual_s"] > 0
    other = a_run(tmp_path / "two", "algorithm.propagation=shapley", "algorithm.counterfactual_rollouts=6")
    for recorded, same in zip(ledger, other, strict=True):
        batch, made = recorded.batch, recorded.assignment
        assert made is not None
        assert same.assignment is not None
        np.testing.assert_array_equal(made.advantage_S, same.assignment.advantage_S)
        for n, info in enumerate(batch.trajectory_info):
            assert info[KEY]["rollouts"] == 6
            for s in np.flatnonzero(batch.trajectory_of_step == n):
                assert made.shared_S[s] == info[KEY]["shapley"][batch.agent_names[batch.agent_of_step[s]]]
                assert explain(made, int(s)).replay() == made.advantage_S[s]
    assert np.unique(np.concatenate([one.assignment.shared_S for one in ledger if one.assignment])).size > 2


def test_too_few_counterfactual_rollouts_are_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"counterfactual_rollouts: .*at least 3 rollouts for 2 agents \(writer, critic\), got 2"
    ):
        a_run(tmp_path / "run", "algorithm.propagation=shapley", "algorithm.counterfactual_rollouts=2")
