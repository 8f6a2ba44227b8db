"""Tables and examples of results for the terminal. Computes nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from creditflow._utils.intervals import COVERAGE, LEAST_SEEDS, Difference
from creditflow.credit.analysis.difference import CreditChange
from creditflow.monitoring.evaluation import Evaluation, Example
from creditflow.reports.text import aligned, counted, number, plain
from creditflow.studies.comparison.results import COMPARED, ArmDifference, ArmResult, spread

_WIDTH_OF_A_FILE = 160
"""Width in columns if standard output is not a terminal, so that tables are not folded to 80."""
_RESPONSE = 100
"""Characters of a response on its line."""


def results_console() -> Console:
    """Console on standard output, without markup, since names contain brackets and colons."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    return Console(width=width, highlight=False, markup=False, emoji=False)


def show(title: str, table: Table) -> None:
    """Print a table under its title; the table's `title` would be folded to the table's width."""
    console = results_console()
    console.print(f"\n{title}", style="bold", soft_wrap=True)
    console.print(table)


def new_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table with text in the first column and numbers in the others.

    Cells are texts, whole numbers, shown with commas, other numbers, shown with three digits, or None, a dash.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return plain(value)
    return f"{value:,}" if isinstance(value, Integral) else number(math.nan if value is None else value)


def comparison_title(subject: str, steps: Collection[int]) -> str:
    """The title of a comparison, with the number of training steps if it is the same in all arms."""
    if len(steps) > 1:
        return f"{subject}, before -> after training"
    return f"{subject}, before -> after {', '.join(counted(n, 'training step') for n in steps)}"


def comparison_table(arms: Sequence[ArmResult]) -> Table:
    """One row per arm: metrics before -> after training, and the training time."""
    rows = []
    for arm in arms:
        cells = [f"{number(arm.before_mean(metric))} -> {mean_and_spread(arm.after(metric))}" for metric in COMPARED]
        rows.append([arm.name, *cells, number(sum(run.seconds for run in arm.runs) / len(arm.runs), 0)])
    return new_table(("arm", *COMPARED.values(), "train seconds"), rows)


def difference_title(seeds: int) -> str:
    """The title of `difference_table`, with the source of its intervals."""
    if seeds < LEAST_SEEDS:
        return f"differences after training, without intervals: {counted(seeds, 'seed')}, {LEAST_SEEDS} are needed"
    return f"differences after training, with {COVERAGE:.0%} t intervals over {seeds} paired seeds"


def difference_table(differences: Sequence[ArmDifference]) -> Table:
    """One row per pair: the first arm's final metrics minus the second's, with intervals."""
    rows = [[f"{pair.name} - {pair.against}", *map(difference_cell, pair.by_metric.values())] for pair in differences]
    return new_table(("arm - arm", *COMPARED.values()), rows)


def difference_cell(difference: Difference) -> str:
    """A difference with its interval, such as `+0.100 [+0.020, +0.180]`, if it has one."""
    if math.isnan(difference.low):
        return number(difference.mean, signed=True)
    low, high = number(difference.low, signed=True), number(difference.high, signed=True)
    return f"{number(difference.mean, signed=True)} [{low}, {high}]"


def evaluation_table(evaluation: Evaluation, before: Mapping[str, Any] | None = None) -> Table:
    """One metric per row: pass rates, outcomes, step error rates, then metrics by agent.

    `before`: the same metrics before training, for a column of their own.
    """
    metrics = {**(before or {}), **evaluation.metrics}
    named = {"pass_at_1": "pass@1 (mean over trajectories)"}
    powers = {key: key.removeprefix("pass_at_") for key in metrics if key != "pass_at_1"}
    named |= {key: f"pass@{k}" for key, k in powers.items() if k.isdigit()}
    named |= {
        "pass_at_1_greedy": "pass@1, greedy",
        "outcome_mean": "outcome, mean",
        **({"unscored_frac": "trajectories without an outcome"} if metrics.get("unscored_frac") else {}),
        "step_error_rate": "step error rate",
        "step_error_rate_greedy": "step error rate, greedy",
    }
    for prefix, words in (("sub_reward/", "mean sub-reward"), ("step_error_rate/", "step error rate")):
        named |= {key: f"{words}, {key.removeprefix(prefix)}" for key in metrics if key.startswith(prefix)}
    columns = {"value": metrics} if before is None else {"before": before, "after": evaluation.metrics}
    rows = [(words, *(of.get(key) for of in columns.values())) for key, words in named.items() if key in metrics]
    return new_table(("measured", *columns), rows)


MOVED_MEANING = (
    "credit moved: sum of |new - old| / sum of (|new| + |old|) over steps that both train. 0 %: the same credit; "
    "100 %: nothing in common. signs flipped: share of those steps whose advantage changes its sign."
)


def moved_table(total: Mapping[str, CreditChange]) -> Table:
    """One row per agent and one for all. MOVED_MEANING defines the columns of shares.

    The column of gates is left out if none has changed, as for rules without gates.
    """
    every = sum(total.values(), CreditChange())
    gates = ("gates changed",) if every.gates else ()
    rows = []
    for agent, change in {**total, "all": every}.items():
        shares = ("-" if math.isnan(value) else f"{value:.1%}" for value in (change.share_moved, change.share_flipped))
        changed = (change.gates,) if gates else ()
        rows.append([agent, change.steps, *shares, *changed, change.masked, change.unmasked])
    return new_table(("agent", "steps", "credit moved", "signs flipped", *gates, "masked", "unmasked"), rows)


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean, with the standard deviation if there are several values."""
    mean = number(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ± {number(spread(values))}"


def example_lines(arms: Sequence[ArmResult]) -> list[str]:
    """The greedy trajectory of one task before training and after, in the arm with the highest pass@1, first seed.

    The first of the recorded tasks whose outcome has risen, else the first task; the title states which. Empty without
    recorded examples.
    """
    best = max(arms, key=lambda arm: sum(arm.after("pass_at_1")))
    before, after = best.before[0].examples, best.runs[0].after.examples
    pairs = list(zip(before, after, strict=False))
    if not pairs:
        return []
    rising = (k for k, (old, new) in enumerate(pairs) if (new.outcome or 0) > (old.outcome or 0))
    k = next(rising, None)
    reason = "whose outcome has risen" if k is not None else "(no outcome has risen)"
    old, new = pairs[k or 0]
    lines = [f"validation task {(k or 0) + 1}, the first {reason}, decoded greedily", f"  {plain(old.task, _RESPONSE)}"]
    for title, example in (("before training", old), (f"after training, {best.name}", new)):
        outcome = "no outcome" if example.outcome is None else f"outcome {number(example.outcome, 2)}"
        lines += [f"{title}: {outcome}", *_step_lines(example)]
    return lines


def _step_lines(example: Example) -> Iterator[str]:
    if not example.steps:
        return
    rows = [("", "agent", "sub-reward", "response")]
    for step in example.steps:
        score = "-" if step.sub_reward is None else number(step.sub_reward, 2)
        rows.append(("", plain(step.agent), score, plain(step.response, _RESPONSE)))
    yield from aligned(rows, left={1})
