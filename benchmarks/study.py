"""Which rule of credit wins where: `python -m benchmarks.study [--minutes M] [--quick]`, or `make study`.

`arithmetic_chain`, 16 training steps of 8 tasks and 8 plays, under 16 rules of credit (`RULES`, most of them with the
outcome to all steps and to the answer alone: 30 arms) in 7 cases (`CASES`: what the sub-rewards are like), 5 seeds
each, evaluated on 256 unseen tasks. Learning rates are chosen from three, on two of the cases, by a seed and tasks of
their own: for each rule, but for thresholds and gates of another kind, which have that of the rule that they are a kind
of.

About a thousand runs of 35 seconds: five hours on two cores. Into `runs/study/`, where finished runs are found again,
so that it may be broken off and gone on with (`--minutes`: begins nothing after so many). Seeds are outermost: what is
there is balanced. Writes what there is to `docs/results/study.json` and `study.png`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.record import RESULTS, ROOT, Figure, write
from benchmarks.runs import Run, finish
from creditflow.credit.thresholds import Observed, make_threshold
from creditflow.ledger.run_folder import read_metrics
from creditflow.report.bootstrap import Difference, paired_difference
from creditflow.report.comparison import ArmResult, spread

RECIPE = ROOT / "recipes" / "arithmetic_chain.yaml"
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
"""An arm has failed in a case where pass@1 ends by more than this below where it began."""
TUNED = "{kind: tuned, patience_epochs: 3}"
VALIDATED = "trainer.test_freq=4"


# ---- what is compared ----------------------------------------------------------------------------------------------


def _rewards(weights: Sequence[float] = (1, 1, 1), wrong: str = "null", executor: str = "") -> str:
    """The recipe's functions as `benchmarks.cases` has them; `executor`: more of the executor's entry."""
    args = f"args: {{wrong: {wrong}}}"
    entries = ["{fn: 'arithmetic_chain.py:answer_right'}"]
    of_steps = zip(("plan_right", "digits_right", "verdict_right"), weights, ("", executor, ""), strict=True)
    for name, weight, more in of_steps:
        entries.append(f"{{fn: 'benchmarks/cases.py:{name}', {args}, weight: {weight}{more}}}")
    return f"reward.functions=[{', '.join(entries)}]"


_INHERITING = _rewards((0, 1, 0)).replace("digits_right', args: {wrong: null}", "digits_of_reference'")
_AGENTS = "planner: {system: plan}, executor: {system: exec}, verifier: {system: check}"

CASES: dict[str, tuple[str, ...]] = {
    "exact": (_rewards(),),
    "executor alone": (_rewards((0, 1, 0)),),
    "every third": (_rewards((0, 1, 0), executor=", when: 'benchmarks/cases.py:one_in_three'"),),
    "noisy, 20 %": (_rewards(wrong="noisy20"),),
    "noisy, 35 %": (_rewards(wrong="noisy35"),),
    "inheriting": (_INHERITING,),
    "saboteur": (
        _rewards((0, 1, 0)),
        "team.workflow='benchmarks/cases.py:solve_sabotaged'",
        f"team.agents={{{_AGENTS}, saboteur: {{system: exec, policy: frozen}}}}",
        "policies={default: {}, frozen: {trainable: false}}",
    ),
}
"""Every step is scored exactly; planner and verifier are not scored; nor are two of three steps of the executor; 20 %
of the verdicts on all agents are turned round; 35 %; the executor is scored by what the story's own chain has at that
place; planner and verifier are not scored, and one result in ten is replaced by an agent that learns nothing."""
OTHER_TEAMS = ("saboteur",)
REALISTIC = tuple(name for name in CASES if name != "exact")
TUNING_CASES = ("executor alone", "noisy, 20 %")


@dataclass(frozen=True)
class Rule:
    """A rule of credit."""

    overrides: tuple[str, ...]
    rate_of: str
    """The rule whose learning rate it has."""
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
    """A rule, and where the outcome enters."""

    rule: str
    outcome_to: str

    def __str__(self) -> str:
        return self.rule if len(RULES[self.rule].outcome_to) == 1 else f"{self.rule}, {self.outcome_to}"

    @property
    def family(self) -> Arm:
        """The arm whose learning rate it has."""
        if self.outcome_to == "all" and self.rule in AS_GATED:
            return GATED
        return Arm(RULES[self.rule].rate_of, self.outcome_to)

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*RULES[self.rule].overrides, f"algorithm.outcome_to={self.outcome_to}")


ARMS = tuple(Arm(name, outcome_to) for name, rule in RULES.items() for outcome_to in rule.outcome_to)
IDENTICAL, OWN, GATED = Arm("identical", "all"), Arm("none", "all"), Arm("threshold", "all")
AS_GATED = ("none", "threshold 0.7", "neutral", "conditional")
"""With the outcome to all these are run once, as `threshold`: executors' scores are 0, 0.5 or 1, and at origin 1 a
right step has nothing to pass on, a gate is shut behind any other, and nobody is upstream of the planner. Only an
answer of more than two digits, which ends its play, could be scored otherwise."""


@dataclass(frozen=True)
class Study:
    """What is run, and where it is."""

    folder: Path
    arms: tuple[Arm, ...]
    seeds: int
    rates: tuple[str, ...] = RATES
    short: tuple[str, ...] = ()

    def run(self, arm: Arm, case: str, seed: int, rate: str, *more: str, under: str = "runs") -> Run:
        """One run, in the folder `under`."""
        if arm == IDENTICAL and case not in OTHER_TEAMS:
            case = next(iter(CASES))  # it looks at no sub-reward: but for the team these runs are the same
        if arm.outcome_to == "all" and arm.rule in AS_GATED:
            arm = GATED
        name = f"{_plain(case)}/{_plain(str(arm))}/seed{seed}"
        rates = (f"actor_rollout_ref.actor.optim.lr={rate}",)
        options = (*ALWAYS, *CASES[case], *arm.overrides, *rates, *more, *self.short)
        return Run(RECIPE, options, self.folder / under / name, seed, _register)

    def before(self, case: str) -> Run:
        """The model that training begins with, evaluated."""
        one = ("trainer.total_training_steps=1",)
        return self.run(IDENTICAL, case, 0, "1.0e-12", *one, under="before")

    def tuning(self, family: Arm, case: str, rate: str) -> Run:
        """On tasks that are never reported."""
        return self.run(family, case, TUNING_SEED, rate, "recipe.val_split=tune", under=f"tuning/{rate}")

    def scored(self, family: Arm, rate: str) -> float:
        """pass@1 in tuning, mean over its cases."""
        runs = [self.tuning(family, case, rate) for case in TUNING_CASES]
        return mean(run.result().after.metrics["pass_at_1"] for run in runs)

    def rate(self, arm: Arm) -> str:
        """The rate that did best."""
        return max(self.rates, key=lambda rate: self.scored(arm.family, rate))

    def final(self, arm: Arm, case: str, seed: int) -> Run:
        """The run that counts. A tuned threshold that has had no reason to move is the one that it began as."""
        plain = Arm("threshold", arm.outcome_to)
        if arm.rule == "threshold tuned":
            run = self.run(plain, case, seed, self.rate(plain))
            if not run.finished or not _fell(run):
                return run
        return self.run(arm, case, seed, self.rate(arm))

    def guarded(self, arm: Arm, case: str, seed: int) -> Run:
        """The same with the guard, for arms that fail without it."""
        return self.run(arm, case, seed, self.rate(arm), *GUARDED, under="guarded")

    def failed(self, seeds: int) -> list[tuple[Arm, str]]:
        """Arms that end below where they began."""
        began = {case: self.before(case).result().after.metrics["pass_at_1"] for case in CASES}
        return [
            (arm, case)
            for case, arm in itertools.product(CASES, self.arms)
            if mean(self.pass_at_1(arm, case, s) for s in range(seeds)) < began[case] - FELL
        ]

    def pass_at_1(self, arm: Arm, case: str, seed: int) -> float:
        """After training."""
        return self.final(arm, case, seed).result().after.metrics["pass_at_1"]

    def finish(self, until: float | None) -> int:
        """Do what is not done; the number of seeds that are whole."""
        families = dict.fromkeys(arm.family for arm in self.arms)
        of_each = itertools.product(self.rates, TUNING_CASES, families)
        tuning = dict.fromkeys(self.tuning(family, case, rate) for rate, case, family in of_each)
        if not finish([*map(self.before, CASES), *tuning], "tuning", until):
            return 0
        for seed in range(self.seeds):
            # Twice: where accuracy fell, a tuned threshold has a run of its own, which is known only then.
            for _ in range(2):
                runs = [self.final(arm, case, seed) for case, arm in itertools.product(CASES, self.arms)]
                if not finish(list(dict.fromkeys(runs)), f"seed {seed}", until):
                    return seed
        again = [self.guarded(*failed, seed) for failed in self.failed(self.seeds) for seed in range(self.seeds)]
        finish(again, "what failed, with the guard", until)
        return self.seeds


def _fell(run: Run) -> bool:
    """Whether a tuned threshold would have been lowered in this run, before its last validation, which ends it."""
    threshold = make_threshold(yaml.safe_load(TUNED))
    accuracy = [row["val/pass_at_1"] for row in read_metrics(run.folder) if "val/pass_at_1" in row]
    for value in accuracy[:-1]:
        threshold.update(Observed({}, {}, value))
    return threshold.theta("planner") < 0.5


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "_" for c in name).replace("__", "_").strip("_")


def _register() -> None:
    from benchmarks.ideas import register  # two rules that are not in the package

    register()


# ---- doing it ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run what is missing, print the table, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--quick", action="store_true", help="one training step: shows that it runs, proves nothing")
    given = parser.parse_args()
    _register()
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    study = Study(ROOT / "runs" / "study", ARMS, SEEDS)
    if given.quick:
        few = (IDENTICAL, OWN, Arm("threshold tuned", "answer"), Arm("conditional", "answer"), Arm("posterior", "all"))
        short = ("trainer.total_training_steps=1", "data.val_max_samples=8")
        study = Study(ROOT / "runs" / "study-quick", few, 1, RATES[:1], short)
    seeds = study.finish(until)
    if seeds:
        report(study, seeds, write_it=not given.quick)
    return int(seeds < study.seeds)


# ---- what came of it -----------------------------------------------------------------------------------------------


def report(study: Study, seeds: int, *, write_it: bool) -> None:
    """The table, the file and the picture."""
    results = {
        case: {
            arm: ArmResult(str(arm), [], [study.final(arm, case, s).result() for s in range(seeds)])
            for arm in study.arms
        }
        for case in CASES
    }
    print("pass@1 after training, mean over seeds; in brackets the rate")
    widths = [max(len(str(arm)) for arm in study.arms) + 9, *(len(case) for case in CASES), len("realistic")]
    rows = [["", *CASES, "realistic"]]
    rows.append(["before", *(f"{study.before(case).result().after.metrics['pass_at_1']:.3f}" for case in CASES), ""])
    for arm in study.arms:
        means = {case: mean(results[case][arm].after("pass_at_1")) for case in CASES}
        cells = [f"{means[case]:.3f}" for case in CASES]
        rows.append([f"{arm} ({study.rate(arm)})", *cells, f"{mean(means[case] for case in REALISTIC):.3f}"])
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    saved = _saved(study, seeds)
    for name, values in saved.items():
        print(f"{name} fails: pass@1 {mean(values['without']):.3f}, with the guard {mean(values['with']):.3f}")
    against = {
        name: {
            case: {arm: _difference(by_arm[arm], by_arm[base]) for arm in study.arms if arm != base}
            for case, by_arm in results.items()
        }
        for name, base in (("identical", IDENTICAL), ("own + outcome", OWN))
    }
    details = {
        "seeds": seeds,
        "rates": {
            str(family): {rate: study.scored(family, rate) for rate in study.rates} | {"chosen": study.rate(family)}
            for family in dict.fromkeys(arm.family for arm in study.arms)
        },
        "failed": saved,
        "before": {case: study.before(case).result().after.metrics["pass_at_1"] for case in CASES},
        "results": {
            case: {
                str(arm): {
                    "pass_at_1": _numbers(result, "pass_at_1"),
                    "pass_at_1_greedy": _numbers(result, "pass_at_1_greedy"),
                    "step_error_rate": _numbers(result, "step_error_rate"),
                    **{
                        f"pass_at_1 - {name}": {"mean": d.mean, "interval": [d.low, d.high]}
                        for name, by_case in against.items()
                        if (d := by_case[case].get(arm)) is not None
                    },
                }
                for arm, result in by_arm.items()
            }
            for case, by_arm in results.items()
        },
    }
    realistic = {arm: mean(mean(results[case][arm].after("pass_at_1")) for case in REALISTIC) for arm in study.arms}
    figures = [Figure(f"{arm}: pass@1, mean over the realistic cases", value) for arm, value in realistic.items()]
    best = str(max(study.arms, key=lambda arm: realistic[arm]))
    draw((RESULTS if write_it else study.folder) / "study.png", against["identical"], seeds)
    if write_it:
        write("study", figures, ("creditflow", "torch", "transformers", "numpy"), {"best": best, **details})


def _saved(study: Study, seeds: int) -> dict[str, dict[str, list[float]]]:
    """Of arms that fail: pass@1 by seed without the guard and with it, where those runs are there."""
    found = {}
    for arm, case in study.failed(seeds):
        runs = [study.guarded(arm, case, seed) for seed in range(seeds)]
        if all(run.finished for run in runs):
            found[f"{case}: {arm}"] = {
                "without": [study.pass_at_1(arm, case, seed) for seed in range(seeds)],
                "with": [run.result().after.metrics["pass_at_1"] for run in runs],
            }
    return found


def _numbers(result: ArmResult, metric: str) -> dict[str, Any]:
    values = result.after(metric)
    return {"mean": mean(values), "sd": spread(values) if len(values) > 1 else None, "seeds": values}


def _difference(a: ArmResult, b: ArmResult) -> Difference:
    return paired_difference(a.counts("pass_at_1"), b.counts("pass_at_1"))


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
    sys.exit(main())
