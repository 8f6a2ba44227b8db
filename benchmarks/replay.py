"""The signal of replay credit in a simulated chain: `python -m benchmarks.replay [--quick]`.

A chain of 13 steps (planner, 11 of the executor, verifier), each right with a fixed probability. The outcome is 1 if no
error is left at the end; a right step repairs an earlier error with some probability. The policy has one logit for each
step, and its gradient is computed from the package's own credit, for many batches of 4 tasks and 8 rollouts.

The signal of a rule is the squared part of its mean gradient along the true one, divided by the mean squared norm of
the rest, per generated token; a bias counts as noise. The figure is its ratio to the signal of the outcome alone
(`identical`). Replay and Shapley values, like `identical`, read no scores; `none` and `threshold` read exact ones. The
mean gradients of replay and `identical` must agree: replay is unbiased. It takes a few minutes of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.record import Figure, exit_with, show, write
from benchmarks.sources import hashes
from creditflow.credit import CreditOptions, assign, shapley
from creditflow.credit.branch_points import branch_cost, choose_branch_points
from creditflow.credit.trees import KEY
from creditflow.data import Floats, Score, Step, Task, Trajectory, TrajectoryBatch

MEASURES = ("src/creditflow/credit", "benchmarks/replay.py")
STEPS, TASKS, ROLLOUTS = 13, 4, 8
AGENTS = ("planner", *["executor"] * (STEPS - 2), "verifier")
Path = tuple[tuple[bool, bool, bool], ...]
"""For each step, whether it is right, whether it would repair an error, and whether an error is left after it."""


@dataclass(frozen=True)
class Team:
    """How often a step is right, and how often a right step repairs an earlier error."""

    name: str
    right: float
    repairs: float


@dataclass(frozen=True)
class Branching:
    """Decisions of all trajectories, drawn uniformly from the steps at or after `first_step`."""

    name: str
    first_step: int
    alternatives: int = 4
    continuations: int = 1
    budget: float = 0.5


@dataclass(frozen=True)
class Rule:
    """A rule of credit, its options, and the rollouts that it needs besides the recorded ones."""

    name: str
    options: CreditOptions
    branching: Branching | None = None
    scored: bool = False
    """Whether each step has an exact score."""
    coalitions: int = 0
    """Replays of coalitions for each trajectory, for Shapley values."""


def _options(rule: str) -> CreditOptions:
    return CreditOptions(propagation=rule, adv_estimator="rloo", group_by="task_agent_turn")


TEAMS = (Team("no repairs", 0.95, 0.0), Team("repairs .3", 0.8, 0.3), Team("repairs .6", 0.6, 0.6))
REFERENCE = Rule("identical", _options("identical"))
RULES = (
    Rule("replay at any step", _options("replay"), Branching("any step", 0)),
    Rule("replay in the second half", _options("replay"), Branching("second half", STEPS // 2)),
    Rule("replay in the second half, 3 x 2", _options("replay"), Branching("second half", STEPS // 2, 3, 2)),
    Rule("shapley", _options("shapley"), coalitions=7),
    Rule("none, exact scores", _options("none"), scored=True),
    Rule("threshold, exact scores", _options("threshold"), scored=True),
)
HOLDS = {("repairs .3", "replay in the second half"): 1.2, ("repairs .6", "replay in the second half"): 1.2}


def continued(rng: np.random.Generator, team: Team, prefix: Path = (), kept: Mapping[int, bool] | None = None) -> Path:
    """A path that goes on after `prefix`. `kept`: for steps by index, whether they are right."""
    made, kept = list(prefix), kept or {}
    while len(made) < STEPS:
        drawn, repairs = rng.random() < team.right, rng.random() < team.repairs
        right, wrong = kept.get(len(made), drawn), bool(made and made[-1][2])
        made.append((right, repairs, not right or (wrong and not repairs)))
    return tuple(made)


def trajectory(id: str, task: str, path: Path, new: int | None = None, *, scored: bool = False) -> Trajectory:
    """The record of a path. `new`: the first new step of a branch. `scored`: give each step its exact score."""
    steps = [
        Step(
            id=f"{id}/{t}",
            trajectory_id=id,
            index=t,
            agent=AGENTS[t],
            turn=t,
            parents=(t - 1,) if t else (),
            prompt="",
            response="",
            response_ids=(int(right),),
            response_mask=(1,),
            logprobs=(-1.0,),
            branch_of="recorded" if t == new else None,
            scores={"right": Score(float(right))} if scored else {},
        )
        for t, (right, _, _) in enumerate(path)
    ]
    return Trajectory(id, task, Task("chain", (), None), steps, outcome=Score(outcome(path)))


def outcome(path: Path) -> float:
    """1 if no error is left at the end."""
    return float(not path[-1][2])


def branches(
    rng: np.random.Generator, team: Team, chosen: Branching, recorded: Sequence[Trajectory], paths: Sequence[Path]
) -> list[Trajectory]:
    """Draw the decisions of a batch and run its branches."""
    batch = TrajectoryBatch.from_trajectories(recorded)
    candidate_S = batch.index_of_step >= chosen.first_step
    cost_S = branch_cost(batch, chosen.alternatives, chosen.continuations)
    share = chosen.budget / (1.0 - chosen.budget)
    points = choose_branch_points(batch, candidate_S, "random", cost_S, lambda tokens: share * tokens, rng)
    made = []
    for n in np.flatnonzero(points.step_N >= 0).tolist():
        s, root = int(points.step_N[n]), recorded[n]
        at = int(batch.index_of_step[s])
        root.info[KEY] = {"at": at, "probability": points.probability_S[s], "weight": points.weight_S[s]}
        for i in range(chosen.alternatives):
            first = continued(rng, team, paths[n][:at]) if i else paths[n]
            for j in range(chosen.continuations if at + 1 < STEPS else 1):
                if i == j == 0:
                    continue
                path = continued(rng, team, first[: at + 1]) if j else first
                branch = trajectory(f"{root.id}~{i}.{j}", root.uid, path, at + (j > 0))
                branch.info[KEY] = {"of": root.id, "alternative": i, "continuation": j}
                made.append(branch)
    return made


def shapley_values(rng: np.random.Generator, team: Team, replays: int, path: Path) -> tuple[shapley.Values, int]:
    """The agents' Shapley values in a path, and the steps that the replays sampled: those of replaced agents."""
    names = tuple(dict.fromkeys(AGENTS))
    plan, outcomes, steps = shapley.plan(len(names), replays, rng), [], 0
    for coalition in plan.coalition_P.tolist():
        kept = {t: path[t][0] for t, name in enumerate(AGENTS) if coalition >> names.index(name) & 1}
        outcomes.append(outcome(continued(rng, team, kept=kept)))
        steps += STEPS - len(kept)
    return shapley.values(plan, outcome(path), np.array(outcomes), names), steps


def gradients(team: Team, rule: Rule, batches: int, seed: int) -> tuple[Floats, float]:
    """[B, T] the gradient of each batch for the logit of each step, and the mean number of generated tokens."""
    rng, made, tokens = np.random.default_rng(seed), [], 0
    for _ in range(batches):
        paths = [continued(rng, team) for _ in range(TASKS * ROLLOUTS)]
        recorded = [
            trajectory(f"{n}", f"task {n // ROLLOUTS}", path, scored=rule.scored) for n, path in enumerate(paths)
        ]
        more = branches(rng, team, rule.branching, recorded, paths) if rule.branching else []
        for one, path in zip(recorded, paths, strict=True):
            tokens += STEPS
            if rule.coalitions:
                values, steps = shapley_values(rng, team, rule.coalitions, path)
                one.info[shapley.KEY] = values.to_json()
                tokens += steps
        a = assign(TrajectoryBatch.from_trajectories([*recorded, *more]), rule.options)
        pushed_S = a.share_S * a.advantage_S * (a.batch.response_ids - team.right)
        made.append(np.bincount(a.batch.index_of_step, pushed_S, STEPS) / len(recorded))
        tokens += sum(STEPS - new_step(branch) for branch in more)
    return np.array(made), tokens / batches


def new_step(branch: Trajectory) -> int:
    """Index of a branch's first new step."""
    return next(step.index for step in branch.steps if step.branch_of is not None)


def signal(gradient_BT: Floats, direction_T: Floats) -> float:
    """Squared mean along the unit vector `direction_T`, less the part that noise adds, over the mean of the rest."""
    along_B, square = gradient_BT @ direction_T, float((gradient_BT**2).sum(axis=1).mean())
    useful = float(along_B.mean()) ** 2 - float(along_B.var(ddof=1)) / len(along_B)
    return useful / (square - useful)


def unit(vector_T: Floats) -> Floats:
    """The vector of length 1 in the same direction."""
    return np.asarray(vector_T / np.linalg.norm(vector_T))


def compared(
    team: Team, rule: Rule, direction_T: Floats, plain: tuple[Floats, float], other: tuple[Floats, float]
) -> list[Figure]:
    """The ratio of signals at equal tokens, with a 95 % bootstrap interval over batches, and the agreement of means."""
    rng = np.random.default_rng(0)

    def drawn(values_BT: Floats) -> Floats:
        return np.asarray(values_BT[rng.integers(0, len(values_BT), len(values_BT))])

    def ratio(one_BT: Floats, other_BT: Floats) -> float:
        return signal(one_BT, direction_T) / other[1] / (signal(other_BT, direction_T) / plain[1])

    low, high = np.quantile([ratio(drawn(other[0]), drawn(plain[0])) for _ in range(500)], [0.025, 0.975])
    name = f"{team.name}, {rule.name}"
    return [
        Figure(
            f"{name}: signal per token / identical (95 %)",
            ratio(other[0], plain[0]),
            HOLDS.get((team.name, rule.name)),
            unit="x",
            spread=(float(low), float(high)),
        ),
        Figure(
            f"{name}: cosine of the mean gradients",
            float(unit(other[0].mean(axis=0)) @ unit(plain[0].mean(axis=0))),
            0.99 if rule.branching else None,
        ),
    ]


def main() -> int:
    """Simulate, print, write `docs/results/replay.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches: shows that it runs, proves little")
    quick = parser.parse_args().quick
    batches = 40 if quick else 600
    figures: list[Figure] = []
    for team in TEAMS:
        direction_T = unit(gradients(team, REFERENCE, 4 * batches, 0)[0].mean(axis=0))
        plain = gradients(team, REFERENCE, batches, 1)
        for rule in RULES:
            print(f"{team.name}: {rule.name}", flush=True)
            figures += compared(team, rule, direction_T, plain, gradients(team, rule, batches, 2))
    if quick:  # too few batches for the targets
        figures = [replace(figure, hold=None) for figure in figures]
    short = show(figures)
    if not quick:
        setting = {"teams": [asdict(team) for team in TEAMS], "rules": [rule.name for rule in RULES]}
        write("replay", figures, ("numpy",), hashes(MEASURES), setting)
    return int(short)


if __name__ == "__main__":
    exit_with(main)
