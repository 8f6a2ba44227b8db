"""Credit assignment from end to end: from a batch and options to an advantage for every step and token.

`assign` is a list of stages, each a function from records to a record. It is pure: no file, clock, random number or
model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from creditflow.credit.advantage import advantages, compare
from creditflow.credit.estimators.base import check_values
from creditflow.credit.groups import LEVEL_NAMES, describe
from creditflow.credit.history import History
from creditflow.credit.records import BITS, NOTHING, Advantage, Credit, CreditOptions, Fit, Groups, Rewards, RuleInput
from creditflow.credit.rewards import read_rewards
from creditflow.credit.thresholds.base import Threshold
from creditflow.credit.tokens import write_tokens
from creditflow.data import Floats, TrajectoryBatch, validate
from creditflow.errors import BatchError, ConfigError, EmptyBatchError, NotFiniteError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Credit and advantage of the S steps of a batch: the records of the stages.

    A trained step of a group that is not tied has
    `advantage = weight * (((credit - baseline) - shift) / divisor)`; every other step has exactly 0. The terms of
    masked steps are computed as if the steps were trained. `explain` lists the operations behind one step.
    """

    batch: TrajectoryBatch = field(repr=False)
    options: CreditOptions
    """The options in force."""
    rewards: Rewards
    fit: Fit | None
    """None for a rule that learns nothing."""
    credit: Credit
    groups: Groups
    advantage: Advantage
    history: History = field(default_factory=History, repr=False)
    """The statistics of earlier batches that the rule's `fit` read."""
    shadow: Assignment | None = field(default=None, repr=False)
    """The assignment of the same batch under `options.shadow`."""

    @property
    def history_after(self) -> History:
        """The statistics for the next batch. Of an assignment from a file: those before it, since its fit has none."""
        after = self.history if self.fit is None or self.fit.history is None else self.fit.history
        return after if self.shadow is None else replace(after, shadow=self.shadow.history_after)

    @property
    def returns_T(self) -> Floats | None:
        """[T] the critic's targets, 0 at tokens that were not sampled; None without a critic."""
        if (critic := self.advantage.critic) is None or (returns_T := self.raw_T) is None:
            return None
        return np.add(returns_T, critic.values_T, out=returns_T, where=self.batch.response_mask)

    @property
    def raw_T(self) -> Floats | None:
        """[T] the values of sampled tokens that replace credit, 0 at the others; None if the tokens of a step agree."""
        if self.advantage.critic is None and self.advantage.unscaled_T is None:
            return None
        zero_S, one_S = np.zeros(self.batch.n_steps), np.ones(self.batch.n_steps)
        raw_T = np.empty(int(self.batch.token_offsets[-1]))
        plain = replace(self.advantage, learns_S=one_S > 0, weight_S=one_S, divisor_S=one_S, advantage_T=None)
        write_tokens(replace(plain, baseline_S=zero_S, shift_S=zero_S), self.batch, self.options, raw_T)
        return raw_T

    def group_name(self, step: int) -> str | None:
        """The key of the group behind `step`'s baseline, in words; None for a step without one."""
        level, stratum = int(self.groups.level_S[step]), int(self.rewards.stratum_S[step])
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
        write_tokens(self.advantage, self.batch, self.options, out_T)
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
    are not read. `threshold`: the state kept between batches, which the caller updates; default: the rule's initial
    state for the agents of this batch. `history`: statistics of earlier batches, the `history_after` of the batch
    before; default: none.

    Raises ConfigError for options that contradict each other and BatchError for inconsistent columns. Only
    `credit_options` checks the types and bounds of options. Cost: linear in steps, edges, scores and tokens.
    """
    values_T = _checked(batch, options, values_T)
    rule, history = options.propagation, History() if history is None else history
    threshold = rule.make_threshold() if threshold is None else threshold

    rewards = read_rewards(batch, options)
    fit = rule.fit(rewards, options, history) if rule.learns else None
    credit = _checked_credit(rule.credit(RuleInput(batch, rewards, options, threshold, fit)), batch, options)
    groups, estimate, compared_S = compare(rewards, credit, options, values_T)
    advantage = advantages(rewards, groups, estimate, compared_S, options)
    _expect_finite(batch, "advantage_S", advantage.advantage_S, f"algorithm.adv_estimator: {options.adv_estimator}")

    shadow = None
    if options.shadow is not None:
        same = threshold if options.shadow.propagation == rule else None
        shadow = assign(batch, options.shadow, values_T=values_T, threshold=same, history=history.shadow)
    return Assignment(batch, options, rewards, fit, credit, groups, advantage, history, shadow)


def _checked(batch: TrajectoryBatch, options: CreditOptions, values_T: Floats | None) -> Floats | None:
    """The critic's values as floats. Raises for a batch, options or values of another form."""
    if not isinstance(options, CreditOptions):
        raise ConfigError(f"options: expected CreditOptions, got {type(options).__name__}; write CreditOptions(...)")
    if not isinstance(batch, TrajectoryBatch):
        kind = type(batch).__name__
        raise BatchError(f"batch: expected a TrajectoryBatch, got {kind}; use TrajectoryBatch.from_trajectories")
    if batch.n_steps == 0:
        raise EmptyBatchError(f"batch of {batch.n_trajectories} trajectories: expected at least one step, got none")
    validate(batch)
    return check_values(batch, values_T, options.adv_estimator) if options.estimator.critic else values_T


_KINDS: dict[str, type[np.generic]] = {"Floats": np.floating, "Bools": np.bool_, "NDArray[np.uint8]": np.uint8}
"""The types of a column of `Credit`, by its annotation."""


def _checked_credit(credit: object, batch: TrajectoryBatch, options: CreditOptions) -> Credit:
    """The credit of a rule. Raises ConfigError for a column of another type or shape, NotFiniteError for a value."""
    key = f"algorithm.propagation: {options.propagation.name}"
    if not isinstance(credit, Credit):
        raise ConfigError(f"{key}: expected `credit` to return Credit, got {type(credit).__name__}")
    for column in fields(Credit):
        values, kind = getattr(credit, column.name), _KINDS[str(column.type).removesuffix(" | None")]
        if column.name == "total_S" or (values is None and column.default is None):
            continue
        dtype, shape = getattr(values, "dtype", type(values)), getattr(values, "shape", ())
        if shape != (batch.n_steps,) or not np.issubdtype(dtype, kind):
            expected = f"expected {column.name} as a {kind.__name__} array of shape ({batch.n_steps},)"
            raise ConfigError(f"{key}: {expected}, got {dtype} of shape {shape}")
    if (credit.reached_S > BITS).any():
        raise ConfigError(f"{key}: expected reached_S of the bits SIGNAL and OUTCOME, got {credit.reached_S.max()}")
    moves = options.propagation.flow != NOTHING or credit.received_S.any()
    if options.estimator.critic and credit.gate_S is None and moves:
        raise ConfigError(
            f"algorithm.adv_estimator: {options.adv_estimator} needs to know by which gates credit flows: expected "
            f"rule {str(options.propagation)!r} to fill Credit.gate_S, or, if no credit moves, to declare "
            f"flow: ClassVar[str] = {NOTHING!r}"
        )
    credit = replace(credit, total_S=credit.own_S + credit.received_S + credit.shared_S)
    for name in ("own_S", "received_S", "shared_S", "total_S", "gate_S"):
        if (values_S := getattr(credit, name)) is not None:
            _expect_finite(batch, name, values_S, key)
    return credit


def _expect_finite(batch: TrajectoryBatch, name: str, values_S: Floats, key: str) -> None:
    finite_S = np.isfinite(values_S)
    if not finite_S.all():
        s = int(np.argmin(finite_S))
        raise NotFiniteError(f"{key}: step {batch.step_ids[s]}: expected a finite {name}, got {values_S[s]}")
