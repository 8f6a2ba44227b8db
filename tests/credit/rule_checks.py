"""Checks of propagation rules, on a fixed set of small batches under the options that affect rules.

The checks do not judge the amount of credit, only the properties that every rule must have.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditflow.credit import Credit, CreditOptions, PropagationInput, assign, explain
from creditflow.credit.records import PROPAGATION_RULES, PropagationRule
from creditflow.credit.rules.base import OUTCOME, SIGNAL, parent_counts, shares
from creditflow.data import (
    Bools,
    Floats,
    Score,
    ScoreStatus,
    Step,
    Task,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
)
from creditflow.testing.report import Fault, Report, described, name_of, run

GRAPHS: dict[str, tuple[tuple[int, ...], ...]] = {
    "chain": ((), (0,), (1,), (2,)),
    "fan-out": ((), (0,), (0,), (0,)),
    "fan-in": ((), (), (), (0, 1, 2)),
    "diamonds": ((), (0,), (0,), (1, 2), (1, 3)),
    "several roots": ((), (), (0,), (1,), ()),
}
"""Graphs by name: the parents of each step."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default options": {},
    "outcome_to: answer": {"outcome_to": "answer", "gamma": 0.5, "sub_reward_origin": 0.0},
    "freeze": {"on_closed_gate": "freeze", "outcome_to": "answer"},
    "outcome only": {"reward_decomp": False, "mask_truncated": True},
    "agents' means": {"decomp_granularity": "agent", "adv_estimator": "rloo", "sub_reward_origin": 0.5},
    "sub-rewards shared": {"shared_reward": "outcome_plus_mean_sub_reward", "w_o": 2.0, "gamma": 0.0},
}

_RELATIVE = {"adv_estimator": "relative", "group_by": "task"}
"""Options that a rule needs that compares trajectories itself."""
_TOLERANCE = 1e-9
_AGENTS = ("planner", "executor", "verifier")
_OTHER_NAMES = {"planner": "z", "executor": "y", "verifier": "x"}
_FLOATS = ("own_S", "received_S", "shared_S", "withheld_S", "gate_S")
_TYPES = dict.fromkeys(_FLOATS, "float64") | {"reached_S": "uint8", "frozen_S": "bool"}
_OPTIONAL = ("gate_S", "frozen_S")


def check_propagation_rule(rule: str) -> Report:
    """Run every check of this module on a registered rule. Raises ConformanceError if a check fails.

    Rules that compare trajectories, or are fitted to them, are not checked for independent trajectories.
    """
    record, batches, options = PROPAGATION_RULES[rule], _batches(), OPTIONS
    if record.relative:  # refused with other estimators and groups
        options = {title: chosen | _RELATIVE for title, chosen in options.items()}
    cases = [
        _RuleCase(f"{batch}, {title}", record, trajectories, CreditOptions(propagation=rule, **chosen))
        for batch, trajectories in batches.items()
        for title, chosen in options.items()
    ]
    dependent = {name_of(trajectories_are_independent)} if record.relative or record.expects else set()
    return run(rule, BASICS, CHECKS, cases, dependent)


@dataclass(frozen=True, slots=True)
class _Changed:
    """A change of one score or outcome, and the resulting credit."""

    n: int
    """Index of the trajectory."""
    what: str
    step: int | None
    """Index of the step in the trajectory; None: the outcome changed."""
    credit: Credit


@dataclass
class _RuleCase:
    """One batch with one set of options, and the rule."""

    title: str
    rule: PropagationRule
    trajectories: list[Trajectory]
    options: CreditOptions

    def __str__(self) -> str:
        return self.title

    @cached_property
    def inputs(self) -> PropagationInput:
        return self.input_of(self.trajectories)

    @cached_property
    def credit(self) -> Credit:
        credit: Credit = self.rule.credit(copy.deepcopy(self.inputs))
        return credit

    def input_of(self, trajectories: Sequence[Trajectory]) -> PropagationInput:
        """The input that `assign` passes to the rule for these trajectories."""
        capture = PropagationRule(
            _capture, pays_own=self.rule.expects, relative=self.rule.relative, expects=self.rule.expects
        )
        with _registered("capture", capture) as name:
            try:
                assign(TrajectoryBatch.from_trajectories(trajectories), replace(self.options, propagation=name))
            except _CapturedError as seen:
                return replace(seen.inputs, options=self.options.resolved())
        raise AssertionError("assign calls the rule")

    @cached_property
    def changed(self) -> list[_Changed]:
        """Every change of one score or outcome in an unmasked trajectory, with the resulting credit."""
        changes = []
        for n in sorted({*self.inputs.batch.trajectory_of_step[~self.inputs.masked_S].tolist()}):
            for what, step, trajectory in _changes(self.trajectories[n]):
                trajectories = [*self.trajectories[:n], trajectory, *self.trajectories[n + 1 :]]
                changes.append(_Changed(n, what, step, self.rule.credit(self.input_of(trajectories))))
        return changes

    def compared(self, trajectories: Sequence[Trajectory], what: str, only_S: Bools | None = None) -> Iterator[Fault]:
        """Yield a Fault for each step whose credit differs when the rule receives `trajectories` instead."""
        inputs = self.input_of(trajectories)
        other = self.rule.credit(inputs)
        at = [inputs.batch.step_ids.index(id) for id in self.inputs.batch.step_ids]
        for name, one in _columns(self.credit).items():
            now = _columns(other)[name][at]
            for s in np.flatnonzero(_differs(one, now) & (True if only_S is None else only_S)):
                yield Fault(self.step(s), f"{name} {one[s]:g} {what}", f"{now[s]:g}")

    def is_in(self, n: int) -> Bools:
        """[S] True for the steps of trajectory n."""
        return np.equal(self.inputs.batch.trajectory_of_step, n)

    def step(self, s: int | np.intp) -> str:
        return f"{self.title}, step {self.inputs.batch.step_ids[int(s)]}"


# ---- the checks ----------------------------------------------------------------------------------------------------


def runs_on_every_batch(case: _RuleCase) -> Iterator[Fault]:
    """The rule raises for no batch, however small, even with unscored, failed or masked steps."""
    try:
        _ = case.credit
    except Exception as error:
        yield Fault(str(case), "a Credit", described(error))


def returns_a_credit(case: _RuleCase) -> Iterator[Fault]:
    """It returns a Credit with one entry per step in each column, of the type that Credit declares."""
    if not isinstance(case.credit, Credit):
        yield Fault(str(case), "a Credit", f"a {type(case.credit).__name__}")
        return
    for name, kind in _TYPES.items():
        column: Any = getattr(case.credit, name)
        if column is None and name in _OPTIONAL:
            continue
        expected = f"{name} of {kind} and shape {(case.inputs.batch.n_steps,)}"
        got = f"a {type(column).__name__}"
        if isinstance(column, np.ndarray):
            got = f"{name} of {column.dtype} and shape {column.shape}"
        if got != expected:
            yield Fault(str(case), expected, got)


def is_finite(case: _RuleCase) -> Iterator[Fault]:
    """Its numbers are finite, its gates from 0 to 1, its bits known ones."""
    top: dict[str, int] = {"gate_S": 1, "reached_S": int(SIGNAL | OUTCOME)}
    for name, column in _columns(case.credit).items():
        good_S = np.isfinite(column)
        if name in top:
            good_S &= (column >= 0) & (column <= top[name])
        for s in np.flatnonzero(~good_S):
            yield Fault(
                case.step(s), f"{name} from 0 to {top[name]}" if name in top else f"a finite {name}", f"{column[s]:g}"
            )


def leaves_its_input_alone(case: _RuleCase) -> Iterator[Fault]:
    """It changes no array of its input or the batch."""
    given = copy.deepcopy(case.inputs)
    case.rule.credit(given)
    for one, other in ((case.inputs, given), (case.inputs.batch, given.batch)):
        for name, column in _arrays(one).items():
            if not np.array_equal(column, getattr(other, name), equal_nan=column.dtype.kind == "f"):
                yield Fault(str(case), f"{name} of the {type(one).__name__} as it was", "a changed one")


def is_deterministic(case: _RuleCase) -> Iterator[Fault]:
    """The same input gives the same Credit, bit for bit."""
    again = _columns(case.rule.credit(copy.deepcopy(case.inputs)))
    for name, column in _columns(case.credit).items():
        if not np.array_equal(column, again[name], equal_nan=True):
            yield Fault(str(case), f"the same {name} again", "another one")


def ignores_trajectory_order(case: _RuleCase) -> Iterator[Fault]:
    """The order of the trajectories in the batch does not affect credit."""
    yield from case.compared(case.trajectories[::-1], "with the trajectories in reverse")
    yield from case.compared([*case.trajectories[1:], case.trajectories[0]], "with the first trajectory at the end")


def ignores_the_names_of_agents(case: _RuleCase) -> Iterator[Fault]:
    """The names of the agents do not affect credit."""
    yield from case.compared(
        [*map(_renamed, case.trajectories)], f"with the agents called {', '.join(_OTHER_NAMES.values())}"
    )


def ignores_masked_trajectories(case: _RuleCase) -> Iterator[Fault]:
    """Scores and outcomes of masked trajectories (failed or not scored) do not affect other trajectories' credit."""
    kept_S = ~case.inputs.masked_S
    kept = {*case.inputs.batch.trajectory_of_step[kept_S].tolist()}
    trajectories = [
        trajectory if n in kept else _all_changed(trajectory) for n, trajectory in enumerate(case.trajectories)
    ]
    if len(kept) < len(trajectories):
        yield from case.compared(trajectories, "with other scores in masked trajectories", kept_S)


def says_what_reached_a_step(case: _RuleCase) -> Iterator[Fault]:
    """`reached_S` has the bit SIGNAL if credit depends on a score of its trajectory; also OUTCOME if on its outcome."""
    before_S = _total(case.credit)
    for change in case.changed:
        bit, after_S = (SIGNAL if change.step is not None else SIGNAL | OUTCOME), _total(change.credit)
        # The bits may be set before or after the change: the change may open a gate for new credit.
        reached_S = (case.credit.reached_S & bit == bit) | (change.credit.reached_S & bit == bit)
        for s in np.flatnonzero(case.is_in(change.n) & _differs(before_S, after_S) & ~reached_S):
            why = f"for credit goes from {before_S[s]:g} to {after_S[s]:g} with {change.what}"
            yield Fault(case.step(s), f"bits {bit:02b} in reached_S, {why}", f"{case.credit.reached_S[s]:02b}")


def pays_own_as_declared(case: _RuleCase) -> Iterator[Fault]:
    """With `pays_own=False`, a step's `own_S` does not depend on its score: steps with failed scores are trained on."""
    for change in case.changed if not case.rule.pays_own else ():
        if change.step is not None:
            s = np.flatnonzero(case.is_in(change.n))[change.step]
            before, after = case.credit.own_S[s], change.credit.own_S[s]
            if _differs(before, after):
                yield Fault(case.step(s), f"own_S {before:g} with {change.what}", f"{after:g}")


def can_be_assigned_and_explained(case: _RuleCase) -> Iterator[Fault]:
    """`assign` pays own + received + shared; every explanation replays (with gates: by the formula)."""
    assigned, total_S = assign(case.inputs.batch, case.options), _total(case.credit)
    if case.credit.gate_S is not None:
        formula_S = _by_formula(case.inputs, case.credit)
        for at in np.flatnonzero(_differs(case.credit.received_S, formula_S)):
            expected = f"{formula_S[at]:g} received, by its gate_S"
            yield Fault(case.step(at), expected, f"{case.credit.received_S[at]:g}")
    for s in range(case.inputs.batch.n_steps):
        if assigned.credit_S[s] != total_S[s]:
            yield Fault(case.step(s), f"credit {total_S[s]!r}", repr(assigned.credit_S[s]))
        try:
            replayed = explain(assigned, s).replay()
        except Exception as error:
            yield Fault(case.step(s), "an explanation", described(error))
        else:
            if replayed != assigned.advantage_S[s]:
                yield Fault(case.step(s), f"an explanation of {assigned.advantage_S[s]!r}", repr(replayed))


def _by_formula(inputs: PropagationInput, credit: Credit) -> Floats:
    """[S] `gamma * sum over children k of gate_k * h_k / #parents(k)`."""
    assert credit.gate_S is not None
    passed_S = shares(parent_counts(inputs.batch)) * credit.gate_S * (credit.own_S + credit.received_S)
    sums_S = np.bincount(inputs.batch.edge_parent, passed_S[inputs.batch.edge_child], inputs.batch.n_steps)
    return np.asarray(inputs.options.gamma * sums_S)


def trajectories_are_independent(case: _RuleCase) -> Iterator[Fault]:
    """A trajectory's scores and outcome do not affect other trajectories' credit."""
    # A failed score is replaced by the mean of other trajectories before the rule runs.
    if case.inputs.failed_S.any():
        return
    before_S = _total(case.credit)
    for change in case.changed:
        after_S = _total(change.credit)
        for s in np.flatnonzero(_differs(before_S, after_S) & ~case.is_in(change.n)):
            expected = f"credit {before_S[s]:g} with {change.what} in trajectory {case.trajectories[change.n].id}"
            yield Fault(case.step(s), expected, f"{after_S[s]:g}")


BASICS = (runs_on_every_batch, returns_a_credit, is_finite, leaves_its_input_alone, is_deterministic)
CHECKS = (
    ignores_trajectory_order,
    ignores_the_names_of_agents,
    ignores_masked_trajectories,
    says_what_reached_a_step,
    pays_own_as_declared,
    can_be_assigned_and_explained,
    trajectories_are_independent,
)


# ---- the rule and its arrays ---------------------------------------------------------------------------------------


class _CapturedError(Exception):
    """Ends an assignment once the rule has its input."""

    def __init__(self, inputs: PropagationInput) -> None:
        self.inputs = inputs


def _capture(inputs: PropagationInput) -> Credit:
    raise _CapturedError(inputs)


@contextmanager
def _registered(name: str, rule: PropagationRule) -> Iterator[str]:
    PROPAGATION_RULES.add(name, rule)
    try:
        yield name
    finally:
        PROPAGATION_RULES.remove(name)


def _arrays(thing: PropagationInput | TrajectoryBatch | Credit) -> dict[str, NDArray[Any]]:
    values = {f.name: getattr(thing, f.name) for f in fields(thing)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def _columns(credit: Credit) -> dict[str, Floats]:
    """Every column as floats; a missing column gets its default."""
    columns = {name: np.zeros(len(credit.own_S)) for name in _TYPES} | _arrays(credit)
    return {name: np.asarray(columns[name], dtype=np.float64) for name in _TYPES}


def _differs(one: Floats, other: Floats) -> Bools:
    return ~np.isclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _total(credit: Credit) -> Floats:
    return credit.own_S + credit.received_S + credit.shared_S


# ---- batches -------------------------------------------------------------------------------------------------------


def _batches() -> dict[str, list[Trajectory]]:
    """One batch per graph, one with a single step, and one with all failures and a missing agent."""
    rng = random.Random(0)
    batches = {name: [_trajectory(rng, f"{name} {n}", graph) for n in range(2)] for name, graph in GRAPHS.items()}
    batches["one step"] = [_trajectory(rng, "alone", ((),))]
    chain, joined = GRAPHS["chain"], GRAPHS["diamonds"]
    batches["mishaps"] = [
        _trajectory(rng, "two unmatched", joined, score_status={0: None, 3: None}),
        _trajectory(rng, "nothing matched", chain, score_status=dict.fromkeys(range(4))),
        _trajectory(rng, "a failed score", joined, score_status={1: "failed"}),
        _trajectory(rng, "a time-out", chain, score_status={3: "timeout"}),
        _trajectory(rng, "without the verifier", chain[:2]),
        _trajectory(rng, "without outcome", chain, outcome_status=None),
        _trajectory(rng, "its outcome failed", joined, outcome_status="failed"),
        _trajectory(rng, "truncated", chain[:3], outcome_status=None, status="truncated"),
        _trajectory(rng, "failed", chain, status="failed"),
        _trajectory(rng, "two answers", joined, answer_steps=(2, 4)),
    ]
    own = [{"planner": Score(1.0), "executor": Score(0.0)}, {"executor": Score(0.0, status="failed")}]
    batches["outcomes of agents"] = [
        replace(_trajectory(rng, f"competing {n}", joined), outcomes=outcomes) for n, outcomes in enumerate(own)
    ]
    return batches


def _trajectory(
    rng: random.Random,
    id: str,
    graph: Sequence[tuple[int, ...]],
    *,
    score_status: Mapping[int, ScoreStatus | None] | None = None,
    outcome_status: ScoreStatus | None = "ok",
    status: TrajectoryStatus = "ok",
    answer_steps: tuple[int, ...] = (),
) -> Trajectory:
    """A trajectory with scores in eighths; a status of None means no score."""
    steps = []
    for index, parents in enumerate(graph):
        agent, turn, value = _AGENTS[index % 3], index // 3, rng.randrange(9) / 8
        scored = (score_status or {}).get(index, "ok")
        scores = {} if scored is None else {"f": Score(value, status=scored)}
        step = Step(f"{id}.{index}", id, index, agent, turn, parents, agent, "said", scores=scores)
        steps.append(replace(step, response_ids=(7, 7), response_mask=(1, 1), logprobs=(-1.0, -1.0)))
    outcome = None if outcome_status is None else Score(rng.randrange(9) / 8, status=outcome_status)
    return Trajectory(id, "q", Task("checks", (), None), steps, answer_steps, outcome=outcome, status=status)


def _renamed(trajectory: Trajectory) -> Trajectory:
    """The trajectory with other names of its agents."""
    steps = [replace(step, agent=_OTHER_NAMES[step.agent]) for step in trajectory.steps]
    outcomes = {_OTHER_NAMES[agent]: score for agent, score in trajectory.outcomes.items()}
    return replace(trajectory, steps=steps, outcomes=outcomes)


def _changes(trajectory: Trajectory) -> Iterator[tuple[str, int | None, Trajectory]]:
    """(what, step, trajectory): the trajectory with one score changed, or with step None one of its outcomes.

    Every second score moves across the usual threshold of 1/2; the others stay on their side of it.
    """
    for index, step in enumerate(trajectory.steps):
        score = step.scores.get("f")
        if score is not None and score.status == "ok" and isinstance(score.value, float):
            value = (score.value + 0.5) % 1.0 if index % 2 else 0.9 * score.value + 0.01
            steps = [*trajectory.steps]
            steps[index] = replace(step, scores={"f": replace(score, value=value)})
            yield f"the score of step {step.id} at {value:g}", index, replace(trajectory, steps=steps)
    if trajectory.outcome is not None and trajectory.outcome.status == "ok":
        outcome = _outcome_changed(trajectory.outcome)
        yield f"the outcome at {outcome.value:g}", None, replace(trajectory, outcome=outcome)
    for agent, own in trajectory.outcomes.items():
        if own.status == "ok":
            outcome = _outcome_changed(own)
            outcomes = {**trajectory.outcomes, agent: outcome}
            yield f"the outcome of {agent} at {outcome.value:g}", None, replace(trajectory, outcomes=outcomes)


def _outcome_changed(outcome: Score) -> Score:
    assert isinstance(outcome.value, float)
    return replace(outcome, value=0.5 * outcome.value + 0.3)  # changes every multiple of 1/8


def _all_changed(trajectory: Trajectory) -> Trajectory:
    for n in range(len([*_changes(trajectory)])):
        trajectory = [*_changes(trajectory)][n][2]
    return trajectory
