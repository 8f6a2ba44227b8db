"""The critic: estimates the value of the state before each response token, and learns from returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from creditflow._utils.huggingface import load_folder, n_tokens
from creditflow._utils.progress import advance, phase
from creditflow.config import CriticConfig
from creditflow.credit.analysis.metrics import explained_variance
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.engines.local import memory
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.learner import (
    ENDLESS,
    Learner,
    Schedule,
    loss_weights,
    sampled_tokens,
    tensors_of,
)
from creditflow.engines.local.loss import value_loss
from creditflow.engines.local.packing import PackedSteps, Sequences, TokenSequences
from creditflow.engines.local.planning import MOST_OF_CRITIC


class Critic:
    """A value model and its optimizer. The model is a transformers backbone with one output per token."""

    size_key = "critic.ppo_max_token_len_per_gpu"
    """The option of `max_tokens`."""
    most_tokens = MOST_OF_CRITIC
    """The largest derived `max_tokens`."""

    def __init__(self, model: Any, config: CriticConfig, schedule: Schedule = ENDLESS) -> None:
        self.model = model.eval()
        self.config = config
        self.max_tokens = config.ppo_max_token_len_per_gpu or MOST_OF_CRITIC
        """Tokens of one micro-batch; `PolicySet` derives it if the configuration leaves it open."""
        self.forward = Forward(model)
        self.limit = self.forward.limit
        self.learner = Learner(model.parameters(), config.optim, config.grad_clip, schedule)

    @classmethod
    def load(
        cls, folder: Path | str, key: str, device: torch.device, config: CriticConfig, schedule: Schedule = ENDLESS
    ) -> Critic:
        """Load a saved critic, or a language model with a new head, from a Hugging Face folder.

        A new head returns 0 for every token, so values start at 0. Raises ModelError that names the missing part.
        """
        model, _ = load_folder(folder, "token_classification", key, new_head=True)
        memory.suit(model.num_parameters(), device)
        return cls(model.to(device), config, schedule)

    @torch.no_grad()
    def values(self, batch: TrajectoryBatch, wanted_S: Bools) -> Floats:
        """The value [T] of the state before each response token of the steps `wanted_S` [S]; NaN elsewhere."""
        values_T = np.full(len(batch.response_ids), np.nan)
        steps = np.flatnonzero(wanted_S & (np.diff(batch.token_offsets) > 0))
        for packed, token_rows, at in self._parts(batch, steps):
            values_T[at] = self.forward(packed)[token_rows, 0].double().cpu().numpy()
        step_of_token, _ = sampled_tokens(batch)
        return np.where(wanted_S[step_of_token], values_T, np.nan)

    def _parts(self, batch: TrajectoryBatch, steps: Ints) -> Iterator[tuple[PackedSteps, Ints, Ints]]:
        """Yield micro-batches, the indices of response tokens among their R tokens, and the batch columns of those.

        The micro-batches contain `steps`; if the critic reads whole trajectories, all steps of the same policy in them.
        """
        sequences: Sequences = batch
        token_at = np.arange(len(batch.response_ids))
        if self.config.context == "trajectory" and len(steps):
            mates = np.isin(batch.trajectory_of_step, batch.trajectory_of_step[steps])
            mates &= (batch.policy_of_step == batch.policy_of_step[steps[0]]) & (np.diff(batch.token_offsets) > 0)
            joined = TokenSequences.from_trajectories(batch, np.flatnonzero(mates), self.limit.tokens)
            sequences, token_at, steps = joined, joined.token_at, np.arange(len(joined.token_offsets) - 1)
        for packed in self.forward.micro_batches(sequences, steps, self.max_tokens):
            at = token_at[packed.token_at]
            token_rows = np.flatnonzero(at >= 0)
            yield self._readable(packed), token_rows, at[token_rows]

    def _readable(self, packed: PackedSteps) -> PackedSteps:
        """Replace tokens beyond the critic's vocabulary (a policy's may be padded) by its last token."""
        last = n_tokens(self.model) - 1
        return packed if packed.input_ids.max() <= last else replace(packed, input_ids=packed.input_ids.clip(max=last))

    def update(
        self, batch: TrajectoryBatch, returns_T: Floats, values_T: Floats, trained_S: Bools, mini_batch_of_step: Ints
    ) -> dict[str, float]:
        """Run one optimizer update per mini-batch and epoch; returns `critic/*` metrics, averaged over updates.

        `returns_T` [T]: the targets of the values. `values_T` [T]: the values before the update.
        """
        tokens = self.config.ppo_epochs * int(sampled_tokens(batch)[1][trained_S].sum())
        with phase("updating the critic", tokens, "sampled tokens"):
            metrics = self.learner.in_mini_batches(
                lambda steps: self._update_once(batch, returns_T, values_T, steps),
                trained_S,
                mini_batch_of_step,
                self.config.ppo_epochs,
            )
        return metrics | explained(batch, returns_T, values_T, trained_S)

    def _update_once(
        self, batch: TrajectoryBatch, returns_T: Floats, values_T: Floats, steps: Ints
    ) -> dict[str, float]:
        step_of_token, sampled_S = sampled_tokens(batch)
        steps = steps[sampled_S[steps] > 0]
        if len(steps) == 0:
            return {}
        weight_T = loss_weights(self.config, batch, steps)[step_of_token] * batch.response_mask
        known_T = weight_T > 0  # other tokens may hold NaN, and NaN times weight 0 is NaN
        old_T, target_T = np.where(known_T, values_T, 0.0), np.where(known_T, returns_T, 0.0)
        totals = {"vf_loss": 0.0, "vf_clipfrac": 0.0, "vpred_mean": 0.0}
        all_weight = float(weight_T.sum())
        self.learner.begin()
        for packed, token_rows, at in self._parts(batch, steps):
            values = self.forward(packed)[token_rows, 0]
            weight, old, target = tensors_of((weight_T, old_T, target_T), at, values)
            token_loss, clipped = value_loss(values, old, target, self.config.cliprange_value)
            loss = (token_loss * weight).sum()
            torch.autograd.backward(loss)
            totals["vf_loss"] += float(loss.detach())
            totals["vf_clipfrac"] += float((clipped * weight).sum()) / all_weight
            totals["vpred_mean"] += float((values.detach() * weight).sum()) / all_weight
            advance(int((weight_T[at] > 0).sum()))
        return {f"critic/{name}": value for name, value in (totals | self.learner.step()).items()}


def explained(batch: TrajectoryBatch, returns_T: Floats, values_T: Floats, trained_S: Bools) -> dict[str, float]:
    """`critic/vf_explained_var`: the share of the returns' variance explained by the values (1: all, 0: none).

    Measured over the sampled tokens of trained steps, before the update. Empty if all returns are equal.
    """
    step_of_token, _ = sampled_tokens(batch)
    over_T = trained_S[step_of_token] & batch.response_mask
    share = explained_variance(returns_T[over_T], values_T[over_T])
    return {} if share is None else {"critic/vf_explained_var": share}
