"""Explanations of advantages: the operations behind one, which give the same bits when replayed in order.

An explanation is made from a finished assignment and its batch. Every operation is one rounding of float64 arithmetic
on earlier results, in the order of the assignment. Values from other steps (a child's credit, a group's mean) are
given; they have their own explanations. Values made by a user's rule or estimator are given as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Literal

import numpy as np

from creditflow.credit.assignment import Assignment
from creditflow.credit.groups import EPSILON
from creditflow.credit.records import (
    BY_CRITIC,
    DISCOUNTED,
    FORMULA,
    NOTHING,
    ONE,
    SPREAD,
    CriticTerms,
    Estimator,
    Fit,
    Rule,
)
from creditflow.credit.rewards import counting
from creditflow.credit.rules.base import OutcomeRule, ScoreRule, kept_rewards, outcome_gates
from creditflow.data import clip_rounding
from creditflow.errors import BatchError, CreditflowError

Symbol = Literal["given", "+", "-", "*", "/"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of an explanation: a symbol between earlier results, or a given number."""

    name: str
    """A label for readers; not unique."""
    symbol: Symbol
    inputs: tuple[int, ...]
    """Positions of earlier operations in the list; `+` and `*` take two or more, from left to right."""
    value: float
    note: str = ""
    """A remark for readers: the source of the number, the state of the gate."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The operations and terms of one step's (or token's) advantage."""

    step_id: str
    token: int | None
    """Position in the response if the tokens of the step differ; None if all sampled tokens have the same advantage."""
    operations: tuple[Operation, ...]
    terms: tuple[tuple[str, float], ...]
    """(name, value) of the parts of the advantage, divided and weighted. Empty if the step does not learn."""
    in_reward: tuple[float, ...]
    """The same parts in units of reward: before the division and the weight."""
    rounding: float
    """`advantage - sum of terms`, computed exactly: the remainder from rounding each term. With it the terms add up to
    the advantage, bit for bit."""

    @property
    def advantage(self) -> float:
        """The advantage used in training."""
        return self.operations[-1].value

    def replay(self) -> float:
        """Recompute the advantage from the given numbers alone."""
        results: list[float] = []
        for o in self.operations:
            results.append(o.value if o.symbol == "given" else _apply(o.symbol, [results[i] for i in o.inputs]))
        return results[-1]

    def __str__(self) -> str:
        where = self.step_id if self.token is None else f"{self.step_id}, token {self.token}"
        lines = [f"advantage of step {where}: {self.advantage!r}", ""]
        lines += [self._line(i) for i in range(len(self.operations))]
        width = max((len(name) for name, _ in self.terms), default=0)
        lines += ["", *(f"{name:{width}}  {value:+.6f}" for name, value in (*self.terms, ("rounding", self.rounding)))]
        return "\n".join(lines)

    def _line(self, i: int) -> str:
        operation = self.operations[i]
        inputs = f" {operation.symbol} ".join(f"{self.operations[k].name} [{k}]" for k in operation.inputs)
        formula = f" = {inputs}" if inputs else ""
        note = f"   # {operation.note}" if operation.note else ""
        return f"[{i}] {operation.name}{formula} = {operation.value!r}{note}"


def explain(assignment: Assignment, step: int | str, token: int | None = None) -> Explanation:
    """Explain the advantage of `step`, an index into the batch or an id.

    `token`: position in the response, default the first sampled token. It matters only if the tokens of a step differ.

    Raises BatchError for an unknown step or token, or a token that was not sampled (it has no advantage).
    """
    s = _index(assignment, step)
    story = _OperationLog(assignment, s)
    position = _check_token(assignment, s, token)
    made = assignment.advantage
    if made.advantage_T is None and made.unscaled_T is None and made.critic is None:
        position = None  # all tokens have the same advantage
    story.tell(position)
    trained = _trained(assignment, s, position)
    value = story.operations[-1].value
    if value != trained:
        raise CreditflowError(
            f"step {assignment.batch.step_ids[s]}: the operations give {value!r}, but {trained!r} was assigned. "
            "This is a fault of creditflow; please report it with the batch"
        )
    rounding = Fraction(trained) - sum(Fraction(value) for _, value in story.terms)
    records = (tuple(story.operations), tuple(story.terms), tuple(story.in_reward))
    return Explanation(assignment.batch.step_ids[s], position, *records, float(rounding))


def _index(assignment: Assignment, step: int | str) -> int:
    batch = assignment.batch
    if isinstance(step, str):
        if step not in batch.step_ids:
            raise BatchError(f"explain: expected the id of a step of the batch, got {step!r}")
        return batch.step_ids.index(step)
    if not 0 <= step < batch.n_steps:
        raise BatchError(f"explain: expected a step from 0 to {batch.n_steps - 1}, got {step}")
    return int(step)


def _trained(a: Assignment, s: int, token: int | None) -> float:
    """The advantage in the loss, of the step or of one of its sampled tokens."""
    made = a.advantage
    if token is None:
        return float(made.advantage_S[s])
    at = int(a.batch.token_offsets[s]) + token
    if made.advantage_T is not None:
        return float(made.advantage_T[at])
    if not a.groups.trained_S[s] or a.groups.group_S[s] < 0 or a.groups.tied_S[s]:  # learns_S of one step
        return 0.0
    raw = _by_critic(a, s)[token] if made.unscaled_T is None else made.unscaled_T[at]
    return float(made.weight_S[s] * ((raw - made.baseline_S[s] - made.shift_S[s]) / made.divisor_S[s]))


def _by_critic(a: Assignment, s: int) -> dict[int, float]:
    """A_j at each sampled token of the step, before whitening, as computed by `kernels.gae`."""
    critic, options, start = a.advantage.critic, a.options, int(a.batch.token_offsets[s])
    assert critic is not None, "the caller has seen to it"
    advantages: dict[int, float] = {}
    value, advantage = 0.0, 0.0
    for position in reversed(_sampled(a, s)):
        here = float(critic.values_T[start + position])
        last = float(critic.reward_S[s]) + float(critic.down_S[s])
        delta = options.gamma_token * value - here if advantages else last - here
        if critic.token_reward_T.size:
            delta += float(critic.token_reward_T[start + position])
        advantage = delta + options.gamma_token * options.lam_token * advantage
        value, advantages[position] = here, advantage
    return advantages


def _sampled(assignment: Assignment, s: int) -> list[int]:
    """Positions of the step's sampled tokens in its response."""
    batch = assignment.batch
    at: list[int] = np.flatnonzero(batch.response_mask[batch.token_offsets[s] : batch.token_offsets[s + 1]]).tolist()
    return at


def _check_token(assignment: Assignment, s: int, token: int | None) -> int | None:
    """The position of the token to explain; None if no token of the step was sampled."""
    sampled = _sampled(assignment, s)
    if token is None:
        return sampled[0] if sampled else None
    if token not in sampled:
        raise BatchError(f"step {assignment.batch.step_ids[s]}: expected one of its sampled tokens, got token {token}")
    return int(token)


_FUNCTIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def _apply(symbol: Symbol, values: Sequence[float]) -> float:
    return reduce(_FUNCTIONS[symbol], values)


@dataclass(frozen=True, slots=True)
class _Own:
    """Positions of the own reward and its parts."""

    total: int
    paid: int | None
    """The pay for the step's score; None if the rule does not tell it apart."""
    answer: int | None
    """The step's part of the outcome; None if it has none."""


@dataclass(frozen=True, slots=True)
class _Received:
    """Positions of the credit received from children and of its named parts; no parts if it is given as a whole."""

    total: int
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class _OperationLog:
    """Records operations in the order of `assign`, one method for each part of its pipeline.

    Methods return positions in the list of operations. Names are not references: reward functions may have any name.
    """

    assignment: Assignment
    s: int
    operations: list[Operation] = field(default_factory=list)
    terms: list[tuple[str, float]] = field(default_factory=list)
    in_reward: list[float] = field(default_factory=list)
    _constants: dict[float, int] = field(default_factory=dict)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def given(self, name: str, value: float, note: str = "") -> int:
        self.operations.append(Operation(name, "given", (), float(value), note))
        return len(self.operations) - 1

    def make(self, name: str, symbol: Symbol, *inputs: int) -> int:
        value = _apply(symbol, [self.value(i) for i in inputs])
        self.operations.append(Operation(name, symbol, inputs, value))
        return len(self.operations) - 1

    def add_up(self, name: str, parts: Sequence[int]) -> int:
        """Add the parts from left to right, starting from 0 like the assignment."""
        if not parts:
            return self.given(name, 0.0)
        return self.make(name, "+", self.constant("zero", 0.0), *parts)

    def constant(self, name: str, value: float) -> int:
        """A given number, recorded once for all its uses."""
        if value not in self._constants:
            self._constants[value] = self.given(name, value)
        return self._constants[value]

    def value(self, at: int) -> float:
        return self.operations[at].value

    # ---- the steps of `assign` -------------------------------------------------------------------------------------

    def tell(self, token: int | None) -> None:
        a, s = self.assignment, self.s
        by_token = self.by_token()
        own = self.own()
        shared = self.shared()
        why = self.why_nothing(token, by_token)
        by_critic = self.estimator.tokens == BY_CRITIC and a.advantage.critic is not None
        if why is None and by_critic:  # values replace credit
            assert token is not None, "why_nothing has seen to it"
            raw = self.critic_advantage(token, own, shared, by_token)
            self.scaled(raw, [("by the critic", self.value(raw))])
            return
        received = self.received()
        credit = self.make("credit", "+", own.total, received.total, shared)
        if by_token:
            assert own.paid is not None, "own has seen to it"
            credit = self.make("credit less what is paid by token", "-", credit, own.paid)
        if why is not None:
            self.given("advantage", 0.0, why)
            return
        term_T = a.advantage.token_term_T if by_token else None
        name = "advantage" if term_T is None else "advantage of the step"
        if a.groups.tied_S[s]:
            step = self.given(name, 0.0, "its group is tied: all are the same")
        else:
            parts = self.credit_parts(own, received, shared, by_token)
            step = self.scaled(*self.in_place_of_credit(credit, parts, token), name)
        if term_T is not None and token is not None:
            at = int(a.batch.token_offsets[s]) + token
            term = self.given("token term", term_T[at], "scores of this token and those after it")
            self.make("advantage", "+", step, self.make("weighted token term", "*", self.weight(), term))
            self.add_term("token scores", self.value(term), float(a.advantage.weight_S[s]))

    def why_nothing(self, token: int | None, by_token: bool) -> str | None:
        """The reason for an advantage of 0; None if the advantage, or its token term alone, is not 0."""
        a, s, options = self.assignment, self.s, self.assignment.options
        agent = a.batch.agent_names[a.batch.agent_of_step[s]]
        taught_by_token = by_token and a.advantage.token_term_T is not None
        masked, untrained = a.rewards.masked_N[a.batch.trajectory_of_step[s]], not a.groups.trained_S[s]
        tokens_only = a.advantage.critic is not None or self.estimator.critic
        frozen_S, misled_S = a.credit.frozen_S, a.credit.misled_S
        frozen = f"frozen by {options.propagation}"
        if self.rule.gated:
            frozen = "frozen: it lies upstream of a closed gate"
        elif not (a.rewards.scored_S[s] or a.rewards.known_S[s]):
            frozen = "neither its score nor the outcome is known"
        reasons = (
            (masked, "its trajectory is masked: failed, not scored, or truncated"),
            (untrained and a.rewards.masked_S[s], f"it is masked: the outcome of {agent} could not be scored"),
            (frozen_S is not None and frozen_S[s], frozen),
            (misled_S is not None and misled_S[s], "the outcome of a later answer step's agent could not be scored"),
            (untrained and a.rewards.failed_S[s], "its scoring failed"),
            (a.groups.group_S[s] < 0, "there is no other trajectory to compare it with, at any level"),
            (token is None and tokens_only, "no token of it was sampled, so the critic gives it no value"),
            (a.groups.tied_S[s] and not taught_by_token, "its group is tied: all are the same"),
        )
        return next((words for holds, words in reasons if holds), None)

    def by_token(self) -> bool:
        """Whether the step's score is paid token by token."""
        a, s = self.assignment, self.s
        return a.options.pays_by_token and bool(a.rewards.scored_S[s]) and bool(_sampled(a, s))

    @property
    def rule(self) -> Rule:
        """The propagation rule in force."""
        return self.assignment.options.propagation

    @property
    def estimator(self) -> Estimator:
        """The record of the estimator in force."""
        return self.assignment.options.estimator

    @property
    def critic(self) -> CriticTerms:
        """The terms of an estimator with values by the critic."""
        assert self.assignment.advantage.critic is not None, "the caller has seen to it"
        return self.assignment.advantage.critic

    @property
    def fit(self) -> Fit:
        """The record of the rule's `fit`."""
        assert self.assignment.fit is not None, "the caller has seen to it"
        return self.assignment.fit

    def read(self, name: str, value: float, made: Callable[[], int]) -> int:
        """The operations of `made` if they give `value`, the recorded term, else the term as given."""
        before, constants = len(self.operations), dict(self._constants)
        at = made()
        if self.value(at) == value:
            return at
        del self.operations[before:]
        self._constants = constants
        return self.given(name, value, f"as {self.rule} made it")

    def own(self) -> _Own:
        """The own reward and its parts."""
        a, s = self.assignment, self.s
        recorded, paid_S = float(a.credit.own_S[s]), a.credit.paid_S
        if paid_S is None:
            note = f"{self.rule} pays no step for its own score" if self.rule.shares else f"as {self.rule} made it"
            return _Own(self.given("own", recorded, note), None, None)
        paid = self.read("paid", float(paid_S[s]), self.paid)
        if not (isinstance(self.rule, OutcomeRule) and self.rule.at_answer(a.options)):
            return _Own(self.read("own", recorded, lambda: paid), paid, None)
        answer = self.answer_part()
        return _Own(self.read("own", recorded, lambda: self.make("own", "+", paid, answer)), paid, answer)

    def paid(self) -> int:
        """The own reward without the outcome: the part of the score less the charge for harm."""
        a, s, rule, fit = self.assignment, self.s, self.rule, self.assignment.fit
        harmless = float("nan") if fit is None or fit.harmless_S is None else float(fit.harmless_S[s])
        expects = fit is not None and fit.if_wrong_S is not None
        if expects and np.isnan(harmless):
            return self.given("paid", 0.0, "masked, or without a score and an outcome")
        if not isinstance(rule, ScoreRule) or (np.isnan(a.rewards.sub_reward_S[s]) and not expects):
            return self.given("paid", 0.0, self.unpaid_words())
        sub_reward = self.expected_sub_reward(harmless) if expects else self.sub_reward()
        centred = self.make("above origin", "-", sub_reward, self.given("origin", rule.sub_reward_origin))
        if fit is None or fit.score_weight_S is None or np.isnan(fit.score_weight_S[s]):
            weight = self.given("w_r", rule.w_r)
        else:
            weight = self.given("calibrated weight", fit.score_weight_S[s], self.slope_words())
        of_score = self.make("paid", "*", weight, centred)
        if expects or np.isnan(harmless):
            return of_score
        certain = self.given("probability of no harm", harmless, "given all scores and the outcome")
        less = self.make("less than certain", "-", certain, self.constant("one", 1.0))
        charge = self.make("charge for harm", "*", self.given("w_m", getattr(rule, "w_m", 0.0)), less)
        return self.make("paid with the charge", "+", of_score, charge)

    def unpaid_words(self) -> str:
        a = self.assignment
        if not a.options.decomposed:
            return "the rule ignores sub-rewards"
        failed = bool(a.rewards.failed_S[self.s])
        return "its scoring failed, and nothing stands in" if failed else "no function scored the step"

    def expected_sub_reward(self, harmless: float) -> int:
        a, s, fit = self.assignment, self.s, self.fit
        assert fit.if_wrong_S is not None, "the caller has seen to it"
        scored = a.options.decomposed and bool(a.rewards.scored_S[s])
        score = f"the score {a.rewards.sub_reward_S[s]:.3g}" if scored else "no score of the step"
        right = self.given("probability of being right", harmless, f"given {score}, the others, the outcome")
        wrong = self.make("probability of being wrong", "-", self.constant("one", 1.0), right)
        worth = self.given("sub-reward if wrong", fit.if_wrong_S[s])
        return self.make("expected sub-reward", "+", right, self.make("part if wrong", "*", wrong, worth))

    def slope_words(self) -> str:
        """The slope behind a calibrated weight, and the outcome that it is compared with, in words."""
        a, s, fit = self.assignment, self.s, self.fit
        assert fit.fold_S is not None, "a weight has a fold"
        agent, fold = a.batch.agent_names[a.batch.agent_of_step[s]], int(fit.fold_S[s])
        weights = fit.facts.get("weights", {}).get(agent)
        if weights is None or weights["slopes"][fold] is None:
            return "no data: w_r"
        slope, error, full = (weights[key][fold] for key in ("slopes", "errors", "full"))
        return f"the outcome rises by {slope:.3g} with the score, to {full:.3g} at 1; standard error {error:.2g}"

    def sub_reward(self) -> int:
        a, s, batch = self.assignment, self.s, self.assignment.batch
        value = a.rewards.sub_reward_S[s]
        if a.rewards.failed_S[s]:
            return self.given("sub-reward", value, "its scoring failed: the mean of others stands in")
        if a.options.decomp_granularity == "agent":
            same = (batch.trajectory_of_step == batch.trajectory_of_step[s]) & a.rewards.scored_S
            same &= batch.agent_of_step == batch.agent_of_step[s]
            return self.given("sub-reward", value, f"mean of the agent's {same.sum()} scored steps")
        weighted, weights = [], []
        for k in np.flatnonzero(counting(batch)[s]):
            name = batch.score_names[k]
            score = self.score(name, float(batch.scores[s, k]))
            weights.append(self.given(f"weight of {name}", batch.score_weights[s, k]))
            weighted.append(self.make(f"weighted {name}", "*", weights[-1], score))
        total, weight = self.add_up("weighted scores", weighted), self.add_up("weights", weights)
        return self.make("sub-reward", "/", total, weight)

    def score(self, name: str, rescaled: float) -> int:
        """The score in [0, 1]; derived from the raw score if that reproduces the batch's column."""
        raw = self.assignment.batch.raw_scores[self.s].get(name)
        if raw is None or raw.status != "ok":
            return self.given(name, rescaled, "rescaled; the batch has no raw score")
        if isinstance(raw.value, tuple):
            return self.given(name, rescaled, f"mean over {len(raw.value)} tokens, rescaled")
        low, high = map(float, raw.range)
        value, note = clip_rounding(float(raw.value), low, high), raw.reason
        if value != raw.value:
            note = f"{raw.value!r}, clipped to its range"
        if not high > low or (value - low) / (high - low) != rescaled:
            return self.given(name, rescaled, f"rescaled; not what the raw score {value!r} would give")
        lowest = self.given(f"lowest {name}", low)
        above = self.make(f"{name} above lowest", "-", self.given(f"raw {name}", value, note), lowest)
        width = self.make(f"range of {name}", "-", self.given(f"highest {name}", high), lowest)
        return self.make(name, "/", above, width)

    def answer_part(self) -> int:
        batch, s, name = self.assignment.batch, self.s, "part of the outcome"
        if not batch.is_answer_step[s]:
            return self.given(name, 0.0, "the answer did not come from this step")
        answers = self.given("answer steps", int(batch.answers_of_step[s]))
        return self.make(name, "/", self.weighted_outcome(), answers)

    def weighted_outcome(self) -> int:
        competitor, w_o = self.competitor(), getattr(self.rule, "w_o", 1.0)
        note = f"of {competitor}" if competitor else ""
        outcome = self.given("outcome", self.assignment.rewards.outcome_S[self.s], note)
        return self.make("weighted outcome", "*", self.given("w_o", w_o), outcome)

    def competitor(self) -> str:
        """The step's agent, if it has its own outcome; else empty."""
        batch = self.assignment.batch
        agent = batch.agent_names[batch.agent_of_step[self.s]]
        has_own = bool(batch.outcomes_of_agents) and agent in batch.outcomes_of_agents[batch.trajectory_of_step[self.s]]
        return agent if has_own else ""

    def shared(self) -> int:
        a, value = self.assignment, float(self.assignment.credit.shared_S[self.s])
        if isinstance(self.rule, OutcomeRule):
            if self.rule.at_answer(a.options):
                return self.given("shared", value, "the outcome enters at the answer")
            return self.read("shared", value, self.weighted_outcome)
        receiver = self.competitor() or "the trajectory"
        note = f"what {self.rule} gives every step of {receiver}" if self.rule.shares else f"as {self.rule} made it"
        return self.given("shared", value, note)

    # ---- credit from children --------------------------------------------------------------------------------------

    def children(self) -> list[int]:
        """The step's children, from the last to the first: the order of the reverse pass."""
        batch, s = self.assignment.batch, self.s
        stop = np.searchsorted(batch.trajectory_of_step, batch.trajectory_of_step[s], side="right")
        first, last = np.searchsorted(batch.edge_child, (s + 1, stop))
        edges = first + np.flatnonzero(batch.edge_parent[first:last] == s)[::-1]
        children: list[int] = batch.edge_child[edges].tolist()
        return children

    def received(self) -> _Received:
        a, value = self.assignment, float(self.assignment.credit.received_S[self.s])
        children, gate_S = self.children(), a.credit.gate_S
        if gate_S is None or self.rule.flow != FORMULA:
            note = f"by {self.rule} nothing flows" if self.rule.flow == NOTHING else f"as {self.rule} made it"
            return _Received(self.given("received", value, note))
        if not children:
            return _Received(self.given("received", value, "no step used its response"))
        parts: list[tuple[str, int]] = []

        def sum_up() -> int:
            gamma = self.given("gamma", a.options.gamma)
            parts.extend((f"from {a.batch.step_ids[k]}", self.contribution(k, gamma, gate_S[k])) for k in children)
            return self.add_up("received", [at for _, at in parts])

        total = self.read("received", value, sum_up)
        return _Received(total, tuple(parts) if self.operations[total].symbol != "given" else ())

    def contribution(self, k: int, gamma: int, gate: float) -> int:
        a, child = self.assignment, self.assignment.batch.step_ids[k]
        factor = self.gate(k, gate)
        credit = self.given(f"h of {child}", float(a.credit.own_S[k] + a.credit.received_S[k]), "own + received")
        passed = self.make(f"passed by {child}", "*", factor, credit)
        return self.make(f"from {child}", "*", self.rate(f"rate of {child}", k, gamma), passed)

    def rate(self, name: str, k: int, gamma: int) -> int:
        batch = self.assignment.batch
        return self.make(name, "*", gamma, self.given(f"share of {batch.step_ids[k]}", batch.share_of_step[k]))

    def gate(self, k: int, factor: float) -> int:
        """Record the factor of k's gate, after the numbers behind it."""
        a, name = self.assignment, self.assignment.batch.step_ids[k]
        threshold_S, open_S, forced_S = a.credit.threshold_S, a.credit.gate_open_S, a.credit.forced_open_S
        if threshold_S is None or open_S is None:
            words = f"{self.rule}: every gate open" if factor == 1.0 else f"as {self.rule} set it"
        elif not a.options.decomposed:
            words = "the rule ignores sub-rewards: open"
        elif a.rewards.failed_S[k]:
            words = "its scoring failed: open"
        elif not a.rewards.scored_S[k]:
            words = "nothing judged it: open"
        else:
            self.given(f"sub-reward of {name}", a.rewards.sub_reward_S[k])
            self.given(f"threshold of {name}", threshold_S[k])
            words = f"sub-reward {'above' if open_S[k] else 'not above'} threshold"
            if forced_S is not None and forced_S[k]:
                words = "sub-reward not above threshold, opened to keep the floor"
        return self.given(f"gate of {name}", factor, words)

    # ---- token values in place of credit ---------------------------------------------------------------------------

    def in_place_of_credit(
        self, credit: int, parts: list[tuple[str, float]], token: int | None
    ) -> tuple[int, list[tuple[str, float]]]:
        """The value to compare with the baseline, and its parts."""
        a, s, estimator = self.assignment, self.s, self.assignment.options.adv_estimator
        if a.advantage.unscaled_T is None or token is None:
            return credit, parts
        if self.estimator.tokens == DISCOUNTED:
            raw, power = self.discounted_inside(credit, token)
            return raw, [(words, power * value) for words, value in parts]
        at = int(a.batch.token_offsets[s]) + token
        raw = self.given("in place of credit", a.advantage.unscaled_T[at], f"as {estimator} made it for this token")
        return raw, [(f"by {estimator}", self.value(raw))]

    def discounted_inside(self, credit: int, token: int) -> tuple[int, float]:
        from creditflow.credit import kernels

        a = self.assignment
        after = sum(position > token for position in _sampled(a, self.s))
        power = float(kernels.powers(a.options.gamma_token, after + 1)[after])
        factor = self.given("gamma_token to the end", power, f"{after} sampled tokens come after this one")
        return self.make("discounted credit", "*", credit, factor), power

    def critic_advantage(self, token: int, own: _Own, shared: int, by_token: bool) -> int:
        a, s, options = self.assignment, self.s, self.assignment.options
        critic, start = self.critic, int(a.batch.token_offsets[s])
        value = self.given("value", critic.values_T[start + token], "the critic, at this token")
        later = [position for position in _sampled(a, s) if position > token]
        if later:
            gamma = self.given("gamma_token", options.gamma_token)
            next_value = self.given("next value", critic.values_T[start + later[0]])
            delta = self.make("delta", "-", self.make("value ahead", "*", gamma, next_value), value)
        else:
            reward = own.total
            if by_token:
                assert own.paid is not None, "own has seen to it"
                reward = self.make("own less what is paid by token", "-", reward, own.paid)
            reward = self.make("reward", "+", reward, shared)
            last = self.make("worth of the step", "+", reward, self.received_by_critic())
            delta = self.make("delta", "-", last, value)
        if critic.token_reward_T.size:
            paid_here = self.given("paid for this token", critic.token_reward_T[start + token])
            delta = self.make("delta with token reward", "+", delta, paid_here)
        if not later:
            return delta
        decay = self.make("decay", "*", gamma, self.given("lam_token", options.lam_token))
        ahead = self.given("next advantage", _by_critic(a, s)[later[0]], "of the next sampled token, before whitening")
        return self.make("advantage by the critic", "+", delta, self.make("decayed", "*", decay, ahead))

    def received_by_critic(self) -> int:
        a, s, batch = self.assignment, self.s, self.assignment.batch
        critic, gate_S, children = self.critic, outcome_gates(a.credit, a.options), self.children()
        if gate_S is None:
            return self.given("value received", critic.down_S[s], f"by {self.rule} nothing flows")
        if not children:
            return self.given("value received", 0.0, "no step used its response")
        gamma = self.given("gamma", a.options.gamma)
        parts = []
        for k in children:
            child = batch.step_ids[k]
            gate = self.gate(k, float(gate_S[k]))
            passed = self.make(f"value passed by {child}", "*", gate, self.worth_by_critic(k))
            rate = self.rate(f"value rate of {child}", k, gamma)
            parts.append(self.make(f"value from {child}", "*", rate, passed))
        return self.add_up("value received", parts)

    def worth_by_critic(self, k: int) -> int:
        """The worth of child k, as `kernels.gae` passes it on."""
        a, batch, sampled = self.assignment, self.assignment.batch, _sampled(self.assignment, k)
        critic, child = self.critic, batch.step_ids[k]
        if sampled:
            first = int(batch.token_offsets[k]) + sampled[0]
            advantage = self.given(f"advantage at {child}", critic.first_S[k], "before whitening")
            lam = self.make(f"lam x {child}", "*", self.given(f"lam of {child}", a.options.lam), advantage)
            worth = self.make(f"worth of {child}", "+", self.given(f"value of {child}", critic.values_T[first]), lam)
        else:
            total = self.given(f"reward of {child}", critic.reward_S[k], "no token of it was sampled")
            worth = self.make(f"worth of {child}", "+", total, self.given(f"below {child}", critic.down_S[k]))
        if a.credit.gate_S is not None:
            return worth
        kept = self.given(f"paid to {child}", kept_rewards(a.credit, a.options)[k], "the pay for its own score stays")
        return self.make(f"outcome part of {child}", "-", worth, kept)

    # ---- from credit to advantage ----------------------------------------------------------------------------------

    def scaled(self, raw: int, parts: Sequence[tuple[str, float]], name: str = "advantage") -> int:
        """Compute `weight * (((raw - baseline) - shift) / divisor)`; the parts of `raw` become terms."""
        a, s = self.assignment, self.s
        words = f"{int(a.groups.group_size_S[s])} trajectories with {a.group_name(s)}"
        difference = self.make("difference", "-", raw, self.given("baseline", a.advantage.baseline_S[s], words))
        if shift := float(a.advantage.shift_S[s]):
            difference = self.make("shifted", "-", difference, self.given("shift", shift, "of whitening"))
        divided = self.make("scaled", "/", difference, self.divisor())
        advantage = self.make(name, "*", self.weight(), divided)
        factor = float(a.advantage.weight_S[s] / a.advantage.divisor_S[s])
        for part, value in (*parts, ("baseline", -float(a.advantage.baseline_S[s]))):
            self.add_term(part, value, factor)
        if shift:
            self.add_term("shift", -shift, factor)
        return advantage

    def weight(self) -> int:
        return self.given("weight", self.assignment.advantage.weight_S[self.s], "balances strata")

    def add_term(self, name: str, reward: float, factor: float) -> None:
        """Add a part of the advantage: `reward * factor`."""
        self.terms.append((name, factor * reward))
        self.in_reward.append(reward)

    def divisor(self) -> int:
        a, s, estimator = self.assignment, self.s, self.estimator
        divisor = a.advantage.divisor_S[s]
        if estimator.whitened:
            return self.given("divisor", divisor, "of whitening: root of the variance over the policy's tokens")
        if estimator.divisor == SPREAD and a.options.norm_adv_by_std_in_grpo:
            spread = self.given("spread", a.groups.spread_S[s], "of the group")
            return self.make("divisor", "+", spread, self.given("epsilon", EPSILON))
        if estimator.divisor in (SPREAD, ONE):
            return self.given("divisor", 1.0, "not scaled")
        return self.given("divisor", divisor, f"as {a.options.adv_estimator} chose")

    def credit_parts(self, own: _Own, received: _Received, shared: int, by_token: bool) -> list[tuple[str, float]]:
        """The named parts of the credit, without the part paid by token."""
        parts = []
        paid, answer = (0.0 if at is None else self.value(at) for at in (own.paid, own.answer))
        if own.paid is None or self.value(own.total) != paid + answer:  # more than the two, as the rule made it
            parts.append(("own", self.value(own.total) - (paid if by_token else 0.0)))
        else:
            parts += [] if own.answer is None else [("outcome", answer)]
            parts += [] if by_token else [("own" if own.answer is None else "sub-reward", paid)]
        parts += [(words, self.value(at)) for words, at in received.parts or (("received", received.total),)]
        return [*parts, ("shared", self.value(shared))]
