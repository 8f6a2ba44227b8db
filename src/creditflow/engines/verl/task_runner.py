"""The driver of a run on a cluster: a Ray actor with the trainer and the manager of agent-loop workers."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import ray
from verl.trainer.main_ppo import TaskRunnerV1

from creditflow._utils.malloc import MOST_MMAP_THRESHOLD, NEVER_TRIM, set_malloc


class CreditflowTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's task runner, with creditflow's trainer registered and a client for every trained policy."""

    def run(self, config: Any) -> None:
        """Train until the run is finished."""
        from creditflow.engines.verl.trainer import TRAINER_PREFIX  # imports, and so registers, the trainers

        keep_freed_memory()
        config.trainer.v1.trainer_mode = TRAINER_PREFIX + config.trainer.v1.trainer_mode
        try:
            super().run(config)
        finally:
            if self.agent_loop_manager is not None:
                self.agent_loop_manager.close()

    def init_agent_loop_manager(self) -> None:
        """Create the agent-loop workers, with the servers of every trained policy."""
        from creditflow.engines.verl.agent_loop import CreditflowAgentLoopManager

        self.agent_loop_manager = CreditflowAgentLoopManager.create(
            config=self.trainer.config,  # the leading policy's, because verl's workers read its model section
            llm_client=self.trainer.get_llm_clients(),
            teacher_client=None,
            reward_loop_worker_handles=[],
        )


def task_runner_class() -> Any:
    """The actor class for `verl.trainer.main_ppo.run_ppo`.

    It reserves one core, as in verl's recipes.
    """
    return ray.remote(num_cpus=1)(CreditflowTaskRunner)


_MMAP_THRESHOLD = 1 << 30
_USERS_OWN = ("ARROW_DEFAULT_MEMORY_POOL", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables by which a user decides about the memory of a process."""


def keep_freed_memory() -> bool:
    """Keep the memory that this process frees; returns whether the settings took effect (glibc only).

    By default allocators return it to the system, and the next training step requests every page again. Not set by
    environment variables: Ray would pass them on to all processes of the run. Nothing is set if the user has set one
    of `_USERS_OWN`.
    """
    if any(name in os.environ for name in _USERS_OWN):
        return False
    if not any(set_malloc(threshold, NEVER_TRIM) for threshold in (_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD)):
        return False
    pa.set_memory_pool(pa.system_memory_pool())
    return True
