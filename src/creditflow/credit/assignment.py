"""Credit assignment from end to end: a batch and options in, an advantage for every step out.

Knows the order of the parts and nothing of their insides. Pure: no file, no clock, no random number, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from creditflow.credit import metrics
from creditflow.credit.advantage import ADVANTAGE_ESTIMATORS, Credited, stratum_weights
from creditflow.credit.checks import check_batch
from creditflow.credit.decompose import outcomes, sub_rewards
from creditflow.credit.gates import gate_factors
from creditflow.credit.groups import LEVEL_NAMES, describe, group_statistics
from creditflow.credit.options import CreditOptions
from creditflow.credit.propagate import PROPAGATION_RULES, Flow
from creditflow.errors import BatchError
from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What S steps earned, and every term of it.

    `credit = own + received + shared`, and for a trained step with a group that is not tied
    `advantage = weight * (credit - baseline) / (spread + 1e-6)` (without the division where
    `norm_adv_by_std_in_grpo` is false). For any other step the advantage is exactly 0. Terms of masked steps are what
    they would have been.
    """

    sub_reward_S: Floats
    """[S] r_t in [0, 1]; NaN where there is none. Where `failed_S`: the mean that stands in for it."""
    scored_S: Bools
    """[S] every matching function of positive weight gave a score."""
    failed_S: Bools
    """[S] a matching function of positive weight failed or timed out."""
    threshold_S: Floats
    """[S] theta_t, the threshold in force."""
    gate_open_S: Bools
    """[S] whether the step's gate passes anything; only `threshold` obeys it."""
    own_S: Floats
    """[S] e_t."""
    received_S: Floats
    """[S] what reached the step from its children."""
    shared_S: Floats
    """[S] what every step of the trajectory was given alike."""
    stopped_S: Floats
    """[S] what the step's closed gate withheld from its parents."""
    credit_S: Floats
    """[S] c_t."""
    reached_S: Bools
    """[S] whether anything that depends on this play reached the step."""
    trained_S: Bools
    """[S] whether the step takes part in training; the others are in no baseline and have advantage 0."""
    stratum_S: Ints
    """[S] the stratum in force, -1 for none; a step without a score of its own has none, whatever its label."""
    group_S: Ints
    """[S] id of the group that the baseline came from; -1: none."""
    level_S: Ints
    """[S] index into `level_names`: how that group was keyed, after any back-off; -1: none."""
    group_size_S: Ints
    """[S] trajectories in that group; 0: none."""
    baseline_S: Floats
    """[S] the group's mean credit; NaN: none."""
    spread_S: Floats
    """[S] the group's spread of credit; NaN: none."""
    tied_S: Bools
    """[S] all credits of the group are the same, so that there is nothing to learn from it."""
    weight_S: Floats
    """[S] the weight that balances strata; 1 without strata."""
    advantage_S: Floats
    """[S] what the loss sees, weight included."""
    masked_N: Bools
    """[N] trajectories that are left out of training as a whole."""
    singletons: int
    """Groups that had one trajectory only, so that their steps backed off."""
    batch: TrajectoryBatch = field(repr=False)
    """The batch that all this is about."""

    level_names = LEVEL_NAMES

    def group_name(self, step: int) -> str | None:
        """The key of the group that `step`'s baseline came from, in words; None where there is none."""
        level = int(self.level_S[step])
        return None if level < 0 else describe(self.batch, LEVEL_NAMES[level], step, int(self.stratum_S[step]))

    def token_advantages(self, batch: TrajectoryBatch) -> Floats:
        """[T] the step's advantage at each response token that the policy sampled, 0 at the others.

        Raises BatchError where `batch` has other steps than the one that was assigned.
        """
        if batch is not self.batch and batch.step_ids != self.batch.step_ids:
            raise BatchError(
                f"token advantages: expected the batch of {self.batch.n_steps} steps that was assigned, "
                f"got another one of {batch.n_steps}"
            )
        per_token_T = np.repeat(self.advantage_S, np.diff(batch.token_offsets))
        return np.where(batch.response_mask, per_token_T, 0.0)

    def metrics(self) -> dict[str, float]:
        """What to watch, by name; see `credit/metrics.py`."""
        return metrics.summarize(self)


def assign(batch: TrajectoryBatch, options: CreditOptions) -> Assignment:
    """Credit and advantage of every step of `batch`.

    Raises ConfigError for options that do not make sense and BatchError for columns that contradict one another; then
    nothing is returned. Cost: linear in steps, edges and scores.
    """
    options.validate()
    check_batch(batch)
    trajectory_S = batch.trajectory_of_step
    rule = PROPAGATION_RULES[options.propagation]

    outcome = outcomes(batch, options)
    kept_S = ~outcome.masked_N[trajectory_S]
    rewards = sub_rewards(batch, options, kept_S)
    judged_S = rewards.scored_S & options.reward_decomp
    unjudged_S = rewards.failed_S & options.reward_decomp

    threshold_S = np.full(batch.n_steps, float(options.propagation_threshold))
    gate_S = gate_factors(
        rewards.value_S,
        threshold_S,
        gate=options.gate,
        gate_unscored=options.gate_unscored,
        scored_S=judged_S,
        failed_S=unjudged_S,
    )
    has_own_S = ~np.isnan(rewards.value_S)
    own_S = np.where(has_own_S, options.w_r * (rewards.value_S - options.sub_reward_origin), 0.0)
    credit = rule.credit(
        Flow(
            batch=batch,
            options=options,
            own_S=own_S,
            has_own_S=has_own_S,
            outcome_N=outcome.value_N,
            gate_S=gate_S,
            scored_S=judged_S,
            outcome_known_N=outcome.known_N,
        )
    )
    credit_S = credit.own_S + credit.received_S + credit.shared_S

    # A label that depends on the prompt splits groups by how well upstream did. A step with a score of its own is
    # then compared with its like; one without is left with nothing but the outcome's noise inside each label.
    stratum_S = np.where(rewards.scored_S, batch.stratum_of_step, -1)
    trained_S = kept_S & ~unjudged_S if rule.pays_own else kept_S
    groups = group_statistics(batch, credit_S, trained_S, stratum_S, options.group_by)
    raw_S = ADVANTAGE_ESTIMATORS[options.adv_estimator](Credited(batch, options, credit_S, trained_S, groups))
    weight_S = stratum_weights(batch, stratum_S, trained_S)
    learns_S = trained_S & (groups.group_S >= 0) & ~groups.tied_S
    return Assignment(
        sub_reward_S=rewards.value_S,
        scored_S=rewards.scored_S,
        failed_S=rewards.failed_S,
        threshold_S=threshold_S,
        gate_open_S=gate_S > 0,
        own_S=credit.own_S,
        received_S=credit.received_S,
        shared_S=credit.shared_S,
        stopped_S=credit.stopped_S,
        credit_S=credit_S,
        reached_S=credit.reached_S,
        trained_S=trained_S,
        stratum_S=stratum_S,
        group_S=groups.group_S,
        level_S=groups.level_S,
        group_size_S=groups.size_S,
        baseline_S=groups.mean_S,
        spread_S=groups.spread_S,
        tied_S=groups.tied_S,
        weight_S=weight_S,
        advantage_S=np.where(learns_S, weight_S * raw_S, 0.0),
        masked_N=outcome.masked_N,
        singletons=groups.singletons,
        batch=batch,
    )
