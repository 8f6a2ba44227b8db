"""Policy losses over padded rows: B rows of R response tokens. Knows log-probs, advantages and masks; no model.

Every loss is a sum of per-token terms times `token_weights`, which carry the averaging over the whole mini-batch, so
that micro-batches may be cut anywhere without changing the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from creditflow.errors import ConfigError


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), with DAPO's separate upper bound.

    All [B, R]. Returns the loss (a scalar), and where the clipped term was the larger [B, R].
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = (torch.maximum(unclipped, clipped) * token_weights).sum()
    return loss, clipped > unclipped


def _k3(difference: Tensor) -> Tensor:
    # Schulman's k3, of r = ref / policy: r - 1 - log r; clamped as verl does, so that one outlier cannot explode.
    return (torch.expm1(-difference.clamp(-20, 20)) + difference.clamp(-20, 20)).clamp(-10, 10)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda difference: difference,
    "abs": torch.abs,
    "mse": lambda difference: 0.5 * difference.square(),
    "low_var_kl": _k3,
}
"""Per-token estimates of KL(policy || reference) from `logprob - reference logprob`, under verl's names."""


def token_weights_for(loss_agg_mode: str, n_trained_tokens_S: Tensor) -> Tensor:
    """[S] the weight of each trained token of a step, given how many trained tokens each step has (0: masked out).

    `token-mean`: every token of the mini-batch counts the same. `seq-mean-token-mean`: every step counts the same,
    whatever its length. `seq-mean-token-sum`: steps are averaged, their tokens summed.
    """
    trained = n_trained_tokens_S > 0
    n_steps = trained.sum().clamp(min=1)
    lengths = n_trained_tokens_S.clamp(min=1).double()
    if loss_agg_mode == "token-mean":
        weights = torch.ones_like(lengths) / n_trained_tokens_S.sum().clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-mean":
        weights = 1 / (lengths * n_steps)
    elif loss_agg_mode == "seq-mean-token-sum":
        weights = torch.ones_like(lengths) / n_steps
    else:
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_agg_mode: {loss_agg_mode!r}; expected token-mean, seq-mean-token-mean or "
            "seq-mean-token-sum"
        )
    return weights * trained
