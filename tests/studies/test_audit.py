"""Tests of `creditflow audit`."""

import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, permutation_test

from creditflow.credit import assign
from creditflow.engines.local.values import DecisionValues
from creditflow.runs import Ledger
from creditflow.studies.decisions import decision_rows, discovered, p_values, rule_fidelities
from tests.builders import batch_of, credit_options, make_trajectory, record_removed_keys, step
from tests.cli.commands import creditflow, refused, toy_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    return toy_run(folder, "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=1")


def audit(*arguments: object) -> Result:
    return creditflow("audit", *arguments)


def test_audit_prints_decisions_and_fidelity_by_rule(run: Path, tmp_path: Path) -> None:
    words = ("--decisions", 6, "--continuations", 2, "--rule", "identical", "--top", 3)
    done = audit(run, *words, "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output
    assert "training step 2; checkpoint 1 acts: 6 of 16 decisions" in done.output
    for text in ("agrees", "confirmed error", "in force", "no noise ceiling: expected 4 continuations or more, got 2"):
        assert text in done.output
    kept = json.loads((run / "audit/000002.json").read_text())
    assert kept == json.loads((tmp_path / "a.json").read_text())
    assert len(kept["decisions"]) == 6
    assert kept["probability"] == 6 / 16
    assert (kept["refused"], kept["failed"]) == (0, 0)
    recorded = Ledger.open(run).read(2)
    assert recorded.assignment is not None
    advantage = dict(zip(recorded.batch.step_ids, recorded.assignment.advantage.advantage_S.tolist(), strict=True))
    for row in kept["decisions"]:
        assert row["advantage"] == advantage[row["step_id"]]
        assert -1 <= row["value"] <= 1
    assert kept["decisions"] == sorted(kept["decisions"], key=lambda row: -abs(row["selecting"]))
    assert sum(row["step_id"] in done.output for row in kept["decisions"]) == 3
    again = audit(run, *words, "--json", "/proc/b.json")
    assert (again.exit_code, again.stdout) == (2, done.stdout)
    assert "error: --json: /proc/b.json cannot be written" in again.stderr
    assert json.loads((run / "audit/000002.json").read_text()) == kept


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rule", ""], "--rule: expected the name of a rule, or options of credit, got nothing"),
        (["--rule", "gama=1"], "did you mean 'gamma'?"),
        (["--rule", "propagation={rule: own, w_r: 1} gama=1"], "did you mean 'gamma'?"),
        (["--training-step", "7"], "expected a training step that is on record (1 to 2), got 7"),
    ],
)
def test_audit_refuses_bad_input(run: Path, options: list[str], said: str) -> None:
    assert said in refused("audit", run, *options)


def test_audit_of_an_earlier_step_names_who_acts(run: Path) -> None:
    model, few = run / "checkpoints/global_step_2", ("--training-step", 1, "--decisions", 2, "--continuations", 2)
    with_model = audit(run, *few, "--model", model)
    assert f"training step 1; {model} acts: 2 of 16 decisions" in with_model.output
    assert "training step 1; the initial model acts" in audit(run, *few).output


def test_audit_under_another_policy_warns(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("global_step_1"))
    done = audit(tmp_path / "run", "--decisions", 2, "--continuations", 2)
    assert "warning: checkpoint 2 acts, and not the policy that sampled training step 2; name another" in done.output


def test_audit_drops_removed_keys_that_had_no_effect(run: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(run, tmp_path / "run"))
    record_removed_keys(old, central=False)
    assert audit(old, "--decisions", 2, "--continuations", 2).exit_code == 0
    record_removed_keys(old, central=True)
    assert f"critic.central: True in a run of creditflow {version('creditflow')}, which" in refused("audit", old)


def test_audit_without_a_checkpoint_requires_a_model(run: Path, tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    for name in ("run.json", "config.yaml", "steps/000001.parquet"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    message = "expected a checkpoint of the embedded engine, found none; name a model with --model"
    assert message in refused("audit", tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"engine": "verl"}))
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    assert "name a model with --model" in refused("audit", tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"engine": "none"}))
    assert "imported trajectories cannot be continued" in refused("audit", tmp_path)


def test_audit_checks_its_folder_before_rollouts(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("audit"))
    (tmp_path / "run/audit").write_text("in the way")
    assert "audit cannot be made: File exists" in refused("audit", tmp_path / "run")


def test_decisions_are_ranked_and_compared_in_sign() -> None:
    trajectories = [
        make_trajectory(f"p{n}", [step("one", good, tokens=1), step("two", 1.0, tokens=1)], outcome=good, task="q")
        for n, good in enumerate([1.0, 0.0])
    ]
    batch = batch_of(*trajectories)
    assignment = assign(batch, credit_options(propagation="none", group_by="agent"))
    step_D, ones, nan = np.arange(4), np.ones(8), np.full(8, math.nan)
    after_DK = np.array([ones, ones, [1, 1, 1, 0, 0, 1, 1, 1], nan])
    before_DK = np.repeat([[0.0], [0.0], [0.5], [0.0]], 8, axis=1)
    values = DecisionValues(batch.group_of_trajectory[batch.trajectory_of_step], after_DK, before_DK)
    rows = decision_rows(batch, step_D, values, assignment)
    assert [row.step_id for row in rows] == ["p0.0", "p0.1", "p1.0", "p1.1"]
    assert rows[0].advantage == assignment.advantage.advantage_S[0] > 0 > rows[2].advantage
    assert (rows[2].value, rows[2].selecting, rows[2].confirmed) == (0.25, 0.25, 0.25)
    assert rows[2].confirmed_error == pytest.approx(0.25)
    assert [row.agrees for row in rows] == ["yes", "yes", "unclear", ""]
    (found,) = rule_fidelities({"none": assignment}, step_D, values)
    assert (found.rule, found.credit.decisions) == ("none", 3)


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=30))
def test_discoveries_are_those_of_scipy(p: list[float]) -> None:
    known = [value for value in p if not math.isnan(value)]
    adjusted = iter(false_discovery_control(known) if known else [])
    expected = [not math.isnan(value) and next(adjusted) <= 0.05 for value in p]
    assert discovered(np.array(p)).tolist() == expected


def returns(rng: np.random.Generator, after_D: np.ndarray, before_D: np.ndarray, k: int) -> DecisionValues:
    """`k` returns of 0 or 1 on both sides of D decisions with these means."""
    sides = ((rng.random((len(p_D), k)) < p_D[:, None]).astype(float) for p_D in (after_D, before_D))
    return DecisionValues(np.arange(len(after_D)), *sides)


def scaled_difference(after: np.ndarray, before: np.ndarray, axis: int) -> np.ndarray:
    """The size of the difference of means, times both counts: exact for whole numbers."""
    return abs(after.sum(axis=axis) * before.shape[axis] - before.sum(axis=axis) * after.shape[axis])


@pytest.mark.parametrize(("k", "unknown"), [(2, 0), (8, 0), (8, 3)])
def test_p_values_are_those_of_scipy(k: int, unknown: int) -> None:
    after_DK, before_DK = np.random.default_rng(k).integers(2, size=(2, 6, k)).astype(float)
    (after_DK[0], before_DK[0]) = 1.0, 0.0
    before_DK[:, :unknown] = math.nan
    found = p_values(DecisionValues(np.arange(6), after_DK * 5 - 2, before_DK * 5 - 2), -2.0, 3.0)
    for p, after, before in zip(found, after_DK, before_DK[:, unknown:], strict=True):
        exact = permutation_test((after, before), scaled_difference, n_resamples=np.inf, alternative="greater")
        assert p == pytest.approx(exact.pvalue, abs=1e-9)


def test_lone_certain_sign_is_known() -> None:
    after_DK = np.where(np.arange(200)[:, None] == 7, np.ones(8), 0.0)
    values = DecisionValues(np.arange(200), after_DK, np.zeros((200, 8)))
    assert np.flatnonzero(discovered(p_values(values))).tolist() == [7]


@pytest.mark.parametrize(("outcomes", "share"), [((0, 1), 0.5), ((0.4, 0.6), 0.5), ((0.1, 0.1), 0.1)])
def test_without_an_effect_no_sign_is_known_in_95_percent(outcomes: tuple[float, float], share: float) -> None:
    """Family-wise error: the share of audits that report any sign. Equal means, of which one side is 0 or 1."""
    rng, reported = np.random.default_rng(0), 0
    for _ in range(50):
        after, before = returns(rng, *np.full((2, 200), share), k=8).after_DK, rng.random((200, 8)) < share
        sides = np.take(outcomes, after.astype(int)), before.astype(float)
        reported += discovered(p_values(DecisionValues(np.arange(200), *sides))).any()
    assert reported <= 0.05 * 50


def test_graded_outcomes_with_an_effect_give_signs() -> None:
    after_DK, before_DK = np.random.default_rng(0).uniform([[[0.9]], [[0.0]]], [[[1.0]], [[0.1]]], (2, 50, 8))
    assert discovered(p_values(DecisionValues(np.arange(50), after_DK, before_DK))).mean() > 0.8


def test_known_signs_are_wrong_in_5_percent_at_most() -> None:
    rng, known, wrong = np.random.default_rng(1), 0, 0
    for _ in range(10):
        before_D = rng.uniform(0.0, 0.2, 60)
        effect_D = np.where(np.arange(60) < 12, 0.8, 0.0)
        values = returns(rng, before_D + effect_D, before_D, 8)
        known_D = discovered(p_values(values))
        known += known_D.sum()
        wrong += (known_D & (np.sign(values.value_D) != np.sign(effect_D))).sum()
    assert known > 40
    assert wrong <= 0.05 * known


def test_confirmed_values_are_free_of_selection() -> None:
    """Without an effect, the ten largest values of 100 are far from 0, and their confirmations are 0 in the mean."""
    rng, selecting, confirmed = np.random.default_rng(2), [], []
    steps = [step("one", 1.0, tokens=1)]
    batch = batch_of(*(make_trajectory(f"p{n}", steps, outcome=1.0, task="q") for n in range(100)))
    assignment = assign(batch, credit_options(propagation="none", group_by="agent"))
    for _ in range(5):
        p_D = np.full(100, 0.5)
        for row in decision_rows(batch, np.arange(100), returns(rng, p_D, p_D, 8), assignment)[:10]:
            selecting.append(abs(row.selecting))
            confirmed.append(np.sign(row.selecting) * row.confirmed)
    assert np.mean(selecting) > 0.5
    assert abs(np.mean(confirmed)) < 3 * np.sqrt(2 * 0.25 / 4 / 50)
