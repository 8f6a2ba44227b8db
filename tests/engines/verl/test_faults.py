"""Faults during training on verl: the run continues and counts its losses, or ends with the reason."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.paths import TOYS

pytest.importorskip("verl_cpu")

from verl_cpu import mode_options

from creditflow.errors import ConfigError, CreditflowError
from creditflow.runs.run_folder import read_events
from tests.engines.verl.runs import Run, run
from tests.rewards.processes import HANG_S, alive, descendants, until

FAULTS = """
import asyncio, itertools, os, signal

MARK = {mark!r}
calls = itertools.count(1)

def first_time(name):
    try:
        os.close(os.open(os.path.join(MARK, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

async def solve_nine_of_ten(task, team):
    if next(calls) % 10 == 0:
        raise RuntimeError("the tenth trajectory")
    return await solve(task, team)

async def never_solve(task, team):
    raise RuntimeError("no trajectory goes well")

async def call_a_stranger(task, team):
    return await team.stranger(task.text)

async def hang_once(task, team):
    draft = await team.writer(task.text)
    if draft.step.policy_version == 1 and first_time("hung"):
        await asyncio.Event().wait()
    return await team.critic(f"{{task.text}} {{draft}}")

def kill_servers():
    import ray
    for server in ray.util.list_named_actors():
        if server.startswith("transformers_server"):
            os.kill(ray.get(ray.get_actor(server).pid.remote()), signal.SIGKILL)

async def kill_the_server(task, team):
    draft = await team.writer(task.text)
    if draft.step.policy_version == 1 and first_time("server"):
        kill_servers()
    return await team.critic(f"{{task.text}} {{draft}}")

async def kill_the_training_worker(task, team):
    draft = await team.writer(task.text)
    if draft.step.policy_version == 1 and first_time("training worker"):
        import ray
        (worker,) = [name for name in ray.util.list_named_actors() if "WorkerDict" in name]
        os.kill(ray.get(ray.get_actor(worker).__ray_call__.remote(lambda actor: os.getpid())), signal.SIGKILL)
    return await team.critic(f"{{task.text}} {{draft}}")

async def kill_the_worker(task, team):
    draft = await team.writer(task.text)
    if draft.step.policy_version == 1 and first_time("agent-loop worker"):
        os.kill(os.getpid(), signal.SIGKILL)
    return await team.critic(f"{{task.text}} {{draft}}")

def kills_its_worker_once(step, trajectory):
    if first_time("worker"):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5

def cannot_score(step, trajectory):
    raise ValueError("nothing to see")
"""
ALWAYS = "guard.rules.always={metric: rollout/tokens, above: 1, window: 1, action: fallback_identical}"
QUICK = ("trainer.total_training_steps=3", "trainer.val_before_train=false", "data.val_max_samples=1")


def recipes_in(folder: Path):
    """Create the toy recipe in `folder`; returns a function that sets its workflow and adds a reward function."""
    shutil.copy(TOYS / "toy.py", folder)
    shutil.copy(TOYS / "toy.yaml", folder)
    (folder / "faults.py").write_text((TOYS / "toy.py").read_text() + FAULTS.format(mark=str(folder)))

    def make(workflow: str = "toy.py:solve", reward: str | None = None) -> Path:
        functions = yaml.safe_load((folder / "toy.yaml").read_text())["reward"]["functions"]
        if reward is not None:
            functions.append({"fn": f"faults.py:{reward}", "agent_match": "writer"})
        changes = {"team": {"workflow": workflow}, "reward": {"functions": functions, "num_workers": 2}}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"extends": "toy.yaml", **changes}))
        return folder / "recipe.yaml"

    return make


@pytest.fixture
def recipe(tmp_path: Path):
    return recipes_in(tmp_path)


@pytest.fixture(scope="module")
def faulty(verl_ray, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in which every tenth rollout raises, a reward worker is killed, and a guard rule fires after each step."""
    folder = tmp_path_factory.mktemp("faulty")
    recipe = recipes_in(folder)("faults.py:solve_nine_of_ten", reward="kills_its_worker_once")
    trained = run(recipe, folder / "run", *QUICK, "actor_rollout_ref.rollout.n=10", ALWAYS)
    assert (folder / "worker").exists()
    return trained


@pytest.mark.slow
def test_killed_reward_worker_costs_no_score(faulty: Run):
    assert faulty.series("reward/failed_frac").tolist() == [0, 0, 0]
    assert faulty.series("reward/kills_its_worker_once/mean").tolist() == [0.5, 0.5, 0.5]


@pytest.mark.slow
def test_workflow_error_costs_only_its_rollout(faulty: Run):
    assert faulty.series("rollout/failed_frac").tolist() == [0.1, 0.1, 0.1]
    assert (faulty.series("actor/grad_norm") > 0).all()
    batch = faulty.batch(1)
    assert batch.n_trajectories == 20
    errors = {info["error"] for info in batch.trajectory_info if "error" in info}
    assert len(errors) == 1
    assert re.fullmatch(r"RuntimeError: the tenth trajectory \(faults\.py:\d+ in solve_nine_of_ten\)", errors.pop())
    assert sum("error" in info for info in batch.trajectory_info) == 2
    log = (faulty.folder / "failures.log").read_text()
    assert log.count("\nRuntimeError: the tenth trajectory\n") == log.count("workflow\nTraceback") == 1


@pytest.mark.slow
def test_guard_falls_back_to_the_outcome_after_the_first_step(faulty: Run):
    event = next(event for event in read_events(faulty.folder) if event["rule"] == "always")
    assert (event["step"], event["action"]) == (1, "fallback_identical")
    assert faulty.series("guard/fallback").tolist() == [1, 1, 1]
    equal = []
    for path in faulty.steps:
        steps = pq.read_table(path, columns=["credit", "outcome"]).drop_null().to_pydict()
        equal.append(steps["credit"] == steps["outcome"])
    assert equal == [False, True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("verl_ray")
def test_timed_out_rollout_keeps_its_steps(recipe, tmp_path: Path):
    limit = "actor_rollout_ref.rollout.timeout_s=60"
    trained = run(recipe("faults.py:hang_once"), tmp_path / "run", *QUICK, limit, "actor_rollout_ref.rollout.n=8")
    for name in ("timeout", "failed"):
        assert trained.series(f"rollout/{name}_frac").tolist() == [0, 1 / 16, 0]
    (hung,) = [info for info in trained.batch(2).trajectory_info if "error" in info]
    assert hung["timed_out"] == 60
    assert trained.batch(2).n_steps == 2 * 16 - 1  # the writer's step of that rollout, without the critic's


@pytest.mark.slow
@pytest.mark.usefixtures("verl_ray")
@pytest.mark.parametrize(
    ("workflow", "says"),
    [
        ("kill_the_server", "a rollout server died.*run the same command again"),
        ("kill_the_worker", "an agent-loop worker died"),
        ("kill_the_training_worker", "a process of the run died.*run the same command again"),
    ],
)
def test_run_resumes_after_a_process_died(recipe, tmp_path: Path, workflow: str, says: str):
    faulty = recipe(f"faults.py:{workflow}")
    with pytest.raises(CreditflowError, match=says):
        run(faulty, tmp_path / "run", *QUICK, "trainer.save_freq=1")
    trained = run(faulty, tmp_path / "run", *QUICK)
    assert [row["step"] for row in trained.metrics] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("verl_ray")
@pytest.mark.parametrize(
    ("workflow", "error", "message"),
    [
        ("never_solve", CreditflowError, r"8 of 8 rollouts failed.*RuntimeError: no trajectory goes well"),
        ("call_a_stranger", ConfigError, "agent 'stranger'"),
    ],
)
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_failing_rollouts_end_the_run(recipe, tmp_path: Path, workflow, error, message, mode):
    lag = () if mode == "sync" else ("algorithm.max_version_lag=2",)
    with pytest.raises(error, match=message):
        run(recipe(f"faults.py:{workflow}"), tmp_path / "run", *QUICK, *lag, verl=mode_options(mode))


@pytest.mark.slow
@pytest.mark.usefixtures("verl_ray")
def test_too_many_failed_scores_stop_the_run(recipe, tmp_path: Path):
    with pytest.raises(CreditflowError, match="nothing to see"):
        run(recipe(reward="cannot_score"), tmp_path / "run", *QUICK)
    assert Run(tmp_path / "run").batch(1).n_trajectories == 8


@pytest.mark.slow
def test_interrupt_ends_every_process_of_the_run(recipe, tmp_path: Path):
    import verl_cpu

    folder = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "creditflow", "train", str(recipe()), f"trainer.default_local_dir={folder}"),
        *("trainer.device=auto", "trainer.total_training_steps=1000", "--engine", "verl", "--", *verl_cpu.options()),
        *("++ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=16"),
    ]
    environment = {**os.environ, **verl_cpu.environment()}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = folder / "metrics.jsonl"
    try:
        until(lambda: process.poll() is not None or (metrics.exists() and '"step": 2' in metrics.read_text()), 900)
        started = descendants(process.pid)
        assert len(started) > 5
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
        assert process.returncode == 130, stderr
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    until(lambda: not [pid for pid in started if alive(pid)])
