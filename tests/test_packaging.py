"""Tests of the wheel: its contents, and a shipped recipe from an empty folder; and of light imports."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.paths import RECIPES, ROOT

PACKAGE = ROOT / "src" / "creditflow"


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


@pytest.mark.slow
def test_wheel_checks_a_shipped_recipe_elsewhere(wheel, tmp_path):
    """An empty environment gets the wheel, and the dependencies of this one without its editable creditflow."""
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
    )
    site = f"lib/python{sysconfig.get_python_version()}/site-packages"
    # A folder that a .pth file names is searched, but its own .pth files, the editable install's, are not read.
    (environment / site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    settings = ["recipe.hidden=16", "recipe.layers=1", "recipe.train_tasks=64", "recipe.warmup=0.0"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    located = subprocess.run(
        [python, "-c", "import creditflow; print(creditflow.__file__)"],
        cwd=folder, env=clean, check=True, capture_output=True, text=True,
    )  # fmt: skip
    done = subprocess.run(
        [environment / "bin" / "creditflow", "check", "tool_chain", *settings],
        cwd=folder, env=clean, check=False, capture_output=True, text=True,
    )  # fmt: skip

    assert Path(located.stdout.strip()) == environment / site / "creditflow" / "__init__.py"
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
        ("import creditflow", "pyarrow pandas duckdb matplotlib"),
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
