"""verl's replay buffer with groups that have no rows, and batches that close early."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

_MOST_POLL_S = 2.0
_ROLLOUTS_PER_SECOND = 2000.0
"""Rollouts per second of polling interval, so that polling does not keep TransferQueue busy."""


class RolloutBuffer(ReplayBuffer):  # type: ignore[misc]
    """A mix-in of verl's replay buffers."""

    selected: set[str]
    """The uids of the last sampled groups; a group may have no rows."""
    expect_workers: Callable[[], None]
    """Called at each poll."""
    min_complete_frac: float
    """`rollout.min_complete_frac`: this share of a batch's groups is enough; later batches take the others."""
    late: int
    """The groups that earlier batches did not wait for. A batch takes at most its own number of groups and these: verl
    submits one batch of tasks per trained batch, so a larger batch would empty those that are sampled ahead."""

    @classmethod
    def from_replay_buffer(
        cls, buffer: Any, expect_workers: Callable[[], None], min_complete_frac: float, rollouts: int
    ) -> RolloutBuffer:
        """Extend the `buffer` that verl has set up. `rollouts`: those of a batch."""
        buffer.__class__ = type(cls.__name__, (cls, type(buffer)), {})
        buffer.poll_interval = min(_MOST_POLL_S, max(0.05, rollouts / _ROLLOUTS_PER_SECOND))
        buffer.expect_workers, buffer.min_complete_frac = expect_workers, min_complete_frac
        buffer.selected, buffer.late = set(), 0
        return cast(RolloutBuffer, buffer)

    @property
    def unfinished(self) -> set[str]:
        """The uids of groups that are not selected yet."""
        statuses = (self.pending_keys, self.running_keys, self.finished_keys, self.failure_keys)
        return {uid for keys in statuses for uid in keys["train"]} - self.selected

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

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        # verl filters groups by rows and would raise on a finished one without rows.
        with_rows = {key.split("_")[0] for key in self.partitions[partition_id]}
        self.failure_keys[partition_id] |= self.finished_keys[partition_id] - with_rows
        self.finished_keys[partition_id] &= with_rows
        stale, filtered, _, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        # verl would replace groups without rows, for ever if all fail; the trainer must see and count their failures.
        return stale, filtered, set(), counts

    def _wait_for_next_poll(self, partition_id: str, *args: Any) -> Any:
        self.expect_workers()
        return super()._wait_for_next_poll(partition_id, *args)
