"""Properties that every propagation rule must have, on small batches under the options that affect rules.

They do not judge the amount of credit. `test_thresholds.py` has the properties of every kind of threshold.
"""

import copy
import random
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product

import numpy as np
import pytest

from creditflow.credit import CreditOptions, Rule, RuleInput, assign, explain
from creditflow.credit.fits import posteriors
from creditflow.credit.history import History
from creditflow.credit.records import OUTCOME, PROPAGATION_RULES, SIGNAL
from creditflow.credit.rewards import read_rewards
from creditflow.data import Trajectory
from tests.builders import batch_of, credit_options, make_trajectory, step

GRAPHS = {
    "chain": ((), (0,), (1,), (2,)),
    "fan-out": ((), (0,), (0,), (0,)),
    "fan-in": ((), (), (), (0, 1, 2)),
    "diamonds": ((), (0,), (0,), (1, 2), (1, 3)),
    "several roots": ((), (), (0,), (1,), ()),
}
"""Graphs by name: the parents of each step."""
OPTIONS = (
    {},
    {"outcome_to": "answer", "gamma": 0.5, "sub_reward_origin": 0.0},
    {"on_closed_gate": "freeze", "outcome_to": "answer"},
    {"reward_decomp": False, "mask_truncated": True},
    {"decomp_granularity": "agent", "adv_estimator": "rloo", "sub_reward_origin": 0.5},
    {"shared_reward": "outcome_plus_mean_sub_reward", "w_o": 2.0, "gamma": 0.0},
)
OTHER_NAMES = {"planner": "z", "executor": "y", "verifier": "x"}
TYPES = dict.fromkeys(("own_S", "received_S", "shared_S", "paid_S", "gate_S", "withheld_S", "threshold_S"), "float64")
TYPES |= {"reached_S": "uint8"}
TYPES |= dict.fromkeys(("gate_open_S", "forced_open_S", "frozen_S", "misled_S"), "bool")
LARGEST = {"gate_S": 1, "reached_S": SIGNAL | OUTCOME}


def drawn(rng, id, graph, scores=None, outcome="ok", **more):
    """A trajectory with scores in eighths. `scores`, `outcome`: status by step, and of the outcome; None: no score."""
    steps = []
    for index, parents in enumerate(graph):
        agent, value, status = [*OTHER_NAMES][index % 3], rng.randrange(9) / 8, (scores or {}).get(index, "ok")
        score = {"ok": value, None: None}.get(status, status)
        steps.append(step(agent, score, parents, turn=index // 3, prompt=agent, tokens=2))
    value = rng.randrange(9) / 8
    return make_trajectory(id, steps, {"ok": value, None: None}.get(outcome, outcome), **more)


def batches():
    """One batch per graph, one with a single step, one with all mishaps, and one with outcomes of agents."""
    rng = random.Random(0)
    yield from ([drawn(rng, f"{name} {n}", graph) for n in range(2)] for name, graph in GRAPHS.items())
    yield [drawn(rng, "alone", ((),))]
    chain, joined = GRAPHS["chain"], GRAPHS["diamonds"]
    yield [
        drawn(rng, "two unmatched", joined, {0: None, 3: None}),
        drawn(rng, "nothing matched", chain, dict.fromkeys(range(4))),
        drawn(rng, "a failed score", joined, {1: "failed"}),
        drawn(rng, "a time-out", chain, {3: "timeout"}),
        drawn(rng, "without the verifier", chain[:2]),
        drawn(rng, "without outcome", chain, outcome=None),
        drawn(rng, "its outcome failed", joined, outcome="failed"),
        drawn(rng, "truncated", chain[:3], outcome=None, status="truncated"),
        drawn(rng, "failed", chain, status="failed"),
        drawn(rng, "two answers", joined, answer_steps=(2, 4)),
    ]
    own = ({"planner": 1.0, "executor": 0.0}, {"executor": "failed"})
    yield [drawn(rng, f"competing {n}", joined, outcomes=outcomes) for n, outcomes in enumerate(own)]


@dataclass
class Case:
    """One batch with one set of options."""

    trajectories: list[Trajectory]
    options: CreditOptions

    def input_of(self, trajectories):
        """The input that `assign` passes to the rule for these trajectories."""
        batch = batch_of(*trajectories)
        rewards = read_rewards(batch, self.options)
        fit = self.rule.fit(rewards, self.options, History()) if self.rule.learns else None
        return RuleInput(batch, rewards, self.options, self.rule.make_threshold(), fit)

    @property
    def rule(self) -> Rule:
        return self.options.propagation

    @cached_property
    def inputs(self):
        return self.input_of(self.trajectories)

    @cached_property
    def credit(self):
        return self.rule.credit(copy.deepcopy(self.inputs))

    @cached_property
    def changed(self):
        """(n, step, credit): the credit after each change of one score or outcome in an unmasked trajectory n."""
        kept = sorted({*self.inputs.batch.trajectory_of_step[~self.inputs.rewards.masked_S].tolist()})
        return [
            (n, index, self.rule.credit(self.input_of([*self.trajectories[:n], other, *self.trajectories[n + 1 :]])))
            for n in kept
            for index, other in changes(self.trajectories[n])
        ]

    def assert_same(self, trajectories, over_S=True):
        """Check that the rule gives `trajectories` the same credit to each step of `over_S`."""
        inputs = self.input_of(trajectories)
        at = [inputs.batch.step_ids.index(id) for id in self.inputs.batch.step_ids]
        other = columns(self.rule.credit(inputs))
        for name, values_S in columns(self.credit).items():
            assert not (differs(values_S, other[name][at]) & over_S).any(), name


def columns(credit):
    """Every column as floats; a missing column gets zeros."""
    values = {name: getattr(credit, name) for name in TYPES}
    return {name: np.zeros(len(credit.own_S)) if v is None else np.asarray(v, float) for name, v in values.items()}


def differs(values_S, other_S):
    return ~np.isclose(values_S, other_S, rtol=1e-9, atol=1e-9, equal_nan=True)


def total(credit):
    return credit.own_S + credit.received_S + credit.shared_S


def changes(trajectory):
    """(index, trajectory): the trajectory with one score changed, or with index None one of its outcomes.

    Every second score moves across the usual threshold of 1/2; the others stay on their side of it.
    """
    for index, made in enumerate(trajectory.steps):
        score = made.scores.get("f")
        if score is not None and score.status == "ok":
            value = (score.value + 0.5) % 1.0 if index % 2 else 0.9 * score.value + 0.01
            steps = [*trajectory.steps]
            steps[index] = replace(made, scores={"f": replace(score, value=value)})
            yield index, replace(trajectory, steps=steps)
    # Changes every multiple of 1/8.
    if trajectory.outcome is not None and trajectory.outcome.status == "ok":
        outcome = replace(trajectory.outcome, value=0.5 * trajectory.outcome.value + 0.3)
        yield None, replace(trajectory, outcome=outcome)
    for agent, own in trajectory.outcomes.items():
        if own.status == "ok":
            outcomes = {**trajectory.outcomes, agent: replace(own, value=0.5 * own.value + 0.3)}
            yield None, replace(trajectory, outcomes=outcomes)


def assert_valid(case):
    """Check types, shapes and ranges of the columns, and that a second call changes nothing and returns the same."""
    for name, kind in TYPES.items():
        values_S = getattr(case.credit, name)
        if values_S is not None or name in ("own_S", "received_S", "shared_S", "reached_S"):
            assert (values_S.dtype, values_S.shape) == (kind, (case.inputs.batch.n_steps,)), name
            assert np.isfinite(values_S).all(), name
            assert name not in LARGEST or ((values_S >= 0) & (values_S <= LARGEST[name])).all(), name
    inputs = copy.deepcopy(case.inputs)
    again = columns(case.rule.credit(inputs))
    for name, values_S in columns(case.credit).items():
        assert np.array_equal(values_S, again[name], equal_nan=True), name
    for before, after in ((case.inputs.rewards, inputs.rewards), (case.inputs.batch, inputs.batch)):
        for field in fields(before):
            values = getattr(before, field.name)
            if isinstance(values, np.ndarray):
                same = np.array_equal(values, getattr(after, field.name), equal_nan=values.dtype.kind == "f")
                assert same, field.name


def assert_independent_of_order_names_and_masked_trajectories(case):
    case.assert_same(case.trajectories[::-1])
    renamed = [
        replace(
            trajectory,
            steps=[replace(made, agent=OTHER_NAMES[made.agent]) for made in trajectory.steps],
            outcomes={OTHER_NAMES[agent]: score for agent, score in trajectory.outcomes.items()},
        )
        for trajectory in case.trajectories
    ]
    case.assert_same(renamed)
    others, kept_S = [*case.trajectories], ~case.inputs.rewards.masked_S
    for n in {*range(len(others))} - {*case.inputs.batch.trajectory_of_step[kept_S].tolist()}:
        for k in range(len([*changes(others[n])])):
            others[n] = [*changes(others[n])][k][1]
    case.assert_same(others, kept_S)


def assert_changes_have_declared_effects(case):
    """Check `reached_S`, `pays_scores`, and the independence of trajectories unless the rule compares them."""
    before_S, trajectory_S = total(case.credit), case.inputs.batch.trajectory_of_step
    compares = case.rule.relative or case.rule.learns or case.inputs.rewards.failed_S.any()  # failed: a mean of others
    for n, index, credit in case.changed:
        bit, moved_S = SIGNAL if index is not None else SIGNAL | OUTCOME, differs(before_S, total(credit))
        # The bits may be set before or after the change: the change may open a gate for new credit.
        reached_S = (case.credit.reached_S & bit == bit) | (credit.reached_S & bit == bit)
        assert reached_S[moved_S & (trajectory_S == n)].all()
        if index is not None and not case.rule.pays_scores:  # steps with failed scores are trained on
            s = np.flatnonzero(trajectory_S == n)[index]
            assert not differs(case.credit.own_S[s], credit.own_S[s])
        assert compares or not (moved_S & (trajectory_S != n)).any()


def assert_assigned_and_explained(case):
    assigned = assign(case.inputs.batch, case.options)
    assert np.array_equal(assigned.credit.total_S, total(case.credit))
    if case.credit.gate_S is not None:  # by the formula
        batch = case.inputs.batch
        passed_S = batch.share_of_step * case.credit.gate_S * (case.credit.own_S + case.credit.received_S)
        sums_S = np.bincount(batch.edge_parent, passed_S[batch.edge_child], batch.n_steps)
        assert not differs(case.credit.received_S, case.options.gamma * sums_S).any()
    for s in range(case.inputs.batch.n_steps):
        assert explain(assigned, s).replay() == assigned.advantage.advantage_S[s]


@pytest.mark.parametrize("name", PROPAGATION_RULES.names())
def test_every_rule_conforms(name, monkeypatch):
    monkeypatch.setattr(posteriors, "_ROUNDS", 3)  # for speed: no property depends on it
    needed = {"adv_estimator": "relative"} if PROPAGATION_RULES[name].relative else {}
    for trajectories, chosen in product(batches(), OPTIONS):
        case = Case(trajectories, credit_options(name, **chosen | needed))
        assert_valid(case)
        assert_independent_of_order_names_and_masked_trajectories(case)
        assert_changes_have_declared_effects(case)
        assert_assigned_and_explained(case)
