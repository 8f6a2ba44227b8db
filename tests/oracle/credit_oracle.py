"""Credit by the formulas of docs/concepts/credit.md, one step at a time, by recursion: slow, obvious and independent.

The oracle shares no code with `creditflow.credit`. `flow.py` computes rewards and their flow, `estimators.py` groups
and advantages.
"""

import math
from dataclasses import dataclass

from tests.oracle.estimators import BY_POLICY, EPSILON, WHITENING, WHITENING_ONES, Estimators


@dataclass
class Row:
    """The oracle's results for one step. `None`: the step has no such value."""

    sub_reward: float | None
    scored: bool
    failed: bool
    gate_open: bool | None
    """None for rules without gates."""
    gate: float | None
    """The factor in force on credit passed to parents; None for rules without flow."""
    frozen: bool
    own: float
    received: float
    shared: float
    withheld: float | None
    """None for rules without gates."""
    credit: float
    trained: bool
    level: str | None
    size: int
    baseline: float | None
    spread: float | None
    tied: bool
    weight: float
    divisor: float
    """The divisor of the step part of the advantage; 1 where that part is 0."""
    token_divisor: float
    """The divisor of the token terms; 1 for a step without them."""
    advantage: float
    token_advantages: list[float]
    returns: list[float | None] | None
    """`gae`: the return of each response token; None if it was not sampled."""


class Oracle(Estimators):
    def row(self, node):
        own, received, shared = self.terms(node)
        row = Row(
            sub_reward=self.sub_reward(node),
            scored=self.case(node) == "scored",
            failed=self.case(node) == "failed",
            gate_open=self.gate(node) == 1.0 if self.gated else None,
            gate=self.out(node) if self.flows else None,
            frozen=self.frozen(node),
            own=own,
            received=received,
            shared=shared,
            withheld=self.withheld(node) if self.gated else None,
            credit=self.credit(node),
            trained=self.trained(node),
            level=None,
            size=0,
            baseline=None,
            spread=None,
            tied=False,
            weight=self.weight(node),
            divisor=1.0,
            token_divisor=self.token_divisor(node) or 1.0,
            advantage=self.advantage(node),
            token_advantages=[self.token_advantage(node, j) for j in range(len(node.step.response_ids))],
            returns=self.returns(node) if self.o.adv_estimator == "gae" else None,
        )
        group = self.group(node)
        if group is not None:
            row.level, row.size = group.level, len(group.trajectories)
            self.measure(row, node, group)
        return row

    def measure(self, row, node, group):
        """Set the row's baseline, spread, tie and divisor."""
        estimator = self.o.adv_estimator
        over = self.whitening(node.step.policy) if estimator in WHITENING_ONES else None
        if estimator in BY_POLICY:
            row.tied = over is None or over.tied
            row.baseline, row.spread = (over.mean, over.spread) if over is not None else (None, None)
        else:
            row.baseline, row.spread, row.tied = self.centre(group), self.spread(group), self.tied(group)
            if estimator in WHITENING_ONES:  # then all steps of the policy have advantage 0
                row.tied = row.tied or over is None or over.tied
            if estimator == "rloo":
                row.baseline = self.centre_of_others(group, node)
        if over is not None and not over.tied:
            row.divisor = math.sqrt(over.spread**2 + WHITENING)
        elif estimator == "grpo" and self.o.norm_adv_by_std_in_grpo:
            row.divisor = row.spread + EPSILON

    def rows(self):
        return [self.row(node) for node in self.nodes]


def credit_rows(trajectories, options, values_T=None):
    """One Row for each step, in the order of the batch. `values_T`: the critic's values, for `gae`."""
    return Oracle(trajectories, options, values_T).rows()
