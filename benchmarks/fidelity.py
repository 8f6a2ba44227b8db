"""Fidelity of each rule's credit: `python -m benchmarks.fidelity [--quick] [--table]`.

Takes the batches of `benchmarks.credit_signal`, and samples the missing ones. In the last 16 batches of each team,
1,600 decisions are measured: continuations with the decision kept, and with it sampled anew, by other seeds. Cases that
differ in scores alone have the same trajectories, so they share these values. The fidelity of a rule is the rank
correlation of its advantages with them; thresholds and fitted parts adapt over the 32 batches before, as in training.
Writes to `runs/fidelity/` and reuses what it finds there. No targets: it is a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.credit_rules import CASES, REALISTIC, RULES
from benchmarks.credit_signal import (
    BATCHES,
    FOLDER,
    INVERTED,
    Recording,
    assignments,
    options_of,
    recipe_of,
    record,
    team_of,
)
from benchmarks.record import MISSED, RESULTS, ROOT, Figure, exit_with, fill_page, write
from benchmarks.sources import TRAINING, Work
from creditflow._utils.files import alone_in, write_whole
from creditflow._utils.progress import Reporter
from creditflow.config import trained_agents
from creditflow.credit import CreditOptions, assign
from creditflow.credit.analysis.fidelity import DecisionValues, Fidelity, Share, fidelity
from creditflow.data import Floats, TrajectoryBatch
from creditflow.engines.common.components import build_components
from creditflow.engines.local.decisions import DECISION_AUDIT, choose_decisions, measure_decisions, workflow_branch
from creditflow.engines.local.fidelity import decision_candidates
from creditflow.engines.local.outcomes import MeasuringRollouts
from creditflow.engines.local.policy_set import PolicySet

MEASURES = (
    *TRAINING,
    "src/creditflow/credit/analysis/fidelity.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
    "benchmarks/cases.py",
    "benchmarks/credit_rules.py",
    "benchmarks/credit_signal.py",
)
PAGE, COMMAND = ROOT / "docs" / "benchmarks" / "credit_rules.md", "python -m benchmarks.fidelity"
LAST, DECISIONS, CONTINUATIONS = 16, 1600, 8


def measure_values(
    team: str, batches: Sequence[TrajectoryBatch], decisions: int, continuations: int, file: Path
) -> None:
    """Measure decisions of a team's batches, under the policy that sampled them, and write them to `file`."""
    torch.set_num_threads(1)
    recipe = recipe_of(team)
    components, policies = build_components(recipe), PolicySet.for_rollouts(recipe)
    trajectories = [one for batch in batches for one in batch.to_trajectories()]
    whole = TrajectoryBatch.from_trajectories(trajectories)
    outcome_alone = assign(whole, CreditOptions(propagation="identical"))
    candidate_S = decision_candidates(outcome_alone, trained_agents(recipe.config))
    rng = np.random.default_rng(0)
    chosen = choose_decisions(whole, candidate_S, continuations, decisions, math.inf, rng)

    async def measure() -> Any:
        async with components.rewards.open(policies.policies):
            rollouts = MeasuringRollouts(components, policies, {})
            branch = workflow_branch(components, rollouts)
            return await measure_decisions(
                components, rollouts, branch, whole, trajectories, chosen, continuations, (DECISION_AUDIT, 0)
            )

    found = asyncio.run(measure())
    counts = {name: getattr(found, name) for name in ("tokens", "continuations", "refused", "failed")}

    def save(part: Path) -> None:
        with part.open("wb") as out:
            np.savez(out, step_D=chosen.step_D, **asdict(found.values), **counts)

    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save)


def values_of(
    recordings: Mapping[str, Recording], decisions: int, continuations: int, folder: Path
) -> dict[str, Mapping[str, Any]]:
    """The measured values of each team, each team in a process; those in `folder` are used again."""
    files = {team: folder / f"{team}.npz" for team in dict.fromkeys(map(team_of, recordings))}
    with ProcessPoolExecutor(len(files), get_context("spawn")) as pool:
        for one in [
            pool.submit(measure_values, team, recordings[team].batches[-LAST:], decisions, continuations, file)
            for team, file in files.items()
            if not file.exists()
        ]:
            one.result()
    return {team: np.load(file) for team, file in files.items()}


def advantages(recording: Recording, options: CreditOptions) -> Floats:
    """[S] the advantages of the last batches' steps; NaN for steps that the rule does not train."""
    last = islice(assignments(recording, options), max(len(recording.batches) - LAST, 0), None)
    return np.concatenate([np.where(one.trained_S, one.advantage_S, np.nan) for one in last])


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The table of the page: fidelity of advantages in percent, with half of its 95 % interval."""
    lines = [f"| rule | {' | '.join(CASES)} |", f"|{' --- |' * (len(CASES) + 1)}"]
    for rule in RULES:
        if not all(rule in results[case]["rules"] for case in CASES):
            continue  # added after the last measurement
        cells = [results[case]["rules"][rule] for case in CASES]
        lines.append(f"| {rule} | {' | '.join(_cell(one) for one in cells)} |")
    ceilings = [_cell(results[case]["ceiling"]) for case in CASES]
    return [*lines, f"| *noise ceiling* | {' | '.join(ceilings)} |"]


def _cell(one: Mapping[str, float | None]) -> str:
    value, low, high = one["value"], one["low"], one["high"]
    if value is None or low is None or high is None:
        return "none"
    return f"{100 * value:.0f} ± {50 * (high - low):.0f}"


def main() -> int:
    """Measure what is missing; write the result file and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three batches, eight decisions: shows that it runs")
    parser.add_argument("--table", action="store_true", help="write the page's table from the committed result file")
    given = parser.parse_args()
    if given.table:
        fill_page(PAGE, COMMAND, table_lines(json.loads((RESULTS / "fidelity.json").read_text())["results"]))
        return 0
    torch.set_num_threads(1)
    began = time.monotonic()
    work = Work.begin("fidelity", MEASURES, quick=given.quick)
    folder = FOLDER.with_name("credit_signal-quick") if given.quick else FOLDER
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(folder.parent, SystemExit(f"error: {folder}: another process records there")):
        recordings = record(tuple(CASES), 3 if given.quick else BATCHES, folder, Reporter())
    values = values_of(recordings, *((8, 2) if given.quick else (DECISIONS, CONTINUATIONS)), work.folder)
    details = {case: _details(recordings[case], case, values[team_of(case)]) for case in CASES}
    for line in table_lines(details):
        print(line)
    if not given.quick:
        figures = [
            Figure(
                f"{rule}: fidelity of advantages, mean over the cases but exact",
                sum(details[case]["rules"][rule]["value"] or 0.0 for case in REALISTIC) / len(REALISTIC),
            )
            for rule in RULES
        ]
        seconds = time.monotonic() - began  # less if a part was kept
        facts = {"batches": LAST, "inverted": INVERTED, "seconds": seconds, "results": details}
        write("fidelity", figures, ("creditflow", "torch", "numpy"), work.measured, facts)
        fill_page(PAGE, COMMAND, table_lines(details))
    print(f"{MISSED}: 0 of 0")
    return 0


def _details(recording: Recording, case: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The kept numbers of one case."""
    values = DecisionValues(measured["task_D"], measured["after_DK"], measured["before_DK"])
    found: dict[str, Fidelity] = {
        name: fidelity(advantages(recording, options_of(case, overrides))[measured["step_D"]], values)
        for name, overrides in RULES.items()
    }
    whole, precision = found[next(iter(RULES))], values.precision
    return {
        "rules": {name: _known(one.correlation) | {"decisions": one.decisions} for name, one in found.items()},
        "ceiling": _known(whole.ceiling),
        "reliability": None if precision is None else precision.reliability,
        "decisions": whole.decisions,
        **{name: int(measured[name]) for name in ("tokens", "continuations", "refused", "failed")},
    }


def _known(share: Share) -> dict[str, float | None]:
    """The share and its interval as JSON, which has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(share).items()}


if __name__ == "__main__":
    exit_with(main)
