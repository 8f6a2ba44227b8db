"""A propagation rule, an estimator and a threshold of another distribution, in every command that uses them."""

import json
from pathlib import Path

import pytest

from tests.distributions import DOUBLED, HALVES, STEADY, creditflow, install, succeeded
from tests.paths import TOY

ENTRY_POINTS = """
[creditflow.rules]
halves = halves
broken = broken
[creditflow.estimators]
doubled = doubled
[creditflow.thresholds]
steady = steady
"""
ALL = (
    "algorithm.propagation=halves",
    "algorithm.adv_estimator=doubled",
    "algorithm.propagation_threshold={kind: steady, level: 0.3}",
)
PAST = ("algorithm.propagation=none", "algorithm.adv_estimator=grpo", "algorithm.propagation_threshold=0.5")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    modules = {"halves": HALVES, "doubled": DOUBLED, "steady": STEADY, "broken": "import nowhere_to_be_found\n"}
    install(folder, ENTRY_POINTS, **modules)
    return folder


@pytest.fixture(scope="module")
def run(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two training steps with the rule, the estimator and the threshold."""
    folder = tmp_path_factory.mktemp("work")
    words = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.default_local_dir=run")
    succeeded(site, "train", TOY, *ALL[:2], *words, folder=folder)
    return folder / "run"


def steps_of(run: Path) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(run / "steps" / "000002.parquet").to_pylist()


def test_installed_rule_and_estimator_train(run: Path) -> None:
    rows = steps_of(run)
    trained = [row for row in rows if row["trained"]]
    assert trained
    assert all(row["received"] == 0 for row in rows)
    for row in trained:
        expected = 0.0 if row["tied"] else row["weight"] * (row["credit"] - row["baseline"])
        assert row["advantage"] == pytest.approx(expected, abs=1e-12)


def test_check_names_the_installed_threshold(site: Path, tmp_path: Path) -> None:
    printed = succeeded(site, "check", TOY, *ALL, "algorithm.propagation=threshold", "--verbose", folder=tmp_path)
    assert "steady" in printed
    refused = creditflow(site, "check", TOY, "algorithm.propagation_threshold={kind: stedy}", folder=tmp_path)
    assert refused.returncode == 2
    assert "(did you mean 'steady'?)" in refused.stderr


def test_why_names_the_installed_rule(site: Path, run: Path) -> None:
    step = next(row["step_id"] for row in steps_of(run) if row["trained"] and not row["tied"])
    assert "halves" in succeeded(site, "why", run, step)


def test_recredit_applies_the_installed_rule(site: Path, run: Path) -> None:
    succeeded(site, "recredit", run, *PAST[:2], "-o", run.parent / "past")
    succeeded(site, "recredit", run.parent / "past", "algorithm.propagation=halves", "-o", run.parent / "back")


def test_audit_scores_the_installed_rule(site: Path, run: Path) -> None:
    file = run.parent / "audit.json"
    succeeded(site, "audit", run, "--decisions", 3, "--continuations", 2, "--rule", "halves", "--json", file)
    assert "halves" in json.dumps(json.loads(file.read_text())["rules"])


def test_broken_entry_point_is_refused_only_where_it_is_used(site: Path) -> None:
    refused = creditflow(site, "check", TOY, "algorithm.propagation=broken")
    assert refused.returncode == 2
    assert "entry point 'broken' of creditflow.rules: broken cannot be loaded: ModuleNotFoundError" in refused.stderr
