"""Guard rules and trackers from another distribution, run through every command that uses them."""

import json
from pathlib import Path

import pytest

from tests.distributions import creditflow, install, succeeded
from tests.paths import TOY

RULE = """
from creditflow.errors import ConfigError
from creditflow.monitoring import RuleResult, guard_rule

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

@tracker("lines", packages=("numpy",), tables=True)
class Lines:
    def __init__(self, run):
        self.file = run.folder / "lines.jsonl"
        self._write("opened", run.name, run.config["algorithm"]["propagation"], run.done)

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
WATCHED = ("guard.rules.mine={kind: parity, metric: rollout/tokens, of: 2}",)
TWO_STEPS = ("trainer.total_training_steps=2", "trainer.default_local_dir=run")


def json_lines(file: Path) -> list:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_installed_guard_rule_works_in_every_command(tmp_path: Path) -> None:
    install(tmp_path, "[creditflow.guard_rules]\nparity = theirs\n", theirs=RULE)
    succeeded(tmp_path, "check", TOY, *WATCHED)
    printed = succeeded(tmp_path, "train", TOY, *WATCHED, *TWO_STEPS)
    assert "guard: mine fired: rollout/tokens (seen 2): a warning only" in printed
    events = [event for event in json_lines(tmp_path / "run/events.jsonl") if event["rule"] == "mine"]
    assert [(event["step"], event["what"], event["numbers"]) for event in events] == [(2, "fired", {"seen": 2.0})]
    metrics = json_lines(tmp_path / "run/metrics.jsonl")
    assert [row["guard/on/mine"] for row in metrics if row["step"] > 0] == [0.0, 1.0]
    succeeded(tmp_path, "report", "run", "--out", "report.html")
    assert '"rule":"mine"' in (tmp_path / "report.html").read_text()


def test_installed_tracker_gets_two_training_steps(tmp_path: Path) -> None:
    install(tmp_path, "[creditflow.trackers]\nlines = theirs\n", theirs=TRACKER)
    options = ("trainer.logger=[console,lines]", "trainer.val_before_train=false")
    succeeded(tmp_path, "check", TOY, *options)
    succeeded(tmp_path, "train", TOY, *options, *TWO_STEPS)
    lines = json_lines(tmp_path / "run/lines.jsonl")
    tokens = [row["rollout/tokens"] for row in json_lines(tmp_path / "run/metrics.jsonl")]
    assert lines[0] == ["opened", "run", "threshold", 0]
    assert [line[1:] for line in lines if line[0] == "metrics"] == [[1, tokens[0]], [2, tokens[1]]]
    assert [line[:2] for line in lines if line[0] == "table"] == [["table", 1]]
    assert lines[-1] == ["finished"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("of: 0", "guard.rules.mine.of: expected at least 1"),
        ("off: 2", "expected keys of kind parity: of; got"),
    ],
)
def test_wrong_option_of_an_installed_rule_is_refused(tmp_path: Path, options: str, message: str) -> None:
    install(tmp_path, "[creditflow.guard_rules]\nparity = theirs\n", theirs=RULE)
    result = creditflow(tmp_path, "check", TOY, f"guard.rules.mine={{kind: parity, metric: rollout/tokens, {options}}}")
    assert result.returncode == 2
    assert message in result.stderr
