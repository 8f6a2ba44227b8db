"""Run the code of the pages that teach by example, as printed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.engines.base import find_engine
from tests.forks import fast_python
from tests.paths import DOCS, GSM8K, ROOT

BLOCK = re.compile(r"(?:^`([\w.]+)`:\n\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = (
    ROOT / "README.md",
    DOCS / "concepts" / "credit.md",
    DOCS / "concepts" / "pictures.md",
    DOCS / "how_to" / "own_reward.md",
    DOCS / "how_to" / "add_a_rule.md",
    DOCS / "how_to" / "traces.md",
)
LONG = (
    DOCS / "how_to" / "frameworks.md",
    DOCS / "get_started" / "first_run.md",
    DOCS / "how_to" / "own_data.md",
    DOCS / "how_to" / "own_reward.md",
    DOCS / "how_to" / "own_team.md",
    DOCS / "how_to" / "rewards.md",
    DOCS / "how_to" / "teams.md",
    DOCS / "how_to" / "environments.md",
    DOCS / "how_to" / "rollout.md",
    DOCS / "how_to" / "serving.md",
)
"""Pages with more commands that train."""


def run_page(page: Path, folder: Path, with_commands: bool = True) -> str:
    """Write the named blocks as files, then run Python blocks together and `creditflow` commands one by one.

    Returns the output of the Python blocks.
    """
    code, commands = [], []
    for name, language, text in BLOCK.findall(page.read_text()):
        if name:
            (folder / name).write_text(text)
        elif language == "python":
            code.append(text)
        elif language == "bash":
            commands += [line.split("#")[0].split() for line in text.splitlines() if line.startswith("creditflow ")]
    done = subprocess.run([fast_python(), "-c", "".join(code)], cwd=folder, check=True, capture_output=True, text=True)
    for command in commands if with_commands else ():
        subprocess.run([fast_python(), "-m", *command], cwd=folder, check=True)
    assert code or commands, f"{page}: nothing to run"
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_code_runs_as_printed(page, tmp_path):
    printed = run_page(page, tmp_path, with_commands=page not in LONG)
    shown = [text for name, language, text in BLOCK.findall(page.read_text()) if not name and not language]
    if printed and shown:
        assert printed in shown


@pytest.mark.parametrize("place", range(3))
def test_own_trainer_example_is_complete(place):
    blocks = BLOCK.findall((DOCS / "how_to" / "own_trainer.md").read_text())
    code = [text for _, language, text in blocks if language == "python"][place]
    shown = [text for _, language, text in blocks if not language][place]
    assert len(code.splitlines()) <= 25
    allowed = {"torch"} if "import torch" in code else set()
    code += f"import sys\nassert {{'omegaconf', 'pyarrow', 'pydantic', 'torch'}} & {{*sys.modules}} <= {allowed}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(shown)


def test_one_gpu_recipe_trains_an_adapter(tmp_path):
    for name, _, text in BLOCK.findall((DOCS / "how_to" / "one_gpu.md").read_text()):
        if name:
            (tmp_path / name).write_text(text)
    shutil.copy(GSM8K, tmp_path / "train.jsonl")
    smaller = ["actor_rollout_ref.model.path=tiny", "trainer.total_training_steps=1", "trainer.val_before_train=false"]
    fewer = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.val_max_samples=2"]
    options = [*smaller, *fewer, "data.max_response_length=8", f"trainer.default_local_dir={tmp_path / 'run'}"]
    find_engine("local").train(load_recipe(tmp_path / "recipe.yaml", options), (), Reporter())
    assert (tmp_path / "run" / "checkpoints" / "global_step_1" / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG, ids=lambda page: page.stem)
def test_long_page_runs_as_printed(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mkdocs", path=Path(sys.executable).parent), reason="the extra docs is missing")
def test_site_builds_without_a_warning(tmp_path):
    """A broken link, a missing anchor and a page outside the navigation are warnings, which `--strict` refuses."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "site" / "reference" / "configuration.html").exists()
