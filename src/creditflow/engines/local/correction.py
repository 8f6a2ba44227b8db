"""Correct updates for a sampler whose log-probs differ from the actor's.

The actor computes the log-probs of the recorded tokens before the update. PPO's ratio uses these as the old policy, and
a truncated importance weight corrects for sampling from the sampler instead of the old policy (Yao et al. 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training"; metrics and options have verl's names).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from creditflow.config import Config
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.engines.local.actor import Actor, token_logprobs
from creditflow.engines.local.learner import sampled_tokens
from creditflow.engines.local.loss import LOG_BOUND


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """The options of the correction."""

    level: Literal["token", "sequence"] | None
    """The unit of a weight; None: the old log-probs are the actor's, and the loss has no weights."""
    threshold: float

    @classmethod
    def from_config(cls, config: Config) -> RolloutCorrection | None:
        """The correction of a recipe; None if the built-in sampler samples and no weights are wanted."""
        own, options = config.actor_rollout_ref.rollout.name == "local", config.algorithm.rollout_correction
        level = options.rollout_is
        if level == "auto":
            level = None if own else "token"
        return None if own and level is None else cls(level, options.rollout_is_threshold)

    def apply(
        self, actor: Actor, batch: TrajectoryBatch, advantage_T: Floats, trained_S: Bools
    ) -> tuple[TrajectoryBatch, Floats, dict[str, float]]:
        """The batch with the actor's log-probs, the weighted advantages [T], and metrics.

        `trained_S` [S]: the steps of the update. The policy loss is proportional to the advantage, and a weight is
        positive, so weighting the advantage weights the loss and leaves KL and entropy terms alone.
        """
        step_of_token, sampled_S = sampled_tokens(batch)
        steps = np.flatnonzero(trained_S & (sampled_S > 0))
        if not len(steps):
            return batch, advantage_T, {}
        old_T = actor_logprobs(actor, batch, steps)
        inside_T = batch.response_mask & trained_S[step_of_token]
        raw_T = importance_weights(old_T - batch.logprobs, inside_T, step_of_token, self.level or "token")
        weight_T = np.minimum(raw_T, self.threshold)
        metrics = mismatch_metrics(old_T[inside_T], batch.logprobs[inside_T])
        if self.level is not None:
            metrics |= weight_metrics(raw_T[inside_T], weight_T[inside_T], self.threshold)
            advantage_T = np.where(inside_T, advantage_T * weight_T, advantage_T)
        return replace(batch, logprobs=old_T), advantage_T, metrics


@torch.no_grad()
def actor_logprobs(actor: Actor, batch: TrajectoryBatch, steps: Ints) -> Floats:
    """The actor's log-probs [T] of the response tokens of `steps`; the recorded ones elsewhere."""
    old_T = np.array(batch.logprobs, dtype=np.float64)
    forward = actor.policy.forward
    for packed in forward.micro_batches(batch, steps, actor.max_tokens):
        logprobs, _ = token_logprobs(forward, packed, batch)
        old_T[packed.token_at] = logprobs.double().cpu().numpy()
    return old_T


def importance_weights(
    log_ratio_T: Floats, inside_T: Bools, step_of_token: Ints, level: Literal["token", "sequence"]
) -> Floats:
    """The weight exp(log ratio) of each token [T], or of its step's whole response; 1 where `inside_T` is False."""
    log_T = np.where(inside_T, log_ratio_T, 0.0)
    if level == "sequence":
        log_T = np.where(inside_T, np.bincount(step_of_token, log_T)[step_of_token], 0.0)
    weight_T: Floats = np.exp(np.clip(log_T, -LOG_BOUND, LOG_BOUND))
    return weight_T


def mismatch_metrics(old: Floats, sampled: Floats) -> dict[str, float]:
    """The difference of the actor's and the sampler's log-probs [T] of the same tokens."""
    log_ratio, difference = old - sampled, np.abs(np.exp(old) - np.exp(sampled))
    return {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_std": float(difference.std()),
        "rollout_corr/kl": float(-log_ratio.mean()),
        "rollout_corr/k3_kl": float((np.exp(np.clip(log_ratio, -LOG_BOUND, LOG_BOUND)) - log_ratio - 1).mean()),
        "rollout_corr/logprob_diff_max": float(np.abs(log_ratio).max()),
    }


def weight_metrics(raw: Floats, weight: Floats, threshold: float) -> dict[str, float]:
    """The distribution of the truncated weights [T]. `raw`: before the truncation."""
    return {
        "rollout_corr/rollout_is_mean": float(weight.mean()),
        "rollout_corr/rollout_is_max": float(weight.max()),
        "rollout_corr/rollout_is_min": float(weight.min()),
        "rollout_corr/rollout_is_std": float(weight.std()),
        "rollout_corr/rollout_is_eff_sample_size": float(weight.mean() ** 2 / np.square(weight).mean()),
        "rollout_corr/rollout_is_ratio_fraction_high": float((raw > threshold).mean()),
        "rollout_corr/rollout_is_ratio_fraction_low": float((raw < 1 / threshold).mean()),
    }
