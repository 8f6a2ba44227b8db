"""Policy and value losses over response tokens, from log-probs, advantages and weights of any shape.

Every loss is a weighted sum of per-token terms. The weights contain the averaging over the whole mini-batch, so the
division into micro-batches does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from creditflow.config import LOSS_AGG_MODES
from creditflow.data import Floats, Ints
from creditflow.errors import ConfigError, did_you_mean

LOG_BOUND = 20.0
"""The bound of log ratios: ratios are clamped to exp(±20), as in verl, so that an outlier cannot overflow."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the ratio of new to old probability."""

    low: float = 0.2
    """Below 1 - low, a token with negative advantage has no gradient."""
    high: float = 0.2
    """Above 1 + high, a token with positive advantage has no gradient."""
    dual: float | None = 3.0
    """Above `dual`, a token with negative advantage has no gradient (dual clip); None: no bound."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip: Clip,
    mode: str = "vanilla",
    sequence: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The policy loss of each token under `actor.policy_loss.loss_mode`.

    `sequence`, for `gspo`: (the row of each token, from 0; 1 for tokens that were sampled, else 0). Returns the loss, a
    mask of tokens whose ratio is clipped, and a mask of tokens that the dual clip bounds. All shapes are those of
    `logprobs`.
    """
    match mode:
        case "gspo":
            assert sequence is not None, "the actor passes the rows"
            log_ratio = _sequence_log_ratio(logprobs, old_logprobs, *sequence)
            return _clipped_surrogate(
                torch.exp(log_ratio.clamp(-LOG_BOUND, LOG_BOUND)),
                advantages,
                Clip(clip.low, clip.high, None),
            )
        case "cispo":
            return _cispo(logprobs, old_logprobs, advantages, clip)
        case _:
            return _clipped_surrogate(
                torch.exp((logprobs - old_logprobs).clamp(-LOG_BOUND, LOG_BOUND)), advantages, clip
            )


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    With DAPO's separate upper bound (Yu et al. 2025, arXiv 2503.14476, eq. 8) and dual clip (Ye et al. 2020, arXiv
    1912.09729, eq. 5).
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = torch.maximum(unclipped, clipped)
    bounded = torch.zeros_like(loss, dtype=torch.bool)
    if clip.dual is not None:
        bound = -advantages * clip.dual
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
    return loss, clipped > unclipped, bounded


def _sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, row: Tensor, sampled: Tensor) -> Tensor:
    """The mean log ratio of each token's response, with the gradient of the token's own log-prob.

    GSPO (Zheng et al. 2025, arXiv 2507.18071), as a loss per token (GSPO-token): if all tokens of a response have the
    same advantage, the mean over its tokens has the value and the gradient of the loss per sequence.
    """
    difference = (logprobs.detach() - old_logprobs) * sampled
    n = int(row.max()) + 1 if row.numel() else 0
    total = torch.zeros(n, dtype=difference.dtype, device=difference.device).index_add_(0, row, difference)
    count = torch.zeros_like(total).index_add_(0, row, sampled.to(difference.dtype))
    return logprobs - logprobs.detach() + (total / count.clamp(min=1))[row]


def _cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor, Tensor]:
    """CISPO (MiniMax 2025, arXiv 2506.13585): the log-prob, weighted by the clipped ratio as a constant.

    Unlike PPO's surrogate, a clipped token keeps its gradient.
    """
    ratio = torch.exp((logprobs.detach() - old_logprobs).clamp(-LOG_BOUND, LOG_BOUND))
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = -weight * advantages * logprobs
    return loss, ratio != weight, torch.zeros_like(loss, dtype=torch.bool)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss: half the larger squared error of the value and the clipped value of each token.

    The clipped value is within `cliprange` of the old value (Schulman et al.'s implementation). Returns the loss and a
    mask of tokens where the clipped error is larger.
    """
    near = old_values + (values - old_values).clamp(-cliprange, cliprange)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def _k3(difference: Tensor) -> Tensor:
    # Schulman's k3 with r = ref / policy: r - 1 - log r; clamped as in verl, so that an outlier cannot explode.
    difference = difference.clamp(-LOG_BOUND, LOG_BOUND)
    return (torch.expm1(-difference) + difference).clamp(-10, 10)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "abs": torch.abs,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": _k3,
}
"""Per-token estimates of KL(policy || reference) from `logprob - reference logprob` (Schulman 2020, "Approximating KL
divergence"), under verl's short names; the next line adds its long names."""
KL_ESTIMATORS |= {long: KL_ESTIMATORS[short] for long, short in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"))}


def token_weights(mode: str, n_tokens_S: Ints, trajectory_S: Ints, scale_factor: float | None = None) -> Floats:
    """The loss weight [S] of each trained token of a step, from the number of trained tokens per step.

    A sequence is a step's response. `token-mean`: every token of the mini-batch has the same weight.
    `seq-mean-token-mean`: every step has the same weight, regardless of its length. `seq-mean-token-sum`: steps are
    averaged and their tokens summed; `-norm`: also divided by `scale_factor` (Dr. GRPO, Liu et al. 2025, arXiv
    2503.20783). `traj-mean-step-mean`: trajectories have equal weights, and so have the steps within a trajectory.

    `n_tokens_S` [S]: 0 for steps that are not trained. `trajectory_S` [S]: each step's trajectory.
    """
    trained_S = n_tokens_S > 0
    n_steps = float(trained_S.sum()) or 1.0
    length_S = np.maximum(n_tokens_S, 1).astype(np.float64)
    match mode:
        case "token-mean":
            weight_S = np.full(len(length_S), 1 / (float(n_tokens_S.sum()) or 1.0))
        case "seq-mean-token-mean":
            weight_S = 1 / (length_S * n_steps)
        case "seq-mean-token-sum":
            weight_S = np.full(len(length_S), 1 / n_steps)
        case "seq-mean-token-sum-norm":
            assert scale_factor is not None  # validated by the configuration
            weight_S = np.full(len(length_S), 1 / (n_steps * scale_factor))
        case "traj-mean-step-mean":
            steps_N = np.bincount(trajectory_S, trained_S, int(trajectory_S.max(initial=0)) + 1)
            n_trajectories = max(1, int((steps_N > 0).sum()))
            weight_S = 1 / (length_S * np.where(steps_N > 0, steps_N, 1.0)[trajectory_S] * n_trajectories)
        case _:
            modes, hint = ", ".join(LOSS_AGG_MODES), did_you_mean(mode, LOSS_AGG_MODES)
            raise ConfigError(f"actor_rollout_ref.actor.loss_agg_mode: expected one of {modes}, got {mode!r}{hint}")
    return np.asarray(weight_S * trained_S)
