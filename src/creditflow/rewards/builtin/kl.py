"""The distance of each token from the frozen reference: a penalty from log-probs that the engine provides.

It reads only two columns of a step, `logprobs` and `ref_logprobs`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from typing import Annotated, Literal

from creditflow._utils.sections import expected
from creditflow.data import Score, Step, Trajectory
from creditflow.rewards.registry import builtin, reward
from creditflow.rewards.support.arguments import Limit, check_arguments
from creditflow.rewards.values import DetailedScore, neutral_where_not_sampled

NO_REFERENCE = (
    "the engine hands over no reference log-probabilities: the local engine computes them for every trajectory where a "
    "function of the recipe has `needs_reference = True`; elsewhere, set step.ref_logprobs before scoring"
)
"""Reason of the failed score of a step without `ref_logprobs`."""

_EXP_CLAMP = 20.0  # as in verl: beyond it the estimate exceeds any useful limit


def _k3(difference: float) -> float:
    bounded = max(-_EXP_CLAMP, min(_EXP_CLAMP, difference))
    return math.expm1(-bounded) + bounded


ESTIMATORS: dict[str, Callable[[float], float]] = {
    "kl": lambda difference: difference,
    "abs": abs,
    "mse": lambda difference: 0.5 * difference * difference,
    "low_var_kl": _k3,
}
"""Estimates of a token's KL(policy || reference) from `logprob - reference logprob`, under verl's names."""


@builtin
@reward(name="kl_to_reference")
class KlToReference:
    """Minus an estimate of KL(policy || reference) for every response token: 0 if the policy has not moved.

    The weight of the entry is the coefficient. With d = log pi - log pi_ref of the sampled token:

    `estimator`: `kl` (k1): d, unbiased, of either sign; `abs`: |d|; `mse` (k2): d^2 / 2; `low_var_kl` (k3): exp(-d) - 1
    + d, unbiased and never negative.
    `per`: One value per token, or the mean over the sampled tokens, clipped after averaging.
    `limit`: Values are clipped to it; the number `clipped` is the share of clipped ones.

    Both log-probs are at the temperature of the step's sampling. A step without sampled tokens (a greedy one) gets 0, a
    step without `ref_logprobs` is `failed`. Only the embedded engine computes them.

    Range: -`limit` to 0; for `kl` -`limit` to `limit`. Cost: microseconds; the engine spends one forward pass of the
    reference per step. Source: Schulman, "Approximating KL divergence" (2020, http://joschu.net/blog/kl-approx.html);
    as a reward: InstructGPT (arXiv 2203.02155, eq. 2), verl's `kl_penalty`.
    """

    inline = True
    needs_reference = True

    def __init__(
        self,
        estimator: Literal["kl", "abs", "mse", "low_var_kl"] = "low_var_kl",
        per: Annotated[Literal["token", "step"], expected("token or step")] = "token",
        limit: Limit = 1.0,
    ) -> None:
        check_arguments(KlToReference.__init__, locals())
        self.estimate, self.per, self.limit = ESTIMATORS[estimator], per, float(limit)
        self.range = (-self.limit, self.limit if estimator == "kl" else 0.0)

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """One value per response token, or one for the step."""
        if not any(step.response_mask):
            return Score(0.0, self.range, reason="no token was sampled")
        if not step.ref_logprobs:
            return Score(0.0, self.range, status="failed", reason=NO_REFERENCE)
        columns = zip(step.logprobs, step.ref_logprobs, step.response_mask, strict=True)
        differences = [logprob - reference for logprob, reference, is_sampled in columns if is_sampled]
        if not all(map(math.isfinite, differences)):
            raise ValueError("a log-probability is not a finite number")
        sampled = [-self.estimate(difference) for difference in differences]
        if self.per == "step":
            sampled = [sum(sampled) / len(sampled)]
        low, high = self.range
        clipped = [max(low, min(high, value)) for value in sampled]
        share = sum(map(operator.ne, clipped, sampled)) / len(sampled)
        if self.per == "step":
            return DetailedScore(clipped[0], self.range, numbers=(("clipped", share),))
        rest = iter(clipped)
        values = [next(rest) if is_sampled else 0.0 for is_sampled in step.response_mask]
        tokens = tuple(neutral_where_not_sampled(values, step.response_mask))
        return DetailedScore(tokens, self.range, numbers=(("clipped", share),))

    def cache_key(self, step: Step, trajectory: Trajectory) -> str:
        """The two columns and the mask: the score depends on nothing else."""
        return json.dumps([step.response_mask, step.logprobs, step.ref_logprobs])
