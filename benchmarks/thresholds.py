"""Accuracy and recovery of each kind of threshold: `python -m benchmarks.thresholds [--quick]`.

Agents' sub-rewards are drawn from known distributions, so the true pass rate at a threshold is known exactly. After 200
updates the distributions change (and accuracy falls), and 200 more follow. Targets: after either 200 updates, the true
pass rate of every agent in every run is within 5 points of the kind's target; for the kinds without a target pass rate,
of the pass rate at the threshold that their rule gives on the true distribution.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.record import RESULTS, Figure, exit_with, show, write
from benchmarks.sources import hashes
from creditflow.credit.gates import GATE_TOLERANCE
from creditflow.credit.thresholds.base import BatchStats, make_threshold, threshold_kind
from creditflow.data import Floats

MEASURES = ("src/creditflow/credit/thresholds", "src/creditflow/credit/gates.py")
JUMP, UPDATES = 200, 400
STEPS = (16, 1000)
"""Scored steps of an agent in a batch: few and many."""
TRAJECTORIES = 4
"""Trajectories in a group, which the spread is computed over."""
EPOCH = 10
WITHIN = 0.05
CROSSINGS = 5.0
"""Maximum crossings of a value of few-valued scores in 100 updates."""
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
class Few:
    """Sub-rewards of few values, such as shares of a short plan."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def draw(self, rng: Generator, n: int) -> Floats:
        return rng.choice(self.values, n, p=self.weights)

    def above(self, theta: float) -> float:
        return sum(w for v, w in zip(self.values, self.weights, strict=True) if v > theta + GATE_TOLERANCE)

    @property
    def sd(self) -> float:
        mean = np.dot(self.values, self.weights)
        return float(math.sqrt(np.dot(self.weights, (np.array(self.values) - mean) ** 2)))


@dataclass(frozen=True)
class Agent:
    """Distributions of an agent's sub-rewards before and after the jump, and the updates of its absence."""

    before: Beta | Few
    after: Beta | Few
    away: range = range(0)

    def scores_at(self, update: int) -> Beta | Few:
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
# With quarters, 90 % or 70 % pass, equally far from the target: the hardest case for a stable threshold.
QUARTERS = Few((0.0, 0.25, 0.5, 0.75, 1.0), (0.05, 0.05, 0.2, 0.4, 0.3))
THIRDS = Few((0.0, 1 / 3, 2 / 3, 1.0), (0.05, 0.15, 0.35, 0.45))
BINARY = Few((0.0, 1.0), (0.4, 0.6))
FEW_VALUES = {"quarters": Agent(QUARTERS, QUARTERS), "thirds": Agent(THIRDS, THIRDS), "binary": Agent(BINARY, BINARY)}


@threshold_kind("robbins_monro")
@dataclass
class RobbinsMonro:
    """The textbook's quantile, `theta += rate * (pass rate - target)`, for comparison; not a kind of the library.

    Weighted by steps and with dead bands, at a rate that keeps it within 5 points while the scores are stationary.
    """

    team: tuple[str, ...] | None = None
    rate: float = 0.3
    memory: int = 512
    bands: tuple[float, float] = (0.01, 0.03)
    floor: float = 0.0
    _theta: dict[str, float] = field(init=False, default_factory=dict)
    _smoothed: dict[str, float] = field(init=False, default_factory=dict)
    _moving: dict[str, bool] = field(init=False, default_factory=dict)

    def theta(self, agent: str) -> float:
        return self._theta.get(agent, float(np.mean(list(self._theta.values()) or [(LOW + HIGH) / 2])))

    def update(self, observed: BatchStats) -> None:
        start = self.theta("")
        for agent, r in observed.sub_rewards.items():
            theta = self._theta.get(agent, start)
            passed, weight = float(np.mean(r > theta + GATE_TOLERANCE)), len(r) / (len(r) + self.memory)
            smoothed = self._smoothed.get(agent, passed)
            self._smoothed[agent] = smoothed + weight * (passed - smoothed)
            band = self.bands[0] if self._moving.get(agent, True) else self.bands[1]
            self._moving[agent] = abs(self._smoothed[agent] - TARGET) > band
            step = self.rate * weight * (passed - TARGET) if self._moving[agent] else 0.0
            self._theta[agent] = min(HIGH, max(LOW, theta + step))

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        return {}


SPECS: dict[str, dict[str, Any]] = {
    "fixed": {"kind": "fixed", "value": 0.5},
    "tuned": {"kind": "tuned", "initial": 0.5, "lower_to": 0.4},
    "noise": {"kind": "noise", "range": [LOW, HIGH]},
    "quantile": {"kind": "quantile", "target_pass_rate": TARGET, "range": [LOW, HIGH]},
    "robbins_monro": {"kind": "robbins_monro"},
}
KINDS = ("fixed", "tuned", "noise", "quantile")


def aim(kind: str, scores: Beta | Few, jumped: bool) -> float:
    """The share of steps that should pass: the target, or the share at the threshold that the rule gives."""
    if kind in ("quantile", "robbins_monro"):
        return TARGET
    theta = {"fixed": 0.5, "tuned": 0.4 if jumped else 0.5, "noise": HIGH - (HIGH - LOW) * min(1.0, 2 * scores.sd)}
    return scores.above(theta[kind])


@dataclass(frozen=True)
class Run:
    """One threshold through all updates, A agents. Row u: in force for batch u; the last row: at the end."""

    agents: Mapping[str, Agent]
    kind: str
    theta_UA: Floats
    metrics: dict[str, float]

    def passing(self, name: str, at: int, scores: Beta | Few) -> float:
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

    def passing_UA(self) -> Floats:
        return np.array(
            [
                [self.passing(name, u, agent.scores_at(u)) for name, agent in self.agents.items()]
                for u in range(len(self.theta_UA))
            ]
        )


def run(kind: str, agents: Mapping[str, Agent], steps: int, seed: int) -> Run:
    """Run all updates of one threshold; the scores are the same for every kind."""
    rng = np.random.default_rng(seed)
    threshold = make_threshold(SPECS[kind], agents)
    theta_UA = np.empty((UPDATES + 1, len(agents)))
    for update in range(UPDATES):
        theta_UA[update] = [threshold.theta(name) for name in agents]
        threshold.update(batch(rng, agents, steps, update))
    theta_UA[UPDATES] = [threshold.theta(name) for name in agents]
    return Run(agents, kind, theta_UA, threshold.metrics())


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


def study(kind: str, agents: Mapping[str, Agent], steps: int, seeds: int) -> tuple[list[Run], list[dict[str, Any]]]:
    """The runs, and a row for each agent."""
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
    return runs, rows


def few_values(kind: str, steps: int, seeds: int) -> list[dict[str, Any]]:
    """A row for each kind of few-valued scores: the threshold's crossings of a value, and its saturation."""
    runs = [run(kind, FEW_VALUES, steps, seed) for seed in range(seeds)]
    crossed = np.array([np.abs(np.diff(run.passing_UA()[JUMP:], axis=0)) > 0 for run in runs]).mean(axis=(0, 1))
    passing = np.array([run.passing_UA()[-1] for run in runs])
    return [
        {
            "kind": kind,
            "steps_per_update": steps,
            "scores": name,
            "pass_rate": _spread(passing[:, a]),
            "crossings_per_100_updates": float(100 * crossed[a]),
            "saturated_share_of_runs": float(
                np.mean([run.metrics.get(f"propagation/threshold_saturated/{name}", np.nan) for run in runs])
            )
            if kind == "quantile"
            else None,
        }
        for a, name in enumerate(FEW_VALUES)
    ]


def main() -> int:
    """Run, print, write `docs/results/thresholds.json` and `.png`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seeds; writes nothing")
    quick = parser.parse_args().quick
    measured, seeds = hashes(MEASURES), 3 if quick else 20
    details: dict[str, Any] = {"seeds": seeds, "updates_before_and_after_the_jump": JUMP}
    figures: list[Figure] = []
    curves: dict[str, list[Run]] = {}
    for title, agents in (("jump", THREE), ("coming_and_going", COMING_AND_GOING)):
        details[title] = []
        for steps in STEPS:
            for kind in SPECS:
                runs, rows = study(kind, agents, steps, seeds)
                details[title] += rows
                figures += worst(f"{kind}, {steps} steps, {title.replace('_', ' ')}", kind, rows)
                if title == "jump" and steps == STEPS[0] and kind in KINDS:
                    curves[kind] = runs
        print(f"\n{title.replace('_', ' ')}, {seeds} seeds")
        print_rows(details[title])
    details["few_values"] = [
        row for steps in STEPS for kind in ("quantile", "robbins_monro") for row in few_values(kind, steps, seeds)
    ]
    print("\nscores of few values: times that the threshold crosses one of them in 100 updates, once settled")
    for row in details["few_values"]:
        print(f"{row['kind']:14}{row['steps_per_update']:6}  {row['scores']:10}{row['crossings_per_100_updates']:6.1f}"
              f"   passes {_pm(row['pass_rate'])}   saturated {row['saturated_share_of_runs']}")  # fmt: skip
    figures += held_still(details["few_values"])
    print("\nworst distance from what is aimed for, over agents and seeds")
    missed = show(figures)
    if not quick:
        write("thresholds", figures, ("creditflow", "numpy"), measured, details)
        plot(curves)
    return int(missed)


def worst(what: str, kind: str, rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The largest distance after 200 updates, and after the jump and 200 more; the longest recovery."""
    hold = WITHIN if kind in KINDS else None
    moments = {"after 200 updates": "settled", "after the jump and 200 more": "settled_after_jump"}
    return [
        Figure(f"{what}: {words}", max(row[key]["distance"]["max"] for row in rows if row[key]), hold, at_most=True)
        for words, key in moments.items()
    ] + [Figure(f"{what}: longest recovery", max(row["recovery_updates"]["max"] for row in rows), unit="updates")]


def held_still(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return the crossings per 100 updates of each kind."""
    return [
        Figure(
            f"{row['kind']}, {row['steps_per_update']} steps, {row['scores']}: crossings",
            row["crossings_per_100_updates"],
            CROSSINGS if row["kind"] == "quantile" else None,
            at_most=True,
            unit="per 100 updates",
        )
        for row in rows
    ]


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each kind, batch size and agent."""
    header = "theta          passes         aim    worst"
    print(f"{'kind':14}{'steps':>6}  {'agent':10}{header}  |  {header}  |  recovery (worst)")
    for row in rows:
        cells = [_cells(row[key]) for key in ("settled", "settled_after_jump")]
        recovery = row["recovery_updates"]
        print(f"{row['kind']:14}{row['steps_per_update']:6}  {row['agent']:10}{cells[0]}  |  {cells[1]}  |  "
              f"{recovery['median']:.0f} ({recovery['max']})")  # fmt: skip


def plot(curves: Mapping[str, Sequence[Run]]) -> None:
    """Theta in force and the true pass rate over updates: one run, and the range of all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(curves), figsize=(15, 6.2), sharex=True, sharey="row", layout="constrained")
    for column, (kind, runs) in enumerate(curves.items()):
        rows = (np.array([run.theta_UA for run in runs]), np.array([run.passing_UA() for run in runs]))
        for ax, values_RUA in zip(axes[:, column], rows, strict=True):
            for a, (name, color) in enumerate(zip(THREE, ("#4477aa", "#ee6677", "#228833"), strict=True)):
                x = np.arange(values_RUA.shape[1])
                ax.fill_between(x, *(f(values_RUA[..., a], axis=0) for f in (np.min, np.max)), color=color, alpha=0.2)
                ax.plot(x, values_RUA[0, :, a], color=color, linewidth=1.2, label=name)
            ax.axvline(JUMP, color="black", linewidth=0.8, linestyle=":")
            ax.grid(alpha=0.25)
        for a, (agent, color) in enumerate(zip(THREE.values(), ("#4477aa", "#ee6677", "#228833"), strict=True)):
            for start, scores, jumped in ((0, agent.before, False), (JUMP, agent.after, True)):
                axes[1, column].hlines(aim(kind, scores, jumped), start, start + JUMP, color=color, linestyle="--",
                                       linewidth=0.9, label="aim" if a == 0 and start == 0 else None)  # fmt: skip
        axes[0, column].set_title(kind)
        axes[1, column].set_xlabel("updates")
    axes[0, 0].set_ylabel("threshold")
    axes[1, 0].set_ylabel("share of steps that pass")
    axes[1, -1].legend(fontsize=8, loc="lower right")
    figure.suptitle(
        f"{STEPS[0]} scored steps per agent and update; scores change at the dotted line "
        f"(line: one run, band: {len(next(iter(curves.values())))} seeds)"
    )
    figure.savefig(RESULTS / "thresholds.png", dpi=110)
    print(f"written: {(RESULTS / 'thresholds.png').relative_to(RESULTS.parent.parent)}")


def _spread(values: Sequence[float] | Floats) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1))}


def _pm(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['sd']:.3f}"


def _cells(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return f"{'away':42}"
    distance = state["distance"]["max"]
    return f"{_pm(state['theta'])}  {_pm(state['pass_rate'])}  {state['aim']:.3f}  {distance:.3f}"


if __name__ == "__main__":
    exit_with(main)
