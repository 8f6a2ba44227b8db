"""The table of verl's methods that the engine overrides, and versions of verl that are not in it."""

import importlib.metadata
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl")

import verl
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from creditflow._utils.install import install_command
from creditflow._utils.pins import method_hashes
from creditflow.engines.verl import agent_loop, buffer, overridden, policy_servers, trainer, versions
from creditflow.engines.verl.overridden import expect_verl
from creditflow.errors import ConfigError

ROOT = Path(verl.__file__).parent


def overrides() -> Iterator[str]:
    """The file and qualified name of each method of verl that a class of the engine overrides."""
    classes = [cls for name, cls in TRAINER_REGISTRY.items() if name.startswith(trainer.TRAINER_PREFIX)]
    classes += trainer.PARTNERS.values()
    classes += [type("Buffer", (buffer.RolloutBuffer, base), {}) for base in (ReplayBuffer, ReplayBufferAsync)]
    classes += [agent_loop.RolloutWorker, agent_loop.CreditflowAgentLoopManager]
    classes += [policy_servers.SeparatePolicyWorker, versions.VersionedClient]
    for cls in classes:
        for place, own in enumerate(cls.__mro__):
            verls = [base for base in cls.__mro__[place + 1 :] if base.__module__.startswith("verl")]
            for name in vars(own) if own.__module__.startswith("creditflow") else ():
                replaced = next((vars(base)[name] for base in verls if name in vars(base)), None)
                method = inspect.unwrap(getattr(replaced, "__func__", replaced))
                if inspect.isfunction(method):
                    yield f"{Path(inspect.getfile(method)).relative_to(ROOT)}: {method.__qualname__}"


def test_table_has_every_overridden_method():
    """Except constructors, and hooks that verl calls for its users."""
    hooks = ("__init__", "on_", "get_llm_client")
    pinned = {name for name in overrides() if not name.rpartition(".")[2].startswith(hooks)}
    assert 15 < len(pinned) <= len(overridden.NAMES) <= 30
    assert pinned <= overridden.NAMES


def test_hashes_are_those_of_the_installed_version():
    version, root = overridden.installed()
    assert root == ROOT
    assert method_hashes(root, overridden.NAMES) == overridden.SUPPORTED[version]
    expect_verl()


def test_methods_of_another_version_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of the files with overridden methods, installed as a version that is not in the table."""
    for file in {name.split(": ")[0] for name in overridden.NAMES}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    monkeypatch.setattr(overridden, "installed", lambda: ("0.10.0.dev0", tmp_path))
    base, waiting = tmp_path / "trainer/ppo/v1/trainer_base.py", tmp_path / "trainer/ppo/v1/replay_buffer.py"
    base.write_text(base.read_text().replace("\n", " \n") + "\n\ndef new():\n    pass\n")
    expect_verl()

    base.write_text(base.read_text().replace("# 1. sample batch", "    # 1. sample batch"))  # an indent alone
    waiting.write_text(waiting.read_text().replace("def _wait_for_next_poll", "def _wait"))
    with pytest.raises(ConfigError) as caught:
        expect_verl()
    assert str(caught.value) == (
        "--engine verl: the installed verl 0.10.0.dev0 differs from 0.9.1, which creditflow was tested with, in "
        "ReplayBuffer._wait_for_next_poll, PPOTrainer._step_once; "
        f"{install_command('verl')}"
    )

    shutil.rmtree(tmp_path / "workers")  # absent files count as changed
    with pytest.raises(ConfigError, match=r"PPOTrainer\._step_once, .*ActorRolloutRefWorker\.init_model"):
        expect_verl()


@pytest.mark.parametrize("python", [(3, 12), (3, 13)])
def test_missing_package_names_the_extra(python: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    how = install_command("verl") if python < (3, 13) else "verl needs Python 3.11 or 3.12"
    monkeypatch.setattr(overridden.sys, "version_info", python)
    monkeypatch.setattr(overridden, "find_spec", lambda name: None)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        overridden.installed()
    with pytest.raises(ConfigError, match=f"verl is not installed; {re.escape(how)}$"):
        expect_verl()
