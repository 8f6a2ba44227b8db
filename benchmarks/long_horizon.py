"""Thirty tool calls under four rules of credit: `python -m benchmarks.long_horizon [--quick]`.

Runs `creditflow compare tool_chain` (each rule at its best learning rate on tasks of a third split;
`compare.values` in the recipe). Writes to `runs/long_horizon/`, reuses finished runs there, and computes from the step
files what pass@1 does not show. Takes about half an hour on two cores.

* Positions of wrong steps in the chain, in the last training steps' trajectories.
* Blame: negative advantage on steps with a right call, given the prompt, and on steps with a wrong call, and the share
  of wrong steps with a positive advantage. In the first training step: its trajectories are the same under every rule.
* Amplification: in trajectories with one wrong step, the share of later steps whose prompt differs because of it, for
  an error early in the chain, in its middle, and at its end; and the share of such trajectories that fail.

Targets: every decomposed rule has a higher pass@1 and a lower step error rate than `identical`, beyond the bootstrap's
95 % interval.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.record import RESULTS, Figure, compare, exit_with, quick_parser, show, write
from benchmarks.sources import TRAINING, Work
from creditflow._utils.loading import load_object
from creditflow.config.loading import find_recipe
from creditflow.data import Bools, Floats, Message, Task, Trajectory
from creditflow.reports.comparison_plot import COLOURS, STYLES
from creditflow.rollout import AgentSpec, ChatClient, ChatReply, Rollout, Sampling, Scheduler, run_rollout

MEASURES = (*TRAINING, "src/creditflow/recipes/tool_chain.py", "src/creditflow/recipes/tool_chain.yaml")
RULES = ("identical", "own", "discounted", "threshold")
SEEDS, LAST = 5, 5
SEARCHES = [0, 2, 4]
"""Positions of the chain's first three searches."""
THIRDS = ("first", "middle", "last")
COLUMNS = ["trajectory_id", "task", "index", "prompt", "sub_reward", "advantage", "outcome"]


def main() -> int:
    """Run, print, write `docs/results/long_horizon.json` and its figure; 1 if a number falls short."""
    quick = quick_parser(__doc__, "two training steps: shows that it runs, proves nothing").parse_args().quick
    work = Work.begin("long_horizon", MEASURES, quick=quick)
    folder = work.folder
    short = ("trainer.total_training_steps=2", "data.val_max_samples=64") if quick else ()
    compared = compare("tool_chain", "algorithm.propagation", RULES, 1 if quick else SEEDS, folder, *short)
    found = {rule: [looked_at(run.parent) for run in sorted((folder / rule).glob("seed*/run.json"))] for rule in RULES}
    figures = _figures(compared, found)
    missed = show(figures)
    if not quick:
        details = {"compared": compared, "by_rule": {rule: [run.to_dict() for run in found[rule]] for rule in RULES}}
        write("long_horizon", figures, ("creditflow", "torch", "transformers", "numpy"), work.measured, details)
        draw(RESULTS / "long_horizon.png", found)
    return int(missed)


# ---- measures from a run's step files -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutRecords:
    """N trajectories of K steps each."""

    wrong: Bools
    """[N, K] whether the call is wrong, given its prompt."""
    moved: Bools
    """[N, K] whether the prompt differs from its value after right steps only."""
    advantage: Floats
    """[N, K]"""
    failed: Bools
    """[N]"""


@dataclass(frozen=True)
class Look:
    """The measures of one run."""

    error_by_position: list[float]
    """Share of trajectories with a wrong step at each position, in the last training steps."""
    error_at_start: float
    """Mean error over the first three searches."""
    blame: dict[str, float]
    """`right`, `wrong`: mean negative advantage of right and of wrong steps; `praised`: the share of wrong steps with a
    positive advantage."""
    amplification: dict[str, dict[str, float]]
    """For an only error in each third of the chain: `trajectories`, the number of trajectories; `moved`, the share of
    later steps with a moved prompt; `failed`, the share of trajectories with a wrong outcome. NaN without
    trajectories."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def looked_at(run: Path) -> Look:
    """Compute the measures of a finished run of the recipe."""
    files = sorted((run / "steps").glob("*.parquet"))
    every = [trajectories_of(file) for file in files]
    first = every[0]
    blame_NK = np.maximum(0.0, -first.advantage)
    error_K = np.concatenate([trajectories.wrong for trajectories in every[-LAST:]]).mean(0)
    return Look(
        error_K.tolist(),
        float(error_K[SEARCHES].mean()),
        {
            "right": float(blame_NK[~first.wrong].mean()),
            "wrong": float(blame_NK[first.wrong].mean()),
            "praised": float((first.advantage[first.wrong] > 0).mean()),
        },
        amplification(every),
    )


def amplification(every: Sequence[RolloutRecords]) -> dict[str, dict[str, float]]:
    """The effect of a single error, by its position; see `Look.amplification`."""
    wrong, moved = (
        np.concatenate([getattr(trajectories, name) for trajectories in every]) for name in ("wrong", "moved")
    )
    failed, n_steps = np.concatenate([trajectories.failed for trajectories in every]), wrong.shape[1]
    only_one = (wrong.sum(1) == 1) & ~wrong[:, -1]  # an error in the last step can move nothing
    at = wrong.argmax(1)
    found = {}
    for k, name in enumerate(THIRDS):
        of = only_one & (at * len(THIRDS) // n_steps == k)
        n = int(of.sum())
        found[name] = {
            "trajectories": n,
            "moved": float(moved[of].sum() / (n_steps - 1 - at[of]).sum()) if n else math.nan,
            "failed": float(failed[of].mean()) if n else math.nan,
        }
    return found


def trajectories_of(file: Path) -> RolloutRecords:
    """Read the trajectories of one training step."""
    rows = pq.read_table(file, columns=COLUMNS).to_pydict()
    names = rows["trajectory_id"]
    n_steps = max(rows["index"]) + 1
    if len(names) % n_steps or rows["index"] != list(range(n_steps)) * (len(names) // n_steps):
        raise SystemExit(f"error: {file}: expected trajectories of {n_steps} steps each, in order")
    shape = (-1, n_steps)
    prompts = np.array([prompt.partition("\n")[2] for prompt in rows["prompt"]], dtype=object).reshape(shape)
    wanted = {task: right_prompts(task) for task in set(rows["task"])}
    tasks = rows["task"][::n_steps]
    return RolloutRecords(
        np.array(rows["sub_reward"]).reshape(shape) < 1,
        prompts != np.array([wanted[task] for task in tasks], dtype=object),
        np.array(rows["advantage"]).reshape(shape),
        np.array(rows["outcome"])[::n_steps] < 1,
    )


class Infallible(ChatClient):
    """A model that answers every prompt with the right call, from its agent's system prompt and its own prompt."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.signs = {verb: sign for sign, verbs in _of_recipe("VERBS").items() for verb in verbs}

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        """The right call for the prompt."""
        system, asked = (str(message["content"]) for message in messages)
        self.prompts.append(asked)
        agent = next(agent for agent, role in _of_recipe("ROLES").items() if role == system)
        if agent == "calculator":
            asked = " ".join(self.signs.get(word, word) for word in asked.split())
        verb = {"searcher": "search", "reader": "get", "calculator": "calc", "clerk": "put"}[agent]
        return ChatReply(f"{verb} {asked}", "stop")


def _of_recipe(name: str) -> Any:
    return load_object(f"tool_chain.py:{name}", find_recipe("tool_chain").parent, "benchmark")


def right_prompts(task: str) -> list[str]:
    """The prompts of a trajectory with right calls only. `task`: the JSON of a step file."""
    said = json.loads(task)
    rollout = Rollout(
        Task(said["data_source"], tuple(said["prompt"]), None, said["extra_info"]), "right", "right", (0,)
    )
    agents = {name: AgentSpec(system=role) for name, role in _of_recipe("ROLES").items()}

    model = Infallible()

    async def run_workflow() -> Trajectory:
        return await run_rollout(rollout, _of_recipe("solve"), agents, Scheduler({"default": model}), Sampling())

    trajectory = asyncio.run(run_workflow())
    wrong = [step for step in trajectory.steps if step.response != step.info["right"]]
    if trajectory.status != "ok" or wrong:
        raise RuntimeError(f"not every call is right: {wrong[:1] or trajectory.info}")
    return model.prompts


# ---- report ---------------------------------------------------------------------------------------------------------


def _figures(compared: dict[str, Any], found: dict[str, list[Look]]) -> list[Figure]:
    ends = {rule: compared["values"][rule] for rule in RULES}
    metrics = (("pass_at_1", "pass@1", 1), ("step_error_rate", "step error rate", -1))
    figures = []
    for rule in RULES[1:]:
        for metric, name, sign in metrics:
            low = min(sign * bound for bound in _difference(compared, rule, metric)["interval"] or [math.nan])
            what = f"{name}, {rule} better than identical, lower end of the 95 % interval"
            figures.append(Figure(what, 100 * low, 0.0, unit="points"))
    for rule in RULES:
        for metric, name, _ in metrics:
            end = ends[rule][metric]["after"]
            figures.append(Figure(f"{name}, {rule}", 100 * end["mean"], unit="%"))
        looks = found[rule]
        figures += [
            Figure.from_values(
                f"wrong steps praised, {rule}", [100 * look.blame["praised"] for look in looks], unit="%"
            ),
            Figure.from_values(
                f"blame of a wrong step / of a right one, {rule}",
                [look.blame["wrong"] / max(1e-12, look.blame["right"]) for look in looks],
                unit="x",
            ),
        ]
        for third in THIRDS:
            moved = [100 * look.amplification[third]["moved"] for look in looks]
            what = f"later steps moved by the only error, in the {third} third, {rule}"
            figures.append(Figure.from_values(what, [share for share in moved if not math.isnan(share)], unit="%"))
    return figures


def _difference(compared: dict[str, Any], rule: str, metric: str) -> dict[str, Any]:
    pairs = {(pair["value"], pair["against"]): pair for pair in compared["differences"]}
    found: dict[str, Any] = pairs[rule, "identical"][metric]
    return found


def draw(path: Path, found: dict[str, list[Look]]) -> None:
    """Draw errors by position, blame and amplification."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (positions, blame, spread) = pyplot.subplots(
        1, 3, figsize=(15, 4.8), width_ratios=(1.5, 1, 1), layout="constrained"
    )
    n_seeds = len(found[RULES[0]])
    figure.suptitle(f"tool_chain: 30 tool calls, each rule at its own learning rate, {n_seeds} seeds")
    width = 0.8 / len(RULES)
    for i, rule in enumerate(RULES):
        colour, style, looks = COLOURS[i], STYLES[i % len(STYLES)], found[rule]
        by_run = np.array([look.error_by_position for look in looks])
        steps = np.arange(1, by_run.shape[1] + 1)
        positions.plot(steps, by_run.mean(0), style, color=colour, label=rule, linewidth=2)
        positions.fill_between(steps, by_run.min(0), by_run.max(0), color=colour, alpha=0.12, linewidth=0)
        bars = {
            blame: [[look.blame["right"], look.blame["wrong"]] for look in looks],
            spread: [[look.amplification[third]["moved"] for third in THIRDS] for look in looks],
        }
        for axes, of_run in bars.items():
            values = np.array(of_run)
            at = np.arange(values.shape[1]) + (i - (len(RULES) - 1) / 2) * width
            ends = np.abs(np.stack([np.nanmin(values, 0), np.nanmax(values, 0)]) - np.nanmean(values, 0))
            axes.bar(at, np.nanmean(values, 0), width, color=colour, label=rule, yerr=ends, ecolor="#888888", capsize=2)
    positions.set(
        title=f"steps that err, last {LAST} training steps",
        xlabel="position in the chain",
        ylabel="share of trajectories",
    )
    positions.yaxis.set_major_formatter(PercentFormatter(1))
    blame.set(title="blame a step gets, first training step", ylabel="negative advantage, mean over steps")
    blame.set_xticks([0, 1], ["right steps", "wrong steps"])
    spread.set(title="amplification: trajectories with one error", ylabel="share of later steps with another prompt")
    spread.yaxis.set_major_formatter(PercentFormatter(1))
    spread.set_xticks(range(len(THIRDS)), [f"error in the\n{third} third" for third in THIRDS])
    for axes in (positions, blame, spread):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
    positions.legend(title="credit")
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


if __name__ == "__main__":
    exit_with(main)
