"""`gigpo`: the outcome compared between rollouts, plus the return compared between equal states."""

from __future__ import annotations

from dataclasses import dataclass

from creditflow.credit.records import Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import misled
from creditflow.credit.rules.relative import WeightedRule, by_steps, comparable, credit_of


@propagation_rule("gigpo")
@dataclass(frozen=True)
class Gigpo(WeightedRule):
    """`A_t = episode_weight * GN(R) + step_weight * GN(G_t)` (GiGPO, arXiv 2505.10978, eq. 8).

    Equation numbers are those of its reference code.

    GN(R): over the rollouts of the task (eq. 3). `G_t = e_t + gamma * sum over children of share_k * G_k` is the return
    (eq. 5) along the dependency graph, with the outcome at the answer. GN(G_t): over all steps of the task with the
    same agent and prompt, the anchor state (eq. 6 and 7).
    """

    def credit(self, inputs: RuleInput) -> Credit:
        misled_S, return_S = misled(inputs), self.returns(inputs, self.pay(inputs))
        step_S = by_steps(inputs, return_S, "task_agent_state", comparable(inputs) & ~misled_S)
        return credit_of(inputs, self.step_weight * step_S, shared_S=self.episode_S(inputs), misled_S=misled_S)
