"""Replay credit by its definition, on explicit trees of steps: slow, obvious and independent.

A tree is a dict with `task`, `path` (the recorded nodes), `outcome`, `weight`, `at` (the index of the decision, or
None) and `alternatives`: one list of leaves for each, the recorded one first. A leaf is (nodes after the prefix,
return). A node is a dict with `id`, `agent`, `turn` and `own`; two leaves that share a step share its node.
"""

import math
import statistics

EPSILON = 1e-6


def value(leaves, depth):
    """The mean return of the leaves below a node: the mean over its different children, each by its own mean.

    `depth`: the number of nodes of each leaf that are above.
    """
    ended = [returned for nodes, returned in leaves if len(nodes) == depth]
    if ended:
        assert len(ended) == len(leaves)
        return statistics.fmean(ended)
    children = {}
    for nodes, returned in leaves:
        children.setdefault(nodes[depth]["id"], []).append((nodes, returned))
    return statistics.fmean(value(below, depth + 1) for below in children.values())


def contributions(trees, scaled=False, own_in_mean=False):
    """The weight, by node id, of the gradient of the node's log-probability in the estimate, per tree.

    The estimate of a tree is `(1 - w)` times that of the recorded trajectory alone, plus `w` times that of all
    leaves. In the latter, a node's gradient is weighted by its share of leaves. `own_in_mean`: the baseline of a group
    contains the own recorded trajectory, as in GRPO; else it does not (RLOO).
    """
    made = {}
    for tree in trees:
        for one in nodes_of(tree):
            b, spread = baseline(trees, tree, one["node"], own_in_mean)
            divisor = spread + EPSILON if scaled else 1.0
            base = one["others"] if one["others"] is not None else b
            of_tree = one["share"] * (one["node"]["own"] + one["value"] - base)
            w = tree["weight"]
            alone = (1 - w) * (one["node"]["own"] + tree["outcome"] - b) if one["recorded"] and w != 1 else 0.0
            made[one["node"]["id"]] = (alone + w * of_tree) / divisor
    return made


def nodes_of(tree):
    """All nodes of a tree with their value, share, and the mean credit of the other alternatives (or None)."""
    if tree["at"] is None:
        return [row(node, tree["outcome"], 1.0, recorded=True) for node in tree["path"]]
    alternatives, at = tree["alternatives"], tree["at"]
    values = [value(leaves, 1) for leaves in alternatives]
    credits = [leaves[0][0][0]["own"] + q for leaves, q in zip(alternatives, values, strict=True)]
    found = [row(node, statistics.fmean(values), 1.0, recorded=True) for node in tree["path"][:at]]
    for i, leaves in enumerate(alternatives):
        others = statistics.fmean(credits[:i] + credits[i + 1 :])
        share = 1 / len(alternatives)
        found.append(row(leaves[0][0][0], values[i], share, recorded=i == 0, others=others))
        for j, (nodes, returned) in enumerate(leaves):
            found += [row(node, returned, share / len(leaves), recorded=i == j == 0) for node in nodes[1:]]
    return found


def row(node, value, share, *, recorded, others=None):
    return {"node": node, "value": value, "share": share, "recorded": recorded, "others": others}


def baseline(trees, tree, node, own_in_mean):
    """The mean and the spread of the node's group (task, agent and turn), from recorded credit.

    NaN if no other recorded trajectory is in the group: then the step is compared in a wider one.
    """

    def same(other):
        return other["agent"] == node["agent"] and other["turn"] == node["turn"]

    peers = [other for other in trees if other["task"] == tree["task"]]
    credit_of = [(other, one["own"] + other["outcome"]) for other in peers for one in other["path"] if same(one)]
    without = [credit for other, credit in credit_of if other is not tree]
    if not without:
        return math.nan, math.nan
    mean = statistics.fmean(credit for _, credit in credit_of)
    squares = []
    for other in peers:
        compared = []
        for one in nodes_of(other):
            if same(one["node"]):
                credit, w = one["node"]["own"] + one["value"], other["weight"]
                if one["recorded"] and one["others"] is None:  # the value of a step around the decision
                    below = other["at"] is None or one["node"] not in other["path"][: other["at"]]
                    recorded = one["node"]["own"] + other["outcome"]
                    credit = recorded if below else (1 - w) * recorded + w * credit
                compared.append((credit - mean) ** 2)
        if compared:
            squares.append(statistics.fmean(compared))
    spread = (sum(squares) / max(len(squares) - 1, 1)) ** 0.5
    return (mean if own_in_mean else statistics.fmean(without)), spread
