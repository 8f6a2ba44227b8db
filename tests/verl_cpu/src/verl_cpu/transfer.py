"""Checkpoint engine `file`: sends weights from training to rollouts through a file in shared memory, on one node.

verl's own engines need CUDA, or a library without a build for the CPU.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "file"
_POLL_S = 0.01


@CheckpointEngineRegistry.register(BACKEND)
class FileTransfer(CheckpointEngine):
    """Rank 0 of training writes all weights; every process of the rollouts reads them."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.folder = Path()

    def prepare(self) -> str | None:
        """The folder of this update; rank 0 creates it."""
        return tempfile.mkdtemp(prefix="weights", dir="/dev/shm") if self.is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        folder = metadata[0]
        return {"folder": [folder] * actor_wg_world_size}, {"folder": [folder] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:
        self.folder = Path(folder)

    def finalize(self) -> None:
        if self.is_master:
            shutil.rmtree(self.folder)

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        tensors = {}
        for name, tensor in weights:  # gathering a weight needs all ranks
            if self.is_master:
                tensors[name] = tensor.detach().cpu().contiguous().clone()
        if self.is_master:
            save_file(tensors, self.folder / "part")
            (self.folder / "part").rename(self.folder / "weights")

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while not (self.folder / "weights").exists():
            await asyncio.sleep(_POLL_S)
        for name, tensor in load_file(self.folder / "weights").items():
            yield name, tensor
