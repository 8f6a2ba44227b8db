"""The second half of the credit oracle: groups, baselines and advantages of steps and tokens."""

import math
from dataclasses import dataclass

from tests.oracle.flow import Flow, mean, remembered

TIE = 1e-9
EPSILON = 1e-6
WHITENING = 1e-8
CAP = 2.0

BY_POLICY = ("reinforce_plus_plus", "gae")
"""Estimators without groups: all steps of a policy are whitened together."""
WHITENING_ONES = (*BY_POLICY, "reinforce_plus_plus_baseline")


@dataclass(eq=False)
class Group:
    level: str
    trajectories: list
    """The member steps of each trajectory with members."""


@dataclass
class Whitening:
    mean: float
    spread: float | None
    tied: bool


def is_tied(values, centre):
    return max(values) - min(values) <= TIE * max(1.0, abs(centre))


class Estimators(Flow):
    def __init__(self, trajectories, options, values_T=None):
        super().__init__(trajectories, options)
        given = None if values_T is None else list(values_T)
        self.values_of, at = {}, 0
        for node in self.nodes:
            n = len(node.step.response_ids)
            self.values_of[node] = None if given is None else given[at : at + n]
            at += n

    # ---- credit to compare -----------------------------------------------------------------------------------------

    def trained(self, node):
        if self.masked(node) or self.frozen(node) or self.misled(node):
            return False
        return not (self.pays_own and self.case(node) == "failed")

    def has_token_term(self, node):
        """Whether the step's own sub-reward is paid token by token."""
        return self.by_token and self.pays_own and self.case(node) == "scored" and bool(self.sampled(node))

    @remembered
    def measured(self, node):
        """The credit without the part paid token by token: the input of the estimator."""
        own = self.o.w_r * (self.sub_reward(node) - self.o.sub_reward_origin) if self.has_token_term(node) else 0.0
        return self.credit(node) - own

    # ---- groups ----------------------------------------------------------------------------------------------------

    @remembered
    def group_at(self, level, key):
        trajectories = []
        for nodes in self.nodes_of:
            members = [node for node in nodes if self.trained(node) and self.key(level, node) == key]
            if members:
                trajectories.append(members)
        return Group(level, trajectories)

    @remembered
    def group(self, node):
        """The first group with two trajectories; for estimators without groups, all steps of the policy."""
        if not self.trained(node):
            return None
        if self.o.adv_estimator in BY_POLICY:
            return self.group_at("policy", self.key("policy", node))
        for level in (self.o.group_by, "task_agent", "agent_turn", "agent"):
            group = self.group_at(level, self.key(level, node))
            if len(group.trajectories) > 1:
                return group
        return None

    @remembered
    def centre(self, group):
        return mean(mean(self.measured(member) for member in members) for members in group.trajectories)

    @remembered
    def spread(self, group):
        n, m = len(group.trajectories), self.centre(group)
        return math.sqrt(
            n / (n - 1) * mean(mean((self.measured(t) - m) ** 2 for t in members) for members in group.trajectories)
        )

    @remembered
    def tied(self, group):
        return is_tied([self.measured(t) for members in group.trajectories for t in members], self.centre(group))

    def centre_of_others(self, group, node):
        return mean(
            mean(self.measured(t) for t in members)
            for members in group.trajectories
            if members[0].trajectory is not node.trajectory
        )

    # ---- whitening -------------------------------------------------------------------------------------------------

    @property
    def batch_has_tokens(self):
        return any(node.step.response_ids for node in self.nodes)

    def places(self, node):
        """The step's entries in the whitening: its sampled tokens, or one entry if the whole batch has no tokens."""
        return self.sampled(node) if self.batch_has_tokens else [None]

    def raw(self, node, place):
        """The value to whiten; None for a step without a group."""
        if self.o.adv_estimator == "gae":
            return None if place is None else self.gae_of_tokens(node)[self.sampled(node).index(place)]
        if self.o.adv_estimator == "reinforce_plus_plus":
            after = 0 if place is None else len([j for j in self.sampled(node) if j > place])
            return self.measured(node) * self.o.gamma_token**after
        group = self.group(node)
        if group is None:
            return None
        return 0.0 if self.tied(group) else self.measured(node) - self.centre(group)

    @remembered
    def whitening(self, policy):
        values = [
            self.raw(node, place)
            for node in self.nodes
            if node.step.policy == policy and self.trained(node)
            for place in self.places(node)
        ]
        values = [value for value in values if value is not None]
        if not values:
            return None
        n, centre = len(values), mean(values)
        if n == 1:
            return Whitening(centre, None, True)
        spread = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (n - 1))
        return Whitening(centre, spread, is_tied(values, centre))

    def whitened(self, node, value):
        over = self.whitening(node.step.policy)
        if over is None or over.tied or value is None:
            return 0.0
        return (value - over.mean) / math.sqrt(over.spread**2 + WHITENING)

    # ---- the step's part of the advantage --------------------------------------------------------------------------

    def step_part(self, node, place):
        """The step part at one of the step's tokens (`place` None: of the step as a whole), before the weight."""
        group = self.group(node)
        if group is None or (self.o.adv_estimator not in BY_POLICY and self.tied(group)):
            return 0.0
        if self.o.adv_estimator in WHITENING_ONES:
            return self.whitened(node, self.raw(node, place))
        if self.o.adv_estimator == "rloo":
            return self.measured(node) - self.centre_of_others(group, node)
        scale = self.spread(group) + EPSILON if self.o.norm_adv_by_std_in_grpo else 1.0
        return (self.measured(node) - self.centre(group)) / scale

    # ---- rewards per token -----------------------------------------------------------------------------------------

    def scored_in(self, members):
        return [t for t in members if self.has_token_term(t)]

    @remembered
    def token_returns(self, group, node):
        """u at each sampled token of a scored step in `group`; None if no other trajectory has a scored step."""
        others = [
            self.scored_in(members) for members in group.trajectories if members[0].trajectory is not node.trajectory
        ]
        means = [mean(self.sub_reward(t) for t in scored) for scored in others if scored]
        if not means:
            return None
        m = mean(means)
        scored_of_each = [scored for scored in map(self.scored_in, group.trajectories) if scored]
        length = mean(mean(len(self.sampled(t)) for t in scored) for scored in scored_of_each)
        sampled, rho = self.sampled(node), self.rho(node)
        return [
            self.o.w_r
            / length
            * math.fsum(
                self.o.gamma_token ** (later - now) * (rho[sampled[later]] - m) for later in range(now, len(sampled))
            )
            for now in range(len(sampled))
        ]

    @remembered
    def spread_of_tokens(self, group):
        trajectories = []
        for members in group.trajectories:
            returns = [self.token_returns(group, t) for t in self.scored_in(members)]
            values = [u for of_step in returns if of_step is not None for u in of_step]
            if values:
                trajectories.append(values)
        n = len(trajectories)
        if n < 2:
            return 0.0
        centre = mean(mean(values) for values in trajectories)
        return math.sqrt(n / (n - 1) * mean(mean((u - centre) ** 2 for u in values) for values in trajectories))

    @property
    def scales(self):
        if self.o.adv_estimator == "grpo":
            return self.o.norm_adv_by_std_in_grpo
        return self.o.adv_estimator in WHITENING_ONES

    def token_divisor(self, node):
        """The divisor of the step's token terms; None if they are 0."""
        group = self.group(node)
        if group is None or self.o.adv_estimator == "gae" or not self.has_token_term(node):
            return None
        if not self.sampled(node) or self.token_returns(group, node) is None:
            return None
        if not self.scales:
            return 1.0
        spread = self.spread_of_tokens(group)
        return None if spread <= TIE else spread + EPSILON

    def token_term(self, node, place):
        divisor = self.token_divisor(node)
        if divisor is None:
            return 0.0
        return self.token_returns(self.group(node), node)[self.sampled(node).index(place)] / divisor

    # ---- a critic --------------------------------------------------------------------------------------------------

    @remembered
    def earned_and_handed_down(self, node):
        """(e, the part received from the children's values and advantages)."""
        own, _, shared = self.terms(node)
        handed_up = 0.0
        if self.flows:
            handed_up = math.fsum(self.out(child) * self.worth(child) / len(child.parents) for child in node.children)
        elif self.passes_outcome:
            handed_up = math.fsum(
                (self.worth(child) - self.score_pay(child)) / len(child.parents) for child in node.children
            )
        return own + shared, self.o.gamma * handed_up

    def score_pay(self, node):
        """The pay for the step's own score at its first sampled token, which its parents do not get."""
        r, sampled = self.sub_reward(node), self.sampled(node)
        pays = [0.0] * max(len(sampled) - 1, 0) + [0.0 if r is None else self.o.w_r * (r - self.o.sub_reward_origin)]
        if self.has_token_term(node):
            rho = self.rho(node)
            pays = [self.o.w_r * (rho[j] - self.o.sub_reward_origin) / len(sampled) for j in sampled]
        return math.fsum(self.o.gamma_token**i * pay for i, pay in enumerate(pays))

    def worth(self, node):
        """The critic's value at the start of the step plus lam times the advantage there."""
        return self.value_at_start(node) + self.o.lam * self.gae_at_start(node)

    def value_at_start(self, node):
        sampled = self.sampled(node)
        return self.values_of[node][sampled[0]] if sampled else sum(self.earned_and_handed_down(node))

    def gae_at_start(self, node):
        return self.gae_of_tokens(node)[0] if self.sampled(node) else 0.0

    @remembered
    def gae_of_tokens(self, node):
        return [self.gae_at(node, now) for now in range(len(self.sampled(node)))]

    @remembered
    def gae_at(self, node, now):
        """A at the `now`-th sampled token, before whitening."""
        sampled = self.sampled(node)
        values = [self.values_of[node][j] for j in sampled]
        earned, down = self.earned_and_handed_down(node)
        rewards = [0.0] * len(sampled)
        if self.has_token_term(node):
            rho = self.rho(node)
            rewards = [self.o.w_r * (rho[j] - self.o.sub_reward_origin) / len(sampled) for j in sampled]
        if now == len(sampled) - 1:
            return rewards[now] + (earned - math.fsum(rewards)) + down - values[now]
        delta = rewards[now] + self.o.gamma_token * values[now + 1] - values[now]
        return delta + self.o.gamma_token * self.o.lam_token * self.gae_at(node, now + 1)

    def returns(self, node):
        """The return of each response token; None if it was not sampled."""
        at = dict(zip(self.sampled(node), self.gae_of_tokens(node), strict=True))
        return [at[j] + value if j in at else None for j, value in enumerate(self.values_of[node])]

    # ---- strata ----------------------------------------------------------------------------------------------------

    def weight(self, node):
        if not self.trained(node) or self.stratum(node) is None:
            return 1.0
        peers = [
            self.stratum(other)
            for other in self.nodes
            if self.trained(other)
            and self.stratum(other) is not None
            and (other.step.agent, other.step.policy) == (node.step.agent, node.step.policy)
        ]
        return min(CAP, len(peers) / (len(set(peers)) * peers.count(self.stratum(node))))

    # ---- advantages ------------------------------------------------------------------------------------------------

    def token_advantage(self, node, place):
        if not self.trained(node) or place not in self.sampled(node):
            return 0.0
        return self.weight(node) * (self.step_part(node, place) + self.token_term(node, place))

    def advantage(self, node):
        sampled = self.sampled(node)
        if sampled:
            return self.token_advantage(node, sampled[0])
        return self.weight(node) * self.step_part(node, None)
