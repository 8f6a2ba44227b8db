"""Results of a comparison: means, spreads and differences of the arms, read from the files of their runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from creditflow._utils.files import json_ready
from creditflow._utils.intervals import Difference, paired_difference
from creditflow.credit.records import compared_rules
from creditflow.monitoring.evaluation import Evaluation
from creditflow.runs.run_folder import read_metrics

METRICS = ("pass_at_1", "pass_at_1_greedy", "step_error_rate")
"""Metrics of an evaluation that benchmarks record."""
COMPARED = dict(zip(METRICS, ("pass@1", "greedy pass@1", "step error rate"), strict=True)) | {
    "outcome_mean": "outcome, mean",
    "sub_reward": "mean sub-reward",
}
"""Metrics that are compared, with their titles. `sub_reward` is the mean over agents."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One finished run: one arm, one seed."""

    after: Evaluation
    train_pass_at_1: list[float]
    """Value at each training step, from step 1."""
    seconds: float
    """Wall clock of the training steps, evaluation not included."""

    @classmethod
    def read(cls, folder: Path) -> RunResult:
        """Read a run's folder."""
        path = folder / "evaluation.json"
        steps = [row for row in read_metrics(folder) if row["step"] > 0]
        return cls(
            after=Evaluation.from_json(path.read_text(), str(path)),
            train_pass_at_1=[_number(row.get("train/pass_at_1")) for row in steps],
            seconds=sum(_number(row.get("timing/step_s", 0.0)) for row in steps),
        )


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm, with one run per seed; every arm has the same seeds in the same order."""

    name: str
    before: list[Evaluation]
    """Evaluations of the initial model, one per seed, since the seed determines the samples."""
    runs: list[RunResult]

    def before_mean(self, metric: str) -> float:
        """Mean of a metric over seeds, before training."""
        return float(np.mean([_value(evaluation, metric) for evaluation in self.before]))

    def after(self, metric: str) -> list[float]:
        """A metric after training, by seed."""
        return [_value(run.after, metric) for run in self.runs]


def _value(evaluation: Evaluation, metric: str) -> float:
    """A metric of an evaluation; NaN without it."""
    if metric == "sub_reward":
        of_agents = [value for key, value in evaluation.metrics.items() if re.fullmatch("sub_reward/[^/]+", key)]
        return float(np.mean(of_agents or [math.nan]))
    return evaluation.metrics.get(metric, math.nan)


@dataclass(frozen=True, slots=True)
class ArmDifference:
    """Difference of one arm's final metrics to another's."""

    name: str
    against: str
    by_metric: dict[str, Difference]


def differences(arms: Sequence[ArmResult]) -> list[ArmDifference]:
    """Differences of every arm to the baseline, then of the last two compared rules to earlier ones.

    Without an arm of the baseline rule, the first arm is the baseline. Pairs whose arms are missing are left out.
    """
    by_name = {arm.name: arm for arm in arms}
    first, *others = compared_rules()
    baseline = first if first in by_name else arms[0].name
    pairs = [(name, baseline) for name in by_name if name != baseline]
    further = [(later, other) for later in others[-2:] for other in others[: others.index(later)]]
    pairs += [pair for pair in further if set(pair) <= set(by_name) and pair not in pairs]
    return [
        ArmDifference(a.name, b.name, {of: paired_difference(a.after(of), b.after(of)) for of in COMPARED})
        for a, b in ((by_name[name], by_name[against]) for name, against in pairs)
    ]


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds (n - 1 in the denominator); NaN for one value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def summary(vary: str, arms: Sequence[ArmResult], pairs: Sequence[ArmDifference]) -> dict[str, Any]:
    """The content of `comparison.json`. Non-finite numbers (the spread of one value) are null."""
    content = {
        "vary": vary,
        "values": {
            arm.name: {
                metric: {
                    "before": arm.before_mean(metric),
                    "after": {
                        "mean": float(np.mean(arm.after(metric))),
                        "std": spread(arm.after(metric)),
                        "seeds": arm.after(metric),
                    },
                }
                for metric in COMPARED
            }
            for arm in arms
        },
        "differences": [
            {
                "value": difference.name,
                "against": difference.against,
                **{metric: {"mean": d.mean, "interval": _interval(d)} for metric, d in difference.by_metric.items()},
            }
            for difference in pairs
        ],
    }
    return dict(json_ready(content))


def _interval(difference: Difference) -> list[float] | None:
    return None if math.isnan(difference.low) else [difference.low, difference.high]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
