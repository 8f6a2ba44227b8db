"""Simulation of error and blame propagation in a team: random trajectories with credit as in training.

A team is described by a few numbers: the error rate of a step, its increase on wrong input, the scored agents, and the
error rate of their scores. Credit comes from `creditflow.credit.assign`, the same code as in training. Uses no model
and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from creditflow.credit import CreditOptions, assign
from creditflow.credit.records import compared_rules
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import ConfigError, CycleError, did_you_mean

GRAPHS = ("chain", "tree", "full")


@dataclass(frozen=True)
class SimulatedTeam:
    """Parameters of a simulated team."""

    steps: int = 13
    graph: str = "chain"
    """`chain`: each step uses the step before; `tree`: two steps use each, and the last step uses all leaves; `full`:
    each step uses all steps before it."""
    parents: Sequence[Sequence[int]] | None = None
    """Parents of each step, in place of `graph`: the earlier steps that supply its input."""
    agents: Sequence[str] = ("planner", "executor", "verifier")
    """The first agent makes the first step; the others take turns after it."""
    error: float = 0.1
    """Probability that a step errs on right input."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """The same for single agents."""
    self_conditioning: float = 0.0
    """Increase of the error rate if a parent's output is wrong: to `error + (1 - error) * self_conditioning`."""
    recovery: float = 0.0
    """Probability that a step without error makes a right output from wrong input."""
    noise: float = 0.0
    """Probability that a verdict is mistaken."""
    votes: int = 8
    """Number of verdicts on a step; its score is their mean. 1 gives a binary score."""
    inherits: bool = False
    """Score a step by whether its output is right, so that it inherits earlier errors; else by its own action, given
    its input."""
    scored: Sequence[str] | None = None
    """The scored agents; default: all."""
    tasks: int = 256
    trajectories: int = 8
    """Trajectories per task."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("error", "self_conditioning", "recovery", "noise"):
            _expect_share(name, getattr(self, name))
        for name, value in self.errors.items():
            _expect_share(f"errors.{name}", value)
        for name in ("steps", "votes", "tasks", "trajectories"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a whole number of at least 1, got {getattr(self, name)}")
        if self.graph not in GRAPHS:
            raise ConfigError(
                f"graph: expected {', '.join(GRAPHS)}, got {self.graph!r}{did_you_mean(self.graph, GRAPHS)}"
            )
        unknown = [name for name in (*self.errors, *(self.scored or ())) if name not in self.agents]
        if not self.agents or unknown:
            hint = did_you_mean((unknown or [""])[0], self.agents)
            raise ConfigError(f"agents: expected {', '.join(self.agents) or 'at least one'}, got {unknown}{hint}")
        if not self.parents_of_step:
            raise ConfigError("parents: expected a list of parents for each step, got none")
        for step, used in enumerate(self.parents_of_step):
            if any(not 0 <= parent < step for parent in used):
                raise CycleError(f"parents of step {step}: expected steps from 0 to {step - 1}, got {list(used)}")

    @property
    def parents_of_step(self) -> list[tuple[int, ...]]:
        """Parents of each step: the earlier steps that supply its input."""
        if self.parents is not None:
            return [tuple(used) for used in self.parents]
        n = self.steps
        if self.graph == "chain":
            return [(s - 1,) if s else () for s in range(n)]
        if self.graph == "full":
            return [tuple(range(s)) for s in range(n)]
        inner = n - 1
        tree = [((s - 1) // 2,) if s else () for s in range(inner)]
        leaves = tuple(s for s in range(inner) if 2 * s + 1 >= inner)
        return [*tree, leaves] if n > 1 else [()]

    @property
    def agent_of_step(self) -> Ints:
        """The agent of each step, as an index into `agents`."""
        others = max(1, len(self.agents) - 1)
        return np.array([0 if s == 0 else (1 + (s - 1) % others) % len(self.agents) for s in range(self.n_steps)])

    @property
    def n_steps(self) -> int:
        """Number of steps of one trajectory."""
        return len(self.parents_of_step)


@dataclass(frozen=True, slots=True)
class SimulatedTrajectories:
    """N simulated trajectories of K steps."""

    own_NK: Bools
    """[N, K] whether the step itself is right, given its input."""
    output_NK: Bools
    """[N, K] whether the step's output is right."""
    chance_NK: Floats
    """[N, K] random numbers; a step errs if its number is below its error rate."""
    recovers_NK: Bools
    batch: TrajectoryBatch

    @property
    def outcome_N(self) -> Bools:
        """[N] whether the output of the last step is right."""
        return self.output_NK[:, -1]


@dataclass(frozen=True, slots=True)
class SimulatedCredit:
    """Credit statistics of one rule on simulated trajectories."""

    rule: str
    wrong_way: float
    """Share of all steps that are right with a negative advantage, or wrong with a positive one."""
    blamed_right: float
    """Mean negative advantage of right steps."""
    blamed_wrong: float
    """Mean negative advantage of wrong steps."""
    signal: float
    """Correlation of advantage and right steps over all steps; 0 if either is constant."""
    amplification_K: Floats
    """[K] blame on a whole trajectory due to an error at this place, in units of the blame on the step itself."""


def draw(team: SimulatedTeam) -> SimulatedTrajectories:
    """Draw trajectories of the team, as a batch with scores and outcomes."""
    rng = np.random.default_rng(team.seed)
    n, k = team.tasks * team.trajectories, team.n_steps
    chance_NK, recovers_NK = rng.random((n, k)), rng.random((n, k)) < team.recovery
    own_NK, output_NK = _trajectory(team, chance_NK, recovers_NK)
    seen_NK = output_NK if team.inherits else own_NK
    mistaken_NKV = rng.random((n, k, team.votes)) < team.noise
    score_NK = np.where(mistaken_NKV, ~seen_NK[:, :, None], seen_NK[:, :, None]).mean(axis=2)
    return SimulatedTrajectories(own_NK, output_NK, chance_NK, recovers_NK, _batch(team, score_NK, output_NK[:, -1]))


def credited(rule: str, drawn: SimulatedTrajectories, options: CreditOptions) -> SimulatedCredit:
    """Compute the credit of simulated trajectories under `options`; `rule`: its name in the result."""
    n, k = drawn.own_NK.shape
    advantage_NK = assign(drawn.batch, options).advantage_S.reshape(n, k)
    right_NK = drawn.own_NK
    wrong_way = np.where(right_NK, advantage_NK < 0, advantage_NK > 0)
    blame_NK = np.maximum(-advantage_NK, 0.0)
    return SimulatedCredit(
        rule,
        float(wrong_way.mean()),
        _mean(blame_NK[right_NK]),
        _mean(blame_NK[~right_NK]),
        _correlation(advantage_NK.ravel(), right_NK.ravel().astype(np.float64)),
        np.array([_amplified(blame_NK, right_NK, place) for place in range(k)]),
    )


def moved_outputs(team: SimulatedTeam, drawn: SimulatedTrajectories) -> Floats:
    """[K] the mean number of additional wrong outputs in a trajectory due to an error of the step at this place.

    An intervention: the same trajectories with the same random numbers, once with an error there and once without.
    """
    moved = []
    for place in range(team.n_steps):
        wrong = []
        for chance in (-1.0, 2.0):  # below every error rate, and above
            chance_NK = drawn.chance_NK.copy()
            chance_NK[:, place] = chance
            wrong.append((~_trajectory(team, chance_NK, drawn.recovers_NK)[1]).sum(axis=1).mean())
        moved.append(wrong[0] - wrong[1])
    return np.array(moved)


def best_threshold(
    drawn: SimulatedTrajectories, options: CreditOptions, thetas: Sequence[float]
) -> tuple[float, list[tuple[float, float]]]:
    """The threshold with the highest `signal`, and (threshold, signal) of all thresholds."""
    signals = [
        (theta, credited(options.propagation, drawn, replace(options, propagation_threshold=theta)).signal)
        for theta in thetas
    ]
    return max(signals, key=lambda pair: pair[1])[0], signals


def break_even_noise(
    team: SimulatedTeam, options: CreditOptions, noises: Sequence[float]
) -> tuple[float | None, list[tuple[float, float, float]]]:
    """The smallest noise at which the signal of the rule does not exceed that of the outcome alone.

    None if it is higher at all of `noises`. Second value: (noise, signal of the rule, signal of the baseline rule) of
    each.
    """
    shared = replace(options, propagation=compared_rules()[0])
    rows = []
    for noise in noises:
        drawn = draw(replace(team, noise=noise))
        rule, baseline = (credited(one.propagation, drawn, one).signal for one in (options, shared))
        rows.append((noise, rule, baseline))
    return next((noise for noise, rule, baseline in rows if rule <= baseline), None), rows


def _trajectory(team: SimulatedTeam, chance_NK: Floats, recovers_NK: Bools) -> tuple[Bools, Bools]:
    """([N, K] whether each step itself is right, [N, K] whether its output is right)."""
    own_NK, output_NK = np.zeros(chance_NK.shape, dtype=np.bool_), np.zeros(chance_NK.shape, dtype=np.bool_)
    rate_A = np.array([team.errors.get(agent, team.error) for agent in team.agents])
    rate_K = rate_A[team.agent_of_step]
    for place, used in enumerate(team.parents_of_step):
        input_N = output_NK[:, list(used)].all(axis=1)
        rate_N = np.where(input_N, rate_K[place], rate_K[place] + (1 - rate_K[place]) * team.self_conditioning)
        own_NK[:, place] = chance_NK[:, place] >= rate_N
        output_NK[:, place] = own_NK[:, place] & (input_N | recovers_NK[:, place])
    return own_NK, output_NK


def _amplified(blame_NK: Floats, right_NK: Bools, place: int) -> float:
    """The amplification at one place; NaN if none or all of its steps err, or the error adds no blame there."""
    wrong_N = ~right_NK[:, place]
    if not wrong_N.any() or wrong_N.all():
        return float("nan")
    on_itself = blame_NK[wrong_N, place].mean() - blame_NK[~wrong_N, place].mean()
    on_all = blame_NK[wrong_N].sum(axis=1).mean() - blame_NK[~wrong_N].sum(axis=1).mean()
    return float(on_all / on_itself) if on_itself > 0 else float("nan")


def _batch(team: SimulatedTeam, score_NK: Floats, outcome_N: Bools) -> TrajectoryBatch:
    n, k = score_NK.shape
    pairs = np.array([(place, parent) for place, used in enumerate(team.parents_of_step) for parent in used], np.int64)
    scored = team.agents if team.scored is None else team.scored
    matched_S = np.tile([team.agents[agent] in scored for agent in team.agent_of_step], n)
    return TrajectoryBatch.from_arrays(
        trajectory_of_step=np.repeat(np.arange(n), k),
        group_of_trajectory=np.repeat(np.arange(team.tasks), team.trajectories),
        outcome=outcome_N.astype(np.float64),
        agent_of_step=np.tile(team.agent_of_step, n),
        agent_names=tuple(team.agents),
        scores=np.where(matched_S, score_NK.ravel(), np.nan)[:, None],
        score_names=("verdict",),
        edges=(k * np.arange(n)[:, None, None] + pairs.reshape(-1, 2)).reshape(-1, 2),
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else 0.0


def _correlation(one: Floats, other: Floats) -> float:
    if one.std() <= 1e-12 or other.std() <= 1e-12:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _expect_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}: expected a number from 0 to 1, got {value}")
