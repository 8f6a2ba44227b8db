"""Sequential updates of several policies: the factor that corrects for the policies updated before."""

from __future__ import annotations

import numpy as np

from creditflow.data import Bools, Floats, TrajectoryBatch
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.correction import actor_logprobs
from creditflow.engines.local.learner import sampled_tokens
from creditflow.engines.local.loss import LOG_BOUND


class JointRatio:
    """The probability ratio of the already updated policies, per trajectory, in one training step.

    HAPPO (Kuba et al. 2022, arXiv 2109.11251, eq. 11) multiplies the advantage of an agent by the product of the ratios
    new / old of the agents that were updated before it in the same training step, at their actions in the joint action.
    Agents of an LLM team act in turns instead (MARFT, Liao et al. 2025, arXiv 2504.16129). Here the joint action is the
    trajectory: the product of the ratios of all sampled tokens of the updated policies' steps. So the gradient of a
    later policy is that of the team with the updated ones. `ratio_max`: the upper limit of the factor; None: no limit.
    """

    def __init__(self, batch: TrajectoryBatch, ratio_max: float | None) -> None:
        self.batch = batch
        self.ratio_max = ratio_max
        self._log_N: Floats = np.zeros(batch.n_trajectories)
        self._before_T: Floats = np.zeros(0)
        self._begun = False

    def begin(self, actor: Actor, own_S: Bools) -> None:
        """Compute a policy's log-probs before its update. `own_S` [S]: the policy's steps.

        The recorded ones are not used: the sampler rounds differently, and these differences would add up over a
        trajectory.
        """
        self._before_T = self._logprobs(actor, own_S)

    def end(self, actor: Actor, own_S: Bools) -> None:
        """Include the policy in the factor, after its update."""
        step_of_token, _ = sampled_tokens(self.batch)
        inside_T = self.batch.response_mask & own_S[step_of_token]
        log_ratio_T = np.where(inside_T, self._logprobs(actor, own_S) - self._before_T, 0.0)
        self._log_N += np.bincount(self.batch.trajectory_of_step[step_of_token], log_ratio_T, len(self._log_N))
        self._begun = True

    def _logprobs(self, actor: Actor, own_S: Bools) -> Floats:
        _, sampled_S = sampled_tokens(self.batch)
        return actor_logprobs(actor, self.batch, np.flatnonzero(own_S & (sampled_S > 0)))

    def apply(self, advantage_T: Floats, own_S: Bools) -> tuple[Floats, dict[str, float]]:
        """The weighted advantages [T] of a policy's trained steps `own_S` [S], and metrics of the factor.

        The policy loss is proportional to the advantage, and the factor is positive, so weighting the advantage weights
        the loss and leaves KL and entropy terms alone. The first policy of a step has neither factor nor metrics.
        """
        of_steps = np.flatnonzero(own_S)
        if not self._begun or not len(of_steps):
            return advantage_T, {}
        step_of_token, _ = sampled_tokens(self.batch)
        raw_N = np.exp(np.clip(self._log_N, -LOG_BOUND, LOG_BOUND))
        factor_N = raw_N if self.ratio_max is None else np.minimum(raw_N, self.ratio_max)
        factor_S, raw_S = (of_all[self.batch.trajectory_of_step[of_steps]] for of_all in (factor_N, raw_N))
        metrics = {
            "actor/sequential_factor_mean": float(factor_S.mean()),
            "actor/sequential_factor_min": float(factor_S.min()),
            "actor/sequential_factor_max": float(factor_S.max()),
            "actor/sequential_factor_truncated": float((raw_S > factor_S).mean()),
        }
        return advantage_T * factor_N[self.batch.trajectory_of_step[step_of_token]], metrics
