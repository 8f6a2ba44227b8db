"""The command line: output, exit codes, and written files."""

import json
import os
import re
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import yaml

from creditflow.config import load_recipe
from tests.cli.commands import creditflow, refused
from tests.forks import fast_python
from tests.paths import GSM8K, TOY


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Bad input


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.tasks=1", "data.train_batch_size: 2 tasks a step, but the data set has 1"),
        ("actor_rollout_ref.model.path=.", "is not a Hugging Face model folder"),
        ("actor_rollout_ref.model.path=null", "expected a Hugging Face folder"),
        (
            "reward.functions=[{fn: exact_match, level: step, agent_match: editor}]",
            "agent_match 'editor' matches none of the team's agents: writer, critic",
        ),
        ("reward.functions=[{fn: 'toy.py:compute_decomposed_reward', weight: 0}]", "nothing can be learned"),
        ("team.workflow=toy.py:make_tasks", "team.workflow: expected `async def solve(task, team)`"),
        ("team.workflow=nowhere.py:solve", "team.workflow: no file 'nowhere.py'"),
        ("algorithm.strata=toy.py:nothing", "algorithm.strata: toy.py has no 'nothing'"),
        ("trainer.default_local_dir=/dev/null/run", "trainer.default_local_dir: /dev/null/run cannot be made"),
        ("--engine=vrel", "--engine: expected local or verl, got 'vrel' (did you mean 'verl'?)"),
        ("--dry-run", "--dry-run: is for verl's configuration; add --engine verl"),
        ("--", "--: is for verl's configuration; add --engine verl"),
        ("--engine=local; --; trainer.nnodes=2", "--: is for verl's configuration; add --engine verl"),
    ],
)
def test_invalid_settings_are_refused(here, override, message):
    assert message in refused("train", TOY, *override.split("; "))
    assert list(here.iterdir()) == []


NO_RECIPE = "no such recipe; `creditflow recipes` lists the shipped"


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_missing_files_are_refused(here, command):
    message = refused(command, TOY, "data.train_files=nowhere.jsonl")
    assert message.startswith("data.train_files: no file 'nowhere.jsonl' in ") or command == "eval"
    assert "nowhere.jsonl" in message
    assert refused(command, "nowhere.yaml") == f"nowhere.yaml: {NO_RECIPE}"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("facts", "about"),
    [
        ("torn {", "holds a run already, whose run.json does not say what it is"),
        ('{"engine": "verl", "config": {}}', "holds a run of --engine verl"),
    ],
)
def test_folder_of_another_run_is_not_overwritten(here, facts, about):
    (here / "run").mkdir()
    (here / "run" / "run.json").write_text(facts)

    message = refused("train", TOY, "trainer.default_local_dir=run", "trainer.total_training_steps=1")

    assert message == f"trainer.default_local_dir: run {about}; name another folder"
    assert [path.name for path in (here / "run").iterdir()] == ["run.json"]


# Commands


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output of a training command, and the folder of its run."""
    run = tmp_path_factory.mktemp("trained") / "run"
    result = creditflow("train", TOY, f"trainer.default_local_dir={run}")
    assert result.exit_code == 0, result.output
    return result.stdout, run


def test_train_writes_a_run_and_prints_its_evaluation(trained):
    stdout, run = trained
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [f"{row['val/pass_at_1']:.3f}" for row in rows if row["step"] in (0, 2)]
    assert re.search(rf"pass@1 \(mean over trajectories\) +{'  +'.join(numbers)}\n", stdout.replace(" \n", "\n"))
    assert stdout.endswith(f"next:\n  creditflow why {run}\n  creditflow report {run} -o report.html\n")
    assert f"run folder: {run}" in stdout
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {"run.json", "config.yaml", "metrics.jsonl", "evaluation.json"} <= names
    assert {"steps/000001.parquet", "steps/000002.parquet"} <= names
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert set(evaluation) == {"metrics", "sampled", "greedy", "step_errors", "examples"}
    assert all(len(evaluation[name]) == 6 for name in ("sampled", "greedy", "step_errors", "examples"))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert sum(evaluation["sampled"]) / 6 == pytest.approx(last["val/pass_at_1"])
    assert sum(evaluation["greedy"]) / 6 == pytest.approx(last["val/pass_at_1_greedy"])
    wrong, scored = (sum(task[i] for task in evaluation["step_errors"]) for i in (0, 1))
    assert wrong / scored == pytest.approx(last["val/step_error_rate"])


def test_written_configuration_reproduces_the_run(trained, here):
    for file in (trained[1] / "config.yaml", TOY.with_suffix(".py")):
        shutil.copy(file, here)
    again = creditflow("train", "config.yaml", "trainer.default_local_dir=b")
    assert again.exit_code == 0, again.output
    assert (trained[1] / "evaluation.json").read_text() == (here / "b" / "evaluation.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "ours", "verls"),
    [
        ([], [], ()),
        (["data.seed=2", "--", "+b=2", "~c", "d=[x,y]"], ["data.seed=2"], ["+b=2", "~c", "d=[x,y]"]),
        (["--", "--engine", "--"], [], ["--engine", "--"]),
    ],
)
def test_arguments_after_dashes_are_passed_on_unchanged(monkeypatch, arguments, ours, verls):
    engine = pytest.importorskip("creditflow.engines.verl.engine").VerlEngine
    calls = []
    monkeypatch.setattr(engine, "configuration", lambda self, recipe, options, _: calls.append((recipe, options)) or "")

    result = creditflow("train", TOY, "--engine", "verl", "--dry-run", *arguments)

    assert result.exit_code == 0, result.output
    [(recipe, verl_overrides)] = calls
    assert recipe.config == load_recipe(TOY, ours).config
    assert verl_overrides == verls


def test_dry_run_prints_only_verls_configuration(tmp_path):
    pytest.importorskip("verl")
    words = [fast_python(), "-m", "creditflow", "train", "gsm8k_team_8xA100", "--engine", "verl", "--dry-run"]
    words += ["--", "trainer.n_gpus_per_node=16"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    config = yaml.safe_load(done.stdout)
    assert config["trainer"]["n_gpus_per_node"] == 16
    assert config["trainer"]["v1"]["trainer_mode"] == "sync"
    assert config["creditflow"]["name"] == "gsm8k_team_8xA100"
    assert list(tmp_path.iterdir()) == []


def test_dry_run_warns_of_missing_files(monkeypatch, tmp_path):
    engine = pytest.importorskip("creditflow.engines.verl.engine").VerlEngine
    monkeypatch.setattr(engine, "configuration", lambda *_: "")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for file in ("score.py", "here/mine.py"):
        (tmp_path / file).touch()
    names = ("score.py:one", "mine.py:one", "my rewards/s.py:two", "my rewards/s.py:three")
    functions = [{"fn": name} for name in names]
    recipe = {"team": {"workflow": "team.py:solve", "agents": {"a": {}}}, "reward": {"functions": functions}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = creditflow("train", tmp_path / "recipe.yaml", "--engine", "verl", "--dry-run")
    assert result.exit_code == 0, result.output
    warned = [line.split(": ")[1] for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert sorted(warned) == ["my rewards/s.py", "team.py"]


def test_eval_prints_and_writes_metrics_of_a_checkpoint(trained, here):
    run = trained[1]
    settings = [f"actor_rollout_ref.model.path={run}/checkpoints/global_step_2"]
    settings += ["actor_rollout_ref.rollout.val_kwargs.n=4", "--json", "out/evaluation.json"]
    result = creditflow("eval", TOY, *settings)
    assert result.exit_code == 0, result.output
    for words in ("pass@1 (mean over trajectories)", "pass@2", "pass@4", "pass@1, greedy", "mean sub-reward, writer"):
        assert words in result.stdout
    written, last = (json.loads(path.read_text()) for path in (here / "out/evaluation.json", run / "evaluation.json"))
    assert written["greedy"] == last["greedy"]


def test_eval_prints_results_that_it_cannot_write(here):
    settings = ("actor_rollout_ref.rollout.val_kwargs.do_sample=false", "actor_rollout_ref.rollout.val_kwargs.n=4")
    result = creditflow("eval", TOY, *settings, "--json", "/proc/evaluation.json")
    assert result.exit_code == 2, result.output
    assert "error: --json: /proc/evaluation.json cannot be written" in result.stderr
    tasks = "toy, 6 tasks of data.train_files (data.val_files is not set), 1 rollout of each"  # greedy: one is enough
    assert tasks in result.stdout


def test_check_prints_findings_first(here):
    brief, verbose = creditflow("check", TOY, "--tasks", "1"), creditflow("check", TOY, "--tasks", "1", "--verbose")

    assert (brief.exit_code, verbose.exit_code) == (0, 0), brief.output
    lines = [line.strip() for line in brief.stdout.splitlines()]
    assert lines[1] == "agents, in 1 task x 4 rollouts"
    assert any(line.startswith("writer") for line in lines)
    assert any(line.startswith("compute_decomposed_reward") for line in lines)
    assert "validation uses 6 tasks of data.train_files (data.val_files is not set)" in lines
    assert "which credit (docs/benchmarks/which_credit.md): scores of every agent, graded: own" in brief.stdout
    configuration = ("reward_decomp: true", "rule: threshold", "theta: 0.5", "lam: 0.95")
    assert not set(configuration) & set(lines)
    assert "credit: {rule: threshold, w_r: 1.0, " in brief.stderr
    assert brief.stderr.count("theta: 0.5, on_closed_gate: cut}, grpo, group_by agent\n") == 1
    assert verbose.stdout.startswith(brief.stdout)
    assert set(configuration) <= {line.strip() for line in verbose.stdout[len(brief.stdout) :].splitlines()}
    assert list(here.iterdir()) == []


def test_size_that_cannot_fit_stops_before_the_first_step(here):
    size = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    result = creditflow("train", TOY, f"{size}=1000000000", "trainer.default_local_dir=run")

    assert result.exit_code == 2
    assert re.search(rf"{size}: expected at most 16384, got 1000000000: 1000000000 tokens need about ", result.stderr)
    assert not (here / "run").exists()


def test_check_warns_of_an_agent_without_signal(here):
    idle = "guard.rules.mine={metric: actor/entropy, below: 0.2, action: set_threshold, to: 0.3}"
    settings = ("algorithm.propagation=own", "algorithm.outcome_to=answer", idle)
    unpaid = "reward.functions=[{fn: 'toy.py:first_byte_is_printable'}]"

    result = creditflow("check", TOY, *settings, unpaid)

    assert result.exit_code == 0, result.output
    assert "warning: no signal reaches writer" in result.stdout
    assert result.stdout.count("warning: guard.rules.") == 1
    assert "warning: guard.rules.mine only warns: there is no threshold to lower (own)" in result.stdout
    assert "no signal reaches critic" not in result.stdout


def test_check_expects_scores_of_trained_agents_alone(here):
    code = "from creditflow import reward\n@reward\ndef f(step, trajectory):\n    return 0.5\n"
    (here / "half.py").write_text(code)
    rewards = f"reward.functions=[{{fn: '{here}/half.py:f', agent_match: critic}}]"
    frozen = ("policies={default: {}, fixed: {trainable: false}}", "team.agents.writer.policy=fixed")

    both, one = creditflow("check", TOY, rewards), creditflow("check", TOY, rewards, *frozen)

    assert "scores of some agents only, graded: own; the outcome alone for writer" in both.stdout
    assert "scores of every agent, graded: own" in one.stdout


def test_check_says_that_equal_credit_trains_nothing(here):
    (here / "none.py").write_text("from creditflow import outcome\n@outcome\ndef g(trajectory):\n    return 0.0\n")

    result = creditflow("check", TOY, f"reward.functions=[{{fn: '{here}/none.py:g'}}]")

    assert result.stderr.splitlines()[-1] == "training would change nothing on these tasks: every advantage is 0"
    assert "no scores: own, which gives every step the outcome; choose group_by" in result.stdout


def test_check_names_a_missing_outcome(here):
    result = creditflow("check", TOY, "reward.functions=[{fn: 'toy.py:compute_decomposed_reward'}]")

    missing = "no reward function of level outcome: the outcome is 0, and pass@1 means nothing; reward.functions does"
    assert f"{missing} not list first_byte_is_printable, which is declared" in result.stdout


def test_check_reports_failed_scores_and_exits_with_code_1(here):
    (here / "broken.py").write_text("def g(trajectory):\n    raise ValueError('\\x1b[2Jnothing there')\n")

    result = creditflow("check", TOY, f"reward.functions=[{{fn: '{here}/broken.py:g'}}]")

    assert result.exit_code == 1
    assert r"\x1b[2Jnothing there" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: training would stop")


TRUTHS = r"""
from creditflow import Task
from creditflow.rewards import answer

def make_tasks(split):
    truths = ["72", "1/2", "\\frac{", None, "[" * 30] if split == "train" else ["8", "three"]
    return [Task("truths", ({"role": "user", "content": "Say."},), truth) for truth in truths]

@answer(read_truth=int)
def near(text, truth):
    return 0.0
"""


def test_check_lists_rows_of_unreadable_truths(here):
    (here / "mine.py").write_text(TRUTHS)
    near = f"{{fn: sum, level: step, args: {{parts: [{{fn: '{here}/mine.py:near', level: step}}]}}}}"
    settings = (f"reward.functions=[{{fn: math_verify}}, {near}]", f"data.train_files={here}/mine.py:make_tasks")

    result = creditflow("check", TOY, *settings, "--tasks", "2")

    assert result.exit_code == 0, result.output
    assert "math_verify cannot read the ground truth of 3 of 5 training tasks" in result.stdout
    assert r"row 2: ValueError: expected a ground truth that can be read as mathematics, got '\\frac{'" in result.stdout
    assert "near cannot read the ground truth of 4 of 5 training tasks" in result.stdout
    assert "near cannot read the ground truth of 1 of 2 validation tasks" in result.stdout
    assert "row 1: ValueError: invalid literal for int() with base 10: 'three'" in result.stdout


def test_check_estimates_memory_and_warns_of_truncation(here):
    result = creditflow("check", TOY)

    size = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"
    assert re.search(rf"memory: a step needs about [0-9.]+ GiB with {size}; ", result.stderr)
    assert "trajectories truncated" not in result.stdout  # the warnings below name the same fact
    for agent in ("writer", "critic"):
        assert re.search(
            rf"^warning: \d+% of {agent}'s responses are truncated \(\d+ of 16\): raise data\.max_response_length, ",
            result.stdout,
            re.M,
        )


def test_check_names_long_prompts_and_a_forgotten_return(here):
    prompts = ["short", "long " * 100, "late"]
    (here / "tasks.jsonl").write_text("".join(json.dumps({"prompt": text, "solution": "1"}) + "\n" for text in prompts))
    workflow = (
        "async def solve(task, team):\n    text = await team.writer(task.text)\n    if 'l' in task.text: return text"
    )
    (here / "team.py").write_text(workflow)
    tasks = ("data.train_files=tasks.jsonl", "data.max_prompt_length=50", "data.train_batch_size=2")
    rewards = "reward.functions=[{fn: exact_match}]"

    result = creditflow(
        "check", TOY, *tasks, f"team.workflow={here}/team.py:solve", "team.agents={writer: {}}", rewards
    )

    assert result.exit_code == 0, result.output
    assert "4 of 12 trajectories truncated (tasks, counted from 0: 1); the first: writer's prompt" in result.stdout
    assert "at most 50 fit (data.max_prompt_length)" in result.stdout
    assert "4 of 12 trajectories have no answer: the workflow returned None (team.py:1 in solve)" in result.stdout


def test_gsm8k_becomes_verl_schema_parquet(here):
    result = creditflow("data", "gsm8k", "--from", GSM8K, "--out", "rows/train.parquet")

    assert result.exit_code == 0, result.output
    assert "64 tasks" in result.stderr
    columns = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert pq.read_schema("rows/train.parquet").names == columns


def test_unreadable_gsm8k_writes_nothing(here):
    (here / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')

    assert "rows.jsonl:1: " in refused("data", "gsm8k", "--from", "rows.jsonl", "--out", "rows.parquet")
    assert refused("data", "gsm8k", "--from", GSM8K, "--out", "rows.csv").startswith("--out: expected a name")
    assert [path.name for path in here.iterdir()] == ["rows.jsonl"]


# The process


def test_module_runs_like_the_command(here):
    done = subprocess.run(
        [sys.executable, "-m", "creditflow", "train", "nowhere.yaml"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: nowhere.yaml: {NO_RECIPE}\n")


def test_full_disk_is_reported_in_one_line():
    code = (
        "import creditflow.config as c\n"
        "c.load_recipe = lambda *_: open('/dev/full', 'wb', 0).write(b'x')\n"
        "from creditflow.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([fast_python(), "-c", code, "check", "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: the disk is full; finished files are whole\n")


def test_output_has_escapes_for_what_it_cannot_encode():
    code = "from creditflow import cli\ncli.versions = lambda: '\\u0142 ok'\ncli.main()\n"
    words, latin = [sys.executable, "-c", code, "--version"], {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=latin)
    assert (done.returncode, done.stdout) == (0, "\\u0142 ok\n"), done.stderr
