"""Faults during training on verl: `python -m benchmarks.faults [--quick]`.

Twenty runs of a small team on verl (on a CPU, by `tests/verl_cpu`), four of each fault: a rollout server, an agent-loop
worker, a reward actor or one of two Ray nodes is killed in the second training step, or a workflow hangs. Counts the
runs that end as docs/how_to/verl.md says: with the exit code and the message, no trajectory lost silently or counted
twice, and no process left. Where the run must end, the same command is run again and must finish. Half an hour on two
cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl_cpu

from benchmarks.record import ROOT, Figure, exit_with, show, write
from benchmarks.sources import Work
from creditflow.data import TRAJECTORY_STATUSES, read_parquet
from creditflow.runs.run_folder import read_metrics

MEASURES = ("src/creditflow/engines/verl", "src/creditflow/rollout", "src/creditflow/rewards", "benchmarks/faults.py")
REPEATS, STEPS, PER_STEP = 4, 3, 8
MANY = 1000
"""More training steps than a run makes before its node is killed."""
_MARK = "CREDITFLOW_FAULT_RUN"
"""The environment variable that all processes of a run inherit."""
_END_S = 60.0
"""Seconds in which a run's processes must end after it."""
TEAM = '''"""A writer and a critic who say four random bytes each, and faults."""

import asyncio
import itertools
import os
import signal

from creditflow import Task, outcome, reward

FAULT, ONCE = {fault!r}, {once!r}
calls = itertools.count()


def first_time():
    try:
        os.close(os.open(ONCE, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def make_tasks(split, recipe):
    return [Task("toy", ({{"role": "user", "content": f"Say {{i}}."}},), i) for i in range(8)]


async def solve(task, team):
    draft = await team.writer(task.text)
    if draft.step.policy_version == 1 and FAULT in ("server", "worker", "hanging workflow") and first_time():
        if FAULT == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "hanging workflow":
            await asyncio.Event().wait()
        import ray

        for name in ray.util.list_named_actors():
            if name.startswith("transformers_server"):
                os.kill(ray.get(ray.get_actor(name).pid.remote()), signal.SIGKILL)
    return await team.critic(f"{{task.text}} {{draft}}")


@reward(agent_match="writer")
def is_ascii(step, trajectory):
    if FAULT == "reward actor" and next(calls) == 3 and first_time():
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(character.isascii() for character in step.response) / max(1, len(step.response))


@outcome
def first_byte_is_printable(trajectory):
    return float(trajectory.answer[:1].isprintable())
'''
RECIPE = """data: {train_files: team.py:make_tasks, train_batch_size: 2, val_max_samples: 1, max_prompt_length: 128,
       max_response_length: 4}
actor_rollout_ref:
  model: {path: tiny}
  actor: {optim: {lr: 1.0e-3}, ppo_mini_batch_size: 2}
  rollout: {n: 4, timeout_s: 20}
algorithm: {group_by: agent}
team: {workflow: team.py:solve, agents: {writer: {system: Write.}, critic: {system: Judge.}}}
reward: {functions: [{fn: team.py:is_ascii}, {fn: team.py:first_byte_is_printable}], num_workers: 2}
trainer: {val_before_train: false, save_freq: 1, num_threads: 1}
"""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and with what records."""

    code: int
    said: str
    folder: Path
    left: int
    """Processes that were still there a minute later."""

    def shares(self, name: str) -> list[float]:
        """A metric of the training steps."""
        return [row.get(name, 0.0) for row in read_metrics(self.folder) if row["step"] > 0]


def complete(end: Outcome) -> list[str]:
    """Check that a finished run has each training step once, with every rollout once; returns the differences."""
    steps = [row["step"] for row in read_metrics(end.folder) if row["step"] > 0]
    wrong = [] if steps == list(range(1, len(steps) + 1)) and steps else [f"training steps {steps}"]
    seen: set[str] = set()
    for step in steps:
        ids = read_parquet(end.folder / f"steps/{step:06d}.parquet").trajectory_ids
        lost = end.shares("rollout/lost_frac")[step - 1]
        if len(ids) + round(lost * PER_STEP) != PER_STEP or seen & set(ids):
            wrong.append(f"step {step}: {len(ids)} trajectories, {len(seen & set(ids))} of them again")
        seen |= set(ids)
    return wrong


def failed(end: Outcome, step: int) -> int:
    """The failed trajectories of a training step."""
    status = read_parquet(end.folder / f"steps/{step:06d}.parquet").status_of_trajectory
    return int((status == TRAJECTORY_STATUSES.index("failed")).sum())


def counted_server(end: Outcome) -> list[str]:
    """Lost rollouts are failed ones, or all are repeated."""
    counted = failed(end, 2) > 0 or end.shares("rollout/repeated_rollouts")[1] > 0
    return [] if counted else ["no failed or repeated rollout in step 2"]


def counted_hang(end: Outcome) -> list[str]:
    """One rollout exceeds its limit, and is failed."""
    return [] if end.shares("rollout/timeout_frac")[1] == 1 / PER_STEP and failed(end, 2) == 1 else ["no late rollout"]


def counted_reward(end: Outcome) -> list[str]:
    """The call is repeated, so that no score is lost."""
    return [] if not any(end.shares("reward/failed_frac")) else ["a score was lost"]


FAULTS: dict[str, tuple[str, Callable[[Outcome], list[str]]]] = {
    "server": ("", counted_server),
    "worker": ("an agent-loop worker died", lambda end: []),
    "node": ("error: ", lambda end: []),  # the first process that notices it gives the reason
    "reward actor": ("", counted_reward),
    "hanging workflow": ("", counted_hang),
}
"""For each fault: the message with which the run ends (empty: it goes on), and a check of what is counted."""


def start(folder: Path, steps: int, mark: str, *verl: str, address: str = "") -> subprocess.Popen[str]:
    """Begin or go on with a run."""
    command = [sys.executable, "-m", "creditflow", "train", str(folder / "recipe.yaml")]
    command += [f"trainer.default_local_dir={folder / 'run'}", f"trainer.total_training_steps={steps}"]
    command += ["reward.backend=ray"] * (folder.name.startswith("reward")) + ["--engine", "verl", "--"]
    command += [option for option in verl_cpu.options() if not option.startswith("trainer.v1.sampler")]
    command += [f"++ray_kwargs.ray_init.address={address}"] if address else [
        "++ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=16"
    ]  # fmt: skip
    environment = {**os.environ, **verl_cpu.environment(), _MARK: mark}
    return subprocess.Popen([*command, *verl], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def end_of(process: subprocess.Popen[str], folder: Path, mark: str, *, shared: bool = False) -> Outcome:
    """Wait for the end of a run and of its processes. `shared`: its Ray goes on."""
    _, said = process.communicate(timeout=900)
    limit = time.monotonic() + _END_S
    while (left := 0 if shared else processes(mark)) and time.monotonic() < limit:
        time.sleep(1)
    return Outcome(process.returncode, said, folder / "run", left)


def processes(mark: str) -> int:
    """The processes with this mark in their environment."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            count += f"{_MARK}={mark}".encode() in path.read_bytes()
        except OSError:  # it has ended
            continue
    return count


def finished_steps(folder: Path) -> int:
    """The number of training steps in a run's metrics."""
    return max([row["step"] for row in read_metrics(folder)], default=0) if (folder / "metrics.jsonl").exists() else 0


def on_nodes(folder: Path, mark: str) -> tuple[Outcome, Outcome]:
    """A run on two nodes of which one is killed, and the same command on a cluster with another one."""
    os.environ.update({**verl_cpu.environment(), _MARK: mark, "RAY_worker_register_timeout_seconds": "300"})
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 12, "num_gpus": 1, "object_store_memory": 300 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        process = start(folder, MANY, mark, "trainer.nnodes=2", address=cluster.address)
        while process.poll() is None and finished_steps(folder / "run") < 1:
            time.sleep(0.2)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        first = end_of(process, folder, mark, shared=True)
        cluster.add_node(**node)
        steps = finished_steps(folder / "run") + 2
        second = end_of(
            start(folder, steps, mark, "trainer.nnodes=2", address=cluster.address), folder, mark, shared=True
        )
    finally:
        cluster.shutdown()
        del os.environ[_MARK]
    limit = time.monotonic() + _END_S
    while (left := processes(mark)) and time.monotonic() < limit:
        time.sleep(1)
    return first, Outcome(second.code, second.said, second.folder, left)


def wrong_with(fault: str, folder: Path) -> list[str]:
    """Do a run with the fault; returns the differences from the documented behaviour."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "team.py").write_text(TEAM.format(fault=fault, once=str(folder / "once")))
    message, counted = FAULTS[fault]
    mark = uuid.uuid4().hex
    if fault == "node":
        first, last = on_nodes(folder, mark)
    else:
        first = last = end_of(start(folder, STEPS, mark), folder, mark)
        if message:
            last = end_of(start(folder, STEPS, mark), folder, mark)
    wrong = [] if first.code == (1 if message else 0) and message in first.said else [f"ended with {first.said[-500:]}"]
    wrong += [] if not message or "run the same command again" in first.said else ["no advice"]
    wrong += [] if last.code == 0 else [f"did not finish: {last.said[-500:]}"]
    wrong += [f"{last.left} processes are left"] if last.left else []
    return wrong or [*complete(last), *counted(last)]


def main() -> int:
    """Do the runs and print how many end as documented; 1 if one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run, with a killed server")
    quick = parser.parse_args().quick
    work = Work.begin("faults", MEASURES, quick=quick)
    figures, right = [], 0
    for fault in ["server"] if quick else FAULTS:
        as_documented = 0
        for repeat in range(1 if quick else REPEATS):
            wrong = wrong_with(fault, work.folder / f"{fault.replace(' ', '-')}-{repeat}")
            as_documented += not wrong
            print(f"{fault}, run {repeat + 1}: {'; '.join(wrong) or 'as documented'}", flush=True)
        right += as_documented
        figures.append(Figure(f"{fault}: runs that end as documented", as_documented, 1 if quick else REPEATS))
    figures.append(Figure("runs that end as documented", right, 1 if quick else REPEATS * len(FAULTS)))
    missed = show(figures)
    if not quick:
        write("faults", figures, ("creditflow", "verl", "ray", "TransferQueue"), work.measured)
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
