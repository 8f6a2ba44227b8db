"""Propagation rules, estimators and thresholds from a file beside the recipe, in every command that uses them."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from creditflow import TrajectoryBatch, assign
from creditflow.config import load_recipe
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, PROPAGATION_RULES
from creditflow.credit.thresholds.base import THRESHOLDS, BatchStats
from creditflow.engines.common.components import build_components
from creditflow.engines.common.guard import build_guard
from creditflow.engines.verl.recipe import KEY, recipe_section
from creditflow.errors import ConfigError
from tests.builders import credit_options
from tests.cli.commands import refused
from tests.distributions import DOUBLED, HALVES, STEADY, python, succeeded
from tests.paths import TOYS

RULES = f"""{HALVES}{DOUBLED}{STEADY}
from creditflow.credit import Rule


@propagation_rule("fails")
@dataclass(frozen=True)
class Fails(Rule):
    def credit(self, inputs):
        return 1 / 0


@propagation_rule("returns nothing")
@dataclass(frozen=True)
class Silent(Rule):
    def credit(self, inputs):
        return None


@threshold_kind("broken")
class Broken(Steady):
    def update(self, observed):
        return 1 / 0


def plain(inputs):
    return None
"""
OURS = ("algorithm.propagation=rules.py:Halves", "algorithm.adv_estimator=rules.py:doubled")
THEIRS = ("algorithm.propagation=own", "algorithm.adv_estimator=grpo")
GATED = ("algorithm.propagation=threshold", "algorithm.propagation_threshold={kind: rules.py:Steady, level: 0.3}")
SHADOW = "algorithm.shadow={propagation: own, adv_estimator: rules.py:doubled}"


def project(folder: Path, rules: str = RULES) -> Path:
    """A folder with the toy recipe and a file of rules; returns the recipe."""
    folder.mkdir(parents=True)
    for name in ("toy.py", "toy.yaml"):
        shutil.copy(TOYS / name, folder / name)
    (folder / "rules.py").write_text(rules)
    return folder / "toy.yaml"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project") / "beside")


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one training step, resumed for a second, with a rule and an estimator of the file."""
    folder = tmp_path_factory.mktemp("work")
    words = ("train", recipe, *OURS, "trainer.save_freq=1", "trainer.default_local_dir=run")
    succeeded(folder, *words, "trainer.total_training_steps=1")
    succeeded(folder, *words, "trainer.total_training_steps=2", "trainer.resume_mode=auto")
    return folder / "run"


@pytest.fixture
def gone(run: Path, recipe: Path, tmp_path: Path) -> Iterator[Path]:
    """A run whose file of rules does not exist during the test."""
    rules = recipe.with_name("rules.py")
    aside = rules.rename(tmp_path / "rules.py")
    yield shutil.copytree(run, tmp_path / "run")
    aside.rename(rules)


def steps_of(run: Path) -> list[dict]:
    return pq.read_table(run / "steps" / "000002.parquet").to_pylist()


def batch() -> TrajectoryBatch:
    return TrajectoryBatch.from_arrays(
        trajectory_of_step=np.array([0, 0, 1]),
        group_of_trajectory=np.array([0, 0]),
        outcome=np.array([1.0, 0.0]),
        scores=np.array([[1.0], [0.5], [0.5]]),
        score_names=["check"],
    )


# ---- loading -------------------------------------------------------------------------------------------------------


def test_recipe_holds_absolute_references(recipe: Path) -> None:
    rules = recipe.parent / "rules.py"
    algorithm = load_recipe(recipe, [*OURS, SHADOW]).config.algorithm
    assert algorithm.propagation == {"rule": f"{rules}:Halves"}
    assert algorithm.adv_estimator == f"{rules}:doubled"
    assert algorithm.shadow == {"propagation": {"rule": "own"}, "adv_estimator": f"{rules}:doubled"}
    config = load_recipe(recipe, GATED).config
    assert config.algorithm.propagation["theta"] == {"kind": f"{rules}:Steady", "level": 0.3}
    assert config.credit.propagation.make_threshold().theta("writer") == 0.3


def test_assign_uses_the_rule_of_the_file(recipe: Path) -> None:
    plain = assign(batch(), load_recipe(recipe, THEIRS[:1]).config.credit)
    for options, factor in ((OURS[:1], 0.5), ((*OURS[:1], "algorithm.propagation.factor=0.25"), 0.25)):
        assigned = assign(batch(), load_recipe(recipe, options).config.credit)
        np.testing.assert_array_equal(assigned.credit.total_S, factor * plain.credit.total_S)


def test_edited_and_equally_named_files_do_not_mix(tmp_path: Path) -> None:
    def credit_of(recipe: Path) -> np.ndarray:
        return assign(batch(), load_recipe(recipe, OURS[:1]).config.credit).credit.total_S

    first = project(tmp_path / "one")
    half, double = credit_of(first), credit_of(project(tmp_path / "two", RULES.replace("self.factor *", "2.0 *")))
    np.testing.assert_array_equal(4.0 * half, double)
    first.with_name("rules.py").write_text(RULES.replace("self.factor *", "2.0 *"))
    np.testing.assert_array_equal(credit_of(first), double)


def test_file_takes_no_name(recipe: Path) -> None:
    load_recipe(recipe, [*OURS, SHADOW])
    for registry in (PROPAGATION_RULES, ADVANTAGE_ESTIMATORS, THRESHOLDS):
        assert not {"halves", "doubled", "Steady", "steady"} & set(registry.names())
        assert not any("rules.py" in name for name in registry.names())


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "reference", "reason"),
    [
        ("propagation", "gone.py:Halves", "no file 'gone.py' in FOLDER or the working directory"),
        ("shadow.propagation_threshold.kind", "gone.py:Steady", "no file 'gone.py' in FOLDER or the working directory"),
        ("propagation", "rules.py:Halvs", "FOLDER/rules.py has no 'Halvs' (did you mean 'Halves'?)"),
        ("propagation", "rules.py:plain", "expected a class with @propagation_rule, got function plain"),
        ("propagation", "rules.py:doubled", "expected a class with @propagation_rule, got function doubled"),
    ],
)
def test_wrong_reference_is_refused(key: str, reference: str, reason: str, recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [f"algorithm.{key}={reference}"])
    reason = reason.replace("FOLDER", str(recipe.parent))
    assert str(caught.value).startswith(f"algorithm.{key}: {reference}: cannot be loaded: {reason}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import numpy\n\n1 / 0\n", "ZeroDivisionError: division by zero (rules.py:3)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (rules.py:2)"),
    ],
)
def test_broken_file_error_names_the_line(text: str, reason: str, tmp_path: Path) -> None:
    recipe = project(tmp_path / "p", text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, OURS[:1])
    assert str(caught.value).startswith("algorithm.propagation: rules.py:Halves: cannot be loaded: ")
    assert reason in str(caught.value)


def test_threshold_that_raises_is_located(recipe: Path) -> None:
    words = [GATED[0], "algorithm.propagation_threshold={kind: rules.py:Broken}"]
    threshold = copy.deepcopy(load_recipe(recipe, words).config.credit.propagation.make_threshold())
    assert threshold.theta("a") == 0.4
    with pytest.raises(ConfigError, match=r"Broken: ZeroDivisionError: division by zero \(rules\.py:\d+ in update\)"):
        threshold.update(BatchStats({}, {}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Fails", "ZeroDivisionError: division by zero (rules.py:LINE in credit)"),
        ("Silent", "expected `credit` to return Credit, got NoneType"),
    ],
)
def test_failing_rule_is_named(name: str, reason: str, recipe: Path) -> None:
    options = load_recipe(recipe, [f"algorithm.propagation=rules.py:{name}"]).config.credit
    with pytest.raises(ConfigError) as caught:
        assign(batch(), options)
    line = RULES.splitlines().index("        return 1 / 0") + 1
    expected = f"algorithm.propagation: {recipe.parent}/rules.py:{name}: {reason.replace('LINE', str(line))}"
    assert str(caught.value) == expected


def test_unloaded_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 'x\.py:rule'; a file is loaded with the recipe that names it"):
        assign(batch(), credit_options(propagation="x.py:rule"))


# ---- commands ------------------------------------------------------------------------------------------------------


def test_check_assigns_credit_by_the_file(recipe: Path, tmp_path: Path) -> None:
    printed = succeeded(tmp_path, "check", recipe, *GATED, "algorithm.adv_estimator=rules.py:doubled", "--verbose")
    assert "rules.py:Steady" in printed
    assert "the recipe can be trained" in printed


def test_rule_and_estimator_of_a_file_train(run: Path) -> None:
    rows = steps_of(run)
    trained = [row for row in rows if row["trained"]]
    assert trained
    assert all(row["received"] == 0 for row in rows)
    for row in trained:
        expected = 0.0 if row["tied"] else row["weight"] * (row["credit"] - row["baseline"])
        assert row["advantage"] == pytest.approx(expected, abs=1e-12)


def test_readers_need_no_file(gone: Path) -> None:
    succeeded(gone.parent, "why", gone)
    succeeded(gone.parent, "report", gone, "--out", "r.html")
    succeeded(gone.parent, "recredit", gone, *THEIRS, "-o", gone.parent / "theirs")
    step = next(row["step_id"] for row in steps_of(gone) if row["trained"] and not row["tied"])
    assert "/rules.py:Halves" in succeeded(gone.parent, "why", gone, step)


def test_recredit_applies_the_rule_of_a_file(run: Path, recipe: Path) -> None:
    past, back = run.parent / "past", run.parent / "back"
    succeeded(recipe.parent, "recredit", run, *THEIRS, "-o", past)
    succeeded(recipe.parent, "recredit", past, *OURS, "-o", back)
    assert [row["advantage"] for row in steps_of(back)] == [row["advantage"] for row in steps_of(run)]


@pytest.mark.parametrize("words", ["recredit RUN algorithm.gamma=0.5 -o RUN/out", "audit RUN", "train RUN/config.yaml"])
def test_command_that_needs_the_file_names_it(gone: Path, recipe: Path, words: str) -> None:
    message = f"algorithm.propagation: {recipe.parent}/rules.py:Halves: cannot be loaded: no file"
    assert message in refused(*words.replace("RUN", str(gone)).split())


def test_recredit_tells_recorded_options_that_the_file_refuses(run: Path, recipe: Path, tmp_path: Path) -> None:
    text, file = recipe.with_name("rules.py").read_text(), recipe.with_name("rules.py")
    try:
        succeeded(recipe.parent, "recredit", run, "propagation.factor=0.75", "-o", tmp_path / "before")
        file.write_text(text.replace("at_most=1.0", "at_most=0.7"))
        message = refused("recredit", tmp_path / "before", "gamma=0.5", "-o", tmp_path / "out")
        assert message.endswith("of at most 0.7, got 0.75, under the run's recorded options")
        assert "recorded" not in refused("recredit", run, "propagation.factor=0.8", "-o", tmp_path / "out")
    finally:
        file.write_text(text)


def test_audit_scores_the_rule_of_a_file(run: Path, recipe: Path) -> None:
    file = run.parent / "audit.json"
    rule = "rules.py:Halves"
    words = ("--decisions", 3, "--continuations", 2, "--rule", rule, "--json", file)
    succeeded(recipe.parent, "audit", run, *words)
    assert rule in json.dumps(json.loads(file.read_text())["rules"])


def test_guard_falls_back_from_the_rule_of_a_file(recipe: Path) -> None:
    loaded = load_recipe(recipe, [OURS[0]])
    guard = build_guard(loaded.config, loaded.folder, build_components(loaded, tasks=False).rewards.functions, "local")
    for step in range(1, 7):
        guard.look(step, {"reward/error_rate": 0.5, "reward/judged_trajectories": 1000})
    assert str(guard.options(loaded.config.credit).propagation) == "identical"


@pytest.mark.slow
def test_comparison_trains_the_rule_of_a_file(recipe: Path, tmp_path: Path) -> None:
    vary = "algorithm.propagation=identical,rules.py:Halves"
    words = ("--no-arms", "--jobs", 1, "trainer.total_training_steps=1", "trainer.default_local_dir=out")
    printed = succeeded(tmp_path, "compare", recipe, "--vary", vary, *words)
    assert "rules.py:Halves" in printed
    assert (tmp_path / "out" / "rules.py_Halves" / "seed0" / "run.json").is_file()


def test_worker_process_registers_the_rules(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, [OURS[1], *GATED, SHADOW])
    (tmp_path / "section.json").write_text(json.dumps({KEY: recipe_section(loaded, tmp_path)}))
    code = (
        "import json\n"
        "from creditflow.engines.verl.recipe import read_run_handle\n"
        "run = read_run_handle(json.load(open('section.json')))\n"
        "print(run.config.credit.propagation.make_threshold().theta('writer'))\n"
    )
    done = python(tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (0, "0.3\n"), done.stderr
