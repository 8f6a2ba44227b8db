"""`irc`: scores weighted by their correlation with the outcome, as returns compared turn by turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.credit.records import Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import misled
from creditflow.credit.rules.relative import WeightedRule, by_steps, comparable, credit_of, scored
from creditflow.data import Floats

_LEAST = 1e-18
"""Variances up to this are rounding."""


@propagation_rule("irc")
@dataclass(frozen=True)
class Irc(WeightedRule):
    """`A_t = step_weight * GN(G_t) + episode_weight * GN(R)`, `G_t` the discounted return of calibrated rewards and R.

    Iterative reward calibration (arXiv 2604.02869) sets the reward of each kind of turn in proportion to its
    point-biserial correlation with success, and compares returns instead of adding up normalised rewards; the preset
    has its gamma of 0.9 and its outcome weight of 0.3. Here a kind of turn is an agent, see `correlations`. GN(G_t):
    over the rollouts of the task, at the same agent and turn.
    """

    def credit(self, inputs: RuleInput) -> Credit:
        misled_S, paid_S = misled(inputs), self.pay(inputs)
        return_S = self.returns(inputs, paid_S * correlations(inputs, paid_S))
        step_S = by_steps(inputs, return_S, "task_agent_turn", comparable(inputs) & ~misled_S)
        return credit_of(inputs, self.step_weight * step_S, shared_S=self.episode_S(inputs), misled_S=misled_S)


def correlations(inputs: RuleInput, paid_S: Floats) -> Floats:
    """[S] the correlation of the agent's scores with the outcome, over its steps in the batch (Pearson).

    With outcomes of 0 and 1 this is the point-biserial correlation. 0 where the scores or the outcomes are equal.
    """
    agent_S = inputs.batch.agent_of_step
    n = len(inputs.batch.agent_names)
    at = np.flatnonzero(comparable(inputs) & scored(inputs) & inputs.rewards.known_S)
    agent, score, outcome = agent_S[at], paid_S[at], inputs.rewards.outcome_S[at]
    count_A = np.maximum(np.bincount(agent, minlength=n), 1)
    score = score - (np.bincount(agent, score, n) / count_A)[agent]
    outcome = outcome - (np.bincount(agent, outcome, n) / count_A)[agent]
    both_A, scores_A, outcomes_A = (
        np.bincount(agent, product, n) / count_A for product in (score * outcome, score**2, outcome**2)
    )
    known_A = (scores_A > _LEAST) & (outcomes_A > _LEAST)
    correlation_A = np.zeros(n)
    correlation_A[known_A] = both_A[known_A] / np.sqrt(scores_A[known_A] * outcomes_A[known_A])
    return correlation_A[agent_S]
