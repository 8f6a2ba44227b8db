"""The install command of a missing package fits the installation of creditflow."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from creditflow._utils.install import extras_with, install_command, missing_package, needs
from creditflow.errors import ConfigError

CLONE = {"url": "file:///home/a%20b/creditflow", "dir_info": {"editable": True}}
WHEEL = {"url": "file:///tmp/creditflow-0.1.0-py3-none-any.whl", "archive_info": {}}
GIT = {"url": "https://example.org/creditflow", "vcs_info": {"vcs": "git", "commit_id": "1f2e3d"}}


@pytest.mark.parametrize(
    ("origin", "installer", "command"),
    [
        (None, "pip", "pip install 'creditflow[report]'"),
        (None, "uv", "uv pip install 'creditflow[report]'"),
        (CLONE, "pip", "pip install -e '/home/a b/creditflow[report]'"),
        (CLONE | {"dir_info": {}}, "pip", "pip install '/home/a b/creditflow[report]'"),
        (WHEEL, "pip", "pip install 'creditflow[report] @ file:///tmp/creditflow-0.1.0-py3-none-any.whl'"),
        (GIT, "pip", "pip install 'creditflow[report] @ git+https://example.org/creditflow@1f2e3d'"),
    ],
)
def test_command_names_the_place_of_the_installation(tmp_path, monkeypatch, origin, installer, command):
    folder = tmp_path / "creditflow-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: creditflow\nVersion: 0.1.0\nRequires-Dist: math-verify>=0.9; extra == 'train'\n"
        "Requires-Dist: pyyaml>=6; extra == 'report'\nRequires-Dist: rich>=14; extra == \"report\"\n"
        "Requires-Dist: rich>=14; python_version < '3.13' and extra == 'train'\nRequires-Dist: numpy>=2.1\n"
    )
    (folder / "INSTALLER").write_text(f"{installer}\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert install_command("report") == command
    assert metadata.version("creditflow") == "0.1.0"
    modules = ("math_verify", "yaml.nodes", "rich", "numpy", "ri", None)
    assert [extras_with(module) for module in modules] == [
        {"train"},
        {"report"},
        {"report", "train"},
        set(),
        set(),
        set(),
    ]


WITHOUT_PYDANTIC = """
import pydoc, sys
sys.modules["pydantic"] = None
import creditflow
assert not hasattr(creditflow, "RewardManager")
assert "Train teams" in pydoc.render_doc(creditflow)
for statement in ("creditflow.RewardManager", "from creditflow import RewardManager", "from creditflow import *"):
    try:
        exec(statement)
    except creditflow.InputError as error:
        print(error)
"""


def test_missing_package_hides_attributes_and_is_named():
    ran = subprocess.run([sys.executable, "-c", WITHOUT_PYDANTIC], capture_output=True, text=True, check=True)
    first, second, third = ran.stdout.splitlines()
    assert first == second == f"creditflow.RewardManager needs pydantic: {install_command('report')}"
    assert third.endswith(f"needs pydantic: {install_command('report')}")


def test_missing_module_is_named_without_an_installation(monkeypatch):
    def not_found(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", not_found)
    assert install_command("report") == "pip install 'creditflow[report]'"
    error = ModuleNotFoundError("No module named 'pydantic'", name="pydantic")
    with pytest.raises(ModuleNotFoundError, match="No module named 'pydantic'"):
        missing_package("creditflow.Team", error, "report")


def test_missing_module_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError) as raised, needs("LoRA", "lora"):
        import peft  # noqa: F401
    assert str(raised.value) == f"LoRA needs peft: {install_command('lora')}"
