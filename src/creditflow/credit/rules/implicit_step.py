"""`implicit_step`: the outcome compared between rollouts, plus implicit rewards compared between steps."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput
from creditflow.credit.rules.relative import IGNORED, by_steps, credit_of, episode_part, members


@propagation_rule("implicit_step", ignores=(*IGNORED, "share"), relative=True, reads=("step_weight", "episode_weight"))
def implicit_step(inputs: PropagationInput) -> Credit:
    """`A_t = episode_weight * GN(R) + step_weight * GN(r_t)`, `r_t` the implicit reward of step t (iStar, 2509.19199).

    The implicit reward is a sum of log-ratios over the response's tokens, `sum_j beta * log(pi_phi / pi_ref)`. The
    reward function `implicit_process` gives the mean of these log-ratios, rescaled from [-limit, limit] to [0, 1].
    With `sub_reward_origin: 0.5` (in the preset) `own * L` for L sampled tokens is the sum, up to a factor that GN
    removes. GN(r_t): over all steps of the task. A step is paid for its own tokens alone, without a return.
    """
    options = inputs.options
    length_S = np.maximum(inputs.columns.sampled_S, 1)
    step_S = by_steps(inputs, inputs.own_S * length_S, "task", members(inputs) & inputs.has_own_S)
    return credit_of(inputs, options.step_weight * step_S, shared_S=options.episode_weight * episode_part(inputs))
