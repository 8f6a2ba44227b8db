"""Sections of options, sources of tasks, workflows, hooks and tables that other distributions add."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from creditflow.runs import Ledger
from tests.distributions import creditflow, install, succeeded
from tests.paths import TOY

ENTRY_POINTS = """
[creditflow.config]
mail = acme_options:MailConfig
[creditflow.engine_hooks]
mail = acme_hook:make
[creditflow.metrics]
mail = acme_hook:METRICS
[creditflow.report_tables]
mail = acme_hook:table
[creditflow.task_sources]
acme = acme_hook:SOURCE
[creditflow.workflows]
acme = acme_hook:WORKFLOW
"""
OPTIONS = '''
from creditflow.errors import ConfigError
from creditflow.plugins import PluginSection

class MailConfig(PluginSection):
    """Messages about a run."""

    every: int = 10
    """Training steps between messages."""

    def expect_valid(self, config, key):
        if self.every > config.trainer.total_training_steps:
            raise ConfigError(f"{key}.every: expected at most the steps of the run, got {self.every}")
'''
HOOK = """
from creditflow import Task
from creditflow.config import WorkflowSource
from creditflow.config.sections import AgentConfig
from creditflow.data.sources import Source
from creditflow.engines.local.hooks import EngineHook
from creditflow.monitoring.catalog import Metric
from creditflow.reports.plugin_tables import PluginTable

class Mail(EngineHook):
    def __init__(self, every):
        self.every, self.sent = every, 0

    def after_batch(self, step, trajectories):
        self.sent += step % self.every == 0
        return {"mail/sent": float(self.sent)}

    def save(self, folder):
        return self.sent

    def load(self, folder, state):
        self.sent = state

def make(recipe, policies):
    every = recipe.config.recipe.get("mail")
    return Mail(every) if every else None

def table(metrics):
    return PluginTable("Mail", [("step", "n")], [["7"]], "mail", "letters", {"sent": "mail/sent"})

def tasks(names, key, split):
    return [Task("acme", ({"role": "user", "content": str(i)},), i, {}) for i in range(4)]

async def solve(task, team):
    return await team.solver(task.text)

def fill(config):
    config.team.agents = config.team.agents or {"solver": AgentConfig()}

METRICS = [Metric("mail/sent", "letters", "local", "messages so far")]
SOURCE = Source(tasks)
WORKFLOW = WorkflowSource(lambda reference, key: solve, fill)
"""
SMALL = ("trainer.total_training_steps=2", "trainer.val_before_train=false", "data.val_max_samples=2")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path, ENTRY_POINTS, acme_options=OPTIONS, acme_hook=HOOK)
    return tmp_path


def test_hook_keeps_its_state_and_reports(site: Path) -> None:
    run = site / "run"
    train = ("train", TOY, *SMALL, "recipe.mail=1", f"trainer.default_local_dir={run}", "trainer.save_freq=1")
    succeeded(site, *train)
    succeeded(site, *train, "trainer.total_training_steps=3")
    sent = [row["mail/sent"] for row in Ledger.open(run).metrics() if "mail/sent" in row]
    assert sent == [1.0, 2.0, 3.0]
    succeeded(site, "report", run)
    page = (site / "report.html").read_text()
    assert '"title":"Mail"' in page
    assert "messages so far" in page
    groups = ("metrics", "report_tables", "engine_hooks")
    install(site, "".join(f"[creditflow.{group}]\nbroken = no_module:X\n" for group in groups), "broken")
    message = "entry point 'broken' of creditflow.{}: no_module:X cannot be loaded: ModuleNotFoundError"
    warned = run_new(site, f"from creditflow.cli import app; app(['report', {str(run)!r}])").stderr
    assert all(f"UserWarning: {message.format(group)}" in warned for group in groups[:2]), warned
    more = creditflow(site, *train, "trainer.total_training_steps=4")
    assert f"error: {message.format('engine_hooks')}" in more.stderr


OPTION_ERRORS = {
    "mial.every=1": "unknown key 'mial' (did you mean 'mail'?)",
    "mail.evry=1": "unknown key 'mail.evry' (did you mean 'mail.every'?)",
    "mail.every=often": "mail.every: expected a whole number, got 'often'",
    "mail.every=9": "mail.every: expected at most the steps of the run, got 9",
}
READ_OPTIONS = f"""
import json
from creditflow.config import load_recipe
from creditflow.config.schema import json_schema
from creditflow.errors import ConfigError
errors = {{}}
for option in {list(OPTION_ERRORS)}:
    try:
        load_recipe({str(TOY)!r}, [option])
    except ConfigError as error:
        errors[option] = str(error)
every = load_recipe({str(TOY)!r}, ["mail.every=2"]).to_dict()["mail"]
print(json.dumps({{"errors": errors, "mail": every, "schema": json_schema()}}))
"""


def run_new(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has imported nothing: sections of options are read with `creditflow.config`."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=site, check=False)


def test_section_of_a_plugin_is_checked_as_any_other(site: Path) -> None:
    result = run_new(site, READ_OPTIONS)
    assert result.returncode == 0, result.stderr
    read = json.loads(result.stdout)
    assert read["errors"] == OPTION_ERRORS
    assert read["mail"] == {"every": 2}
    schema = read["schema"]
    assert schema["properties"]["mail"]["description"] == "Messages about a run."
    assert schema["$defs"]["MailConfig"]["properties"]["every"]["description"] == "Training steps between messages."


def test_address_of_a_plugin_makes_tasks_and_workflow(site: Path) -> None:
    recipe = site / "recipe.yaml"
    recipe.write_text(
        "team: {workflow: 'acme://any'}\ndata: {train_files: 'acme://any', train_batch_size: 2}\n"
        "actor_rollout_ref: {model: {path: tiny}}\nreward: {functions: [{fn: exact_match}]}\n"
    )
    assert "solver" in succeeded(site, "check", recipe)
    refused = creditflow(site, "check", recipe, "data.train_files=acmee://a")
    assert refused.returncode == 2
    assert "expected acme, gymnasium, " in refused.stderr
    refused = creditflow(site, "check", recipe, "team.workflow=acmee://any")
    assert "team.workflow: expected one of acme, verifiers, got 'acmee' (did you mean 'acme'?)" in refused.stderr


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("mail", "Missing", "acme_options:Missing cannot be loaded: AttributeError"),
        ("mail", "ConfigError", "expected a PluginSection, got ConfigError; it is left out"),
        ("data", "MailConfig", "expected a new key, got 'data'; it is left out"),
        ("policies.mail", "MailConfig", "expected a PolicySource, got MailConfig; it is left out"),
        ("mial.mail", "MailConfig", "expected a name of the form KEY or policies.KEY; it is left out"),
    ],
)
def test_unusable_section_is_left_out(tmp_path: Path, name: str, target: str, message: str) -> None:
    install(tmp_path, f"[creditflow.config]\n{name} = acme_options:{target}\n", acme_options=OPTIONS)
    result = run_new(tmp_path, f"from creditflow.config import load_recipe; load_recipe({str(TOY)!r})")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"UserWarning: entry point {name!r} of creditflow.config: {message}") == 1


def test_own_section_wins_over_one_of_its_name(tmp_path: Path) -> None:
    install(tmp_path, "[creditflow.config]\npolicies.pool = acme_options:MailConfig\n", acme_options=OPTIONS)
    options = ["policies.default.pool={of: x}"]
    message = "policies.default.pool.of: expected a trained policy (the recipe has none), got 'x'"
    result = run_new(tmp_path, f"from creditflow.config import load_recipe; load_recipe({str(TOY)!r}, {options})")
    assert message in result.stderr
