"""The command that installs what is missing fits the way in which creditflow was installed."""

import json
import sys
from importlib import metadata

import pytest

from creditflow._utils.install import extras_with, install_command, needs
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


def test_missing_module_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError) as raised, needs("LoRA", "lora"):
        import peft  # noqa: F401
    assert str(raised.value) == f"LoRA needs peft: {install_command('lora')}"
