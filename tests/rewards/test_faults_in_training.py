"""Tests of a whole run with faults in its rewards."""

import json
import re
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.data import read_parquet
from tests.paths import TOYS
from tests.rewards.judge_server import Answer, JudgeServer
from tests.rewards.processes import children

FUNCTIONS = """
import os, signal, time

def rarely(step, trajectory):
    return 0.5 if trajectory.id.endswith("-0-0") else None

def kills_its_worker_once(step, trajectory):
    mark = os.environ["CREDITFLOW_TEST_MARK"]
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5

def hangs_in_one_trajectory(step, trajectory):
    if trajectory.id.endswith("-0-0"):
        time.sleep(1000)
    return 0.5

def label(step):
    return step.info["labels"]

async def fails_on_one_task(task, team):
    return await team.writer(task.text) if task.ground_truth != 1 else task.extra_info["labels"]

def looks_up(step, trajectory):
    return label(step)

async def waits_and_looks_up(step, trajectory):
    return label(step)
"""
FAULTS = {"500": (Answer("out of order", status=500), "failed"), "slow": (Answer(delay=60), "timeout")}


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
        of_toy = yaml.safe_load((tmp_path / "toy.yaml").read_text())["reward"]["functions"]
        section = {"functions": [*of_toy, *functions], "num_workers": 2, **reward}
        recipe = {"extends": "toy.yaml", "reward": section}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        run = tmp_path / "run"
        settings = ["trainer.total_training_steps=4", "trainer.val_before_train=false"]
        command = ["train", "recipe.yaml", f"trainer.default_local_dir={run}", *settings, *overrides]
        return CliRunner().invoke(app, command), run

    before = children().keys()
    yield train
    assert children().keys() <= before  # neither a worker nor a zombie


def judged(url):
    args = {"endpoint": url, "model": "stub", "rubric": "Is it clear?"}
    tries = {"request_timeout": 0.5, "retries": 1, "backoff": 0.01}
    return {"fn": "judge", "agent_match": "critic", "args": args | tries, "timeout": 5.0}


@pytest.mark.parametrize("fault", FAULTS)
def test_occasional_judge_fault_masks_its_steps(train, fault):
    answer, status = FAULTS[fault]
    with JudgeServer(lambda request: answer if "Say 1." in request.text else Answer("Fine.\nScore: 7")) as server:
        result, run = train([judged(server.url)], max_failed_frac=0.6)
    assert result.exit_code == 0, result.output
    statuses = set()
    for file in sorted((run / "steps").glob("*.parquet")):
        for trajectory in read_parquet(file).to_trajectories():
            for step in trajectory.steps:
                if step.agent != "critic":
                    assert "judge" not in step.scores
                    continue
                score = step.scores["judge"]
                statuses.add(score.status)
                assert score.status == (status if "Say 1." in step.prompt else "ok")
                assert score.status == "ok" or score.reason
                assert score.status != "ok" or score.rescaled == pytest.approx(6 / 9)
    assert statuses == {"ok", status}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["reward/judge/failed_frac"] for line in metrics) == [0.0, 0.0, 0.0, 0.5]
    assert {line["actor/skipped_updates"] for line in metrics} == {0.0}
    said = [line for line in result.stderr.splitlines() if line.startswith("warning: ") and "judge failed on" in line]
    starts, total = said
    assert starts.startswith("warning: at training step ")
    assert "; the first: judge, step " in starts
    assert re.search(r"\(12\.5%\), in 1 training step, the first [1-4]; failed scores are masked", total)


def test_constant_judge_fault_stops_the_run(train):
    with JudgeServer(Answer("out of order", status=500)) as server:
        result, run = train([judged(server.url)], max_failed_frac=0.2)
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "scores failed, more than reward.max_failed_frac=0.2 allows" in line
    assert "first reasons: judge, step" in line
    assert "500" in line
    assert list((run / "steps").glob("*.parquet"))  # the evidence


def test_check_refuses_one_function_that_mostly_fails(train):
    rarely = {"fn": "functions.py:rarely", "agent_match": "critic"}
    well = [{"fn": "functions.py:kills_its_worker_once", "name": f"well{i}"} for i in range(9)]
    train([rarely, *well])  # stops, too, and leaves the recipe
    result = CliRunner().invoke(app, ["check", "recipe.yaml"])
    assert result.exit_code == 1
    stop = r"training would stop: \d+ of \d+ scores failed, more than .* allows one function: rarely"
    warning = r"warning: reward function rarely failed on \d+ of \d+ scores; the first: rarely, step "
    assert re.search(stop, result.stderr)
    assert re.search(warning, result.output)
    assert "can be trained" not in result.output
    result = CliRunner().invoke(app, ["check", "recipe.yaml", "reward.max_failed_frac=1"])
    assert result.exit_code == 0
    assert "the recipe can be trained, with the warnings above" in result.output


def test_killed_worker_and_hanging_call_cost_only_their_scores(train):
    hangs = {"fn": "functions.py:hangs_in_one_trajectory", "timeout": 0.5}
    result, run = train([{"fn": "functions.py:kills_its_worker_once"}, hangs])
    assert result.exit_code == 0, result.output
    assert (run.parent / "mark").exists()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["reward/kills_its_worker_once/failed_frac"] for line in metrics} == {0.0}
    assert [line["reward/hangs_in_one_trajectory/timeouts"] for line in metrics] == [2] * 4  # of two steps each


LINES = FUNCTIONS.splitlines()
RAISES = LINES.index('    return step.info["labels"]') + 1


@pytest.mark.parametrize(("function", "backend"), [("looks_up", "process"), ("waits_and_looks_up", "inline")])
def test_reward_exception_is_located(train, function, backend):
    result, run = train([{"fn": f"functions.py:{function}"}], backend=backend)
    called = [i for i, line in enumerate(LINES, 1) if "return label(step)" in line]
    frames = f"functions.py:{called[function != 'looks_up']} in {function}, functions.py:{RAISES} in label"
    assert result.exit_code == 1
    assert f"KeyError: 'labels' ({frames})" in result.output
    assert f"{run}/failures.log" in result.output
    log = (run / "failures.log").read_text()
    assert log.count(f"reward function {function}\nTraceback (most recent call last):") == 1
    assert log.rstrip().endswith("KeyError: 'labels'")
    (trajectory, *_) = read_parquet(run / "steps" / "000001.parquet").to_trajectories()
    why = CliRunner().invoke(app, ["why", str(run), "--trajectory", trajectory.id])
    assert why.exit_code == 0, why.output
    assert trajectory.steps[0].scores[function].reason == f"KeyError: 'labels' ({frames})"
    check = CliRunner().invoke(app, ["check", "recipe.yaml", "--tasks", "2"])
    assert f"KeyError: 'labels' ({frames})" in check.output


def test_failing_task_makes_a_warning(train):
    result, run = train([], "team.workflow=functions.py:fails_on_one_task")
    assert result.exit_code == 0, result.output
    at = LINES.index(next(line for line in LINES if 'task.extra_info["labels"]' in line)) + 1
    said = [line for line in result.stderr.splitlines() if line.startswith("warning: ") and "rollouts failed" in line]
    assert re.fullmatch(
        r"warning: at training step \d, 4 of 8 rollouts failed and are masked; the first: "
        rf"KeyError: 'labels' \(functions.py:{at} in fails_on_one_task\)",
        said[0],
    )
    assert re.match(r"warning: in the validation at training step 4, 1 of 6 rollouts failed and are masked;", said[1])
    assert re.search(r"12\.5% of rollouts failed and were masked, in 1 training step, the first", said[2])
    assert len(said) == 3
    event, validation = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert (event["rule"], event["numbers"]) == ("failed_rollouts", {"failed": 4.0, "rollouts": 8.0})
    assert (validation["metric"], validation["numbers"]["failed"]) == ("val/rollout/failed_frac", 1.0)
    assert f"line {at}, in fails_on_one_task" in (run / "failures.log").read_text()


def test_failed_validation_rollouts_make_a_warning(train):
    where = r"KeyError: 'labels' \(functions.py:\d+ in fails_on_one_task\)"
    of_all = rf"\d of \d rollouts failed and are masked; the first: {where}"
    settings = ["team.workflow=functions.py:fails_on_one_task", "actor_rollout_ref.rollout.max_failed_frac=0.9"]
    result, run = train([], *settings, "trainer.val_before_train=true", "trainer.total_training_steps=1")
    assert result.exit_code == 0, result.output
    assert re.search(rf"^warning: in the validation at training step 0, {of_all}$", result.stderr, re.M)
    (event, *_) = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert (event["rule"], event["step"], event["numbers"]["failed"]) == ("failed_rollouts", 0, 1.0)
    assert "training step 0, trajectory 1-" in (run / "failures.log").read_text()
    result = CliRunner().invoke(app, ["eval", "recipe.yaml", *settings])
    assert result.exit_code == 0, result.output
    assert re.search(rf"^warning: {of_all}$", result.stderr, re.M)
