"""Optimizer, learning-rate schedule and gradient clipping of one model.

Independent of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.autograd.graph import increment_version

from creditflow.config import OptimConfig
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.engines.local.memory import LARGE
from creditflow.errors import ModelError


def _lr_factor(optim: OptimConfig, total_updates: int | None) -> Callable[[int], float]:
    """The factor of `optim.lr` at each update (from 0): linear warm-up, then constant or half a cosine."""
    warmup = optim.lr_warmup_steps

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        if optim.lr_scheduler_type == "constant" or total_updates is None:
            return 1.0
        done = (update - warmup) / max(1, total_updates - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


class Learner:
    """AdamW over `parameters`.

    `total_updates`: the number of updates in the run, for the cosine schedule.
    """

    def __init__(
        self, parameters: Iterable[Tensor], optim: OptimConfig, grad_clip: float, total_updates: int | None = None
    ) -> None:
        self.parameters = [weight for weight in parameters if weight.requires_grad]
        self.grad_clip = grad_clip
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
            # One pass over the weights instead of several, without copies. The last bits of the result differ, so small
            # models, for which it matters little, keep the results of earlier versions.
            fused=True if sum(weight.numel() for weight in self.parameters) >= LARGE else None,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _lr_factor(optim, total_updates))

    def begin(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def fill_gradients(self) -> None:
        """Set missing gradients to 0, so that `step` is AdamW's step for a gradient of 0: momentum and decay."""
        for weight in self.parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def step(self) -> dict[str, float]:
        """Update from the accumulated gradients; returns `grad_norm` (before clipping), `lr`, `skipped_updates`."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        finite = bool(torch.isfinite(norm))
        lr = float(self.optimizer.param_groups[0]["lr"])
        if finite:
            self.optimizer.step()
            # The fused optimizer changes weights without counting up their versions, by which `products.Linear` finds
            # that a cast weight is outdated.
            increment_version(self.parameters)
            self.schedule.step()
        else:  # one bad batch must not poison the weights; the skip is counted
            self.begin()
        return {"grad_norm": float(norm), "lr": lr, "skipped_updates": float(not finite)}

    def save(self, file: Path) -> None:
        """Save the optimizer and schedule state (not the weights)."""
        state = self.optimizer.state_dict()["state"]
        tensors = {f"{i}.{name}": value for i, of_weight in state.items() for name, value in of_weight.items()}
        # A single metadata entry, because safetensors writes several in random order.
        save_file(tensors, file, {"updates, weights": f"{self.schedule.last_epoch}, {len(self.parameters)}"})

    def load(self, file: Path) -> None:
        """Load the state that `save` wrote. Raises ModelError if it belongs to other weights."""
        with safe_open(file, "pt") as saved:
            updates, weights = map(int, saved.metadata()["updates, weights"].split(", "))
            state: dict[int, dict[str, Tensor]] = {}
            for key in saved.keys():  # noqa: SIM118  # safe_open is not a mapping
                i, _, name = key.partition(".")
                state.setdefault(int(i), {})[name] = saved.get_tensor(key)
        fits = all(
            i < len(self.parameters) and tensors["exp_avg"].shape == self.parameters[i].shape
            for i, tensors in state.items()
        )
        if not fits or weights != len(self.parameters):  # a weight that never had a gradient has no state
            raise ModelError(f"{file}: an optimizer of other weights than these {len(self.parameters)}")
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.go_on_at(updates)

    @property
    def updates(self) -> int:
        """The number of updates in the schedule so far."""
        return int(self.schedule.last_epoch)

    def go_on_at(self, updates: int) -> None:
        """Continue the schedule after `updates` updates."""
        self.schedule.last_epoch = updates
        for group, base, factor in zip(
            self.optimizer.param_groups, self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(updates)


def in_mini_batches(
    update: Callable[[Ints], dict[str, float]], trained_S: Bools, mini_batch_of_step: Ints, epochs: int
) -> dict[str, float]:
    """Call `update` with the trained steps of each mini-batch, `epochs` times; returns its averaged metrics.

    Each metric is averaged over the updates that have it.
    """
    updates = [
        update(np.flatnonzero(trained_S & (mini_batch_of_step == m)))
        for _ in range(epochs)
        for m in range(int(mini_batch_of_step.max(initial=0)) + 1)
    ]
    keys = dict.fromkeys(key for metrics in updates for key in metrics)
    return {key: float(np.mean([metrics[key] for metrics in updates if key in metrics])) for key in keys}


def sampled_tokens(batch: TrajectoryBatch) -> tuple[Ints, Ints]:
    """The step of each response token [T], and the number of sampled tokens per step [S]."""
    from creditflow.credit import kernels

    step_of_token = np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))
    return step_of_token, kernels.sampled_tokens(batch.token_offsets, batch.response_mask)


def tensors_of(columns: Iterable[Floats], at: Ints, like: Tensor) -> list[Tensor]:
    """Select the entries `at` [R] of each column [T], as tensors with the dtype and device of `like`."""
    return [torch.from_numpy(np.asarray(column[at], dtype=np.float64)).to(like) for column in columns]
