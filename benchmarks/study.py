"""Compare rules of credit in seven cases: `python -m benchmarks.study [--minutes M] [--quick]`, or `make study`.

`arithmetic_chain`, 16 training steps of 8 tasks and 8 rollouts, under 16 rules of credit (`RULES`, most of them with
the outcome to all steps and to the answer alone: 30 arms) in 7 cases (`CASES`: properties of the sub-rewards), 5 seeds
each, evaluated on 256 unseen tasks. Each rule has the best of three learning rates, chosen on two of the cases with a
separate seed and separate tasks; variants of a threshold or gate have the rate of their base rule.

About a thousand runs of 20 to 30 seconds: half an hour a seed on two cores, and the rates. Writes to `runs/study/` and
reuses finished runs there, so an interrupted study can be resumed (`--minutes`: begin no run after M minutes). The
rates and the results of each seed are kept in `docs/results/study/`: a complete seed is never run again, on any
machine. A warm start differs between machines, so seeds may begin from different models; all arms of a seed begin from
the same. Writes the complete seeds to `docs/results/study.json` and `study.png`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from benchmarks.record import MISSED, RESULTS, Figure, exit_with, processor, write
from benchmarks.runs import Run, finish
from benchmarks.sources import TRAINING, Work
from creditflow._utils.files import write_whole
from creditflow.config.shipped import find_recipe
from creditflow.credit.thresholds.base import BatchStats, make_threshold
from creditflow.data import Floats
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.comparison.bootstrap import Difference, PassCounts, paired_difference
from creditflow.studies.comparison.results import METRICS, spread

RECIPE = find_recipe("arithmetic_chain")
MEASURES = (
    *TRAINING,
    "src/creditflow/monitoring/guard.py",
    "src/creditflow/monitoring/guard_rules",
    "benchmarks/cases.py",
    "benchmarks/ideas.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
)
SEEDS, TUNING_SEED = 5, 100
RATES = ("2.0e-4", "1.0e-4", "4.0e-4")
ALWAYS = (
    "trainer.total_training_steps=16",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.test_freq=-1",
    "data.val_max_samples=256",
    "reward.backend=inline",
    "reward.cache_size=0",
    "guard.enable=false",
)
GUARDED = ("guard.enable=true", "trainer.test_freq=2", "trainer.save_freq=2")
FELL = 0.05
"""An arm fails in a case if pass@1 ends more than this below its start."""
TUNED = "{kind: tuned, patience_epochs: 3}"
VALIDATED = "trainer.test_freq=4"


# ---- arms and cases -------------------------------------------------------------------------------------------------


def rewards(weights: Sequence[float] = (1, 1, 1), wrong: str = "null", executor: str = "") -> str:
    """The recipe's reward functions from `benchmarks.cases`; `executor`: additional keys of the executor's entry."""
    args = f"args: {{wrong: {wrong}}}"
    entries = ["{fn: 'arithmetic_chain.py:answer_right'}"]
    of_steps = zip(("plan_right", "digits_right", "verdict_right"), weights, ("", executor, ""), strict=True)
    for name, weight, more in of_steps:
        entries.append(f"{{fn: 'benchmarks/cases.py:{name}', {args}, weight: {weight}{more}}}")
    return f"reward.functions=[{', '.join(entries)}]"


_INHERITING = rewards((0, 1, 0)).replace("digits_right', args: {wrong: null}", "digits_of_reference'")
_AGENTS = "planner: {system: plan}, executor: {system: exec}, verifier: {system: check}"

CASES: dict[str, tuple[str, ...]] = {
    "exact": (rewards(),),
    "executor alone": (rewards((0, 1, 0)),),
    "every third": (rewards((0, 1, 0), executor=", when: 'benchmarks/cases.py:one_in_three'"),),
    "noisy, 20 %": (rewards(wrong="noisy20"),),
    "noisy, 35 %": (rewards(wrong="noisy35"),),
    "inheriting": (_INHERITING,),
    "saboteur": (
        rewards((0, 1, 0)),
        "team.workflow='benchmarks/cases.py:solve_sabotaged'",
        f"team.agents={{{_AGENTS}, saboteur: {{system: exec, policy: frozen}}}}",
        "policies={default: {}, frozen: {trainable: false}}",
    ),
}
"""In order: every step is scored exactly; planner and verifier are unscored; two of three executor steps are unscored
as well; 20 % of the verdicts on all agents are inverted; 35 %; the executor is scored by the story's own chain at that
place; planner and verifier are unscored, and an untrained agent replaces one result in ten."""
OTHER_TEAMS = ("saboteur",)
REALISTIC = tuple(name for name in CASES if name != "exact")
TUNING_CASES = ("executor alone", "noisy, 20 %")


@dataclass(frozen=True)
class Rule:
    """A rule of credit."""

    overrides: tuple[str, ...]
    rate_of: str
    """The rule whose learning rate it shares."""
    outcome_to: tuple[str, ...] = ("all", "answer")


def _threshold(rate_of: str, *more: str) -> Rule:
    return Rule(("algorithm.propagation=threshold", *more), rate_of)


RULES: dict[str, Rule] = {
    "identical": Rule(("algorithm.propagation=identical",), "identical", ("all",)),
    "identical, mean sub-reward": Rule(
        ("algorithm.propagation=identical", "algorithm.shared_reward=outcome_plus_mean_sub_reward"),
        "identical",
        ("all",),
    ),
    "none": Rule(("algorithm.propagation=none",), "none"),
    "discounted": Rule(("algorithm.propagation=discounted",), "discounted"),
    "threshold": _threshold("threshold", VALIDATED),
    "threshold 0.3": _threshold("threshold", "algorithm.propagation_threshold=0.3"),
    "threshold 0.7": _threshold("threshold", "algorithm.propagation_threshold=0.7"),
    "threshold tuned": _threshold("threshold", f"algorithm.propagation_threshold={TUNED}", VALIDATED),
    "threshold noise": _threshold("threshold", "algorithm.propagation_threshold={kind: noise}"),
    "threshold quantile": _threshold("threshold", "algorithm.propagation_threshold={kind: quantile}"),
    "soft": _threshold("threshold", "algorithm.gate=soft"),
    "receive": _threshold("receive", "algorithm.gate_at=receive"),
    "neutral": _threshold("neutral", "algorithm.on_closed_gate=neutral"),
    "freeze": _threshold("freeze", "algorithm.on_closed_gate=freeze"),
    "conditional": Rule(("algorithm.propagation=conditional",), "conditional"),
    "posterior": Rule(("algorithm.propagation=posterior",), "posterior"),
}


@dataclass(frozen=True)
class Arm:
    """A rule and the destination of the outcome."""

    rule: str
    outcome_to: str

    def __str__(self) -> str:
        return self.rule if len(RULES[self.rule].outcome_to) == 1 else f"{self.rule}, {self.outcome_to}"

    @property
    def family(self) -> Arm:
        """The arm whose learning rate it shares."""
        if self.outcome_to == "all" and self.rule in AS_GATED:
            return GATED
        return Arm(RULES[self.rule].rate_of, self.outcome_to)

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*RULES[self.rule].overrides, f"algorithm.outcome_to={self.outcome_to}")


ARMS = tuple(Arm(name, outcome_to) for name, rule in RULES.items() for outcome_to in rule.outcome_to)
IDENTICAL, OWN, GATED = Arm("identical", "all"), Arm("none", "all"), Arm("threshold", "all")
AS_GATED = ("none", "threshold 0.7", "neutral", "conditional")
"""With the outcome to all, these rules run once, as `threshold`: executors' scores are 0, 0.5 or 1; at origin 1 a right
step has nothing to pass on, any other step's gate is closed, and the planner has no upstream steps. Only an answer of
more than two digits, which ends its trajectory, could be scored otherwise."""


@dataclass(frozen=True)
class Study:
    """The runs of the study, and the folders of runs and results."""

    work: Work
    results: Path
    """The folder of results: a file for each seed, and the rates."""
    arms: tuple[Arm, ...]
    seeds: int
    rates: tuple[str, ...] = RATES
    short: tuple[str, ...] = ()

    # ---- runs

    def run(self, arm: Arm, case: str, seed: int, rate: str, *more: str, under: str = "runs") -> Run:
        """One run, in the folder `under`."""
        if arm == IDENTICAL and case not in OTHER_TEAMS:
            case = next(iter(CASES))  # it uses no sub-reward: runs differ by team alone
        if arm.outcome_to == "all" and arm.rule in AS_GATED:
            arm = GATED
        name = f"{plain_name(case)}/{plain_name(str(arm))}/seed{seed}"
        rates = (f"actor_rollout_ref.actor.optim.lr={rate}",)
        options = (*ALWAYS, *CASES[case], *arm.overrides, *rates, *more, *self.short)
        return Run(RECIPE, options, self.work.folder / under / name, seed, _register)

    def before(self, case: str) -> Run:
        """An evaluation of the initial model."""
        one = ("trainer.total_training_steps=1",)
        return self.run(IDENTICAL, case, 0, "1.0e-12", *one, under="before")

    def tuning(self, family: Arm, case: str, rate: str) -> Run:
        """A tuning run, on tasks that are never reported."""
        return self.run(family, case, TUNING_SEED, rate, "recipe.val_split=tune", under=f"tuning/{rate}")

    def final(self, arm: Arm, case: str, seed: int) -> Run:
        """The reported run. A tuned threshold that never moves equals its initial threshold."""
        plain = Arm("threshold", arm.outcome_to)
        if arm.rule == "threshold tuned":
            run = self.run(plain, case, seed, self.rate(plain))
            if not run.finished or not _fell(run):
                return run
        return self.run(arm, case, seed, self.rate(arm))

    def guarded(self, arm: Arm, case: str, seed: int) -> Run:
        """The same run with the guard, for arms that fail without it."""
        return self.run(arm, case, seed, self.rate(arm), *GUARDED, under="guarded")

    # ---- results

    @property
    def families(self) -> list[Arm]:
        """The arms with separate learning rates."""
        return list(dict.fromkeys(arm.family for arm in self.arms))

    def rate(self, arm: Arm) -> str:
        """The best rate in tuning."""
        by_rate = self.tuned()[str(arm.family)]
        return max(self.rates, key=lambda rate: by_rate[rate])

    def tuned(self) -> dict[str, dict[str, float]]:
        """pass@1 in tuning, mean over its cases, by family and rate."""
        found: dict[str, dict[str, float]] = json.loads((self.results / "rates.json").read_text())
        return found

    def seed_file(self, seed: int) -> Path:
        """The file with a seed's results."""
        return self.results / f"seed{seed}.json"

    def whole(self) -> list[dict[str, Any]]:
        """The results of the complete seeds."""
        files = [self.seed_file(seed) for seed in range(self.seeds)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def finish(self, until: float | None) -> bool:
        """Do the unfinished runs; False if the time runs out before."""
        self.results.mkdir(parents=True, exist_ok=True)
        if not (self.results / "rates.json").exists():
            of_each = itertools.product(self.rates, TUNING_CASES, self.families)
            tuning = dict.fromkeys(self.tuning(family, case, rate) for rate, case, family in of_each)
            if not finish(list(tuning), "tuning", until):
                return False
            _keep(
                self.results / "rates.json",
                {str(family): {rate: self._scored(family, rate) for rate in self.rates} for family in self.families},
            )
        return all(self.seed_file(seed).exists() or self._finish(seed, until) for seed in range(self.seeds))

    def _scored(self, family: Arm, rate: str) -> float:
        runs = [self.tuning(family, case, rate) for case in TUNING_CASES]
        return mean(run.result().after.metrics["pass_at_1"] for run in runs)

    def _finish(self, seed: int, until: float | None) -> bool:
        every = list(itertools.product(CASES, self.arms))
        # Twice: if accuracy fell, a tuned threshold needs a separate run, which the first pass reveals.
        for _ in range(2):
            runs = [*map(self.before, CASES), *(self.final(arm, case, seed) for case, arm in every)]
            if not finish(list(dict.fromkeys(runs)), f"seed {seed}", until):
                return False
        began = {case: kept_numbers(self.before(case)) for case in CASES}
        ended = {case: {str(arm): kept_numbers(self.final(arm, case, seed)) for arm in self.arms} for case in CASES}
        failed = [
            (arm, case) for case, arm in every if ended[case][str(arm)]["pass_at_1"] < began[case]["pass_at_1"] - FELL
        ]
        guarded = {one: self.guarded(*one, seed) for one in failed}
        if not finish(list(dict.fromkeys(guarded.values())), f"seed {seed}, what failed, with the guard", until):
            return False
        for (arm, case), run in guarded.items():
            ended[case][str(arm)]["guarded"] = kept_numbers(run)["pass_at_1"]
        where = {"processor": processor(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        _keep(
            self.seed_file(seed),
            {**where, "seed": seed, "before": began, "after": ended, "measured": self.work.measured},
        )
        return True


def kept_numbers(run: Run) -> dict[str, Any]:
    """The kept result of a run: its rates, and its passed tasks, four to a hexadecimal digit."""
    after = run.result().after
    passed = "".join(str(int(value)) for value in after.sampled)
    kept = {name: round(after.metrics.get(name, math.nan), 6) for name in METRICS}
    return {**kept, "tasks": len(passed), "passed": f"{int(passed, 2):x}"}


def _passed(kept: Mapping[str, Any]) -> Floats:
    """[V] 1 for each passed task."""
    return np.array(list(f"{int(kept['passed'], 16):0{kept['tasks']}b}"), dtype=np.float64)


def _keep(path: Path, what: Mapping[str, Any]) -> None:
    write_whole(path, lambda file: file.write_text(json.dumps(what, indent=1) + "\n"))


def _fell(run: Run) -> bool:
    """Whether a tuned threshold would have been lowered in this run, before its last validation, which ends it."""
    threshold = make_threshold(yaml.safe_load(TUNED))
    accuracy = [row["val/pass_at_1"] for row in read_metrics(run.folder) if "val/pass_at_1" in row]
    for value in accuracy[:-1]:
        threshold.update(BatchStats({}, {}, value))
    return threshold.theta("planner") < 0.5


def plain_name(name: str) -> str:
    """`name` without characters that are unusual in a folder's name."""
    return "".join(c if c.isalnum() or c == "." else "_" for c in name).replace("__", "_").strip("_")


def _register() -> None:
    from benchmarks.ideas import register  # an experimental rule outside the package

    register()


# ---- main -----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run missing measurements, print and write the table. It has no targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--quick", action="store_true", help="one training step: shows that it runs, proves nothing")
    given = parser.parse_args()
    _register()
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    work = Work.begin("study", MEASURES, quick=given.quick)
    study = Study(work, RESULTS / "study", ARMS, SEEDS)
    if given.quick:
        few = (IDENTICAL, OWN, Arm("threshold tuned", "answer"), Arm("conditional", "answer"), Arm("posterior", "all"))
        short = ("trainer.total_training_steps=1", "data.val_max_samples=8")
        study = Study(work, work.folder / "results", few, 1, RATES[:1], short)
    done = study.finish(until)
    if study.whole():
        report(study, write_it=not given.quick)
    print("every run is done" if done else "out of time: run it again to go on")
    print(f"{MISSED}: 0 of 0")
    return 0


# ---- report ---------------------------------------------------------------------------------------------------------


def report(study: Study, *, write_it: bool) -> None:
    """Print the table, and write the file and the picture, from the complete seeds."""
    whole = study.whole()
    began = {case: mean(seed["before"][case]["pass_at_1"] for seed in whole) for case in CASES}
    by_arm = {arm: {case: [seed["after"][case][str(arm)] for seed in whole] for case in CASES} for arm in study.arms}
    means = {
        arm: {case: mean(one["pass_at_1"] for one in cases[case]) for case in CASES} for arm, cases in by_arm.items()
    }
    realistic = {arm: mean(means[arm][case] for case in REALISTIC) for arm in study.arms}
    print(f"pass@1 after training, mean over {len(whole)} seeds; in brackets the rate")
    widths = [max(len(str(arm)) for arm in study.arms) + 9, *(len(case) for case in CASES), len("realistic")]
    rows = [["", *CASES, "realistic"], ["before", *(f"{began[case]:.3f}" for case in CASES), ""]]
    for arm in study.arms:
        cells = [f"{means[arm][case]:.3f}" for case in CASES]
        rows.append([f"{arm} ({study.rate(arm)})", *cells, f"{realistic[arm]:.3f}"])
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    failed = {f"{case}: {arm}": found for case in CASES for arm in study.arms if (found := _saved(by_arm[arm][case]))}
    for name, values in failed.items():
        print(
            f"{name} fails in {len(values['without'])} seeds: pass@1 {mean(values['without']):.3f}, with the guard "
            f"{mean(values['with']):.3f}"
        )
    against = {
        name: {
            case: {arm: difference(by_arm[arm][case], by_arm[base][case]) for arm in study.arms if arm != base}
            for case in CASES
        }
        for name, base in (("identical", IDENTICAL), ("own + outcome", OWN))
    }
    over_realistic = {arm: [one for case in REALISTIC for one in by_arm[arm][case]] for arm in study.arms}
    details = {
        "realistic": {
            str(arm): {
                f"pass_at_1 - {name}": _shown(difference(over_realistic[arm], over_realistic[base], len(REALISTIC)))
                for name, base in (("identical", IDENTICAL), ("own + outcome", OWN))
                if arm != base
            }
            for arm in study.arms
        },
        "seeds": len(whole),
        "rates": {
            name: by_rate | {"chosen": max(by_rate, key=lambda r: by_rate[r])}
            for name, by_rate in study.tuned().items()
        },
        "failed": failed,
        "before": began,
        "results": {
            case: {
                str(arm): {
                    **{metric: _numbers(by_arm[arm][case], metric) for metric in METRICS},
                    **{
                        f"pass_at_1 - {name}": _shown(d)
                        for name, by_case in against.items()
                        if (d := by_case[case].get(arm)) is not None
                    },
                }
                for arm in study.arms
            }
            for case in CASES
        },
    }
    figures = [Figure(f"{arm}: pass@1, mean over the realistic cases", value) for arm, value in realistic.items()]
    best = str(max(study.arms, key=lambda arm: realistic[arm]))
    draw((RESULTS if write_it else study.work.folder) / "study.png", against["identical"], len(whole))
    if write_it:
        # For a file that changed between seeds, the hash of the first seed counts.
        measured = {name: found for seed in reversed(whole) for name, found in seed["measured"].items()}
        packages = ("creditflow", "torch", "transformers", "numpy")
        write("study", figures, packages, measured, {"best": best, **details})


def _saved(seeds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """pass@1 without and with the guard, in the seeds in which an arm failed."""
    fell = [one for one in seeds if "guarded" in one]
    return {"without": [one["pass_at_1"] for one in fell], "with": [one["guarded"] for one in fell]} if fell else {}


def _numbers(seeds: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    values = [one[metric] for one in seeds]
    return {"mean": mean(values), "sd": spread(values) if len(values) > 1 else None, "seeds": values}


def difference(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], cases: int = 1) -> Difference:
    """`a` - `b`, seed by seed; for several cases in sequence, the difference of their means."""
    parts = [np.array([_passed(one) for one in runs]) for runs in (a, b)]
    parts = [part_RV.reshape(cases, -1, part_RV.shape[1]).sum(axis=0) for part_RV in parts]
    return paired_difference(*(PassCounts(part_RV, np.full_like(part_RV, cases)) for part_RV in parts))


def _shown(difference: Difference) -> dict[str, Any]:
    return {"mean": difference.mean, "interval": [difference.low, difference.high]}


def draw(path: Path, against: dict[str, dict[Arm, Difference]], seeds: int) -> None:
    """pass@1 above `identical`, arm by arm, a panel for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    arms = list(next(iter(against.values())))
    figure, panels = plt.subplots(1, len(CASES), figsize=(2.1 * len(CASES) + 2, 0.24 * len(arms) + 1.2), sharey=True)
    colors = {"all": "#1f77b4", "answer": "#d95f02"}
    for panel, (case, by_arm) in zip(panels, against.items(), strict=True):
        panel.axvline(0.0, color="0.6", linewidth=0.8)
        for row, arm in enumerate(arms):
            found = by_arm[arm]
            panel.plot([found.low, found.high], [row, row], color=colors[arm.outcome_to], linewidth=1.2)
            panel.plot([found.mean], [row], "o", color=colors[arm.outcome_to], markersize=3.5)
        panel.set_title(case, fontsize=9)
        panel.tick_params(labelsize=7)
        panel.grid(axis="x", color="0.92")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(arms)), [str(arm) for arm in arms])
    panels[0].invert_yaxis()
    words = f"pass@1 above identical, 95 % intervals, {seeds} seeds (blue: outcome to all, orange: to the answer)"
    figure.supxlabel(words, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    exit_with(main)
