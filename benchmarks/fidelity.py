"""Fidelity of each rule's credit: `python -m benchmarks.fidelity [--quick] [--table]`.

Takes the batches of `benchmarks.credit_signal`, and samples them if they do not exist. In the last 16 batches of each
team, 1,200 decisions are measured: continuations with the decision kept, and with it sampled anew, by other seeds.
Cases that differ in scores alone have the same trajectories, so they share these values. The fidelity of a rule is the
rank correlation of its advantages with them; thresholds and fitted parts adapt over the 24 batches before, as in
training.
Writes to `runs/fidelity/` and reuses what it finds there. No targets: it is a measurement.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks import credit_signal
from benchmarks.credit_signal import REALISTIC, Measurements
from benchmarks.record import MISSED, RESULTS, ROOT, Figure, exit_with, fill_page, quick_parser, write
from benchmarks.recordings import LAST_BATCHES, CreditedBatches, Recording, recipe_of, team_of
from benchmarks.sources import TRAINING, Work
from benchmarks.studies import CHAIN_CASES, OWN
from creditflow._utils.files import json_ready, write_whole
from creditflow.config import credit_options, trained_agents
from creditflow.credit import assign
from creditflow.data import Bools, Floats, TrajectoryBatch
from creditflow.engines.common.components import build_components
from creditflow.engines.local.decisions import (
    DECISION_AUDIT,
    MeasuringRollouts,
    choose_decisions,
    measure_decisions,
)
from creditflow.engines.local.fidelity import decision_candidates
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.values import DecisionValues, Share, fidelity, leave_one_out, spearman

MEASURES = (
    *TRAINING,
    "src/creditflow/engines/local/values.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
    "benchmarks/cases.py",
    "benchmarks/studies.py",
    "benchmarks/credit_signal.py",
    "benchmarks/fidelity.py",
    "benchmarks/recordings.py",
)
PAGE, COMMAND = ROOT / "docs" / "benchmarks" / "which_credit.md", "python -m benchmarks.fidelity"
DECISIONS, CONTINUATIONS = 1200, 8
MOST_LOST = 0.01
"""The largest share of continuations without a return; they would bias the values."""


def measure_values(
    team: str, batches: Sequence[TrajectoryBatch], decisions: int, continuations: int, file: Path
) -> None:
    """Measure decisions of a team's batches, under the policy that sampled them, and write them to `file`."""
    torch.set_num_threads(1)
    recipe = recipe_of(team)
    components, policies = build_components(recipe), PolicySet.for_rollouts(recipe)
    trajectories = [one for batch in batches for one in batch.to_trajectories()]
    whole = TrajectoryBatch.from_trajectories(trajectories)
    by_outcome = assign(whole, credit_options(propagation="identical"))
    candidate_S = decision_candidates(by_outcome, trained_agents(recipe.config))
    rng = np.random.default_rng(0)
    chosen = choose_decisions(whole, candidate_S, continuations, decisions, math.inf, rng)

    async def measure() -> Any:
        async with components.rewards.open(policies.policies):
            rollouts = MeasuringRollouts(components, policies)
            return await measure_decisions(rollouts, whole, trajectories, chosen, continuations, (DECISION_AUDIT, 0))

    found = asyncio.run(measure())
    if (lost := found.refused + found.failed) > MOST_LOST * found.continuations:
        raise RuntimeError(
            f"{team}: {lost} of {found.continuations} continuations have no return: "
            f"{found.first_refusal or found.first_failure}"
        )
    counts = {name: getattr(found, name) for name in ("tokens", "continuations", "refused", "failed")}

    def save(part: Path) -> None:
        with part.open("wb") as out:
            np.savez(out, step_D=chosen.step_D, batches=_digest(batches), **asdict(found.values), **counts)

    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save)


def _digest(batches: Sequence[TrajectoryBatch]) -> int:
    """A checksum of the responses."""
    return zlib.crc32(b"".join(np.ascontiguousarray(batch.response_ids).tobytes() for batch in batches))


def values_of(
    recordings: Mapping[str, Recording], decisions: int, continuations: int, folder: Path
) -> dict[str, Mapping[str, Any]]:
    """The measured values of each team, each team in a process. Reuses the files in `folder`.

    Raises SystemExit if they were measured on other batches.
    """
    files = {team: folder / f"{team}.npz" for team in dict.fromkeys(map(team_of, recordings))}
    with ProcessPoolExecutor(len(files), get_context("spawn")) as pool:
        for one in [
            pool.submit(measure_values, team, recordings[team].batches[-LAST_BATCHES:], decisions, continuations, file)
            for team, file in files.items()
            if not file.exists()
        ]:
            one.result()
    values = {team: np.load(file) for team, file in files.items()}
    for team, found in values.items():
        if int(found["batches"]) != _digest(recordings[team].batches[-LAST_BATCHES:]):
            raise SystemExit(f"error: {files[team]}: measured on other batches: remove it to measure again")
    return values


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The table of the page: fidelity of advantages in percent, with half of its 95 % interval.

    Bold or italic if it is above or below that of `own` by a difference whose interval excludes 0.
    """
    lines = [f"| rule | {' | '.join(CHAIN_CASES)} |", f"|{' --- |' * (len(CHAIN_CASES) + 1)}"]
    for rule in results[next(iter(CHAIN_CASES))]["rules"]:
        cells = [results[case]["rules"][rule] for case in CHAIN_CASES]
        lines.append(f"| {rule} | {' | '.join(_emphasis(one) + _cell(one) + _emphasis(one) for one in cells)} |")
    ceilings = [_cell(results[case]["ceiling"]) for case in CHAIN_CASES]
    return [*lines, f"| *noise ceiling* | {' | '.join(ceilings)} |"]


def _emphasis(one: Mapping[str, Any]) -> str:
    """The mark of a cell that differs from own + outcome."""
    low, high = (one["above_own"][end] or 0.0 for end in ("low", "high"))
    return "**" if low > 0 else "*" if high < 0 else ""


def _cell(one: Mapping[str, float | None]) -> str:
    value, low, high = one["value"], one["low"], one["high"]
    if value is None or low is None or high is None:
        return "none"
    return f"{100 * value:.0f} ± {50 * (high - low):.0f}"


def main() -> int:
    """Measure missing values; write the result file and the page's table."""
    parser = quick_parser(__doc__, "three batches, eight decisions: shows that it runs")
    parser.add_argument("--table", action="store_true", help="write the page's table from the committed result file")
    given = parser.parse_args()
    if given.table:
        fill_page(PAGE, COMMAND, table_lines(json.loads((RESULTS / "fidelity.json").read_text())["results"]))
        return 0
    torch.set_num_threads(1)
    began = time.monotonic()
    work = Work.begin("fidelity", MEASURES, quick=given.quick)
    recorded = Work.begin(credit_signal.NAME, credit_signal.MEASURES, quick=given.quick)
    hashes = {**work.measured, **recorded.measured}
    if any(hashes[file] != of for file, of in work.measured.items()):
        raise SystemExit(f"error: {work.folder} is of other code than {recorded.folder}: remove it to measure again")
    measured = Measurements.take(recorded, quick=given.quick)
    values = values_of(measured.recordings, *((8, 2) if given.quick else (DECISIONS, CONTINUATIONS)), work.folder)
    details = {case: _details(measured.credit, case, values[team_of(case)]) for case in CHAIN_CASES}
    lines = table_lines(json_ready(details))
    print(*lines, sep="\n")
    if not given.quick:
        figures = [
            Figure(
                f"{rule}: fidelity of advantages, mean over the cases but exact",
                fmean(details[case]["rules"][rule]["value"] for case in REALISTIC),
            )
            for rule in measured.credit
        ]
        seconds = time.monotonic() - began  # less if a part was kept
        facts = {"batches": LAST_BATCHES, "seconds": seconds, "results": details}
        write("fidelity", figures, ("creditflow", "torch", "numpy"), hashes, facts)
        fill_page(PAGE, COMMAND, lines)
    print(f"{MISSED}: 0 of 0")
    return 0


def _details(
    credited: Mapping[str, Mapping[str, CreditedBatches]], case: str, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """The kept numbers of one case."""
    values, step_D = DecisionValues(measured["task_D"], measured["after_DK"], measured["before_DK"]), measured["step_D"]
    credit = {rule: by_case[case].advantage_S[step_D] for rule, by_case in credited.items()}
    whole = fidelity(credit[OWN], values)
    known_D = np.isfinite(values.value_D)
    return {
        "rules": {
            name: {
                **asdict(_compared(values, known_D, credit_D)),
                "above_own": asdict(_compared(values, known_D, credit_D, credit[OWN])),
                "decisions": int((known_D & np.isfinite(credit_D)).sum()),
            }
            for name, credit_D in credit.items()
        },
        "ceiling": asdict(whole.ceiling),
        "decisions": whole.decisions,
        **{name: int(measured[name]) for name in ("tokens", "continuations", "refused", "failed")},
    }


def _compared(values: DecisionValues, known_D: Bools, credit_D: Floats, own_D: Floats | None = None) -> Share:
    """The fidelity of a rule, less that of `own` (`own_D`), on the decisions that the rule trains on, or both.

    `known_D`: the decisions with a value.
    """
    sides = [credit_D] if own_D is None else [credit_D, own_D]
    at_D = known_D & np.all(np.isfinite(sides), axis=0)
    if not at_D.any():
        return Share()
    task_D, value_D = values.task_D[at_D], values.value_D[at_D]
    weight_RD = leave_one_out(task_D)
    found_R, *other_R = (spearman(side_D[at_D], value_D, weight_RD) for side_D in sides)
    return Share.from_jackknife(found_R - other_R[0] if other_R else found_R)


if __name__ == "__main__":
    exit_with(main)
