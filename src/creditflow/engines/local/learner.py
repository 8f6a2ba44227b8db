"""Optimizer, learning-rate schedule, gradient clipping and weights of the loss of one model."""

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

from creditflow.config import ActorConfig, CriticConfig, OptimConfig
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.engines.local.loss import token_weights
from creditflow.engines.local.memory import LARGE
from creditflow.errors import ModelError

Schedule = tuple[int | None, int]
"""The training steps in which a model learns, for the cosine schedule (None: it has no end), and the updates of a whole
batch, the unit of the warm-up."""
ENDLESS: Schedule = (None, 1)


class Learner:
    """AdamW over `parameters`, with a learning rate that follows training steps."""

    def __init__(
        self, parameters: Iterable[Tensor], optim: OptimConfig, grad_clip: float, schedule: Schedule = ENDLESS
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
        self.done = 0
        """The number of training steps so far."""
        self._optim, (self._steps, self._updates_per_step) = optim, schedule

    def set_rate(self, update: int, updates: int) -> None:
        """Set the learning rate of an update (from 0) of the `updates` in this training step.

        Linear warm-up, then constant or half a cosine. A training step with fewer updates than a whole batch has, for
        example after dynamic sampling, moves as far along the schedule as any other.
        """
        n, warmup = self._updates_per_step, self._optim.lr_warmup_steps
        at = self.done * n + update * n / updates
        factor = min(1.0, (at + 1) / (warmup + 1))
        if at >= warmup and self._optim.lr_scheduler_type == "cosine":
            done = 0.0 if self._steps is None else (at - warmup) / max(1, self._steps * n - warmup)
            factor = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        for group in self.optimizer.param_groups:
            group["lr"] = self._optim.lr * factor

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
        else:  # one bad batch must not poison the weights; the skip is counted
            self.begin()
        return {"grad_norm": float(norm), "lr": lr, "skipped_updates": float(not finite)}

    def save(self, file: Path) -> None:
        """Save the optimizer's state and the number of training steps (not the weights)."""
        state = self.optimizer.state_dict()["state"]
        tensors = {f"{i}.{name}": value for i, of_weight in state.items() for name, value in of_weight.items()}
        # A single metadata entry, because safetensors writes several in random order.
        save_file(tensors, file, {"steps, weights": f"{self.done}, {len(self.parameters)}"})

    def load(self, file: Path) -> None:
        """Load the state that `save` wrote. Raises ModelError if it belongs to other weights."""
        with safe_open(file, "pt") as saved:
            steps, weights = map(int, saved.metadata()["steps, weights"].split(", "))
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
        self.done = steps

    def in_mini_batches(
        self, update: Callable[[Ints], dict[str, float]], trained_S: Bools, mini_batch_of_step: Ints, epochs: int
    ) -> dict[str, float]:
        """Call `update` with the trained steps of each mini-batch, `epochs` times; returns its averaged metrics.

        Each metric is averaged over the updates that have it.
        """
        mini_batches = int(mini_batch_of_step.max(initial=0)) + 1
        updates = []
        for k in range(epochs * mini_batches):
            self.set_rate(k, epochs * mini_batches)
            updates.append(update(np.flatnonzero(trained_S & (mini_batch_of_step == k % mini_batches))))
        self.done += 1
        keys = dict.fromkeys(key for metrics in updates for key in metrics)
        return {key: float(np.mean([metrics[key] for metrics in updates if key in metrics])) for key in keys}


def sampled_tokens(batch: TrajectoryBatch) -> tuple[Ints, Ints]:
    """The step of each response token [T], and the number of sampled tokens per step [S]."""
    step_of_token = np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))
    return step_of_token, batch.sampled_of_step


def loss_weights(config: ActorConfig | CriticConfig, batch: TrajectoryBatch, steps: Ints) -> Floats:
    """The loss weight [S] of each sampled token of `steps`; 0 for other steps."""
    weight_S, (_, sampled_S) = np.zeros(batch.n_steps), sampled_tokens(batch)
    mode, scale_factor = config.loss_agg_mode, config.loss_scale_factor
    weight_S[steps] = token_weights(mode, sampled_S[steps], batch.trajectory_of_step[steps], scale_factor)
    return weight_S


def tensors_of(columns: Iterable[Floats], at: Ints, like: Tensor) -> list[Tensor]:
    """Select the entries `at` [R] of each column [T], as tensors with the dtype and device of `like`."""
    return [torch.from_numpy(np.asarray(column[at], dtype=np.float64)).to(like) for column in columns]
