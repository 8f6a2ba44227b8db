"""Tests of the wheel: its contents, and a shipped recipe from an empty folder; and of light imports."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import yaml

from creditflow._utils.install import install_command
from tests.cli.commands import toy_run
from tests.paths import RECIPES, ROOT, TOY

PACKAGE = ROOT / "src" / "creditflow"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""The environment without a path to the sources."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_wheel_holds_every_file_of_the_package(wheel):
    found = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = {str(path.relative_to(ROOT / "src")) for path in found}
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if name.startswith("creditflow/")}
    assert held == files
    assert {f"creditflow/recipes/{path.name}" for path in RECIPES.iterdir() if path.is_file()} <= held


CORE = """
import numpy as np
from creditflow import CreditOptions, TrajectoryBatch, assign
from creditflow.credit import explain
from creditflow.registry import modules_in

rules = [module.__name__ for module in modules_in("creditflow.credit.rules")]
outcome = np.array([1.0, 0.0, 1.0, 0.0])
batch = TrajectoryBatch.from_arrays(
    trajectory_of_step=np.repeat(np.arange(4), 2), group_of_trajectory=[0, 0, 1, 1], outcome=outcome,
    scores=np.linspace(0, 1, 8)[:, None], score_names=["quality"],
)
options = CreditOptions()
assigned = assign(batch, options)
assert np.ptp(assigned.advantage.advantage_S) > 0
assert explain(assigned, 3).step_id == batch.step_ids[3]
"""
"""A program that needs numpy and numba alone."""


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, numpy and numba (the installed ones, by links)."""
    folder = tmp_path_factory.mktemp("core")
    site = make_environment(folder, wheel)
    for name in ("numpy", "numpy.libs", "numba", "llvmlite"):
        (site / name).symlink_to(Path(sysconfig.get_path("purelib"), name))
    return folder / "bin"


def make_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with the wheel alone; return its folder of packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", wheel], check=True)
    return folder / f"lib/python{sysconfig.get_python_version()}/site-packages"


def run(*words: object, folder: Path, variables: Mapping[str, str] = CLEAN) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=folder, env=variables, check=False, capture_output=True, text=True)


def test_credit_needs_numpy_and_numba_alone(core, tmp_path):
    done = run(core / "python", "-c", CORE, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_commands_without_packages_name_the_line_to_install(core, wheel, tmp_path):
    assert run(core / "creditflow", "--version", folder=tmp_path).stdout.startswith("creditflow 0.1.0\nPython 3.")
    listed = run(core / "creditflow", "--help", folder=tmp_path).stdout
    assert "  why        Explain the advantage of a step, term by term.\n" in listed
    for words, extra in [
        ("why run", "report"),
        ("train x.yaml", "train"),
        ("convert a", "traces"),
        ("sandbox", "sandbox"),
    ]:
        done = run(core / "creditflow", *words.split(), folder=tmp_path)
        command = f"pip install 'creditflow[{extra}] @ file://{wheel}'"
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: creditflow {words.split()[0]} needs typer: {command}\n"
    assert "(did you mean 'train'?)" in run(core / "creditflow", "trian", folder=tmp_path).stderr


@pytest.mark.parametrize("name", ["credit_options", "rewards.RewardManager", "data.read_parquet"])
def test_name_without_packages_has_the_line_to_install(core, wheel, tmp_path, name):
    done = run(core / "python", "-c", f"import creditflow.data; creditflow.{name}", folder=tmp_path)
    package = "pyarrow" if "parquet" in name else "pydantic"
    command = f"pip install 'creditflow[report] @ file://{wheel}'"
    assert done.stderr.endswith(f"errors.MissingAttributeError: creditflow.{name} needs {package}: {command}\n")


TRAINING = "torch transformers safetensors huggingface_hub cloudpickle jsonschema math_verify pint sympy"
READING = f"""
import sys
sys.modules.update(dict.fromkeys({TRAINING.split()!r}))
from creditflow.cli import main
main()
"""
"""The command without the packages that the extra `train` adds to `report`."""


def test_runs_are_read_without_the_packages_of_training(tmp_path):
    written = toy_run(tmp_path / "run", "trainer.total_training_steps=1", "trainer.test_freq=-1")
    command = partial(run, sys.executable, "-c", READING, folder=tmp_path, variables=os.environ)
    for words in (["why"], ["report", "-o", "page.html"], ["recredit", "algorithm.propagation=own"]):
        done = command(words[0], written, *words[1:])
        assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "page.html").read_text()
    done = command("train", TOY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"error: creditflow train needs torch: {install_command('train')}\n")


@pytest.mark.slow
def test_wheel_checks_a_shipped_recipe_elsewhere(wheel, tmp_path):
    """An empty environment gets the wheel, and the dependencies of this one without its editable creditflow."""
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    site = make_environment(environment, wheel)
    # A folder that a .pth file names is searched, but its own .pth files, the editable install's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    settings = ["recipe.hidden=16", "recipe.layers=1", "recipe.train_tasks=64", "recipe.warmup=0.0"]
    located = run(environment / "bin" / "python", "-c", "import creditflow; print(creditflow.__file__)", folder=folder)
    done = run(environment / "bin" / "creditflow", "check", "tool_chain", *settings, folder=folder)

    assert Path(located.stdout.strip()) == site / "creditflow" / "__init__.py"
    assert done.returncode == 0, done.stderr
    assert "the recipe can be trained" in done.stdout + done.stderr
    assert not any(folder.iterdir())


def test_files_of_the_project_name_one_version():
    """The citation and the changelog name the version of pyproject.toml, and the workflows are valid YAML."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == project["version"]
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert yaml.safe_load(path.read_text())["jobs"], path


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        (
            "import creditflow.credit",
            "torch transformers pyarrow pandas duckdb matplotlib omegaconf sympy numba verl ray rich typer",
        ),
        (
            "import creditflow._utils.huggingface\nfrom creditflow.rollout import *",
            "torch openai starlette uvicorn pydantic pyarrow",
        ),
        ("import creditflow.testing", "torch numba pyarrow transformers pytest hypothesis"),
        ("import creditflow.engines.verl.engine", "verl ray"),
    ],
)
def test_import_loads_no_heavy_packages(statement, heavy):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*heavy.split()}.intersection(done.stdout.split())
