"""Memory of a training step: a prediction from sizes, the limit of the machine, and the micro-batch that fits.

`MemoryPlan` computes with numbers alone. The functions after it read a model and the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from creditflow._utils.huggingface import n_tokens
from creditflow.engines.local import logprobs, memory
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.packing import PackedSteps, pack_pairs

MOST = 16_384
"""The largest derived micro-batch, in tokens; verl's default."""
MOST_OF_CRITIC = 32_768
"""The same for a critic, whose output is one number per token."""
LEAST = 256
"""The smallest derived micro-batch, in tokens."""
SHARE = {"cpu": 0.4, "cuda": 0.8}
"""The share of the limit that a step with a derived micro-batch may fill. On a CPU, two runs fit side by side."""
CERTAIN = 0.8
"""A step is refused if this share of its predicted memory is not available."""
_LONG_ROWS = 1.15
"""Activations of rows with long prompts in common, relative to short rows: attention gathers a prompt for each row."""
_HELD = {"cpu": 1.3, "cuda": 1.0}
"""`MemoryPlan.held`, as measured."""
_HELD_WITH_ADAPTER = {"cpu": 1.5, "cuda": 1.0}
"""The same for models with an adapter, whose small products leave more pieces."""
BASE = {"cpu": 550 << 20, "cuda": 1 << 30}
"""Memory of Python with its libraries, or of a CUDA context."""
_ADAM = 2
"""Running means of AdamW per trained number."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one training step, in bytes."""

    weights: int
    """All models, with frozen ones, references and critics."""
    trained: int
    """The trained weights among them. Their gradients take as much, and AdamW's two running means twice as much."""
    per_token: int
    """Activations of the largest model that are kept for the gradient, per token of a micro-batch."""
    held: float = 1.0
    """Memory that the allocator holds for each byte of activations, because it cannot use every freed piece again."""
    held_tokens: int | None = None
    """The micro-batch from which freed activations are returned at once instead; None: none."""
    logits_per_token: int = 0
    """Logits with their copies in the log-softmax and its gradient, per token of a micro-batch."""
    logits_most: int | None = None
    """The limit of their memory where they are computed in chunks; None without chunks."""
    per_pass: int = 0
    """Buffers of a pass, whatever its size."""
    sampling: int = 0
    """Keys, values and logits while responses are sampled."""
    base: int = BASE["cpu"]
    """The process without models."""

    @property
    def fixed(self) -> int:
        """The memory that does not depend on the micro-batch."""
        return self.base + self.weights + (1 + _ADAM) * self.trained + self.per_pass

    def peak(self, max_tokens: int) -> int:
        """The largest memory of a step with micro-batches of `max_tokens` tokens."""
        logits = max_tokens * self.logits_per_token
        if self.logits_most is not None:
            logits = min(logits, self.logits_most)
        held = max_tokens if self.held_tokens is None else min(max_tokens, self.held_tokens)  # a batch may be smaller
        update = self.fixed + int(max(max_tokens, held * self.held) * self.per_token) + logits
        return max(update, self.fixed - self.trained + self.sampling)  # gradients do not exist yet

    def max_tokens(self, memory: float, most: int = MOST) -> int:
        """The largest micro-batch, a power of two from `LEAST` to `most`, with a peak of at most `memory` bytes.

        `LEAST` if none fits.
        """
        sizes = (LEAST << k for k in range((most // LEAST).bit_length()))
        return max((size for size in sizes if size <= most and self.peak(size) <= memory), default=LEAST)


def problem(plan: MemoryPlan, max_tokens: int, memory: float, key: str) -> str:
    """The reason why micro-batches of `max_tokens` tokens need more than `memory` bytes, with a size that fits.

    Empty if they may fit: the prediction may be too large, so most of it must be out of reach.
    """
    if plan.peak(max_tokens) * CERTAIN <= memory:
        return ""
    needs = f"{max_tokens} tokens need about {gib(plan.peak(max_tokens))}, and {gib(memory)} are available"
    size = plan.max_tokens(memory)
    if plan.peak(size) <= memory and size < max_tokens:
        return f"{key}: expected at most {size}, got {max_tokens}: {needs}"
    return (
        f"{key}: {needs}, and {plan.fixed * 100 // plan.peak(size)} % of that is independent of it. Train an adapter "
        "(actor_rollout_ref.model.lora_rank), a smaller model, or fewer policies, or sample fewer rows at a time "
        "(actor_rollout_ref.rollout.max_num_seqs)"
    )


def gib(size: float) -> str:
    """A size in bytes as text."""
    return f"{size / (1 << 30):.1f} GiB"


def memory_limit(device: torch.device) -> int:
    """All memory that this process may use on the device, in bytes, whether free or not.

    On a CPU: the machine's memory, or the limit of a control group that contains this process if it is lower.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min([_physical(), *(limit for limit, _ in _groups())])


def free_memory(device: torch.device) -> int:
    """The memory on the device that this process can allocate in addition to its own, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    available = _of_file(Path("/proc/meminfo"), "MemAvailable:") or _physical()
    return max(0, min([available, *(limit - used for limit, used in _groups())]))


def held_memory(device: torch.device) -> int:
    """The memory that this process holds on the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _of_file(Path("/proc/self/status"), "VmRSS:") or 0


def bytes_per_token(forward: Forward) -> int:
    """The memory of a pass with its gradient per token of a micro-batch, in bytes, measured on short rows.

    The larger of rows with and without shared prompts. Measured from the tensors that autograd keeps; the gradients of
    one layer's activations come on top.
    """
    config = forward.model.config.get_text_config(decoder=True)
    layers = max(1, int(getattr(config, "num_hidden_layers", 1)))
    length = max(2, min(12, forward.limit.tokens // 2))
    most = 0.0
    for shared in (False, True):
        few, many = (_trial(forward, rows, length, shared=shared) for rows in (4, 8))
        kept = (_kept(forward, many) - _kept(forward, few)) / (len(many.input_ids) - len(few.input_ids))
        if forward.recomputes:
            kept = kept / layers + layers * int(getattr(config, "hidden_size", 0)) * 4
        most = max(most, kept + 2 * kept / layers)
    return int(_LONG_ROWS * most)


def held_pieces(forward: Forward) -> tuple[float, int | None]:
    """`held` and `held_tokens` of a model."""
    whole = all(weight.requires_grad for weight in forward.model.parameters())
    held = (_HELD if whole else _HELD_WITH_ADAPTER)[forward.device.type]
    if forward.device.type != "cpu":
        return held, None
    size = int(getattr(forward.model.config.get_text_config(decoder=True), "hidden_size", 0))
    return held, memory.returned_from(forward.model.num_parameters()) // (4 * size) if size else None


def logits_bytes(forward: Forward) -> tuple[int, int | None]:
    """`logits_per_token` and `logits_most` of a model; zeros for a model without an output layer over a vocabulary."""
    if forward.model.get_output_embeddings() is None:
        return 0, None
    # Large passes of such a model compute their logits in chunks (`logprobs.logprobs_from_hidden`).
    in_chunks = MOST * n_tokens(forward.model) > logprobs.WHOLE and forward.head is not None
    most = 4 * (logprobs.KEPT + 3 * logprobs.CHUNK) if in_chunks else None
    return 3 * 4 * n_tokens(forward.model), most


def bytes_per_pass(trained: Sequence[torch.Tensor]) -> int:
    """Memory for gradients on their way to a trained weight: twice the largest weight.

    A weight that is used twice (a tied output layer) has two gradients before their sum.
    """
    return 2 * max((weight.numel() * weight.element_size() for weight in trained), default=0)


def with_activations(fixed: MemoryPlan, forwards: Sequence[Forward]) -> MemoryPlan:
    """The plan `fixed` with the activations and logits of the model that needs most."""
    logits, pieces = [logits_bytes(forward) for forward in forwards], [held_pieces(forward) for forward in forwards]
    return replace(
        fixed,
        per_token=max(bytes_per_token(forward) for forward in forwards),
        held=max(held for held, _ in pieces),
        held_tokens=None if any(tokens is None for _, tokens in pieces) else max(tokens or 0 for _, tokens in pieces),
        logits_per_token=max(per_token for per_token, _ in logits),
        logits_most=None if any(most is None for _, most in logits) else max(most or 0 for _, most in logits),
    )


def _kept(forward: Forward, packed: PackedSteps) -> int:
    """The memory that autograd keeps of a pass up to the hidden states, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in forward.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that keeps its own output would keep itself alive through it

    recomputes, forward.recomputes = forward.recomputes, False
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with forward.running():
                hidden = forward.hidden(packed)
            del hidden
    finally:
        forward.recomputes = recomputes
    return sum(kept.values())


def _trial(forward: Forward, rows: int, length: int, *, shared: bool) -> PackedSteps:
    """Rows of a prompt and a response of `length` tokens each; `shared`: four rows have the same prompt."""
    ids = np.arange(length)
    pairs = [((ids + (n // 4 if shared else n)).tolist(), (ids + n + 1).tolist()) for n in range(rows)]
    packed = pack_pairs(pairs, np.arange(rows) // 4 if shared else np.arange(rows))
    return replace(packed, input_ids=packed.input_ids % n_tokens(forward.model))


def sampling_bytes(model: Any, rows: int, row_tokens: int) -> int:
    """Keys, values and logits of `rows` sampled responses, with prompts, of `row_tokens` tokens each.

    Keys and values count twice, because a growing cache is copied. Its room never exceeds the tokens that may be fed.
    """
    return rows * 4 * (2 * row_tokens * cache_numbers(model) + 4 * n_tokens(model))


def cache_numbers(model: Any) -> int:
    """The numbers in the keys and values of one token."""
    config: Any = model.config.get_text_config(decoder=True)
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * head_size(model)


def head_size(model: Any) -> int:
    """The size of a model's attention heads."""
    config: Any = model.config.get_text_config(decoder=True)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The memory of tensors; tensors that share memory count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_file(file: Path, key: str) -> int | None:
    """The value of a line `key number kB`, in bytes; None without such a file or line."""
    if not file.exists():
        return None
    return next((int(line.split()[1]) << 10 for line in file.read_text().splitlines() if line.startswith(key)), None)


_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_VERSION_2 = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _groups(own: Path | None = None, root: Path | None = None) -> list[tuple[int, int]]:
    """Limit and use, in bytes, of each control group with a memory limit that contains this process.

    `own`: the list of the process's groups. `root`: the folder of all groups. In a container, the listed path may not
    exist below `root`; then the root itself is the container's group.
    """
    own, root = own or _OWN, root or _CGROUP
    if not own.exists():
        return []
    limits: dict[Path, tuple[int, int]] = {}
    for line in own.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, names = root, _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "memory", _VERSION_1
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for folder in (top, *(top / parent for parent in (inner, *inner.parents))):
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None:
                limits[folder] = (limit, used - _cached(folder / "memory.stat"))
    return list(limits.values())


def _cached(file: Path) -> int:
    """The file cache that counts as a group's use, but is freed when memory is needed."""
    lines = file.read_text().splitlines() if file.is_file() else []
    values = {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdecimal()}
    return values.get("total_inactive_file", values.get("inactive_file", 0))


def _number(file: Path) -> int | None:
    """The number in a file; None without the file, for `max`, and for version 1's number that means no limit."""
    if not file.is_file() or not (text := file.read_text().strip()).isdecimal():
        return None
    return value if (value := int(text)) < 1 << 60 else None
