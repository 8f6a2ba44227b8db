"""Recorded batches of the small study's teams, and the credit of every rule, for measurements that train no policy.

`arithmetic_chain` with its initial model samples batches of 8 tasks and 8 rollouts. Cases that differ in scores alone
share the batches; each case scores them. The gradient of each step is sketched: per linear layer, inputs and output
gradients are projected on random directions, which leaves inner products unchanged in expectation. Embeddings and norms
are left out. Most rules only read the batches. `mappo` trains a critic, which learns from each batch after the batch is
credited, as in training, so it credits only batches that it has not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.studies import ARMS, CHAIN_CASES, MAPPO, ONLY_IN
from creditflow._utils.files import write_whole
from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, load_recipe, trained_policies
from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.data import Floats, Trajectory, TrajectoryBatch
from creditflow.engines.common.components import build_components
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import sample_trajectories
from creditflow.runs.step_files import read_step_file, write_step_file

BATCHES, TASKS, ROLLOUTS = 40, 8, 8
LAST_BATCHES = 16
"""Single decisions are measured in the last batches; thresholds and fitted parts adapt over those before."""
WIDTH = 12
"""Random directions for the inputs and for the output gradients of a layer; a sketch has their product as its size."""
_OTHER_TEAMS = ("saboteur",)
"""The cases with separate batches."""
_KEY = 7
"""Added to a batch's number in the random keys of its rollouts."""
MINI_BATCHES = 2
"""Updates of the critic for each batch, which it reads once."""
_AT_ONCE = 128
"""Steps of one backward pass."""


@dataclass(frozen=True)
class Recording:
    """The batches of one case, with the sketch of every step's gradient."""

    batches: Sequence[TrajectoryBatch]
    sketches: Sequence[NDArray[np.float32]]
    """[S, D] sketches of the gradient of each step's log-probability, by batch."""

    @classmethod
    def load(cls, folder: Path, case: str, batches: int) -> Recording:
        """Read the batches that `record` wrote."""
        return cls(
            [read_step_file(folder / f"{case}-{b}.parquet").batch for b in range(batches)],
            [np.load(folder / f"{team_of(case)}-{b}.npy", mmap_mode="r") for b in range(batches)],
        )


@dataclass(frozen=True)
class CreditedBatches:
    """The credit of one rule for the batches of one case."""

    gradient_BD: Floats
    """[B, D] the sketched gradient of each batch, per trajectory."""
    advantage_S: Floats
    """[S] the advantages of the steps of the last batches; NaN for steps that the rule does not train."""


def recipe_of(case: str, *overrides: str) -> Recipe:
    """The recipe of a case."""
    return load_recipe("arithmetic_chain", [*CHAIN_CASES[case].options, "data.seed=0", *overrides])


def cases_by_team() -> dict[str, list[str]]:
    """The cases that share the batches of each team."""
    teams = {case: team_of(case) for case in CHAIN_CASES}
    return {team: [case for case in CHAIN_CASES if teams[case] == team] for team in dict.fromkeys(teams.values())}


def record(folder: Path, batches: int) -> Mapping[str, Recording]:
    """Sample the batches of every team, and score them for every case. `folder` keeps finished batches."""
    by_team, reporter = cases_by_team(), Reporter()
    with (
        ProcessPoolExecutor(len(by_team), get_context("spawn")) as pool,
        reporter.bar("sampling", len(by_team) * batches, "batches") as bar,
    ):
        sampling = [pool.submit(_sample_missing, team, of, batches, folder) for team, of in by_team.items()]
        while wait(sampling, 1.0).not_done:
            done = sum((folder / f"{team}-{b}.npy").exists() for team in by_team for b in range(batches))
            bar.reach(done, len(by_team) * batches)
        for one in sampling:
            one.result()
    return {case: Recording.load(folder, case, batches) for case in CHAIN_CASES}


def team_of(case: str) -> str:
    """The case whose team and batches a case shares: they differ in scores alone."""
    return case if case in _OTHER_TEAMS else "exact"


def _sample_missing(team: str, cases: Sequence[str], batches: int, folder: Path) -> None:
    """Sample the missing batches of a team; runs in a separate process."""
    torch.set_num_threads(1)
    sampler: Sampler | None = None
    for b in range(batches):
        sketch, files = folder / f"{team}-{b}.npy", {case: folder / f"{case}-{b}.parquet" for case in cases}
        if not all(file.exists() for file in (sketch, *files.values())):
            sampler = sampler or Sampler(team, cases)
            sampler.make(b, sketch, files)


class Sampler:
    """Samples batches of one team and scores them for its cases."""

    def __init__(self, team: str, cases: Sequence[str]) -> None:
        recipe = recipe_of(team)
        self.trained = trained_policies(recipe.config)
        torch.manual_seed(0)
        self.components = build_components(recipe)
        self.policy_set = PolicySet.for_rollouts(recipe)
        self.scorers = {case: build_components(recipe_of(case)) for case in cases}
        self.sketcher = Sketcher(self.policy_set.policies[self.trained[0]].model)

    def make(self, b: int, sketch: Path, files: Mapping[str, Path]) -> None:
        trajectories = asyncio.run(self._sample(b))
        for case, file in files.items():
            asyncio.run(self._score(case, trajectories))
            batch = TrajectoryBatch.from_trajectories(trajectories)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_step_file(file, b, batch, None)
        sketch_SD = self.sketcher(batch)
        _save(sketch, lambda out: np.save(out, sketch_SD))

    async def _sample(self, b: int) -> list[Trajectory]:
        tasks = [self.components.train_tasks[(b * TASKS + t) % len(self.components.train_tasks)] for t in range(TASKS)]
        async with self.components.rewards.open(self.policy_set.policies):
            made = await sample_trajectories(self.components, self.policy_set, tasks, ROLLOUTS, 1.0, (0, _KEY + b))
        for step in (step for one in made for step in one.steps if step.policy not in self.trained):
            step.response_mask = (0,) * len(step.response_ids)  # as in training
        return made

    async def _score(self, case: str, trajectories: Sequence[Trajectory]) -> None:
        """Replace all scores and outcomes by those of a case."""
        components = self.scorers[case]
        for trajectory in trajectories:
            trajectory.outcome, trajectory.outcomes = None, {}
            for step in trajectory.steps:
                step.scores = {}
        async with components.rewards.open(self.policy_set.policies):
            await components.rewards.score(trajectories)
        components.label(trajectories)


class Sketcher:
    """Sketches of the gradient of each step's log-probability, one backward pass for many steps.

    The gradient of a linear layer's weight for one step is the sum over its tokens of the outer product of output
    gradient and input. Projecting both sides keeps inner products in expectation.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        generator = torch.Generator().manual_seed(0)
        self.layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
        self.sides = [
            tuple(
                torch.randn(size, WIDTH, generator=generator) / WIDTH**0.5 for size in (o.in_features, o.out_features)
            )
            for o in self.layers
        ]

    def __call__(self, batch: TrajectoryBatch, weight_T: Floats | None = None) -> NDArray[np.float32]:
        """[S, D] the sketches of a batch's steps.

        `weight_T`: [T] a factor for the log-probability of each token; default: 1 for sampled tokens.
        """
        sketch_SD = np.zeros((batch.n_steps, len(self.layers) * WIDTH**2), dtype=np.float32)
        weight_T = np.asarray(batch.response_mask, dtype=np.float64) if weight_T is None else weight_T
        lengths_S = np.diff(batch.prompt_offsets) + np.diff(batch.token_offsets)
        for steps in np.array_split(np.argsort(lengths_S, kind="stable"), -(-batch.n_steps // _AT_ONCE)):
            sketch_SD[steps] = self._of_steps(batch, weight_T, steps)
        return sketch_SD

    def _of_steps(self, batch: TrajectoryBatch, weight_T: Floats, steps: np.ndarray) -> NDArray[np.float32]:
        ids, mask, weight = _padded(batch, weight_T, steps)
        inputs: dict[int, Tensor] = {}
        parts: list[Tensor] = [torch.zeros(0)] * len(self.layers)
        with torch.enable_grad():
            hooks = [layer.register_forward_hook(_keep(inputs, at)) for at, layer in enumerate(self.layers)]
            hooks += [
                layer.register_full_backward_hook(_project(inputs, parts, at, *self.sides[at]))
                for at, layer in enumerate(self.layers)
            ]
            try:
                logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1].double()
                logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
                torch.autograd.backward((logprobs * weight[:, 1:]).sum())
            finally:
                for hook in hooks:
                    hook.remove()
                self.model.zero_grad(set_to_none=True)
        return torch.cat([part.flatten(1) for part in parts], dim=1).numpy()


def _keep(inputs: dict[int, Tensor], at: int) -> Any:
    def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[at] = args[0].detach()

    return hook


def _project(inputs: dict[int, Tensor], parts: list[Tensor], at: int, of_input: Tensor, of_output: Tensor) -> Any:
    def hook(module: Any, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        parts[at] = torch.einsum("blo,bli->boi", grad_output[0].float() @ of_output, inputs[at].float() @ of_input)

    return hook


def _padded(batch: TrajectoryBatch, weight_T: Floats, steps: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and the weights of tokens, padded on the right."""
    rows = []
    for s in steps.tolist():
        start = batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]]
        part = slice(batch.token_offsets[s], batch.token_offsets[s + 1])
        rows.append((np.concatenate([start, batch.response_ids[part]]), len(start), weight_T[part]))
    longest = max(len(tokens) for tokens, _, _ in rows)
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    weight = torch.zeros(len(rows), longest, dtype=torch.float64)
    for row, (tokens, prompt, of_tokens) in enumerate(rows):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : len(tokens)] = 1
        weight[row, prompt : len(tokens)] = torch.from_numpy(of_tokens)
    return ids, mask, weight


def _save(file: Path, write: Callable[[Any], None]) -> None:
    """Write a file of arrays as a whole."""

    def save(part: Path) -> None:
        with part.open("wb") as out:
            write(out)

    write_whole(file, save)


def credit_all(folder: Path, batches: int) -> dict[str, dict[str, CreditedBatches]]:
    """The credit of each rule in each case, each team in a process. `folder` has the recordings; it keeps results."""
    files = {team: folder / f"credit-{team}-{batches}.npz" for team in cases_by_team()}
    with ProcessPoolExecutor(len(files), get_context("spawn")) as pool:
        for one in [
            pool.submit(_credit_team, team, batches, folder, file) for team, file in files.items() if not file.exists()
        ]:
            one.result()
    credit: dict[str, dict[str, CreditedBatches]] = {rule: {} for rule in ARMS if rule not in ONLY_IN}
    for file in files.values():
        kept = np.load(file)
        for name in (name for name in kept.files if name.endswith("/gradient")):
            rule, case, _ = name.split("/")
            credit[rule][case] = CreditedBatches(kept[name], kept[f"{rule}/{case}/advantage"])
    return credit


def _credit_team(team: str, batches: int, folder: Path, file: Path) -> None:
    """Compute the credit of all rules in the cases of a team; runs in a separate process."""
    torch.set_num_threads(1)
    recordings = {case: Recording.load(folder, case, batches) for case in cases_by_team()[team]}
    credit = {
        (rule, case): credited(recording, recipe_of(case, *overrides).config.credit)
        for case, recording in recordings.items()
        for rule, overrides in ARMS.items()
        if rule != MAPPO and rule not in ONLY_IN  # those have scores of their own, which the batches lack
    }
    credit |= {(MAPPO, case): made for case, made in critic_credited(team, recordings).items()}
    columns = {}
    for (rule, case), made in credit.items():
        columns[f"{rule}/{case}/gradient"] = made.gradient_BD
        columns[f"{rule}/{case}/advantage"] = made.advantage_S
    _save(file, lambda out: np.savez(out, allow_pickle=False, **columns))


def critic_credited(team: str, recordings: Mapping[str, Recording]) -> dict[str, CreditedBatches]:
    """The credit of `mappo` by case. The cases differ in the strata in force alone, so they share the critic."""
    n_batches = len(recordings[team].batches)
    recipe = recipe_of(team, *ARMS[MAPPO])
    policy_set = PolicySet.from_recipe(recipe, n_batches, keep_reference=False)
    (policy,) = policy_set.actors
    model, sketcher = policy_set.critics[policy], Sketcher(policy_set.policies[policy].model)
    gradients: dict[str, list[Floats]] = {case: [] for case in recordings}
    advantages: dict[str, list[Floats]] = {case: [] for case in recordings}
    for b in range(n_batches):
        values_T = policy_set.values(recordings[team].batches[b])
        for case, recording in recordings.items():
            batch = recording.batches[b]
            assigned = assign(batch, recipe.config.credit, values_T=values_T)
            sketch_SD = sketcher(batch, assigned.token_advantages())
            gradients[case].append(sketch_SD.sum(axis=0, dtype=np.float64) / batch.n_trajectories)
            advantages[case].append(trained_advantages(assigned))
        own_S = assigned.groups.trained_S & batch.sampled_by(policy)
        mini_batch_N = np.arange(batch.n_trajectories) * MINI_BATCHES // batch.n_trajectories
        assert values_T is not None
        assert assigned.returns_T is not None
        model.update(batch, assigned.returns_T, values_T, own_S, mini_batch_N[batch.trajectory_of_step])
    return {
        case: CreditedBatches(np.array(gradients[case]), np.concatenate(advantages[case][-LAST_BATCHES:]))
        for case in recordings
    }


def credited(recording: Recording, options: CreditOptions) -> CreditedBatches:
    """The credit of a rule that only reads the batches. Thresholds and fitted parts adapt from batch to batch."""
    assigned = list(_assignments(recording, options))
    gradient_BD = [
        summed(one.advantage.advantage_S, sketch_SD) / one.batch.n_trajectories
        for one, sketch_SD in zip(assigned, recording.sketches, strict=True)
    ]
    return CreditedBatches(
        np.array(gradient_BD), np.concatenate(list(map(trained_advantages, assigned[-LAST_BATCHES:])))
    )


def _assignments(recording: Recording, options: CreditOptions) -> Iterator[Assignment]:
    threshold, history = options.propagation.make_threshold(), History()
    for batch in recording.batches:
        assigned = assign(batch, options, threshold=threshold, history=history)
        threshold.update(batch_stats(assigned))
        history = assigned.history_after
        yield assigned


def summed(weight_S: Floats, sketch_SD: NDArray[np.float32]) -> Floats:
    """[D] the weighted sum of sketches, which have float32 precision."""
    return np.asarray(weight_S.astype(np.float32) @ sketch_SD, dtype=np.float64)


def trained_advantages(assigned: Assignment) -> Floats:
    """[S] the advantages of a batch; NaN for steps that are not trained."""
    return np.where(assigned.groups.trained_S, assigned.advantage.advantage_S, np.nan)
