"""`mt_grpo`: the normalised rewards of this turn and later ones, plus the normalised outcome."""

from __future__ import annotations

from creditflow.credit.records import propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput
from creditflow.credit.rules.relative import IGNORED, by_steps, comparable, credit_of, episode_part, flow


@propagation_rule("mt_grpo", ignores=IGNORED, relative=True, reads=("step_weight", "episode_weight"))
def mt_grpo(inputs: PropagationInput) -> Credit:
    """`A_t = step_weight * sum over k >= t of GN(r_k) + episode_weight * GN(R)`.

    MT-GRPO (arXiv 2505.11821) adds the normalised reward of a turn to the normalised outcome. The sum over later turns
    is its form for more than two turns, as described in arXiv 2604.02869. GN(r_k): over the rollouts of the task, at
    the same agent and turn. The sum follows edges, discounted by `gamma` (1 in the preset).

    The sum biases the gradient: it has one baseline for each remaining turn, and their number depends on when the
    policy stops.
    """
    weight, over_S = inputs.options.step_weight, comparable(inputs) & inputs.is_paid_S
    normalised_S = by_steps(inputs, inputs.paid_S, "task_agent_turn", over_S)
    own_S, received_S = flow(inputs, normalised_S, outcome_to="all")
    return credit_of(inputs, weight * own_S, weight * received_S, inputs.options.episode_weight * episode_part(inputs))
