"""One validation task before and after training, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from creditflow.monitoring.evaluation import Example
from creditflow.reports.text import aligned, number, plain
from creditflow.studies.comparison.results import ArmResult

_WIDTH = 100
"""Characters of a response on its line."""


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
    lines = [f"validation task {(k or 0) + 1}, the first {reason}, decoded greedily", f"  {plain(old.task, _WIDTH)}"]
    for title, example in (("before training", old), (f"after training, {best.name}", new)):
        outcome = "no outcome" if example.outcome is None else f"outcome {number(example.outcome, 2)}"
        lines += [f"{title}: {outcome}", *_step_lines(example)]
    return lines


def _step_lines(example: Example) -> Iterator[str]:
    if not example.steps:
        return
    rows = [
        ("", step.agent, "-" if step.sub_reward is None else number(step.sub_reward, 2), plain(step.response, _WIDTH))
        for step in example.steps
    ]
    yield from aligned([("", "agent", "sub-reward", "response"), *rows], left={1})
