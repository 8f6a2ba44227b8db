"""Faults during training on verl: `python -m benchmarks.faults [--quick]`.

Twenty-four runs of a small team on verl (on a CPU, by `tests/verl_cpu`), four of each fault: a rollout server, an
agent-loop worker, a training worker, a reward actor or one of two Ray nodes is killed, or a workflow hangs. Counts the
runs that end as docs/how_to/verl.md says. Where the run must end, the same command is run again and must finish. A run
must satisfy all of these:

* The fault occurred: its process left a mark, or the node was removed from a run in progress.
* Exit code and message are the documented ones. A run that exceeds its time limit is killed and counts as hanging.
* Every task of an epoch was trained on once, with all its rollouts; lost ones are counted in the metrics.
* A minute after the end no process is left. Candidates are all processes that descended from this one.

Finished runs are kept in `runs/faults/`; remove a run's folder to repeat it. An hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl_cpu

from benchmarks.__main__ import exit_on_sigterm
from benchmarks.processes import Progress, Started, collecting, start, wait
from benchmarks.record import Figure, exit_with, show, write
from benchmarks.sources import Work
from creditflow._utils.files import write_whole
from creditflow.data import TRAJECTORY_STATUSES, read_parquet
from creditflow.runs.run_folder import read_metrics

MEASURES = (
    "src/creditflow/engines/verl",
    "src/creditflow/rollout",
    "src/creditflow/rewards",
    "benchmarks/faults.py",
    "benchmarks/processes.py",
)
REPEATS, STEPS = 4, 3
TASKS, TASKS_A_STEP, SESSIONS = 8, 2, 4
"""Tasks of an epoch and of a training step, and rollouts of a task."""
PER_STEP = TASKS_A_STEP * SESSIONS
MANY = 1000
"""More training steps than a run makes before its node is killed."""
RUN_S = 900.0
"""The time limit of one command. An undisturbed one takes about a minute."""
FIRST_STEP_S = 600.0
"""The time limit of the first training step on two nodes."""
_END_S = 60.0
"""Seconds in which a run's processes must end after it."""
_VERDICT = "verdict.json"
_AGAIN = "run the same command again"
TEAM = '''"""A writer and a critic who say four random bytes each, and faults."""

import asyncio
import itertools
import os
import signal

from creditflow import Task, outcome, reward

FAULT, MARK = {fault!r}, {mark!r}
calls = itertools.count()


def first_time():
    try:
        os.close(os.open(MARK + ".claimed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def mark():
    with open(MARK, "w"):
        pass


def kill_actors(part_of_name):
    import ray

    for name in ray.util.list_named_actors():
        if part_of_name in name:
            pid = ray.get(ray.get_actor(name).__ray_call__.remote(lambda actor: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            mark()


def make_tasks(split, recipe):
    return [Task("toy", ({{"role": "user", "content": f"Say {{i}}."}},), i) for i in range({tasks})]


async def solve(task, team):
    draft = await team.writer(task.text)
    if draft.step.policy_version == 1 and FAULT not in ("reward actor", "node") and first_time():
        if FAULT == "worker":
            mark()
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "hanging workflow":
            mark()
            await asyncio.Event().wait()
        kill_actors({{"server": "transformers_server", "training worker": "WorkerDict"}}[FAULT])
    return await team.critic(f"{{task.text}} {{draft}}")


@reward(agent_match="writer")
def is_ascii(step, trajectory):
    if FAULT == "reward actor" and next(calls) == 3 and first_time():
        mark()
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
    """How a command ended, and with what records."""

    code: int | None
    """None if it was killed at its time limit."""
    said: str
    folder: Path
    left: int
    """Processes that were still there a minute later."""

    def series(self, name: str) -> list[float]:
        """A metric of the training steps."""
        return [row.get(name, 0.0) for row in read_metrics(self.folder) if row["step"] > 0]


def complete(end: Outcome, last: int) -> list[str]:
    """Check that a run has the training steps 1 to `last`, with every rollout once; returns the differences."""
    steps = [row["step"] for row in read_metrics(end.folder) if row["step"] > 0]
    if steps != list(range(1, last + 1)):
        return [f"training steps {steps}, expected 1 to {last}"]
    ids = {step: read_parquet(end.folder / f"steps/{step:06d}.parquet").trajectory_ids for step in steps}
    lost = {step: round(share * PER_STEP) for step, share in zip(steps, end.series("rollout/lost_frac"), strict=True)}
    return differences(ids, lost)


def differences(ids: dict[int, Sequence[str]], lost: dict[int, int]) -> list[str]:
    """Compare the trajectories of each training step with the rollouts that were due.

    An id is 0-STEP-TASK-SESSION. An epoch has each task in one step, with all sessions. So a step that was trained on
    twice, or a batch of tasks that a resume drew again or left out, differs in its tasks.
    """
    wrong = []
    epochs: dict[int, Counter[tuple[int, int]]] = {}
    for step, names in ids.items():
        parts = [tuple(map(int, name.split("-"))) for name in names]
        rollouts = [(task, session) for _, _, task, session in parts]
        epochs.setdefault((step - 1) * TASKS_A_STEP // TASKS, Counter()).update(rollouts)
        if others := {at for _, at, _, _ in parts} - {step}:
            wrong.append(f"step {step}: rollouts of step {min(others)}")
        if len(names) + lost[step] != PER_STEP:
            wrong.append(f"step {step}: {len(names)} trajectories and {lost[step]} lost, expected {PER_STEP}")
        if len({task for task, _ in rollouts}) > TASKS_A_STEP or any(at >= SESSIONS for _, at in rollouts):
            wrong.append(f"step {step}: not {SESSIONS} sessions of {TASKS_A_STEP} tasks: {sorted(rollouts)}")
    for epoch, counted in epochs.items():
        if again := sorted(rollout for rollout, times in counted.items() if times > 1):
            wrong.append(f"epoch {epoch + 1}: {len(again)} rollouts twice, among them task {again[0][0]}")
    return wrong


def failed(end: Outcome, step: int) -> int:
    """The failed trajectories of a training step."""
    status = read_parquet(end.folder / f"steps/{step:06d}.parquet").status_of_trajectory
    return int((status == TRAJECTORY_STATUSES.index("failed")).sum())


def counted_server(end: Outcome) -> list[str]:
    """Lost rollouts are failed ones, or all are repeated."""
    counted = failed(end, 2) > 0 or end.series("rollout/repeated_rollouts")[1] > 0
    return [] if counted else ["no failed or repeated rollout in step 2"]


def counted_hang(end: Outcome) -> list[str]:
    """One rollout exceeds its limit, and is failed."""
    return [] if end.series("rollout/timeout_frac")[1] == 1 / PER_STEP and failed(end, 2) == 1 else ["no late rollout"]


def counted_reward(end: Outcome) -> list[str]:
    """The call is repeated, so that no score is lost."""
    return [] if not any(end.series("reward/failed_frac")) else ["a score was lost"]


def nothing_more(end: Outcome) -> list[str]:
    """A resumed run has no further record of the fault."""
    return []


@dataclass(frozen=True)
class Fault:
    """The documented end of a run after a fault (docs/how_to/verl.md)."""

    counted: Callable[[Outcome], list[str]] = nothing_more
    """Checks the metrics and the step files of the finished run."""
    messages: tuple[str, ...] = ()
    """One of these ends the run; empty if the run goes on."""


FAULTS = {
    "server": Fault(counted_server),
    "worker": Fault(messages=("an agent-loop worker died",)),
    "training worker": Fault(messages=("a process of the run died",)),
    "node": Fault(  # the first process that detects it gives the reason
        messages=(
            "a machine of the cluster was lost",
            "a process of the run died",
            "the run's driver process ended",
            "rollout servers died, and do not come back",
            "an agent-loop worker died",
        )
    ),
    "reward actor": Fault(counted_reward),
    "hanging workflow": Fault(counted_hang),
}


def begin(folder: Path, log: Path, steps: int, *verl: str, address: str = "") -> subprocess.Popen[bytes]:
    """Begin or resume a run, with standard error in `log`."""
    command = [sys.executable, "-m", "creditflow", "train", str(folder / "recipe.yaml")]
    command += [f"trainer.default_local_dir={folder / 'run'}", f"trainer.total_training_steps={steps}"]
    command += ["reward.backend=ray"] * folder.name.startswith("reward") + ["--engine", "verl", "--"]
    command += [option for option in verl_cpu.options() if not option.startswith("trainer.v1.sampler")]
    command += [f"++ray_kwargs.ray_init.address={address}"] if address else [
        "++ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=16"
    ]  # fmt: skip
    return start([*command, *verl], log, verl_cpu.environment())


def end_of(process: subprocess.Popen[bytes], folder: Path, log: Path, started: Started | None) -> Outcome:
    """Wait for the end of a run, and of its processes; without `started`, they belong to a Ray that goes on."""
    code = wait(process, RUN_S)
    if code is None and started is not None:
        started.kill()
    left = 0 if started is None else started.left(_END_S)
    return Outcome(code, log.read_text(errors="replace"), folder / "run", left)


def alone(fault: Fault, folder: Path, started: Started) -> tuple[Outcome, Outcome]:
    """A run that starts Ray; if the fault ends it, the same command again."""
    logs = [folder / f"stderr-{n}.txt" for n in (1, 2)]
    first = last = end_of(begin(folder, logs[0], STEPS), folder, logs[0], started)
    if fault.messages and first.code is not None:
        last = end_of(begin(folder, logs[1], STEPS), folder, logs[1], started)
    return first, last


def finished_steps(folder: Path) -> int:
    """The number of training steps in a run's metrics."""
    return max([row["step"] for row in read_metrics(folder)], default=0) if (folder / "metrics.jsonl").exists() else 0


def on_nodes(folder: Path, started: Started) -> tuple[Outcome, Outcome, int]:
    """A run on two nodes of which one is killed, and the same command on a cluster with another one.

    Also returns the number of training steps of the second command.
    """
    os.environ.update({**verl_cpu.environment(), "RAY_worker_register_timeout_seconds": "300"})
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 12, "num_gpus": 1, "object_store_memory": 300 << 20}
    logs = [folder / f"stderr-{n}.txt" for n in (1, 2)]
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        process = begin(folder, logs[0], MANY, "trainer.nnodes=2", address=cluster.address)
        limit = time.monotonic() + FIRST_STEP_S
        while process.poll() is None and finished_steps(folder / "run") < 1 and time.monotonic() < limit:
            time.sleep(0.2)
        if process.poll() is None and finished_steps(folder / "run") >= 1:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            (folder / "mark").touch()
        else:
            process.kill()
        first = last = end_of(process, folder, logs[0], None)
        steps = finished_steps(folder / "run") + 2
        if first.code is not None and (folder / "mark").exists():
            cluster.add_node(**node)
            again = begin(folder, logs[1], steps, "trainer.nnodes=2", address=cluster.address)
            last = end_of(again, folder, logs[1], None)
    finally:
        cluster.shutdown()
    return first, Outcome(last.code, last.said, last.folder, started.left(_END_S)), steps


def wrong_with(name: str, folder: Path) -> list[str]:
    """Do a run with the fault; returns the differences from the documented behaviour."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "team.py").write_text(TEAM.format(fault=name, mark=str(folder / "mark"), tasks=TASKS))
    fault, steps = FAULTS[name], STEPS
    with collecting() as started:
        if name == "node":
            first, last, steps = on_nodes(folder, started)
        else:
            first, last = alone(fault, folder, started)
    if not (folder / "mark").exists():
        return [f"the fault did not occur: {first.said[-500:]}"]
    wrong = ended_otherwise(first, fault.messages)
    if fault.messages and not wrong:
        wrong = ended_otherwise(last, ())
    wrong += [f"{end.left} processes are left" for end in dict.fromkeys((first, last)) if end.left]
    return wrong or complete(last, steps) or fault.counted(last)


def ended_otherwise(end: Outcome, messages: tuple[str, ...]) -> list[str]:
    """Compare the end of a command with the documented one: exit code 0, or 1 with a message and advice."""
    if end.code is None:
        return [f"hangs: {end.said[-500:]}"]
    if end.code != (1 if messages else 0):
        return [f"exit code {end.code}: {end.said[-500:]}"]
    if messages and not any(message in end.said for message in messages):
        return [f"none of the documented messages: {end.said[-500:]}"]
    return [] if not messages or _AGAIN in end.said else ["no advice to run the command again"]


def verdict(name: str, folder: Path) -> tuple[list[str], float]:
    """The differences of a run, and its seconds; a finished run is not repeated."""
    start_s = time.monotonic()
    wrong = wrong_with(name, folder)
    found = {"wrong": wrong, "seconds": time.monotonic() - start_s}
    write_whole(folder / _VERDICT, lambda path: path.write_text(json.dumps(found)))
    return wrong, found["seconds"]


def main() -> int:
    """Do the missing runs and print how many end as documented; 1 if one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs, with a killed server and training worker")
    quick = parser.parse_args().quick
    exit_on_sigterm()
    work, repeats = Work.begin("faults", MEASURES, quick=quick), 1 if quick else REPEATS
    names = ("server", "training worker") if quick else tuple(FAULTS)
    folders = {(name, n): work.folder / f"{name.replace(' ', '-')}-{n}" for n in range(repeats) for name in names}
    todo = [run for run, folder in folders.items() if not (folder / _VERDICT).exists()]
    progress = Progress(len(todo))
    for name, n in todo:
        wrong, seconds = verdict(name, folders[name, n])
        progress.report(f"{name}, run {n + 1}", "; ".join(wrong) or "as documented", seconds)
    wrongs = {run: json.loads((folder / _VERDICT).read_text())["wrong"] for run, folder in folders.items()}
    figures = [
        Figure(
            f"{name}: runs that end as documented", sum(not wrongs[name, n] for n in range(repeats)), repeats
        )
        for name in names
    ]  # fmt: skip
    figures.append(Figure("runs that end as documented", sum(not wrong for wrong in wrongs.values()), len(wrongs)))
    missed = show(figures)
    if not quick:
        runs = [{"fault": name, "run": n + 1, "differences": wrong} for (name, n), wrong in wrongs.items()]
        write("faults", figures, ("creditflow", "verl", "ray", "TransferQueue"), work.measured, {"runs": runs})
    return int(missed)


if __name__ == "__main__":
    exit_with(main)
