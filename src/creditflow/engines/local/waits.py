"""Operations that make Python wait for a device, which a CUDA graph cannot contain. Independent of models."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""torch's tags of operations that return a number to Python, or whose shape depends on numbers."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that wait only where an index is a mask, because its True values are counted."""


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is not typed
    """Records operations that wait for a device: they read numbers back, or copy between the host and the device.

    Operations outside torch count as well, because they may do either. On the CPU, `tolist` and `numpy` are not
    recorded; on a device, the copies that they begin with are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        """Names of the recorded operations, in their order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # a composed operation is replaced by its parts, which are recorded
            out = func.decompose(*args, **kwargs) if func.namespace == "aten" else NotImplemented
        if out is not NotImplemented:
            return out
        if _waits(func, args, kwargs):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs)


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in _INDEXING:
        return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    if name in ("copy_", "_to_copy"):
        other = args[1].device if name == "copy_" else kwargs.get("device") or args[0].device
        return bool(other.type != args[0].device.type)
    if name == "lift_fresh":  # a new tensor of Python's numbers
        return bool(args[0].device.type != "cpu")
    # The product of routed experts reads the size of each group, except in bf16 on some devices.
    return func.namespace not in ("aten", "prim") or name == "_grouped_mm" or not _BY_NUMBERS.isdisjoint(func.tags)
