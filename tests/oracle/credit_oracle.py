"""Credit from the formulas of docs/credit.md, one step at a time, by recursion: slow, obvious, and sharing no code with
`creditflow.credit`. It reads the nouns and plain option values.
"""

import math
from dataclasses import dataclass

GATE = 1e-9
TIE = 1e-9
EPSILON = 1e-6
CAP = 2.0

KEYS = {
    "task": lambda play, step: (play.uid,),
    "task_agent": lambda play, step: (play.uid, step.agent),
    "task_agent_turn": lambda play, step: (play.uid, step.agent, step.turn),
    "task_agent_state": lambda play, step: (play.uid, step.agent, step.prompt),
    "agent": lambda play, step: (step.agent,),
    "agent_turn": lambda play, step: (step.agent, step.turn),
}


@dataclass
class Row:
    sub_reward: float | None
    open: bool
    own: float
    received: float
    shared: float
    stopped: float
    credit: float
    trained: bool
    level: str | None
    size: int
    baseline: float | None
    spread: float | None
    tied: bool
    weight: float
    advantage: float


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


class Oracle:
    def __init__(self, plays, options):
        self.plays = plays
        self.o = options
        self.all = [(play, step) for play in plays for step in play.steps]

    # ---- what was earned -------------------------------------------------------------------------------------------

    def case(self, step):
        """`unmatched`, `scored` or `failed`."""
        counting = [score for score in step.scores.values() if score.weight > 0]
        if not counting:
            return "unmatched"
        return "scored" if all(score.status == "ok" for score in counting) else "failed"

    def score_of(self, step):
        counting = [score for score in step.scores.values() if score.weight > 0]

        def rescaled(score):
            value = mean(score.value) if isinstance(score.value, tuple) else score.value
            return (value - score.range[0]) / (score.range[1] - score.range[0])

        return math.fsum(s.weight * rescaled(s) for s in counting) / math.fsum(s.weight for s in counting)

    def sub_reward(self, play, step):
        if not self.o.reward_decomp or self.case(step) == "unmatched":
            return None
        if self.case(step) == "scored":
            return self.score_of(step)
        for level in (self.o.group_by, "agent"):
            key = self.bare_key(level, play, step)
            means = []
            for other in self.plays:
                if other is play or self.masked(other):
                    continue
                known = [
                    self.score_of(s)
                    for s in other.steps
                    if self.case(s) == "scored" and self.bare_key(level, other, s) == key
                ]
                if known:
                    means.append(mean(known))
            if means:
                return mean(means)
        return None

    def masked(self, play):
        if play.status == "failed" or (play.outcome is not None and play.outcome.status != "ok"):
            return True
        return play.status == "truncated" and self.o.mask_truncated

    def outcome(self, play):
        if self.masked(play) or play.outcome is None:
            return 0.0
        return play.outcome.value

    def own(self, play, step):
        r = self.sub_reward(play, step)
        e = 0.0 if r is None else self.o.w_r * (r - self.o.sub_reward_origin)
        if self.o.outcome_to == "answer":
            answers = play.answer_steps or (len(play.steps) - 1,)
            if step.index in answers:
                e += self.o.w_o * self.outcome(play) / len(answers)
        return e

    # ---- what flows ------------------------------------------------------------------------------------------------

    def gate(self, play, step):
        case = self.case(step) if self.o.reward_decomp else "unmatched"
        if case == "unmatched":
            return True
        if case == "failed":
            return self.o.gate_unscored == "open"
        return self.score_of(step) > self.o.propagation_threshold + GATE

    def passes(self, play, step):
        return self.o.propagation == "discounted" or self.gate(play, step)

    def h(self, play, step):
        return self.own(play, step) + self.received(play, step)

    def received(self, play, step):
        if self.o.propagation not in ("discounted", "threshold"):
            return 0.0
        total = 0.0
        for child in play.steps:
            if step.index in child.parents and self.passes(play, child):
                total += self.h(play, child) / len(child.parents)
        return self.o.gamma * total

    def stopped(self, play, step):
        if self.o.propagation != "threshold" or not step.parents or self.passes(play, step):
            return 0.0
        return self.h(play, step)

    def shared_reward(self, play):
        if self.o.shared_reward == "outcome":
            return self.outcome(play)
        rs = [r for r in (self.sub_reward(play, step) for step in play.steps) if r is not None]
        paid = mean(self.o.w_r * (r - self.o.sub_reward_origin) for r in rs) if rs else 0.0
        return self.o.w_o * self.outcome(play) + paid

    def terms(self, play, step):
        """(own, received, shared)"""
        if self.o.propagation == "identical":
            return 0.0, 0.0, self.shared_reward(play)
        if self.o.propagation == "uniform":
            return 0.0, 0.0, self.shared_reward(play) / len(play.steps)
        to_all = self.o.w_o * self.outcome(play) if self.o.outcome_to == "all" else 0.0
        return self.own(play, step), self.received(play, step), to_all

    def credit(self, play, step):
        return sum(self.terms(play, step))

    # ---- against whom ----------------------------------------------------------------------------------------------

    def trained(self, play, step):
        if self.masked(play):
            return False
        pays_own = self.o.propagation in ("none", "discounted", "threshold") and self.o.reward_decomp
        return not (pays_own and self.case(step) == "failed")

    def bare_key(self, level, play, step):
        return (*KEYS[level](play, step), step.policy, step.policy_version)

    def key(self, level, play, step):
        return (*self.bare_key(level, play, step), self.stratum(step))

    def stratum(self, step):
        return step.stratum if self.case(step) == "scored" else None

    def group(self, play, step):
        """(level, credits of each trajectory), the first level with two trajectories; None if there is none."""
        for level in (self.o.group_by, "task_agent", "agent_turn", "agent"):
            key = self.key(level, play, step)
            members = []
            for other in self.plays:
                credits = [
                    self.credit_of[s.id]
                    for s in other.steps
                    if self.trained(other, s) and self.key(level, other, s) == key
                ]
                if credits:
                    members.append(credits)
            if len(members) > 1:
                return level, members
        return None

    def weight(self, step):
        if self.stratum(step) is None:
            return 1.0
        peers = [
            self.stratum(s)
            for p, s in self.all
            if self.trained(p, s) and self.stratum(s) is not None and (s.agent, s.policy) == (step.agent, step.policy)
        ]
        return min(CAP, len(peers) / (len(set(peers)) * peers.count(self.stratum(step))))

    def row(self, play, step):
        own, received, shared = self.terms(play, step)
        credit = own + received + shared
        trained = self.trained(play, step)
        row = Row(
            sub_reward=self.sub_reward(play, step),
            open=self.gate(play, step),
            own=own,
            received=received,
            shared=shared,
            stopped=self.stopped(play, step),
            credit=credit,
            trained=trained,
            level=None,
            size=0,
            baseline=None,
            spread=None,
            tied=False,
            weight=self.weight(step) if trained else 1.0,
            advantage=0.0,
        )
        group = self.group(play, step) if trained else None
        if group is None:
            return row
        row.level, members = group
        n = row.size = len(members)
        m = row.baseline = mean(mean(credits) for credits in members)
        row.spread = math.sqrt(n / (n - 1) * mean(mean((c - m) ** 2 for c in credits) for credits in members))
        flat = [c for credits in members for c in credits]
        row.tied = max(flat) - min(flat) <= TIE * max(1.0, abs(m))
        if not row.tied:
            scale = row.spread + EPSILON if self.o.norm_adv_by_std_in_grpo else 1.0
            row.advantage = row.weight * (credit - m) / scale
        return row

    def rows(self):
        self.credit_of = {step.id: self.credit(play, step) for play, step in self.all}
        return [self.row(play, step) for play, step in self.all]


def credit_rows(plays, options):
    """One Row for each step, in the order of the batch."""
    return Oracle(plays, options).rows()
