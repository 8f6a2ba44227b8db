"""SmolLM2-135M under rules of credit: `python -m benchmarks.real_model [--quick] [--hours H] [--only TEXT] [--table]`.

`sums_team` under six arms, each at the best of three learning rates, three seeds; `logic_team` under two arms; two
ablations of `sums_team` (a fifth of the sub-rewards wrong; one agent unscored) under four arms, two seeds each; and
one agent alone on the tasks of `sums_team`, with five times as many steps, for about as many tokens. About seven hours
on two cores.

Rates are chosen on one tuning seed at half length, on tasks that no other run is evaluated on. Rates of the other cases
are those of `sums_team`. Each finished run is kept as `docs/results/real_model/<run>.json`, so that a fresh clone
builds the table without training (`--table`), and repeats single runs (`--only sums-own-seed0 --again`). Interrupted
runs go on from their newest checkpoint. Writes `docs/results/real_model.json`, and a figure for each case of `DRAWN`;
`--table` leaves the result file, with its date and processor, as it is.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bootstrap import arm_differences
from benchmarks.record import RESULTS, ROOT, Figure, exit_with, fill_page, processor, quick_parser, show, write
from benchmarks.sources import TRAINING, hashes
from creditflow._utils.files import write_whole
from creditflow._utils.progress import Reporter
from creditflow.engines.common.checkpoints import saved_steps
from creditflow.monitoring.evaluation import Evaluation
from creditflow.reports.comparison_plot import draw_comparison
from creditflow.reports.tables import (
    comparison_table,
    comparison_title,
    difference_table,
    mean_and_spread,
)
from creditflow.reports.tables import show as show_table
from creditflow.reports.text import counted, number
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.comparison.jobs import Job, run_jobs
from creditflow.studies.comparison.results import METRICS, ArmDifference, ArmResult, RunResult, summary

MEASURES = (
    *TRAINING,
    "src/creditflow/recipes/sums_team.py",
    "src/creditflow/recipes/sums_team.yaml",
    "src/creditflow/recipes/sums_single.yaml",
    "src/creditflow/recipes/logic_team.py",
    "src/creditflow/recipes/logic_team.yaml",
    "src/creditflow/plugins/gym/tasks.py",
)
KEPT, PAGE = RESULTS / "real_model", ROOT / "docs" / "benchmarks" / "real_model.md"
COMMAND = "python -m benchmarks.real_model"
STEPS, TUNING_SEED = 16, 100
RATES = ("1.0e-5", "2.0e-5", "4.0e-5")
TASKS = 200
"""Held-out problems of an evaluation."""
ALWAYS = (
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
    f"data.val_max_samples={TASKS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=4",
    "trainer.max_actor_ckpt_to_keep=1",
    "trainer.num_threads=1",
    "guard.enable=false",
)
"""Settings of all runs. The guard would change the credit of an arm."""
QUICK = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.val_max_samples=4")
ARMS = {
    "identical": ("algorithm.propagation=identical",),
    "mean": ("algorithm.propagation={rule: identical, shared_reward: outcome_plus_mean_sub_reward}",),
    "own": ("algorithm.propagation=own",),
    "threshold": ("algorithm.propagation=threshold", "algorithm.outcome_to=answer"),
    "calibrated": ("algorithm.preset=calibrated",),
    "posterior": ("algorithm.propagation=posterior",),
}
"""`identical`: the outcome to every step. `mean`: outcome + mean sub-reward of the trajectory to every step. `own`:
own sub-reward + outcome. `threshold`: own sub-reward, and the outcome from the answer upstream through open gates.
`calibrated`: own sub-reward with a calibrated weight, a charge for probable harm, and the outcome.
`posterior`: the probability that the step was right, given all scores and the outcome."""
WORDS = {
    "identical": "`identical`: the shared reward",
    "mean": "`identical`, outcome + mean sub-reward",
    "own": "`own` (default): own score + outcome",
    "threshold": "`threshold`: own score + gated outcome",
    "calibrated": "`calibrated`: calibrated score + charge for harm + outcome",
    "posterior": "`posterior`: probability that the step was right",
}
"""The arms in the README."""


@dataclass(frozen=True)
class Case:
    """A recipe with its settings, and the arms and seeds to run."""

    name: str
    recipe: str
    settings: tuple[str, ...] = ()
    arms: tuple[str, ...] = ("identical", "own")
    seeds: int = 3
    steps: int = STEPS
    samples: int = 1
    """Sampled rollouts of each held-out problem."""
    identical_of: str = ""
    """The case with the same runs of `identical`, a rule that pays no sub-reward; empty: none."""
    exact: bool = True
    """Whether sub-rewards are exact. If not, evaluations measure no step errors: they use the same functions."""

    def run(self, arm: str, rate: str, seed: int) -> Run:
        """The run of an arm."""
        case = CASE[self.identical_of] if arm == "identical" and self.identical_of else self
        return Run(case, arm, rate, seed)


_ABLATED = ("identical", "own", "calibrated", "posterior")
CASES = (
    Case("sums", "sums_team", arms=tuple(ARMS)),
    Case("single", "sums_single", arms=("identical",), steps=5 * STEPS),
    Case("logic", "logic_team", samples=4),  # it has 56 held-out problems
    Case("flipped", "sums_team", ("recipe.flip=0.2",), _ABLATED, seeds=2, identical_of="sums", exact=False),
    Case("unscored", "sums_team", ("recipe.planner_weight=0",), _ABLATED, seeds=2, identical_of="sums"),
)
CASE = {case.name: case for case in CASES}
DRAWN = ("sums", "logic")
"""The cases with a figure, `docs/results/real_model_<case>.png`."""


@dataclass(frozen=True)
class Run:
    """One training run, or (without an arm) the evaluation of the initial model."""

    case: Case
    arm: str | None
    rate: str | None
    seed: int
    tuning: bool = False
    quick: bool = False

    @property
    def name(self) -> str:
        """The name of the run's files."""
        middle = "before" if self.arm is None else self.arm
        return f"{self.case.name}-{middle}-" + (f"rate{self.rate}" if self.tuning else f"seed{self.seed}")

    @property
    def steps(self) -> int:
        """Training steps."""
        return 0 if self.arm is None else 1 if self.quick else self.case.steps // (2 if self.tuning else 1)

    @property
    def settings(self) -> list[str]:
        """All overrides but the folder."""
        own = [*self.case.settings, *ALWAYS, *(QUICK if self.quick else ()), f"data.seed={self.seed}"]
        if self.case.samples > 1:
            own.append(f"actor_rollout_ref.rollout.val_kwargs.n={self.case.samples}")
        if self.arm is not None:
            own += [*ARMS[self.arm], f"actor_rollout_ref.actor.optim.lr={self.rate}"]
            own += [f"trainer.total_training_steps={self.steps}"]
        return [*own, *(["recipe.val_split=tune"] if self.tuning else [])]

    @property
    def kept(self) -> Path:
        """The committed file of the finished run."""
        return KEPT / f"{self.name}.json"

    def folder(self, below: Path) -> Path:
        """The folder of the run while it is in work."""
        return below / self.name

    def job(self, below: Path, more: Sequence[str]) -> Job:
        """The process that trains, or goes on training. `more`: overrides of this machine."""
        folder, metrics = self.folder(below), self.folder(below) / "metrics.jsonl"
        command = [sys.executable, "-m", "creditflow", "eval" if self.arm is None else "train", self.case.recipe]
        command += [*self.settings, *more]
        command += ["--json", str(folder / "evaluation.json")] if self.arm is None else []
        command += [] if self.arm is None else [f"trainer.default_local_dir={folder}"]

        def done() -> int:
            return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

        return Job(self.name, command, below / f"{self.name}.log", self.steps + 1, done)

    def record(self, below: Path) -> dict[str, Any]:
        """The content of the committed file. Raises FileNotFoundError if the run is not finished."""
        folder = self.folder(below)
        evaluation = json.loads((folder / "evaluation.json").read_text())
        rows = [row for row in read_metrics(folder) if row["step"] > 0] if self.arm is not None else []

        def total(metric: str) -> float:
            return sum(float(row[metric]) for row in rows)

        facts = json.loads((folder / "run.json").read_text()) if self.arm is not None else {}
        return {
            "run": self.name,
            "settings": self.settings,
            "steps": self.steps,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "processor": processor(),
            "device": facts.get("device", "cpu"),
            "versions": facts.get("versions", {}),
            "measured": hashes(MEASURES),
            "train_pass_at_1": [row["train/pass_at_1"] for row in rows],
            "tokens": total("rollout/tokens"),
            "response_tokens": total("rollout/response_tokens"),
            "processor_s": total("timing/processor_s"),
            "step_s": total("timing/step_s"),
            "evaluation": evaluation,
        }


@dataclass(frozen=True)
class Kept:
    """A committed run."""

    run: Run
    content: dict[str, Any]

    @cached_property
    def evaluation(self) -> Evaluation:
        """Its last evaluation."""
        return Evaluation.from_json(json.dumps(self.content["evaluation"]), str(self.run.kept))


def read(run: Run) -> Kept | None:
    """Read a committed run; None if it is missing."""
    return Kept(run, json.loads(run.kept.read_text())) if run.kept.exists() else None


# ---- runs ----------------------------------------------------------------------------------------------------------


def tuning_runs() -> list[Run]:
    """The runs that choose the rates."""
    return [Run(CASE["sums"], arm, rate, TUNING_SEED, tuning=True) for rate in RATES for arm in ARMS]


def best_rates() -> dict[str, str]:
    """The rate with the highest pass@1 after tuning, for each arm whose tuning runs are finished.

    Raises LookupError without any.
    """
    rates = {}
    for arm in ARMS:
        kept = [read(run) for run in tuning_runs() if run.arm == arm]
        if any(one is None for one in kept):
            print(f"{arm} is left out: its tuning runs are not finished")
            continue
        best = max((one for one in kept if one), key=lambda one: one.evaluation.metrics["pass_at_1"])
        assert best.run.rate is not None
        rates[arm] = best.run.rate
    if not rates:
        raise LookupError("no arm has finished its tuning runs")
    return rates


def main_runs(rates: dict[str, str]) -> list[Run]:
    """All other runs, seeds in the outer loop, so that an interrupted study is balanced."""
    runs = [Run(case, None, None, 0) for case in CASES if not case.settings]
    for seed in range(max(case.seeds for case in CASES)):
        runs += [
            case.run(arm, rates[arm], seed) for case in CASES if seed < case.seeds for arm in case.arms if arm in rates
        ]
    return list(dict.fromkeys(runs))


def train(
    runs: Sequence[Run], below: Path, jobs: int, until: float, more: Sequence[str] = (), *, again: bool = False
) -> None:
    """Finish `runs`, `jobs` at a time; begin none after `until`. Raises RuntimeError if one fails.

    `again`: also those that are kept already, from their beginning.
    """
    waiting = [run for run in runs if again or not run.kept.exists()]
    for run in waiting if again else ():
        shutil.rmtree(run.folder(below), ignore_errors=True)
    print(f"{len(waiting)} of {len(runs)} runs are to be done", flush=True)
    while waiting and time.monotonic() < until:
        # A few at a time, so that each finished run is kept soon.
        some, waiting = waiting[:jobs], waiting[jobs:]
        for run in some:
            run.folder(below).parent.mkdir(parents=True, exist_ok=True)
        failures = run_jobs([run.job(below, more) for run in some], jobs, Reporter(), "runs")
        failed = [job.name for job in failures]
        for run in some:
            if run.name not in failed:  # its folder may hold a finished run of other settings
                keep(run, below)
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed")


def keep(run: Run, below: Path) -> None:
    """Write the committed file and remove the run's checkpoints."""
    content = json.dumps(run.record(below)) + "\n"
    run.kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(run.kept, lambda path: path.write_text(content))
    for step in saved_steps(run.folder(below)):
        shutil.rmtree(run.folder(below) / "checkpoints" / f"global_step_{step}")


# ---- table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseResult:
    """The finished seeds of a case."""

    case: Case
    arms: list[ArmResult]
    kept: dict[str, list[Kept]]
    """The runs of each arm, in the order of the seeds."""

    @classmethod
    def collect(cls, case: Case, rates: dict[str, str]) -> CaseResult | None:
        """Read the committed runs of the seeds that every arm has, apart from arms without runs; None without any."""
        before = read(Run(next(one for one in CASES if one.recipe == case.recipe), None, None, 0))
        by_arm = {
            arm: runs
            for arm in case.arms
            if arm in rates and any(runs := [read(case.run(arm, rates[arm], seed)) for seed in range(case.seeds)])
        }
        complete = [s for s in range(case.seeds) if all(runs[s] is not None for runs in by_arm.values())]
        if before is None or not complete:
            return None
        kept = {arm: [run for s in complete if (run := runs[s]) is not None] for arm, runs in by_arm.items()}
        arms = [
            ArmResult(
                arm,
                [before.evaluation] * len(runs),
                [RunResult(run.evaluation, run.content["train_pass_at_1"], run.content["processor_s"]) for run in runs],
            )
            for arm, runs in kept.items()
        ]
        return cls(case, arms, kept)

    def figures(self) -> Iterator[Figure]:
        """pass@1 of each arm, and its difference to `identical` with the 95 % interval."""
        for arm in self.arms:
            for metric, words in (("pass_at_1", "sampled"), ("pass_at_1_greedy", "greedy")):
                values = [100 * value for value in arm.after(metric)]
                yield Figure(
                    f"{self.case.name}: pass@1 {words}, {arm.name}",
                    fmean(values),
                    unit="%",
                    spread=(min(values), max(values)),
                )
        for pair in self.differences:
            for metric, words in (("pass_at_1", "sampled"), ("pass_at_1_greedy", "greedy")):
                found = pair.by_metric[metric]
                yield Figure(
                    f"{self.case.name}: pass@1 {words}, {pair.name} - {pair.against} (95 % interval)",
                    100 * found.mean,
                    unit="points",
                    spread=(100 * found.low, 100 * found.high),
                )

    def to_dict(self) -> dict[str, Any]:
        """Per-arm means for `real_model.json`."""
        found = summary("arm", self.arms, self.differences)
        for arm, runs in self.kept.items():
            found["values"][arm] |= {
                "rate": runs[0].run.rate,
                "devices": sorted({run.content["device"] for run in runs}),
                **{
                    name: fmean(run.content[name] for run in runs)
                    for name in ("tokens", "response_tokens", "processor_s")
                },
            }
        return {"recipe": self.case.recipe, "settings": list(self.case.settings), **found}

    def show(self) -> None:
        """Print the tables of this case."""
        seeds = len(self.arms[0].runs)
        title = comparison_title(f"{self.case.name} ({self.case.recipe})", {self.case.steps})
        title = f"{title}, on {self.problems} tasks, {counted(seeds, 'seed')}; train seconds are of a processor"
        show_table(title, comparison_table(self.arms))
        if pairs := self.differences:
            show_table(f"differences, with bootstrap intervals over {seeds} seeds and tasks", difference_table(pairs))
        if not self.case.exact:
            print(f"{self.case.name}: its step errors are those of wrong sub-rewards, and cannot be compared")

    def lines(self) -> Iterator[str]:
        """The tables of this case in Markdown."""
        seeds = len(self.arms[0].runs)
        yield ""
        samples = "" if self.case.samples == 1 else f" x {self.case.samples} samples"
        about = f"{counted(seeds, 'seed')}, {self.problems} held-out problems{samples}"
        yield f"**{self.case.name}** (`{self.case.recipe}`{self._settings()}), {about}"
        yield ""
        header = ["arm", "rate", *(f"{name} before | after" for name in self._metrics), "tokens", "processor minutes"]
        yield f"| {' | '.join(header)} |"
        yield "| --- " * (len(header) + len(self._metrics)) + "|"
        for arm in self.arms:
            kept = self.kept[arm.name]
            cells = [
                cell
                for metric in self._metrics.values()
                for cell in (number(arm.before_mean(metric)), mean_and_spread(arm.after(metric)))
            ]
            tokens, minutes = (fmean(run.content[key] for run in kept) for key in ("tokens", "processor_s"))
            cells += [f"{tokens:,.0f}", f"{minutes / 60:.0f}"]
            yield f"| `{arm.name}` | {kept[0].run.rate} | {' | '.join(cells)} |"
        pairs = self.differences
        if not pairs:
            return
        yield ""
        yield f"| difference | {' | '.join(self._metrics)} |"
        yield "| --- " * (1 + len(self._metrics)) + "|"
        for pair in pairs:
            found = [pair.by_metric[metric] for metric in self._metrics.values()]
            cells = [
                f"{number(d.mean, signed=True)} [{number(d.low, signed=True)}, {number(d.high, signed=True)}]"
                for d in found
            ]
            yield f"| `{pair.name}` - `{pair.against}` | {' | '.join(cells)} |"

    def summary_lines(self) -> Iterator[str]:
        """A short table in Markdown, for the README: each arm beside `identical`, and how it was measured."""
        metrics = ("pass_at_1", "pass_at_1_greedy", "step_error_rate")
        pairs = [pair for pair in self.differences if pair.against == self.arms[0].name]
        above = {pair.name: pair.by_metric["pass_at_1"] for pair in pairs}
        yield "| credit | pass@1 | above `identical`, points | greedy pass@1 | step errors |"
        yield "| --- | --- | --- | --- | --- |"
        before = [_share(self.arms[0].before_mean(metric)) for metric in metrics]
        yield f"| before training | {before[0]} | | {before[1]} | {before[2]} |"
        for arm in self.arms:
            after = [_share(fmean(arm.after(metric))) for metric in metrics]
            d = above.get(arm.name)
            points = "" if d is None else f"{100 * d.mean:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}] "
            yield f"| {WORDS[arm.name]} | {after[0]} | {points}| {after[1]} | {after[2]} |"
        minutes = fmean(run.content["processor_s"] for runs in self.kept.values() for run in runs) / 60
        yield ""
        seeds = counted(len(self.arms[0].runs), "seed")
        yield f"Means over {seeds} on {TASKS} problems that are not in the training set,"
        yield f"with 95 % intervals; {self.case.steps} training steps take {minutes:.0f} minutes of one core"
        yield "([results](docs/results/real_model.json))."

    @cached_property
    def differences(self) -> list[ArmDifference]:
        """Every arm against `identical`, and the arms with sub-rewards against `own`."""
        return arm_differences(self.arms, [("calibrated", "own")])

    @property
    def problems(self) -> int:
        """The number of held-out problems."""
        return len(self.arms[0].runs[0].after.sampled)

    @property
    def _metrics(self) -> dict[str, str]:
        """The metrics of the tables, by heading. A single agent has no sub-rewards, so no step errors."""
        named = dict(zip(("pass@1", "greedy pass@1", "step errors"), METRICS, strict=True))
        if not self.case.exact or math.isnan(self.arms[0].before_mean("step_error_rate")):
            del named["step errors"]
        return named

    def _settings(self) -> str:
        return "".join(f", `{setting}`" for setting in self.case.settings)


def _share(value: float) -> str:
    """A share as in the other tables of the README."""
    return number(value).replace("0.", ".", 1)


def write_results(rates: dict[str, str], *, pages_only: bool = False) -> None:
    """Print the tables of the finished runs, fill the pages with them, and draw the figures.

    The result file is written too, unless `pages_only`: its date and processor are those of the last training.
    """
    cases = [found for case in CASES if (found := CaseResult.collect(case, rates)) is not None]
    if not cases:
        print("no case has a finished seed in every arm yet")
        return
    for case in cases:
        case.show()
    if not pages_only:
        figures = [figure for case in cases for figure in case.figures()]
        measured = next(iter(cases[0].kept.values()))[0].content["measured"]
        by_case = {one.case.name: one.to_dict() for one in cases}
        details = {"steps": STEPS, "tasks": TASKS, "rates": rates, "cases": by_case}
        write("real_model", figures, ("creditflow", "torch", "transformers", "numpy"), measured, details)
    fill_page(PAGE, COMMAND, [line for case in cases for line in case.lines()])
    fill_page(ROOT / "README.md", COMMAND, list(cases[0].summary_lines()))
    for one in cases:
        if one.case.name in DRAWN:
            title = f"SmolLM2-135M, {one.case.recipe}, {one.case.steps} steps"
            draw_comparison(RESULTS / f"real_model_{one.case.name}.png", title, one.arms)


def main() -> int:
    """Train the missing runs, print the tables, write the result file and the figures."""
    parser = quick_parser(__doc__, "one step of two arms: shows that it runs, proves nothing")
    parser.add_argument("--hours", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--model", help="a converted folder of the model; default: the recipe's, converted once")
    parser.add_argument("--only", default="", help="only runs with this text in their name")
    parser.add_argument("--again", action="store_true", help="repeat the finished runs that --only names")
    parser.add_argument("--table", action="store_true", help="train nothing: pages and figures from the committed runs")
    given = parser.parse_args()
    if given.again and not given.only:
        parser.error("--again: expected --only with it, which names the runs to repeat")
    more = [f"actor_rollout_ref.model.path={given.model}"] if given.model else []
    if given.quick:
        return quick(given.jobs, more)
    until, below = time.monotonic() + 3600 * given.hours, ROOT / "runs" / "real_model"
    if not given.table:
        tuning = [run for run in tuning_runs() if given.only in run.name]
        train(tuning, below, given.jobs, until, more, again=given.again)
    try:
        rates = best_rates()
    except LookupError as error:
        print(f"no table yet: {error}")
        return 0
    if not given.table:
        runs = [run for run in main_runs(rates) if given.only in run.name]
        train(runs, below, given.jobs, until, more, again=given.again)
    write_results(rates, pages_only=given.table)
    return 0


def quick(jobs: int, more: Sequence[str]) -> int:
    """Run one step of two arms, and the first evaluation, in a separate folder."""
    below = ROOT / "runs" / "real_model-quick"
    shutil.rmtree(below, ignore_errors=True)
    case = CASE["sums"]
    runs = [Run(case, arm, RATES[0], 0, quick=True) for arm in case.arms[:2]]
    failures = run_jobs([run.job(below, more) for run in runs], jobs, Reporter(), "runs")
    if failures:
        raise RuntimeError(f"failed: {', '.join(job.name for job in failures)}; the reasons are above")
    records = [run.record(below) for run in runs]
    figures = [
        Figure(f"{record['run']}: {name}", record[name], unit=unit)
        for record in records
        for name, unit in (("tokens", ""), ("processor_s", "s"), ("step_s", "s"))
    ]
    return int(show(figures))


if __name__ == "__main__":
    exit_with(main)
