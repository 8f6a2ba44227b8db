"""The credit that each rule of the leaderboard assigns to the recorded batches.

Most rules only read the batches. `mappo` trains a critic. It learns from each batch after the batch is credited, as in
training, so it values only batches that it has not read.
`replay` and `c3` branch. They take fewer of the recorded rollouts,
so that all rules have about the same number of sampled tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.credit_rules import BRANCHING, RULES
from benchmarks.recordings import (
    LAST_BATCHES,
    ROLLOUTS,
    TASKS,
    CreditedBatches,
    Recording,
    Sampler,
    Sketcher,
    cases_by_team,
    credited,
    options_of,
    recipe_of,
    summed,
    trained_advantages,
)
from creditflow._utils.files import write_whole
from creditflow._utils.progress import Reporter
from creditflow.config import trained_agents
from creditflow.credit import assign
from creditflow.credit.history import History
from creditflow.credit.trees import trees_of
from creditflow.data import Bools, Floats, Ints, Trajectory, TrajectoryBatch
from creditflow.engines.common.branches import GeneratedTokens, PlannedBranch, new_tokens, plan_branches
from creditflow.engines.common.components import build_components
from creditflow.engines.common.rollouts import policy_steps
from creditflow.engines.local.outcomes import AT_ONCE
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.policy_set import CENTRAL, PolicySet
from creditflow.engines.local.rollouts import build_scheduler
from creditflow.engines.local.sampler import generate
from creditflow.rollout import together
from creditflow.rollout.branching import REFUSED, run_branch
from creditflow.rollout.client import Generation, GenerationRequest

_REPLAY = next(iter(BRANCHING.values()))
COSTLY: Mapping[str, tuple[str, ...]] = {
    "mappo": (
        "algorithm.preset=mappo",
        "critic.optim.lr=1.0e-3",
        "critic.cliprange_value=10",
    ),
    "replay": _REPLAY,
    "c3": ("algorithm.preset=c3", *(one for one in _REPLAY if not one.startswith("algorithm."))),
}
"""The rules that need more than the batches. The critic has the learning rate of the recipe `arithmetic_estimators`."""
BRANCHED_ROLLOUTS = 5
"""Rollouts of each task that branch, three times each in the second half; the other rules have 8."""
MINI_BATCHES = 2
"""Updates of a model for each batch, which it reads once."""


@dataclass(frozen=True)
class Job:
    """The rules of one family on the batches of one team."""

    team: str
    cases: Sequence[str]
    batches: int
    folder: Path
    """The folder of the recordings."""

    def recording(self, case: str) -> Recording:
        """The batches of a case."""
        return Recording.load(self.folder, case, self.batches)


Made = Iterator[tuple[str, str, CreditedBatches]]
"""Names of rule and case, and the result."""


def credit_all(folder: Path, batches: int) -> dict[str, dict[str, CreditedBatches]]:
    """The results of each rule and case. `folder` has the recordings, and keeps finished families."""
    jobs = {
        folder / f"{family.__name__}-{team}-{batches}.npz": (family, Job(team, cases, batches, folder))
        for family in FAMILIES
        for team, cases in cases_by_team().items()
    }
    missing = {file: job for file, job in jobs.items() if not file.exists()}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool, Reporter().bar("credit", len(jobs), "parts") as bar:
        running = [pool.submit(_make, family, job, file) for file, (family, job) in missing.items()]
        while wait(running, 1.0).not_done:
            bar.reach(sum(file.exists() for file in jobs), len(jobs))
        for one in running:
            one.result()
    found: dict[str, dict[str, CreditedBatches]] = {rule: {} for rule in (*RULES, *COSTLY)}
    for file in jobs:
        kept = np.load(file)
        for name in (name for name in kept.files if name.endswith("/gradient")):
            rule, case, _ = name.split("/")
            columns = (kept[f"{rule}/{case}/{column}"] for column in ("gradient", "advantage", "numbers"))
            gradient_BD, advantage_S, numbers = columns
            found[rule][case] = CreditedBatches(gradient_BD, advantage_S, *numbers.tolist())
    return found


def _make(family: Callable[[Job], Made], job: Job, file: Path) -> None:
    """Compute the results of a family and write them; runs in a separate process."""
    torch.set_num_threads(1)
    columns = {}
    for rule, case, made in family(job):
        columns[f"{rule}/{case}/gradient"] = made.gradient_BD
        columns[f"{rule}/{case}/advantage"] = made.advantage_S
        columns[f"{rule}/{case}/numbers"] = np.array([made.tokens, made.explained])

    def save(part: Path) -> None:
        with part.open("wb") as out:
            np.savez(out, **columns)

    write_whole(file, save)


class _Credit:
    """Collects the credit of one rule batch by batch."""

    def __init__(self) -> None:
        self.gradients: list[Floats] = []
        self.advantages: list[Floats] = []

    def add(self, gradient_D: Floats, n_trajectories: int, advantage_S: Floats) -> None:
        """Add a batch: the summed gradient of its trajectories, and the advantages of the recorded steps."""
        self.gradients.append(gradient_D / n_trajectories)
        self.advantages.append(advantage_S)

    def made(self, tokens: float = 1.0, explained: Sequence[float] = ()) -> CreditedBatches:
        """The collected credit. `explained`: by batch, the share of the variance that a model explained."""
        advantage_S = np.concatenate(self.advantages[-LAST_BATCHES:])
        share = fmean(explained[-LAST_BATCHES:]) if explained else math.nan
        return CreditedBatches(np.array(self.gradients), advantage_S, tokens, share)


def cheap(job: Job) -> Made:
    """The rules that only read the batches."""
    for case in job.cases:
        recording = job.recording(case)
        for rule, overrides in RULES.items():
            yield rule, case, credited(recording, options_of(case, overrides))


# ---- rules that train a model ----------------------------------------------------------------------------------------


def critic(job: Job) -> Made:
    """`mappo`: the central critic learns from each batch after it. The cases differ in the strata in force alone."""
    recipe, explained = recipe_of(job.team, *COSTLY["mappo"]), list[float]()
    policy_set = PolicySet.from_recipe(recipe, job.batches, keep_reference=False)
    (policy,) = policy_set.actors
    model, sketcher = policy_set.critics[CENTRAL], Sketcher(policy_set.policies[policy].model)
    credits = {case: _Credit() for case in job.cases}
    for batches in zip(*(job.recording(case).batches for case in job.cases), strict=True):
        values_T, gradients = policy_set.values(batches[0]), dict[bytes, Floats]()
        assert values_T is not None
        for credit, batch in zip(credits.values(), batches, strict=True):
            assigned = assign(batch, recipe.config.algorithm, values_T=values_T)
            advantage_T = assigned.token_advantages()
            if (key := advantage_T.tobytes()) not in gradients:
                gradients[key] = sketcher(batch, advantage_T).sum(axis=0, dtype=np.float64)
            credit.add(gradients[key], batch.n_trajectories, trained_advantages(assigned))
        own_S, mini_batch_S = assigned.trained_S & policy_steps(batch, policy), _mini_batches(batch)
        assert assigned.returns_T is not None
        found = model.update(batch, assigned.returns_T, values_T, own_S, mini_batch_S[batch.trajectory_of_step])
        explained.append(found.get("critic/vf_explained_var", 0.0))
    for case, credit in credits.items():
        yield "mappo", case, credit.made(explained=explained)


def _mini_batches(batch: TrajectoryBatch) -> Ints:
    """[N] the mini-batch of each trajectory, by task."""
    return np.arange(batch.n_trajectories) * MINI_BATCHES // batch.n_trajectories


# ---- rules that sample further rollouts ------------------------------------------------------------------------------


class _Counter:
    """The built-in sampler; counts the response tokens that it samples."""

    def __init__(self) -> None:
        self.tokens = 0

    def generate(self, policy: Policy, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one response for each request."""
        with policy.forward.running():
            made = generate(policy.model, requests, policy.eos_ids, policy.pad_id, shared=policy.shares)
        self.tokens += sum(len(one.response_ids) for one in made)
        return made


@dataclass(frozen=True)
class _Taken:
    """The part of a recorded batch that a rule uses."""

    batch: TrajectoryBatch
    sketch_SD: NDArray[np.float32]
    """[S, D] those of the part's steps."""
    taken_S: Bools
    """[S] whether a step of the recorded batch is in the part."""

    @classmethod
    def of(cls, recording: Recording, b: int, tasks: int, rollouts: int) -> _Taken:
        """The first rollouts of the first tasks of batch `b`."""
        batch, place_N = recording.batches[b], np.arange(recording.batches[b].n_trajectories)
        taken_N = (place_N // ROLLOUTS < tasks) & (place_N % ROLLOUTS < rollouts)
        taken_S = taken_N[batch.trajectory_of_step]
        part = [one for one, taken in zip(batch.to_trajectories(), taken_N, strict=True) if taken]
        return cls(TrajectoryBatch.from_trajectories(part), recording.sketches[b][taken_S], taken_S)

    def advantages(self, advantage_S: Floats) -> Floats:
        """[S] the advantages of the part's steps among all steps of the recorded batch; NaN for the others."""
        found_S = np.full(len(self.taken_S), np.nan)
        found_S[self.taken_S] = advantage_S
        return found_S


def branches(job: Job) -> Made:
    """`replay` and `c3`, on the same branches."""
    sampler, count = Sampler(job.team, job.cases), _Counter()
    for policy in sampler.policy_set.policies.values():
        policy.sampler = count
    recording = job.recording(job.team)
    parts = [_Taken.of(recording, b, TASKS, BRANCHED_ROLLOUTS) for b in range(job.batches)]
    rollouts = [part.batch.to_trajectories() for part in parts]
    made = _run_branches(sampler, _plan(job.team, rollouts))
    credits = {(rule, case): _Credit() for rule in ("replay", "c3") for case in job.cases}
    options = {(rule, case): options_of(case, COSTLY[rule]) for rule, case in credits}
    for part, recorded, more in zip(parts, rollouts, made, strict=True):
        new_SD: NDArray[np.float32] | None = None
        for case in job.cases:
            asyncio.run(sampler.score(case, [*recorded, *more]))
            batch = TrajectoryBatch.from_trajectories([*recorded, *more])
            if new_SD is None:
                new_SD = sampler.sketcher(batch, wanted_S=_new_steps(batch))
                new_SD[: part.batch.n_steps] = part.sketch_SD
            for rule in ("replay", "c3"):
                assigned = assign(batch, options[rule, case])
                gradient_D = summed(assigned.share_S * assigned.advantage_S, new_SD)
                advantage_S = part.advantages(trained_advantages(assigned)[: part.batch.n_steps])
                credits[rule, case].add(gradient_D, part.batch.n_trajectories, advantage_S)
    tokens = _relative_tokens(recording, parts, count)
    for (rule, case), credit in credits.items():
        yield rule, case, credit.made(tokens)


def _plan(team: str, rollouts: Sequence[Sequence[Trajectory]]) -> list[list[PlannedBranch]]:
    """Draw the decisions of each batch, and note them in its rollouts."""
    recipe = recipe_of(team, *COSTLY["replay"])
    functions, agents = build_components(recipe, tasks=False).rewards.functions, trained_agents(recipe.config)
    before, planned = GeneratedTokens(0, 0), []
    for b, of in enumerate(rollouts):
        tokens = sum(new_tokens(one, 0) for one in of)
        planned.append(plan_branches(recipe.config, functions, b, agents, of, tokens, before, History()).first)
    return planned


def _run_branches(sampler: Sampler, planned: Sequence[Sequence[PlannedBranch]]) -> list[list[Trajectory]]:
    """Run the branches of all batches together. Raises RuntimeError if one is refused."""
    components, scheduler = sampler.components, build_scheduler(sampler.components, sampler.policy_set)
    every = [one for of in planned for one in of]

    async def run() -> list[Trajectory]:
        made: list[Trajectory] = []
        for first in range(0, len(every), AT_ONCE):
            running = [
                run_branch(
                    one.record,
                    one.at,
                    # an id by which the saboteur repeats its recorded draws (`benchmarks.cases.recorded_step_id`)
                    replace(one.rollout, id=f"{one.root.id}~without{one.at}~{one.alternative}"),
                    components.workflow,
                    components.agents,
                    scheduler,
                    components.sampling,
                )
                for one in every[first : first + AT_ONCE]
            ]
            made += await together(running, scheduler)
        return made

    found = asyncio.run(run())
    if refused := [one.info["error"] for one in found if REFUSED in one.info]:
        raise RuntimeError(f"{len(refused)} of {len(found)} branches were refused: {refused[0]}")
    for one, branch in zip(every, found, strict=True):
        one.mark(branch)
    sampler.freeze(found)
    rest = iter(found)
    return [[next(rest) for _ in of] for of in planned]


def _new_steps(batch: TrajectoryBatch) -> Bools:
    """[S] the sampled steps of branches."""
    trees = trees_of(batch)
    assert trees is not None
    return trees.branch_S(batch) & ~trees.copied_S(batch)


def _relative_tokens(recording: Recording, parts: Sequence[_Taken], count: _Counter) -> float:
    """The tokens of the parts and of the further rollouts, relative to those of all recorded rollouts."""
    taken = sum(len(part.batch.response_ids) for part in parts)
    return (taken + count.tokens) / sum(len(batch.response_ids) for batch in recording.batches)


FAMILIES = (critic, cheap, branches)
