"""A propagation rule, an estimator and a threshold of another distribution, in every command that uses them."""

from pathlib import Path

import pytest

from tests.distributions import DOUBLED, HALVES, STEADY, creditflow, install, python, succeeded
from tests.paths import TOY

ENTRY_POINTS = """
[creditflow.rules]
halves = halves:Halves
thirds = halves:Thirds
broken = broken
[creditflow.estimators]
doubled = doubled
[creditflow.thresholds]
steady = steady
"""
THIRDS = """
@propagation_rule("thirds")
@dataclass(frozen=True)
class Thirds(Halves):
    factor: float = option(1 / 3, at_least=0.0, at_most=1.0)
"""
THEIRS = ("algorithm.propagation={rule: halves, factor: 0.25}", "algorithm.adv_estimator=doubled")
STEADY_THETA = "algorithm.propagation={rule: threshold, theta: {kind: steady, level: 0.3}}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    modules = {"halves": HALVES + THIRDS, "doubled": DOUBLED, "steady": STEADY, "broken": "import nowhere\n"}
    install(folder, ENTRY_POINTS, **modules)
    return folder


@pytest.fixture(scope="module")
def run(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two training steps with the rule, the estimator and the threshold."""
    folder = tmp_path_factory.mktemp("work")
    words = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.default_local_dir=run")
    succeeded(site, "train", TOY, *THEIRS, *words, folder=folder)
    return folder / "run"


def steps_of(run: Path) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(run / "steps" / "000002.parquet").to_pylist()


def test_installed_rule_and_estimator_train(run: Path) -> None:
    rows = steps_of(run)
    assert any(row["trained"] for row in rows)
    assert {row["shared"] for row in rows} <= {0.25 * k / 8 for k in range(9)}


def test_check_names_the_installed_threshold(site: Path, tmp_path: Path) -> None:
    assert "steady" in succeeded(site, "check", TOY, STEADY_THETA, "--verbose", folder=tmp_path)
    refused = creditflow(site, "check", TOY, STEADY_THETA.replace("steady", "stedy"), folder=tmp_path)
    assert refused.returncode == 2
    assert "(did you mean 'steady'?)" in refused.stderr


def test_check_validates_the_option_of_the_installed_rule(site: Path, tmp_path: Path) -> None:
    assert "factor: 0.25" in succeeded(site, "check", TOY, *THEIRS, "--verbose", folder=tmp_path)
    for option, message in (
        ("factor: 2", "algorithm.propagation.factor: expected a number of at least 0 and of at most 1, got 2"),
        ("facto: 1", "unknown key 'algorithm.propagation.facto' (did you mean 'algorithm.propagation.factor'?)"),
    ):
        refused = creditflow(site, "check", TOY, f"algorithm.propagation={{rule: halves, {option}}}", folder=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr


def test_why_names_the_installed_rule(site: Path, run: Path) -> None:
    step = next(row["step_id"] for row in steps_of(run) if row["trained"] and not row["tied"])
    assert "halves" in succeeded(site, "why", run, step)


def test_recredit_applies_the_installed_rule(site: Path, run: Path) -> None:
    past = ("algorithm.propagation=own", "algorithm.adv_estimator=grpo")
    succeeded(site, "recredit", run, *past, "-o", run.parent / "past")
    succeeded(site, "recredit", run.parent / "past", "algorithm.propagation=halves", "-o", run.parent / "back")


@pytest.mark.parametrize("before", ["", "import halves"])
def test_two_rules_of_one_module_can_be_used(site: Path, before: str) -> None:
    code = f"""{before}
from creditflow import credit_options
for name in ("halves", "thirds", "halves"):
    print(credit_options(propagation={{"rule": name}}).propagation.factor)
"""
    used = python(site, "-c", code)
    assert used.stdout.split() == ["0.5", repr(1 / 3), "0.5"], used.stderr


def test_broken_entry_point_is_refused_only_where_it_is_used(site: Path) -> None:
    refused = creditflow(site, "check", TOY, "algorithm.propagation=broken")
    assert refused.returncode == 2
    assert "entry point 'broken' of creditflow.rules: broken cannot be loaded: ModuleNotFoundError" in refused.stderr
