"""GAE: advantages from a critic's values, between steps and inside them."""

from __future__ import annotations

import numpy as np

from creditflow.credit.estimators.base import refuse_values
from creditflow.credit.records import CriticTerms, Estimate, EstimatorInput, advantage_estimator
from creditflow.credit.rules.base import outcome_gates
from creditflow.credit.tokens import at_first_token, paid_by_token

_AHEAD = "gamma_token * lam_token * next_raw"
_FORMULAS = {
    "raw": (
        f"gamma_token * next_value - value + {_AHEAD}",
        f"gamma_token * next_value - value + token_reward + {_AHEAD}",
        "reward + down - value",
        "reward + down - value + token_reward",
    ),
    "reward": ("own + shared", "own - paid + shared"),
    "passed": ("value + lam * first - kept", "value + lam * first", "reward + down - kept", "reward + down"),
}


@advantage_estimator("gae", grouped=False, whitened=True, critic=True, formulas=_FORMULAS)
def gae(inputs: EstimatorInput) -> Estimate:
    """Generalised advantage estimation (arXiv 1506.02438): between steps along the gated graph, inside a step by token.

    With V_k, A_k at the first trained token of child k, e_t the own reward and V_j the value at a step's token j:

        down_t  = gamma * sum over children k of share_k * gate_k * (V_k + lam * A_k)
        delta_j = gamma_token * V_{j+1} - V_j            (last token: e_t + down_t - V_j)
        A_j     = delta_j + gamma_token * lam_token * A_{j+1}

    A step without trained tokens has no value; it passes on `e_t + down_t`. Under a rule without flow the outcome, paid
    at the answer, passes along every edge: a child then passes `V_k + lam * A_k` less the pay for its own score,
    discounted to its first token. Nothing of that pay remains if `lam` and `lam_token` are 1, or the critic is exact.
    """
    from creditflow.credit import kernels

    batch, options, credit, values_T = inputs.batch, inputs.options, inputs.credit, inputs.values_T
    assert values_T is not None, "`assign` refuses a critic's estimator without values"
    zero_S, gate_S = np.zeros_like(inputs.credit_S), outcome_gates(credit, options)
    token_reward_T = np.empty(0) if inputs.token_reward_T is None else inputs.token_reward_T
    down_S, first_S, moments_S = np.zeros(batch.n_steps), np.zeros(batch.n_steps), np.empty((batch.n_steps, 5))
    tokens, rewards = (batch.token_offsets, batch.response_mask, values_T), (inputs.reward_S, token_reward_T)
    kept_S = None
    if credit.gate_S is None and credit.paid_S is not None:
        kept_S = credit.paid_S * options.gamma_token ** np.maximum(batch.sampled_of_step - 1, 0)
        if options.gamma_token < 1.0 and token_reward_T.size:
            to_go_T = kernels.discounted_sums(*tokens[:2], token_reward_T, options.gamma_token)
            kept_S = np.where(paid_by_token(inputs.rewards), at_first_token(batch, to_go_T, 0.0), kept_S)
    flow = zero_S if gate_S is None else gate_S, zero_S if kept_S is None else kept_S, batch.share_of_step
    discounts = options.gamma, options.lam, options.gamma_token, options.lam_token
    results = down_S, first_S, moments_S
    kernels.gae(batch.edge_child, batch.edge_parent, *tokens, *rewards, *flow, discounts, *results)
    if not np.isfinite(moments_S[moments_S[:, 0] > 0, 1]).all():
        refuse_values(batch, values_T)
    terms = CriticTerms(values_T, token_reward_T, inputs.reward_S, down_S, first_S, kept_S)
    return Estimate(zero_S, moments_S=moments_S, critic=terms)
