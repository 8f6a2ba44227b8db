"""Rollout back end `transformers`: a replica that starts a server, and an adapter that sends it new weights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from verl_cpu.server import Server, ServerOptions


def _server_name(replica_rank: int) -> str:
    """The name of a replica's server, which holds as little as with verl's own back ends."""
    return f"transformers_server_{replica_rank}"


class TransformersReplica(RolloutReplica):
    """One server next to one training process."""

    async def launch_servers(self) -> None:
        """Start the server, wait for its model, and pass its handle to the training process."""
        if len(self.workers) != 1:
            raise ValueError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size: a server of this back end has one process, "
                f"but {len(self.workers)} were asked for"
            )
        worker = self.workers[0]
        node_id = await worker.__ray_call__.remote(lambda worker: ray.get_runtime_context().get_node_id())
        name = _server_name(self.replica_rank)
        server = (
            ray.remote(Server)
            .options(
                name=name,
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            )
            .remote(self._server_options())
        )
        await server.pid.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name  # verl's load balancer needs a name; the server has no HTTP address

    def _server_options(self) -> ServerOptions:
        config = self.config
        return ServerOptions(
            folder=copy_to_local(self.model_config.path),
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=(config.seed, self.replica_rank),
        )


class TransformersRollout(BaseRollout):
    """Sends new weights from the training process to the server, through Ray's object store."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None
        self.syncs = (self.config.custom or {}).get("weight_sync", True)

    @property
    def server(self) -> Any:
        """The server, found by its name when it is needed: it starts after its training process."""
        self._server = self._server or ray.get_actor(_server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server never releases its weights or cache."""

    async def release(self) -> None:
        """Do nothing: the server never releases its weights or cache."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send all named weights of the model. Runs on all ranks, because gathering a weight needs all of them."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise ValueError("this rollout back end takes whole weights: neither deltas nor adapters")
        if self.syncs:
            limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
            bucket: dict[str, torch.Tensor] = {}
            size = 0
            async for name, tensor in ensure_async_iterator(weights):
                if bucket and size + tensor.nbytes > limit:
                    await self.server.update_weights.remote(bucket)
                    bucket, size = {}, 0
                bucket[name] = tensor.detach().cpu()
                size += tensor.nbytes
            await self.server.update_weights.remote(bucket)
        if global_steps is not None:
            await self.server.set_global_steps.remote(global_steps)
