"""The control flow of the distributed engine: verl's trainer with creditflow's credit instead of verl's advantages.

verl generates, computes log-probs and values, and updates. creditflow's workers run and score rollouts (`agent_loop`).
This module orders these stages, computes credit from whole trajectories with the same code as every engine, and writes
the records.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import transfer_queue as tq
import zmq
from omegaconf import open_dict
from ray.exceptions import RayActorError
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from creditflow._utils.files import write_whole
from creditflow.credit import Assignment, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.data import TrajectoryBatch
from creditflow.data.table import batch_of, table_of
from creditflow.engines.common.components import load_functions
from creditflow.engines.common.guard import build_guard, control_state, load_control_state, run_guard
from creditflow.engines.common.metrics import staleness_metrics, step_metrics, update_threshold, val_metrics
from creditflow.engines.common.run import FINISHED
from creditflow.engines.verl.buffer import RolloutBuffer
from creditflow.engines.verl.options import MODES
from creditflow.engines.verl.policies import policy_configs, rollout_devices
from creditflow.engines.verl.policy_trainer import PartnerPolicy, PolicyTrainer
from creditflow.engines.verl.recipe import NAME, STATE, TRAINER_PREFIX, read_run_handle
from creditflow.engines.verl.rollouts import RolloutRecords, expect_no_mistake, partition, tags_in, take
from creditflow.engines.verl.rows import VerlRows, concatenate_rows, delete_rows, delete_unfinished, numbers, select
from creditflow.engines.verl.servers import DEAD_SERVER
from creditflow.errors import ConfigError, CreditflowError, TooManyFailedScores, first_line
from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.guard import GuardAction
from creditflow.monitoring.memory import forget_peak, peak_gib
from creditflow.monitoring.notices import failure_events, rollout_events
from creditflow.rewards.manager import expect_few_failures
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import log_failures, read_metrics, rollbacks

_CORES_A_DEVICE, _CORES_A_ROLLOUT_DEVICE = ResourcePoolManager.max_colocate_count, 2
"""verl's numbers; the second for devices of rollouts alone (`RolloutReplica.init_standalone`)."""
_CORES_BESIDE = 2
"""Cores for the driver and the start of further actors."""


class CreditflowTrainer(PolicyTrainer):
    """The run: rollouts, credit, updates of every trained policy, validation, checkpoints, records.

    A mix-in, as `PolicyTrainer`.
    """

    replay_buffer: RolloutBuffer

    def __init__(self, config: Any) -> None:
        run = read_run_handle(config)
        with open_dict(config):  # verl compares the mode's name in several places
            config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(TRAINER_PREFIX)
        configs = policy_configs(config, run.config)
        lead = next(iter(configs))
        expect_cores(config)
        self._partner_configs = {name: section for name, section in configs.items() if name != lead}
        self.partners: list[PartnerPolicy] = []
        super().__init__(configs[lead], lead, place=0)
        self.folder = RunFolder(run.run_folder)
        self.threshold = run.config.credit.propagation.make_threshold(tuple(run.config.team.agents))
        self.history = History()
        self.guard = build_guard(run.config, run.recipe.folder, load_functions(run.recipe), NAME)
        rollout = run.config.actor_rollout_ref.rollout
        self.replay_buffer = RolloutBuffer.from_replay_buffer(
            self.replay_buffer,
            self._expect_workers,
            rollout.min_complete_frac,
            config.data.train_batch_size * rollout.n,
        )
        self._own_metrics: dict[str, float] = {}
        self._rollbacks = len(rollbacks(run.run_folder))

    @property
    def trainers(self) -> list[PolicyTrainer]:
        """The trainers of all trained policies."""
        return [self, *self.partners]

    # Overrides of verl's hooks: setup, weights, checkpoints.

    def _expect_workers(self) -> None:
        self.agent_loop_manager.expect_alive()
        if self.trainer_mode != "sync":  # a group that failed may be replaced before anyone takes its records
            expect_no_mistake(tags_in(partition(validate=False)).values())

    def on_init_end(self) -> None:
        """Set up the other policies, and send all weights to the servers."""
        for place, (name, config) in enumerate(self._partner_configs.items(), start=1):
            checkpoint = self._checkpoint() / "policies" / name
            partner = PARTNERS[self.trainer_mode](config, name, place, self.global_steps, checkpoint)
            partner.init()
            self.partners.append(partner)
        with expect_live_servers():
            super().on_init_end()

    def get_llm_client(self) -> dict[str, tuple[Any, Any]]:
        """Each trained policy's client and the section of its model in verl's configuration."""
        return {t.policy: (t.policy_client(), t.config.actor_rollout_ref.model) for t in self.trainers}

    def _call_hook(self, hook: str) -> None:
        """Run verl's `hook` for every trained policy."""
        with expect_live_servers():
            getattr(super(), hook)()
            for partner in self.partners:
                # The leader has timers from the first step on.
                partner.global_steps, partner.timing_raw = self.global_steps, getattr(self, "timing_raw", {})
                getattr(partner, hook)()

    def _checkpoint(self) -> Path:
        return Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{self.global_steps}"

    def _save_checkpoint(self) -> None:
        folder = self._checkpoint()
        folder.mkdir(parents=True, exist_ok=True)
        for partner in self.partners:
            partner.save(folder / "policies" / partner.policy)
        self._save_state(folder)
        super()._save_checkpoint()  # last, because it marks the checkpoint as complete

    def _save_state(self, folder: Path) -> None:
        state = control_state(self.threshold, self.guard, self.history) | {"trainer_mode": self.trainer_mode}
        write_whole(folder / STATE, lambda path: path.write_text(json.dumps(state) + "\n"))

    def _save_state_again(self) -> None:
        """Rewrite the state of this step's checkpoint, which was saved before all results existed."""
        if self.global_steps > 0 and (folder := self._checkpoint()).is_dir():
            self._save_state(folder)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        state = json.loads((self._checkpoint() / STATE).read_text())
        if (mode := state.get("trainer_mode", "sync")) != self.trainer_mode:
            raise CreditflowError(
                f"{self._checkpoint()}: trainer.v1.trainer_mode: expected {mode}, as the run began, because the "
                f"checkpoint holds unfinished rollouts of that mode; got {self.trainer_mode}"
            )
        if mode != "sync":
            delete_unfinished(partition(validate=False))
        self.history = load_control_state(state, self.threshold, self.guard)
        last, every = self.global_steps >= self.total_training_steps, self.config.trainer.test_freq
        due = every > 0 and (last or self.global_steps % every == 0)
        done = any("val/pass_at_1" in row for row in read_metrics(self.folder.path) if row["step"] == self.global_steps)
        with open_dict(self.config):  # a run may have been killed between its checkpoint and its validation
            self.config.trainer.val_before_train = due and not done

    # One training step.

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        """Collect rollouts, assign credit, update every policy, record. Returns the trained rows."""
        with marked_timer("gen", timing_raw, color="red"):
            self.on_sample_begin()
            rows, rollouts = self._collect(metrics, sample_batch_size)
            self.on_sample_end()
        batch = rollouts.batch
        with marked_timer("propagation", timing_raw):
            # The selection of trained steps does not depend on the critic's values, which are computed later.
            values_T = np.zeros(int(batch.token_offsets[-1])) if self.use_critic else None
            options, threshold = self.guard.options(self.run.config.credit), self.guard.threshold(self.threshold)
            assignment = assign(batch, options, values_T=values_T, threshold=threshold, history=self.history)
        policies = [trainer.policy for trainer in self.trainers]
        columns = VerlRows(rollouts.steps_of_rows(policies), batch.token_offsets)
        step_R = columns.expect_all(rows)
        for trainer in self.trainers:
            trainer.begin(rows, step_R, assignment)
            if values_T is not None:  # an untrained step may follow a trained one, which then needs its values
                untrained_S = batch.sampled_by(trainer.policy) & ~assignment.groups.trained_S
                trainer.fill_values(columns, select(rows, untrained_S[step_R]), values_T)
        trained = [trainer for trainer in self.trainers if len(trainer.rows)]
        if sum(len(trainer.rows) for trainer in trained) < len(rows):
            delete_rows(rows, keep=[key for trainer in trained for key in trainer.rows.keys])
        for trainer in trained:
            trainer.prepare(timing_raw)
        with marked_timer("adv", timing_raw, color="brown"):
            if values_T is not None:
                for trainer in trained:
                    columns.values(trainer.rows, values_T)
            if self.config.algorithm.use_kl_in_reward:
                batch = _with_kl_penalty(batch, trained, columns)
            if values_T is not None or batch is not rollouts.batch:
                assignment = assign(batch, options, values_T=values_T, threshold=threshold, history=self.history)
            self.threshold.update(batch_stats(assignment))
            self.history = assignment.history_after
            for trainer in trained:
                trainer.put(columns, assignment)
        with ThreadPoolExecutor(1, "ledger") as beside:  # the record is final, so it is written during the update
            recording = beside.submit(self._record, rollouts, assignment)
            for trainer in trained:
                trainer.update(columns, timing_raw, self.global_steps)
                prefix = f"{trainer.policy}/" if self.partners else ""
                metrics.update({f"{prefix}{name}": value for name, value in trainer.metrics.items()})
            with marked_timer("ledger", timing_raw):
                recording.result()
        if not trained:
            raise CreditflowError(
                f"training step {self.global_steps}: no step of {batch.n_trajectories} trajectories can be trained "
                "on: each one failed, was masked, or sampled nothing"
            )
        return concatenate_rows(trainer.rows for trainer in trained)

    def _collect(self, metrics: dict[str, Any], n_tasks: int) -> tuple[KVBatchMeta, RolloutRecords]:
        """Collect verl's rows of `n_tasks` tasks, and their rollouts.

        Raises CreditflowError with the first reason if too many rollouts failed, and TooManyFailedScores.
        """
        buffer = self.replay_buffer
        rows, sampling_metrics = buffer.sample(self.global_steps, "train", n_tasks)
        metrics.update(sampling_metrics)
        expected = len(buffer.selected) * self.run.config.actor_rollout_ref.rollout.n
        rollouts = take(partition(validate=False), expected, buffer.selected, buffer.unfinished)
        try:
            self._expect_few_failures(rollouts, validation=False)
        except TooManyFailedScores:
            self.folder.write_steps(self.global_steps, rollouts.batch)  # the evidence
            raise
        return rows, rollouts

    def _expect_few_failures(self, rollouts: RolloutRecords, *, validation: bool) -> None:
        """Raise CreditflowError if too many rollouts or scores failed.

        Tracebacks go to the run folder.
        """
        infos = list(zip(rollouts.batch.trajectory_ids, rollouts.batch.trajectory_info, strict=True))
        self.folder.append_failures(self.global_steps, infos)
        try:
            rollouts.expect_few_failures(self.run.config.actor_rollout_ref.rollout.max_failed_frac)
            past = self.folder.events()
            events = rollout_events(rollouts.batch, self.global_steps, past, validation=validation)
            events += failure_events(rollouts.report, self.global_steps, past)
            self.folder.append_events(event.to_dict() for event in events)
            expect_few_failures(rollouts.report, self.run.config.reward.max_failed_frac)
        except CreditflowError as error:
            log_failures(error, self.folder, self.global_steps, infos)
            raise

    # Records.

    def _record(self, rollouts: RolloutRecords, assignment: Assignment) -> None:
        """Write the step file and keep the step's metrics for `_compute_metrics`."""
        self.folder.write_steps(self.global_steps, assignment.batch, assignment)
        self._own_metrics = rollouts.metrics() | step_metrics(
            rollouts.batch, rollouts.report, assignment, self.guard.threshold(self.threshold)
        )
        if self.trainer_mode != "sync":
            trained = dict.fromkeys(rollouts.batch.policy_names, self.global_steps - 1)
            self._own_metrics |= staleness_metrics(rollouts.batch, trained)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        metrics.update(self._own_metrics)
        update_s = sum(timing_raw.get(name, 0.0) for name in ("update_critic", "update_actor"))
        timing_raw = {"update": update_s, **timing_raw}
        metrics.update({f"timing/{_TIMING.get(name, name)}_s": seconds for name, seconds in timing_raw.items()})
        metrics["throughput/trainer_idle_frac"] = timing_raw.get("gen", 0.0) / timing_raw["step"]
        for name in ("actor", "critic") if self.use_critic else ("actor",):
            norms = [value for key, value in metrics.items() if key.endswith(f"{name}/grad_norm")]
            skipped = sum(not math.isfinite(norm) for norm in norms)  # by verl's optimizer
            metrics[f"{name}/skipped_updates"] = float(skipped)
        metrics["memory/peak_gib"] = peak_gib()
        forget_peak()
        self._run_guard(metrics, training=True)

    def _run_guard(self, metrics: dict[str, Any], *, training: bool) -> None:
        """Run the guard on the metrics of a training step or an evaluation, and record both.

        Raises GuardAction with an event that the launcher must act on.
        """
        _, action = run_guard(self.guard, self.global_steps, numbers(metrics), self.folder)
        self._save_state_again()
        if training:
            metrics.update(self.guard.metrics() | {"guard/rollbacks": float(self._rollbacks)})
        self.folder.append_metrics(self.global_steps, numbers(metrics))
        if action is not None:
            raise GuardAction(action)

    def _validate(self) -> dict[str, float]:
        """Run the validation tasks as `rollout.val_kwargs` configures, and once greedily."""
        kwargs = self.run.config.actor_rollout_ref.rollout.val_kwargs
        sampling = kwargs.do_sample and kwargs.temperature > 0
        n = kwargs.n if sampling else 1
        greedy = self._evaluation_trajectories(1, greedy=True)
        sampled = self._evaluation_trajectories(n, greedy=False) if sampling else greedy
        evaluation = Evaluation.from_batches(sampled, greedy, n)
        metrics = val_metrics(evaluation)
        if self.config.trainer.log_val_generations:
            trajectories = sampled.to_trajectories()
            texts = ["\n".join(f"{step.agent}: {step.response}" for step in each.steps) for each in trajectories]
            tasks = [each.task.text for each in trajectories]
            self._maybe_log_val_generations(tasks, texts, sampled.outcome.tolist())
        if not hasattr(self, "timing_raw"):  # before the first training step, to whose metrics verl would add them
            self._run_guard(metrics, training=False)
        if self.global_steps == 0:
            return metrics
        update_threshold(self.threshold, evaluation)
        self._save_state_again()
        if self.global_steps >= self.total_training_steps:
            self.agent_loop_manager.close()
            self.folder.write_text(FINISHED, evaluation.to_json())  # the last file: the run is finished
        return metrics

    def _evaluation_trajectories(self, n: int, greedy: bool) -> TrajectoryBatch:
        """Sample `n` scored rollouts of each validation task."""
        parts = []
        for rows in self.val_dataloader:
            size = len(rows["raw_prompt"])
            uids = [uuid.uuid4().hex for _ in range(size)]
            own = {"uid": uids, "greedy": [greedy] * size, "__rollout_n__": [n] * size}
            batch = tu.get_tensordict(rows | {name: np.array(of, dtype=object) for name, of in own.items()})
            tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
            tu.assign_non_tensor_data(batch, "validate", True)
            tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps}] * size
            tq.kv_batch_put(keys=uids, partition_id="val", tags=tags)
            self.agent_loop_manager.generate_sequences(batch)
            self.replay_buffer.sample(global_steps=self.global_steps, partition_id="val", batch_size=size)
            rollouts = take(partition(validate=True), size * n, set(uids))
            if rollouts.lost:
                raise CreditflowError(
                    f"{rollouts.lost} of {rollouts.expected} validation trajectories left no record; Ray's logs say why"
                )
            self._expect_few_failures(rollouts, validation=True)
            parts.append(rollouts.batch)
        return batch_of(pa.concat_tables([table_of(part) for part in parts]).unify_dictionaries())


BASES = dict(zip(MODES, (PPOTrainerSync, PPOTrainerColocateAsync, PPOTrainerSeparateAsync), strict=True))
"""verl's trainer of each mode."""
PARTNERS = {mode: type(PartnerPolicy.__name__, (PartnerPolicy, base), {}) for mode, base in BASES.items()}
_HOOKS = [f"on_{what}_{when}" for what in ("step", "sample", "validate") for when in ("begin", "end")]
"""verl's hooks that run for every trained policy."""
for _mode, _base in BASES.items():
    _hooks = {hook: partialmethod(CreditflowTrainer._call_hook, hook) for hook in _HOOKS}
    register_trainer(TRAINER_PREFIX + _mode)(type(CreditflowTrainer.__name__, (CreditflowTrainer, _base), _hooks))


class TaskRunner(TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc]
    """verl's task runner. Its process imports this module, which registers the trainers."""


_TIMING = {"gen": "rollout", "adv": "advantage"}
"""The local engine's names for verl's timers of the same measurement."""


def expect_cores(config: Any) -> None:
    """Raise ConfigError if Ray has too few cores for verl's worker groups, which would wait forever."""
    devices, of_rollouts = config.trainer.n_gpus_per_node * config.trainer.nnodes, rollout_devices(config)
    needed = _CORES_A_DEVICE * devices + _CORES_A_ROLLOUT_DEVICE * of_rollouts + _CORES_BESIDE
    available = ray.cluster_resources().get("CPU", 0)
    if available < needed:
        raise ConfigError(
            f"ray_kwargs.ray_init.num_cpus: Ray counts {available:g} cores; verl asks for {needed}: {_CORES_A_DEVICE} "
            f"for each of {devices} devices, {_CORES_A_ROLLOUT_DEVICE} for each of {of_rollouts} more for rollouts, "
            f"{_CORES_BESIDE} beside"
        )


def _with_kl_penalty(batch: TrajectoryBatch, trainers: Sequence[PolicyTrainer], columns: VerlRows) -> TrajectoryBatch:
    """The batch with outcomes that contain verl's KL penalty, summed over the trained tokens of the trajectory."""
    penalty_T = np.zeros(int(batch.token_offsets[-1]))
    for trainer in trainers:
        trainer.fill_kl_penalty(columns, penalty_T)
    penalty_S = np.diff(np.append(0.0, np.cumsum(penalty_T))[batch.token_offsets])
    penalty_N = np.bincount(batch.trajectory_of_step, penalty_S, batch.n_trajectories)
    return replace(batch, outcome=batch.outcome + penalty_N)


@contextmanager
def expect_live_servers() -> Iterator[None]:
    """Raise CreditflowError if a rollout server died or stopped responding inside the block."""
    try:
        yield
    except (RayActorError, zmq.Again) as error:  # Again: a server did not take its weights in time
        raise CreditflowError(DEAD_SERVER.format(cause=first_line(error))) from error
