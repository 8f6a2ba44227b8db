"""Tests of the benchmarks: each can be called, its exit code is correct, and outdated results are found."""

import importlib
import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import ERROR, FALLS_SHORT, HOLDS, discover, judge, run_command
from benchmarks.credit_signal import efficiency, true_gradients
from benchmarks.processes import collecting, start, wait
from benchmarks.record import ROOT, peer_missing
from benchmarks.recordings import Recording
from benchmarks.sources import Result, Work, hashes, results
from creditflow.data import Score
from tests.builders import batch_of, make_trajectory, step
from tests.forks import fast_python
from tests.rewards.processes import alive, until

BY_HAND = {"noted"}
"""Results that no benchmark writes."""
UNMEASURED = {"which_credit", "credit_signal", "fidelity", "gpu"}
"""Benchmarks without a result file, until they have run on the present code; `gpu` needs a GPU."""
OWNERS = {"guarded": "guard"}
"""Results under another name than their benchmark's."""


@pytest.mark.parametrize("name", discover())
def test_benchmark_has_help_and_measured_modules(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert hashes(module.MEASURES)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code in (0, None)
    assert "--quick" in capsys.readouterr().out
    assert "exit_with(main)" in Path(str(module.__file__)).read_text()


def test_every_result_file_has_a_benchmark_and_hashes() -> None:
    names, found = set(discover()) - UNMEASURED, results()
    assert {result.name for result in found} >= names
    assert {OWNERS.get(result.name, result.name) for result in found} - BY_HAND == names
    assert {result.name for result in found if not result.measured} == BY_HAND


# What makes a result outdated

CODE = '''"""A module."""

def area(width: float, height: float = 1.0) -> float:
    """The area."""
    return width * height  # no unit
'''


@pytest.mark.parametrize(
    ("before", "after", "outdated"),
    [
        ("width * height", "width + height", True),
        ("no unit", "in square metres", False),
        ("The area.", "The product of both sides.", False),
        ("width * height", "(width\n        * height)", False),
    ],
)
def test_result_is_outdated_by_code_alone(tmp_path: Path, before: str, after: str, outdated: bool) -> None:
    (tmp_path / "room").mkdir()
    module = tmp_path / "room" / "area.py"
    module.write_text(CODE)
    (tmp_path / "area.json").write_text(json.dumps({"date": "2026-11-25", "measured": hashes(["room"], tmp_path)}))
    assert not Result.read(tmp_path / "area.json", tmp_path).outdated
    module.write_text(CODE.replace(before, after))
    found = Result.read(tmp_path / "area.json", tmp_path)
    assert (found.outdated, found.changed) == (outdated, ("room/area.py",) * outdated)


def test_measured_module_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"MEASURES: .*recipe\.yaml does not exist"):
        hashes(["recipe.yaml"], tmp_path)


def test_kept_runs_keep_the_hashes_they_began_with(tmp_path: Path) -> None:
    measures = ["benchmarks/sources.py"]
    work = Work.begin("one", measures, quick=False, below=tmp_path)
    (tmp_path / "one.measured.json").write_text(json.dumps({"benchmarks/sources.py": "older"}))
    assert Work.begin("one", measures, quick=False, below=tmp_path).measured == {"benchmarks/sources.py": "older"}
    (tmp_path / "one.measured.json").unlink()
    with pytest.raises(SystemExit, match=r"one\.measured\.json: remove the folder"):
        Work.begin("one", measures, quick=False, below=tmp_path)
    assert work.folder.is_dir()


def test_quick_runs_begin_in_an_empty_folder(tmp_path: Path) -> None:
    for _ in range(2):
        work = Work.begin("one", ["benchmarks/sources.py"], quick=True, below=tmp_path)
        assert list(work.folder.iterdir()) == []
        (work.folder / "finished").touch()


# Exit codes

BODIES = {
    "return int(show([Figure('speed', 2.0, 1.0), Figure('size', 3.0)]))": (0, HOLDS),
    "return int(show([Figure('speed', 0.5, 1.0), Figure('size', 3.0)]))": (1, FALLS_SHORT),
    "return int(show([Figure.from_values('speed', [], 1.0)]))": (1, FALLS_SHORT),
    "return 1": (1, ERROR),
    "return int(show([Figure('speed', 2.0, 1.0)])) + 1": (1, ERROR),
    "show([Figure('speed', 0.5, 1.0)]); raise ValueError('broken')": (2, ERROR),
    "raise SystemExit('error: nothing to measure')": (2, ERROR),
    "import creditflow.no_such_module": (2, ERROR),
}


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_exit_code_tells_an_error_from_a_missed_target(body: str) -> None:
    code = f"from benchmarks.record import *\ndef main():\n    {body}\nexit_with(main)"
    done = subprocess.run([fast_python(), "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    status, _ = judge(done.returncode, (done.stdout + done.stderr).splitlines())
    assert (done.returncode, status) == BODIES[body]


def test_missing_peer_is_in_the_note(capsys: pytest.CaptureFixture[str]) -> None:
    peer_missing("TRL", "make benchmarks")
    lines = capsys.readouterr().out.splitlines()
    assert judge(0, [*lines, "targets missed: 0 of 3"]) == (HOLDS, "without TRL")
    assert judge(1, [*lines, "targets missed: 2 of 3"]) == (FALLS_SHORT, "2 of 3 targets missed; without TRL")


CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
HANGS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
"""A benchmark that waits for a child, which prints its process id."""


def ended(log: Path) -> bool:
    """Whether the process with the id in `log` has ended."""
    return not alive(int(log.read_text().split()[0]))


def test_hanging_benchmark_is_killed_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = run_command("hangs", [sys.executable, "-c", HANGS], log, limit=2.0)
    assert code is None
    assert judge(code, ["targets missed: 0 of 3"]) == (ERROR, "time limit")
    until(lambda: ended(log))


def test_terminated_runner_ends_its_benchmark(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys; from pathlib import Path; import benchmarks.__main__ as runner; runner.REPORT_SECONDS = 0.1\n"
        "runner.exit_on_sigterm()\n"
        f"runner.run_command('hangs', [sys.executable, '-c', {HANGS!r}], Path({str(log)!r}), 60.0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        assert any(line.strip().rpartition(" ")[2].isdigit() for line in runner.stdout)  # the child's id was printed
        runner.terminate()
    assert runner.returncode == 128 + signal.SIGTERM
    until(lambda: ended(log))


# Processes of a run


ESCAPES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], env={}, start_new_session=True)
sys.stdin.read()
"""
"""A parent whose child has neither its environment nor its session; the parent ends with its standard input."""


def test_child_that_outlives_its_parent_is_counted_and_killed() -> None:
    with collecting() as started:
        parent = subprocess.Popen([sys.executable, "-c", ESCAPES], stdin=subprocess.PIPE)
        until(lambda: len(started.found) == 2)
        parent.communicate()
        assert started.left(0.0) == 1
        child = next(process for process in started.found if process.pid != parent.pid)
        assert child.alive
        assert not replace(child, started=child.started + 1).alive  # a later process with the same id
    until(lambda: not child.alive)


def test_command_is_killed_at_its_time_limit(tmp_path: Path) -> None:
    process = start([sys.executable, "-c", "import time; time.sleep(3600)"], tmp_path / "log", {})
    assert wait(process, 0.1) is None
    assert process.returncode == -signal.SIGKILL


# Signal of credit rules


def test_efficiency_ignores_estimates_that_a_fit_has_read() -> None:
    rng = np.random.default_rng(0)
    true_D = np.eye(20)[0]
    along = []
    for _ in range(50):
        estimate_BD, fresh_BD = true_D + rng.normal(size=(2, 60, 20))
        # A rule fitted on the batch before: its gradient repeats the noise of that batch's estimate.
        fitted_BD = fresh_BD + 5.0 * (np.roll(estimate_BD, 1, axis=0) - true_D)
        along.append([efficiency(one, estimate_BD).efficiency for one in (fresh_BD, fitted_BD)])
    assert np.mean(along, axis=0) == pytest.approx([1 / 21, 1 / 521], rel=0.5)


def test_true_gradient_follows_the_steps_that_decide() -> None:
    """The planner decides the outcome, the executor nothing; their gradients have different directions."""
    rng, made = random.Random(0), []
    for n in range(400):
        plan, work = rng.randrange(2), rng.randrange(2)
        steps = [step("planner", {"plan": float(plan)}), step("executor", {"work": Score(work / 2 + 0.5, weight=0.0)})]
        made.append(make_trajectory(f"{n}", steps, outcome=float(plan)))
    batch = batch_of(*made)
    recording = Recording([batch], [np.eye(2)[batch.agent_of_step] * (batch.scores == 1.0).any(axis=1)[:, None]])
    along_planner, along_executor = true_gradients(recording, recording)[0]
    assert along_planner == pytest.approx(0.25, abs=0.02)  # the variance of its rightness
    assert along_executor == pytest.approx(0.0, abs=0.02)


def test_efficiency_weighs_the_batches_of_a_learning_rule_alike() -> None:
    rng, true_D = np.random.default_rng(0), np.eye(20)[0]
    found = []
    for _ in range(50):
        estimate_BD, noise_BD = true_D + rng.normal(size=(60, 20)), rng.normal(size=(60, 20))
        learning_BD = noise_BD + np.linspace(0.0, 2.0, 60)[:, None] * true_D
        order = rng.permutation(60)
        found.append([efficiency(learning_BD[by], estimate_BD[by]).efficiency for by in (np.arange(60), order)])
    growing, shuffled = np.mean(found, axis=0)
    assert growing == pytest.approx(shuffled, rel=0.2)
