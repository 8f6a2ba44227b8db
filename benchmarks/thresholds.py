"""Accuracy and recovery of each kind of threshold: `python -m benchmarks.thresholds [--quick]`.

Agents' sub-rewards are drawn from known distributions, so the true pass rate at a threshold is known exactly. After 200
updates the distributions change (and accuracy falls), and 200 more follow. Targets: after either 200 updates, the true
pass rate of every agent in every run is within 5 points of the kind's target; for the kinds without a target pass rate,
of the pass rate at the threshold that their rule gives on the true distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.record import Figure, exit_with, quick_parser, show, write
from benchmarks.sources import hashes
from creditflow.credit.thresholds.base import BatchStats, make_threshold
from creditflow.data import Floats

MEASURES = ("src/creditflow/credit/thresholds", "src/creditflow/credit/assignment.py")
JUMP, UPDATES = 200, 400
STEPS = (16, 1000)
"""Scored steps of an agent in a batch: few and many."""
TRAJECTORIES = 4
"""Trajectories in a group, which the spread is computed over."""
EPOCH = 10
WITHIN = 0.05
LOW, HIGH, TARGET = 0.3, 0.7, 0.8


@dataclass(frozen=True)
class Beta:
    """Graded sub-rewards; whole parameters, so that the tail is a finite sum."""

    a: int
    b: int

    def draw(self, rng: Generator, n: int) -> Floats:
        return rng.beta(self.a, self.b, n)

    def above(self, theta: float) -> float:
        """P(r > theta), by the binomial sum for whole a and b."""
        n = self.a + self.b - 1
        return sum(math.comb(n, j) * theta**j * (1 - theta) ** (n - j) for j in range(self.a))

    @property
    def sd(self) -> float:
        total = self.a + self.b
        return math.sqrt(self.a * self.b / (total + 1)) / total


@dataclass(frozen=True)
class Agent:
    """Distributions of an agent's sub-rewards before and after the jump, and the updates of its absence."""

    before: Beta
    after: Beta
    away: range = range(0)

    def scores_at(self, update: int) -> Beta:
        return self.before if update < JUMP else self.after


THREE = {
    "planner": Agent(Beta(4, 2), Beta(12, 8)),
    "executor": Agent(Beta(6, 3), Beta(3, 2)),
    "verifier": Agent(Beta(5, 5), Beta(8, 3)),
}
COMING_AND_GOING = {
    **THREE,
    "verifier": Agent(Beta(5, 5), Beta(8, 3), away=range(100, 200)),
    "critic": Agent(Beta(3, 2), Beta(6, 3), away=range(100)),
}
SPECS: dict[str, dict[str, Any]] = {
    "fixed": {"kind": "fixed", "value": 0.5},
    "tuned": {"kind": "tuned", "initial": 0.5, "lower_to": 0.4},
    "noise": {"kind": "noise", "range": [LOW, HIGH]},
    "quantile": {"kind": "quantile", "target_pass_rate": TARGET, "range": [LOW, HIGH]},
}


def aim(kind: str, scores: Beta, jumped: bool) -> float:
    """The share of steps that should pass: the target, or the share at the threshold that the rule gives."""
    if kind == "quantile":
        return TARGET
    theta = {"fixed": 0.5, "tuned": 0.4 if jumped else 0.5, "noise": HIGH - (HIGH - LOW) * min(1.0, 2 * scores.sd)}
    return scores.above(theta[kind])


@dataclass(frozen=True)
class Run:
    """One threshold through all updates, A agents. Row u: in force for batch u; the last row: at the end."""

    agents: Mapping[str, Agent]
    kind: str
    theta_UA: Floats

    def passing(self, name: str, at: int, scores: Beta) -> float:
        return scores.above(float(self.theta_UA[at, list(self.agents).index(name)]))

    def distance(self, name: str, at: int, jumped: bool) -> float:
        """The distance of the true pass rate from the kind's aim."""
        scores = self.agents[name].after if jumped else self.agents[name].before
        return abs(self.passing(name, at, scores) - aim(self.kind, scores, jumped))

    def recovery(self, name: str) -> int:
        """The number of batches after the jump, with the agent present, until it is first within 5 points."""
        there = [u for u in range(JUMP, UPDATES + 1) if u not in self.agents[name].away]
        within = [self.distance(name, u, jumped=True) <= WITHIN for u in there]
        return within.index(True) if True in within else len(within)


def run(kind: str, agents: Mapping[str, Agent], steps: int, seed: int) -> Run:
    """Run all updates of one threshold; the scores are the same for every kind."""
    rng = np.random.default_rng(seed)
    threshold = make_threshold(SPECS[kind], agents)
    theta_UA = np.empty((UPDATES + 1, len(agents)))
    for update in range(UPDATES):
        theta_UA[update] = [threshold.theta(name) for name in agents]
        threshold.update(batch(rng, agents, steps, update))
    theta_UA[UPDATES] = [threshold.theta(name) for name in agents]
    return Run(agents, kind, theta_UA)


def batch(rng: Generator, agents: Mapping[str, Agent], steps: int, update: int) -> BatchStats:
    """The observations of one batch: scores in groups of PLAYS, and a validation accuracy at the end of an epoch."""
    sub_rewards = {name: agent.scores_at(update).draw(rng, steps) for name, agent in agents.items()}
    accuracy = (0.70 if update < JUMP else 0.55) + 0.005 * rng.standard_normal()
    there = [name for name, agent in agents.items() if update not in agent.away]
    return BatchStats(
        sub_rewards={name: sub_rewards[name] for name in there},
        spread={name: pooled_spread(sub_rewards[name]) for name in there},
        accuracy=accuracy if (update + 1) % EPOCH == 0 else None,
    )


def pooled_spread(r: Floats) -> float:
    """Return the pooled standard deviation of r within groups."""
    groups = r[: len(r) // TRAJECTORIES * TRAJECTORIES].reshape(-1, TRAJECTORIES)
    return float(np.sqrt(groups.var(axis=1, ddof=1).mean()))


def settled(runs: Sequence[Run], name: str, at: int, jumped: bool) -> dict[str, Any]:
    """One agent after `at` updates: mean and standard deviation over seeds, worst distance."""
    scores = runs[0].agents[name].after if jumped else runs[0].agents[name].before
    theta = [float(run.theta_UA[at, list(run.agents).index(name)]) for run in runs]
    passing = [run.passing(name, at, scores) for run in runs]
    distance = [run.distance(name, at, jumped) for run in runs]
    return {
        "updates": at,
        "theta": _spread(theta),
        "pass_rate": _spread(passing),
        "aim": aim(runs[0].kind, scores, jumped),
        "distance": {"mean": float(np.mean(distance)), "max": max(distance)},
    }


def study(kind: str, agents: Mapping[str, Agent], steps: int, seeds: int) -> list[dict[str, Any]]:
    """A row for each agent."""
    runs = [run(kind, agents, steps, seed) for seed in range(seeds)]
    rows = []
    for name, agent in agents.items():
        recovery = [run.recovery(name) for run in runs]
        rows.append(
            {
                "kind": kind,
                "steps_per_update": steps,
                "agent": name,
                "away": [agent.away.start, agent.away.stop] if agent.away else None,
                "settled": None if JUMP - 1 in agent.away else settled(runs, name, JUMP, jumped=False),
                "settled_after_jump": settled(runs, name, UPDATES, jumped=True),
                "recovery_updates": {"median": float(np.median(recovery)), "max": max(recovery)},
            }
        )
    return rows


def main() -> int:
    """Run, print, write `docs/results/thresholds.json`; 1 if a number falls short."""
    quick = quick_parser(__doc__, "fewer seeds; writes nothing").parse_args().quick
    measured, seeds = hashes(MEASURES), 3 if quick else 20
    details: dict[str, Any] = {"seeds": seeds, "updates_before_and_after_the_jump": JUMP}
    figures: list[Figure] = []
    for title, agents in (("jump", THREE), ("coming_and_going", COMING_AND_GOING)):
        details[title] = []
        for steps in STEPS:
            for kind in SPECS:
                rows = study(kind, agents, steps, seeds)
                details[title] += rows
                figures += worst(f"{kind}, {steps} steps, {title.replace('_', ' ')}", rows)
    missed = show(figures)
    if not quick:
        write("thresholds", figures, ("creditflow", "numpy"), measured, details)
    return int(missed)


def worst(what: str, rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The largest distance after 200 updates, and after the jump and 200 more; the longest recovery."""
    moments = {"after 200 updates": "settled", "after the jump and 200 more": "settled_after_jump"}
    return [
        Figure(f"{what}: {words}", max(row[key]["distance"]["max"] for row in rows if row[key]), WITHIN, at_most=True)
        for words, key in moments.items()
    ] + [Figure(f"{what}: longest recovery", max(row["recovery_updates"]["max"] for row in rows), unit="updates")]


def _spread(values: Sequence[float] | Floats) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1))}


if __name__ == "__main__":
    exit_with(main)
