"""Baselines shrunk towards those of the containing groups (empirical Bayes), one group at a time."""

import math
from collections import defaultdict

from tests.oracle.estimators import Estimators
from tests.oracle.flow import mean

CHAINS = {
    "task_agent_turn": ("task_agent_turn", "agent_turn", "agent"),
    "task_agent_state": ("task_agent_state", "agent"),
    "agent_turn": ("agent_turn", "agent"),
    "task_agent": ("task_agent", "agent"),
    "agent": ("agent",),
}
"""For each `group_by`, its level and the levels that contain it. The same prompt may occur at several turns."""


def shrunk_baselines(trajectories, options):
    """The baseline of each step; None for a step without one. `rloo` leaves the own trajectory out."""
    flow, cells, found = Estimators(trajectories, options), defaultdict(list), {}
    for node in flow.nodes:
        if flow.trained(node):
            cells[flow.key("agent", node)].append(node)
    for nodes in cells.values():
        keys_of = [[flow.key(level, node) for level in CHAINS[options.group_by]] for node in nodes]
        cell = Cell([(node.trajectory.id, keys, flow.credit(node)) for node, keys in zip(nodes, keys_of, strict=True)])
        found.update(zip(nodes, cell.baselines(options.adv_estimator == "rloo"), strict=True))
    return [found.get(node) for node in flow.nodes]


class Cell:
    """The trained steps of one agent (and policy, version and stratum).

    `members`: (trajectory, keys, value) of each step, with the keys of its groups from the finest to the agent itself.
    Each group is contained in one group of the next level.
    """

    def __init__(self, members):
        self.members = members
        self.levels = len(members[0][1])

    def means_of_trajectories(self, level, key, without=None):
        """x: the mean of each trajectory's values in the group; `without`: a trajectory to leave out."""
        values = {}
        for trajectory, keys, value in self.members:
            if keys[level] == key and trajectory != without:
                values.setdefault(trajectory, []).append(value)
        return [mean(of_trajectory) for of_trajectory in values.values()]

    def groups(self, level):
        """The parent of each group."""
        parents = {}
        for _, keys, _ in self.members:
            parents.setdefault(keys[level], set()).add(keys[level + 1])
        assert all(len(of_group) == 1 for of_group in parents.values()), "groups must lie inside one another"
        return {key: of_group.pop() for key, of_group in parents.items()}

    def trust(self, level, n):
        """B for a group of `n` trajectories."""
        sigma2, tau2 = self.variances(level)
        if sigma2 is None or tau2 <= 0 or n == 0:
            return 0.0
        return n / (n + sigma2 / tau2)

    def variances(self, level):
        """(sigma^2, tau^2) by the moments of one-way random effects; sigma^2 None: every group has one trajectory."""
        parent_of = self.groups(level)
        x = {key: self.means_of_trajectories(level, key) for key in parent_of}
        freedom = sum(len(xs) - 1 for xs in x.values())
        if freedom == 0:
            return None, 0.0
        sigma2 = math.fsum((value - mean(xs)) ** 2 for xs in x.values() for value in xs) / freedom
        between = unequal = 0.0
        for parent in set(parent_of.values()):
            inside = [xs for key, xs in x.items() if parent_of[key] == parent]
            centre = mean(value for xs in inside for value in xs)
            total = sum(len(xs) for xs in inside)
            between += math.fsum(len(xs) * (mean(xs) - centre) ** 2 for xs in inside)
            unequal += total - sum(len(xs) ** 2 for xs in inside) / total
        if unequal <= 0:
            return sigma2, 0.0
        return sigma2, max(0.0, (between - (len(x) - len(set(parent_of.values()))) * sigma2) / unequal)

    def mean(self, keys, level=0, without=None):
        """mu of the step's group at `level`. The variances include a trajectory that is left out."""
        x = self.means_of_trajectories(level, keys[level], without)
        if level == self.levels - 1:
            return mean(x)
        above = self.mean(keys, level + 1, without)
        trust = self.trust(level, len(x))
        return trust * mean(x) + (1 - trust) * above if x else above

    def baselines(self, leave_own_out=False):
        """The baseline of each member, in order; all None if the cell has only one trajectory."""
        if len({trajectory for trajectory, _, _ in self.members}) < 2:
            return [None] * len(self.members)
        return [self.mean(keys, without=trajectory if leave_own_out else None) for trajectory, keys, _ in self.members]
