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
    from creditflow.credit import kernels

    batch = inputs.batch
    after_T = kernels.tokens_to_go(batch.token_offsets, batch.response_mask)
    power = kernels.powers(gamma, int(after_T.max(initial=0)) + 1)
    unscaled_T = np.repeat(inputs.credit_S, np.diff(batch.token_offsets)) * power[after_T]
    return Estimate(zero_S, unscaled_T=unscaled_T)
