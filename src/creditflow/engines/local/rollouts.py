"""Sample and score the trajectories of a training step or an evaluation. Independent of credit and updates.

A training step replaces groups with equal outcomes if dynamic sampling is on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from creditflow._utils.progress import phase
from creditflow.config import Config
from creditflow.data import Task, Trajectory, TrajectoryBatch
from creditflow.engines.common.components import Components
from creditflow.engines.common.rollouts import expect_few_failed_rollouts
from creditflow.engines.local.actor import fill_reference_logprobs
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import CreditflowError, TooManyFailedScores
from creditflow.monitoring.metrics import evaluation_metrics
from creditflow.rewards import ScoringReport
from creditflow.rollout import ChatClient, ModelClient, Rollout, Scheduler, run_rollouts

TRAIN = 0
"""The first part of a training rollout's random key; other uses have other numbers."""


class Stopwatch:
    """Measured seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time inside the context."""
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """The measured seconds as `timing/<name>_s`, and their sum as `timing/step_s`."""
        metrics = {f"timing/{name}_s": seconds for name, seconds in self._seconds.items()}
        return metrics | {"timing/step_s": sum(self._seconds.values())}


def tasks_at(position: int, count: int, n_tasks: int, config: Config) -> list[int]:
    """The indices of the `count` tasks after the first `position` of a run.

    Each epoch is shuffled separately.
    """
    size = config.data.train_batch_size
    per_epoch = n_tasks // size * size
    tasks: list[int] = []
    while len(tasks) < count:
        epoch, begin = divmod(position + len(tasks), per_epoch)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((config.data.seed, epoch))))
        order = rng.permutation(n_tasks) if config.data.shuffle else np.arange(n_tasks)
        tasks += order[begin:per_epoch][: count - len(tasks)].tolist()
    return tasks


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The scored trajectories of one training step."""

    trajectories: list[Trajectory]
    """`rollout.n` trajectories per task, grouped by task."""
    batch: TrajectoryBatch
    """The same trajectories as columns."""
    report: ScoringReport
    metrics: dict[str, float]
    tasks_taken: int
    """The number of tasks taken since the start of the run."""
    tokens: int
    """Prompt and response tokens of all sampled trajectories, including filtered ones."""
    response_tokens: int


async def gather(
    step: int, components: Components, policy_set: PolicySet, tasks_taken: int, timing: Stopwatch
) -> SampledBatch:
    """Sample and score the trajectories of a training step.

    With `algorithm.filter_groups`, groups with equal outcomes are dropped and further tasks sampled (dynamic sampling;
    DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2), until the batch is full or `max_num_gen_batches` is reached.
    The result is then the kept groups, or the last sampled groups if none was kept.

    Raises CreditflowError if too many rollouts failed, TooManyFailedScores if too many scores did.
    """
    config = components.recipe.config
    size, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    filtering = config.algorithm.filter_groups
    kept, trajectories, reports, rounds = list[Trajectory](), list[Trajectory](), list[ScoringReport](), 0
    while True:
        key = (TRAIN, step) if rounds == 0 else (TRAIN, step, rounds)
        drawn = tasks_at(tasks_taken, size, len(components.train_tasks), config)
        tasks = [components.train_tasks[i] for i in drawn]
        tasks_taken += size
        with timing("rollout"):
            some = await sample_trajectories(components, policy_set, tasks, n, components.sampling.temperature, key)
        with timing("reward"):
            components.label(some)
            reports.append(await score(components, some))
        rounds += 1
        trajectories += some
        groups = [some[i : i + n] for i in range(0, len(some), n)]
        informative = [group for group in groups if not filtering.enable or outcomes_differ(group)]
        kept += [trajectory for group in informative for trajectory in group]
        if len(kept) >= size * n or rounds == filtering.max_num_gen_batches or not filtering.enable:
            break
    batch = TrajectoryBatch.from_trajectories(trajectories)
    metrics = {"train/pass_at_1": evaluation_metrics(batch, n=1)["pass_at_1"]}
    if filtering.enable:
        metrics["rollout/gen_batches"] = rounds
        metrics["rollout/filtered_frac"] = 1 - len(kept) / len(trajectories)
    response_tokens = len(batch.response_ids)
    tokens = response_tokens + len(batch.prompt_ids)
    merged, taken = ScoringReport.merge(reports), kept[: size * n] or some
    if len(taken) < len(trajectories):
        batch = TrajectoryBatch.from_trajectories(taken)
    return SampledBatch(taken, batch, merged, metrics, tasks_taken, tokens, response_tokens)


def outcomes_differ(group: Sequence[Trajectory]) -> bool:
    """Whether the known outcomes of a group differ, the common ones or those of one agent."""
    by_agent: dict[str | None, list[float]] = {}
    for trajectory in group:
        for agent, score in ((None, trajectory.outcome), *trajectory.outcomes.items()):
            if score is not None and score.status == "ok":
                by_agent.setdefault(agent, []).append(score.rescaled)
    return any(not math.isclose(min(values), max(values), abs_tol=1e-9) for values in by_agent.values())


async def sample_trajectories(
    components: Components,
    policy_set: PolicySet,
    tasks: Sequence[Task],
    n: int,
    temperature: float,
    key: tuple[int, ...],
    title: str = "sampling",
) -> list[Trajectory]:
    """Run `n` rollouts of each task concurrently. The result is determined by key and seed.

    Masks the steps of frozen policies, and fills in reference log-probs if a reward function needs them. Raises
    CreditflowError if too many rollouts failed. `title`: the phase in the progress.
    """
    prefix, seed = "-".join(map(str, key)), components.recipe.config.data.seed
    rollouts = [
        Rollout(task, f"{prefix}-{t}", f"{prefix}-{t}-{k}", (seed, *key, t, k))
        for t, task in enumerate(tasks)
        for k in range(n)
    ]
    clients: dict[str, ModelClient | ChatClient] = {**policy_set.policies, **components.chat_clients}
    scheduler = Scheduler(clients, components.recipe.config.actor_rollout_ref.rollout.max_num_seqs)
    sampling = replace(components.sampling, temperature=temperature)
    with phase(title, len(rollouts), "trajectories") as bar:

        def finish(trajectory: Trajectory) -> None:
            bar.advance()

        running = run_rollouts(rollouts, components.workflow, components.agents, scheduler, sampling, finish)
        trajectories = await complete(running, components)
    try:
        expect_few_failed_rollouts(
            [trajectory.info["error"] for trajectory in trajectories if trajectory.status == "failed"],
            len(trajectories),
            sum(len(trajectory.steps) for trajectory in trajectories),
            trajectories[0].info,
            components.recipe.config.actor_rollout_ref.rollout.max_failed_frac,
        )
    except CreditflowError as error:
        error.trajectories = trajectories
        raise
    policy_set.freeze(trajectories)
    fill_references(components, policy_set, trajectories)
    return trajectories


async def score(
    components: Components, trajectories: Sequence[Trajectory], *, max_failed_frac: float | None = None
) -> ScoringReport:
    """Score trajectories (`RewardManager.score`) and show the progress.

    Raises TooManyFailedScores, with the trajectories, if too many scores failed.
    """
    with phase("scoring", unit="calls") as bar:
        try:
            return await components.rewards.score(trajectories, max_failed_frac=max_failed_frac, progress=bar.reach)
        except TooManyFailedScores as error:
            error.trajectories = trajectories
            raise


async def complete(running: Awaitable[list[Trajectory]], components: Components) -> list[Trajectory]:
    """Wait for rollouts, then close the connections to endpoints."""
    try:
        return await running
    finally:
        for client in components.chat_clients.values():
            await client.aclose()


def fill_references(components: Components, policy_set: PolicySet, trajectories: Sequence[Trajectory]) -> None:
    """Set the reference log-probs of all steps, if a reward function needs them."""
    if components.rewards.needs_reference:
        fill_reference_logprobs(policy_set.references, trajectories, policy_set.max_tokens)
