"""Rollout servers that belong to one trained policy.

verl's training workers find their servers by back end and replica rank alone: the name of the Ray actor and the path of
the socket for weights hold nothing else. So each policy gets its own ranks.
"""

from __future__ import annotations

from typing import Any

import zmq
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

_SECTION = "creditflow"
"""The key in `rollout.engine_kwargs`, whose other keys are names of back ends."""
_RANKS_A_POLICY = 3360
"""SGLang takes the rank modulo the number of devices, which divides this number on machines of 1 to 8, 16 or 32."""
_TRANSFER_TIMEOUT_S = 600.0
"""The longest time in which a vLLM server must take a part of the weights."""


def assign_servers(rollout: Any, place: int, token: str) -> None:
    """Set the ranks of a policy's servers in verl's section of rollouts.

    `place`: the index of the policy among the trained ones. `token`: see `RunHandle.token`.
    """
    rollout.engine_kwargs[_SECTION] = {"first_rank": place * _RANKS_A_POLICY, "token": token}


class _PolicyReplica:
    """A mix-in of verl's replicas, with the ranks of their policy."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        own, self.place = config.engine_kwargs[_SECTION], replica_rank
        super().__init__(own["first_rank"] + replica_rank, config, *args, **kwargs)  # type: ignore[call-arg]
        self.name_suffix = f"_{own['token']}"

    async def init_hybrid(self: Any, worker_group: Any) -> None:
        """Start the servers beside their training workers, which verl would look up by the replica rank."""
        self.rollout_mode = RolloutMode.HYBRID
        self.workers = worker_group.workers[self.world_size * self.place : self.world_size * (self.place + 1)]
        await self.launch_servers()

    async def launch_servers(self: Any) -> None:
        """Start the servers. Only placement groups have the suffix: the adapters would not find servers with one."""
        self.name_suffix = ""
        await super().launch_servers()  # type: ignore[misc]


def use_policy_replicas(backend: str) -> None:
    """Create replicas in this process with the ranks that the configuration names (`assign_servers`)."""
    plain = RolloutReplicaRegistry.get(backend)
    if not issubclass(plain, _PolicyReplica):
        own = type(plain.__name__, (_PolicyReplica, plain), {})
        RolloutReplicaRegistry.register(backend, lambda: own)


class PolicyWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's training worker, with an adapter that sends weights to the servers of the same policy."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Load the models, and make the adapter of the policy's servers.

        verl waits without limit for a vLLM server that takes weights, in a call that blocks the process. With a limit,
        a dead server ends the run.
        """
        for limit in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            zmq.Context.instance().setsockopt(limit, int(1000 * _TRANSFER_TIMEOUT_S))
        super().init_model()
        plain = getattr(self, "rollout", None)
        if plain is not None and (first_rank := plain.config.engine_kwargs[_SECTION]["first_rank"]):
            self.rollout = type(plain)(
                config=plain.config,
                model_config=plain.model_config,
                device_mesh=plain.device_mesh,
                replica_rank=first_rank + plain.replica_rank,
            )


class SeparatePolicyWorker(PolicyWorker, DetachActorWorker):  # type: ignore[misc]
    """`PolicyWorker` for training on devices without servers."""
