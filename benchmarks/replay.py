"""The signal of replay credit in a simulated chain: `python -m benchmarks.replay [--quick]`.

A chain of 13 steps of one agent, each right with a fixed probability. The outcome is 1 if no error is left at the end;
a right step repairs an earlier error with some probability. The policy has one logit for each step, and its gradient is
computed from the package's own credit, for many batches of 4 tasks and 8 rollouts. The figure is the squared norm of
the mean gradient divided by its variance, per generated token, as a ratio to the same of the outcome alone
(`identical`, RLOO). The mean gradients of both must agree: replay is unbiased. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.record import Figure, exit_with, show, write
from benchmarks.sources import hashes
from creditflow.credit import CreditOptions, assign
from creditflow.credit.branch_points import branch_cost, choose_branch_points
from creditflow.credit.trees import KEY
from creditflow.data import Floats, Score, Step, Task, Trajectory, TrajectoryBatch

MEASURES = ("src/creditflow/credit", "benchmarks/replay.py")
STEPS, TASKS, ROLLOUTS = 13, 4, 8
Path = tuple[tuple[bool, bool], ...]
"""For each step, whether it is right, and whether an error is left after it."""


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


TEAMS = (Team("no repairs", 0.95, 0.0), Team("repairs .3", 0.8, 0.3), Team("repairs .6", 0.6, 0.6))
BRANCHINGS = (
    Branching("any step", 0),
    Branching("second half", STEPS // 2),
    Branching("second half, 3 x 2", STEPS // 2, 3, 2),
)
HOLDS = {("repairs .3", "second half"): 1.2, ("repairs .6", "second half"): 1.2}


def continued(rng: np.random.Generator, team: Team, prefix: Path = ()) -> Path:
    """A path that goes on after `prefix`."""
    made = list(prefix)
    while len(made) < STEPS:
        right, wrong = rng.random() < team.right, bool(made and made[-1][1])
        repaired = right and rng.random() < team.repairs
        made.append((right, not right or (wrong and not repaired)))
    return tuple(made)


def trajectory(id: str, task: str, path: Path, new: int | None = None) -> Trajectory:
    """The record of a path. `new`: the first new step of a branch."""
    steps = [
        Step(
            id=f"{id}/{t}",
            trajectory_id=id,
            index=t,
            agent="solver",
            turn=t,
            parents=(t - 1,) if t else (),
            prompt="",
            response="",
            response_ids=(int(right),),
            response_mask=(1,),
            logprobs=(-1.0,),
            branch_of="recorded" if t == new else None,
        )
        for t, (right, _) in enumerate(path)
    ]
    return Trajectory(id, task, Task("chain", (), None), steps, outcome=Score(float(not path[-1][1])))


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


def gradients(team: Team, chosen: Branching | None, batches: int, seed: int) -> tuple[Floats, float]:
    """[B, T] the gradient of each batch for the logit of each step, and the mean number of generated tokens."""
    rng, made, tokens = np.random.default_rng(seed), [], 0
    for _ in range(batches):
        paths = [continued(rng, team) for _ in range(TASKS * ROLLOUTS)]
        recorded = [trajectory(f"{n}", f"task {n // ROLLOUTS}", path) for n, path in enumerate(paths)]
        more = branches(rng, team, chosen, recorded, paths) if chosen else []
        rule = "replay" if chosen else "identical"
        options = CreditOptions(propagation=rule, adv_estimator="rloo", group_by="task_agent_turn")
        a = assign(TrajectoryBatch.from_trajectories([*recorded, *more]), options)
        pushed_S = a.share_S * a.advantage_S * (a.batch.response_ids - team.right)
        made.append(np.bincount(a.batch.index_of_step, pushed_S, STEPS) / len(recorded))
        tokens += len(recorded) * STEPS + sum(STEPS - new_step(branch) for branch in more)
    return np.array(made), tokens / batches


def new_step(branch: Trajectory) -> int:
    """Index of a branch's first new step."""
    return next(step.index for step in branch.steps if step.branch_of is not None)


def signal(gradient_BT: Floats) -> float:
    """The squared norm of the mean over batches, without the part that noise adds, divided by the variance."""
    mean_T, variance = gradient_BT.mean(axis=0), float(gradient_BT.var(axis=0, ddof=1).sum())
    return (float(mean_T @ mean_T) - variance / len(gradient_BT)) / variance


def compared(
    team: Team, chosen: Branching, plain: tuple[Floats, float], replayed: tuple[Floats, float]
) -> list[Figure]:
    """The ratio of signals at equal tokens, with a 95 % bootstrap interval over batches, and the agreement of means."""
    rng = np.random.default_rng(0)

    def drawn(values_BT: Floats) -> Floats:
        return np.asarray(values_BT[rng.integers(0, len(values_BT), len(values_BT))])

    def ratio(one_BT: Floats, other_BT: Floats) -> float:
        return signal(one_BT) / replayed[1] / (signal(other_BT) / plain[1])

    low, high = np.quantile([ratio(drawn(replayed[0]), drawn(plain[0])) for _ in range(500)], [0.025, 0.975])
    one_T, other_T = replayed[0].mean(axis=0), plain[0].mean(axis=0)
    cosine = float(one_T @ other_T / np.linalg.norm(one_T) / np.linalg.norm(other_T))
    name = f"{team.name}, {chosen.name}"
    return [
        Figure(
            f"{name}: signal per token, replay / identical (95 %)",
            ratio(replayed[0], plain[0]),
            HOLDS.get((team.name, chosen.name)),
            unit="x",
            spread=(float(low), float(high)),
        ),
        Figure(f"{name}: cosine of the mean gradients", cosine, 0.99),
    ]


def main() -> int:
    """Simulate, print, write `docs/results/replay.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches: shows that it runs, proves little")
    quick = parser.parse_args().quick
    batches = 40 if quick else 600
    figures: list[Figure] = []
    for team in TEAMS:
        plain = gradients(team, None, batches, 1)
        for chosen in BRANCHINGS:
            print(f"{team.name}: {chosen.name}", flush=True)
            figures += compared(team, chosen, plain, gradients(team, chosen, batches, 2))
    if quick:  # too few batches for the targets
        figures = [replace(figure, hold=None) for figure in figures]
    short = show(figures)
    if not quick:
        setting = {"teams": [asdict(team) for team in TEAMS], "branchings": [asdict(one) for one in BRANCHINGS]}
        write("replay", figures, ("numpy",), hashes(MEASURES), setting)
    return int(short)


if __name__ == "__main__":
    exit_with(main)
