"""Signal and noise of the policy gradient under rules of credit: `python -m benchmarks.credit_signal [--quick]`.

`arithmetic_chain` with its initial model samples many batches of 8 tasks and 8 rollouts. Every case scores the same
batches; every rule then assigns credit to them. No model is trained, so that a rule costs seconds.

With g_b the gradient that a rule makes of batch b, and J the expected outcome,

    efficiency = (mean of g_b . grad J)^2 / (mean of |g_b|^2 * |grad J|^2)

is the share of the largest gain that one gradient step can make along grad J, if the step size is the best for the rule
and the curvature is the same in all directions: for small values it is the signal-to-noise ratio |mean|^2 / variance of
an unbiased rule. A bias counts as noise. grad J is estimated with `R - mean of the task's other rollouts` on other
batches than g_b, so that products of two estimates are unbiased.

The gradient of each step is sketched: per linear layer, inputs and output gradients are projected on random directions,
which leaves inner products unchanged in expectation. Embeddings and norms are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.credit_rules import ALWAYS, CASES, OWN, REALISTIC, RULES
from benchmarks.record import MISSED, RESULTS, ROOT, Figure, exit_with, fill_page, write
from benchmarks.sources import TRAINING, Work
from benchmarks.study import OTHER_TEAMS, RECIPE
from creditflow._utils.files import alone_in, write_whole
from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, load_recipe
from creditflow.credit import Assignment, CreditOptions, assign, make_threshold
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.data import Floats, Trajectory, TrajectoryBatch
from creditflow.engines.common.components import build_components
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import sample_trajectories
from creditflow.runs.step_files import read_step_file, write_step_file

MEASURES = (
    *TRAINING,
    "benchmarks/cases.py",
    "benchmarks/credit_rules.py",
    "benchmarks/credit_signal.py",
    "benchmarks/study.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
)
PAGE, COMMAND = ROOT / "docs" / "benchmarks" / "credit_rules.md", "python -m benchmarks.credit_signal"
NAME = "credit_signal"
BATCHES, TASKS, ROLLOUTS = 48, 8, 8
INVERTED = {"noisy, 20 %": 0.20, "noisy, 35 %": 0.35}
"""The share of inverted verdicts, by case; for the result files."""
WIDTH = 12
"""Random directions for the inputs and for the output gradients of a layer; a sketch has their product as its size."""
_KEY = 7
"""Added to a batch's number in the random keys of its rollouts."""
_AT_ONCE = 256
"""Steps of one backward pass."""


# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """The batches of one case, with the sketch of every step's gradient."""

    batches: Sequence[TrajectoryBatch]
    sketches: Sequence[Floats]
    """[S, D] sketches of the gradient of each step's log-probability, by batch."""


def recipe_of(case: str, *overrides: str) -> Recipe:
    """The recipe of a case."""
    return load_recipe(RECIPE, [*ALWAYS, *CASES[case], "data.seed=0", *overrides])


def record(work: Work, *, quick: bool) -> Mapping[str, Recording]:
    """Sample the batches of every team, and score them for every case. The folder of `work` keeps finished batches.

    `quick`: three batches.
    """
    folder, busy = work.folder, SystemExit(f"error: {work.folder}: another process records there")
    with alone_in(folder.parent, busy):
        return _record(tuple(CASES), 3 if quick else BATCHES, folder, Reporter())


def _record(cases: Sequence[str], batches: int, folder: Path, reporter: Reporter) -> Mapping[str, Recording]:
    teams = {case: team_of(case) for case in cases}
    by_team = {team: [case for case in cases if teams[case] == team] for team in dict.fromkeys(teams.values())}
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
    return {
        case: Recording(
            [read_step_file(folder / f"{case}-{b}.parquet").batch for b in range(batches)],
            [np.load(folder / f"{team}-{b}.npy").astype(np.float64) for b in range(batches)],
        )
        for case, team in teams.items()
    }


def team_of(case: str) -> str:
    """The case whose team and batches a case shares: they differ in scores alone."""
    return case if case in OTHER_TEAMS else "exact"


def _sample_missing(team: str, cases: Sequence[str], batches: int, folder: Path) -> None:
    """Sample the missing batches of a team; runs in a separate process."""
    torch.set_num_threads(1)
    sampler: _Sampler | None = None
    for b in range(batches):
        sketch, files = folder / f"{team}-{b}.npy", {case: folder / f"{case}-{b}.parquet" for case in cases}
        if not all(file.exists() for file in (sketch, *files.values())):
            sampler = sampler or _Sampler(team, cases)
            sampler.make(b, sketch, files)


class _Sampler:
    """Samples batches of one team and scores them for its cases."""

    def __init__(self, team: str, cases: Sequence[str]) -> None:
        recipe = recipe_of(team)
        torch.manual_seed(0)
        self.components = build_components(recipe)
        self.policy_set = PolicySet.for_rollouts(recipe)
        self.scorers = {case: build_components(recipe_of(case)) for case in cases}
        self.sketcher = Sketcher(next(iter(self.policy_set.policies.values())).model)

    def make(self, b: int, sketch: Path, files: Mapping[str, Path]) -> None:
        trajectories = asyncio.run(self._sample(b))
        for case, file in files.items():
            asyncio.run(self._score(case, trajectories))
            batch = TrajectoryBatch.from_trajectories(trajectories)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_step_file(file, b, batch, None)
        sketch_SD = self.sketcher(batch).astype(np.float32)

        def save(part: Path) -> None:
            with part.open("wb") as out:
                np.save(out, sketch_SD)

        write_whole(sketch, save)

    async def _sample(self, b: int) -> list[Trajectory]:
        tasks = [self.components.train_tasks[(b * TASKS + t) % len(self.components.train_tasks)] for t in range(TASKS)]
        async with self.components.rewards.open(self.policy_set.policies):
            return await sample_trajectories(self.components, self.policy_set, tasks, ROLLOUTS, 1.0, (0, _KEY + b))

    async def _score(self, case: str, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            trajectory.outcome, trajectory.outcomes = None, {}
            for step in trajectory.steps:
                step.scores = {}
        scorer = self.scorers[case]
        async with scorer.rewards.open(self.policy_set.policies):
            await scorer.rewards.score(trajectories)
        scorer.label(trajectories)


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

    def __call__(self, batch: TrajectoryBatch) -> Floats:
        """[S, D] the sketches of a batch's steps."""
        found = np.zeros((batch.n_steps, len(self.layers) * WIDTH**2))
        lengths_S = np.diff(batch.prompt_offsets) + np.diff(batch.token_offsets)
        for steps in np.array_split(np.argsort(lengths_S, kind="stable"), -(-batch.n_steps // _AT_ONCE)):
            found[steps] = self._of_steps(batch, steps)
        return found

    def _of_steps(self, batch: TrajectoryBatch, steps: np.ndarray) -> Floats:
        ids, mask, sampled = _padded(batch, steps)
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
                (logprobs * sampled[:, 1:]).sum().backward()
            finally:
                for hook in hooks:
                    hook.remove()
                self.model.zero_grad(set_to_none=True)
        return torch.cat([part.flatten(1) for part in parts], dim=1).double().numpy()


def _keep(inputs: dict[int, Tensor], at: int) -> Any:
    def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[at] = args[0].detach()

    return hook


def _project(inputs: dict[int, Tensor], parts: list[Tensor], at: int, of_input: Tensor, of_output: Tensor) -> Any:
    def hook(module: Any, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        parts[at] = torch.einsum("blo,bli->boi", grad_output[0].float() @ of_output, inputs[at].float() @ of_input)

    return hook


def _padded(batch: TrajectoryBatch, steps: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and the mask of sampled tokens, padded on the right."""
    rows = []
    for s in steps.tolist():
        prompt = batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]]
        part = slice(batch.token_offsets[s], batch.token_offsets[s + 1])
        rows.append((np.concatenate([prompt, batch.response_ids[part]]), len(prompt), batch.response_mask[part]))
    longest = max(len(ids) for ids, _, _ in rows)
    ids, mask, sampled = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
    for row, (tokens, prompt, chosen) in enumerate(rows):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : len(tokens)] = 1
        sampled[row, prompt : len(tokens)] = torch.from_numpy(np.asarray(chosen).astype(np.int64))
    return ids, mask, sampled


# ---- measuring -------------------------------------------------------------------------------------------------------


def options_of(case: str, overrides: Sequence[str]) -> CreditOptions:
    """The options of credit in a case under a rule's overrides."""
    return recipe_of(case, *overrides).config.algorithm


def assignments(recording: Recording, options: CreditOptions) -> Iterator[Assignment]:
    """The credit of each batch. Thresholds and fitted parts adapt from batch to batch, as in training."""
    threshold, history = make_threshold(options.propagation_threshold), History()
    for batch in recording.batches:
        assigned = assign(batch, options, threshold=threshold, history=history)
        threshold.update(batch_stats(assigned))
        history = assigned.history_after or history
        yield assigned


def gradients(recording: Recording, options: CreditOptions) -> Floats:
    """[B, D] the sketched gradient of each batch, per trajectory."""
    return np.array(
        [
            assigned.advantage_S @ sketch_SD / assigned.batch.n_trajectories
            for assigned, sketch_SD in zip(assignments(recording, options), recording.sketches, strict=True)
        ]
    )


UNBIASED = CreditOptions(propagation="identical", adv_estimator="rloo", group_by="task")
"""The options of an unbiased estimate of grad J."""


@dataclass(frozen=True)
class Signal:
    """The efficiency of a rule in a case, with its standard error."""

    efficiency: float
    error: float


def efficiency(gradient_BD: Floats, true_BD: Floats) -> Signal:
    """The efficiency of a rule's gradients, with a jackknife error over batches."""
    along_BB, squares_B, true_BB = gradient_BD @ true_BD.T, (gradient_BD**2).sum(axis=1), true_BD @ true_BD.T
    n = len(squares_B)

    def over(kept: np.ndarray) -> float:
        along, true = (_mean_of_pairs(matrix[np.ix_(kept, kept)]) for matrix in (along_BB, true_BB))
        return float(np.sign(along) * along**2 / (squares_B[kept].mean() * true))

    whole = over(np.arange(n))
    left_out = np.array([over(np.delete(np.arange(n), b)) for b in range(n)])
    return Signal(whole, float(np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())))


def _mean_of_pairs(matrix_BB: Floats) -> float:
    """The mean off the diagonal: products of estimates from different batches."""
    n = len(matrix_BB)
    return float((matrix_BB.sum() - np.trace(matrix_BB)) / (n * (n - 1)))


def measure(
    recordings: Mapping[str, Recording], rules: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, Signal]]:
    """Yield (case, rule, signal) for every pair."""
    for case, recording in recordings.items():
        true_BD = gradients(recording, UNBIASED)
        for name, overrides in rules.items():
            yield case, name, efficiency(gradients(recording, options_of(case, overrides)), true_BD)


# ---- report ----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Record the missing batches, measure every rule in every case, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three batches: shows that it runs, proves nothing")
    parser.add_argument("--table", action="store_true", help="write the page's table from the committed result file")
    given = parser.parse_args()
    if given.table:
        fill_page(PAGE, COMMAND, table_lines(json.loads((RESULTS / "credit_signal.json").read_text())["results"]))
        return 0
    torch.set_num_threads(1)
    began = time.monotonic()
    work = Work.begin(NAME, MEASURES, quick=given.quick)
    recordings = record(work, quick=given.quick)
    found: dict[str, dict[str, Signal]] = {rule: {} for rule in RULES}
    for case, rule, signal in measure(recordings, RULES):
        found[rule][case] = signal
    print("efficiency in %, with its standard error; (x) relative to own + outcome, mean over the cases but exact")
    print(" " * 26 + "".join(f"{case[:14]:>16}" for case in CASES) + f"{'(x)':>8}")
    for rule, by_case in found.items():
        cells = "".join(f"{100 * one.efficiency:9.2f} ±{100 * one.error:5.2f}" for one in by_case.values())
        print(f"{rule:26}{cells}{relative_efficiency(by_case, found[OWN]):8.2f}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    figures = [
        Figure(
            f"{rule}: efficiency relative to own + outcome, mean over the cases but exact",
            relative_efficiency(by_case, found[OWN]),
        )
        for rule, by_case in found.items()
    ]
    details = {
        rule: {case: {"efficiency": one.efficiency, "error": one.error} for case, one in by_case.items()}
        for rule, by_case in found.items()
    }
    if given.quick:
        print(f"{MISSED}: 0 of 0")
        return 0
    draw(RESULTS / "credit_signal.png", found)
    seconds = time.monotonic() - began
    facts = {"batches": BATCHES, "seconds": seconds, "inverted": INVERTED, "results": details}
    write("credit_signal", figures, ("creditflow", "torch", "numpy"), work.measured, facts)
    fill_page(PAGE, COMMAND, table_lines(details))
    print(f"{MISSED}: 0 of 0")
    return 0


def table_lines(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """The table of the page, from the results of the result file."""
    found = {
        rule: {case: Signal(one["efficiency"], one["error"]) for case, one in by_case.items()}
        for rule, by_case in results.items()
    }
    lines = [f"| rule | {' | '.join(CASES)} | relative |", f"|{' --- |' * (len(CASES) + 2)}"]
    for rule, by_case in found.items():
        cells = [f"{100 * by_case[case].efficiency:.1f} ± {100 * by_case[case].error:.1f}" for case in CASES]
        lines.append(f"| {rule} | {' | '.join(cells)} | {relative_efficiency(by_case, found[OWN]):.2f} |")
    return lines


def relative_efficiency(by_case: Mapping[str, Signal], of_own: Mapping[str, Signal]) -> float:
    """The mean over the realistic cases of a rule's efficiency relative to that of own + outcome."""
    return fmean(by_case[case].efficiency / of_own[case].efficiency for case in REALISTIC)


def draw(path: Path, found: Mapping[str, Mapping[str, Signal]]) -> None:
    """The efficiency of every rule, a panel for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rules = list(found)
    figure, panels = plt.subplots(1, len(CASES), figsize=(2.0 * len(CASES) + 2.4, 0.3 * len(rules) + 1.2), sharey=True)
    for panel, case in zip(panels, CASES, strict=True):
        values = [100 * found[rule][case].efficiency for rule in rules]
        errors = [100 * found[rule][case].error for rule in rules]
        colors = ["0.6" if rule == OWN else "#1f77b4" for rule in rules]
        panel.barh(range(len(rules)), values, xerr=errors, color=colors, error_kw={"linewidth": 0.8})
        panel.set_title(case, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rules)), rules)
    panels[0].invert_yaxis()
    figure.supxlabel("efficiency in % of the gain that one gradient step can make (grey: own + outcome)", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    exit_with(main)
