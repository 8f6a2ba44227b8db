"""The ten probes of `creditflow sandbox check`: without a box they fail, and a broken box does not pass."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from creditflow.sandbox import BACKENDS, Limits, Result, SandboxBackend, SandboxError, SandboxUnavailable, self_check
from creditflow.sandbox.self_check import BREACHED, CHECK_LIMITS, CONTAINED, PROBES, UNTRIED, check_sandbox
from tests.cli.commands import creditflow, refused
from tests.sandbox import boxes

LIMITS = replace(CHECK_LIMITS, wall_s=2.0, cpu_s=1.0)
NAMES = [probe.__name__ for probe in PROBES]
QUICK_CLOCK = "import time; time.time = lambda start=time.time(), clock=time.time: start + 20 * (clock() - start)\n"


class CarelessBox:
    """A back end without a clock and without a cap on output, whose programs share one folder.

    The clock of its programs runs fast, so that endless ones end soon.
    """

    def __init__(self, limits: Limits = LIMITS):
        self.limits, self.folder = limits, Path(tempfile.mkdtemp())

    def run(self, command, *, stdin=b""):
        if "os.setsid" in command[-1]:
            raise RecursionError("too\x1b deep")
        if "os.environ" in command[-1]:
            raise SandboxError("the service is away")
        line = [sys.executable, "-c", QUICK_CLOCK + command[-1]]
        done = subprocess.run(line, input=stdin, capture_output=True, cwd=self.folder, timeout=60, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def write(self, path, content):
        (self.folder / path).write_bytes(content)


def leftovers() -> set[Path]:
    places = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path.home()]
    return {path for place in places for path in place.glob("creditflow-canary-*")}


def test_bubblewrap_passes_every_probe() -> None:
    verdicts = check_sandbox(boxes.bubblewrap(**asdict(replace(CHECK_LIMITS, cpu_s=1.0))))
    assert {verdict.probe: verdict.fate for verdict in verdicts} == dict.fromkeys(NAMES, CONTAINED)


def test_careless_back_end_fails_clock_output_and_errors() -> None:
    verdicts = {verdict.probe: verdict for verdict in check_sandbox(CarelessBox())}
    fates = [verdicts[name].fate for name in ("works", "clock", "output", "leftovers")]
    assert fates == [CONTAINED, BREACHED, BREACHED, BREACHED]
    assert verdicts["leftovers"].seen == "the back end raised RecursionError: too  deep"
    assert (verdicts["read_host"].fate, os.environ.get("CREDITFLOW_CANARY")) == (UNTRIED, None)


def test_back_end_that_runs_nothing_fails_the_first_probe() -> None:
    class Box(CarelessBox):
        def run(self, command, *, stdin=b""):
            return Result(127, b"", b"python: not found\n")

    (verdict,) = check_sandbox(Box())
    assert (verdict.fate, verdict.seen) == (UNTRIED, "the program did not run: python: not found")


@pytest.mark.parametrize("limits", [{"processes": 149}, {"memory_mb": 573}, {"output_bytes": 6_000_000}])
def test_attack_that_cannot_reach_its_limit_is_not_a_pass(limits) -> None:
    class Box(CarelessBox):
        def run(self, command, *, stdin=b""):
            return Result(0, b'{"amount": 1}\n')

    probe = {"processes": self_check.processes, "memory_mb": self_check.memory, "output_bytes": self_check.output}
    (name,) = limits
    assert probe[name](Box(), "")[0]
    with pytest.raises(SandboxError, match="is not below the attack's"):
        probe[name](Box(replace(LIMITS, **limits)), "")


# The command

CHECK = ("sandbox", "check", "--backend")


def test_command_reports_attacks_without_a_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, environment = leftovers(), dict(os.environ)
    result = creditflow(*CHECK, "unsafe_subprocess", "--option", "wall_s=5", "--json", "out.json")
    assert (leftovers(), dict(os.environ), list(tmp_path.iterdir())) == (before, environment, [tmp_path / "out.json"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:10]] == NAMES
    assert lines[1].split(maxsplit=1)[1].startswith("NOT CONTAINED")
    assert "not bounded: memory of all processes together: the back end states no bound" in lines
    assert lines[-1].startswith("unsafe_subprocess: ")
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["limits"]["memory_mb"], report["options"]) == (CHECK_LIMITS.memory_mb, {"wall_s": 5})
    fates = {verdict["probe"]: verdict["fate"] for verdict in report["probes"]}
    passed = {"works", "clock", "output"}  # the back end enforces these by itself
    if os.geteuid() != 0:
        fates["privileges"] = BREACHED  # an ordinary user has no capabilities
    assert fates == {name: CONTAINED if name in passed else BREACHED for name in NAMES}


def test_command_exits_1_if_nothing_could_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(CarelessBox):
        def run(self, command, *, stdin=b""):
            raise SandboxError("the service is away")

    monkeypatch.setitem(BACKENDS._entries, "broken", SandboxBackend("broken", Broken))
    result = creditflow(*CHECK, "broken")
    assert result.exit_code == 1
    assert "could not be tried the service is away" in result.stdout
    assert result.stdout.splitlines()[-1] == "broken: 0 of 10 probes contained"
    unwritten = creditflow(*CHECK, "broken", "--json", "/proc/none.json")
    assert (unwritten.exit_code, "error: --json: /proc/none.json cannot be written" in unwritten.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--option", "wall_s"], "--option: expected KEY=VALUE, an option or a limit of the back end, got 'wall_s'"),
        (["--option", "=1"], "--option: expected KEY=VALUE, "),
        (["--option", "backend=auto"], "--option: expected KEY=VALUE, "),
        (["--option", "wal_s=1"], "unknown key 'unsafe_subprocess.wal_s' (did you mean 'unsafe_subprocess.wall_s'?)"),
        (["--option", "wall_s=[1"], "--option wall_s: expected a YAML value, got '[1'"),
        (["--json", "/dev/null/out.json"], "--json: /dev/null cannot be made: File exists"),
        (["--json", "/"], "--json: / is a folder"),
    ],
)
def test_command_refuses_bad_input(arguments: list[str], said: str) -> None:
    assert said in refused(*CHECK, "unsafe_subprocess", *arguments)


def test_command_exits_2_if_the_back_end_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(limits=None):
        raise SandboxUnavailable("nowhere: not on this machine; install it")

    monkeypatch.setitem(BACKENDS._entries, "nowhere", SandboxBackend("nowhere", unavailable))
    assert refused(*CHECK, "nowhere") == "nowhere: not on this machine; install it"
