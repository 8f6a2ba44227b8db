"""Signal and noise of the policy gradient under rules of credit: `python -m benchmarks.credit_signal [--quick]`.

`arithmetic_chain` with its initial model samples many batches of 8 tasks and 8 rollouts. Every case scores the same
batches; every rule then assigns credit to them. No policy is trained, so that a rule costs seconds.

With g_b the gradient that a rule makes of batch b, and J the expected outcome,

    efficiency = (mean of g_b . grad J)^2 / (mean of |g_b|^2 * |grad J|^2)

is the share of the largest gain that one gradient step can make along grad J, if the step size is the best for the rule
and the curvature is the same in all directions: for small values it is the signal-to-noise ratio |mean|^2 / variance of
an unbiased rule. A bias counts as noise. grad J is estimated from the right and wrong steps of later batches than g_b,
which no fitted part of the rule has read (`true_gradients`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
import torch

from benchmarks.record import MISSED, RESULTS, ROOT, Figure, exit_with, fill_page, quick_parser, write
from benchmarks.recordings import BATCHES, CreditedBatches, Recording, credit_all, record, summed, team_of
from benchmarks.sources import TRAINING, Work
from benchmarks.studies import CHAIN_CASES, OWN
from creditflow._utils.files import alone_in
from creditflow.data import Floats, Ints, TrajectoryBatch

MEASURES = (
    *TRAINING,
    "benchmarks/cases.py",
    "benchmarks/studies.py",
    "benchmarks/credit_signal.py",
    "benchmarks/recordings.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
)
PAGE, COMMAND = ROOT / "docs" / "benchmarks" / "which_credit.md", "python -m benchmarks.credit_signal"
NAME = "credit_signal"
REALISTIC = tuple(case for case in CHAIN_CASES if case != "exact")


@dataclass(frozen=True)
class Measurements:
    """The recorded batches, and the credit that every rule assigns to them."""

    recordings: Mapping[str, Recording]
    credit: Mapping[str, Mapping[str, CreditedBatches]]
    """Credit for each rule and case."""

    @classmethod
    def take(cls, work: Work, *, quick: bool) -> Measurements:
        """Sample the missing batches and credit all. The folder of `work` keeps finished parts.

        `quick`: three batches.
        """
        folder, batches = work.folder, 3 if quick else BATCHES
        with alone_in(folder.parent, RuntimeError(f"{folder}: another process records there")):
            return cls(record(folder, batches), credit_all(folder, batches))


@dataclass(frozen=True)
class Signal:
    """The efficiency of a rule in a case, with its standard error."""

    efficiency: float
    error: float


def true_gradients(recording: Recording, scored: Recording) -> Floats:
    """[B, D] an estimate of grad J from each batch: a step gets its agent's slope * (right - share of right steps).

    The slope is that of the outcome on whether a step is right, over all batches: the part of the outcome that the step
    decides. The rest of the outcome, which other steps decide, would be noise. `scored`: the same steps with exact
    scores; a step is right if its score is 1.
    """
    agent, right, outcome = (
        np.concatenate(parts) for parts in zip(*(_rightness(batch) for batch in scored.batches), strict=True)
    )
    advantage = np.zeros_like(right)
    for a in np.unique(agent):
        of_agent = agent == a
        above = right[of_agent] - right[of_agent].mean()
        if above.any():
            advantage[of_agent] = above * (above @ outcome[of_agent]) / (above @ above)
    ends = np.cumsum([batch.n_steps for batch in scored.batches])[:-1]
    parts = zip(np.split(advantage, ends), recording.sketches, recording.batches, strict=True)
    return np.array([summed(of_batch, sketch_SD) / batch.n_trajectories for of_batch, sketch_SD, batch in parts])


def _rightness(batch: TrajectoryBatch) -> tuple[Ints, Floats, Floats]:
    """[S] agent, 1.0 for a right step, and outcome."""
    right_S = np.nan_to_num(batch.scores, nan=0.0).max(axis=1) == 1.0
    return batch.agent_of_step, right_S.astype(float), batch.outcome[batch.trajectory_of_step]


def efficiency(gradient_BD: Floats, true_BD: Floats) -> Signal:
    """The efficiency of a rule's gradients, with a jackknife error over batches.

    `gradient_BD`, `true_BD`: [B, D] the gradient of each batch under the rule, and the estimate of grad J from it.
    Every batch but the last, which has no later one, has the same weight, since rules that learn change meanwhile. A
    rule that pays nothing has the efficiency 0.
    """
    if not gradient_BD.any():
        return Signal(0.0, 0.0)
    along_BB, squares_B, true_BB = gradient_BD @ true_BD.T, (gradient_BD**2).sum(axis=1), true_BD @ true_BD.T
    n = len(squares_B)

    def over(kept: np.ndarray) -> float:
        along, true = (_mean_of_later(matrix[np.ix_(kept, kept)]) for matrix in (along_BB, true_BB))
        return float(np.sign(along) * along**2 / (squares_B[kept[:-1]].mean() * true))

    whole = over(np.arange(n))
    left_out = np.array([over(np.delete(np.arange(n), b)) for b in range(n)])
    return Signal(whole, float(np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())))


def _mean_of_later(product_BB: Floats) -> float:
    """The mean product of each batch (row) with the estimates of later batches (columns), averaged over batches."""
    later_BB = np.triu(np.ones_like(product_BB), 1)[:-1]
    return float(((product_BB[:-1] * later_BB).sum(axis=1) / later_BB.sum(axis=1)).mean())


def main() -> int:
    """Record the missing batches, measure every rule in every case, print and write the table."""
    parser = quick_parser(__doc__, "three batches: shows that it runs, proves nothing")
    parser.add_argument("--table", action="store_true", help="write the page's table from the committed result file")
    given = parser.parse_args()
    if given.table:
        fill_page(PAGE, COMMAND, table_lines(json.loads((RESULTS / "credit_signal.json").read_text())["results"]))
        return 0
    torch.set_num_threads(1)
    began = time.monotonic()
    work = Work.begin(NAME, MEASURES, quick=given.quick)
    measured = Measurements.take(work, quick=given.quick)
    recordings = measured.recordings
    true_BD = {case: true_gradients(one, recordings[team_of(case)]) for case, one in recordings.items()}
    found = {
        rule: {case: asdict(efficiency(by_case[case].gradient_BD, true_BD[case])) for case in CHAIN_CASES}
        for rule, by_case in measured.credit.items()
    }
    print(*table_lines(found), sep="\n")
    if not given.quick:
        what = "efficiency relative to own, mean over the cases but exact"
        figures = [Figure(f"{rule}: {what}", relative_efficiency(of, found[OWN])) for rule, of in found.items()]
        facts = {"batches": BATCHES, "seconds": time.monotonic() - began, "results": found}
        write("credit_signal", figures, ("creditflow", "torch", "numpy"), work.measured, facts)
        fill_page(PAGE, COMMAND, table_lines(found))
    print(f"{MISSED}: 0 of 0")
    return 0


def table_lines(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """The table of the page, from the results of the result file."""
    lines = [f"| rule | {' | '.join(CHAIN_CASES)} | relative |", f"|{' --- |' * (len(CHAIN_CASES) + 2)}"]
    for rule, of in results.items():
        cells = [f"{100 * of[case]['efficiency']:.1f} ± {100 * of[case]['error']:.1f}" for case in CHAIN_CASES]
        lines.append(f"| {rule} | {' | '.join(cells)} | {relative_efficiency(of, results[OWN]):.2f} |")
    return lines


def relative_efficiency(of_rule: Mapping[str, Mapping[str, float]], of_own: Mapping[str, Mapping[str, float]]) -> float:
    """The mean over the realistic cases of a rule's efficiency relative to that of own + outcome."""
    return fmean(of_rule[case]["efficiency"] / of_own[case]["efficiency"] for case in REALISTIC)


if __name__ == "__main__":
    exit_with(main)
