"""The first half of the credit oracle: own rewards, gates and flow, one step at a time, by recursion.

Deliberately slow and obvious. It shares no code with `creditflow.credit`; it reads trajectories and option values only.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

GATE = 1e-9

KEYS = {
    "task": lambda node: (node.trajectory.uid,),
    "task_agent": lambda node: (node.trajectory.uid, node.step.agent),
    "task_agent_turn": lambda node: (node.trajectory.uid, node.step.agent, node.step.turn),
    "task_agent_state": lambda node: (node.trajectory.uid, node.step.agent, node.step.prompt),
    "agent": lambda node: (node.step.agent,),
    "agent_turn": lambda node: (node.step.agent, node.step.turn),
    "policy": lambda node: (),
}


@dataclass(eq=False)
class Node:
    """A step of a trajectory. Compared by identity, so that results can be cached by node."""

    trajectory: object
    step: object
    parents: list["Node"] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def remembered(function):
    def answer(self, *asked):
        key = (function.__name__, *asked)
        if key not in self.memory:
            self.memory[key] = function(self, *asked)
        return self.memory[key]

    return answer


class Flow:
    def __init__(self, trajectories, options):
        self.trajectories = trajectories
        self.rule = options.propagation.name
        self.o = SimpleNamespace(**vars(options), **vars(options.propagation))
        self.memory = {}
        self.nodes_of = []
        for trajectory in trajectories:
            nodes = [Node(trajectory, step) for step in trajectory.steps]
            for node in nodes:
                node.parents = [nodes[index] for index in node.step.parents]
                for parent in node.parents:
                    parent.children.append(node)
            self.nodes_of.append(nodes)
        self.nodes = [node for nodes in self.nodes_of for node in nodes]

    # ---- rewards ---------------------------------------------------------------------------------------------------

    @property
    def decomposed(self):
        return self.o.reward_decomp and self.o.decomp_granularity != "trajectory"

    @property
    def by_token(self):
        return self.decomposed and self.o.decomp_granularity == "token_level"

    @property
    def pays_own(self):
        return self.decomposed and self.rule in ("own", "discounted", "threshold")

    def counting(self, node):
        return [score for score in node.step.scores.values() if score.weight > 0]

    @remembered
    def case(self, node):
        """`unmatched`, `scored` or `failed`."""
        counting = self.counting(node)
        if not counting:
            return "unmatched"
        return "scored" if all(score.status == "ok" for score in counting) else "failed"

    def judged(self, node):
        return self.case(node) if self.decomposed else "unmatched"

    def sampled(self, node):
        """The positions of the sampled response tokens."""
        return [j for j, mask in enumerate(node.step.response_mask) if mask]

    @remembered
    def rho(self, node):
        """One value for each response token of a scored step."""

        def at(score, j):
            low, high = score.range
            return ((score.value[j] if isinstance(score.value, tuple) else score.value) - low) / (high - low)

        counting = self.counting(node)
        total = math.fsum(score.weight for score in counting)
        return [
            math.fsum(score.weight * at(score, j) for score in counting) / total
            for j in range(len(node.step.response_ids))
        ]

    @remembered
    def score_of(self, node):
        """The weighted mean of the scores; a token score counts as its mean over the sampled tokens, else over all."""

        def rescaled(score):
            value = score.value
            if isinstance(value, tuple):
                value = mean(value[j] for j in self.sampled(node) or range(len(value)))
            return (value - score.range[0]) / (score.range[1] - score.range[0])

        counting = self.counting(node)
        return math.fsum(s.weight * rescaled(s) for s in counting) / math.fsum(s.weight for s in counting)

    @remembered
    def reward(self, node):
        """r of a scored step."""
        if self.o.decomp_granularity != "agent":
            return self.score_of(node)
        return mean(
            self.score_of(other)
            for other in self.nodes
            if other.trajectory is node.trajectory
            and other.step.agent == node.step.agent
            and self.case(other) == "scored"
        )

    @remembered
    def sub_reward(self, node):
        if self.judged(node) == "unmatched":
            return None
        if self.judged(node) == "scored":
            return self.reward(node)
        for level in (self.o.group_by, "agent"):
            means = []
            for others in self.kept_others(node):
                known = [
                    self.reward(other)
                    for other in others
                    if self.case(other) == "scored" and self.bare_key(level, other) == self.bare_key(level, node)
                ]
                if known:
                    means.append(mean(known))
            if means:
                return mean(means)
        return None

    def kept_others(self, node):
        """The steps of each other trajectory, without masked ones."""
        others = [nodes for nodes in self.nodes_of if nodes and nodes[0].trajectory is not node.trajectory]
        return [[other for other in nodes if not self.masked(other)] for nodes in others]

    def outcome_score(self, node):
        """The outcome of the step's agent: its own, else the common one."""
        return node.trajectory.outcomes.get(node.step.agent, node.trajectory.outcome)

    def masked(self, node):
        score, status = self.outcome_score(node), node.trajectory.status
        if status == "failed" or (score is not None and score.status != "ok"):
            return True
        return status == "truncated" and self.o.mask_truncated

    def answers(self, node):
        """The places of the answer steps of the step's trajectory."""
        return node.trajectory.answer_steps or (len(node.trajectory.steps) - 1,)

    def lacks_outcome(self, node):
        """Whether the step answers, and the outcome of its agent failed."""
        others = [other for other in self.nodes if other.trajectory is node.trajectory and not self.masked(other)]
        return node.step.index in self.answers(node) and self.masked(node) and bool(others)

    @remembered
    def misled(self, node):
        """Whether the outcome would reach the step from an answer step without it."""
        if not self.to_answer or self.o.gamma == 0 or self.o.w_o == 0:
            return False
        passing = [child for child in node.children if self.out(child) > 0 or self.passes_outcome]
        return any(self.lacks_outcome(child) or self.misled(child) for child in passing)

    def outcome(self, node):
        score = self.outcome_score(node)
        return 0.0 if self.masked(node) or score is None else score.value

    @property
    def to_answer(self):
        """Whether the outcome is paid at the answer; an estimator with a critic always pays it there."""
        shares = self.rule in ("identical", "uniform")
        return not shares and (self.o.outcome_to == "answer" or self.o.adv_estimator == "gae")

    @property
    def passes_outcome(self):
        """Whether a critic's values pass the outcome along every edge, although the rule moves no credit."""
        return self.rule == "own" and self.o.adv_estimator == "gae"

    @remembered
    def own(self, node):
        """e."""
        r = self.sub_reward(node)
        e = 0.0 if r is None else self.o.w_r * (r - self.o.sub_reward_origin)
        if self.to_answer:
            answers = self.answers(node)
            if node.step.index in answers:
                e += self.o.w_o * self.outcome(node) / len(answers)
        return e

    # ---- gates -----------------------------------------------------------------------------------------------------

    @remembered
    def gate(self, node):
        """1 for an open gate, 0 for a closed one."""
        closed = self.judged(node) == "scored" and self.reward(node) <= self.o.theta + GATE
        return 0.0 if closed else 1.0

    def out(self, node):
        return (self.gate(node) if self.gated else 1.0) if self.flows else 0.0

    # ---- flow ------------------------------------------------------------------------------------------------------

    @property
    def flows(self):
        return self.rule in ("discounted", "threshold")

    @property
    def gated(self):
        return self.rule == "threshold"

    @remembered
    def h(self, node):
        return self.own(node) + self.received(node)

    @remembered
    def received(self, node):
        if not self.flows:
            return 0.0
        handed_up = math.fsum(self.out(child) * self.h(child) / len(child.parents) for child in node.children)
        return self.o.gamma * handed_up

    def withheld(self, node):
        """The credit that the step's gate withheld from its parents."""
        if not self.flows:
            return 0.0
        return (1 - self.out(node)) * self.h(node) if node.parents else 0.0

    # ---- freezing --------------------------------------------------------------------------------------------------

    @remembered
    def at_or_after_a_closed_step(self, node):
        return self.out(node) == 0 or any(self.at_or_after_a_closed_step(parent) for parent in node.parents)

    @remembered
    def reaches_an_end(self, node):
        """Whether a path of open steps leads from the node to a step without children."""
        if not node.children:
            return True
        return any(self.out(child) > 0 and self.reaches_an_end(child) for child in node.children)

    def frozen(self, node):
        if not self.gated or self.o.on_closed_gate != "freeze":
            return False
        return not self.at_or_after_a_closed_step(node) and not self.reaches_an_end(node)

    # ---- credit ----------------------------------------------------------------------------------------------------

    def shared_reward(self, node):
        if self.o.shared_reward == "outcome":
            return self.outcome(node)
        rs = [self.sub_reward(other) for other in self.nodes if other.trajectory is node.trajectory]
        own = [self.o.w_r * (r - self.o.sub_reward_origin) for r in rs if r is not None]
        return self.o.w_o * self.outcome(node) + (mean(own) if own else 0.0)

    @remembered
    def terms(self, node):
        """(own, received, shared)"""
        if self.rule == "identical":
            return 0.0, 0.0, self.shared_reward(node)
        if self.rule == "uniform":
            return 0.0, 0.0, self.shared_reward(node) / len(node.trajectory.steps)
        to_all = 0.0 if self.to_answer else self.o.w_o * self.outcome(node)
        return self.own(node), self.received(node), to_all

    def credit(self, node):
        return sum(self.terms(node))

    # ---- keys ------------------------------------------------------------------------------------------------------

    @remembered
    def bare_key(self, level, node):
        return (*KEYS[level](node), node.step.policy, *([] if level == "policy" else [node.step.policy_version]))

    @remembered
    def key(self, level, node):
        return (*self.bare_key(level, node), *([] if level == "policy" else [self.stratum(node)]))

    def stratum(self, node):
        return node.step.stratum if self.case(node) == "scored" else None
