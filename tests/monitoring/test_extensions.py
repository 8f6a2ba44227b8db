"""Guard rules and trackers from another distribution, run through every command that uses them."""

import json
from pathlib import Path

from tests.distributions import creditflow, install, succeeded
from tests.paths import TOY

RULE = """
from creditflow.errors import ConfigError
from creditflow.monitoring.guard_rules.base import RuleResult, guard_rule

@guard_rule("parity")
class Parity:
    def __init__(self, of: int = 2) -> None:
        if of < 1:
            raise ConfigError(f"of: expected at least 1, got {of}")
        self.of, self.seen = of, 0

    def look(self, value, over):
        self.seen += 1
        return RuleResult(self.seen % self.of == 0, False, {"seen": float(self.seen)})

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
"""
TRACKER = """
import json
from creditflow.monitoring.trackers.base import tracker

@tracker("lines", packages=("numpy",))
class Lines:
    def __init__(self, run):
        self.file = run.folder / "lines.jsonl"
        self._write("opened", run.name, run.config["algorithm"]["propagation"]["rule"], run.done)

    def _write(self, *values):
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\\n")

    def log(self, step, metrics):
        self._write("metrics", step, metrics["rollout/tokens"])

    def table(self, step, rows):
        self._write("table", step, len(rows))

    def finish(self):
        self._write("finished")
"""
OPTIONS = (
    "guard.rules.mine={kind: parity, metric: rollout/tokens, of: 2}",
    "trainer.logger=[console,lines]",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=2",
    "trainer.default_local_dir=run",
)


def json_lines(file: Path) -> list:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_installed_rule_and_tracker_work_in_every_command(tmp_path: Path) -> None:
    entry_points = "[creditflow.guard_rules]\nparity = parity\n[creditflow.trackers]\nlines = lines\n"
    install(tmp_path, entry_points, parity=RULE, lines=TRACKER)
    succeeded(tmp_path, "check", TOY, *OPTIONS)
    printed = succeeded(tmp_path, "train", TOY, *OPTIONS)
    assert "guard: mine fired: rollout/tokens (seen 2): a warning only" in printed
    events = [event for event in json_lines(tmp_path / "run/events.jsonl") if event["rule"] == "mine"]
    assert [(event["step"], event["what"], event["numbers"]) for event in events] == [(2, "fired", {"seen": 2.0})]
    metrics = json_lines(tmp_path / "run/metrics.jsonl")
    assert [row["guard/on/mine"] for row in metrics] == [0.0, 1.0]

    lines = json_lines(tmp_path / "run/lines.jsonl")
    assert lines[0] == ["opened", "run", "threshold", 0]
    assert [line[1:] for line in lines if line[0] == "metrics"] == [
        [n, metrics[n - 1]["rollout/tokens"]] for n in (1, 2)
    ]
    assert [line[:2] for line in lines if line[0] == "table"] == [["table", 1]]
    assert lines[-1] == ["finished"]

    succeeded(tmp_path, "report", "run", "--out", "report.html")
    assert '"rule":"mine"' in (tmp_path / "report.html").read_text()
    refused = creditflow(tmp_path, "check", TOY, "guard.rules.mine={kind: parity, metric: rollout/tokens, of: 0}")
    assert (refused.returncode, "guard.rules.mine.of: expected at least 1" in refused.stderr) == (2, True)
