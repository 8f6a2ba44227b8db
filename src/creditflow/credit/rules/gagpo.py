"""`gagpo`: GAE between steps, with the mean return of equal states as their value."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput, parent_counts, shares
from creditflow.credit.rules.relative import IGNORED, by_steps, comparable, credit_of, flow, lost
from creditflow.data import Bools, Floats


@propagation_rule("gagpo", ignores=IGNORED, relative=True, reads=("value_prior",))
def gagpo(inputs: PropagationInput) -> Credit:
    """GN of `A_t = e_t + gamma * sum over children of share_k * (V_k + lam * A_k) - V_t` (GAGPO, arXiv 2605.13217).

    The paper estimates V(s) by the mean return of the group's steps in the same state, and computes GAE (arXiv
    1506.02438) from it. Here the state is the agent's prompt, and time is the dependency graph, with the outcome at the
    answer. V is shrunk towards the mean return of the task's steps of the same agent and turn, see `state_values`. GN:
    over all steps of the task.
    """
    from creditflow.credit import kernels

    batch, options, frozen_S = inputs.batch, inputs.options, lost(inputs)
    own_S, received_S = flow(inputs, inputs.paid_S, outcome_to="answer")
    over_S = comparable(inputs) & ~frozen_S
    value_S = state_values(inputs, own_S + received_S, over_S)
    share_S = shares(parent_counts(batch))
    passed_E = (share_S * value_S)[batch.edge_child]
    next_S = np.bincount(batch.edge_parent, passed_E, batch.n_steps)
    every_S, delta_S, later_S = np.ones_like(own_S), own_S + options.gamma * next_S - value_S, np.zeros_like(own_S)
    kernels.flow_up(
        batch.edge_child, batch.edge_parent, delta_S, every_S, share_S, options.gamma * options.lam, later_S
    )
    return credit_of(inputs, by_steps(inputs, delta_S + later_S, "task", over_S), frozen_S=frozen_S)


def state_values(inputs: PropagationInput, return_S: Floats, over_S: Bools) -> Floats:
    """[S] `V = (n * m + value_prior * m') / (n + value_prior)`.

    m: the mean return of the n steps of the task with the same agent and prompt; m': that of the task's steps of the
    same agent and turn. Where a state has no member, V is m', and 0 without one.
    """
    state_S, count_S = _means(inputs, return_S, over_S, "task_agent_state")
    wider_S, _ = _means(inputs, return_S, over_S, "task_agent_turn")
    total_S, prior = count_S + inputs.options.value_prior, inputs.options.value_prior
    value_S = (count_S * state_S + prior * wider_S) / np.where(total_S > 0, total_S, 1.0)
    return np.where(count_S > 0, value_S, wider_S)


def _means(inputs: PropagationInput, value_S: Floats, over_S: Bools, level: str) -> tuple[Floats, Floats]:
    code_S = inputs.columns.code_S(level)
    n = int(code_S.max()) + 1
    count_G = np.bincount(code_S[over_S], minlength=n).astype(np.float64)
    mean_G = np.bincount(code_S[over_S], value_S[over_S], n) / np.maximum(count_G, 1)
    return mean_G[code_S], count_G[code_S]
