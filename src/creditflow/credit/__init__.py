"""Credit assignment on arrays. Usable alone: needs numpy, numba and `creditflow.data`, no model and no file.

`assign(batch, CreditOptions())` computes the credit and the advantage of every step. `explain` lists the operations
behind one advantage. `check_groups` lists the problems of a batch.

The end of a name is its shape: `N` trajectories, `S` steps, `E` edges, `T` response tokens, `A` agents, `K` reward
functions (in `score_weights`: folds), `G` groups, `C` cells (the part of one trajectory in one group), `P` policies,
`M` selected steps. Each name has one meaning in this package:

| array | value |
| --- | --- |
| `sub_reward_S` | r_t: the weighted mean of the step's scores, or the substitute for a failed one |
| `score_weight_S` | the weight of the sub-reward: `w_r`, or set by the rule |
| `harmless_S` | the probability that the step did no harm |
| `paid_S` | the pay for the sub-reward, `score_weight * (r_t - b)`, less the charge for harm |
| `outcome_S` | R: the outcome of the step's agent |
| `gate_S`, `share_S` | the factor on credit that the step passes to its parents; each parent's part of it |
| `own_S` | e_t: `paid_S`, with the step's part of the outcome where the outcome goes to the answer |
| `received_S`, `shared_S` | credit from children; credit that is the same at all steps of an agent |
| `credit_S` | c_t: own + received + shared |
| `reached_S` | bits: whether any signal, or the outcome, reached the step |
| `weight_S` | the weight that balances strata, the last factor of the advantage |
| `baseline_S`, `shift_S`, `divisor_S` | `advantage = weight * (((credit - baseline) - shift) / divisor)` |
| `code_S`, `cell_S`, `group_S` | the number of the step's key at one level; its cell; its group after any back-off |
| `value_S`, `values_S` | the values that a function works on |

| mask | steps |
| --- | --- |
| `scored_S`, `failed_S` | every matching function of positive weight gave a score; at least one failed |
| `matched_S` | scored or failed |
| `is_paid_S` | with pay: scored, or with a substitute or an expected sub-reward |
| `known_S` | with a known outcome |
| `masked_S` | left out of training, with their trajectory or because their agent's own outcome failed |
| `gate_open_S`, `forced_open_S` | with an open gate; opened to keep the threshold's floor |
| `frozen_S` | not trained by the rule's choice, see `Rule.why_frozen` |
| `misled_S` | without the outcome of a later answer step, whose scoring failed |
| `by_token_S` | paid token by token |
| `trained_S` | in the loss: not masked, frozen or misled, and not failed under a rule that pays scores |
| `tied_S` | in a group of equal values |
| `learns_S` | trained, with a group that is not tied |
| `over_S` | the steps that a mean, a spread or a comparison is taken over |
"""

from creditflow.credit.analysis.explain import Explanation, explain
from creditflow.credit.analysis.linter import LintFinding, check_groups
from creditflow.credit.analysis.metrics import unreached_agents
from creditflow.credit.assignment import Assignment, assign
from creditflow.credit.records import (
    OUTCOME,
    SIGNAL,
    Advantage,
    Credit,
    CreditOptions,
    Estimate,
    EstimatorInput,
    Fit,
    Groups,
    Rewards,
    Rule,
    RuleInput,
    advantage_estimator,
    option,
    propagation_rule,
)
from creditflow.credit.rules.base import OutcomeRule, ScoreRule
from creditflow.credit.thresholds.base import BatchStats, Threshold, make_threshold, threshold_kind

__all__ = [
    "OUTCOME",
    "SIGNAL",
    "Advantage",
    "Assignment",
    "BatchStats",
    "Credit",
    "CreditOptions",
    "Estimate",
    "EstimatorInput",
    "Explanation",
    "Fit",
    "Groups",
    "LintFinding",
    "OutcomeRule",
    "Rewards",
    "Rule",
    "RuleInput",
    "ScoreRule",
    "Threshold",
    "advantage_estimator",
    "assign",
    "check_groups",
    "explain",
    "make_threshold",
    "option",
    "propagation_rule",
    "threshold_kind",
    "unreached_agents",
]
