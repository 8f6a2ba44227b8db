"""The driver of a run on a cluster: a Ray actor with the trainer and the manager of agent-loop workers."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.main_ppo import TaskRunnerV1


class CreditflowTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's task runner, with creditflow's trainer registered and a client for every trained policy."""

    def run(self, config: Any) -> None:
        """Train until the run is finished."""
        from creditflow.engines.verl.trainer import TRAINER_PREFIX  # imports, and so registers, the trainers

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
