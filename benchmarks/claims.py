"""Measure the project's claims: `python -m benchmarks.claims [--tune] [--quick]`, or `make claims`.

Trains `arithmetic_chain` under five rules of credit, at 13 turns (10 seeds) and at 30 (5 seeds). All rules share the
warm start, the tasks, the number of rollouts and updates, the strata and the loss; each rule has the best of three
learning rates, which `--tune` chooses on two separate seeds and separate tasks (`docs/results/rates.json`). The last
checkpoint is evaluated on 2,000 tasks (1,000 at 30 turns) held out from training and tuning, sampled and greedy. Then
it measures the blame for errors in a chain of 30 steps, the cost of credit, the memory that LoRA saves, and the effect
of the guard's fallback.

Writes `docs/results/claims.json` and the table of `docs/benchmarks/claims.md`. Takes at most an hour on two cores
(`--tune`: three quarters of an hour more). Writes to `runs/claims/` and reuses finished runs there. Exits with 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.guarded import runs_of
from benchmarks.record import RESULTS, ROOT, Figure, exit_with, fill_page, show, write
from benchmarks.runs import Run, finish
from benchmarks.simulation import Chain, amplification, draw, moved_outputs
from benchmarks.sources import TRAINING, Work
from benchmarks.synthetic import chain_batch
from creditflow.config.shipped import find_recipe
from creditflow.credit import CreditOptions, assign
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.comparison.bootstrap import Difference, paired_difference
from creditflow.studies.comparison.results import ArmResult

MEASURES = (
    *TRAINING,
    "src/creditflow/monitoring/guard.py",
    "src/creditflow/monitoring/guard_rules",
    "benchmarks/simulation.py",
    "benchmarks/cases.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
    "src/creditflow/recipes/arithmetic_chain_long.yaml",
)
FIRST_SEED, TUNING_SEEDS = 1000, (100, 101)
UNSEEN = "recipe.val_split=claims"
"""Seeds and tasks that no other experiment used."""
RATES = ("1.5e-4", "3.0e-4", "6.0e-4")
"""The range includes the best rates found before: 2e-4 for `identical` and 6e-4 for `threshold`."""
RATES_FILE = RESULTS / "rates.json"
PAGE = ROOT / "docs" / "benchmarks" / "claims.md"
GATED = "threshold"
"""The rule with gates."""
ARMS: dict[str, tuple[str, ...]] = {
    "identical": ("algorithm.propagation=identical",),
    "identical, mean sub-reward": (
        "algorithm.propagation=identical",
        "algorithm.shared_reward=outcome_plus_mean_sub_reward",
    ),
    "none": ("algorithm.propagation=none",),
    "discounted": ("algorithm.propagation=discounted",),
    GATED: (),
}


@dataclass(frozen=True)
class Setting:
    """One comparison of the arms."""

    recipe: str
    seeds: int
    tasks: int
    overrides: tuple[str, ...]


SETTINGS = {
    "13 turns": Setting("arithmetic_chain", 10, 2000, ("trainer.total_training_steps=20",)),
    "30 turns": Setting(
        "arithmetic_chain_long", 5, 1000, ("trainer.total_training_steps=16", "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    ),
}  # fmt: skip
ALWAYS = ("trainer.test_freq=-1", "reward.backend=inline", "guard.enable=false")


# ---- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claims:
    """The runs' folder and their settings."""

    work: Work
    settings: dict[str, Setting]
    short: tuple[str, ...] = ()

    def _run(self, name: str, arm: str, seed: int, rate: str, under: str, *more: str) -> Run:
        setting = self.settings[name]
        folder = self.work.folder / under / name.replace(" ", "_") / arm.replace(", ", "_").replace(" ", "_")
        options = (
            *ALWAYS,
            *setting.overrides,
            *ARMS[arm],
            f"actor_rollout_ref.actor.optim.lr={rate}",
            *more,
            *self.short,
        )
        return Run(find_recipe(setting.recipe), options, folder / f"seed{seed}", seed)

    def before(self, name: str) -> Run:
        """An evaluation of the warm start."""
        steps = "trainer.total_training_steps=1"
        tasks = f"recipe.val_tasks={self.settings[name].tasks}"
        return self._run(name, "none", FIRST_SEED, "1.0e-12", "before", UNSEEN, tasks, steps)

    def tuning(self, name: str, arm: str, rate: str, seed: int) -> Run:
        """A tuning run, evaluated on 256 tasks of a split that is never reported."""
        return self._run(name, arm, seed, rate, f"tuning/{rate}", "recipe.val_split=tune", "recipe.val_tasks=256")

    def final(self, name: str, arm: str, seed: int) -> Run:
        """A run of the reported results."""
        return self._run(
            name, arm, seed, self.rate(name, arm), "runs", UNSEEN, f"recipe.val_tasks={self.settings[name].tasks}"
        )

    def rate(self, name: str, arm: str) -> str:
        """The learning rate of an arm, as chosen by `--tune`."""
        return RATES[0] if self.short else chosen_rates()[name][arm]

    def seeds(self, name: str) -> range:
        """The seeds of a setting."""
        return range(FIRST_SEED, FIRST_SEED + self.settings[name].seeds)

    def result(self, name: str, arm: str) -> ArmResult:
        """The results of all seeds of an arm."""
        return ArmResult(arm, [], [self.final(name, arm, seed).result() for seed in self.seeds(name)])


def chosen_rates() -> dict[str, dict[str, str]]:
    """The learning rates by setting and arm."""
    if not RATES_FILE.exists():
        raise SystemExit(f"error: {RATES_FILE} is not there; first: python -m benchmarks.claims --tune")
    found: dict[str, dict[str, str]] = json.loads(RATES_FILE.read_text())["chosen"]
    return found


def tune(claims: Claims) -> None:
    """Choose and write the learning rates."""
    rows = list(itertools.product(claims.settings, ARMS, RATES))
    finish([claims.tuning(*row, seed) for seed in TUNING_SEEDS for row in rows], "tuning")
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for name, arm, rate in rows:
        values = [claims.tuning(name, arm, rate, seed).result().after.metrics["pass_at_1"] for seed in TUNING_SEEDS]
        scores.setdefault(name, {}).setdefault(arm, {})[rate] = mean(values)
    chosen = {name: {arm: max(by, key=lambda r: by[r]) for arm, by in arms.items()} for name, arms in scores.items()}
    what = [
        Figure(f"{name}, {arm}: pass@1 on tuning tasks at {rate}", value)
        for name, arms in scores.items()
        for arm, by in arms.items()
        for rate, value in by.items()
    ]
    show(what)
    details = {"command": "python -m benchmarks.claims --tune", "chosen": chosen}
    write("rates", what, ("creditflow", "torch"), claims.work.measured, details)


# ---- measurements --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run, print, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="choose the learning rates, and no more")
    parser.add_argument("--quick", action="store_true", help="one training step: shows that it runs, proves nothing")
    given = parser.parse_args()
    work = Work.begin("claims", MEASURES, quick=given.quick)
    claims = Claims(work, SETTINGS)
    if given.quick:
        few = {name: replace(setting, seeds=1, tasks=16) for name, setting in SETTINGS.items()}
        claims = Claims(work, few, ("trainer.total_training_steps=1",))
    elif given.tune:
        tune(claims)
        return 0
    rows = [*trained(claims), *simulated(), *measured(), *fallen_back(claims)]
    figures = [figure for row in rows for figure in row.figures]
    missed = show(figures)
    if not given.quick:
        packages = ("creditflow", "torch", "transformers", "numpy")
        write("claims", figures, packages, work.measured, {"comparisons": compared(claims)})
        fill(PAGE, rows)
    return int(missed)


@dataclass(frozen=True)
class Row:
    """One row of the table: description, measured value, figures and claimed value."""

    what: str
    measured: str
    figures: tuple[Figure, ...]
    claimed: str = ""

    @property
    def to_hold(self) -> str:
        """The targets of its figures, and whether they hold."""
        held = [figure for figure in self.figures if figure.hold is not None]
        bounds = [f"{'at most' if figure.at_most else 'at least'} {figure.hold:g}" for figure in held]
        verdict = "**falls short**" if any(figure.short for figure in held) else "holds"
        return f"{', '.join(bounds)}: {verdict}" if held else ""


def trained(claims: Claims) -> Iterable[Row]:
    """The comparisons of trained runs."""
    finals = [
        claims.final(name, arm, seed)
        for name in claims.settings
        for seed, arm in itertools.product(claims.seeds(name), ARMS)
    ]
    finish([*map(claims.before, claims.settings), *finals], "claims")
    for name in claims.settings:
        arms = {arm: claims.result(name, arm) for arm in ARMS}
        for metric, word, hold in (("pass_at_1", "pass@1", 0.05), ("pass_at_1_greedy", "pass@1, greedy", None)):
            for base in ("identical", "none", "discounted"):
                gain = difference(arms[GATED], arms[base], metric)
                least = hold if base == "identical" else None
                what = f"{name}: {word}, {GATED} - {base}"
                yield Row(
                    f"{name}: {word} of `{GATED}` above `{base}`, points",
                    f"{points(gain.mean)} [{points(gain.low)}, {points(gain.high)}]",
                    (
                        Figure(f"{what}, mean and 95 % interval", gain.mean, least, spread=(gain.low, gain.high)),
                        Figure(f"{what}, lower end", gain.low, 0.0 if least else None),
                    ),
                    "15" if least else "",
                )
        yield from _errors(name, arms)
        yield _area(name, arms)
    yield _healthy(claims)


def _errors(name: str, arms: dict[str, ArmResult]) -> Iterable[Row]:
    """Step errors saved by decomposition compared with `identical`, and by gating compared with ungated credit."""
    for saver, of, word, hold in (
        (GATED, "identical", "by both", 0.2),
        ("none", "identical", "by decomposing alone", None),
        (GATED, "none", "by gating, of what decomposing leaves", None),
        (GATED, "discounted", "by gating, of what discounting leaves", None),
    ):
        rates = {arm: mean(arms[arm].after("step_error_rate")) for arm in (saver, of)}
        cut = 1 - rates[saver] / rates[of]
        gain = difference(arms[saver], arms[of], "step_error_rate")
        what = f"{name}: step error rate, {saver} - {of}, mean and 95 % interval"
        yield Row(
            f"{name}: step errors saved {word}",
            f"{100 * cut:.0f} %: {rates[of]:.3f} to {rates[saver]:.3f} "
            f"({gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}])",
            (
                Figure(f"{name}: share of the step errors of {of} that {saver} saves", cut, hold),
                Figure(what, gain.mean, spread=(gain.low, gain.high)),
                Figure(f"{name}: step error rate, {of}", rates[of]),
                Figure(f"{name}: step error rate, {saver}", rates[saver]),
            ),
            "40 %" if hold else "",
        )


def _area(name: str, arms: dict[str, ArmResult]) -> Row:
    """Mean pass@1 of the training rollouts over all steps; by seed, as there are too few seeds for an interval."""
    pairs = zip(arms[GATED].runs, arms["identical"].runs, strict=True)
    gains = [mean(ours.train_pass_at_1) - mean(theirs.train_pass_at_1) for ours, theirs in pairs]
    figure = Figure.from_values(f"{name}: area under the training curve, {GATED} - identical, by seed", gains)
    return Row(
        f"{name}: mean pass@1 while it trains, `{GATED}` above `identical`, points: median (least, most)",
        f"{points(figure.value)} ({points(min(gains))}, {points(max(gains))})",
        (figure,),
    )


def _healthy(claims: Claims) -> Row:
    """Share of open gates and variance of sub-rewards in the last five training steps of the default rule."""
    name = next(iter(claims.settings))
    rates, variances = [], []
    for seed in claims.seeds(name):
        rows = [row for row in read_metrics(claims.final(name, GATED, seed).folder) if row["step"] > 0][-5:]
        rates.append(mean(row["propagation/pass_rate"] for row in rows))
        agents = [key for key in rows[0] if key.startswith("reward/sub_reward_var/")]
        variances.append(max(mean(row[key] for row in rows) for key in agents))
    open_, spread = Figure.from_values("pass rate, healthy", rates, 0.8), Figure.from_values(
        "largest sub-reward variance of an agent, healthy", variances, 0.2, at_most=True
    )  # fmt: skip
    return Row(
        "share of open gates, and the largest variance of an agent's sub-rewards, last steps of a healthy run",
        f"{100 * open_.value:.0f} %; {spread.value:.3f}",
        (open_, spread),
        "above 80 %; under 0.2",
    )


CHAIN = Chain(steps=30, error=0.05, tasks=512)
"""Each step errs on 5 % of correct inputs; the outcome is that of the last step."""


def simulated() -> Iterable[Row]:
    """Effects of an early error in a chain of 30 steps, on outputs and on blame."""
    for recovery, words in ((0.0, "nothing is mended"), (0.3, "3 wrong inputs in 10 are mended")):
        drawn = draw(replace(CHAIN, recovery=recovery))
        moved = moved_outputs(drawn)
        early, late = float(moved[:10].mean()), float(moved[-10:].mean())
        of = f"a chain of 30 steps, {words}"
        blamed = {
            rule: float(np.nanmean(amplification(drawn, CreditOptions(propagation=rule))[:10]))
            for rule in ("identical", "none", GATED)
        }
        yield Row(
            f"{of}: wrong outputs that an error in its first third causes, its own among them; in its last third",
            f"{early:.1f}; {late:.1f}: {early / late:.1f} x",
            (
                Figure(f"{of}: wrong outputs by an early error", early),
                Figure(f"{of}: wrong outputs by a late error", late),
                Figure(f"{of}: wrong outputs by an early error / by a late one", early / late, unit="x"),
            ),
        )
        yield Row(
            f"{of}: blame on the trajectory that comes with an early error, in units of the step's own credit: "
            f"`identical`, `none`, `{GATED}`",
            ", ".join(f"{value:.1f}" for value in blamed.values()),
            tuple(Figure(f"{of}: blame with an early error, {rule}", value) for rule, value in blamed.items()),
            "2 to 3 under shared credit",
        )


def measured() -> Iterable[Row]:
    """The cost of credit, and the memory that LoRA saves."""
    from benchmarks.local_engine import lora_memory

    batch = chain_batch(1024)
    options = CreditOptions(propagation=GATED)
    assign(batch, options)  # compiles
    latency = Figure.from_values(
        "credit of 122,880 steps, s", [_seconds(lambda: assign(batch, options)) for _ in range(7)], 0.1, at_most=True
    )
    yield Row(
        "credit of 1,024 tasks x 4 trajectories x 30 steps, s",
        f"{latency.value:.3f}",
        (latency,),
        "under 1",
    )
    memory = tuple(lora_memory("cpu"))
    yield Row("peak memory with LoRA, of that with all weights", f"{memory[0].value:.2f}", memory[:1], "30 % less")


def fallen_back(claims: Claims) -> Iterable[Row]:
    """A run with inverted verdicts from its tenth step on, with and without the guard."""
    name, seeds = "contradictory", 1 if claims.short else 2
    folder = claims.work.folder / "guarded"
    pair = {guarded: runs_of(name, guarded, folder, seeds, claims.short) for guarded in (True, False)}
    finish([*pair[True], *pair[False]], "fallback")
    means = {guarded: mean(r.result().after.metrics["pass_at_1"] for r in runs) for guarded, runs in pair.items()}
    yield Row(
        "pass@1 after verdicts have turned round in mid-run, with the guard's fallback and without",
        f"{means[True]:.3f}; {means[False]:.3f}",
        (
            Figure(f"{name}: pass@1 with the guard", means[True], means[False]),
            Figure(f"{name}: pass@1 without it", means[False]),
        ),
    )


def compared(claims: Claims) -> dict[str, Any]:
    """All results of the comparisons, with each arm's tokens and updates."""
    found: dict[str, Any] = {}
    for name in claims.settings:
        arms = {arm: claims.result(name, arm) for arm in ARMS}
        found[name] = {
            arm: {
                "rate": claims.rate(name, arm),
                "before": claims.before(name).result().after.metrics["pass_at_1"],
                **{
                    metric: {"mean": mean(result.after(metric)), "seeds": result.after(metric)}
                    for metric in ("pass_at_1", "pass_at_1_greedy", "step_error_rate")
                },
                **{
                    f"{metric} - identical": {"mean": gain.mean, "interval": [gain.low, gain.high]}
                    for metric in ("pass_at_1", "pass_at_1_greedy", "step_error_rate")
                    for gain in [difference(result, arms["identical"], metric)]
                },
                "tokens": mean(_tokens(claims.final(name, arm, seed)) for seed in claims.seeds(name)),
                "updates": mean(_updates(claims.final(name, arm, seed)) for seed in claims.seeds(name)),
            }
            for arm, result in arms.items()
        }
    return found


def _tokens(run: Run) -> float:
    return sum(float(row["rollout/tokens"]) for row in read_metrics(run.folder) if row["step"] > 0)


def _updates(run: Run) -> float:
    """Two updates per training step, minus the skipped share."""
    return sum(2 - 2 * float(row["actor/skipped_updates"]) for row in read_metrics(run.folder) if row["step"] > 0)


def difference(a: ArmResult, b: ArmResult, metric: str) -> Difference:
    """`a` - `b`, with its 95 % interval over seeds and tasks."""
    return paired_difference(a.counts(metric), b.counts(metric))


def points(share: float) -> str:
    """Format a share as a gain in points."""
    return f"{100 * share:+.1f}"


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fill(page: Path, rows: Sequence[Row]) -> None:
    """Put the table between the page's marks. Raises ValueError if a mark is missing."""
    lines = ["| what | measured | claimed | to hold |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.what} | {row.measured} | {row.claimed} | {row.to_hold} |" for row in rows]
    fill_page(page, "make claims", lines)


if __name__ == "__main__":
    exit_with(main)
