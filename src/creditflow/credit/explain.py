"""Where an advantage came from: the operations that made it, which replayed in order give the same bits.

Reads a finished assignment and its batch. Every operation is one rounding of float64 arithmetic on earlier results, in
the order in which the assignment did it; what comes from other steps (a child's credit, a group's mean) is given, and
has an explanation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from creditflow.credit.advantage import EPSILON, sampled_tokens
from creditflow.credit.assignment import Assignment
from creditflow.credit.decompose import counting, outcomes
from creditflow.credit.propagate import SHARES, answer_steps
from creditflow.errors import BatchError, CreditflowError

DECOMPOSED = ("none", "discounted", "threshold")
"""Rules whose own and shared parts are listed operation by operation; those of other rules are given."""

Symbol = Literal["given", "+", "-", "*", "/"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of an explanation: `name = a symbol b`, or a given number."""

    name: str
    symbol: Symbol
    inputs: tuple[str, ...]
    """Names of earlier results; `+` and `*` take two or more, from left to right."""
    value: float
    note: str = ""
    """In words, for people: whose number it is, which gate it went through."""

    def __str__(self) -> str:
        made = f" = {f' {self.symbol} '.join(self.inputs)}" if self.inputs else ""
        note = f"   # {self.note}" if self.note else ""
        return f"{self.name}{made} = {self.value!r}{note}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """How one step's (or token's) advantage was made."""

    step_id: str
    token: int | None
    """Position in the response, where the tokens of the step differ; else None: all its sampled tokens have the same.
    """
    operations: tuple[Operation, ...]
    terms: tuple[tuple[str, float], ...]
    """The same for people: parts that add up to the advantage, each already divided and weighted."""
    rounding: float
    """What the parts leave, because they were rounded one by one: `advantage - sum of terms`."""

    @property
    def advantage(self) -> float:
        """What was trained on."""
        return self.operations[-1].value

    def replay(self) -> float:
        """The last result, computed anew from the given numbers alone."""
        results: dict[str, float] = {}
        for operation in self.operations:
            results[operation.name] = (
                operation.value
                if operation.symbol == "given"
                else _apply(operation.symbol, [results[name] for name in operation.inputs])
            )
        return results[self.operations[-1].name]

    def __str__(self) -> str:
        where = self.step_id if self.token is None else f"{self.step_id}, token {self.token}"
        lines = [f"advantage of step {where}: {self.advantage!r}", "", *map(str, self.operations), ""]
        width = max((len(name) for name, _ in self.terms), default=0)
        lines += [f"{name:{width}}  {value:+.6f}" for name, value in (*self.terms, ("rounding", self.rounding))]
        return "\n".join(lines)


def explain(assignment: Assignment, step: int | str, token: int | None = None) -> Explanation:
    """The operations that made the advantage of `step` (its index in the batch, or its id).

    `token`: position in its response; default the first sampled one. Matters only where the tokens of a step differ.

    Raises BatchError for a step or token that there is not, or a token that was not sampled (it has no advantage).
    """
    s = _index(assignment, step)
    story = _Story(assignment, s)
    position = _check_token(assignment, s, token)
    if assignment.advantage_T is None and assignment.unscaled_T is None:
        position = None  # all tokens have the same
    story.tell(position)
    trained = _trained(assignment, s, position)
    value = story.operations[-1].value
    if value != trained:
        raise CreditflowError(
            f"step {assignment.batch.step_ids[s]}: the operations give {value!r}, but {trained!r} was assigned. "
            "This is a fault of creditflow; please report it with the batch"
        )
    terms = tuple(story.terms) if trained else ()
    rounding = trained - math.fsum(value for _, value in terms)
    return Explanation(assignment.batch.step_ids[s], position, tuple(story.operations), terms, rounding)


def _index(assignment: Assignment, step: int | str) -> int:
    batch = assignment.batch
    if isinstance(step, str):
        if step not in batch.step_ids:
            raise BatchError(f"explain: expected the id of a step of the batch, got {step!r}")
        return batch.step_ids.index(step)
    if not 0 <= step < batch.n_steps:
        raise BatchError(f"explain: expected a step from 0 to {batch.n_steps - 1}, got {step}")
    return int(step)


def _trained(assignment: Assignment, s: int, token: int | None) -> float:
    """The advantage of the step, or of one of its tokens, that the loss sees."""
    if token is None:
        return float(assignment.advantage_S[s])
    at = int(assignment.batch.token_offsets[s]) + token
    return float(assignment.token_advantages()[at])


def _check_token(assignment: Assignment, s: int, token: int | None) -> int | None:
    """The position of the token to explain; None where the step has none that was sampled."""
    batch = assignment.batch
    sampled = np.flatnonzero(batch.response_mask[batch.token_offsets[s] : batch.token_offsets[s + 1]])
    if token is None:
        return int(sampled[0]) if sampled.size else None
    if token not in sampled:
        raise BatchError(f"step {batch.step_ids[s]}: expected one of its sampled tokens, got token {token}")
    return int(token)


def _apply(symbol: Symbol, values: Sequence[float]) -> float:
    result = values[0]
    for value in values[1:]:
        if symbol == "+":
            result += value
        elif symbol == "-":
            result -= value
        elif symbol == "*":
            result *= value
        else:
            result /= value
    return result


@dataclass(slots=True)
class _Story:
    """Writes down operations in the order of `assign`; the parts of its pipeline are the methods here."""

    assignment: Assignment
    s: int
    operations: list[Operation] = field(default_factory=list)
    terms: list[tuple[str, float]] = field(default_factory=list)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def given(self, name: str, value: float, note: str = "") -> str:
        self.operations.append(Operation(name, "given", (), float(value), note))
        return name

    def make(self, name: str, symbol: Symbol, *inputs: str, note: str = "") -> str:
        value = _apply(symbol, [self.value(i) for i in inputs])
        self.operations.append(Operation(name, symbol, inputs, value, note))
        return name

    def add_up(self, name: str, parts: Sequence[str], note: str = "") -> str:
        """The parts from left to right, starting from 0 as the assignment does."""
        if not parts:
            return self.given(name, 0.0, note)
        return self.make(name, "+", self.zero(), *parts, note=note)

    def zero(self) -> str:
        return "zero" if any(o.name == "zero" for o in self.operations) else self.given("zero", 0.0)

    def value(self, name: str) -> float:
        return next(o.value for o in self.operations if o.name == name)

    # ---- the steps of `assign` -------------------------------------------------------------------------------------

    def tell(self, token: int | None) -> None:
        a, s = self.assignment, self.s
        own, paid = self.own()
        shared = self.shared()
        received = self.received()
        credit = self.make("credit", "+", own, received, shared)
        by_token = self.by_token()
        if by_token:
            credit = self.make("credit less what is paid by token", "-", credit, paid)
        if (why := self.why_nothing(token)) is not None:
            self.given("advantage", 0.0, why)
            return
        if a.critic is not None:
            assert token is not None, "why_nothing has seen to it"
            self.scaled(self.critic_advantage(token, own, shared, paid if by_token else None), [])
            return
        raw = credit
        if a.unscaled_T is not None and token is not None:
            raw = self.discounted_inside(credit, token)
        untied = not a.tied_S[s]
        name = "advantage of the step" if by_token and token is not None else "advantage"
        if untied:
            self.scaled(raw, self.credit_terms(own, paid, received, shared, by_token), name)
        else:
            self.given(name, 0.0, "its group is tied: all credits are the same")
        if by_token and token is not None:
            at = int(a.batch.token_offsets[s]) + token
            assert a.token_term_T is not None
            term = self.given("token term", a.token_term_T[at], "scores of this token and those after it")
            weight = self.given("weight of the token term", a.weight_S[s])
            added = self.make("weighted token term", "*", weight, term)
            self.make("advantage", "+", name, added)
            self.terms.append(("token scores", self.value(added)))

    def why_nothing(self, token: int | None) -> str | None:
        """Why the advantage is 0; None where it is not, or only its token term is not."""
        a, s = self.assignment, self.s
        taught_by_token = self.by_token() and a.critic is None and token is not None
        reasons = (
            (a.masked_N[a.batch.trajectory_of_step[s]], "its trajectory is masked: failed, not scored, or truncated"),
            (a.frozen_S[s], "frozen: it lies upstream of a closed gate"),
            (not a.trained_S[s], "its scoring failed"),
            (a.group_S[s] < 0, "there is no other trajectory to compare it with, at any level"),
            (a.critic is not None and token is None, "no token of it was sampled, so the critic says nothing of it"),
            (a.tied_S[s] and not taught_by_token, "its group is tied: all credits are the same"),
        )
        return next((words for holds, words in reasons if holds), None)

    def by_token(self) -> bool:
        a, s = self.assignment, self.s
        paid = a.token_term_T is not None or (a.critic is not None and a.critic.token_reward_T is not None)
        return paid and bool(a.scored_S[s]) and bool(sampled_tokens(a.batch)[s])

    def own(self) -> tuple[str, str]:
        """The own reward, and the part of it that is paid for the sub-reward."""
        a, s = self.assignment, self.s
        rule = a.options.propagation
        if rule not in DECOMPOSED:
            own = self.given("own", a.own_S[s], f"{rule} pays no step for its own score" if not a.own_S[s] else rule)
            return own, own
        scored = not np.isnan(a.sub_reward_S[s])
        paid = self.paid() if scored else self.given("paid", 0.0, "no function scored the step")
        if a.options.outcome_to != "answer":
            return paid, paid
        return self.make("own", "+", paid, self.answer_part()), paid

    def paid(self) -> str:
        options, r = self.assignment.options, self.sub_reward()
        centred = self.make("above origin", "-", r, self.given("origin", options.sub_reward_origin))
        return self.make("paid", "*", self.given("w_r", options.w_r), centred)

    def sub_reward(self) -> str:
        a, s, batch = self.assignment, self.s, self.assignment.batch
        if a.failed_S[s]:
            return self.given("sub-reward", a.sub_reward_S[s], "its scoring failed: the mean of others stands in")
        if a.options.decomp_granularity == "agent":
            same = (batch.trajectory_of_step == batch.trajectory_of_step[s]) & a.scored_S
            same &= batch.agent_of_step == batch.agent_of_step[s]
            return self.given("sub-reward", a.sub_reward_S[s], f"mean of the agent's {same.sum()} scored steps")
        weighted, weights = [], []
        for k in np.flatnonzero(counting(batch)[s]):
            name = batch.score_names[k]
            score = self.score(name, batch.scores[s, k])
            weights.append(self.given(f"weight of {name}", batch.score_weights[s, k]))
            weighted.append(self.make(f"weighted {name}", "*", weights[-1], score))
        total, weight = self.add_up("weighted scores", weighted), self.add_up("weights", weights)
        return self.make("sub-reward", "/", total, weight)

    def score(self, name: str, rescaled: float) -> str:
        raw = self.assignment.batch.raw_scores[self.s].get(name)
        if raw is None or raw.status != "ok" or isinstance(raw.value, tuple):
            note = (
                ""
                if raw is None or not isinstance(raw.value, tuple)
                else f"mean over {len(raw.value)} tokens, rescaled"
            )
            return self.given(name, rescaled, note)
        low = self.given(f"lowest {name}", raw.range[0])
        above = self.make(f"{name} above lowest", "-", self.given(f"raw {name}", raw.value), low)
        width = self.make(f"range of {name}", "-", self.given(f"highest {name}", raw.range[1]), low)
        return self.make(name, "/", above, width)

    def answer_part(self) -> str:
        """The step's part of the outcome under `outcome_to: answer`."""
        s, batch, name = self.s, self.assignment.batch, "part of the outcome"
        answers_S = answer_steps(batch)
        if not answers_S[s]:
            return self.given(name, 0.0, "the answer did not come from this step")
        count = answers_S[batch.trajectory_of_step == batch.trajectory_of_step[s]].sum()
        return self.make(name, "/", self.weighted_outcome(), self.given("answer steps", int(count)))

    def weighted_outcome(self) -> str:
        a, n = self.assignment, self.assignment.batch.trajectory_of_step[self.s]
        value = outcomes(a.batch, a.options).value_N[n]
        return self.make("weighted outcome", "*", self.given("w_o", a.options.w_o), self.given("outcome", value))

    def shared(self) -> str:
        a, options = self.assignment, self.assignment.options
        value = a.shared_S[self.s]
        if options.propagation in DECOMPOSED:
            if options.outcome_to == "all":
                return self.weighted_outcome()
            return self.given("shared", 0.0, "the outcome enters at the answer")
        return self.given("shared", value, f"what {options.propagation} gives every step of the trajectory")

    def received(self) -> str:
        a, s, batch, options = self.assignment, self.s, self.assignment.batch, self.assignment.options
        if not a.out_S.any() and not a.in_S.any():
            return self.given("received", a.received_S[s], "nothing flows" if not a.received_S[s] else "by its rule")
        edges = np.flatnonzero(batch.edge_parent == s)[::-1]
        if not edges.size:
            return self.given("received", 0.0, "no step used its response")
        if options.share == "once":
            return self.received_once()
        share_S = SHARES[options.share](batch)
        rate = self.make(
            "discount", "*", self.given("gamma", options.gamma), self.given("gate in", a.in_S[s], self.gate(s))
        )
        return self.add_up("received", [self.contribution(int(k), rate, share_S[k]) for k in batch.edge_child[edges]])

    def contribution(self, k: int, rate: str, share: float) -> str:
        a, child = self.assignment, self.assignment.batch.step_ids[k]
        out = self.given(f"gate out of {child}", a.out_S[k], self.gate(k))
        credit = self.given(f"h of {child}", float(a.own_S[k] + a.received_S[k]), "own + received")
        passed = self.make(f"passed by {child}", "*", out, credit)
        stand_in = a.stand_in_S[k]
        if a.out_S[k] < 1.0 and not np.isnan(stand_in):
            closed = self.make(f"gate closed of {child}", "-", self.one(), out)
            other = self.given(f"stand-in for {child}", stand_in, "mean of open steps of its group in other plays")
            passed = self.make(
                f"handed up by {child}", "+", passed, self.make(f"instead of {child}", "*", closed, other)
            )
        split = self.make(f"rate of {child}", "*", rate, self.given(f"share of {child}", share))
        return self.make(f"from {child}", "*", split, passed)

    def one(self) -> str:
        return "one" if any(o.name == "one" for o in self.operations) else self.given("one", 1.0)

    def received_once(self) -> str:
        from creditflow.credit import kernels
        from creditflow.credit.propagate import first_edges, first_steps

        a, s, batch = self.assignment, self.s, self.assignment.batch
        stop = int(np.searchsorted(batch.trajectory_of_step, batch.trajectory_of_step[s], side="right"))
        parts = []
        for d in range(stop - 1, s, -1):
            weight = kernels.best_path(
                batch.edge_child, batch.edge_parent, first_edges(batch), first_steps(batch), a.out_S, a.in_S,
                a.options.gamma, d, np.zeros(batch.n_steps),
            )[s]  # fmt: skip
            if weight > 0.0:
                child = batch.step_ids[d]
                rate = self.given(f"best path to {child}", weight, "gamma and gates along it")
                parts.append(self.make(f"from {child}", "*", rate, self.given(f"own of {child}", a.own_S[d])))
        return self.add_up("received", parts)

    def gate(self, k: int) -> str:
        a = self.assignment
        r, theta = a.sub_reward_S[k], a.threshold_S[k]
        if a.failed_S[k]:
            return f"its scoring failed: {a.options.gate_unscored}"
        if np.isnan(r) or not a.scored_S[k]:
            return "nothing judged it: open"
        if a.forced_open_S[k]:
            return f"sub-reward {r:g} not above threshold {theta:g}, opened to keep the floor"
        return f"sub-reward {r:g} {'above' if a.gate_open_S[k] else 'not above'} threshold {theta:g}"

    def discounted_inside(self, credit: str, token: int) -> str:
        from creditflow.credit import kernels

        a, s = self.assignment, self.s
        start, stop = int(a.batch.token_offsets[s]), int(a.batch.token_offsets[s + 1])
        after = int(a.batch.response_mask[start + token + 1 : stop].sum())
        power = kernels.powers(a.options.gamma_token, after + 1)[after]
        name = self.given("gamma_token to the end", power, f"{after} sampled tokens come after this one")
        return self.make("discounted credit", "*", credit, name)

    def critic_advantage(self, token: int, own: str, shared: str, paid: str | None) -> str:
        a, s, batch, options = self.assignment, self.s, self.assignment.batch, self.assignment.options
        critic = a.critic
        assert critic is not None
        start, stop = int(batch.token_offsets[s]), int(batch.token_offsets[s + 1])
        at = start + token
        following = np.flatnonzero(batch.response_mask[at + 1 : stop])
        value = self.given("value", critic.values_T[at], "the critic, at this token")
        if following.size:
            after = at + 1 + int(following[0])
            gamma = self.given("gamma_token", options.gamma_token)
            ahead = self.make("value ahead", "*", gamma, self.given("next value", critic.values_T[after]))
            delta = self.make("delta", "-", ahead, value)
        else:
            if paid is not None:
                own = self.make("own less what is paid by token", "-", own, paid)
            reward = self.make("reward", "+", own, shared)
            last = self.make("worth of the step", "+", reward, self.received_by_critic())
            delta = self.make("delta", "-", last, value)
        if critic.token_reward_T is not None:
            paid_here = self.given("paid for this token", critic.token_reward_T[at])
            delta = self.make("delta with token reward", "+", delta, paid_here)
        if not following.size:
            return delta
        decay = self.make("decay", "*", gamma, self.given("lam_token", options.lam_token))
        later = self.given("next advantage", critic.advantage_T[after], "of the next sampled token, before whitening")
        return self.make("advantage by the critic", "+", delta, self.make("decayed", "*", decay, later))

    def received_by_critic(self) -> str:
        a, s, batch, options = self.assignment, self.s, self.assignment.batch, self.assignment.options
        assert a.critic is not None
        share_S = SHARES[options.share](batch)
        gate = self.make(
            "rate in", "*", self.given("gamma of values", options.gamma), self.given("gate of values", a.in_S[s])
        )
        parts = []
        for k in batch.edge_child[np.flatnonzero(batch.edge_parent == s)[::-1]]:
            child = batch.step_ids[k]
            sampled = np.flatnonzero(batch.response_mask[batch.token_offsets[k] : batch.token_offsets[k + 1]])
            if sampled.size:
                first = int(batch.token_offsets[k]) + int(sampled[0])
                advantage = self.given(f"advantage at {child}", a.critic.advantage_T[first], "before whitening")
                lam = self.make(f"lam x {child}", "*", self.given(f"lam of {child}", options.lam), advantage)
                worth = self.make(
                    f"worth of {child}", "+", self.given(f"value of {child}", a.critic.values_T[first]), lam
                )
            else:
                reward = float(a.own_S[k] + a.shared_S[k])
                total = self.given(f"reward of {child}", reward, "no token of it was sampled")
                worth = self.make(f"worth of {child}", "+", total, self.given(f"below {child}", a.critic.down_S[k]))
            passed = self.make(f"value passed by {child}", "*", self.given(f"gate {child}", a.out_S[k]), worth)
            rate = self.make(f"value rate of {child}", "*", gate, self.given(f"value share of {child}", share_S[k]))
            parts.append(self.make(f"value from {child}", "*", rate, passed))
        return self.add_up("value received", parts)

    # ---- from credit to advantage ----------------------------------------------------------------------------------

    def scaled(self, raw: str, terms: list[tuple[str, str]], name: str = "advantage") -> None:
        """Down to `weight * ((raw - baseline) - shift) / divisor`."""
        a, s = self.assignment, self.s
        size, group = int(a.group_size_S[s]), a.group_name(s)
        baseline = self.given("baseline", a.baseline_S[s], f"{size} trajectories with {group}")
        difference = self.make("difference", "-", raw, baseline)
        shift = self.given("shift", a.shift_S[s], "of whitening") if a.shift_S[s] else None
        if shift:
            difference = self.make("shifted", "-", difference, shift)
        divisor = self.divisor()
        weight = self.given("weight", a.weight_S[s], "balances strata")
        self.make(name, "*", weight, self.make("scaled", "/", difference, divisor))
        factor = float(a.weight_S[s] / a.divisor_S[s])
        inside = self.value("gamma_token to the end") if raw == "discounted credit" else 1.0
        parts = terms or [("by the critic", raw)]
        self.terms += [(words, factor * inside * self.value(part)) for words, part in parts]
        self.terms += [("baseline", -factor * float(a.baseline_S[s]))]
        self.terms += [("shift", -factor * self.value(shift))] if shift else []

    def divisor(self) -> str:
        a, s = self.assignment, self.s
        if a.divisor_S[s] == 1.0:
            return self.given("divisor", 1.0, "not scaled")
        if a.divisor_S[s] == a.spread_S[s] + EPSILON:
            spread = self.given("spread", a.spread_S[s], "of the group")
            return self.make("divisor", "+", spread, self.given("epsilon", EPSILON))
        return self.given("divisor", a.divisor_S[s], "of whitening: root of the variance over the policy's tokens")

    def credit_terms(self, own: str, paid: str, received: str, shared: str, by_token: bool) -> list[tuple[str, str]]:
        answered = any(o.name == "part of the outcome" for o in self.operations)
        if not answered:
            terms = [] if by_token else [("own", own)]
        else:
            terms = [("outcome", "part of the outcome")] + ([] if by_token else [("sub-reward", paid)])
        children = [o.name for o in self.operations if o.name.startswith("from ")]
        terms += [(name, name) for name in children] or [("received", received)]
        return [*terms, ("shared", shared)]
