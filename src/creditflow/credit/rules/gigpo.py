"""`gigpo`: the outcome compared between rollouts, plus the return compared between equal states."""

from __future__ import annotations

from creditflow.credit.records import propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput
from creditflow.credit.rules.relative import IGNORED, by_steps, comparable, credit_of, episode_part, flow, lost


@propagation_rule("gigpo", ignores=IGNORED, relative=True, reads=("step_weight", "episode_weight"))
def gigpo(inputs: PropagationInput) -> Credit:
    """`A_t = episode_weight * GN(R) + step_weight * GN(G_t)` (GiGPO, arXiv 2505.10978, eq. 8).

    Equation numbers are those of its reference code.

    GN(R): over the rollouts of the task (eq. 3). `G_t = e_t + gamma * sum over children of share_k * G_k` is the return
    (eq. 5) along the dependency graph, with the outcome at the answer. GN(G_t): over all steps of the task with the
    same agent and prompt, the anchor state (eq. 6 and 7).
    """
    options, frozen_S = inputs.options, lost(inputs)
    own_S, received_S = flow(inputs, inputs.paid_S, outcome_to="answer")
    step_S = by_steps(inputs, own_S + received_S, "task_agent_state", comparable(inputs) & ~frozen_S)
    episode_S = options.episode_weight * episode_part(inputs)
    return credit_of(inputs, options.step_weight * step_S, shared_S=episode_S, frozen_S=frozen_S)
