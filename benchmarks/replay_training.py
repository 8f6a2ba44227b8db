"""Replay credit against the outcome alone in training: `python -m benchmarks.replay_training [--minutes M] [--quick]`.

`arithmetic_chain` without scores, 48 training steps of 8 tasks, on the team of the recipe and on one that repairs 30 %
of its errors. `identical` has 8 rollouts of a task, replay 5 rollouts with 3 branches each: about equal tokens. Each
rule has the best of four learning rates, chosen on both teams with a separate seed and separate tasks.

Finished runs are found again in `runs/replay_training/`; results are kept by seed in `docs/results/replay_training/`.
Writes `docs/results/replay_training.json`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import fmean

from benchmarks import study
from benchmarks.credit_rules import BASELINE, BRANCHING, CASES, MEASURES, SEEDS, Board, Team, best
from benchmarks.record import RESULTS, Figure, exit_with, show, write
from benchmarks.sources import Work

REPLAY = next(iter(BRANCHING))
TEAMS = {
    "no repairs": CASES["outcome only"],
    "repairs": (study.rewards((0, 0, 0)), "team.workflow='benchmarks/cases.py:solve_repaired'"),
}
TEAM = Team(RESULTS / "replay_training", cases=TEAMS, tuning_cases=tuple(TEAMS))


def figures(board: Board) -> list[Figure]:
    """For each team, the difference in pass@1 and the ratio of tokens, as means over seeds."""
    made = []
    for team in TEAMS:
        pairs = [
            (one[BASELINE], one[REPLAY]) for seed in board.seeds if len(one := board.results(seed).get(team, {})) == 2
        ]
        if len(pairs) < len(board.seeds):
            continue
        plain, replay = zip(*pairs, strict=True)
        above = study.difference(replay, plain)
        for rule, runs in ((BASELINE, plain), (REPLAY, replay)):
            made.append(Figure(f"{team}: pass@1, {rule}", 100 * fmean(one["pass_at_1"] for one in runs), unit="%"))
        spread = (100 * above.low, 100 * above.high)
        made.append(Figure(f"{team}: replay - identical (95 %)", 100 * above.mean, unit="points", spread=spread))
        ratio = fmean(after["tokens"] / before["tokens"] for before, after in pairs)
        made.append(Figure(f"{team}: tokens, replay / identical", ratio, unit="x"))
    return made


def main() -> int:
    """Do the missing runs, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--quick", action="store_true", help="one training step: shows that it runs, proves nothing")
    given = parser.parse_args()
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    work = Work.begin("replay_training", MEASURES, quick=given.quick)
    rules = (BASELINE, REPLAY)
    board = Board(work.folder, TEAM, rules, range(SEEDS))
    if given.quick:
        short = ("trainer.total_training_steps=1", "data.val_max_samples=8")
        team = replace(TEAM, kept=work.folder / "results", rates=TEAM.rates[:1])
        board = Board(work.folder, team, rules, range(1), short)
    tuned = board.tune(until)
    board.train({rule: best(tuned[rule]) for rule in rules if rule in tuned}, until, tuple(TEAMS))
    found = figures(board)
    short_of = show(found)
    if not given.quick and len(found) == 4 * len(TEAMS):
        write("replay_training", found, ("creditflow", "torch"), work.measured, {"rates": board.tuned()})
    return int(short_of)


if __name__ == "__main__":
    exit_with(main)
