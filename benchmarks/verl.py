"""The cost of a training step on verl beside the models: `python -m benchmarks.verl [--quick]`.

Both sides take turns in one run; figures are medians of the turns' ratios. Ten minutes on two cores.

* The driver's part of a training step of 122,880 steps, from packed trajectories to advantages in rows, metrics and the
  step file, against verl's work on the same rows. Two functions of verl: `compute_grpo_outcome_advantage`, on padded
  rows in memory, against creditflow's work on trajectories in memory (credit, step file, metrics), and against
  everything that devices wait for (the step file and the metrics are made while devices update); and its trainer's
  `_compute_advantage`, which fetches, pads and puts rows (and passes only last rows to that function), against the
  whole driver's part. A dictionary in this process replaces TransferQueue on both sides.
* Bytes per step: packed with its trajectory, and as verl's row; the peak memory of the driver's part.
* Rates of the parts that run in a single process: a real TransferQueue on this machine, its polling, balancing.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from transfer_queue.utils.serial_utils import encode
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from benchmarks.processes import memory_of
from benchmarks.record import Figure, exit_with, quick_parser, show, write
from benchmarks.sources import hashes
from creditflow.config import credit_options
from creditflow.credit import assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.data import Score, Step, Task, Trajectory
from creditflow.data.table import pack
from creditflow.engines.common.metrics import step_metrics
from creditflow.engines.verl import rollouts as rollouts_module
from creditflow.engines.verl import rows as rows_module
from creditflow.engines.verl.agent_loop import step_output
from creditflow.engines.verl.rollouts import RolloutRecord, partition, take
from creditflow.engines.verl.rows import VerlRows, delete_rows, select
from creditflow.rewards import ScoringReport
from creditflow.rewards.manager import FunctionReport
from creditflow.runs import RunFolder

MEASURES = (
    "src/creditflow/credit",
    "src/creditflow/engines/verl",
    "src/creditflow/runs",
    "src/creditflow/monitoring/metrics.py",
    "src/creditflow/data/table.py",
    "src/creditflow/data/__init__.py",
)
TASKS, TRAJECTORIES, STEPS = 1024, 4, 30
PROMPT, RESPONSE = (100, 200), (20, 60)
"""Range of tokens."""
PACKAGES = ("creditflow", "verl", "TransferQueue", "ray", "torch", "tensordict", "numpy", "pyarrow", "numba")
OPTIONS = credit_options(propagation="threshold", adv_estimator="grpo")
POLICY = "default"
AT_ONCE = 16
"""Concurrent puts of trajectories."""


def main() -> int:
    """Measure, print, write `docs/results/verl.json`; 1 if a number falls short."""
    quick = quick_parser(__doc__, "an eighth of the tasks, fewer calls and repeats; writes nothing").parse_args().quick
    measured = hashes(MEASURES)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)  # "only two cores", every call

    tasks = TASKS // 8 if quick else TASKS
    _report(f"{tasks * TRAJECTORIES * STEPS:,} steps of {tasks * TRAJECTORIES:,} trajectories are made")
    queue, figures = made(tasks)
    figures += _driver(queue, repeats=3 if quick else 7)
    figures += _balancing(queue, repeats=1 if quick else 3)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        figures += _queue(queue, trajectories=64 if quick else 1024, repeats=1 if quick else 5)
    finally:
        ray.shutdown()
    missed = show(figures)
    if not quick:
        write("verl", figures, PACKAGES, measured, {"torch_threads": torch.get_num_threads()})
    return int(missed)


def _report(text: str) -> None:
    print(text, flush=True)


def _seconds(run: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _ratios(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(slower, faster, strict=True)]


# ---- trajectories --------------------------------------------------------------------------------------------------


class Words:
    """Text and tokens of a language of few common words and many rare ones; one word a token."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        letters = np.array(list("etaoinshrdlucmfw"))
        sizes = self.rng.integers(1, 8, 4096)
        self.texts = ["".join(self.rng.choice(letters, size)) for size in sizes]
        weight = 1 / (10 + np.arange(len(self.texts)))
        self.cumulated = np.cumsum(weight / weight.sum())

    def some(self, count: int) -> list[int]:
        """Draw `count` tokens."""
        drawn = np.searchsorted(self.cumulated, self.rng.random(count))
        return [int(token) for token in np.minimum(drawn, len(self.texts) - 1)]

    def text(self, ids: Sequence[int]) -> str:
        return " ".join([self.texts[i] for i in ids])


def trajectory_of(words: Words, system: list[int], question: list[int], group: int, session: int) -> Trajectory:
    """A scored trajectory of a planner, executors and a verifier. Each prompt contains most of the last response."""
    rng, uid = words.rng, f"0-1-{group}"
    name = f"{uid}-{session}"
    task = Task("synthetic", ({"role": "user", "content": words.text(question)},), str(group))
    right = rng.random() < 0.5
    values = np.clip(np.round(8 * ((0.7 if right else 0.45) + rng.normal(0.0, 0.25, STEPS))) / 8, 0.0, 1.0)
    said, steps = question, list[Step]()
    for i in range(STEPS):
        agent = "planner" if i == 0 else "verifier" if i == STEPS - 1 else "executor"
        length, room = (int(rng.integers(low, high + 1)) for low, high in (RESPONSE, PROMPT))
        said = (system + question + said)[-room:] if len(said) > room // 2 else said
        prompt = (system + question + words.some(max(0, room - len(system + question + said))) + said)[:room]
        response = words.some(length)
        logprobs = (-rng.exponential(0.3, length)).astype(np.float32).tolist()
        scores = {
            "checked": Score(float(values[i]), seconds=0.001 * rng.random(), version="5f0c1e7a"),
            "in_form": Score(1.0, weight=0.1, seconds=0.0001 * rng.random(), version="91d2b3c4"),
        }
        steps.append(
            Step(
                f"{name}/{i}", name, i, agent, max(0, i - 1) if agent == "executor" else 0, (i - 1,) if i else (),
                words.text(prompt), words.text(response), tuple(prompt), tuple(response), (1,) * length,
                tuple(logprobs), scores=scores,
            )
        )  # fmt: skip
        said = response
    outcome = Score(float(right), seconds=0.003, version="c0ffee00")
    return Trajectory(name, uid, task, steps, (STEPS - 1,), steps[-1].response, outcome)


def report_of(trajectory: Trajectory) -> ScoringReport:
    """The report of scoring the trajectory alone."""
    functions = [FunctionReport("answer", "outcome", 1, 0, 0.5, 0.003, (), calls=1)]
    for name in trajectory.steps[0].scores:
        functions.append(FunctionReport(name, "step", STEPS, 0, 0.7, 0.02, (), calls=STEPS))
    return ScoringReport(tuple(functions), 0.05)


class NestedPayloads(list[torch.Tensor]):
    """Payloads in TransferQueue's return format: a column with `unbind`."""

    def unbind(self) -> list[torch.Tensor]:
        """The payload of each trajectory."""
        return self


class Dictionary:
    """A replacement for `transfer_queue` where its cost is excluded: trajectories and columns in this process."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.tags: dict[str, dict[str, Any]] = {}
        self.payloads: list[torch.Tensor] = []
        self.columns: dict[str, torch.Tensor | NonTensorStack] = {}
        self.written: TensorDict | None = None
        self.rows = KVBatchMeta(partition_id="train")

    async def async_kv_put(self, key: str, partition_id: str, fields: Any, tag: dict[str, Any]) -> None:
        self.keys.append(key)
        self.tags[key] = tag
        self.payloads.append(fields["record"])

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return {partition_id: self.tags}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        if partition_id == "train":
            known = {name: self.columns[name] for name in select_fields if name in self.columns}
            return TensorDict(known, batch_size=len(keys))
        place = {key: i for i, key in enumerate(self.keys)}
        return {"record": NestedPayloads([self.payloads[place[key]] for key in keys])}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        pass

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.written = fields
        return self.rows


@contextmanager
def instead_of_queue(queue: Any, *modules: Any) -> Iterator[None]:
    """Replace TransferQueue with `queue` in `modules` for the duration of the context."""
    for module in modules:
        module.tq = queue
    try:
        yield
    finally:
        for module in modules:
            module.tq = tq


class Measured:
    """A replacement for `transfer_queue` in an agent-loop worker that measures the size of its rows."""

    def __init__(self) -> None:
        self.tensors = self.encoded = self.rows = 0
        self.tags: list[dict[str, Any]] = []

    async def async_kv_batch_put(self, keys: list[str], fields: TensorDict, tags: Any, partition_id: str) -> None:
        values = [value for value in fields.values() if isinstance(value, torch.Tensor)]
        self.tensors += sum(v.values().nbytes if v.is_nested else v.nbytes for v in values)
        self.encoded += sum(memoryview(frame).nbytes for frame in encode(dict(fields.items())))
        self.rows += len(keys)
        self.tags += tags


class RowWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's agent-loop worker for a model of text, without servers, reward workers and a teacher."""

    def __init__(self) -> None:
        self.processor = self.reward_loop_worker_handles = None
        self.distillation_enabled = False

    async def put_rows(self, trajectory: Trajectory, uid: str, session: int) -> None:
        """Make verl's rows of a trajectory and put them."""
        outputs = [step_output(trajectory, step, 1.0) for step in trajectory.steps]
        place = {"uid": uid, "session_id": session, "global_steps": 1, "index": 0}
        await self._agent_loop_postprocess(outputs, False, **place)


def made(tasks: int) -> tuple[Dictionary, list[Figure]]:
    """The workers' output for `tasks` tasks: trajectories, verl's rows of them, and their sizes."""
    words, queue = Words(), Dictionary()
    system = words.some(50)
    lengths, packing = list[int](), list[float]()
    measured, tags, worker = Measured(), list[dict[str, Any]](), RowWorker()
    for group in range(tasks):
        question, uid = words.some(30), uuid.UUID(bytes=words.rng.bytes(16), version=4).hex
        for session in range(TRAJECTORIES):
            trajectory = trajectory_of(words, system, question, group, session)
            start = time.perf_counter()
            record = RolloutRecord((group, session), pack(trajectory), report_of(trajectory))
            packing.append(time.perf_counter() - start)
            with instead_of_queue(queue, rollouts_module):
                asyncio.run(record.put(f"{uid}_{session}", partition(validate=False)))
            lengths += [len(step.response_ids) for step in trajectory.steps]
            tags += [_tag(step) for step in trajectory.steps]
            queue.rows.keys += [f"{uid}_{session}_{i}" for i in range(STEPS)]
            if session == group % TRAJECTORIES and group < 32:
                with instead_of_queue(measured, agent_loop_tq):
                    asyncio.run(worker.put_rows(trajectory, uid, session))
                assert measured.tags[-STEPS:] == tags[-STEPS:]
    queue.rows.tags = tags
    queue.columns = _columns(queue, np.array(lengths))
    packed = sum(payload.numel() for payload in queue.payloads)
    n_trajectories, n_steps = len(queue.payloads), len(lengths)
    return queue, [
        Figure("a trajectory, packed", packed / n_trajectories / 1e3, unit="kB"),
        Figure("a step in its trajectory, packed", packed / n_steps, unit="bytes"),
        Figure("a step as verl's row, tensors", measured.tensors / measured.rows, unit="bytes"),
        Figure("a step as verl's row, as TransferQueue encodes it", measured.encoded / measured.rows, unit="bytes"),
        Figure("packed steps, of verl's rows as encoded", packed / n_steps / (measured.encoded / measured.rows)),
        Figure("packing a trajectory, in the worker", median(packing) * 1e3, unit="ms"),
    ]


def _tag(step: Step) -> dict[str, Any]:
    """The tag of a row, as in verl's worker."""
    prompt, response = len(step.prompt_ids), len(step.response_ids)
    versions = {"global_steps": 1, "min_global_steps": 0, "max_global_steps": 0}
    return {
        "status": "success", "prompt_len": prompt, "response_len": response, "seq_len": prompt + response, **versions
    }  # fmt: skip


def _columns(queue: Dictionary, lengths: np.ndarray) -> dict[str, torch.Tensor | NonTensorStack]:
    """verl's columns of the rows in its trainer's format: jagged, with the reward at the last token."""
    offsets, n = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])), int(lengths.sum())
    rng = np.random.default_rng(0)
    rewards = np.zeros(n, dtype=np.float32)
    of_trajectory = rng.random(len(queue.payloads)) < 0.5
    rewards[offsets[1:].numpy() - 1] = np.repeat(of_trajectory, STEPS)
    logprobs = -rng.exponential(0.3, n).astype(np.float32)
    flat = {"response_mask": np.ones(n, dtype=np.int64), "rm_scores": rewards}
    flat |= {"rollout_log_probs": logprobs, "old_log_probs": logprobs}
    columns = {  # without the bounds, padded to all tokens
        name: torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(values), offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
        )
        for name, values in flat.items()
    }
    return {"uid": NonTensorStack(*["".join(key.split("_")[0]) for key in queue.rows.keys]), **columns}


# ---- the driver ----------------------------------------------------------------------------------------------------


class Clock:
    """Seconds of the parts of one run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class TimedFolder(RunFolder):
    """A run's folder that times the writing of the step file."""

    clock: Clock

    def write_steps(self, *args: Any) -> None:
        with self.clock.part("step file"):
            super().write_steps(*args)


PARTS = ("taking trajectories", "assign", "rows", "columns", "metrics", "step file")


def drive(queue: Dictionary, path: Path) -> Clock:
    """The driver's part of a training step, in the trainer's order, without the work of verl's workers."""
    clock, n = Clock(), len(queue.payloads)
    (path / "steps").mkdir(parents=True, exist_ok=True)
    folder = TimedFolder(path)
    folder.clock = clock
    threshold = OPTIONS.propagation.make_threshold()
    processor, where = time.process_time(), partition(validate=False)
    with clock.part("whole"), instead_of_queue(queue, rollouts_module, rows_module):
        with clock.part("taking trajectories"):
            trajectories = take(where, n, {key.split("_")[0] for key in queue.rows.keys})
            trajectories.expect_few_failures(0.1)
        with clock.part("assign"):
            assignment = assign(trajectories.batch, OPTIONS, threshold=threshold)
        with clock.part("rows"):
            columns = VerlRows(trajectories.steps_of_rows([POLICY]), trajectories.batch.token_offsets)
            step_R = columns.expect_all(queue.rows)
            trained = select(queue.rows, (assignment.groups.trained_S & assignment.batch.sampled_by(POLICY))[step_R])
            if len(trained) < len(queue.rows):
                delete_rows(queue.rows, keep=trained.keys)
        with clock.part("columns"):
            threshold.update(batch_stats(assignment))
            columns.put(trained, assignment)
        with clock.part("recording"):
            folder.write_steps(1, trajectories.batch, assignment)
            metrics = trajectories.metrics() | step_metrics(
                trajectories.batch, trajectories.report, assignment, threshold
            )
    clock.seconds["processor"] = time.process_time() - processor
    clock.seconds["metrics"] = clock.seconds["recording"] - clock.seconds["step file"]
    _check(queue, assignment, metrics)
    return clock


def _check(queue: Dictionary, assignment: Any, metrics: Mapping[str, float]) -> None:
    if not 0.2 < metrics["propagation/pass_rate"] < 0.8:
        raise RuntimeError(f"{metrics['propagation/pass_rate']:.0%} of the gates are open: that tries no threshold")
    assert queue.written is not None
    assert queue.written["advantages"].values().shape == assignment.batch.response_ids.shape


class Advantages(PPOTrainerSync):  # type: ignore[misc]
    """verl's trainer with its configuration alone, which suffices for its advantages."""

    def __init__(self, config: Any) -> None:
        self.config = config


class VerlTrainerInput:
    """The input of verl's trainer for the same steps."""

    def __init__(self, queue: Dictionary) -> None:
        self.queue = queue
        tensors = {name: queue.columns[name] for name in ("rm_scores", "response_mask")}
        padded = TensorDict(tensors, batch_size=len(queue.rows)).to_padded_tensor()
        self.rewards, self.mask = padded["rm_scores"], padded["response_mask"]
        self.uid = np.array(queue.columns["uid"].tolist(), dtype=object)
        algorithm = {
            "use_kl_in_reward": False, "rollout_correction": None, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0,
            "norm_adv_by_std_in_grpo": True,
        }  # fmt: skip
        config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": TRAJECTORIES}}})
        self.trainer = Advantages(config)

    def grpo(self) -> None:
        """Run verl's function on all rows."""
        core_algos.compute_grpo_outcome_advantage(self.rewards, self.mask, self.uid)

    def whole(self) -> None:
        """Run the trainer's method: fetch and pad rows, compute advantages of last rows, spread and put them."""
        with instead_of_queue(self.queue, trainer_base):
            self.trainer._compute_advantage(self.queue.rows, {})


def _driver(queue: Dictionary, repeats: int) -> list[Figure]:
    n_trajectories, n_steps = len(queue.payloads), len(queue.rows)
    _report(f"the driver's part of {n_steps:,} steps, {repeats} turns")
    theirs = VerlTrainerInput(queue)
    clocks, taken = list[Clock](), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        assign(first_trajectories(queue, folder), OPTIONS)  # compiled before memory is measured
        memory = _grown(lambda: drive(queue, Path(folder)))
        for turn in range(-1, repeats):
            runs = {
                "grpo": theirs.grpo,
                "ours": lambda: clocks.append(drive(queue, Path(folder))),
                "whole": theirs.whole,
            }
            for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:  # each side meets memory of the other
                seconds = _seconds(run)
                if turn >= 0:
                    taken[name].append(seconds)
        written = (Path(folder) / "steps" / "000001.parquet").stat().st_size
    ours = {name: [clock.seconds[name] for clock in clocks[1:]] for name in ("whole", "processor", "recording", *PARTS)}
    credit = [a + b for a, b in zip(ours["assign"], ours["columns"], strict=True)]
    waited = [a - b for a, b in zip(ours["whole"], ours["recording"], strict=True)]
    named = [a + b for a, b in zip(credit, ours["recording"], strict=True)]
    grpo, whole = taken["grpo"], taken["whole"]
    return [
        Figure.from_values("driver, ours", ours["whole"], unit="s"),
        *(Figure.from_values(f"driver, ours: {part}", [s * 1e3 for s in ours[part]], unit="ms") for part in PARTS),
        Figure.from_values("driver, ours: processor time", ours["processor"], unit="s"),
        Figure.from_values("before the update", waited, unit="s"),
        Figure.from_values("verl's grpo on every row", grpo, unit="s"),
        Figure.from_values("verl's _compute_advantage on last rows, fetched, padded, spread, put", whole, unit="s"),
        Figure.from_values(
            "verl's grpo on every row / credit, step file and metrics", _ratios(grpo, named), 1.0, unit="x"
        ),
        Figure.from_values("verl's grpo on every row / what devices wait for", _ratios(grpo, waited), 1.0, unit="x"),
        Figure.from_values("verl's grpo on every row / driver, ours", _ratios(grpo, ours["whole"]), unit="x"),
        Figure.from_values("verl's grpo on every row / assign and columns", _ratios(grpo, credit), unit="x"),
        Figure.from_values("verl's _compute_advantage / driver, ours", _ratios(whole, ours["whole"]), 1.0, unit="x"),
        Figure.from_values("verl's _compute_advantage / assign and columns", _ratios(whole, credit), unit="x"),
        Figure.from_values(
            "propagation (the whole of assign)", [s * 1e3 for s in ours["assign"]], 100, at_most=True, unit="ms"
        ),
        Figure.from_values("driver, trajectories/s", [n_trajectories / s for s in ours["whole"]]),
        Figure.from_values("driver, steps/s", [n_steps / s for s in ours["whole"]]),
        Figure("memory, driver's part at its largest", memory / 1e6, unit="MB"),
        Figure("step file", written / 1e6, unit="MB"),
    ]


def first_trajectories(queue: Dictionary, folder: str) -> Any:
    """A small batch of the same trajectories."""
    few = Dictionary()
    few.keys, few.payloads = queue.keys[:8], queue.payloads[:8]
    few.tags = {key: queue.tags[key] for key in few.keys}
    few.rows = KVBatchMeta(keys=queue.rows.keys[: 8 * STEPS], tags=queue.rows.tags[: 8 * STEPS], partition_id="train")
    with instead_of_queue(few, rollouts_module):
        return take(partition(validate=False), 8).batch


def _grown(run: Callable[[], object]) -> int:
    """Peak growth of the process in bytes during `run`."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    before = memory_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return memory_of("VmHWM") - before


def _balancing(queue: Dictionary, repeats: int) -> list[Figure]:
    """verl's balancing of rows over ranks, before any computation; with a tensor, as in verl, or a list."""
    workloads = calculate_workload(torch.tensor([tag["seq_len"] for tag in queue.rows.tags]))
    figures = []
    for ranks in (8, 64):
        for given, what in ((workloads, "as verl calls it"), (workloads.tolist(), "as we call it")):
            run = partial(get_seqlen_balanced_partitions, given, ranks, equal_size=True)
            seconds = [_seconds(run) for _ in range(repeats)]
            figures.append(Figure.from_values(f"verl's balancing over {ranks} ranks, {what}", seconds, unit="s"))
    return figures


# ---- TransferQueue -------------------------------------------------------------------------------------------------


def _queue(queue: Dictionary, trajectories: int, repeats: int) -> list[Figure]:
    """Measure a real TransferQueue, with two storage units, on this machine."""
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}))
    try:
        return [*_through(queue, trajectories, repeats), *_polled(queue, repeats)]
    finally:
        tq.close()


def _through(queue: Dictionary, n_trajectories: int, repeats: int) -> list[Figure]:
    _report(f"{n_trajectories:,} trajectories through TransferQueue")
    where, keys = partition(validate=False), queue.keys[:n_trajectories]
    payloads = queue.payloads[:n_trajectories]
    megabytes = sum(payload.numel() for payload in payloads) / 1e6
    puts, gets, takes = list[float](), list[float](), list[float]()
    for turn in range(-1, repeats):
        put = _seconds(lambda: asyncio.run(_put_all(keys, payloads, where)))
        get = _seconds(lambda: tq.kv_batch_get(keys=keys, partition_id=where, select_fields=["record"]))
        taken = _seconds(partial(_taken, where, n_trajectories))
        if turn >= 0:
            puts, gets, takes = [*puts, put], [*gets, get], [*takes, taken]
    return [
        Figure.from_values(
            f"trajectories/s put by one worker, {AT_ONCE} at a time", [n_trajectories / s for s in puts]
        ),
        Figure.from_values("the same, in bytes", [megabytes / s for s in puts], unit="MB/s"),
        Figure.from_values("trajectories/s fetched by the driver", [n_trajectories / s for s in gets]),
        Figure.from_values("the same, in bytes", [megabytes / s for s in gets], unit="MB/s"),
        Figure.from_values("trajectories/s listed, fetched, unpacked and cleared", [n_trajectories / s for s in takes]),
        *_rows_through(queue, min(n_trajectories, 64)),
    ]


async def _put_all(keys: Sequence[str], payloads: Sequence[torch.Tensor], where: str) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def put(key: str, payload: torch.Tensor) -> None:
        async with limit:
            await pickle.loads(payload.numpy().tobytes()).put(key, where)

    await asyncio.gather(*(put(key, payload) for key, payload in zip(keys, payloads, strict=True)))


def _taken(where: str, n_trajectories: int) -> None:
    assert take(where, n_trajectories).batch.n_trajectories == n_trajectories


def _rows_through(queue: Dictionary, n_trajectories: int) -> list[Figure]:
    """verl's rows of as many trajectories, made and put by verl's code, one trajectory after the other."""
    words, worker = Words(1), RowWorker()
    system, question = words.some(50), words.some(30)
    trajectories = [trajectory_of(words, system, question, 0, i) for i in range(n_trajectories)]

    async def put_all() -> list[float]:
        taken = []
        for i, trajectory in enumerate(trajectories):
            start = time.perf_counter()
            await worker.put_rows(trajectory, "rows", i)
            taken.append((time.perf_counter() - start) * 1e3)
        return taken

    taken = asyncio.run(put_all())
    tq.kv_clear(keys=[f"rows_{i}_{k}" for i in range(n_trajectories) for k in range(STEPS)], partition_id="train")
    return [Figure.from_values(f"verl's {STEPS} rows of a trajectory, made and put by one worker", taken, unit="ms")]


def _polled(queue: Dictionary, repeats: int) -> list[Figure]:
    """The poll of verl's replay buffer, once all rows and trajectories exist."""
    rows, prompts = queue.rows, sorted({key.split("_")[0] for key in queue.rows.keys})
    finished = {"is_prompt": True, "status": "finished", "global_steps": 1}
    tq.kv_batch_put(keys=rows.keys, partition_id="train", tags=rows.tags)
    tq.kv_batch_put(keys=prompts, partition_id="train", tags=[finished] * len(prompts))
    without = [_polling() for _ in range(repeats)]
    trajectories = partition(validate=False)
    tq.kv_batch_put(keys=queue.keys, partition_id=trajectories, tags=[queue.tags[key] for key in queue.keys])
    figures = [Figure.from_values(f"verl's poll at {len(rows) + len(prompts):,} keys", without, unit="ms")]
    n_keys = len(rows) + len(prompts) + len(queue.keys)
    polls = [_polling() for _ in range(repeats)]
    figures.append(Figure.from_values(f"verl's poll at {n_keys:,} keys, trajectories among them", polls, unit="ms"))
    lists = [_seconds(tq.kv_list) * 1e3 for _ in range(repeats)]
    figures.append(Figure.from_values(f"of it, kv_list of {n_keys:,} keys", lists, unit="ms"))
    return figures


def _polling() -> float:
    buffer = ReplayBuffer("sync", OmegaConf.create(), None, "drop", OmegaConf.create())
    seconds = _seconds(buffer._sync_metadata_from_transfer_queue)
    return seconds * 1e3


if __name__ == "__main__":
    exit_with(main)
