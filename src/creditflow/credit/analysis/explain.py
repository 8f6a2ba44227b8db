"""Explanations of advantages: the recorded terms behind one, and the formulas that combine them.

Rules, estimators and records declare the formulas of their terms. `explain` shows the first formula of a term that
gives the recorded value, bit for bit. A term without such a formula, or of another step, is given as recorded. So a
rule without formulas is explained as well, and no credit is computed here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cache, reduce
from math import isnan, nan, prod
from numbers import Real
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from creditflow.credit.assignment import Assignment
from creditflow.credit.records import Credit, Formulas
from creditflow.credit.rewards import counting
from creditflow.credit.rules.base import outcome_gates
from creditflow.credit.tokens import at_first_token
from creditflow.errors import BatchError, CreditflowError

SUM = "sum"
"""The formula of a sum of all inputs, from left to right."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A term of an explanation: a formula over earlier ones, or a given number."""

    name: str
    """A label for readers; not unique."""
    value: float
    formula: str = ""
    """Arithmetic on the names of `inputs`, or SUM; empty for a given number."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """The positions of earlier operations in the list, by their names in the formula."""
    note: str = ""
    """A remark for readers: the source of the number, the state of the gate."""


class Part(NamedTuple):
    """A part of an advantage."""

    name: str
    value: float
    """Divided and weighted."""
    in_reward: float
    """In units of reward: before the division and the weight."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The operations and parts of one step's (or token's) advantage."""

    step_id: str
    token: int | None
    """Position in the response if the tokens of the step differ; None if all sampled tokens have the same advantage."""
    operations: tuple[Operation, ...]
    terms: tuple[Part, ...]
    """The parts of the advantage; empty if the step does not learn."""
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
            inputs = {name: results[at] for name, at in o.inputs.items()}
            results.append(evaluate(o.formula, inputs) if o.formula else o.value)
        return results[-1]

    def tree(self) -> list[str]:
        """The operations as lines, the advantage first, each above its inputs; numbers have six digits."""
        lines: list[str] = []

        def show(at: int, lead: str, indent: str) -> None:
            o = self.operations[at]
            formula, note = f" = {o.formula}" if o.formula else "", f"   # {o.note}" if o.note else ""
            lines.append(f"{lead}{o.name}{formula} = {o.value:.6g}{note}")
            for i, below in enumerate(o.inputs.values(), start=1):
                last = i == len(o.inputs)
                show(below, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "))

        show(len(self.operations) - 1, "", "")
        return lines

    def __str__(self) -> str:
        where = self.step_id if self.token is None else f"{self.step_id}, token {self.token}"
        parts = [f"{part.name:8}  {part.value:+.6f}" for part in (*self.terms, Part("rounding", self.rounding, 0.0))]
        return "\n".join([f"advantage of step {where}: {self.advantage!r}", "", *self.tree(), "", *parts])


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """The value of a formula, each operation rounded to float64."""
    if formula == SUM:
        return reduce(operator.add, values.values(), 0.0)
    try:
        return float(eval(_code(formula), {"__builtins__": {}}, dict(values)))  # the formulas are code of rules
    except ZeroDivisionError:
        return nan  # not the formula of this value


@cache
def _code(formula: str) -> CodeType:
    return compile(formula, f"formula {formula}", "eval")


def names_of(formula: str) -> tuple[str, ...]:
    """The names in a formula, from left to right."""
    return _code(formula).co_names


def explain(assignment: Assignment, step: int | str, token: int | None = None) -> Explanation:
    """Explain the advantage of `step`, an index into the batch or an id.

    `token`: position in the response, default the first sampled token. It matters only if the tokens of a step differ.

    Raises BatchError for an unknown step or token, or a token that was not sampled (it has no advantage).
    """
    ids, made = assignment.batch.step_ids, assignment.advantage
    if step not in (ids if isinstance(step, str) else range(len(ids))):
        raise BatchError(f"explain: expected the id of a step, or a number from 0 to {len(ids) - 1}, got {step!r}")
    s = ids.index(step) if isinstance(step, str) else int(step)
    step_id, start = ids[s], int(assignment.batch.token_offsets[s])
    sampled = _sampled(assignment, s)
    if token is not None and token not in sampled:
        raise BatchError(f"step {step_id}: expected one of its sampled tokens, got token {token}")
    if made.advantage_T is None and made.unscaled_T is None and made.critic is None:
        sampled = []  # all tokens have the same advantage
    position = (sampled[0] if token is None else int(token)) if sampled else None
    trained = float(made.advantage_S[s] if position is None else assignment.token_advantages()[start + position])
    story = _Story(assignment, s, sampled[sampled.index(position) :] if position is not None else [])
    terms = story.tell()
    if story.operations[-1].value != trained:
        raise CreditflowError(
            f"step {step_id}: the operations give {story.operations[-1].value!r}, but {trained!r} was assigned. "
            "This is a fault of creditflow; please report it with the batch"
        )
    rounding = Fraction(trained) - sum(Fraction(part.value) for part in terms)
    return Explanation(step_id, position, tuple(story.operations), terms, float(rounding))


def _sampled(assignment: Assignment, s: int) -> list[int]:
    """Positions of the step's sampled tokens in its response."""
    batch = assignment.batch
    at: list[int] = np.flatnonzero(batch.response_mask[batch.token_offsets[s] : batch.token_offsets[s + 1]]).tolist()
    return at


class _Story:
    """Records the operations behind the advantage of step `s`, or of the first of some of its sampled tokens."""

    def __init__(self, a: Assignment, s: int, tokens: list[int]) -> None:
        """`tokens`: the token to explain and those after it, if the tokens of the step differ."""
        self.a, self.s, self.tokens = a, s, tokens
        functions = np.flatnonzero(counting(a.batch)[s]).tolist()
        self.by_token = a.options.pays_by_token and a.credit.paid_S is not None
        self.by_token = self.by_token and bool(a.rewards.scored_S[s] and _sampled(a, s))
        self.formulas: Formulas = {
            **Credit.formulas,
            **a.options.estimator.formulas,
            **a.options.propagation.formulas(a.options),
            "sub_reward": _weighted_means(len(functions)),
        }
        self.columns, self.notes = _columns(a), _notes(a, s, functions)
        self.numbers = self._of_token() if tokens else {}
        """Numbers of this step and token alone."""
        for i, k in enumerate(functions, start=1):
            scores = {f"score_{i}": a.batch.scores[s, k], f"weight_{i}": a.batch.score_weights[s, k]}
            self.numbers |= {name: float(value) for name, value in scores.items()}
        if self.by_token:
            self.numbers["credit"] = self.number("total", s) - self.number("paid", s)
        self.operations: list[Operation] = []
        self._places: dict[str, int] = {}

    def _of_token(self) -> dict[str, float]:
        made, raw_T, start = self.a.advantage, self.a.raw_T, self.a.batch.token_offsets[self.s]
        critic = {} if made.critic is None else {"value": made.critic.values_T}
        token, later = start + self.tokens[0], self.tokens[1:]
        columns = {"raw": raw_T, "token_term": made.token_term_T if self.by_token else None, **critic}
        if made.critic is not None and made.critic.token_reward_T.size:
            columns["token_reward"] = made.critic.token_reward_T
        numbers = {name: float(of_T[token]) for name, of_T in columns.items() if of_T is not None}
        if later and raw_T is not None:
            following = {"raw": raw_T, **critic}
            numbers |= {f"next_{name}": float(of_T[start + later[0]]) for name, of_T in following.items()}
        return {**numbers, "discount": prod([1.0] + [self.a.options.gamma_token] * len(later))}

    def tell(self) -> tuple[Part, ...]:
        """Record the operations, the advantage last; return its parts."""
        if (why := self.why_nothing()) is not None:
            self.given("advantage", 0.0, why)
            return ()
        s, raw, parts = self.s, "raw" if "raw" in self.numbers else "credit", dict[str, float]()
        if not self.a.groups.tied_S[s]:
            parts = {name: self.number(name, s) for name in ("own", "received", "shared")}
            parts["own"] -= self.number("paid", s) if self.by_token else 0.0
            if raw == "raw":
                parts = {f"by {self.a.options.adv_estimator}": self.number("raw", s)}
            parts |= {name: -self.number(name, s) for name in ("baseline", "shift")}
            if not parts["shift"]:
                del parts["shift"]
        weight = self.number("weight", s)
        terms = [Part(name, weight / self.number("divisor", s) * value, value) for name, value in parts.items()]
        formula = f"weight * (({raw} - baseline{' - shift' if 'shift' in parts else ''}) / divisor)"
        if (term := self.numbers.get("token_term")) is not None:
            terms.append(Part("token scores", weight * term, term))
            formula = f"{formula} + weight * token_term" if parts else "weight * token_term"
        self.make("advantage", formula, {name: self.term(name) for name in names_of(formula)})
        return tuple(terms)

    def why_nothing(self) -> str | None:
        """The reason for an advantage of 0; None if the advantage, or its token term alone, is not 0."""
        a, s, rule, rewards, credit = self.a, self.s, self.a.options.propagation, self.a.rewards, self.a.credit
        is_frozen, is_misled = (of_S is not None and of_S[s] for of_S in (credit.frozen_S, credit.misled_S))
        masked, trained = rewards.masked_N[a.batch.trajectory_of_step[s]], a.groups.trained_S[s]
        has_critic = a.advantage.critic is not None or a.options.estimator.critic
        agent = a.batch.agent_names[a.batch.agent_of_step[s]]
        reasons = (
            (masked, "its trajectory is masked: failed, not scored, or truncated"),
            (rewards.masked_S[s] and not trained, f"it is masked: the outcome of {agent} could not be scored"),
            (is_frozen, rule.why_frozen),
            (is_misled, "the outcome of a later answer step's agent could not be scored"),
            (rewards.failed_S[s] and not trained, "its scoring failed"),
            (a.groups.group_S[s] < 0, "there is no other trajectory to compare it with, at any level"),
            (has_critic and not self.tokens, "no token of it was sampled, so the critic gives it no value"),
            (a.groups.tied_S[s] and "token_term" not in self.numbers, "its group is tied: all are the same"),
        )
        return next((words for holds, words in reasons if holds), None)

    def given(self, name: str, value: float, note: str) -> int:
        """Record a number; return its position."""
        self.operations.append(Operation(name, value, note=note))
        return len(self.operations) - 1

    def make(self, name: str, formula: str, inputs: Mapping[str, int]) -> int:
        """Record the value of a formula; return its position."""
        value = evaluate(formula, {word: self.operations[at].value for word, at in inputs.items()})
        self.operations.append(Operation(name, value, formula, inputs))
        return len(self.operations) - 1

    def term(self, name: str) -> int:
        """The position of a term of the step, recorded with its formula if that gives its value."""
        if name not in self._places:
            value, children = self.number(name, self.s), self.children() if name in ("received", "down") else []
            if children and evaluate(SUM, {str(k): evaluate(*self.passed(k)) for k in children}) == value:
                place = self.make(name, SUM, dict(map(self.contribution, children)))
            elif formula := self.formula(name, self.s, value):
                place = self.make(name, formula, {word: self.term(word) for word in names_of(formula)})
            else:
                place = self.given(name, value, self.notes.get(name, ""))
            self._places[name] = place
        return self._places[name]

    def formula(self, name: str, s: int, value: float | None = None) -> str | None:
        """The first formula of a term whose own terms exist, and which gives `value`."""
        for formula in self.formulas.get(name, ()):
            numbers = {word: self.number(word, s) for word in names_of(formula)}
            if not any(map(isnan, numbers.values())) and value in (None, evaluate(formula, numbers)):
                return formula
        return None

    def number(self, name: str, s: int) -> float:
        """A recorded term or an option by its name; NaN if the step has none."""
        if s == self.s and name in self.numbers:
            return self.numbers[name]
        if (column := self.columns.get(name)) is not None:
            return float(column[s])
        option = getattr(self.a.options.propagation, name, getattr(self.a.options, name, None))
        return float(option) if isinstance(option, Real) else nan

    def children(self) -> list[int]:
        """The children that pass credit by gates, from the last to the first: the order of the reverse pass."""
        batch, s = self.a.batch, self.s
        stop = np.searchsorted(batch.trajectory_of_step, batch.trajectory_of_step[s], side="right")
        first, last = np.searchsorted(batch.edge_child, (s + 1, stop))
        edges = first + np.flatnonzero(batch.edge_parent[first:last] == s)[::-1]
        return [] if self.columns["gate"] is None else batch.edge_child[edges].tolist()

    def passed(self, k: int) -> tuple[str, dict[str, float]]:
        """The formula of the credit that child k passes to the step, and its numbers."""
        formula = f"gamma * share * (gate * ({self.formula('passed', k)}))"
        return formula, {word: self.number(word, k) for word in names_of(formula)}

    def contribution(self, k: int) -> tuple[str, int]:
        """Record the credit that child k passes to the step; return its name and position."""
        (formula, numbers), child, inputs = self.passed(k), self.a.batch.step_ids[k], dict[str, int]()
        for word, number in numbers.items():
            note = self.gate_note(k) if word == "gate" else ""
            of_child = word not in ("gamma", "lam")
            inputs[word] = self.given(f"{word} of {child}", number, note) if of_child else self.term(word)
        return f"from {child}", self.make(f"from {child}", formula, inputs)

    def gate_note(self, k: int) -> str:
        """The state of the gate of child k, in words."""
        credit, rewards = self.a.credit, self.a.rewards
        if credit.threshold_S is None or credit.gate_open_S is None or credit.forced_open_S is None:
            return f"by {self.a.options.propagation}"
        if not (rewards.scored_S[k] and self.a.options.decomposed):
            return f"open: {'its scoring failed' if rewards.failed_S[k] else 'without a score that counts'}"
        above = "above" if credit.gate_open_S[k] and not credit.forced_open_S[k] else "not above"
        words = f"sub-reward {float(rewards.sub_reward_S[k])!r} {above} threshold {float(credit.threshold_S[k])!r}"
        return f"{words}, opened to keep the floor" if credit.forced_open_S[k] else words


def _columns(a: Assignment) -> dict[str, Any]:
    """[S] the recorded terms, by the names of the records' fields; None or NaN: no term."""
    batch, critic = a.batch, a.advantage.critic
    records = [record for record in (critic, a.advantage, a.groups, a.rewards, a.credit, a.fit) if record is not None]
    named = {f.name: getattr(record, f.name) for record in records for f in fields(record)}
    return {name.removesuffix("_S"): values for name, values in named.items()} | {
        "credit": a.credit.total_S,
        "gate": outcome_gates(a.credit, a.options),
        "share": batch.share_of_step,
        "answers": np.where(batch.is_answer_step, batch.answers_of_step, nan),
        "value": None if critic is None else at_first_token(batch, critic.values_T, nan),
    }


def _weighted_means(functions: int) -> tuple[str, ...]:
    """Formulas of a sub-reward, the weighted mean of the scores of so many functions."""
    names = range(1, functions + 1)
    weighted, weights = " + ".join(f"weight_{i} * score_{i}" for i in names), " + ".join(f"weight_{i}" for i in names)
    mean = f"({weighted}) / ({weights})"
    return () if functions == 0 else ("score_1", mean) if functions == 1 else (mean,)


def _notes(a: Assignment, s: int, functions: list[int]) -> dict[str, str]:
    """The sources of given numbers in words, by name."""
    batch, rewards, whitened = a.batch, a.rewards, a.options.estimator.whitened
    agent, n = batch.agent_names[batch.agent_of_step[s]], batch.trajectory_of_step[s]
    notes = dict.fromkeys(("own", "received", "shared", "paid"), f"by {a.options.propagation}")
    if np.isnan(rewards.sub_reward_S[s]):
        notes["paid"] = "its scoring failed, and nothing stands in" if rewards.failed_S[s] else "no score counts"
    if not (batch.edge_parent == s).any():
        notes["received"] = notes["down"] = "no step used its response"
    for i, k in enumerate(functions, start=1):
        notes |= {f"score_{i}": _score_note(a, s, k), f"weight_{i}": f"of {batch.score_names[k]}"}
    return notes | {
        "outcome": f"of {agent}" if batch.outcomes_of_agents and agent in batch.outcomes_of_agents[n] else "",
        "sub_reward": "its scoring failed: the mean of others" if rewards.failed_S[s] else f"mean of {agent}'s steps",
        "harmless": "the probability of no harm, given all scores and the outcome",
        "baseline": f"{int(a.groups.group_size_S[s])} trajectories with {a.group_name(s)}",
        "weight": "balances strata",
        "shift": "of whitening",
        "divisor": "of whitening, over the tokens of the policy" if whitened else f"by {a.options.adv_estimator}",
        "raw": f"by {a.options.adv_estimator}",
    }


def _score_note(a: Assignment, s: int, k: int) -> str:
    """The raw score of function k and its reason."""
    name, raw = a.batch.score_names[k], a.batch.raw_scores[s].get(a.batch.score_names[k])
    if raw is None or raw.status != "ok":
        return f"of {name}"
    value = f"mean over {len(raw.value)} tokens" if isinstance(raw.value, tuple) else f"{raw.value!r}"
    low, high = raw.range
    return f"of {name}: {value} in [{low:g}, {high:g}]" + (f"; {raw.reason}" if raw.reason else "")
