"""REINFORCE++: discounted credit, whitened over the policy's tokens."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import Estimate, EstimatorInput, advantage_estimator


@advantage_estimator("reinforce_plus_plus", grouped=False, whitened=True, formulas={"raw": ("credit * discount",)})
def reinforce_plus_plus(inputs: EstimatorInput) -> Estimate:
    """`c * gamma_token^(trained tokens after this one)`, whitened (arXiv 2501.03262)."""
    zero_S, gamma = np.zeros_like(inputs.credit_S), inputs.options.gamma_token
    if gamma == 1.0 or not inputs.batch.response_mask.size:
        return Estimate(zero_S)
    batch, length_S = inputs.batch, np.diff(inputs.batch.token_offsets)
    after_T = np.cumsum(batch.response_mask)
    np.subtract(np.repeat(np.cumsum(batch.sampled_of_step), length_S), after_T, out=after_T)
    power = np.cumprod([1.0] + [gamma] * int(after_T.max()), dtype=np.float64)  # by repeated multiplication
    unscaled_T = power[after_T]
    del after_T  # as large as the factors, which are made next
    unscaled_T *= np.repeat(inputs.credit_S, length_S)
    return Estimate(zero_S, unscaled_T=unscaled_T)
