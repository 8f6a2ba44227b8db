"""verl's trainer of one trained policy: its workers, servers, reference and critic, and the stages of one update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.utils.padding import response_to_nested

from creditflow.credit import Assignment
from creditflow.data import Floats
from creditflow.engines.verl import policy_servers
from creditflow.engines.verl.recipe import read_run_handle
from creditflow.engines.verl.rows import VerlRows, delete_rows, select, write
from creditflow.engines.verl.versions import VersionedClient


class PolicyTrainer(PPOTrainer):  # type: ignore[misc]
    """The verl workers, servers, reference and critic of one trained policy.

    A mix-in of verl's trainers, of one of which (`trainer.BASES`) each concrete class inherits. `place`: the index of
    the policy among the trained ones, from 0.
    """

    rows: KVBatchMeta
    """The rows of the training step on which the policy is trained."""
    metrics: dict[str, Any]
    """Its metrics of the training step."""

    def __init__(self, config: Any, policy: str, place: int) -> None:
        self.policy, self.run = policy, read_run_handle(config)
        self.mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
        with open_dict(config):
            policy_servers.assign_servers(config.actor_rollout_ref.rollout, place, self.run.token)
            if config.trainer.v1.trainer_mode == "separate_async":  # verl would have one update per mini-batch
                config.actor_rollout_ref.actor.ppo_mini_batch_size = config.data.train_batch_size
        policy_servers.use_policy_replicas(config.actor_rollout_ref.rollout.name)
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        separate = self.trainer_mode == "separate_async"
        own_worker = policy_servers.SeparatePolicyWorker if separate else policy_servers.PolicyWorker
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(own_worker)
        # Ray identifies placement groups by name, and verl uses the same names for every policy and run.
        own = f"{self.policy}_{self.run.token}"
        pools = {f"{own}_{pool}": spec for pool, spec in self.resource_pool_manager.resource_pool_spec.items()}
        self.mapping: dict[Any, str] = {role: f"{own}_{pool}" for role, pool in self.mapping.items()}
        self.resource_pool_manager: ResourcePoolManager = ResourcePoolManager(pools, self.mapping)

    def policy_client(self) -> Any:
        """verl's client of the policy's servers; in asynchronous modes, it notes versions."""
        client = super().get_llm_client()
        if self.trainer_mode != "sync":
            client.__class__ = VersionedClient
        return client

    def begin(self, rows: KVBatchMeta, step_R: Any, assignment: Assignment) -> None:
        """Take from `rows` those on which the policy is trained. `step_R`: the step of each row."""
        trained_S = assignment.groups.trained_S & assignment.batch.sampled_by(self.policy)
        self.rows, self.metrics = select(rows, trained_S[step_R]), {}
        self.rows.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature

    def fill_values(self, columns: VerlRows, rows: KVBatchMeta, values_T: Floats) -> None:
        """Fill `values_T` with the critic's values of `rows` that are not trained."""
        if len(rows):
            rows = self._balanced(rows, {})
            columns.values(self._compute_values(rows, metrics={}), values_T)
            delete_rows(rows, keep=columns.step_of_key)  # verl's padding rows

    def prepare(self, timing: dict[str, float]) -> None:
        """Balance the rows over the ranks and pad them; add old and reference log-probs and a critic's values."""
        self.rows = self._balanced(self.rows, self.metrics)
        with marked_timer("old_log_prob", timing, color="blue"):
            self.rows = self._compute_old_log_prob(self.rows, metrics=self.metrics)
        if self.use_reference_policy:
            with marked_timer("ref", timing, color="olive"):
                self.rows = self._compute_ref_log_prob(self.rows, metrics=self.metrics)
        if self.use_critic:
            with marked_timer("values", timing, color="cyan"):
                self.rows = self._compute_values(self.rows, metrics=self.metrics)

    def _balanced(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Pad `rows` and order them by ranks with equal work, and by mini-batches within each.

        As `_balance_batch` of verl's trainer, except for `tolist`: verl compares single numbers of a tensor, which
        takes ten times as long. Mini-batch sizes count tasks, as in the local engine; a task has many rows.
        """
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        n_ranks = max(workers._dispatch_info["actor"]) + 1
        updates = math.ceil(self.config.data.train_batch_size / self.mini_batch_size)
        self._n_updates = max(1, min(updates, len(rows) // n_ranks))
        rows = upsample_batch_to_divisible_size(rows, n_ranks * self._n_updates, self.tokenizer.eos_token_id)
        lengths = torch.tensor([tag["seq_len"] for tag in rows.tags], dtype=torch.int64)
        work = calculate_workload(lengths).tolist()
        partitions = get_seqlen_balanced_partitions(work, k_partitions=n_ranks, equal_size=True)
        metrics.update(log_seqlen_unbalance(lengths.tolist(), partitions, "global_seqlen"))
        # Every rank cuts its rows into mini-batches from the front. Dealing rows in turn spreads padding rows, the last
        # ones, over all mini-batches. A mini-batch of padding alone would have no token to average over.
        dealt = np.array(partitions).reshape(n_ranks, -1, self._n_updates).transpose(0, 2, 1)
        rows.reorder(dealt.ravel().tolist())
        return rows

    def fill_kl_penalty(self, columns: VerlRows, penalty_T: Floats) -> None:
        """Fill `penalty_T` [T] with verl's KL penalty, a negative reward, of the tokens that train the policy."""
        fields = ["response_mask", "old_log_probs", "ref_log_prob"]
        data = tq.kv_batch_get(keys=self.rows.keys, partition_id=self.rows.partition_id, select_fields=fields)
        nested_mask = data["response_mask"]
        batch = DataProto(batch=data.to_padded_tensor())
        batch.batch["token_level_scores"] = torch.zeros_like(batch.batch["old_log_probs"])
        penalized, metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, self.config.algorithm.kl_penalty)
        self.metrics.update(metrics)
        columns.fill(self.rows, response_to_nested(penalized.batch["token_level_rewards"], nested_mask), penalty_T)

    def put(self, columns: VerlRows, assignment: Assignment) -> None:
        """Write advantages into the rows, with the weights of verl's rollout correction, if it is configured.

        The correction measures the mismatch between the servers' log-probs and the actor's.
        """
        self.rows = columns.put(self.rows, assignment)
        section = self.config.algorithm.get("rollout_correction", None)
        if not section or section.get("bypass_mode", False):
            return
        fields = ["response_mask", "rollout_log_probs", "old_log_probs"]
        data = tq.kv_batch_get(keys=self.rows.keys, partition_id=self.rows.partition_id, select_fields=fields)
        nested_mask = data["response_mask"]
        batch = DataProto(batch=data.to_padded_tensor())
        padded, mismatch = compute_rollout_correction_and_add_to_batch(batch, section)
        self.metrics.update(mismatch)
        changed = [name for name in ("response_mask", "rollout_is_weights") if name in padded.batch]
        nested = {name: response_to_nested(padded.batch[name], nested_mask) for name in changed}
        self.rows = write(self.rows, nested)

    def update(self, columns: VerlRows, timing: dict[str, float], step: int) -> None:
        """Update critic and actor on rows with advantages."""
        sequences, actor = columns.sequences(self.rows), self.config.actor_rollout_ref.actor
        if self.use_critic:
            with marked_timer("update_critic", timing, color="pink"):
                self._set_update(self.config.critic, sequences)
                self._keep_metrics("critic", self.critic_wg.train_mini_batch(self.rows).get())
        if step > self.config.trainer.critic_warmup:  # verl's own trainers warm up for one step fewer
            with marked_timer("update_actor", timing, color="red"):
                self._set_update(actor, sequences, entropy=actor.calculate_entropy or actor.entropy_coeff != 0.0)
                self._keep_metrics("actor", self.actor_rollout_wg.update_actor(self.rows))

    def _set_update(self, section: Any, sequences: int, entropy: bool = False) -> None:
        """Set the options of an update for verl's workers, from the actor's or the critic's `section`."""
        self.rows.extra_info.update(
            {
                "calculate_entropy": entropy,
                "distillation_use_topk": False,
                "distillation_only": False,
                # The denominator of `seq-mean-*`: trained steps, without padding, each with its share.
                "global_batch_size": sequences / self._n_updates,
                "num_mini_batch": self._n_updates,
                "epochs": section.ppo_epochs,
                "seed": section.data_loader_seed,
                "dataloader_kwargs": {"shuffle": section.shuffle},
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            }
        )

    def _keep_metrics(self, name: str, output: Any) -> None:
        """Keep verl's metrics of an update under `name/`."""
        metrics = rename_dict(output["metrics"], f"{name}/")
        metrics[f"perf/mfu/{name}"] = metrics.pop(f"{name}/mfu")
        self.metrics.update(reduce_metrics(metrics))


class PartnerPolicy(PolicyTrainer):
    """Another trained policy of a run: verl's workers and servers, without a training loop.

    A mix-in, as `PolicyTrainer`. `begun`: the steps trained so far. `checkpoint`: the policy's folder in the checkpoint
    that the run resumes from.
    """

    def __init__(self, config: Any, policy: str, place: int, begun: int, checkpoint: Path) -> None:
        self.begun, self.checkpoint = begun, checkpoint
        self.curr_step_profile = self.prev_step_profile = False  # the leader starts and stops profilers
        super().__init__(config, policy, place)

    def _load_checkpoint(self) -> None:
        self.global_steps = self.begun
        for name, workers in self._workers.items() if self.begun else ():
            workers.load_checkpoint(local_path=str(self.checkpoint / name), del_local_after_load=False)

    def save(self, folder: Path) -> None:
        """Write model, optimizer and critic into `folder`."""
        keep = self.config.trainer.get("max_actor_ckpt_to_keep", None)
        for name, workers in self._workers.items():
            workers.save_checkpoint(str(folder / name), None, self.global_steps, max_ckpt_to_keep=keep)

    @property
    def _workers(self) -> dict[str, Any]:
        return {"actor": self.actor_rollout_wg} | ({"critic": self.critic_wg} if self.use_critic else {})
