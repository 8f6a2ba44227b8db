"""The control flow of the distributed engine: verl's trainer with creditflow's credit instead of verl's advantages.

verl generates, computes log-probs and values, and updates. creditflow's workers run and score rollouts (`agent_loop`).
This module orders these stages, computes credit from whole trajectories with the same code as every engine, and writes
the records.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from ray.exceptions import RayActorError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

from creditflow._utils.files import write_whole
from creditflow.credit import Assignment, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.data import Bools, Floats, TrajectoryBatch
from creditflow.data.curriculum import Curriculum
from creditflow.data.table import batch_of, table_of
from creditflow.engines.common.checkpoints import folder_of, remove_later, saved_steps
from creditflow.engines.common.components import build_curriculum, load_functions, restore_curriculum
from creditflow.engines.common.guard import build_guard, control_state, load_control_state, roll_back, run_guard
from creditflow.engines.common.metrics import staleness_metrics, step_metrics, update_threshold, val_metrics
from creditflow.engines.common.run import FINISHED
from creditflow.engines.verl.dataset import CurriculumLoader
from creditflow.engines.verl.options import MODES
from creditflow.engines.verl.policies import policy_configs, rollout_devices
from creditflow.engines.verl.policy_servers import (
    PolicyWorker,
    SeparatePolicyWorker,
    assign_servers,
    servers_of_policy,
)
from creditflow.engines.verl.recipe import NAME, read_run_handle
from creditflow.engines.verl.rollouts import (
    SERVERS_IDLE_S,
    ReceivedRecords,
    RolloutRecords,
    expect_no_mistake,
    partition,
    take,
)
from creditflow.engines.verl.rows import VerlRows, concatenate_rows, delete_rows, delete_unfinished, select, write
from creditflow.engines.verl.versions import VersionedClient
from creditflow.errors import ConfigError, CreditflowError, TooManyFailedScores, first_line
from creditflow.monitoring import Evaluation, GuardEvent
from creditflow.monitoring.guard import RolledBack
from creditflow.monitoring.memory import forget_peak, peak_gib
from creditflow.monitoring.notices import failure_events, rollout_events
from creditflow.rewards.manager import expect_few_failures
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import log_failures, read_metrics, rollbacks

_STATE = "creditflow.json"
"""The file with creditflow's state in a verl checkpoint."""
_LATEST = "latest_checkpointed_iteration.txt"
"""verl's file that names the newest checkpoint."""
_CORES_A_DEVICE = ResourcePoolManager.max_colocate_count
_CORES_A_ROLLOUT_DEVICE = 2
"""verl's number for devices of `separate_async` (`RolloutReplica.init_standalone`)."""
_CORES_BESIDE = 2
"""Cores for the driver and the start of further actors."""
_MOST_POLL_S = 2.0
_ROLLOUTS_PER_SECOND = 2000.0
"""Rollouts per second of polling interval, so that polling does not keep TransferQueue busy."""


TRAINER_PREFIX = "creditflow_"
"""The prefix of the trainers' names in verl's registry, before that of the mode."""


class PolicyTrainer(PPOTrainer):  # type: ignore[misc]
    """The verl workers, servers, reference and critic of one trained policy.

    A mix-in of verl's trainers, of one of which (`BASES`) each concrete class inherits. `place`: the index of the
    policy among the trained ones, from 0.
    """

    def __init__(self, config: Any, policy: str, place: int) -> None:
        self.policy, self.run = policy, read_run_handle(config)
        self.mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
        with open_dict(config):
            assign_servers(config.actor_rollout_ref.rollout, policy, place, self.run.token)
            if config.trainer.v1.trainer_mode == "separate_async":  # verl would have one update per mini-batch
                config.actor_rollout_ref.actor.ppo_mini_batch_size = config.data.train_batch_size
        super().__init__(config)
        self._n_rows = self._n_ranks = self._n_updates = 0

    def _setup(self) -> None:
        with servers_of_policy(self.config.actor_rollout_ref.rollout.name):
            super()._setup()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        own_worker = SeparatePolicyWorker if self.trainer_mode == "separate_async" else PolicyWorker
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(own_worker)
        # Ray identifies placement groups by name, and verl uses the same names for every policy and run.
        own = f"{self.policy}_{self.run.token}"
        pools = {f"{own}_{pool}": spec for pool, spec in self.resource_pool_manager.resource_pool_spec.items()}
        self.mapping: dict[Any, str] = {role: f"{own}_{pool}" for role, pool in self.mapping.items()}
        self.resource_pool_manager: ResourcePoolManager = ResourcePoolManager(pools, self.mapping)

    def get_llm_client(self) -> Any:
        """The client of the policy's servers; in asynchronous modes, of one that notes versions."""
        if self.trainer_mode == "sync":
            return super().get_llm_client()
        separate = self.trainer_mode == "separate_async"
        servers = self.standalone_server_manager if separate else self.llm_server_manager
        return servers.get_client(client_cls=VersionedClient)

    def prepare(self, rows: KVBatchMeta, metrics: dict[str, Any], timing: dict[str, float]) -> KVBatchMeta:
        """Balance `rows` over the ranks and pad them; add old and reference log-probs and a critic's values."""
        self._n_rows = len(rows)
        rows = self._balance_batch(rows, metrics=metrics)
        with marked_timer("old_log_prob", timing, color="blue"):
            rows = self._compute_old_log_prob(rows, metrics=metrics)
        if self.use_reference_policy:
            with marked_timer("ref", timing, color="olive"):
                rows = self._compute_ref_log_prob(rows, metrics=metrics)
        if self.use_critic:
            with marked_timer("values", timing, color="cyan"):
                rows = self._compute_values(rows, metrics=metrics)
        return rows

    def fill_values(self, columns: VerlRows, rows: KVBatchMeta, values_T: Floats) -> None:
        """Fill `values_T` with the critic's values of `rows` that are not trained."""
        if len(rows):
            self._n_rows = len(rows)
            rows = self._balance_batch(rows, metrics={})
            columns.values(self._compute_values(rows, metrics={}), values_T)
            delete_rows(rows, keep=columns.step_of_key)  # verl's padding rows

    def update(
        self, rows: KVBatchMeta, metrics: dict[str, Any], timing: dict[str, float], step: int, sequences: int
    ) -> None:
        """Update critic and actor on rows with advantages. `sequences`: see `VerlRows.sequences`."""
        self._n_sequences = sequences
        if self.use_critic:
            with marked_timer("update_critic", timing, color="pink"):
                self._update_critic(rows, metrics=metrics)
        if step > self.config.trainer.critic_warmup:  # verl's own trainers warm up for one step fewer
            with marked_timer("update_actor", timing, color="red"):
                self._update_actor(rows, metrics=metrics)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        # Mini-batch sizes count tasks, as in the local engine. verl counts rows, and a task has many rows.
        updates = math.ceil(self.config.data.train_batch_size / self.mini_batch_size)
        self._n_ranks, self._n_updates = dp_size, max(1, min(updates, self._n_rows // dp_size))
        return dp_size * self._n_updates

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: Any, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> KVBatchMeta:
        # As in verl, except for `tolist`: verl reads single numbers from the tensor, which takes seven times as long.
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        multiple = self._get_required_batch_multiple(max(workers._dispatch_info["actor"]) + 1)
        batch = upsample_batch_to_divisible_size(batch, multiple, self.tokenizer.eos_token_id)
        lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
        work = calculate_workload(lengths).tolist()
        partitions = get_seqlen_balanced_partitions(work, k_partitions=self._n_ranks, equal_size=True)
        metrics.update(log_seqlen_unbalance(lengths.tolist(), partitions, logging_prefix))
        # Every rank cuts its rows into mini-batches from the front. Dealing rows in turn spreads padding rows, the last
        # ones, over all mini-batches. A mini-batch of padding alone would have no token to average over.
        dealt = np.array(partitions).reshape(self._n_ranks, -1, self._n_updates).transpose(0, 2, 1)
        batch.reorder(dealt.ravel().tolist())
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        actor = self.config.actor_rollout_ref.actor
        output = self.actor_rollout_wg.update_actor(self._with_update(batch, actor, actor.data_loader_seed))
        _collect(output, "actor", metrics)
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        critic = self.config.critic
        output = self.critic_wg.train_mini_batch(self._with_update(batch, critic, critic.data_loader_seed)).get()
        _collect(output, "critic", metrics)
        return batch

    def _with_update(self, batch: KVBatchMeta, section: Any, seed: int) -> KVBatchMeta:
        """Add the options of an update to `batch`."""
        coefficient = section.get("entropy_coeff", 0.0)
        batch.extra_info.update(
            {
                "calculate_entropy": bool(section.get("calculate_entropy", False) or coefficient != 0.0),
                "distillation_use_topk": False,
                "distillation_only": False,
                # The denominator of `seq-mean-*`: trained steps, without padding, each with its share.
                "global_batch_size": self._n_sequences / self._n_updates,
                "num_mini_batch": self._n_updates,
                "epochs": section.ppo_epochs,
                "seed": seed,
                "dataloader_kwargs": {"shuffle": section.shuffle},
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            }
        )
        return batch

    def correct_rollout(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Measure the mismatch between verl's rollout and actor; apply weights and rejection if configured."""
        section = self.config.algorithm.get("rollout_correction", None)
        if not section or section.get("bypass_mode", False):
            return rows
        from verl.protocol import DataProto
        from verl.workers.utils.padding import response_to_nested

        fields = ["response_mask", "rollout_log_probs", "old_log_probs"]
        data = tq.kv_batch_get(keys=rows.keys, partition_id=rows.partition_id, select_fields=fields)
        nested_mask = data["response_mask"]
        batch = DataProto(batch=data.to_padded_tensor())
        padded, mismatch = compute_rollout_correction_and_add_to_batch(batch, section)
        metrics.update(mismatch)
        changed = [name for name in ("response_mask", "rollout_is_weights") if name in padded.batch]
        return write(rows, {name: response_to_nested(padded.batch[name], nested_mask) for name in changed})


class PartnerPolicy(PolicyTrainer):
    """Another trained policy of a run: verl's workers and servers, without a data set or training loop.

    A mix-in, as `PolicyTrainer`.
    """

    def __init__(self, config: Any, policy: str, place: int, total_steps: int) -> None:
        self._total_steps = total_steps
        self.curr_step_profile = self.prev_step_profile = False  # the leader starts and stops profilers
        super().__init__(config, policy, place)

    def _build_replay_buffer(self) -> None:
        return None

    def _init_dataloader(self) -> None:
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self._total_steps
            self.config.critic.optim.total_training_steps = self._total_steps

    def _load_checkpoint(self) -> None:
        self.global_steps = 0  # the run prints its starting step

    def save(self, folder: Path, step: int) -> None:
        """Write model, optimizer and critic into `folder`."""
        keep = self.config.trainer.get("max_actor_ckpt_to_keep", None)
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, step, max_ckpt_to_keep=keep)
        if self.use_critic:
            self.critic_wg.save_checkpoint(str(folder / "critic"), None, step, max_ckpt_to_keep=keep)

    def load(self, folder: Path) -> None:
        """Load the files of `save`."""
        self.actor_rollout_wg.load_checkpoint(local_path=str(folder / "actor"), del_local_after_load=False)
        if self.use_critic:
            self.critic_wg.load_checkpoint(local_path=str(folder / "critic"), del_local_after_load=False)


class RolloutBuffer(ReplayBuffer):  # type: ignore[misc]
    """verl's replay buffer. It records the selected groups; while it waits, it fetches records and watches workers."""

    selected: set[str]
    """The uids of the last sampled groups; a group may have no rows."""
    expect_workers: Callable[[], None]
    received: ReceivedRecords
    """Records that were fetched but not yet taken."""
    min_complete_frac: float
    """`rollout.min_complete_frac`: this share of a batch's groups is enough; later batches take the others."""
    late: int
    """The groups that earlier batches did not wait for. A batch takes at most its own number of groups and these: verl
    submits one batch of tasks per trained batch, so a larger batch would empty those that are sampled ahead."""

    @classmethod
    def from_replay_buffer(
        cls, buffer: ReplayBuffer, expect_workers: Callable[[], None], min_complete_frac: float
    ) -> RolloutBuffer:
        """Take over the state and the base class of `buffer`, which verl has set up."""
        replay_buffer: RolloutBuffer = object.__new__(type(cls.__name__, (cls, type(buffer)), {}))
        replay_buffer.__dict__.update(
            buffer.__dict__,
            selected=set(),
            expect_workers=expect_workers,
            received=ReceivedRecords(),
            min_complete_frac=min_complete_frac,
            late=0,
        )
        return replay_buffer

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Sample as in verl, but return no rows if no group has any.

        The rollouts' records explain the absence.
        """
        training = partition_id == "train"
        enough = math.ceil(self.min_complete_frac * batch_size) if training else batch_size
        self.selected, self._most = set(), batch_size + self.late * training
        try:
            rows, metrics = super().sample(global_steps, partition_id, enough)
        except RuntimeError:
            # verl raises this for selected groups without rows, and TransferQueue for its own errors.
            if not self.selected or any(key.split("_")[0] in self.selected for key in self.partitions[partition_id]):
                raise
            rows, metrics = self._materialize_batch(partition_id, list(self.selected), {}), {}
        if training:
            self.late = self._most - len(self.selected)
        return rows, metrics

    def _select_prompt_uids(self, partition_id: str, sampleable: set[str], batch_size: int) -> Any:
        partial = partition_id == "train" and self.min_complete_frac < 1
        selection = super()._select_prompt_uids(partition_id, sampleable, self._most if partial else batch_size)
        self.selected = set(selection[0])
        return selection

    def _dapo_filtered_keys(self, partition_id: str) -> Any:
        # verl filters by rows and would raise on a group without rows.
        with_rows = {key.split("_")[0] for key in self.partitions[partition_id]}
        without = self.finished_keys[partition_id] - with_rows
        self.finished_keys[partition_id] -= without
        self.failure_keys[partition_id] |= without
        return super()._dapo_filtered_keys(partition_id)

    def _terminal_eviction_reasons(self, *args: Any) -> Any:
        stale, filtered, _, counts = super()._terminal_eviction_reasons(*args)
        # verl would replace groups without rows, for ever if all fail; the trainer must see and count their failures.
        return stale, filtered, set(), counts

    @property
    def unfinished(self) -> set[str]:
        """The uids of groups that are not selected yet."""
        statuses = (self.pending_keys, self.running_keys, self.finished_keys, self.failure_keys)
        return {uid for keys in statuses for uid in keys["train"]} - self.selected

    def _wait_for_next_poll(self, partition_id: str, *args: Any) -> Any:
        self.expect_workers()
        where, groups = partition(validate=partition_id == "val"), self.prompt_global_steps[partition_id]
        # Records of groups that verl has evicted stay in their partition until the next batch is taken.
        records = self.partitions.get(where, {}).items()
        self.received.fetch(where, {key: tag for key, tag in records if key.split("_")[0] in groups})
        return super()._wait_for_next_poll(partition_id, *args)


class CreditflowTrainer(PolicyTrainer):
    """The run: rollouts, credit, updates of every trained policy, validation, checkpoints, records.

    A mix-in, as `PolicyTrainer`.
    """

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
        self.options = run.config.credit
        self.limits = run.config
        self.threshold = self.options.propagation.make_threshold(tuple(run.config.team.agents))
        self.history = History()
        self.curriculum: Curriculum | None = None
        self.guard = build_guard(run.config, run.recipe.folder, load_functions(run.recipe), NAME)
        self.needs_critic = self.options.estimator.critic
        self._submitted: list[TensorDict] = []
        self._own_metrics: dict[str, float] = {}
        self._servers_idle_s = 0.0
        self._rollbacks = 0
        self._training = False

    @property
    def trainers(self) -> list[PolicyTrainer]:
        """The trainers of all trained policies."""
        return [self, *self.partners]

    @property
    def policies(self) -> list[str]:
        """The names of the trained policies."""
        return [trainer.policy for trainer in self.trainers]

    # Overrides of verl's hooks: setup, weights, checkpoints.

    def _build_replay_buffer(self) -> Any:
        complete = self.run.config.actor_rollout_ref.rollout.min_complete_frac
        buffer = RolloutBuffer.from_replay_buffer(super()._build_replay_buffer(), self._expect_workers, complete)
        rollouts = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        buffer.poll_interval = min(_MOST_POLL_S, max(0.05, rollouts / _ROLLOUTS_PER_SECOND))
        return buffer

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.curriculum = build_curriculum(self.train_dataset.tasks, self.limits)
        if self.curriculum is not None:
            size = self.config.data.get("gen_batch_size", None) or self.config.data.train_batch_size
            self.train_dataloader = CurriculumLoader(self.train_dataset, self.curriculum, size)

    def _expect_workers(self) -> None:
        self.agent_loop_manager.expect_alive()
        if self.trainer_mode != "sync":  # a group that failed may be replaced before anyone takes its records
            expect_no_mistake(partition(validate=False))

    def _get_n_gpus_for_throughput(self) -> int:
        others = sum(int(partner._get_n_gpus_for_throughput()) for partner in self.partners)
        return int(super()._get_n_gpus_for_throughput()) + others

    def _setup(self) -> None:
        super()._setup()
        for place, (name, config) in enumerate(self._partner_configs.items(), start=1):
            partner = PARTNERS[self.trainer_mode](config, name, place, self.total_training_steps)
            partner._setup()
            if self.global_steps > 0:
                partner.load(self._checkpoint() / "policies" / name)
            self.partners.append(partner)

    def get_llm_clients(self) -> dict[str, tuple[Any, Any]]:
        """Each trained policy's client and the section of its model in verl's configuration."""
        return {t.policy: (t.get_llm_client(), t.config.actor_rollout_ref.model) for t in self.trainers}

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._training = True

    def _call_hook(self, hook: str) -> None:
        """Run verl's `hook` for every trained policy."""
        with expect_live_servers():
            getattr(super(), hook)()
            for partner in self.partners:
                # The leader has timers from the first step on.
                partner.global_steps, partner.timing_raw = self.global_steps, getattr(self, "timing_raw", {})
                getattr(partner, hook)()

    on_init_end = partialmethod(_call_hook, "on_init_end")
    on_step_begin = partialmethod(_call_hook, "on_step_begin")
    on_step_end = partialmethod(_call_hook, "on_step_end")
    on_sample_begin = partialmethod(_call_hook, "on_sample_begin")
    on_sample_end = partialmethod(_call_hook, "on_sample_end")
    on_validate_begin = partialmethod(_call_hook, "on_validate_begin")
    on_validate_end = partialmethod(_call_hook, "on_validate_end")

    def _sync_weights(self, version: int) -> None:
        with expect_live_servers():
            for trainer in self.trainers:
                trainer.checkpoint_manager.update_weights(version)

    def _checkpoint(self) -> Path:
        return Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{self.global_steps}"

    def _save_checkpoint(self) -> None:
        folder = self._checkpoint()
        folder.mkdir(parents=True, exist_ok=True)
        for partner in self.partners:
            partner.save(folder / "policies" / partner.policy, self.global_steps)
        self._save_state(folder)
        super()._save_checkpoint()  # last, because it marks the checkpoint as complete

    def _save_state(self, folder: Path) -> None:
        state = {
            **control_state(self.threshold, self.guard, self.history),
            "curriculum": None if self.curriculum is None else self.curriculum.to_json(),
            "policies": self.policies,
            "trainer_mode": self.trainer_mode,
        }
        write_whole(folder / _STATE, lambda path: path.write_text(json.dumps(state) + "\n"))

    def _save_state_again(self) -> None:
        """Rewrite the state of this step's checkpoint, which was saved before all results existed."""
        if self.global_steps > 0 and (folder := self._checkpoint()).is_dir():
            self._save_state(folder)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        state = json.loads((self._checkpoint() / _STATE).read_text())
        if state["policies"] != (here := [self.policy, *self._partner_configs]):
            there = ", ".join(state["policies"])
            raise CreditflowError(
                f"{self._checkpoint()}: holds policies {there}, but the recipe trains {', '.join(here)}"
            )
        if (mode := state.get("trainer_mode", "sync")) != self.trainer_mode:
            raise CreditflowError(
                f"{self._checkpoint()}: trainer.v1.trainer_mode: expected {mode}, as the run began, because the "
                f"checkpoint holds unfinished rollouts of that mode; got {self.trainer_mode}"
            )
        if mode != "sync":
            delete_unfinished(partition(validate=False))
        self.history = load_control_state(state, self.threshold, self.guard)
        restore_curriculum(self.curriculum, state)
        remove_later(self.folder.path, self.global_steps)
        self.folder.rewind(self.global_steps)
        self._rollbacks = len(rollbacks(self.folder.path))
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
            if self.curriculum is not None:
                self.curriculum.observe(rollouts.batch)
                metrics.update(self.curriculum.metrics())
            self.on_sample_end()
        batch = rollouts.batch
        with marked_timer("propagation", timing_raw):
            # The selection of trained steps does not depend on the critic's values, which are computed later.
            values_T = np.zeros(int(batch.token_offsets[-1])) if self.needs_critic else None
            options, threshold = self.guard.options(self.options), self.guard.threshold(self.threshold)
            assignment = assign(batch, options, values_T=values_T, threshold=threshold, history=self.history)
        row_keys, steps = rollouts.row_keys(self.policies)
        columns = VerlRows.from_batch(row_keys, steps, batch)
        step_R = columns.expect_all(rows)
        rows_of = {t: select(rows, trained_by(t.policy, assignment)[step_R]) for t in self.trainers}
        if values_T is not None:  # an untrained step may follow a trained one, which then needs its values
            for trainer in self.trainers:
                of_policy_S = batch.sampled_by(trainer.policy) & ~assignment.groups.trained_S
                trainer.fill_values(columns, select(rows, of_policy_S[step_R]), values_T)
        if sum(map(len, rows_of.values())) < len(rows):
            delete_rows(rows, keep=[key for part in rows_of.values() for key in part.keys])
        rows_of = {trainer: part for trainer, part in rows_of.items() if len(part)}
        for trainer, part in rows_of.items():
            part.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
            own: dict[str, Any] = {}
            rows_of[trainer] = trainer.prepare(part, own, timing_raw)
            metrics.update(self._named(trainer, own))
        with marked_timer("adv", timing_raw, color="brown"):
            if values_T is not None:
                for part in rows_of.values():
                    columns.values(part, values_T)
                assignment = assign(batch, options, values_T=values_T, threshold=threshold, history=self.history)
            self.threshold.update(batch_stats(assignment))
            self.history = assignment.history_after
            for trainer, part in rows_of.items():
                own = {}
                rows_of[trainer] = trainer.correct_rollout(columns.put(part, assignment), own)
                metrics.update(self._named(trainer, own))
        with ThreadPoolExecutor(1, "ledger") as beside:  # the record is final, so it is written during the update
            recording = beside.submit(self._record, rollouts, assignment)
            for trainer, part in rows_of.items():
                own = {}
                trainer.update(part, own, timing_raw, self.global_steps, columns.sequences(part))
                metrics.update(self._named(trainer, own))
            with marked_timer("ledger", timing_raw):
                recording.result()
        if not rows_of:
            raise CreditflowError(
                f"training step {self.global_steps}: no step of {batch.n_trajectories} trajectories can be trained "
                "on: each one failed, was masked, or sampled nothing"
            )
        return concatenate_rows(rows_of.values())

    def _named(self, trainer: PolicyTrainer, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics of one policy's update; with several policies, under the policy's name."""
        return {f"{trainer.policy}/{k}": v for k, v in metrics.items()} if self.partners else dict(metrics)

    def _collect(self, metrics: dict[str, Any], n_tasks: int) -> tuple[KVBatchMeta, RolloutRecords]:
        """Collect verl's rows of `n_tasks` tasks, and their rollouts.

        If rollout servers failed, and with them more rollouts than may fail, the servers receive their weights
        again and the tasks run once more.

        Raises CreditflowError with the first reason if too many rollouts failed, and TooManyFailedScores.
        """
        limits = self.limits.actor_rollout_ref.rollout
        for attempt in (1, 2):
            rows, sampling_metrics = self.replay_buffer.sample(self.global_steps, "train", n_tasks)
            metrics.update(sampling_metrics)
            buffer = self.replay_buffer
            expected = len(buffer.selected) * limits.n
            rollouts = take(partition(validate=False), expected, buffer.selected, buffer.unfinished, buffer.received)
            again = (
                attempt == 1
                and self.trainer_mode == "sync"
                and rollouts.lost_to_servers > limits.max_failed_frac * rollouts.expected
            )
            if not again:
                break
            metrics["rollout/repeated_rollouts"] = float(rollouts.expected)
            delete_rows(rows, keep=())
            self._sync_weights(self.global_steps - 1)
            self._submit_again()
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
            rollouts.expect_few_failures(self.limits.actor_rollout_ref.rollout.max_failed_frac)
            past = self.folder.events()
            events = rollout_events(rollouts.batch, self.global_steps, past, validation=validation)
            events += failure_events(rollouts.report, self.global_steps, past)
            self.folder.append_events(event.to_dict() for event in events)
            expect_few_failures(rollouts.report, self.limits.reward.max_failed_frac)
        except CreditflowError as error:
            log_failures(error, self.folder, self.global_steps, infos)
            raise

    def prepare_step(self) -> dict[str, Any]:
        self._submitted.clear()
        return dict(super().prepare_step())

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self._submitted.append(batch.clone())
        return int(super()._submit_batch_to_rollout(batch))

    def _submit_again(self) -> None:
        tasks, self._submitted = self._submitted, []
        for batch in tasks:
            tu.assign_non_tensor_stack(batch, "uid", [uuid.uuid4().hex for _ in range(len(batch))])
            self._submit_batch_to_rollout(batch)

    # Records.

    def _record(self, rollouts: RolloutRecords, assignment: Assignment) -> None:
        """Write the step file and keep the step's metrics for `_compute_metrics`."""
        self.folder.write_steps(self.global_steps, assignment.batch, assignment)
        self._own_metrics = rollouts.metrics() | step_metrics(
            rollouts.batch, rollouts.report, assignment, self.guard.threshold(self.threshold)
        )
        self._servers_idle_s = rollouts.counted.get(SERVERS_IDLE_S, 0.0)
        if self.trainer_mode != "sync":
            self._own_metrics |= staleness_metrics(
                rollouts.batch, dict.fromkeys(rollouts.batch.policy_names, self.global_steps - 1)
            )

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        metrics.update(self._own_metrics)
        update_s = sum(timing_raw.get(name, 0.0) for name in ("update_critic", "update_actor"))
        timing_raw = {"update": update_s, **timing_raw}
        metrics.update({f"timing/{_TIMING.get(name, name)}_s": seconds for name, seconds in timing_raw.items()})
        workers = self.config.actor_rollout_ref.rollout.agent.num_workers
        metrics["throughput/trainer_idle_frac"] = timing_raw.get("gen", 0.0) / timing_raw["step"]
        metrics["throughput/servers_idle_frac"] = min(1.0, self._servers_idle_s / workers / timing_raw["step"])
        for name in ("actor", "critic") if self.needs_critic else ("actor",):
            norms = [value for key, value in metrics.items() if key.endswith(f"{name}/grad_norm")]
            skipped = sum(not math.isfinite(norm) for norm in norms)  # by verl's optimizer
            metrics[f"{name}/skipped_updates"] = float(skipped)
        metrics["memory/peak_gib"] = peak_gib()
        forget_peak()
        action = self._run_guard(numbers(metrics))
        metrics.update(self.guard.metrics() | {"guard/rollbacks": float(self._rollbacks)})
        self.folder.append_metrics(global_steps, numbers(metrics))
        if action is not None:
            self._apply_guard_action(action)

    def _run_guard(self, metrics: Mapping[str, float]) -> GuardEvent | None:
        """Run the guard on the metrics and record its events.

        Returns the event that the engine must act on.
        """
        _, action = run_guard(self.guard, self.global_steps, metrics, self.folder)
        self._save_state_again()
        return action

    def _apply_guard_action(self, action: GuardEvent) -> None:
        """Roll the run folder back to the last good checkpoint and end this attempt.

        Raises RolledBack, after which the launcher starts again; or GuardStop.
        """
        limit = self.limits.guard.max_rollbacks
        message = roll_back(action, self.folder, self._rollbacks, limit, self._point_to_good, remove_later)
        raise RolledBack(message)

    def _point_to_good(self) -> int | None:
        """Make verl resume from the newest good checkpoint, if there is one; returns its step."""
        good = self._good_checkpoint()
        if good is not None:
            write_whole(self._checkpoint().with_name(_LATEST), lambda path: path.write_text(str(good)))
        return good

    def _good_checkpoint(self) -> int | None:
        """The step of the newest complete checkpoint that the guard marked as good.

        verl removes the models of old checkpoints (`max_actor_ckpt_to_keep`), so their folders are incomplete.
        """
        latest = self._checkpoint().with_name(_LATEST)
        newest = min(int(latest.read_text()), self.global_steps - 1) if latest.is_file() else 0
        for step in saved_steps(self.folder.path):
            folder = folder_of(self.folder.path, step)
            models = [folder, *(folder / "policies" / partner.policy for partner in self.partners)]
            if step > newest or not all((model / "actor").is_dir() for model in models):
                continue
            if (folder / _STATE).is_file() and json.loads((folder / _STATE).read_text())["good"]:
                return step
        return None

    def _validate(self) -> dict[str, float]:
        """Run the validation tasks as `rollout.val_kwargs` configures, and once greedily."""
        kwargs = self.limits.actor_rollout_ref.rollout.val_kwargs
        sampling = kwargs.do_sample and kwargs.temperature > 0
        n = kwargs.n if sampling else 1
        greedy = self._evaluation_trajectories(1, greedy=True)
        sampled = self._evaluation_trajectories(n, greedy=False) if sampling else greedy
        evaluation = Evaluation.from_batches(sampled, greedy, n)
        metrics = val_metrics(evaluation)
        if not self._training:  # verl adds validation metrics only to those of a training step
            action = self._run_guard(metrics)
            self.folder.append_metrics(self.global_steps, metrics)
            if action is not None:
                self._apply_guard_action(action)
        if self.global_steps == 0:
            return metrics
        update_threshold(self.threshold, evaluation)
        self._save_state_again()
        if self.global_steps >= self.total_training_steps:
            self.folder.write_text(FINISHED, evaluation.to_json())  # the last file: the run is finished
        return metrics

    def _evaluation_trajectories(self, n: int, greedy: bool) -> TrajectoryBatch:
        """Sample `n` scored rollouts of each validation task."""
        parts = []
        for rows in self.val_dataloader:
            size = len(rows["raw_prompt"])
            uids = [uuid.uuid4().hex for _ in range(size)]
            batch = tu.get_tensordict(
                {
                    **rows,
                    "uid": np.array(uids, dtype=object),
                    "greedy": np.array([greedy] * size, dtype=object),
                    "__rollout_n__": np.array([n] * size, dtype=object),
                }
            )
            tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
            tu.assign_non_tensor_data(batch, "validate", True)
            tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps}] * size
            tq.kv_batch_put(keys=uids, partition_id="val", tags=tags)
            self.agent_loop_manager.generate_sequences(batch)
            self.replay_buffer.sample(global_steps=self.global_steps, partition_id="val", batch_size=size)
            rollouts = take(partition(validate=True), size * n, set(uids), received=self.replay_buffer.received)
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
for _mode, _base in BASES.items():
    register_trainer(TRAINER_PREFIX + _mode)(type(CreditflowTrainer.__name__, (CreditflowTrainer, _base), {}))

_TIMING = {"gen": "rollout", "adv": "advantage"}
"""The local engine's names for verl's timers of the same measurement."""


def trained_by(policy: str, assignment: Assignment) -> Bools:
    """A mask [S] of the steps on which the policy is trained."""
    return assignment.groups.trained_S & assignment.batch.sampled_by(policy)


def expect_cores(config: Any) -> None:
    """Raise ConfigError if Ray has too few cores for verl's worker groups, which would wait forever."""
    devices, of_rollouts = config.trainer.n_gpus_per_node * config.trainer.nnodes, rollout_devices(config)
    needed = _CORES_A_DEVICE * devices + _CORES_A_ROLLOUT_DEVICE * of_rollouts + _CORES_BESIDE
    available = ray.cluster_resources().get("CPU", 0)
    if available < needed:
        separate = f", {_CORES_A_ROLLOUT_DEVICE} for each of {of_rollouts} for rollouts" if of_rollouts else ""
        raise ConfigError(
            f"ray_kwargs.ray_init.num_cpus: Ray counts {available:g} cores; verl asks for {needed} with {devices} "
            f"devices ({_CORES_A_DEVICE} for each{separate}, {_CORES_BESIDE} beside)"
        )


@contextmanager
def expect_live_servers() -> Iterator[None]:
    """Raise CreditflowError if a rollout server inside died and was not restarted."""
    try:
        yield
    except RayActorError as error:
        raise CreditflowError(
            f"rollout servers died, and do not come back: {first_line(error)}; run the same command again to go on "
            "from the last checkpoint"
        ) from error


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics with a single number."""
    return {key: float(value) for key, value in metrics.items() if isinstance(value, int | float | np.number)}


def _collect(output: Any, name: str, metrics: dict[str, Any]) -> None:
    """Add verl's metrics of an update under `name/`."""
    update_metrics = rename_dict(output["metrics"], f"{name}/")
    update_metrics[f"perf/mfu/{name}"] = update_metrics.pop(f"{name}/mfu")
    metrics.update(reduce_metrics(update_metrics))
