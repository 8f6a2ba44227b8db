"""`gagpo`: GAE between steps, with the mean return of equal states as their value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.credit.records import Credit, RuleInput, propagation_rule, weight
from creditflow.credit.rules.base import answer_part, flow_up, misled
from creditflow.credit.rules.relative import RelativeRule, by_steps, codes_at, comparable, credit_of
from creditflow.data import Bools, Floats


@propagation_rule("gagpo")
@dataclass(frozen=True)
class Gagpo(RelativeRule):
    """GN of `A_t = e_t + gamma * sum over children of share_k * (V_k + lam * A_k) - V_t` (GAGPO, arXiv 2605.13217).

    The paper estimates V(s) by the mean return of the group's steps in the same state, and computes GAE (arXiv
    1506.02438) from it. Here the state is the agent's prompt, and time is the dependency graph, with the outcome at the
    answer. V is shrunk towards the mean return of the task's steps of the same agent and turn, see `state_values`. GN:
    over all steps of the task.
    """

    value_prior: float = weight(1.0)
    """The number of steps that the mean of the same agent and turn counts for in the value of a state. 0: the mean of
    equal states alone."""

    def credit(self, inputs: RuleInput) -> Credit:
        batch, options, misled_S = inputs.batch, inputs.options, misled(inputs)
        own_S = self.pay(inputs) + answer_part(batch, self.w_o * inputs.rewards.outcome_S)
        every_S, over_S = np.ones_like(own_S), comparable(inputs) & ~misled_S
        value_S = self.state_values(inputs, own_S + flow_up(batch, own_S, every_S, options.gamma), over_S)
        next_S = np.bincount(batch.edge_parent, (batch.share_of_step * value_S)[batch.edge_child], batch.n_steps)
        delta_S = own_S + options.gamma * next_S - value_S
        later_S = flow_up(batch, delta_S, every_S, options.gamma * options.lam)
        return credit_of(inputs, by_steps(inputs, delta_S + later_S, "task", over_S), misled_S=misled_S)

    def state_values(self, inputs: RuleInput, return_S: Floats, over_S: Bools) -> Floats:
        """[S] `V = (n * m + value_prior * m') / (n + value_prior)`.

        m: the mean return of the n steps of the task with the same agent and prompt; m': that of the task's steps of
        the same agent and turn. Where a state has no member, V is m', and 0 without one.
        """
        state_S, count_S = _means(inputs, return_S, over_S, "task_agent_state")
        wider_S, _ = _means(inputs, return_S, over_S, "task_agent_turn")
        total_S = count_S + self.value_prior
        value_S = (count_S * state_S + self.value_prior * wider_S) / np.where(total_S > 0, total_S, 1.0)
        return np.where(count_S > 0, value_S, wider_S)


def _means(inputs: RuleInput, value_S: Floats, over_S: Bools, level: str) -> tuple[Floats, Floats]:
    code_S = codes_at(inputs, level)
    n = int(code_S.max()) + 1
    count_G = np.bincount(code_S[over_S], minlength=n).astype(np.float64)
    mean_G = np.bincount(code_S[over_S], value_S[over_S], n) / np.maximum(count_G, 1)
    return mean_G[code_S], count_G[code_S]
