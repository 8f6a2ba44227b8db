"""Rollout servers that belong to one trained policy.

verl's training workers find their servers by back end and replica rank alone: the name of the Ray actor and the path of
the socket for weights hold nothing else. So every policy gets ranks of its own. In addition, a worker names its policy
with the weights, and a server refuses those of another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

from creditflow.errors import CreditflowError

_SECTION = "creditflow"
"""The key in `rollout.engine_kwargs`, whose other keys are names of back ends."""
_RANKS_A_POLICY = 3360
"""SGLang takes the rank modulo the number of devices, which divides this number on machines of 1 to 8, 16 or 32."""
_POLICY = "policy"
_TRANSFER_TIMEOUT_S = 600.0
"""The longest time in which a server must take a part of the weights."""


@dataclass(frozen=True, slots=True)
class PolicyServers:
    """The servers of one trained policy."""

    policy: str
    first_rank: int
    """The replica rank of the first server."""
    token: str
    """See `RunHandle.token`."""

    @classmethod
    def read(cls, rollout: Any) -> PolicyServers:
        """Read the options that `assign_servers` wrote into verl's section of rollouts."""
        section: Mapping[str, Any] = rollout.engine_kwargs[_SECTION]
        return cls(section[_POLICY], int(section["first_rank"]), section["token"])

    def expect(self, policy: str | None) -> None:
        """Raise CreditflowError if weights are of another policy. None: the sender did not name its policy."""
        if policy != self.policy:
            sender = "a worker that does not name its policy" if policy is None else f"policy {policy}"
            raise CreditflowError(f"a rollout server of policy {self.policy} refuses weights of {sender}")


def assign_servers(rollout: Any, policy: str, place: int, token: str) -> None:
    """Set in verl's section of rollouts that its servers belong to `policy`, the trained policy number `place`."""
    rollout.engine_kwargs[_SECTION] = {_POLICY: policy, "first_rank": place * _RANKS_A_POLICY, "token": token}


# On the side of the trainer: replicas, which start servers


class _PolicyReplica:
    """A mix-in of verl's replicas: the ranks are the policy's own, and the servers check the sender's policy."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        self.place, own = replica_rank, PolicyServers.read(config)
        super().__init__(own.first_rank + replica_rank, config, *args, **kwargs)  # type: ignore[call-arg]
        self.name_suffix = f"_{own.token}"
        if (plain := getattr(self, "server_class", None)) is not None:
            plain = plain.__ray_metadata__.modified_class
            self.server_class = ray.remote(type(plain.__name__, (_PolicyServer, plain), {}))

    async def init_hybrid(self: Any, worker_group: Any) -> None:
        """Start the servers beside their training workers, which verl would look up by the replica rank."""
        self.rollout_mode = RolloutMode.HYBRID
        self.workers = worker_group.workers[self.world_size * self.place : self.world_size * (self.place + 1)]
        await self.launch_servers()

    def get_ray_class_with_init_args(self: Any) -> RayClassWithInitArgs:
        """The worker that receives weights for a server on separate devices, with its arguments."""
        return RayClassWithInitArgs(
            cls=ray.remote(PolicyCheckpointWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

    async def launch_servers(self: Any) -> None:
        """Start the servers. Only placement groups have the suffix: the adapters would not find servers with one."""
        self.name_suffix = ""
        await super().launch_servers()  # type: ignore[misc]


class _PolicyServer:
    """A mix-in of verl's servers, which refuses the weights of another policy."""

    async def expect_policy(self: Any, policy: str) -> None:
        """Raise CreditflowError if the server belongs to another policy."""
        PolicyServers.read(self.config).expect(policy)

    async def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a method of the server's processes. Raises CreditflowError for weights of another policy."""
        own = dict(kwargs or {})
        if _sets_weights(method):
            PolicyServers.read(self.config).expect(own.pop(_POLICY, None))
        return await super().collective_rpc(method, timeout=timeout, args=args, kwargs=own)  # type: ignore[misc]


def _sets_weights(method: Any) -> bool:
    return isinstance(method, str) and "weight" in method


@contextmanager
def servers_of_policy(backend: str) -> Iterator[None]:
    """Create replicas inside as those of the policy that the configuration names (`assign_servers`)."""
    plain = RolloutReplicaRegistry.get(backend)
    RolloutReplicaRegistry.register(backend, lambda: type(plain.__name__, (_PolicyReplica, plain), {}))
    try:
        yield
    finally:
        RolloutReplicaRegistry.register(backend, lambda: plain)


# On the side of the training workers: adapters, which send weights to the servers


class PolicyWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's training worker, with an adapter for the servers of the same policy."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Load the models, and make the adapter of the policy's servers."""
        super().init_model()
        if (plain := getattr(self, "rollout", None)) is not None:
            first_rank = PolicyServers.read(plain.config).first_rank
            self.rollout = policy_adapter(plain, first_rank + plain.replica_rank)


class SeparatePolicyWorker(PolicyWorker, DetachActorWorker):  # type: ignore[misc]
    """`PolicyWorker` for training on devices without servers."""


class PolicyCheckpointWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's worker beside a server on separate devices, with an adapter for a server of the same policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain: Any = self.server_adapter
        self.server_adapter: Any = policy_adapter(plain, plain.replica_rank)


def policy_adapter(plain: Any, replica_rank: int) -> Any:
    """The adapter of the server with `replica_rank`, which names the policy, from verl's adapter of another rank."""
    mixin = _ADAPTERS.get(plain.config.name)
    if mixin is None and replica_rank == plain.replica_rank:
        return plain
    adapter = type(plain) if mixin is None else type(type(plain).__name__, (mixin, type(plain)), {})
    return adapter(
        config=plain.config,
        model_config=plain.model_config,
        device_mesh=plain.device_mesh,
        replica_rank=replica_rank,
    )


class _VllmAdapter:
    """A mix-in of verl's adapter for vLLM, which names the policy in every call that sends weights.

    verl waits without limit for a server that takes the weights, in a call that blocks its process. A dead server would
    stop the run there.
    """

    async def update_weights(self: Any, *args: Any, **options: Any) -> None:
        """Send weights. Raises RayActorError if the server is dead, and CreditflowError if it dies meanwhile."""
        import zmq

        policy = PolicyServers.read(self.config).policy
        if self._ensure_server_handle():
            await self.server_handle.expect_policy.remote(policy)
        for limit in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            zmq.Context.instance().setsockopt(limit, int(1000 * _TRANSFER_TIMEOUT_S))
        try:
            await super().update_weights(*args, **options)  # type: ignore[misc]
        except zmq.Again as error:
            raise CreditflowError(
                f"the rollout server of policy {policy} did not take its weights within {_TRANSFER_TIMEOUT_S:g} s; run "
                "the same command again to go on from the last checkpoint"
            ) from error

    async def _execute_method(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if _sets_weights(method):
            options["kwargs"] = {**(options.get("kwargs") or {}), _POLICY: PolicyServers.read(self.config).policy}
        return await super()._execute_method(method, *args, **options)  # type: ignore[misc]


class _SglangAdapter:
    """A mix-in of verl's adapter for SGLang, which checks the server's policy before the first transfer."""

    async def _init_server_adapter(self: Any) -> None:
        new = getattr(self, "_engine", None) is None
        await super()._init_server_adapter()  # type: ignore[misc]
        if new and self._engine is not None:
            await self.server_actor.expect_policy.remote(PolicyServers.read(self.config).policy)


_ADAPTERS: Mapping[str, type] = {"vllm": _VllmAdapter, "sglang": _SglangAdapter}
