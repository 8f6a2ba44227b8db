"""Tests of a whole run with faults in its rewards."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.data import read_parquet
from tests.paths import TOYS
from tests.rewards.judge_server import Answer, JudgeServer
from tests.rewards.processes import children

FUNCTIONS = """
import os, signal

def rarely(step, trajectory):
    return 0.5 if trajectory.id.endswith("-0-0") else None

def kills_its_worker_once(step, trajectory):
    mark = os.environ["CREDITFLOW_TEST_MARK"]
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5

def label(step):
    return step.info["labels"]

async def fails_on_one_task(task, team):
    return await team.writer(task.text) if task.ground_truth != 1 else task.extra_info["labels"]

def looks_up(step, trajectory):
    return label(step)
"""
FAULTS = {"Say 1.": ("failed", Answer("out of order", status=500)), "Say 3.": ("timeout", Answer(delay=60))}


def write_recipe(functions, **reward):
    of_toy = yaml.safe_load(Path("toy.yaml").read_text())["reward"]["functions"]
    section = {"functions": [*of_toy, *functions], "num_workers": 2, **reward}
    Path("recipe.yaml").write_text(yaml.safe_dump({"extends": "toy.yaml", "reward": section}))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train the toy recipe for an epoch of four steps with more reward functions.

    Returns the result and the run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDITFLOW_TEST_MARK", str(tmp_path / "mark"))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    for file in ("toy.py", "toy.yaml"):
        shutil.copy(TOYS / file, tmp_path)

    def train(functions, *overrides, **reward):
        write_recipe(functions, **reward)
        run = tmp_path / "run"
        settings = ["trainer.total_training_steps=4", "trainer.val_before_train=false"]
        command = ["train", "recipe.yaml", f"trainer.default_local_dir={run}", *settings, *overrides]
        return CliRunner().invoke(app, command), run

    before = children().keys()
    yield train
    assert children().keys() <= before  # neither a worker nor a zombie


def warnings_of(result, words):
    return [line for line in result.stderr.splitlines() if line.startswith("warning: ") and words in line]


def test_faults_of_a_judge_and_a_worker_cost_only_their_scores(train):
    def answer(request):
        return next((fault for task, (_, fault) in FAULTS.items() if task in request.text), Answer("Fine.\nScore: 7"))

    with JudgeServer(answer) as server:
        tries = {"request_timeout": 0.5, "retries": 1, "backoff": 0.01}
        args = {"endpoint": server.url, "model": "stub", "rubric": "Is it clear?", **tries}
        judge = {"fn": "judge", "agent_match": "critic", "args": args, "timeout": 5.0}
        result, run = train([judge, {"fn": "functions.py:kills_its_worker_once"}], max_failed_frac=0.6)
    assert result.exit_code == 0, result.output
    assert Path("mark").exists()
    statuses = set()
    for file in sorted((run / "steps").glob("*.parquet")):
        for trajectory in read_parquet(file).to_trajectories():
            for step in trajectory.steps:
                if step.agent != "critic":
                    assert "judge" not in step.scores
                    continue
                score = step.scores["judge"]
                statuses.add(score.status)
                assert score.status == next((FAULTS[task][0] for task in FAULTS if task in step.prompt), "ok")
                assert score.status == "ok" or score.reason
                assert score.status != "ok" or score.rescaled == pytest.approx(6 / 9)
    assert statuses == {"ok", "failed", "timeout"}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["reward/judge/failed_frac"] for line in metrics) == [0.0, 0.0, 0.5, 0.5]
    assert {line["reward/kills_its_worker_once/failed_frac"] for line in metrics} == {0.0}
    assert {line["actor/skipped_updates"] for line in metrics} == {0.0}
    starts, total = warnings_of(result, "judge failed on")
    assert starts.startswith("warning: at training step ")
    assert "; the first: judge, step " in starts
    assert re.search(r"\(25\.0%\), in 2 training steps, the first [1-4]; failed scores are masked", total)


def test_check_refuses_one_function_that_mostly_fails(train):
    rarely = {"fn": "functions.py:rarely", "agent_match": "critic"}
    well = [{"fn": "functions.py:kills_its_worker_once", "name": f"well{i}"} for i in range(9)]
    write_recipe([rarely, *well])
    result = CliRunner().invoke(app, ["check", "recipe.yaml"])
    assert result.exit_code == 1
    stop = r"training would stop: more than .* of a function's scores failed: rarely"
    warning = r"warning: reward function rarely failed on \d+ of \d+ scores; the first: rarely, step "
    assert re.search(stop, result.stderr)
    assert re.search(warning, result.output)
    assert "can be trained" not in result.output
    result = CliRunner().invoke(app, ["check", "recipe.yaml", "reward.max_failed_frac=1"])
    assert result.exit_code == 0
    assert "the recipe can be trained, with the warnings above" in result.output


LINES = FUNCTIONS.splitlines()
RAISES = LINES.index('    return step.info["labels"]') + 1


def test_reward_exception_is_located(train):
    result, run = train([{"fn": "functions.py:looks_up"}], backend="process")
    called = LINES.index("    return label(step)") + 1
    frames = f"functions.py:{called} in looks_up, functions.py:{RAISES} in label"
    assert result.exit_code == 1
    assert "more than reward.max_failed_frac=0.2 of a function's scores failed" in result.stderr
    assert f"KeyError: 'labels' ({frames})" in result.output
    assert f"{run}/failures.log" in result.output
    log = (run / "failures.log").read_text()
    assert log.count("reward function looks_up\nTraceback (most recent call last):") == 1
    assert log.rstrip().endswith("KeyError: 'labels'")
    (trajectory, *_) = read_parquet(run / "steps" / "000001.parquet").to_trajectories()
    why = CliRunner().invoke(app, ["why", str(run), "--trajectory", trajectory.id])
    assert why.exit_code == 0, why.output
    assert trajectory.steps[0].scores["looks_up"].reason == f"KeyError: 'labels' ({frames})"
    check = CliRunner().invoke(app, ["check", "recipe.yaml", "--tasks", "2"])
    assert f"KeyError: 'labels' ({frames})" in check.output


def test_failing_task_makes_warnings(train):
    line = LINES.index(next(line for line in LINES if 'task.extra_info["labels"]' in line)) + 1
    first = rf"the first: KeyError: 'labels' \(functions.py:{line} in fails_on_one_task\)"
    settings = ["team.workflow=functions.py:fails_on_one_task", "actor_rollout_ref.rollout.max_failed_frac=0.9"]
    result, run = train([], *settings, "trainer.val_before_train=true")
    assert result.exit_code == 0, result.output
    validation, training, summary = warnings_of(result, "rollouts")
    of_validation = rf"1 of 6 rollouts failed and are masked; {first}"
    assert re.fullmatch(rf"warning: in the validation at training step 0, {of_validation}", validation)
    assert re.fullmatch(rf"warning: at training step \d, 4 of 8 rollouts failed and are masked; {first}", training)
    assert re.search(r"12\.5% of rollouts failed and were masked, in 1 training step, the first", summary)
    validated, trained = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert (validated["metric"], validated["step"]) == ("val/rollout/failed_frac", 0)
    assert validated["numbers"]["failed"] == 1.0
    assert (trained["rule"], trained["numbers"]) == ("failed_rollouts", {"failed": 4.0, "rollouts": 8.0})
    log = (run / "failures.log").read_text()
    assert f"line {line}, in fails_on_one_task" in log
    assert "training step 0, trajectory 1-" in log
    result = CliRunner().invoke(app, ["eval", "recipe.yaml", *settings])
    assert result.exit_code == 0, result.output
    assert re.search(rf"^warning: {of_validation}$", result.stderr, re.M)
