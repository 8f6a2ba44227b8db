"""A CPU substitute for `torch.cuda` in verl: `torch.cpu`, with memory statistics of 0."""

from __future__ import annotations

import torch

is_available, set_device, synchronize = torch.cpu.is_available, torch.cpu.set_device, torch.cpu.synchronize
manual_seed = torch.manual_seed


def current_device() -> int:
    return 0


def device_count() -> int:
    return 1


def get_device_name(device: object = None) -> str:
    return "CPU"


def get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def empty_cache() -> None:
    """Do nothing: a CPU has no cache of memory blocks."""


def reset_peak_memory_stats(device: object = None) -> None:
    """Do nothing: no memory is measured."""


def _nothing(device: object = None) -> int:
    return 0


memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _nothing


def mem_get_info(device: object = None) -> tuple[int, int]:
    return 0, 0
