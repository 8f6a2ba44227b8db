"""Credit assignment from end to end: from a batch and options to an advantage for every step and token.

This module calls the other modules of the package in order. It is pure: no file, clock, random number or model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from creditflow.credit.decompose import outcomes, sub_rewards, token_rewards
from creditflow.credit.estimators.base import (
    WHITENING_EPSILON,
    AdvantageScale,
    CriticTerms,
    Estimate,
    EstimatorInput,
    check_values,
    stratum_weights,
    token_moments,
    whitening,
)
from creditflow.credit.groups import LEVEL_NAMES, BatchColumns, Groups, describe, group_statistics, no_groups
from creditflow.credit.history import History
from creditflow.credit.options import CreditOptions
from creditflow.credit.pay import pay_for_scores
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, FORMULA, PROPAGATION_RULES, Estimator
from creditflow.credit.rules.base import Credit, PropagationInput, lost_upstream
from creditflow.credit.thresholds.base import (
    GATE_TOLERANCE,
    Constant,
    Threshold,
    make_threshold,
    open_starved,
    thetas,
)
from creditflow.credit.tokens import at_first_token, critic_tokens, spread_over_tokens, token_terms
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch, validate
from creditflow.errors import BatchError, ConfigError, EmptyBatchError, NotFiniteError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Credit and advantage of S steps, with every term.

    `credit = own + received + shared`. A trained step of a group that is not tied has
    `advantage = weight * (((credit - baseline) - shift) / divisor)`; every other step has exactly 0. With a critic or
    token scores the tokens of a step differ, and `advantage_S` belongs to its first trained token. The terms of masked
    steps are computed as if the steps were trained. `explain` lists the operations behind one step.
    """

    sub_reward_S: Floats
    """[S] r_t in [0, 1], NaN for none. If `failed_S`: its substitute, a mean over other trajectories."""
    scored_S: Bools
    """[S] every matching function of positive weight gave a score."""
    failed_S: Bools
    """[S] a matching function of positive weight failed or timed out."""
    threshold_S: Floats
    """[S] theta_t, the threshold in force."""
    gate_open_S: Bools
    """[S] whether the step is unscored, or its sub-reward is above the threshold; only the rule `threshold` applies it.
    """
    forced_open_S: Bools
    """[S] opened below the threshold, to keep the floor on the share of open gates."""
    gate_S: Floats
    """[S] the factor that the rule in force applies to credit passed to parents, in [0, 1]."""
    fold_S: Ints
    """[S] the fold of cross-fitting, which fitted values of the step leave out; -1 without one."""
    score_weight_S: Floats
    """[S] the weight of the step's own reward: `w_r`, or a calibrated one."""
    harmless_S: Floats
    """[S] the probability that the step did no harm; NaN unless `score_model` or the rule `posterior` is in force."""
    own_S: Floats
    """[S] e_t."""
    received_S: Floats
    """[S] credit received from children."""
    shared_S: Floats
    """[S] credit given equally to every step of the trajectory."""
    withheld_S: Floats
    """[S] credit withheld by the step's gate, from its parents."""
    credit_S: Floats
    """[S] c_t."""
    reached_S: NDArray[np.uint8]
    """[S] bits SIGNAL and OUTCOME: whether a signal that depends on this trajectory, or the outcome, reached the step.
    """
    trained_S: Bools
    """[S] whether the step is trained; the others are in no baseline and have advantage 0."""
    frozen_S: Bools
    """[S] not trained because it is upstream of a failure."""
    stratum_S: Ints
    """[S] the stratum in force, -1 for none. A step without an own score has none, whatever its label."""
    group_S: Ints
    """[S] id of the group behind the baseline; -1: none."""
    level_S: Ints
    """[S] index into `level_names`: the key of that group, after any back-off; -1: none."""
    group_size_S: Ints
    """[S] number of trajectories in that group; 0: none."""
    baseline_S: Floats
    """[S] the value subtracted from credit; NaN: none."""
    spread_S: Floats
    """[S] the group's spread of credit; NaN: none."""
    shift_S: Floats
    """[S] the mean that whitening subtracts in addition to the baseline; 0 without whitening."""
    divisor_S: Floats
    """[S] the divisor of the difference; 1 without scaling."""
    tied_S: Bools
    """[S] all credits of the group are equal, so it teaches nothing."""
    weight_S: Floats
    """[S] the weight that balances strata; 1 without strata."""
    advantage_S: Floats
    """[S] the input of the loss, weight included."""
    advantage_T: Floats | None = field(repr=False)
    """[T] the same for each response token, with token scores; else None. `token_advantages` returns it in all cases.
    """
    unscaled_T: Floats | None = field(repr=False)
    """[T] token values that replace credit if the tokens of a step differ; else None."""
    token_term_T: Floats | None = field(repr=False)
    """[T] the term added by token scores, before the weight; None without `token_level`."""
    critic: CriticTerms | None = field(repr=False)
    """The terms of an estimator with a critic; else None."""
    masked_N: Bools
    """[N] trajectories left out of training as a whole. `masked_S`: also the steps of single agents."""
    singletons: int
    """Number of groups of one trajectory, whose steps backed off."""
    fitted: dict[str, Any] | None = field(repr=False)
    """Slopes and rates of fitted parts (`Fitted.facts`); None without such parts."""
    history: History = field(repr=False)
    """The statistics of earlier batches that fitted parts read."""
    history_after: History | None = field(repr=False)
    """The same with this batch, for the next one; None if read from a file."""
    options: CreditOptions = field(repr=False)
    """The options in force."""
    shadow: Assignment | None = field(repr=False)
    """The assignment of the same batch under `options.shadow`."""
    batch: TrajectoryBatch = field(repr=False)
    """The batch."""

    level_names = LEVEL_NAMES

    @property
    def flows(self) -> bool:
        """Whether the rule can move credit between steps, even if every gate is closed."""
        by_formula = PROPAGATION_RULES[self.options.propagation].flows == FORMULA
        return bool(by_formula or self.gate_S.any() or self.withheld_S.any())

    @property
    def learns_S(self) -> Bools:
        """[S] trained, with a group that is not tied: the formula applies, and the advantage is not exactly 0."""
        return self.trained_S & (self.group_S >= 0) & ~self.tied_S

    def standing_threshold(self) -> Threshold:
        """A constant threshold: each agent keeps the one in force here."""
        agents, first = np.unique(self.batch.agent_of_step, return_index=True)
        names = [self.batch.agent_names[a] for a in agents]
        floor = make_threshold(self.options.propagation_threshold).floor
        return Constant(dict(zip(names, self.threshold_S[first].tolist(), strict=True)), floor)

    @property
    def returns_T(self) -> Floats | None:
        """[T] the critic's targets, 0 at tokens that were not sampled; None without a critic."""
        if self.critic is None:
            return None
        returns_T = np.empty(int(self.batch.token_offsets[-1]))
        if self.unscaled_T is None:
            critic_tokens(self.batch, self.options, self.critic, AdvantageScale.none(self.batch.n_steps), returns_T)
        else:
            AdvantageScale.none(self.batch.n_steps).tokens(self.unscaled_T, self.batch, returns_T)
        return np.add(returns_T, self.critic.values_T, out=returns_T, where=self.batch.response_mask)

    @property
    def masked_S(self) -> Bools:
        """[S] steps left out of training with their trajectory, or because their agent's own outcome failed."""
        return outcomes(self.batch, self.options).masked_S

    @property
    def misled_S(self) -> Bools:
        """[S] steps that are not trained, because the outcome of a later answer step's agent could not be scored."""
        return _misled(self.batch, self.options, self.masked_S, self.gate_S)

    def group_name(self, step: int) -> str | None:
        """The key of the group behind `step`'s baseline, in words; None for a step without one."""
        level, stratum = int(self.level_S[step]), int(self.stratum_S[step])
        if level < 0:
            return None
        return describe(self.batch, LEVEL_NAMES[level], step, stratum, self.options.max_version_lag)

    def token_advantages(self, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """[T] the advantage of each sampled response token, 0 at the others.

        Written into `out` if given ([T], float32 or float64), else into a new array of `dtype`. Raises ShapeError for
        another shape or type, which would lead to writes out of bounds or to truncated values.
        """
        tokens = int(self.batch.token_offsets[-1])
        out_T = np.empty(tokens, dtype) if out is None else out
        if out_T.shape != (tokens,) or out_T.dtype not in (np.float32, np.float64):
            raise ShapeError(
                f"token advantages: expected float32 or float64 of shape ({tokens},), got {out_T.dtype} of "
                f"{out_T.shape}"
            )
        if self.advantage_T is not None:
            out_T[:] = self.advantage_T
        elif self.unscaled_T is not None or self.critic is not None:
            scale = AdvantageScale(self.weight_S, self.baseline_S, self.shift_S, self.divisor_S, self.learns_S)
            if self.unscaled_T is not None:
                scale.tokens(self.unscaled_T, self.batch, out_T)
            elif self.critic is not None:
                critic_tokens(self.batch, self.options, self.critic, scale, out_T)
        else:
            spread_over_tokens(self.advantage_S, self.batch, out_T)
        return out_T


def assign(
    batch: TrajectoryBatch,
    options: CreditOptions,
    *,
    values_T: Floats | None = None,
    threshold: Threshold | None = None,
    history: History | None = None,
) -> Assignment:
    """Compute credit and advantage of every step of `batch`.

    `values_T`: [T] the critic's value at each sampled response token, for estimators with a critic; other entries
    are not read. `threshold`: the state kept between batches, which the caller updates; default: the initial state of
    `options.propagation_threshold` for the agents of this batch. `history`: statistics of earlier batches for fitted
    parts, the `history_after` of the batch before; default: none.

    Raises ConfigError for invalid options and BatchError for inconsistent columns. Cost: linear in steps, edges, scores
    and tokens.
    """
    if not isinstance(options, CreditOptions):
        raise ConfigError(f"options: expected CreditOptions, got {type(options).__name__}; write CreditOptions(...)")
    if not isinstance(batch, TrajectoryBatch):
        kind = type(batch).__name__
        raise BatchError(f"batch: expected a TrajectoryBatch, got {kind}; use TrajectoryBatch.from_trajectories")
    options.validate()
    if batch.n_steps == 0:
        raise EmptyBatchError(f"batch of {batch.n_trajectories} trajectories: expected at least one step, got none")
    validate(batch)
    estimator = ADVANTAGE_ESTIMATORS[options.adv_estimator]
    if estimator.critic:
        values_T = check_values(batch, values_T, options.adv_estimator)
    if threshold is None:
        threshold = make_threshold(options.propagation_threshold)
    history = History() if history is None else history
    assignment = _assign(batch, options, estimator, values_T, threshold, history)
    if options.shadow is None:
        return assignment
    own_threshold = None if "propagation_threshold" in options.shadow else threshold
    shadow = assign(batch, options.shadowed(), values_T=values_T, threshold=own_threshold, history=history.shadow)
    assert assignment.history_after is not None, "a new assignment has one"
    history_after = replace(assignment.history_after, shadow=shadow.history_after)
    return replace(assignment, shadow=shadow, history_after=history_after)


def _assign(
    batch: TrajectoryBatch,
    options: CreditOptions,
    estimator: Estimator,
    values_T: Floats | None,
    threshold: Threshold,
    history: History,
) -> Assignment:
    options, chosen = options.resolved(), options
    rule = PROPAGATION_RULES[options.propagation]
    outcome = outcomes(batch, options)
    masked_S = outcome.masked_S
    columns = BatchColumns(batch, np.full(batch.n_steps, -1), options.max_version_lag)
    rewards = sub_rewards(columns, options, masked_S)
    scored_S, failed_S = rewards.scored_S & options.decomposed, rewards.failed_S & options.decomposed

    threshold_S = thetas(threshold, batch.agent_names)[batch.agent_of_step]
    gate_open_S = ~scored_S | (rewards.value_S > threshold_S + GATE_TOLERANCE)
    forced_open_S = open_starved(
        gate_open_S, rewards.value_S, scored_S & ~masked_S, batch.agent_of_step, threshold.floor
    )
    gate_open_S = gate_open_S | forced_open_S
    pay = pay_for_scores(columns, options, outcome, rewards, history)
    # A stratum label, made from the prompt, separates groups by the quality of upstream steps. This gives scored steps
    # comparable peers. For an unscored step it would leave only the outcome's noise within each label.
    stratum_S = np.where(rewards.scored_S, batch.stratum_of_step, -1)
    columns = columns.with_strata(stratum_S)
    credit = rule.credit(
        PropagationInput(
            batch=batch,
            options=options,
            paid_S=pay.paid_S,
            is_paid_S=pay.is_paid_S,
            outcome_S=outcome.value_S,
            known_S=outcome.known_S,
            scored_S=scored_S,
            failed_S=failed_S,
            gate_open_S=gate_open_S,
            masked_S=masked_S,
            columns=columns,
        )
    )
    _expect_credit(batch, credit, estimator, options)
    credit_S = credit.own_S + credit.received_S + credit.shared_S
    _expect_finite(batch, credit_S, "credit", f"propagation {options.propagation}")
    frozen_S = np.zeros(batch.n_steps, dtype=np.bool_) if credit.frozen_S is None else credit.frozen_S
    trained_S = ~masked_S & ~frozen_S & ~_misled(batch, options, masked_S, credit.gate_S)
    if rule.pays_own:
        # Expected scores need evidence about the step: its score, or the outcome.
        trained_S &= ~failed_S & (pay.is_paid_S | (not options.pays_expected_score))

    by_token_S = np.zeros(batch.n_steps, dtype=np.bool_)
    if options.decomp_granularity == "token_level" and rule.pays_own:
        by_token_S = scored_S & (columns.sampled_S > 0)
    rho_T = token_rewards(batch, rewards) if by_token_S.any() else None
    # The part paid token by token leaves the step's credit; its parents still receive it.
    paid_by_token_S = np.where(by_token_S, pay.paid_S, 0.0)
    step_credit_S = credit_S - paid_by_token_S
    groups, estimate, scale = _compare(
        columns,
        estimator,
        EstimatorInput(
            batch=batch,
            options=options,
            credit=credit,
            credit_S=step_credit_S,
            reward_S=credit.own_S - paid_by_token_S + credit.shared_S,
            trained_S=trained_S,
            groups=no_groups(batch.n_steps),
            values_T=values_T,
            token_reward_T=_token_rewards(columns, options, rho_T, by_token_S) if estimator.critic else None,
        ),
    )
    advantage_S = scale.steps(step_credit_S)
    if estimate.critic is not None:
        advantage_S = scale.steps(
            np.where(columns.sampled_S > 0, estimate.critic.first_S, np.nan), np.zeros(batch.n_steps)
        )
    if estimate.unscaled_T is not None:
        otherwise_S = np.zeros(batch.n_steps) if estimator.critic else advantage_S
        advantage_S = scale.steps(at_first_token(batch, estimate.unscaled_T, np.nan), otherwise_S)
    _expect_finite(batch, advantage_S, "advantage", f"adv_estimator {options.adv_estimator}")
    advantage_T = term_T = None
    if rho_T is not None and not estimator.critic:
        term_T = token_terms(
            columns,
            rho_T,
            rewards.value_S,
            by_token_S & trained_S & (groups.group_S >= 0),
            groups.level_S,
            weight=options.w_r,
            gamma_token=options.gamma_token,
            scaled=estimator.whitened or estimate.divisor_S is not None,
        )
        advantage_T = _with_terms(batch, scale, advantage_S, estimate, term_T)
        advantage_S = at_first_token(batch, advantage_T, advantage_S)
    return Assignment(
        sub_reward_S=rewards.value_S,
        scored_S=rewards.scored_S,
        failed_S=rewards.failed_S,
        threshold_S=threshold_S,
        gate_open_S=gate_open_S,
        forced_open_S=forced_open_S,
        gate_S=np.zeros(batch.n_steps) if credit.gate_S is None else credit.gate_S,
        fold_S=pay.fold_S,
        score_weight_S=pay.score_weight_S,
        harmless_S=pay.harmless_S,
        own_S=credit.own_S,
        received_S=credit.received_S,
        shared_S=credit.shared_S,
        withheld_S=credit.withheld_S,
        credit_S=credit_S,
        reached_S=np.asarray(credit.reached_S).astype(np.uint8),
        trained_S=trained_S,
        frozen_S=frozen_S,
        stratum_S=stratum_S,
        group_S=groups.group_S,
        level_S=groups.level_S,
        group_size_S=groups.size_S,
        baseline_S=scale.baseline_S,
        spread_S=groups.spread_S,
        shift_S=scale.shift_S,
        divisor_S=scale.divisor_S,
        tied_S=groups.tied_S,
        weight_S=scale.weight_S,
        advantage_S=advantage_S,
        advantage_T=advantage_T,
        unscaled_T=estimate.unscaled_T,
        token_term_T=term_T,
        critic=estimate.critic,
        masked_N=outcome.masked_N,
        singletons=groups.singletons,
        fitted=pay.facts or None,
        history=history,
        history_after=pay.history,
        options=chosen,
        shadow=None,
        batch=batch,
    )


def _compare(
    columns: BatchColumns, estimator: Estimator, inputs: EstimatorInput
) -> tuple[Groups, Estimate, AdvantageScale]:
    """Compare the credit of steps within their groups, by the estimator."""
    batch, trained_S, name = inputs.batch, inputs.trained_S, inputs.options.adv_estimator
    if estimator.grouped:
        groups = group_statistics(columns, inputs.credit_S, trained_S, inputs.options.group_by)
        inputs = replace(inputs, groups=groups)
    estimate = estimator.estimate(inputs)
    _expect_type(estimate, Estimate, f"algorithm.adv_estimator: {name}")
    groups, baseline_S = inputs.groups, estimate.baseline_S
    shift_S, divisor_S = np.zeros(batch.n_steps), np.ones(batch.n_steps)
    if not estimator.whitened:
        divisor_S = divisor_S if estimate.divisor_S is None else estimate.divisor_S
    elif estimate.divisor_S is not None:
        raise ConfigError(
            f"algorithm.adv_estimator: {name} is whitened, and so divided by its own spread: expected divisor_S None"
        )
    else:
        over_S = trained_S & (groups.group_S >= 0) if estimator.grouped else trained_S
        left_S = np.where(over_S & ~groups.tied_S, inputs.credit_S - baseline_S, 0.0)
        whitened = whitening(columns, left_S, token_moments(batch, estimate, groups.tied_S), over_S)
        at = np.flatnonzero(whitened.code_S >= 0)
        code = whitened.code_S[at]
        divisor_S[at] = np.sqrt(whitened.variance_P + WHITENING_EPSILON)[code]
        if estimator.grouped:
            shift_S[at] = whitened.mean_P[code]
            groups = replace(groups, tied_S=groups.tied_S.copy())
            groups.tied_S[at] |= whitened.tied_P[code]
        else:
            groups = whitened.as_groups()
            baseline_S = baseline_S + groups.mean_S  # which needs no shift
    learns_S = trained_S & (groups.group_S >= 0) & ~groups.tied_S
    weight_S = stratum_weights(batch, columns.stratum_S, trained_S)
    return groups, estimate, AdvantageScale(weight_S, baseline_S, shift_S, divisor_S, learns_S)


def _misled(batch: TrajectoryBatch, options: CreditOptions, masked_S: Bools, gate_S: Floats | None) -> Bools:
    """[S] steps whose credit lacks an outcome that flows to them; see `lost_upstream`."""
    flows = options.resolved().outcome_to == "answer" and options.gamma > 0 and options.w_o > 0
    if not flows or gate_S is None:
        return np.zeros_like(masked_S)
    return lost_upstream(batch, masked_S, gate_S)


def _with_terms(
    batch: TrajectoryBatch, scale: AdvantageScale, advantage_S: Floats, estimate: Estimate, term_T: Floats
) -> Floats:
    """[T] each token's advantage: the step's part plus the weighted token term."""
    advantage_T = np.empty(term_T.size)
    if estimate.unscaled_T is None:
        spread_over_tokens(advantage_S, batch, advantage_T)
    else:
        scale.tokens(estimate.unscaled_T, batch, advantage_T)
    advantage_T += np.repeat(scale.weight_S, np.diff(batch.token_offsets)) * term_T
    return advantage_T


def _expect_finite(batch: TrajectoryBatch, values_S: Floats, noun: str, source: str) -> None:
    finite_S = np.isfinite(values_S)
    if not finite_S.all():
        s = int(np.argmin(finite_S))
        raise NotFiniteError(f"step {batch.step_ids[s]}: expected a finite {noun} from {source}, got {values_S[s]}")


def _expect_type(returned: object, kind: type, name: str) -> None:
    if not isinstance(returned, kind):
        raise ConfigError(f"{name}: expected the function to return {kind.__name__}, got {type(returned).__name__}")


def _expect_credit(batch: TrajectoryBatch, credit: Credit, estimator: Estimator, options: CreditOptions) -> None:
    _expect_type(credit, Credit, f"algorithm.propagation: {options.propagation}")
    for column in fields(credit):
        values = getattr(credit, column.name)
        optional = values is None and column.default is None
        if not optional and np.shape(values) != (batch.n_steps,):
            raise ConfigError(
                f"algorithm.propagation: {options.propagation}: expected {column.name} of shape ({batch.n_steps},), "
                f"got {np.shape(values)}"
            )
    if estimator.critic and credit.gate_S is None and credit.received_S.any():
        raise ConfigError(
            f"algorithm.adv_estimator: {options.adv_estimator} needs to know by which gates credit flows, but rule "
            f"{options.propagation!r} fills Credit.received_S and not gate_S"
        )


def _token_rewards(
    columns: BatchColumns, options: CreditOptions, rho_T: Floats | None, by_token_S: Bools
) -> Floats | None:
    """[T] `w_r * (rho - b) / L` at each of a step's L sampled tokens; they sum to its own reward."""
    if rho_T is None:
        return None
    batch = columns.batch
    part_S = np.where(by_token_S, options.w_r / np.maximum(columns.sampled_S, 1), 0.0)
    return np.where(
        batch.response_mask, np.repeat(part_S, np.diff(batch.token_offsets)) * (rho_T - options.sub_reward_origin), 0.0
    )
