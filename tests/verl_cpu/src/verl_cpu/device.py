"""A CPU substitute for `torch.cuda` in verl: `torch.cpu`, with memory statistics of 0."""

from __future__ import annotations

from torch.cpu import is_available, set_device, synchronize

__all__ = [
    "current_device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_rng_state",
    "is_available",
    "manual_seed",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "synchronize",
]


def current_device() -> int:
    return 0


def device_count() -> int:
    return 1


def get_device_name(device: object = None) -> str:
    return "CPU"


def manual_seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def get_rng_state(device: object = None) -> object:
    import torch

    return torch.get_rng_state()


def set_rng_state(state: object, device: object = None) -> None:
    import torch

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
