"""The driver of a run on the cluster: an actor that holds the trainer and the manager of agent-loop workers."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.main_ppo import TaskRunnerV1


class CreditflowTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's, with our trainer known to it and a client for every trained policy."""

    def run(self, config: Any) -> None:
        """Train; returns when the run is finished."""
        from creditflow.engines.verl import trainer  # registers it  # noqa: F401

        try:
            super().run(config)
        finally:
            if self.agent_loop_manager is not None:
                self.agent_loop_manager.close()

    def init_agent_loop_manager(self) -> None:
        """The workers that play, with the servers of every trained policy."""
        from creditflow.engines.verl.agent_loop import CreditflowAgentLoopManager

        self.agent_loop_manager = CreditflowAgentLoopManager.create(
            config=self.trainer.config,  # of the leading policy: verl's workers look at its model
            llm_client=self.trainer.get_llm_clients(),
            teacher_client=None,
            reward_loop_worker_handles=[],
        )


def task_runner_class() -> Any:
    """What `verl.trainer.main_ppo.run_ppo` starts. One core is its own, as verl's recipes have it."""
    return ray.remote(num_cpus=1)(CreditflowTaskRunner)
