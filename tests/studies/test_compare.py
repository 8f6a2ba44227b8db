"""Comparisons: arms, runs, and the statistics of differences."""

import fcntl
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from creditflow._utils.intervals import Difference
from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.errors import ConfigError, DataError
from creditflow.monitoring.evaluation import Evaluation, Example, ExampleStep
from creditflow.reports.comparison_plot import draw_comparison
from creditflow.reports.tables import (
    comparison_table,
    comparison_title,
    difference_cell,
    difference_table,
    difference_title,
    evaluation_table,
    example_lines,
    results_console,
    show,
)
from creditflow.studies.comparison.arms import arms_of, as_yaml, parse_vary, split_values
from creditflow.studies.comparison.jobs import Job, run_jobs
from creditflow.studies.comparison.results import ArmResult, RunResult, differences, spread, summary
from tests.builders import batch_of, make_trajectory, step
from tests.cli.commands import creditflow, refused
from tests.forks import fast_python
from tests.paths import TOY
from tests.rewards.processes import HANG_S, alive, until

# Arms


def test_comma_inside_brackets_does_not_separate_values():
    assert parse_vary("algorithm.gamma=0.9,1") == ("algorithm.gamma", ["0.9", "1"])
    assert parse_vary("a.b=[1, 2],{c: 3, d: 4}, x") == ("a.b", ["[1, 2]", "{c: 3, d: 4}", "x"])
    assert parse_vary("a={b: c, d: {e: f}},g")[1] == ["{b: c, d: {e: f}}", "g"]


@pytest.mark.parametrize("vary", ["algorithm.gamma", "=1,2", "algorithm.gamma=", "algorithm.gamma=1,,2", "a.b=1,1"])
def test_vary_without_key_and_values_is_refused(vary):
    with pytest.raises(ConfigError, match="--vary: expected"):
        parse_vary(vary)


def arms(*values, key="algorithm.propagation", extra=True, only=(), overrides=()):
    return {
        arm.name: arm.overrides for arm in arms_of(load_recipe(TOY, overrides), key, values, extra=extra, only=only)
    }


def test_values_carry_their_overrides_and_extra_arms_follow():
    assert arms("identical", "own") == {
        "identical": ("algorithm.propagation=identical",),
        "own": ("actor_rollout_ref.actor.optim.lr=0.002", "algorithm.propagation=own"),
        "own_answer": ("algorithm.propagation=own", "algorithm.outcome_to=answer"),
    }


def test_arms_may_be_left_out_and_selected():
    assert list(arms("identical", "own", extra=False)) == ["identical", "own"]
    assert list(arms("identical", "own", only=["own_answer", "identical"])) == ["identical", "own_answer"]
    with pytest.raises(ConfigError, match=r"--only: no arm 'owm_answer' \(did you mean 'own_answer'\?\)"):
        arms("identical", only=["owm_answer"])
    weighted = "{rule: own, w_r: 2}"
    assert list(arms(weighted, "own", only=split_values(weighted))) == [weighted]
    for text in ("", ","):
        assert "--only: no arm ''" in refused("compare", TOY, "--vary", "algorithm.gamma=1,0.9", "--only", text)


@pytest.mark.parametrize(
    ("entry", "value", "overrides", "lengths"),
    [
        ("true", "true", [], [64]),
        ("0.50", "0.5", [], [64]),
        ("1e-4", "0.0001", [], [64]),
        ("'yes'", "true", [], [64]),
        ("true", "true", ["compare.values.true.data.max_prompt_length=32"], [64, 32]),
    ],
)
def test_entry_matches_its_value_as_yaml(tmp_path, entry, value, overrides, lengths):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"extends: {TOY}\ncompare:\n  values:\n    {entry}: {{data.max_prompt_length: 64}}\n")

    compared = arms_of(load_recipe(path, overrides), "recipe.x", [value, "1"], extra=False, only=())

    expected = [f"data.max_prompt_length={length}" for length in lengths]
    assert compared[0].overrides == (*expected, f"recipe.x={value}")
    assert compared[1].overrides == ("recipe.x=1",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compare.value.own.x=1", "unknown key 'compare.value'"),
        ("compare.values=3", "compare.values: expected a mapping"),
        ("compare.arms.own.x=1", "'own' names its runs' folder 'own', which is taken"),
    ],
)
def test_invalid_arms_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        arms("own", "identical", overrides=[override])


@given(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1)
    | st.lists(st.integers() | st.text("ab-_. ,"))
)
def test_as_yaml_round_trips(value):
    from omegaconf import OmegaConf

    if isinstance(value, str) and "${" in value:
        return  # an interpolation of OmegaConf's, on purpose
    read = OmegaConf.to_container(OmegaConf.from_dotlist([f"a.b={as_yaml(value)}"]))
    assert read == {"a": {"b": value}}


# Results of a comparison


def test_evaluation_keeps_examples_and_is_read_back():
    sampled = [make_trajectory("a0", [step("x", 1.0)], outcome=1.0, task="a")]
    greedy = [make_trajectory("a", [step("x", 1.0), step("y")], outcome=0.0, task="a")]
    found = Evaluation.from_batches(batch_of(*sampled), batch_of(*greedy), n=1)
    (example,) = found.examples
    assert (example.outcome, [(s.agent, s.sub_reward) for s in example.steps]) == (0.0, [("x", 1.0), ("y", None)])
    assert Evaluation.from_json(found.to_json(), "here") == found


def test_invalid_evaluation_is_refused():
    for text in ("{", "[]", '{"metrics": {}}'):
        with pytest.raises(DataError, match="here: not an evaluation"):
            Evaluation.from_json(text, "here")


def evaluation(passed, wrong):
    """Make an evaluation of ten tasks with one rollout and two scored steps each.

    The first `passed` tasks pass, and the first `wrong` have one wrong step.
    """
    means = {"sub_reward/x": passed / 20, "sub_reward/y": passed / 10, "sub_reward/y/right": 1.0}
    return Evaluation(
        metrics={"pass_at_1": passed / 10, "pass_at_1_greedy": passed / 10, "step_error_rate": wrong / 20, **means},
        sampled=[float(i < passed) for i in range(10)],
        greedy=[float(i < passed) for i in range(10)],
        step_errors=[(int(i < wrong), 2) for i in range(10)],
    )


def arm(name, *after):
    """Make an arm. `after`: (passed, wrong) by seed."""
    runs = [RunResult(evaluation(*one), [0.1, 0.2, one[0] / 10], seconds=2.0) for one in after]
    return ArmResult(name, [evaluation(2, 5) for _ in after], runs)


def test_example_shows_the_first_task_that_improved():
    def one(*outcomes):
        return replace(
            evaluation(5, 0),
            examples=[
                Example(f"task {k}", outcome, [ExampleStep("a\x1b", f"answer {outcome}\x1b", outcome)])
                for k, outcome in enumerate(outcomes)
            ],
        )

    result = ArmResult("own", [one(1.0, 0.0, 0.0)], [RunResult(one(1.0, 1.0, 1.0), [], seconds=1.0)])

    assert example_lines([result]) == [
        "validation task 2, the first whose outcome has risen, decoded greedily",
        "  task 1",
        "before training: outcome 0.00",
        "  agent  sub-reward  response",
        "  a\\x1b        0.00  answer 0.0\\x1b",
        "after training, own: outcome 1.00",
        "  agent  sub-reward  response",
        "  a\\x1b        1.00  answer 1.0\\x1b",
    ]


def test_comparison_json_has_this_shape():
    results = [arm("identical", (4, 4), (6, 4)), arm("own", (7, 2), (8, 0)), arm("threshold", (9, 1), (9, 1))]

    found = json.loads(json.dumps(summary("algorithm.propagation", results, differences(results)), allow_nan=False))

    assert set(found) == {"vary", "values", "differences"}
    assert found["vary"] == "algorithm.propagation"
    after = {"mean": 0.5, "std": pytest.approx(math.sqrt(0.02)), "seeds": [0.4, 0.6]}
    assert found["values"]["identical"] == {
        "pass_at_1": {"before": 0.2, "after": after},
        "pass_at_1_greedy": {"before": 0.2, "after": after},
        "step_error_rate": {"before": 0.25, "after": {"mean": 0.2, "std": 0.0, "seeds": [0.2, 0.2]}},
        "outcome_mean": {"before": None, "after": {"mean": None, "std": None, "seeds": [None, None]}},
        "sub_reward": {
            "before": pytest.approx(0.15),
            "after": {
                "mean": pytest.approx(0.375),
                "std": pytest.approx(math.sqrt(0.01125)),
                "seeds": pytest.approx([0.3, 0.45]),
            },
        },
    }
    pairs = [(d["value"], d["against"]) for d in found["differences"]]
    assert pairs == [("own", "identical"), ("threshold", "identical"), ("threshold", "own")]
    assert found["differences"][0]["pass_at_1"]["mean"] == pytest.approx(0.25)
    assert found["differences"][0]["pass_at_1"]["interval"] is None  # two seeds
    assert found["differences"][0]["step_error_rate"]["mean"] == pytest.approx(-0.15)


def test_first_arm_is_the_baseline_without_identical():
    results = [arm("1e-4", (4, 4)), arm("2e-4", (6, 4)), arm("3e-4", (6, 4))]

    assert [(d.name, d.against) for d in differences(results)] == [("2e-4", "1e-4"), ("3e-4", "1e-4")]


def test_spread_of_one_seed_is_unknown():
    results = [arm("identical", (4, 4))]

    assert math.isnan(spread([0.4]))
    assert summary("x", results, [])["values"]["identical"]["pass_at_1"]["after"]["std"] is None


def test_run_result_is_read_from_its_folder(tmp_path):
    (tmp_path / "evaluation.json").write_text(evaluation(4, 4).to_json())
    rows = [{"step": 0, "val/pass_at_1": 0.1}, {"step": 1, "train/pass_at_1": 0.2, "timing/step_s": 1.5}]
    rows += [{"step": 2, "train/pass_at_1": None, "timing/step_s": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    found = RunResult.read(tmp_path)

    assert found.after == evaluation(4, 4)
    assert found.train_pass_at_1[0] == 0.2
    assert math.isnan(found.train_pass_at_1[1])
    assert found.seconds == 3.5


def test_tables_and_figure_print_names_verbatim(capsys, tmp_path):
    results = [arm("[a, b]", (4, 4)), arm(":x: [bold]", (6, 4))]

    show(":x: [bold]", comparison_table(results))
    show("differences", difference_table(differences(results)))
    draw_comparison(tmp_path / "a.png", r"a$\frac$b", [arm(r"a$\frac$b", (4, 4))])  # not parsed as mathematics

    printed = capsys.readouterr().out
    assert printed.count(":x: [bold]") == 3
    assert "[a, b]" in printed
    assert ":x: [bold] - [a, b]" in printed
    assert "+0.200 " in printed
    assert "[" not in difference_cell(Difference(0.2, math.nan, math.nan))
    assert difference_cell(Difference(0.2, 0.1, 0.3)) == "+0.200 [+0.100, +0.300]"
    assert difference_title(2) == "differences after training, without intervals: 2 seeds, 5 are needed"
    assert difference_title(5) == "differences after training, with 95% t intervals over 5 paired seeds"


def test_title_omits_steps_if_arms_differ_in_length():
    assert comparison_title("toy", {30}) == "toy, before -> after 30 training steps"
    assert comparison_title("toy", {1}) == "toy, before -> after 1 training step"
    assert comparison_title("toy", {24, 30}) == "toy, before -> after training"


def test_evaluation_table_starts_with_pass_rates(capsys):
    metrics = {"pass_at_2": 0.75, "pass_at_1": 0.5, "step_error_rate": 0.25, "pass_at_1_greedy": 0.125}

    results_console().print(evaluation_table(Evaluation(metrics, [], [], [])))

    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if " 0." in row] == [
        "pass@1 (mean over trajectories) 0.500",
        "pass@2 0.750",
        "pass@1, greedy 0.125",
        "step error rate 0.250",
    ]


# Progress


def test_reporter_prints_text_verbatim(capsys):
    Reporter().say("[a, b] :x:")
    with Reporter().bar("[a]", 1) as bar:
        bar.advance(1, ":x: [b]")

    assert capsys.readouterr().err == "[a, b] :x:\n[a] 1/1 :x: [b]\n"


# Processes side by side


def job(tmp_path, name, code, parts=1):
    return Job(name, [sys.executable, "-c", code], tmp_path / "logs" / f"{name}.log", parts, lambda: 0)


@pytest.fixture
def reporter():
    return Reporter(Console(file=io.StringIO(), record=True, width=200))


def test_failed_job_is_reported_and_does_not_stop_others(tmp_path, reporter):
    jobs = [
        job(tmp_path, "bad", "print('x\\n' * 50); print('the reason'); raise SystemExit(3)"),
        job(tmp_path, "good", f"open({str(tmp_path / 'done')!r}, 'w')"),
    ]

    failures = run_jobs(jobs, 1, reporter, "test")

    assert [job.name for job in failures] == ["bad"]
    said = reporter.console.export_text()
    assert "bad failed (exit code 3)" in said
    assert "the reason" in said
    assert len(said.splitlines()) < 20
    assert "good: done" in said
    assert (tmp_path / "done").exists()


def test_at_most_the_given_number_of_jobs_run_at_once(tmp_path, reporter):
    code = (
        "import time, os\n"
        f"folder = {str(tmp_path)!r}\n"
        "mine = f'{folder}/live{os.getpid()}'\n"
        "open(mine, 'w').close()\n"
        "time.sleep(0.2)\n"
        "live = len([name for name in os.listdir(folder) if name.startswith('live')])\n"
        "open(f'{folder}/seen{os.getpid()}', 'w').write(str(live))\n"
        "os.remove(mine)\n"
    )

    assert run_jobs([job(tmp_path, f"j{i}", code) for i in range(5)], 2, reporter, "test") == []

    seen = [int(path.read_text()) for path in tmp_path.glob("seen*")]
    assert len(seen) == 5
    assert max(seen) <= 2


def _heed_signals():
    """Reset signal handlers: under nohup, or in the background of a shell, tests inherit ignored signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _comparison_of(code, log):
    """A process that runs one job with this code."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from pathlib import Path\n"
            "from creditflow.studies.comparison.jobs import Job, run_jobs\n"
            "from creditflow._utils.progress import Reporter\n"
            f"job = Job('sleeps', [sys.executable, '-c', {code!r}], Path({str(log)!r}), 1, lambda: 0)\n"
            "run_jobs([job], 1, Reporter(), 'test')\n",
        ],
        stderr=subprocess.PIPE,
        preexec_fn=_heed_signals,  # noqa: PLW1509 - nothing else runs in this process
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_comparison_leaves_no_process(tmp_path, number):
    child, locked = tmp_path / "child", tmp_path / "locked"
    stubborn = (  # a process of the job that ignores SIGTERM and outlives the job
        "import fcntl, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"file = open({str(locked)!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('x', file=file, flush=True)\n"
        "time.sleep(600)\n"
    )
    sleeper = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {stubborn!r}])\n"
        f"open({str(child)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    parent = _comparison_of(sleeper, tmp_path / "log")
    until(lambda: child.exists() and child.read_text() and locked.exists() and locked.read_text())

    parent.send_signal(number)

    assert parent.wait(timeout=HANG_S) != 0
    assert b"KeyboardInterrupt" in parent.communicate()[1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)
    with locked.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # free, since the process that held it has ended


def test_job_ends_with_a_killed_comparison(tmp_path):
    child = tmp_path / "child"
    sleeper = (
        "import os, time\n"
        "from creditflow._utils.processes import end_with_parent\n"
        "end_with_parent()\n"  # as the command does
        f"open({str(child)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    parent = _comparison_of(sleeper, tmp_path / "log")
    until(lambda: child.exists() and child.read_text())

    parent.kill()
    parent.communicate()

    until(lambda: not alive(int(child.read_text())))


def test_ignored_hangup_stays_ignored(tmp_path, reporter):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        failures = run_jobs(
            [job(tmp_path, "hangs up", "import os, signal; os.kill(os.getppid(), signal.SIGHUP)")], 1, reporter, "test"
        )
    finally:
        after = signal.signal(signal.SIGHUP, before)

    assert failures == []
    assert after is signal.SIG_IGN


# The whole of it


ARMS = ("compare", TOY, "--vary", "algorithm.propagation=identical,own", "--jobs", 2, "trainer.default_local_dir=out")


def compare(*arguments):
    return creditflow(*ARMS, *arguments)


def refusal(*arguments):
    """The error message of a refused comparison."""
    return refused(*ARMS, *arguments)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Run a comparison of two arms with one seed; return its working directory and its output."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "executable", fast_python())
        result = compare("--no-arms")
    assert result.exit_code == 0, result.output
    return folder, result


def test_comparison_prints_a_table_and_writes_its_files(compared):
    folder, result = compared

    for words in ("identical", "own - identical", "step error rate", "numbers: out/comparison.json", "comparison.png"):
        assert words in result.stdout
    assert "before -> after 2 training steps, on 6 tasks, 1 seed" in result.stdout
    assert "compare.values has no entry for identical: trained with the recipe's options" in result.stderr
    assert "identical, seed 0: done" in result.stderr
    assert (folder / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((folder / "out" / "comparison.json").read_text())
    assert list(found["values"]) == ["identical", "own"]
    for name, value in found["values"].items():
        after = json.loads((folder / "out" / name / "seed0" / "evaluation.json").read_text())
        assert value["pass_at_1"]["after"]["seeds"] == [after["metrics"]["pass_at_1"]]


def test_arms_run_with_their_overrides_from_one_start(compared):
    settings = {}
    for name in ("identical", "own"):
        config = json.loads((compared[0] / "out" / name / "seed0" / "run.json").read_text())["config"]
        lr = config["actor_rollout_ref"]["actor"]["optim"]["lr"]
        settings[name] = (lr, config["algorithm"]["propagation"]["rule"], config["data"]["seed"])

    assert settings == {"identical": (1e-3, "identical", 0), "own": (2e-3, "own", 0)}
    assert len(list((compared[0] / "out" / "before").glob("*.json"))) == 1  # one evaluation for all arms
    lines = (compared[0] / "out" / "own" / "seed0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_finished_runs_are_kept_and_broken_ones_repeated(compared, monkeypatch):
    monkeypatch.chdir(compared[0])
    monkeypatch.setattr(sys, "executable", fast_python())
    kept = Path("out/identical/seed0/run.json").stat().st_mtime_ns
    broken = Path("out/own/seed0")
    (broken / "evaluation.json").unlink()

    result = compare()

    assert result.exit_code == 0, result.output
    assert "1 of 3 runs are finished already, and not repeated" in result.stderr
    assert "own, seed 0: was interrupted, goes on after step 2" in result.stderr
    assert Path("out/identical/seed0/run.json").stat().st_mtime_ns == kept
    assert (broken / "evaluation.json").exists()
    assert list(json.loads(Path("out/comparison.json").read_text())["values"]) == ["identical", "own", "own_answer"]


def test_folder_with_other_runs_is_refused(compared, monkeypatch):
    monkeypatch.chdir(compared[0])

    assert refusal("--no-arms", "algorithm.gamma=0.5") == (
        "trainer.default_local_dir: out/identical/seed0 holds a run with algorithm.gamma=0.99, expected 0.5; "
        "name another folder"
    )


def test_folder_with_runs_of_other_tasks_is_refused(half_done):
    file = half_done / "own" / "seed0" / "run.json"
    file.write_text(file.read_text().replace('"data.val_files": "6 tasks', '"data.val_files": "7 tasks'))

    assert "holds a run with tasks.data.val_files=7 tasks, sha256" in refusal("--no-arms")


@pytest.fixture
def half_done(compared, tmp_path, monkeypatch):
    """Return the folder of a comparison in which the first of two runs is not finished."""
    shutil.copytree(compared[0] / "out", tmp_path / "out")
    (tmp_path / "out" / "identical" / "seed0" / "evaluation.json").unlink()
    monkeypatch.chdir(tmp_path)
    return Path("out")


def test_folder_of_a_training_run_is_refused(compared, monkeypatch):
    monkeypatch.chdir(compared[0])
    before = {*Path("out/own/seed0").iterdir()}

    message = refused(*ARMS[:-1], "trainer.default_local_dir=out/own/seed0")

    assert message.startswith("trainer.default_local_dir: out/own/seed0 holds a run already; name another folder")
    assert {*Path("out/own/seed0").iterdir()} == before


def test_broken_run_is_kept_if_another_folder_is_foreign(half_done):
    (half_done / "own" / "seed0" / "run.json").unlink()

    assert refusal("--no-arms") == "trainer.default_local_dir: out/own/seed0 holds files that are not of a run"
    assert (half_done / "identical" / "seed0" / "run.json").exists()


def test_folder_of_a_running_comparison_is_refused(half_done):
    lock = os.open(half_done, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    message = refusal("--no-arms")
    os.close(lock)

    assert message == "trainer.default_local_dir: another comparison is running in out"
    assert (half_done / "identical" / "seed0" / "run.json").exists()


@pytest.mark.slow
def test_failed_run_gives_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("async def solve(task, team):\n    raise RuntimeError('no such world')\n")

    result = compare("--no-arms", "--only", "own", f"team.workflow={tmp_path}/broken.py:solve")

    assert result.exit_code == 1
    assert "no such world" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: 2 of 2 runs failed")
    assert not (tmp_path / "out" / "comparison.json").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--seeds=0", "--seeds: expected a whole number from 1 on, got 0"),
        ("algorithm={propagation: own}", "algorithm.propagation: is varied by --vary"),
        ("compare.values.own.recipe.tasks=4", "own and identical are evaluated on different tasks"),
        ("compare.arms.more.data={seed: 4}", "data.seed: is set by compare itself, the same for every arm; more"),
        ("data.train_files=nowhere.jsonl", "no file 'nowhere.jsonl'"),
        ("trainer.total_training_steps=0", "would leave nothing to compare"),
        ("--vary=data={seed: 1},{seed: 2}", "data.seed: is set by compare itself"),
    ],
)
def test_bad_input_is_reported_before_anything_is_written(tmp_path, monkeypatch, argument, message):
    monkeypatch.chdir(tmp_path)

    assert message in refusal(argument)
    assert "is set by compare itself" in refused("compare", TOY, "--vary", "trainer.default_local_dir=a", "--no-arms")
    assert list(tmp_path.iterdir()) == []
